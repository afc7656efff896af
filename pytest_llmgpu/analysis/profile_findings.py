"""What a person should know of a case's profile: none, gaps, disturbances, and one device that decides for all."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from pytest_llmgpu.analysis.accuracy_findings import has_finding, sentence
from pytest_llmgpu.analysis.traffic_path import AGREE
from pytest_llmgpu.report import disturbances as evidence
from pytest_llmgpu.report.profile_figures import of_window
from pytest_llmgpu.report.result import CaseResult, Finding, Launch, Metric, Profile

__all__ = ["disturbances", "imbalance", "of_profile"]

_GIB = 2**30
_MISSED_SAMPLES = 0.05  # a profile that lacks more of its ticks than this may have missed what it is for

_ABOVE = 1.2
"""A device this many times above the median decides for the others: what they have left over is a fifth or more."""

_ABOVE_BYTES = _GIB
"""Less than this above the median is a head, an embedding or a context that has to be somewhere."""

_ABOVE_PCT = 10
"""Points of utilisation above the median that a driver's samples of 1 s still tell apart in a short case; or below it,
or of the time that a device is throttled."""

_READINGS = 30
"""Moments whose mean tells devices apart: of ten that are 0 or 100 % it is off by 13 points."""

_WHOLE = 0.9
"""Part of a window from which on a mean is of all of it."""

_CLOCK = 0.05
"""A median SM clock so much below that of the others makes a device slower, however power is shared out."""


def of_profile(result: CaseResult, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield what to say of the profile of a completed result, its disturbances aside; see `findings`.

    What several launches say is said once, with the figures of the first that does.
    """
    found: dict[str, Finding] = {}
    for finding in _of_launches(result, earlier) if result.case.device == "cuda" else ():
        found.setdefault(finding.code, finding)
    yield from found.values()


def _of_launches(result: CaseResult, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    for launch in result.launches:
        profile = launch.profile
        reason = launch.why.get("profile") if profile is None else profile.why.get("profile")
        if profile is None or reason:
            if not has_finding("no-profile", earlier):
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
    for finding in (*_of_path(result), *(finding for launch in result.launches for finding in imbalance(launch))):
        if not has_finding(finding.code, series):
            yield finding


def _of_path(result: CaseResult) -> Iterator[Finding]:
    """Yield what is unusual of the links that carried a result's traffic: their figures are no proof of its bytes."""
    path = result.traffic.path if result.traffic is not None else None
    if path is None or path.link is None:
        return
    if path.link != "nvlink" and path.nvlink_bytes is not None:
        yield Finding(
            code="traffic-off-nvlink",
            severity="info",
            text=path.text,
            next_step="If NVLinks join these GPUs (nvidia-smi topo -m), see NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, and "
            "whether the container lets one GPU reach another.",
        )
    elif path.link == "nvlink" and any(abs(share - 1) > AGREE for share in path.nvlink_shares):
        yield Finding(
            code="traffic-counted-otherwise",
            severity="info",
            text=path.text,
            next_step="Compare what NVLink carried with runs in which NCCL chose the same algorithm and protocol only "
            "(NCCL_DEBUG=INFO tells); what the program sent compares always.",
        )


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
    if power and not has_finding("clocks-held-down", earlier):
        yield Finding(
            code="clocks-held-down",
            severity="info",
            text=sentence(f"Times depend on the power and heat that were allowed: {'; '.join(power)}"),
            next_step="Compare them with runs on the same machine only, or lock the clocks lower than that (nvidia-smi "
            "--lock-gpu-clocks). Other cases may have it too: see `profile.invalid` in the report.",
        )


def imbalance(launch: Launch) -> list[Finding]:
    """Return which devices of a launch stand out: by their work, by how fast they may run, by their memory.

    The busiest is the slowest: the same work took it longer, or it has more of it. Ranks that share every layer wait
    for each other in kernels, which NVML counts as busy: among them the one that the others wait for is the least busy,
    or does not show by that at all, but by its clock.
    """
    found = []
    profile = launch.profile
    if profile is not None:
        found += [*_of_work(profile), *_of_clocks(profile)]
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


def _few(metric: Metric, profile: Profile) -> bool:
    """Return whether a mean is of too few moments to tell devices apart, and not of the whole time."""
    return profile.samples < _READINGS and (metric.coverage or 0.0) < _WHOLE


def _of_work(profile: Profile) -> Iterator[Finding]:
    metrics = {device.index: of_window(profile, device, "utilization_pct") for device in profile.devices}
    busy = {
        index: None if isinstance(metric, str) or _few(metric, profile) else metric.mean
        for index, metric in metrics.items()
    }
    if (outlier := _outlier(busy, _ABOVE_PCT)) is not None:
        index, pct, median = outlier
        yield Finding(
            code="imbalanced-work",
            severity="info",
            text=f"GPU {index} was busy for {pct:.0f} % of the time, the median of the GPUs is {median:.0f} %.",
            next_step="See in `profile.devices` whether it is slower: its SM clock, its throttled time, its PCIe "
            f"figures. If each has layers of its own, give GPU {index} fewer of them.",
        )
    elif (least := _least(busy)) is not None and least[2] - least[1] > _ABOVE_PCT and least[2] > _ABOVE * least[1]:
        index, pct, median = least
        yield Finding(
            code="less-busy-device",
            severity="info",
            text=f"GPU {index} was busy for {pct:.0f} % of the time, the median of the others is {median:.0f} %.",
            next_step="Ranks that share every layer wait for the least busy one: see what its process does meanwhile "
            f"(CPU cores, reading, Python). If each has layers of its own, give GPU {index} more of them.",
        )


def _of_clocks(profile: Profile) -> Iterator[Finding]:
    """Yield the device that ran at a lower clock than the others, or else the one that was throttled for longer."""
    clocks = evidence.clocks_mhz(profile)
    throttled = {device.index: device.throttled_s for device in profile.devices}
    most = _least({index: None if seconds is None else -seconds for index, seconds in throttled.items()})
    text = None
    slowest = _least({device.index: clocks.get(device.uuid) for device in profile.devices})
    if slowest is not None and slowest[1] < (1 - _CLOCK) * slowest[2]:
        text = f"ran at {slowest[1]:,.0f} MHz, the median of the others is {slowest[2]:,.0f} MHz"
    elif most is not None and profile.duration_s:
        slowest = most
        # The counters are read a moment beyond the window's ends.
        pct, median = (min(100.0, -100 * seconds / profile.duration_s) for seconds in most[1:])
        if pct - median > _ABOVE_PCT:
            text = f"was throttled for {pct:.0f} % of the time, the median of the others is {median:.0f} %"
    if slowest is not None and text is not None:
        yield Finding(
            code="slower-device",
            severity="info",
            text=f"GPU {slowest[0]} {text}.",
            next_step=f"The others wait for it: see its power limit, its cooling and what else runs there (nvidia-smi "
            f"-q -d PERFORMANCE,POWER,TEMPERATURE -i {slowest[0]}).",
        )


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


def _least(values: Mapping[int, float | None]) -> tuple[int, float, float] | None:
    """Return index and value of the smallest and the median of the others; None if one is unknown or alone."""
    known = {index: value for index, value in values.items() if value is not None}
    if len(known) < max(2, len(values)):
        return None
    index = min(known, key=lambda index: known[index])
    smallest = known.pop(index)
    return index, smallest, statistics.median(known.values())


def _of_samples(profile: Profile, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    ticks = profile.samples + profile.missed
    if not profile.samples and profile.duration_s < 2 * profile.period_s:
        if not has_finding("profile-too-short", earlier):
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
