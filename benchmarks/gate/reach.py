"""What the gate finds with one launch in each report, and what it leaves alone, on recorded launches; prints JSON.

    cd benchmarks/reports
    python ../gate/reach.py clock-7b-gpu-1.json.gz clock-7b-gpu-2.json.gz > ../gate/results/reach.json

Each recording has the launches of one GPU. Every launch is judged against every other one of its recording, and against
those of the other GPU, with the built-in policy; reports of 21 cases are made of copies of the recorded cases, whose
launches are drawn for each case. Slowdowns are injected into one case: a copy more in each MLP (its kernel with half a
percent of device time, and its op), or one percent more time of all kernels.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.gate import fixed_clock
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import device_passes_s
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.report.work import RankWork, WorkRow

_CASES = 21
_MLP, _COPY, _OP = "layers.*.mlp", "Memcpy DtoD (Device -> Device)", "aten::clone"
_LAYERS = 32

Change = Callable[[RankWork, Report, int], RankWork]


def main(arguments: Sequence[str]) -> int:
    """Print the scatter of device time, and the share of pairs with each result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs=2, help="recordings of the same cases on two GPUs")
    parser.add_argument("--trials", type=int, default=200, help="reports of 21 cases (200)")
    given = parser.parse_args(arguments)
    sessions = [file.load(path) for path in given.recordings]
    chance = random.Random(0)  # noqa: S311 - trials, repeated with the same numbers
    launches = [len(session.cases[0].launches) for session in sessions]
    same = [(0, one, 0, other) for one, other in itertools.permutations(range(launches[0]), 2)]
    other = [(0, one, 1, 0) for one in range(launches[0])] + [(1, 0, 0, one) for one in range(launches[0])]
    answer = {
        "recordings": [path.name for path in given.recordings],
        "launches": launches,
        "device_time": {case.id: _scatter(case) for case in sessions[0].cases},
        "same_gpu": {
            case.id: {
                "pairs": len(same),
                "equal_program": _share(sessions, same, case.id, None),
                "half_a_percent_in_a_copy": _share(sessions, same, case.id, _with_copies),
                "one_percent_of_all_kernels": _share(sessions, same, case.id, _all_slower),
            }
            for case in sessions[0].cases
        },
        "other_gpu": {
            case.id: {
                "pairs": len(other),
                "equal_program": _share(sessions, other, case.id, None),
                "half_a_percent_in_a_copy": _share(sessions, other, case.id, _with_copies),
            }
            for case in sessions[0].cases
        },
        "reports_of_21_cases": {
            "trials": given.trials,
            "equal_program": sum(_alarm(sessions[0], chance) for _ in range(given.trials)) / given.trials,
        },
    }
    json.dump(answer, sys.stdout, indent=1)
    print()
    return 0


def _scatter(case: CaseResult) -> dict[str, float]:
    """Return the deviation of device time between launches in percent, as measured and at a fixed clock."""
    passes = [fixed_clock.passes(rank, device_passes_s(rank)) for launch in case.launches for rank in launch.ranks]
    found = fixed_clock.fit(passes, passes[:1])
    return {
        "measured_pct": 100 * statistics.stdev(statistics.fmean(one.log_s for one in launch) for launch in passes),
        "fixed_clock_pct": 100 * statistics.stdev(found.samples.base),
        "slope": found.slope,
    }


def _share(
    sessions: Sequence[Report], pairs: Sequence[tuple[int, int, int, int]], name: str, change: Change | None
) -> dict[str, Any]:
    """Return the share of pairs of launches of a case that are REGRESSED, and that name the MLP or the copy."""
    regressed = named = 0
    for base_session, base, head_session, head in pairs:
        reports = [_of(sessions[base_session], name, base), _of(sessions[head_session], name, head)]
        if change is not None:
            reports[1] = _changed(reports[1], change)
        rows = [
            row for row in _rows(*reports) if row.metric in {"program", "device_time"} and row.verdict == "REGRESSED"
        ]
        regressed += bool(rows)
        named += any(_MLP in row.reason and _OP in row.reason for row in rows)
    return {"regressed": regressed / len(pairs), "named": named / len(pairs)}


def _rows(base: Report, head: Report) -> list[Row]:
    return judge(base, head, Policy(), today=datetime.date(2026, 1, 1)).rows


def _of(session: Report, name: str, launch: int) -> Report:
    """Return a report of one launch of one case."""
    (case,) = [one for one in session.cases if one.id == name]
    return msgspec.structs.replace(session, cases=[msgspec.structs.replace(case, launches=[case.launches[launch]])])


def _alarm(session: Report, chance: random.Random) -> bool:
    """Return whether a gated row is REGRESSED in a report of 21 cases of equal programs, with other launches each."""
    sides: tuple[list[CaseResult], list[CaseResult]] = ([], [])
    for number in range(_CASES):
        case = session.cases[number % len(session.cases)]
        drawn = chance.sample(case.launches, 2)
        for side, launch in zip(sides, drawn, strict=True):
            one = msgspec.structs.replace(case.case, batch_size=number + 1)
            side.append(msgspec.structs.replace(case, id=f"mp-bs{number + 1}", case=one, launches=[launch]))
    base, head = (msgspec.structs.replace(session, cases=side) for side in sides)
    return any(row.gated and row.verdict == "REGRESSED" for row in _rows(base, head))


def _changed(report: Report, change: Change) -> Report:
    """Return a report whose program changed."""
    names = [*report.environment.kernel_names, _COPY]
    environment = msgspec.structs.replace(report.environment, kernel_names=names)
    report = msgspec.structs.replace(report, environment=environment)
    (case,) = report.cases
    (launch,) = case.launches
    assert launch.work is not None
    ranks = [change(rank, report, len(launch.work.batches)) for rank in launch.work.ranks]
    launch = msgspec.structs.replace(launch, work=msgspec.structs.replace(launch.work, ranks=ranks))
    return msgspec.structs.replace(report, cases=[msgspec.structs.replace(case, launches=[launch])])


def _with_copies(rank: RankWork, report: Report, batches: int) -> RankWork:
    """Return a rank that copies the input of each MLP once more."""
    times_s = device_passes_s(rank)
    added_s = 0.005 * statistics.median(times_s)
    number = len(report.environment.kernel_names) - 1
    copies = {"kernel": number, "family": "copy"}
    rows = [
        WorkRow(module=None, calls=_LAYERS * batches, time_s=added_s, **copies),
        WorkRow(module=_MLP, calls=_LAYERS, time_s=added_s / batches, **copies),
    ]
    ops = {**(rank.ops_by_module or {})}
    ops[_MLP] = {**ops.get(_MLP, {}), _OP: _LAYERS}
    copy_s = [copy + 0.005 * total for copy, total in zip(rank.copy_s or (), times_s, strict=True)]
    return msgspec.structs.replace(rank, rows=[*(rank.rows or ()), *rows], ops_by_module=ops, copy_s=copy_s)


def _all_slower(rank: RankWork, _report: Report, _batches: int) -> RankWork:
    """Return a rank whose kernels and copies all take one percent longer."""
    slower = {name: [1.01 * one for one in getattr(rank, name) or ()] for name in ("device_time_s", "copy_s")}
    return msgspec.structs.replace(rank, **slower)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
