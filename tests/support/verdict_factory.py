"""Verdicts, and results with given launches to judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.result import CaseResult, DeviceProfile, Launch, Metric, Profile
from pytest_llmgpu.report.verdicts import Baseline, Decided, Row, Verdicts, stated
from support.report_factory import make_result

BATCHES = 20


def with_launches(levels: Sequence[float], **fields: Any) -> CaseResult:
    """Return a completed result with one launch per level: batch k takes k times the level, in seconds."""
    result = make_result(**fields)
    launches = []
    for level in levels:
        launch = make_result(**fields).launches[0]  # with a load time of its own
        launch.batches = msgspec.structs.replace(
            launch.batches, latency_s=[level * (number + 1) for number in range(BATCHES)]
        )
        launches.append(launch)
    result.launches = launches
    return result


def with_latencies(launches: Sequence[Sequence[float]], **fields: Any) -> CaseResult:
    """Return a completed result with these latencies, launch by launch."""
    result = with_launches([1.0] * len(launches), **fields)
    for launch, latency_s in zip(result.launches, launches, strict=True):
        launch.batches.latency_s = list(latency_s)
    return result


def make_invalid(launch: Launch, *disturbances: str, mhz: float | None = None) -> None:
    """Add disturbances to a launch, and set the clock of its GPU."""
    clock = {} if mhz is None else {"sm_clock_mhz": Metric(mean=mhz, max=mhz, coverage=1.0, method="seen")}
    launch.profile = Profile(
        period_s=0.1,
        duration_s=1.0,
        samples=10,
        missed=0,
        lateness_p99_s=None,
        invalid=list(disturbances),
        devices=[DeviceProfile(index=0, uuid="GPU-0", metrics=clock)],
    )


def make_row(
    verdict: Decided = "REGRESSED",
    metric: MetricName = "time",
    id: str = "mp-bs8",  # noqa: A002 - the name of the field
    **fields: Any,
) -> Row:
    """Return a verdict on a case with this id."""
    return Row(**{"key": f"key of {id}", "id": id, "metric": metric, "reason": "as said.", **stated(verdict), **fields})


def make_verdicts(*rows: Row, **fields: Any) -> Verdicts:
    """Return these rows as the verdicts of a comparison with `base.json`."""
    plain = {"baseline": Baseline(name="base.json"), "policy": "", "policy_sha256": ""}
    return Verdicts(**{**plain, "rows": list(rows), **fields})
