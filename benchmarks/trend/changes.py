"""Measure how soon `llmgpu trend` finds a change, and how often it finds one where nothing changed; prints JSON.

A trial is a history with one report a day, whose figures have a deviation of 0.3 %. A change begins after some reports.

    python benchmarks/trend/changes.py > benchmarks/trend/results/changes.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

from pytest_llmgpu.gate.history import shifts

SD = 0.003
STEP, STEP_WITHIN = 0.01, 5
DRIFT, DRIFT_WITHIN = 0.0006, 21
AFTER = 60
"""Reports after the beginning of a change; a change that is not found in them counts as found with the last one."""


def main() -> int:
    """Simulate and print; return 1 if a promise does not hold with 30 reports or more before the change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000, help="unchanged histories, each of 100 reports")
    parser.add_argument("--trials", type=int, default=500, help="histories of each change")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)  # noqa: S311 - a simulation
    alarms = sum(bool(shifts(_history(draw, 100, 0, lambda _: 0.0))) for _ in range(arguments.histories))
    found = {
        f"{kind} after {before} reports": _delays(draw, arguments.trials, before, growth, within)
        for before, (kind, growth, within) in itertools.product(
            (10, 20, 30, 60),
            (
                ("step", lambda _: math.log1p(STEP), STEP_WITHIN),
                ("drift", lambda day: day * math.log1p(DRIFT), DRIFT_WITHIN),
            ),
        )
    }
    result = {
        "sd": SD,
        "step": STEP,
        "drift_a_day": DRIFT,
        "seed": arguments.seed,
        "unchanged": {"histories": arguments.histories, "reports": 100, "with_a_change": alarms},
        "found": found,
    }
    print(json.dumps(result, indent=2))
    late = [one for name, one in found.items() if not name.endswith(" 10 reports") and one["median"] > one["within"]]
    return int(alarms > 0.01 * arguments.histories or bool(late))


def _history(draw: random.Random, before: int, after: int, growth: Callable[[int], float]) -> list[float]:
    days = [0] * before + list(range(1, after + 1))
    return [math.exp(draw.gauss(0.0, SD) + (growth(day) if day else 0.0)) for day in days]


def _delays(
    draw: random.Random, trials: int, before: int, growth: Callable[[int], float], within: int
) -> dict[str, Any]:
    """Return with which report of the change it is found: 1 is the first one."""
    delays = []
    for _ in range(trials):
        found = shifts(_history(draw, before, AFTER, growth))
        delays.append(next((one.found - before + 1 for one in found if one.found >= before), AFTER))
    cuts = statistics.quantiles(delays, n=20)
    return {
        "within": within,
        "share_within": sum(delay <= within for delay in delays) / trials,
        "median": statistics.median(delays),
        "p95": cuts[-1],
    }


if __name__ == "__main__":
    raise SystemExit(main())
