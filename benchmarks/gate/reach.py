"""What the gate finds with one launch in each report, and what it leaves alone, on recorded launches; prints JSON.

    cd benchmarks/reports
    python ../gate/reach.py clock-7b-gpu-*.json.gz own-kernel-7b-gpu-*.json.gz in-a-row-7b-gpu-*.json.gz \
        --slower own-kernel-7b-slower-*.json.gz > ../gate/results/reach.json

A recording has the launches of one GPU. Every launch is judged against every other one of the same cases, of its own
recording and of the others, with the built-in policy. Slowdowns are injected into one case: a copy more in each MLP
(its kernel with half a percent of device time, and its op), half a percent in the largest kernel, or one percent more
time of all kernels. In the launches of `--slower` one kernel was slower for real: `own_kernel.py` measured them.
Reports of 21 cases are made of copies of the recorded cases, whose launches are drawn for each case.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.gate import fixed_clock, program
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import device_passes_s
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.verdicts import Row, SlowerKernel
from pytest_llmgpu.report.work import RankWork, WorkRow

_CASES = 21
_MLP, _COPY, _OP = "layers.*.mlp", "Memcpy DtoD (Device -> Device)", "aten::clone"
_LAYERS = 32
_OWN = "spin_kernel"

Pair = tuple[Report, Report]
Change = Callable[[RankWork, Report, int], RankWork]


def main(arguments: Sequence[str]) -> int:
    """Print the scatter of device time, and the share of pairs with each result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+", help="recordings of one GPU each")
    parser.add_argument("--slower", type=Path, nargs="*", default=[], help="recordings with one slower kernel")
    parser.add_argument("--trials", type=int, default=200, help="reports of 21 cases of each recording (200)")
    parser.add_argument("--passes", type=int, help="use the first work passes alone, as if no others were run")
    given = parser.parse_args(arguments)
    sessions, slower = ({path: file.load(path) for path in paths} for paths in (given.recordings, given.slower))
    if given.passes is not None:
        for session in [*sessions.values(), *slower.values()]:
            _keep_passes(session, given.passes)
    chance = random.Random(0)  # noqa: S311 - trials, repeated with the same numbers
    drawn_from = [session for session in sessions.values() if len(session.cases[0].launches) > 1]
    answer: dict[str, Any] = {
        "launches": {path.name: len(one.cases[0].launches) for path, one in [*sessions.items(), *slower.items()]},
        "device_time": {
            path.name: {case.id: _scatter(case) for case in session.cases}
            for path, session in sessions.items()
            if session in drawn_from
        },
        "reports_of_21_cases": {
            "trials": given.trials * len(drawn_from),
            "equal_program": sum(_alarm(session, chance) for session in drawn_from for _ in range(given.trials)),
        },
    }
    for place, same in (("same_gpu", True), ("other_gpu", False)):
        equal = _pairs(sessions.values(), sessions.values(), same=same)
        real = _pairs(sessions.values(), slower.values(), same=same)
        answer[place] = {f"bs{size}": _figures(pairs, real[size]) for size, pairs in sorted(equal.items())}
    json.dump(answer, sys.stdout, indent=1)
    print()
    return 0


def _keep_passes(session: Report, passes: int) -> None:
    """Drop the later work passes of each launch."""
    for launch in (launch for case in session.cases for launch in case.launches if launch.work is not None):
        ranks = []
        for rank in launch.ranks:
            times = {name: (getattr(rank, name) or [])[:passes] for name in ("device_time_s", "copy_s", "idle_s")}
            clocks = None if rank.clock_ghz is None else [one[:passes] for one in rank.clock_ghz]
            rows = [msgspec.structs.replace(row, passes_s=(row.passes_s or [])[:passes]) for row in rank.rows or ()]
            ranks.append(msgspec.structs.replace(rank, **times, clock_ghz=clocks, rows=rows))
        launch.work = msgspec.structs.replace(launch.work, ranks=ranks, passes=passes)


def _scatter(case: CaseResult) -> dict[str, float]:
    """Return the deviation of device time between launches in percent, as measured and at a fixed clock."""
    passes = [
        fixed_clock.passes(fixed_clock.log_clocks(rank.clock_ghz), device_passes_s(rank))
        for launch in case.launches
        for rank in launch.ranks
    ]
    found = fixed_clock.fit(passes, passes[:1])
    return {
        "measured_pct": 100 * statistics.stdev(statistics.fmean(one.log_s for one in launch) for launch in passes),
        "fixed_clock_pct": 100 * statistics.stdev(found.samples.base),
        "slope": found.slope,
    }


