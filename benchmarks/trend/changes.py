"""Measure how soon `llmgpu trend` finds a change, and how often it finds one where nothing changed; prints JSON.

A trial is a history with one report a day, whose figures have a deviation of 0.3 %. A change begins after some reports.

    python benchmarks/trend/changes.py > benchmarks/trend/results/changes.json
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from typing import Any

from pytest_llmgpu.gate.trends import DEVICE_TIME, steps

SD = 0.003
STEP, STEP_WITHIN = 0.01, 5
CASES = 21
PRIOR = DEVICE_TIME
AFTER = 60
"""Reports after the beginning of a change; a change that is not found in them counts as found with the last one."""


def main() -> int:
    """Simulate and print; return 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000, help="unchanged histories, each of 100 reports")
    parser.add_argument("--trials", type=int, default=500, help="histories of each change")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)  # noqa: S311 - a simulation
    unchanged = {
        "deviation of 0.3 %": sum(_alarm(draw, SD) for _ in range(arguments.histories)),
        "deviation drawn from the prior": sum(_alarm(draw, _drawn(draw)) for _ in range(arguments.histories)),
        "deviation of 0.5 %": sum(_alarm(draw, 0.005) for _ in range(arguments.histories)),
        f"deviation of 0.3 %, any of {CASES} cases": sum(
            any(_alarm(draw, SD, CASES) for _ in range(CASES)) for _ in range(arguments.histories // 5)
        ),
    }
    found = {
        f"step after {before} reports, {cases} cases": _delays(draw, arguments.trials, before, cases)
        for cases in (1, CASES)
        for before in (10, 20, 30, 60)
    }
    result = {
        "sd": SD,
        "prior": {"s0": PRIOR.s0, "df0": PRIOR.df0},
        "step": STEP,
        "seed": arguments.seed,
        "unchanged": {
            "histories": arguments.histories,
            "histories_of_cases": arguments.histories // 5,
            "reports": 100,
            "with_a_change": unchanged,
        },
        "found": found,
    }
    print(json.dumps(result, indent=2))
    return int(
        unchanged["deviation of 0.3 %"] > 0.01 * arguments.histories
        or any(one["median"] > one["within"] for one in found.values())
    )


def _alarm(draw: random.Random, sd: float, cases: int = 1) -> bool:
    """Return whether a change is found in a history of 100 reports where nothing changed."""
    return bool(steps([math.exp(draw.gauss(0.0, sd)) for _ in range(100)], PRIOR, cases=cases))


def _drawn(draw: random.Random) -> float:
    """Return the deviation of a case: the prior with as many degrees of freedom as a history takes from it."""
    degrees = min(PRIOR.df0, 20.0)
    return PRIOR.s0 * math.sqrt(degrees / draw.gammavariate(degrees / 2, 2.0))


def _delays(draw: random.Random, trials: int, before: int, cases: int) -> dict[str, Any]:
    """Return with which report of the step it is found: 1 is the first one."""
    delays = []
    for _ in range(trials):
        growth = [0.0] * before + [math.log1p(STEP)] * AFTER
        found = steps([math.exp(draw.gauss(one, SD)) for one in growth], PRIOR, cases=cases)
        delays.append(next((one.found - before + 1 for one in found if one.found >= before), AFTER))
    return {
        "within": STEP_WITHIN,
        "share_within": sum(delay <= STEP_WITHIN for delay in delays) / trials,
        "median": statistics.median(delays),
        "p95": statistics.quantiles(delays, n=20)[-1],
    }


if __name__ == "__main__":
    raise SystemExit(main())
