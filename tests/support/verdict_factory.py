"""Results with given launches, for tests of verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_llmgpu.report.result import CaseResult, Collective, DeviceProfile, Launch, Metric, Path, Profile, Traffic
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


def make_traffic(calls: int = 64, ranks: int = 2, *, link: str | None = None, kind: str = "all_reduce") -> Traffic:
    """Return traffic of one kind, with 1 KiB per call and rank; without calls it is empty."""
    entry = {"collective": kind, "calls": calls, "payload_bytes": 1024 * calls, "wire_bytes": 1024 * calls}
    sent = [msgspec.convert(entry, Collective)] if calls else []
    path = {"link": link, "expected_bytes": 1024 * calls * ranks, "text": "as counted"}
    return Traffic(
        ranks=[sent] * ranks,
        wire_bytes_per_sequence=16.0 * calls * ranks,
        path=msgspec.convert(path, Path) if link is not None else None,
    )
