"""How often the gate finds a slower wall time on recorded launches; prints JSON.

    cd benchmarks/reports
    python ../gate/wall.py --eager launches-gpu-*.json.gz --replayed clock-7b-gpu-*.json.gz own-kernel-7b-*.json.gz \
        replayed-7b-*.json.gz in-a-row-7b-gpu-*.json.gz --slower in-a-row-7b-slower-*.json.gz \
        --host own-loop-7b-gpu-*.json.gz --host-slower own-loop-7b-slower-*.json.gz \
        --host own-loop-7b-240-gpu-1.json.gz --host-slower own-loop-7b-240-slower-1.json.gz \
        --host own-loop-7b-240-gpu-2.json.gz > ../gate/results/wall.json

`eager`: ten launches are drawn from a recording, five for each report, whose batches take longer by 0, 5 and 6 % in the
candidate, with the threshold of 4 % and that of launches in turn, 2 %. These recordings have no work passes: at
batch size 32 the case is taken as one that the GPU limits, as it is with work passes. `replayed`: each launch against
every other one of the same case and GPU, 0, 2 and 3 % slower, with the built-in thresholds against a stored baseline,
and of launches in turn; and 200 draws of half of the launches against the other half, where a half has at least three.
Small batches of a recording without clocks get one constant clock: no limit of power slows them. Replays in a row
(`in-a-row-7b`) become slower with the batches. `slower`: each launch of the program against each one in which it is
slower for real. `other_gpu`: each launch of a recording with replays in a row against each one of another GPU. `host`:
eager forwards beside a reference for the speed of the host, on the GPUs of one host for each `--host`: each
launch against every other one, and 200 draws of five launches against five (or of half of them), 0 and 5 % slower; then
against launches whose host is slower for real.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.merging import merge
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy, TimeRule
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.text import plural
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.report.work import Work

_LAUNCHES, _DRAWS, _LIMITED_FROM, _SEVERAL, _GHZ = 5, 200, 32, 3, 1.98
Sides = tuple[Sequence[Launch], Sequence[Launch]]


def main() -> int:
    """Print the share of each verdict on wall time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", type=Path, nargs="*", default=[], help="recordings of eager forwards")
    parser.add_argument("--replayed", type=Path, nargs="*", default=[], help="recordings of CUDA graphs with clocks")
    parser.add_argument("--slower", type=Path, nargs="*", default=[], help="recordings of a slower program")
    text = "recordings of eager forwards with the speed of the host, and of a slower host"
    parser.add_argument("--host", type=Path, nargs="+", action="append", default=[], help=text)
    parser.add_argument("--host-slower", type=Path, nargs="+", action="append", default=[], help=text)
    given = parser.parse_args()
    chance = random.Random(0)  # noqa: S311 - trials, repeated with the same numbers
    answer: dict[str, Any] = {"eager": {}, "replayed": {}}
    in_a_row = [path for path in given.replayed if path.name.startswith("in-a-row")]
    answer["slower"] = _between(in_a_row, given.slower, same_gpu=True)
    answer["other_gpu"] = _between(in_a_row, in_a_row, same_gpu=False)
    hosts = itertools.zip_longest(given.host, given.host_slower, fillvalue=())
    answer["host"] = {f"{paths[0].name} and {len(paths) - 1} more": _of_host(paths, slower) for paths, slower in hosts}
    for path in given.eager:
        report = file.load(path)
        for case in report.cases:
            limited = case.case.batch_size >= _LIMITED_FROM
            if len(case.launches) < 2 * _LAUNCHES:
                parser.error(f"{path}: {case.id} has {len(case.launches)} launches, --eager needs {2 * _LAUNCHES}")
            draws = [chance.sample(case.launches, 2 * _LAUNCHES) for _ in range(_DRAWS)]
            sides: list[Sides] = [(one[::2], one[1::2]) for one in draws]
            with mock.patch.object(noise_regime, "of_time", lambda *_, limited=limited: _regime(limited=limited)):
                answer["eager"][f"{path.name} {case.id}"] = {
                    "scatter_pct": 100 * statistics.stdev(map(_log_s, case.launches)),
                    **_found(report, case, sides, slower=(1.0, 1.05, 1.06), thresholds=(0.04, 0.02)),
                }
    for path in given.replayed:
        report = file.load(path)
        for case in filter(_with_clocks, report.cases):
            half, slower = len(case.launches) // 2, (1.0, 1.02, 1.03)
            name, several = f"{path.name} {case.id}", list[Sides]()
            if half >= _SEVERAL:
                draws = [chance.sample(case.launches, 2 * half) for _ in range(_DRAWS)]
                several = [(one[:half], one[half:]) for one in draws]
            pairs: list[Sides] = [([one], [other]) for one, other in itertools.permutations(case.launches, 2)]
            for key, sides in ((name, pairs), (f"{name}, {half} launches each", several)):
                if sides:
                    stored = _found(report, case, sides, slower=slower, thresholds=(None,))
                    in_turn = _found(report, case, sides, slower=slower, thresholds=(None,), in_turn=True)
                    answer["replayed"][key] = {"stored": stored, "in turn": in_turn}
    json.dump(answer, sys.stdout, indent=1)
    print()
    return 0