def _pairs(bases: Iterable[Report], heads: Iterable[Report], *, same: bool) -> dict[int, list[Pair]]:
    """Return batch size to pairs of launches of the same case, as reports, on the same GPU or on different ones."""
    found: dict[int, list[Pair]] = defaultdict(list)
    for base, head in itertools.product(bases, heads):
        if (_gpus(base) == _gpus(head)) != same:
            continue
        for before, after in itertools.product(base.cases, head.cases):
            if before.id == after.id:
                found[before.case.batch_size] += [
                    (_of(base, before, one), _of(head, after, other))
                    for one, other in itertools.product(before.launches, after.launches)
                    if one is not other
                ]
    return found


def _gpus(session: Report) -> list[str]:
    """Return the GPUs of the ranks; a machine may have others."""
    return [uuid for rank in session.cases[0].launches[0].ranks for uuid in rank.uuids]


def _figures(equal: Sequence[Pair], slower: Sequence[Pair]) -> dict[str, Any]:
    """Return what is REGRESSED of pairs of equal programs, of those with an injected slowdown, and of real ones."""
    rows = [_rows(*pair) for pair in equal]
    real: dict[float, list[Pair]] = defaultdict(list)
    for pair in slower:
        real[round(100 * _kernels(*pair)[0].excess, 1)].append(pair)
    excess = [_kernels(*pair)[0].excess for pair in equal if _kernels(*pair)]
    return {
        "pairs": len(equal),
        "equal_program": _share(equal, None),
        "largest_change_pct": max(
            100 * abs(row.ratio - 1) for of in rows for row in of if row.metric == "device_time" and row.ratio
        ),
        "largest_kernel_pct": 100 * max(excess, default=0.0),
        "half_a_percent_in_a_copy": _share(equal, _with_copies),
        # Earlier recordings have no times of single passes.
        "half_a_percent_in_one_kernel": _share([pair for pair in equal if _kernels(*pair)], _one_slower, "kernel"),
        "one_percent_of_all_kernels": _share(equal, _all_slower),
        "slower_kernel": {
            f"+{added:.1f} %": {"pairs": len(pairs), **_share(pairs, None, _OWN)}
            for added, pairs in sorted(real.items())
        },
    }


def _kernels(base: Report, head: Report) -> list[SlowerKernel]:
    """Return how much longer each kernel takes than the others."""
    names = base.environment.kernel_names, head.environment.kernel_names
    return program.slower_kernels(program.pairs_of(base.cases[0], head.cases[0], names)[0])


def _share(pairs: Sequence[Pair], change: Change | None, name: str = _OP) -> dict[str, Any]:
    """Return the share of pairs whose program or device time is REGRESSED, and that name the op or the kernel."""
    regressed = named = 0
    for base, head in pairs:
        rows = [
            row
            for row in _rows(base, head if change is None else _changed(head, change))
            if row.metric in {"program", "device_time"} and row.verdict == "REGRESSED"
        ]
        regressed += bool(rows)
        named += any(name in row.reason for row in rows)
    return {"regressed": regressed / max(1, len(pairs)), "named": named / max(1, len(pairs))}


def _rows(base: Report, head: Report) -> list[Row]:
    return judge(base, head, Policy(), today=datetime.date(2026, 1, 1)).rows


def _of(session: Report, case: CaseResult, launch: Launch) -> Report:
    """Return a report of one launch of one case."""
    return msgspec.structs.replace(session, cases=[msgspec.structs.replace(case, launches=[launch])])


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


def _one_slower(rank: RankWork, _report: Report, _batches: int) -> RankWork:
    """Return a rank whose largest kernel takes half a percent of device time longer."""
    rows = [row for row in rank.rows or () if row.module is None and row.family not in {"collective", "copy"}]
    largest = max(rows, key=lambda row: row.time_s)
    times_s = largest.passes_s or []
    added = 0.005 * sum(device_passes_s(rank)) / sum(times_s)
    grown_s = [(1 + added) * time_s for time_s in times_s]
    slower = msgspec.structs.replace(largest, time_s=(1 + added) * largest.time_s, passes_s=grown_s)
    device_time_s = [
        total_s + added * time_s for total_s, time_s in zip(rank.device_time_s or (), times_s, strict=True)
    ]
    rows = [slower if row is largest else row for row in rank.rows or ()]
    return msgspec.structs.replace(rank, device_time_s=device_time_s, rows=rows)


def _all_slower(rank: RankWork, _report: Report, _batches: int) -> RankWork:
    """Return a rank whose kernels and copies all take one percent longer."""
    slower = {name: [1.01 * one for one in getattr(rank, name) or ()] for name in ("device_time_s", "copy_s")}
    return msgspec.structs.replace(rank, **slower)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
