"""What a person should know of a case's profile: none, gaps, disturbances, and one device that decides for all."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from pytest_llmgpu import evidence
from pytest_llmgpu.accuracy_findings import said, sentence
from pytest_llmgpu.result import CaseResult, Finding, Launch, Profile

__all__ = ["disturbances", "imbalance", "of_profile"]

_GIB = 2**30
_MISSED_SAMPLES = 0.05  # a profile that lacks more of its ticks than this may have missed what it is for

_ABOVE = 1.2
"""A device this many times above the median decides for the others: what they have left over is a fifth or more."""

_ABOVE_BYTES = _GIB
"""Less than this above the median is a head, an embedding or a context that has to be somewhere."""

_ABOVE_PCT = 10
"""Points of utilisation above the median that a driver's samples of 1 s still tell apart in a short case."""


def of_profile(result: CaseResult, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield what to say of the profile of a completed result, its disturbances aside; see `findings`."""
    if result.case.device != "cuda":
        return
    for launch in result.launches:
        profile = launch.profile
        reason = launch.why.get("profile") if profile is None else profile.why.get("profile")
        if profile is None or reason:
            if not said("no-profile", earlier):
                yield Finding(
                    code="no-profile",
                    severity="info",
                    text=sentence(f"No GPU profile: {reason or 'no reason was recorded'}"),
                    next_step="For utilisation, communication and memory of the devices, make NVML usable "
                    "(in a container: the `utility` driver capability).",
                )
            continue
        yield from _of_samples(profile, earlier)
    series = [other for other in earlier if other is not result and other.case.series == result.case.series]
    if result.launches:
        yield from (finding for finding in imbalance(result.launches[0]) if not said(finding.code, series))


def disturbances(result: CaseResult, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield what else was measured with a result; of one that failed it may be the cause. See `findings`."""
    said_invalid = [text for launch in result.launches if launch.profile for text in launch.profile.invalid]
    power = [text for text in said_invalid if evidence.is_power(text)]
    others = [text for text in said_invalid if not evidence.is_power(text)]
    if others:
        yield Finding(
            code="profile-invalid",
            severity="warning",
            text=sentence(f"The measurement was disturbed: {'; '.join(others)}"),
            next_step="Measure again with the GPUs to yourself before you trust this result.",
        )
    # Full load at the limit of its power is how a GPU works: once is enough.
    if power and not said("clocks-held-down", earlier):
        yield Finding(
            code="clocks-held-down",
            severity="info",
            text=sentence(f"Times depend on the power and heat that were allowed: {'; '.join(power)}"),
            next_step="Compare them with runs on the same machine only, or lock the clocks lower than that (nvidia-smi "
            "--lock-gpu-clocks). Other cases may have it too: see `profile.invalid` in the report.",
        )


def imbalance(launch: Launch) -> list[Finding]:
    """Return whether the busiest or the fullest device of a launch stands out from the median of all its devices.

    The busiest is the slowest: the same work took it longer, or it has more of it. Ranks that share every layer wait
    for each other in kernels, which NVML counts as busy, so that a slow one among them does not show here.
    """
    found = []
    profile = launch.profile
    seen = [] if profile is None or not profile.samples else profile.devices
    busy = {device.index: metric.mean for device in seen if (metric := device.metrics.get("utilization_pct"))}
    if (outlier := _outlier(busy, _ABOVE_PCT)) is not None:
        index, pct, median = outlier
        found.append(
            Finding(
                code="imbalanced-work",
                severity="info",
                text=f"GPU {index} was busy for {pct:.0f} % of the time, the median of the GPUs is {median:.0f} %.",
                next_step=f"Give GPU {index} less of the model, or see in `profile.devices` whether it is slower: its "
                "SM clock, its throttled time, its PCIe figures.",
            )
        )
    full = {memory.index: memory.nvml_used_max_bytes for memory in launch.memory}
    of = "at its fullest"
    if None in full.values():
        full = {memory.index: memory.peak_reserved_bytes for memory in launch.memory}
        of = "reserved by torch at its fullest"
    if (outlier := _outlier(full, _ABOVE_BYTES)) is not None:
        index, size, median = outlier
        found.append(
            Finding(
                code="imbalanced-memory",
                severity="info",
                text=f"GPU {index} had {size / _GIB:.1f} GiB {of}, the median of the GPUs is {median / _GIB:.1f} GiB.",
                next_step=f"A larger batch fits once GPU {index} has less: it is the first to be out of memory.",
            )
        )
    return found


def _outlier(values: Mapping[int, float | None], least: float) -> tuple[int, float, float] | None:
    """Return index and value of the largest and the median, if it stands out by that much; None if one is unknown."""
    known = {index: value for index, value in values.items() if value is not None}
    if len(known) < max(2, len(values)):
        return None
    index = max(known, key=lambda index: known[index])
    median = statistics.median(known.values())
    if known[index] - median <= least or known[index] <= _ABOVE * median:
        return None
    return index, known[index], median


def _of_samples(profile: Profile, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    ticks = profile.samples + profile.missed
    if not profile.samples and profile.duration_s < 2 * profile.period_s:
        if not said("profile-too-short", earlier):
            yield Finding(
                code="profile-too-short",
                severity="info",
                text=f"No sample: it took {profile.duration_s:.2g} s; samples are {profile.period_s:.2g} s apart.",
                next_step="Score more items (--llmgpu-limit) or shorten --llmgpu-sample-period.",
            )
    elif profile.missed > _MISSED_SAMPLES * ticks:
        yield Finding(
            code="profile-gaps",
            severity="info",
            text=f"{profile.missed:,} of {ticks:,} samples of the GPU profile are missing.",
            next_step="Leave a CPU core to the sampler, or lengthen --llmgpu-sample-period.",
        )
