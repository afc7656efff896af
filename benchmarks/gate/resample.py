"""Measure whether the gate keeps its promises on pairs of reports drawn from recorded launches; prints JSON.

The report has many launches of each case (`pytest benchmarks --llmgpu-launches=40`). A trial draws launches at random,
none twice: some that calibrate, some for the baseline, some for the candidate. Both reports are of the same program, so
that REGRESSED is a false alarm. Then the latencies of the candidate are made longer by the threshold and 2 points: the
minimum launches required must show this, and no number of launches may be OK. With --slower REPORT the candidate is
drawn from launches that were really slower, by --fault.

    python benchmarks/gate/resample.py benchmarks/reports/launches-cpu.json.gz
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.analysis import launch_merging
from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.policy import Policy, Rules
from pytest_llmgpu.gate.selftest import injected_regressions
from pytest_llmgpu.gate.stats.intervals import UNCALIBRATED_SD
from pytest_llmgpu.gate.timing import calibration, calibration_file
from pytest_llmgpu.gate.timing.calibration import Calibration
from pytest_llmgpu.gate.timing.pairing import PROMISED, launches_asked
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult

TODAY = datetime.date(2026, 1, 1)
"""The policy has no known regressions, so that the date does not matter."""

FALSE_ALARMS = 0.01
"""The largest fraction of trials of the same program that may have a REGRESSED row."""

POWER = 0.95
"""The smallest fraction of slower rows that must be REGRESSED with the minimum launches required."""


def main() -> int:
    """Run and print the trials; return 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "reports", type=Path, nargs="+", metavar="report", help="report with many launches of each case"
    )
    parser.add_argument("--cases", nargs="+", metavar="ID", help="cases to use (all)")
    parser.add_argument(
        "--launches",
        type=int,
        nargs="+",
        default=[1, 3, 5],
        help="launches in each report, apart from the minimum required",
    )
    parser.add_argument("--trials", type=int, default=300)
    calibrating = "launches that calibrate (10); 0: the noise is assumed"
    parser.add_argument("--calibrating", type=int, default=calibration.ENOUGH, help=calibrating)
    parser.add_argument(
        "--slower", type=Path, metavar="REPORT", help="report of launches with a fault (default: injected)"
    )
    parser.add_argument("--fault", type=float, help="how much slower these are (threshold and 2 points)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    slower = None if asked.slower is None else chosen(file.load(asked.slower), asked.cases)
    recorded = chosen(launch_merging.merge([file.load(path) for path in asked.reports]), asked.cases)
    found = study(
        recorded,
        asked.launches,
        trials=asked.trials,
        calibrating=asked.calibrating,
        seed=asked.seed,
        slower=slower,
        fault=asked.fault,
    )
    names = {"reports": [path.name for path in asked.reports], "slower": asked.slower and asked.slower.name}
    json.dump({**names, "seed": asked.seed, **found}, sys.stdout, indent=2)
    print()
    return 0 if found["ok"] else 1


def study(
    recorded: Report,
    launches: Sequence[int],
    *,
    trials: int,
    calibrating: int,
    seed: int,
    slower: Report | None = None,
    fault: float | None = None,
) -> dict[str, Any]:
    """Return the results of trials with each number of launches, and with the minimum required if there are enough."""
    policy = Policy()
    fault = policy.time.margin + PROMISED if fault is None else fault
    there = min(len(result.launches) for result in completed(recorded))
    most = (there - calibrating) // 2
    if slower is not None:
        most = min(most, *(len(result.launches) for result in completed(slower)))
    noise = calibrated(recorded, range(there)) if calibrating else Calibration()
    named = asked_for(recorded, policy, noise, fault)
    sizes = sorted({*launches, *([named] if named is not None else [])})
    chance = random.Random(seed)  # noqa: S311 - noise, no secret
    trial_of = [Trials(recorded, policy, size, calibrating, fault, slower) for size in sizes if size <= most]
    tried = [one.run(trials, chance) for one in trial_of]
    checks = {
        "no_false_alarms": all(one["same"]["trials_regressed"] <= FALSE_ALARMS for one in tried),
        "slower_is_never_ok": not any(one["slower"]["rows"].get("OK") for one in tried),
        "launches_asked_for_show_it": next(
            (one["slower"]["rows_regressed"] >= POWER for one in tried if one["launches"] == named), None
        ),
    }
    return {
        "cases": len(completed(recorded)),
        "launches_recorded": there,
        "margin": policy.time.margin,
        "slowdown": fault,
        "sd_between_launches": {result.id: round(counted(noise, result), 5) for result in completed(recorded)},
        "launches_asked_for": named,
        "most_launches_a_side": most,
        "trials": tried,
        "checks": checks,
        "ok": bool(tried) and all(value is not False for value in checks.values()),
    }


def chosen(recorded: Report, ids: Sequence[str] | None) -> Report:
    """Return the report of some cases; None for all."""
    cases = [result for result in recorded.cases if ids is None or result.id in ids]
    if missing := set(ids or []) - {result.id for result in cases}:
        raise SystemExit(f"--cases: the report has no {', '.join(sorted(missing))}")
    return msgspec.structs.replace(recorded, cases=cases)


class Trials:
    """Pairs of reports with a given number of launches in each report."""

    def __init__(
        self,
        recorded: Report,
        policy: Policy,
        launches: int,
        calibrating: int,
        fault: float,
        slower: Report | None,
    ) -> None:
        """Set what is drawn, and how much. Without slower launches the slowdown is injected."""
        self._recorded, self._policy, self._launches, self._calibrating = recorded, policy, launches, calibrating
        self._fault, self._slower = fault, slower
        self._there = min(len(result.launches) for result in completed(recorded))

    def run(self, trials: int, chance: random.Random) -> dict[str, Any]:
        """Judge a number of pairs of the same program, and of a slower one."""
        same, slower = ([self._verdicts(chance, slower=slow) for _ in range(trials)] for slow in (False, True))
        return {"launches": self._launches, "same": summary(same), "slower": summary(slower)}

    def _verdicts(self, chance: random.Random, *, slower: bool) -> list[str]:
        drawn = chance.sample(range(self._there), self._calibrating + 2 * self._launches)
        first, second = self._calibrating, self._calibrating + self._launches
        noise = calibrated(self._recorded, drawn[:first]) if first else None
        base, head = part(self._recorded, drawn[first:second]), part(self._recorded, drawn[second:])
        if slower and self._slower is None:
            head = slowed(head, self._fault)
        elif slower:
            there = min(len(result.launches) for result in completed(self._slower))
            head = part(self._slower, chance.sample(range(there), self._launches))
        verdicts = judge.judge(base, head, self._policy, today=TODAY, calibration=noise)
        return [row.verdict for row in verdicts.rows if row.metric == "time"]


def completed(recorded: Report) -> list[CaseResult]:
    """Return the cases that were timed."""
    return [result for result in recorded.cases if result.outcome == "completed"]


def part(recorded: Report, numbers: Sequence[int]) -> Report:
    """Return the report of some of its launches."""
    cases = []
    for result in completed(recorded):
        copy = msgspec.structs.replace(result, launches=[result.launches[number] for number in numbers])
        derive(copy)
        cases.append(copy)
    return msgspec.structs.replace(recorded, cases=cases)


def slowed(recorded: Report, slowdown: float) -> Report:
    """Return a report whose batches all take longer by a fraction."""
    inject = injected_regressions.regressions(slowdown)[0].inject
    cases = [inject(result, Rules()) for result in recorded.cases]
    return msgspec.structs.replace(recorded, cases=[case for case in cases if isinstance(case, CaseResult)])


def calibrated(recorded: Report, numbers: Sequence[int]) -> Calibration:
    """Return the noise that the gate reads from the file of `llmgpu calibrate` on some launches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibration.json")
        calibration_file.dump(calibration.measure(part(recorded, numbers)), path)
        noise = calibration_file.in_force(Path(folder), recorded, path)
    assert noise is not None, "a calibration was named"
    return noise


def counted(noise: Calibration, result: CaseResult) -> float:
    """Return the noise of one case in the gate: calibrated or assumed."""
    sd = noise.of(result.key)
    return UNCALIBRATED_SD if sd is None else sd


def asked_for(recorded: Report, policy: Policy, noise: Calibration, slowdown: float | None = None) -> int | None:
    """Return the minimum launches required in each report, the maximum over the cases; None above 1,000.

    They show a slowdown, as a fraction; None for the threshold and 2 points.
    """
    cases, margin = completed(recorded), policy.time.margin
    goal = margin + PROMISED if slowdown is None else slowdown
    needed = [launches_asked(goal, margin, counted(noise, case), policy.confidence, len(cases)) for case in cases]
    return None if None in needed else max(count for count in needed if count is not None)


def summary(trials: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the fraction of REGRESSED rows and trials, and the count of each verdict."""
    rows = Counter(verdict for trial in trials for verdict in trial)
    return {
        "trials": len(trials),
        "trials_regressed": round(sum("REGRESSED" in trial for trial in trials) / len(trials), 4),
        "rows_regressed": round(rows["REGRESSED"] / (rows.total() or 1), 4),
        "rows": dict(sorted(rows.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
