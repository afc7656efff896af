"""Verdicts, the launches and complete reports that are judged, and the noise between launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.noise_regime import PRIORS, Prior
from pytest_llmgpu.gate import judge
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.report import Commit, Gpu, Report, Session
from pytest_llmgpu.report.result import CaseResult, DeviceProfile, Launch, Metric
from pytest_llmgpu.report.verdicts import Baseline, Decided, Row, Verdicts, stated
from pytest_llmgpu.store.store import DEFAULT, save
from support.report_factory import make_failed, make_profile, make_report, make_result, make_traffic

BATCHES = 20
H200 = "4x-NVIDIA-H200-140GiB"
"""The folder of the default report of `measured`."""


def with_launches(levels: Sequence[float], **fields: Any) -> CaseResult:
    """Return a completed result with one launch per level: batch k takes k times the level, in seconds."""
    result = make_result(**fields)
    result.launches = [make_result(**fields).launches[0] for _ in levels]  # each has a load time of its own
    for launch, level in zip(result.launches, levels, strict=True):
        launch.batches.latency_s = [level * (number + 1) for number in range(BATCHES)]
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
    device = DeviceProfile(index=0, uuid="GPU-0", metrics=clock)
    launch.profile = make_profile(invalid=list(disturbances), devices=[device])


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
    plain = {"baseline": Baseline(name="base.json"), "policy": ""}
    return Verdicts(**{**plain, "rows": list(rows), **fields})


def gpus(*names: str, memory_bytes: int | None = 150754820096) -> list[Gpu]:
    """Return GPUs of these names."""
    return [
        Gpu(index=index, uuid=f"GPU-{index}", name=name, memory_bytes=memory_bytes) for index, name in enumerate(names)
    ]


def timed(*levels: float, calls: int = 64, **fields: Any) -> CaseResult:
    """Return a result with traffic and one launch per level, which multiplies its time."""
    result = with_launches(levels or (1.0,), **fields)
    for launch in result.launches:
        for name in ("sequences", "tokens", "padded_tokens"):
            setattr(launch.batches, name, [1] * BATCHES)
    result.traffic = make_traffic(calls)
    return result


def on_h200(cases: Sequence[CaseResult] = (), sha: str | None = "a" * 40, **fields: Any) -> Report:
    """Return a report of a complete run on four H200, with one case by default."""
    report = make_report(cases or [timed()])
    report.session = Session(complete=True, exit_status=0)
    report.environment.gpus = gpus(*["NVIDIA H200"] * 4)
    report.commit = Commit(sha=sha, branch="main", dirty=False)
    return msgspec.structs.replace(report, **fields)


def measured(
    sha: str | None = "3b1f09ac" * 5, seen: Sequence[Gpu] | None = None, cpu: str | None = None, **case: Any
) -> Report:
    """Return a complete report with a completed and a failed case, on four H200 by default."""
    report = on_h200([make_result(**case), make_failed("oom", strategy="tp", **case)], sha)
    report.cases[0].launches[0].load_s = 10.0  # equal in every call
    report.environment.gpus = report.environment.gpus if seen is None else list(seen)
    report.environment.cpu = cpu
    return report


def summed(level: float, **fields: Any) -> CaseResult:
    """Return a result of three launches whose time is this level, with the figures of the case."""
    result = with_launches([level] * 3, sequences=BATCHES * fields.get("batch_size", 1), **fields)
    derive(result)
    return result


def keep(day: int, *results: CaseResult, gpu: str = "GPU-") -> Path:
    """Store the report of one day of January, whose GPUs have this prefix, in the default store."""
    report = on_h200(results, f"{day:08x}" * 5, created=f"2026-01-{day:02}T03:04:05Z")
    for place, one in enumerate(report.environment.gpus):
        report.environment.gpus[place] = msgspec.structs.replace(one, uuid=f"{gpu}{place}")
    return save(report, DEFAULT)


@contextmanager
def noise(s0: float = 0.001) -> Iterator[None]:
    """Give the times of every regime this deviation between launches, well known, instead of the built-in priors."""
    with patch.object(noise_regime, "PRIORS", dict.fromkeys(PRIORS, Prior(s0=s0, df0=1000))):
        yield


@contextmanager
def any_unseen() -> Iterator[None]:
    """Let a gate pass that would have seen no slowdown."""
    with patch.object(judge, "LARGEST_UNSEEN", 99.0):
        yield
