"""Estimate the noise between launches by regime from recorded launches: s0 and df0 of `analysis/noise_regime.py`.

    python benchmarks/gate/priors.py eager_host=benchmarks/reports/launches-gpu-1.json.gz:mp-bs2,mp-bs8 ...

Each argument names a regime, a report with several launches, and ids of its cases (all of them without a colon). The
launches of one GPU and case are one group. A group's variance has its own degrees of freedom; s0 and df0 are the
moment estimates of limma (Smyth 2004, `fitFDist`): df0 is small where machines differ in their deviation.
`between_gpus` is the deviation of device time between GPUs that recorded the same batches. Needs scipy; prints JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scipy.optimize import brentq
from scipy.special import digamma, polygamma

from pytest_llmgpu.analysis.noise_regime import REGIMES
from pytest_llmgpu.report import disturbances, file
from pytest_llmgpu.report.derived import device_times_s
from pytest_llmgpu.report.result import CaseResult, Launch

_DEVICE_TIME = ("device",)
_MOST_DEGREES = 1000.0
"""df0 where the groups differ by no more than chance explains: the prior then counts for everything."""


def fit(groups: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return s0 and df0 from the variance and the degrees of freedom of each group.

    Args:
        groups: At least one; variances above 0.
    """
    logs = [math.log(variance) - float(digamma(df / 2)) + math.log(df / 2) for variance, df in groups]
    mean = statistics.fmean(logs)
    spread = statistics.variance(logs) if len(logs) > 1 else 0.0
    excess = spread - statistics.fmean(float(polygamma(1, df / 2)) for _, df in groups)
    if excess <= float(polygamma(1, _MOST_DEGREES / 2)):
        pooled = math.fsum(variance * df for variance, df in groups) / sum(df for _, df in groups)
        return math.sqrt(pooled), _MOST_DEGREES
    half = brentq(lambda x: float(polygamma(1, x)) - excess, 1e-3, _MOST_DEGREES)
    return math.sqrt(math.exp(mean + float(digamma(half)) - math.log(half))), 2 * half


def levels(result: CaseResult, regime: str) -> dict[str, list[float]]:
    """Return the log time of each undisturbed launch of a case by the UUIDs of its GPUs.

    Device time has one group a rank.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for launch in result.launches:
        if not launch.batches.latency_s or disturbances.untimed(launch) is not None:
            continue
        if regime == "load":
            if launch.load_s:
                found[_gpus(launch)].append(math.log(launch.load_s))
        elif regime in _DEVICE_TIME:
            for rank, time_s in zip(launch.ranks, device_times_s(launch) or (), strict=False):
                found[" ".join(rank.uuids)].append(math.log(time_s))
        else:
            found[_gpus(launch)].append(statistics.fmean(map(math.log, launch.batches.latency_s)))
    return {gpu: logs for gpu, logs in found.items() if len(logs) > 1}


def _gpus(launch: Launch) -> str:
    return " ".join(device.uuid for device in launch.profile.devices) if launch.profile is not None else "cpu"


def main(arguments: Sequence[str]) -> int:
    """Print the estimate of each regime."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", metavar="REGIME=REPORT[:ID,...]")
    groups: dict[str, list[dict[str, object]]] = defaultdict(list)
    means: dict[tuple[str, str, str | None], dict[str, float]] = defaultdict(dict)
    given = parser.parse_args(arguments)
    for recording in given.recordings:
        regime, _, place = recording.partition("=")
        if regime not in REGIMES:
            parser.error(f"{recording}: regime {regime} is not known: allowed are {', '.join(REGIMES)}")
        path, _, ids = place.partition(":")
        for result in file.load(Path(path)).cases:
            if ids and result.id not in ids.split(","):
                continue
            for gpu, logs in levels(result, regime).items():
                sd = statistics.stdev(logs)
                one = {"report": Path(path).name, "case": result.id, "gpu": gpu, "launches": len(logs), "sd": sd}
                groups[regime].append(one)
                means[regime, result.id, result.launches[0].plan_sha256][gpu] = statistics.fmean(logs)
    answer = {}
    for regime, found in groups.items():
        s0, df0 = fit([(float(one["sd"]) ** 2, int(one["launches"]) - 1) for one in found])  # type: ignore[arg-type,call-overload]
        launches = sum(int(one["launches"]) for one in found)  # type: ignore[call-overload]
        gpus = len({one["gpu"] for one in found})
        answer[regime] = {"s0": s0, "df0": df0, "launches": launches, "gpus": gpus, "groups": found}
        if regime in _DEVICE_TIME:
            answer[regime]["between_gpus"] = [
                {"case": case, "gpus": len(of), "sd": statistics.stdev(of.values())}
                for (one, case, _), of in means.items()
                if one == regime and len(of) > 1
            ]
    json.dump(answer, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