def _between(befores: Iterable[Path], afters: Iterable[Path], *, same_gpu: bool) -> dict[str, Any]:
    """Return the share of each verdict between one launch of a recording and one of another one, by case."""
    found: dict[str, Any] = {}
    for paths in itertools.product(befores, afters):
        base, head = map(file.load, paths)
        alike = {gpu.uuid for gpu in base.environment.gpus} == {gpu.uuid for gpu in head.environment.gpus}
        for then, now in itertools.product(base.cases, head.cases):
            if paths[0] == paths[1] or alike != same_gpu or then.key != now.key:
                continue
            rows = [
                row
                for before, after in itertools.product(then.launches, now.launches)
                for row in _judged(_of(base, then, [before], 1.0), _of(head, now, [after], 1.0), Policy())
            ]
            changes = [(row.ratio or 0.0) - 1 for row in rows]
            counts = Counter(row.verdict for row in rows).most_common()
            found[f"{paths[0].name} {paths[1].name} {then.id}"] = {
                "pairs": len(rows),
                "change": [min(changes), max(changes)],
                **{verdict: round(number / len(rows), 3) for verdict, number in counts},
            }
    return found


def _of_host(befores: Sequence[Path], afters: Sequence[Path]) -> dict[str, Any]:
    """Return the share of each verdict on launches of the same GPUs, whose host is slower in the second recordings."""
    chance = random.Random(0)  # noqa: S311 - trials, repeated with the same numbers
    base, head = (merge([file.load(path) for path in paths]) for paths in (befores, afters or befores))
    found: dict[str, Any] = {}
    slower = {case.key: case for case in head.cases}
    for then in base.cases:
        several = min(_LAUNCHES, len(then.launches) // 2)
        pairs: list[Sides] = [([one], [other]) for one, other in itertools.permutations(then.launches, 2)]
        draws = [chance.sample(then.launches, 2 * several) for _ in range(_DRAWS)]
        found[then.id] = {
            "scatter_pct": 100 * statistics.stdev(map(_log_s, then.launches)),
            "1 launch": _found(base, then, pairs, slower=(1.0, 1.05), thresholds=(None,)),
            f"{several} launches": _found(
                base, then, [(one[::2], one[1::2]) for one in draws], slower=(1.0, 1.05), thresholds=(None,)
            ),
        }
        now = slower.get(then.key) if afters else None
        for launches in (1, several) if now is not None else ():
            rows = [
                row
                for _ in range(_DRAWS)
                for row in _judged(
                    _of(base, then, chance.sample(then.launches, launches), 1.0),
                    _of(head, now, chance.sample(now.launches, min(launches, len(now.launches))), 1.0),
                    Policy(),
                )
            ]
            counts = Counter(row.verdict for row in rows).most_common()
            changes = [(row.ratio or 0.0) - 1 for row in rows]
            found[then.id][f"{plural(launches, 'launch')}, slower for real"] = {
                "draws": len(rows),
                "change": [min(changes), max(changes)],
                **{verdict: round(number / len(rows), 3) for verdict, number in counts},
            }
    return found


def _judged(base: Report, head: Report, policy: Policy, *, in_turn: bool = False) -> list[Row]:
    rows = judge(base, head, policy, today=datetime.date(2026, 1, 1), in_turn=in_turn).rows
    return [row for row in rows if row.metric == "time"]


def _with_clocks(case: CaseResult) -> bool:
    """Give small batches without a clock one constant clock; return whether every launch has clocks and work passes."""
    for launch in case.launches:
        if launch.work is None or (launch.batches.clock_ghz is None and case.case.batch_size >= _LIMITED_FROM):
            return False
        if launch.batches.clock_ghz is None:
            launch.batches.clock_ghz = [[_GHZ] * len(launch.batches.latency_s)]
            ranks = [msgspec.structs.replace(one, clock_ghz=[[_GHZ] * launch.work.passes]) for one in launch.work.ranks]
            launch.work = msgspec.structs.replace(launch.work, ranks=ranks)
    return True


def _regime(*, limited: bool) -> noise_regime.NoiseRegime:
    return "eager_device" if limited else "eager_host"


def _found(
    report: Report,
    case: CaseResult,
    sides: Sequence[Sides],
    *,
    slower: Iterable[float],
    thresholds: Iterable[float | None],
    in_turn: bool = False,
) -> dict[str, Any]:
    """Return the share of each verdict by threshold and slowdown."""
    shares: dict[str, Any] = {"pairs": len(sides)}
    for threshold, factor in itertools.product(thresholds, slower):
        policy = Policy(time=TimeRule(threshold=threshold))
        verdicts: Counter[str] = Counter()
        for base, head in sides:
            pair = _of(report, case, base, 1.0), _of(report, case, head, factor)
            verdicts.update(row.verdict for row in _judged(*pair, policy, in_turn=in_turn))
        shares[f"{f'threshold {threshold:.0%}, ' if threshold else ''}{factor - 1:+.0%}"] = {
            verdict: round(number / len(sides), 3) for verdict, number in verdicts.most_common()
        }
    return shares


def _of(report: Report, case: CaseResult, launches: Sequence[Launch], factor: float) -> Report:
    """Return a report of some launches of one case, each of whose batches takes a multiple of its time."""
    found = [
        msgspec.structs.replace(
            launch,
            batches=msgspec.structs.replace(
                launch.batches,
                latency_s=[factor * one for one in launch.batches.latency_s],
                launch_s=[factor * one for one in launch.batches.launch_s],
            ),
            work=None if launch.work is None else _slower_in_a_row(launch.work, factor),
        )
        for launch in launches
    ]
    return msgspec.structs.replace(report, cases=[msgspec.structs.replace(case, launches=found)])


def _slower_in_a_row(work: Work, factor: float) -> Work:
    ranks = [
        msgspec.structs.replace(rank, replays_s=rank.replays_s and [factor * one for one in rank.replays_s])
        for rank in work.ranks
    ]
    return msgspec.structs.replace(work, ranks=ranks)


def _log_s(launch: Launch) -> float:
    return math.log(math.fsum(launch.batches.latency_s))


if __name__ == "__main__":
    raise SystemExit(main())
