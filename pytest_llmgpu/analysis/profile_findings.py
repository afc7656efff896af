"""Findings on the profile of a case: a missing profile, gaps, disturbances, and a device that differs from the others.

The functions `decide...` return data, the functions `describe...` word it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from pytest_llmgpu.analysis.accuracy_findings import has_finding, sentence
from pytest_llmgpu.analysis.traffic_path import AGREE
from pytest_llmgpu.report import disturbances as window
from pytest_llmgpu.report.profile_figures import of_window
from pytest_llmgpu.report.result import CaseResult, Finding, Launch, Metric, Profile
from pytest_llmgpu.report.text import GIB, gib, plural

_MISSED_SAMPLES = 0.05  # a profile that misses more of its samples than this is incomplete

_ABOVE = 1.2
"""A device is reported if its value is above this many times the median of all devices: the others then wait."""

_ABOVE_BYTES = GIB
"""A smaller difference from the median is an output layer, an embedding or a context that only one device has."""

_ABOVE_PCT = 10
"""A smaller difference, in points of utilisation or of throttled time, is not seen in a short case: a driver may sample
once per second."""

_READINGS = 30
"""A mean of fewer readings is not compared: a mean of ten readings of 0 or 100 % has an error of 13 points."""

_WHOLE = 0.9
"""A mean that covers this part of a window counts for all of it."""

_CLOCK = 0.05
"""A median SM clock that is lower than that of the others by more than this makes a device slower."""


_PathCode = Literal["traffic-off-nvlink", "traffic-counted-otherwise"]
_PATH_ADVICE: dict[_PathCode, str] = {
    "traffic-off-nvlink": "If NVLinks join these GPUs (nvidia-smi topo -m), check NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, "
    "and whether the container allows access from one GPU to another.",
    "traffic-counted-otherwise": "Compare NVLink's bytes only with runs in which NCCL chose the same algorithm and "
    "protocol (NCCL_DEBUG=INFO shows them). The bytes that the program sent can always be compared.",
}


def of_profile(result: CaseResult, earlier: Sequence[CaseResult]) -> list[Finding]:
    """Return the findings on the profile of a completed result, without its disturbances; see `findings.findings`.

    If several launches have the same finding, the first one counts.
    """
    found: dict[str, Finding] = {}
    for finding in _of_launches(result, earlier) if result.case.device == "cuda" else ():
        found.setdefault(finding.code, finding)
    return list(found.values())


def _of_launches(result: CaseResult, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    for launch in result.launches:
        profile = launch.profile
        reason = launch.why.get("profile") if profile is None else profile.why.get("profile")
        if profile is None or reason:
            if not has_finding("no-profile", earlier):
                yield _no_profile(reason or "no reason was recorded")
        elif (state := decide_samples(profile)) == "gaps" or (state and not has_finding("profile-too-short", earlier)):
            yield _describe_samples(state, profile)
    fields = result.case.series_fields
    series = [other for other in earlier if other is not result and other.case.series_fields == fields]
    found = [] if (code := decide_path(result)) is None else [_describe_path(code, result)]
    for launch in result.launches:
        found += describe_imbalance(decide_imbalance(launch))
    yield from (finding for finding in found if not has_finding(finding.code, series))


def disturbances(result: CaseResult, earlier: Sequence[CaseResult]) -> list[Finding]:
    """Return the findings on the disturbances of a result: one may be the cause of a failure; see `findings.findings`.

    Limits of power and heat are reported once: under full load a GPU works at the limit of its power.
    """
    texts = _once([text for profile in result.profiles for text in profile.invalid])
    power = [text for text in texts if window.is_power(text)]
    others = [text for text in texts if not window.is_power(text)]
    found = []
    if others:
        found.append(
            Finding(
                code="profile-invalid",
                severity="warning",
                text=sentence(f"The measurement was disturbed: {'; '.join(others)}"),
                next_step="Measure again with nothing else on the machine before you trust this result.",
            )
        )
    if power and not has_finding("clocks-held-down", earlier):
        found.append(
            Finding(
                code="clocks-held-down",
                severity="info",
                text=sentence(f"Times depend on the limits of power and heat: {'; '.join(power)}"),
                next_step="Compare them only with runs on the same machine, or lock the clocks below the "
                "lowest of this run (nvidia-smi --lock-gpu-clocks). Other cases can have the same limit: see "
                "`profile.invalid` in the report.",
            )
        )
    return found


def _once(texts: Sequence[str]) -> list[str]:
    """Return the first text of each kind of disturbance, with the number of further launches that have the kind."""
    kinds: dict[str, list[str]] = {}
    for text in texts:
        kinds.setdefault(text.partition(":")[0], []).append(text.rstrip("."))
    return [
        f"{found[0]} (also in {plural(len(found) - 1, 'more launch')})" if len(found) > 1 else found[0]
        for found in kinds.values()
    ]


class Outlier(msgspec.Struct, frozen=True, kw_only=True):
    """A device that differs from the others."""

    index: int
    """NVML index of the device."""
    value: float
    """Its value."""
    median: float
    """The median it is compared with."""


class Imbalance(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a launch that differ from the others by their work, their speed or their memory."""

    busiest: Outlier | None = None
    """The busiest device, in percent of the time, compared with the median of all."""
    least_busy: Outlier | None = None
    """The least busy device, in percent of the time, compared with the median of the others."""
    slowest_clock: Outlier | None = None
    """The device with the lowest SM clock, in MHz, compared with the median of the others."""
    throttled: Outlier | None = None
    """The device that was throttled for longest, in percent of the time, compared with the median of the others."""
    fullest: Outlier | None = None
    """The fullest device, in bytes, compared with the median of all."""
    by_reserved: bool = False
    """True if the bytes are those that torch reserved, because NVML has no figure."""


def decide_imbalance(launch: Launch) -> Imbalance:
    """Return the devices of a launch that differ from the others.

    The busiest device is the slowest: the same work took it longer, or it has more work. If ranks share every layer,
    they wait for each other in kernels, which NVML counts as busy: the rank that the others wait for is then the least
    busy, or its utilisation is equal and only its clock is lower.
    """
    full = {memory.index: memory.nvml_used_max_bytes for memory in launch.memory}
    by_reserved = None in full.values()
    if by_reserved:
        full = {memory.index: memory.peak_reserved_bytes for memory in launch.memory}
    fullest = _largest(full, _ABOVE_BYTES)
    profile = launch.profile
    if profile is None:
        return Imbalance(fullest=fullest, by_reserved=by_reserved)

    metrics = {device.index: of_window(profile, device, "utilization_pct") for device in profile.devices}
    busy = {
        index: None if isinstance(metric, str) or _few(metric, profile) else metric.mean
        for index, metric in metrics.items()
    }
    # The readings of two devices do not begin and end at the same time.
    apart_pct = _ABOVE_PCT + 200 * profile.period_s / profile.duration_s if profile.duration_s else 100
    busiest, least = _largest(busy, apart_pct), _smallest(busy)
    if busiest or (least and (least.median - least.value <= apart_pct or least.median <= _ABOVE * least.value)):
        least = None

    clocks = window.clocks_mhz(profile)
    slowest = _smallest({device.index: clocks.get(device.uuid) for device in profile.devices})
    if slowest and slowest.value >= (1 - _CLOCK) * slowest.median:
        slowest = None
    return Imbalance(
        busiest=busiest,
        least_busy=least,
        slowest_clock=slowest,
        throttled=None if slowest else _most_throttled(profile),
        fullest=fullest,
        by_reserved=by_reserved,
    )


def _few(metric: Metric, profile: Profile) -> bool:
    """Return whether a mean has too few readings to compare devices, and does not cover the whole window."""
    return profile.samples < _READINGS and (metric.coverage or 0.0) < _WHOLE


def _most_throttled(profile: Profile) -> Outlier | None:
    negative = {device.index: None if device.throttled_s is None else -device.throttled_s for device in profile.devices}
    found = _smallest(negative)
    if found is None or not profile.duration_s:
        return None
    # The counters are read a moment after the end of the window.
    pct, median = (min(100.0, 100 * abs(seconds) / profile.duration_s) for seconds in (found.value, found.median))
    return Outlier(index=found.index, value=pct, median=median) if pct - median > _ABOVE_PCT else None


def _largest(values: Mapping[int, float | None], least: float) -> Outlier | None:
    """Return the device with the largest value, if it is above the median of all by `least` and by a fifth.

    Returns:
        None where no device is above, or a value is unknown.
    """
    if (known := _comparable(values)) is None:
        return None
    index = max(known, key=known.__getitem__)
    median = statistics.median(known.values())
    if known[index] - median <= least or known[index] <= _ABOVE * median:
        return None
    return Outlier(index=index, value=known[index], median=median)


def _smallest(values: Mapping[int, float | None]) -> Outlier | None:
    """Return the device with the smallest value and the median of the others; None where a value is unknown."""
    if (known := _comparable(values)) is None:
        return None
    index = min(known, key=known.__getitem__)
    smallest = known.pop(index)
    return Outlier(index=index, value=smallest, median=statistics.median(known.values()))


def _comparable(values: Mapping[int, float | None]) -> dict[int, float] | None:
    """Return the values by device; None where a value is unknown, or there are fewer than two."""
    known = {index: value for index, value in values.items() if value is not None}
    return known if len(known) >= max(2, len(values)) else None


def describe_imbalance(found: Imbalance) -> list[Finding]:
    """Return a finding for each device that differs."""
    findings = []
    if (one := found.busiest) is not None:
        findings.append(
            _info(
                "imbalanced-work",
                f"GPU {one.index} was busy for {one.value:.0f} % of the time, the median of the GPUs is "
                f"{one.median:.0f} %.",
                "See in `profile.devices` whether it is slower: its SM clock, its throttled time, its PCIe figures. If "
                "each GPU has layers of its own, give this GPU fewer of them.",
            )
        )
    if (one := found.least_busy) is not None:
        findings.append(
            _info(
                "less-busy-device",
                f"GPU {one.index} was busy for {one.value:.0f} % of the time, the median of the others is "
                f"{one.median:.0f} %.",
                "Ranks that share every layer wait for the least busy one: see what delays its process (CPU cores, "
                "reading, Python). If each GPU has layers of its own, give this GPU more of them.",
            )
        )
    if (one := found.slowest_clock) is not None:
        text = f"ran at {one.value:,.0f} MHz, the median of the others is {one.median:,.0f} MHz"
        findings.append(_slower_device(one.index, text))
    if (one := found.throttled) is not None:
        text = f"was throttled for {one.value:.0f} % of the time, the median of the others is {one.median:.0f} %"
        findings.append(_slower_device(one.index, text))
    if (one := found.fullest) is not None:
        kind = "reserved by torch at its fullest" if found.by_reserved else "in use at its fullest"
        findings.append(
            _info(
                "imbalanced-memory",
                f"GPU {one.index} had {gib(one.value, 1)} {kind}, the median of the GPUs is {gib(one.median, 1)}.",
                "Move memory from this GPU to the others, so that a larger batch fits: it runs out of memory first.",
            )
        )
    return findings


def _slower_device(index: int, text: str) -> Finding:
    return _info(
        "slower-device",
        f"GPU {index} {text}.",
        "The others wait for it: see its power limit, its cooling and what else runs there (nvidia-smi -q -d "
        "PERFORMANCE,POWER,TEMPERATURE).",
    )


def decide_samples(profile: Profile) -> Literal["too_short", "gaps"] | None:
    """Return what is wrong with the samples of a profile: the window is too short for one, or some are missing."""
    if not profile.samples and profile.duration_s < 2 * profile.period_s:
        return "too_short"
    return "gaps" if profile.missed > _MISSED_SAMPLES * (profile.samples + profile.missed) else None


def _describe_samples(state: Literal["too_short", "gaps"], profile: Profile) -> Finding:
    if state == "too_short":
        return _info(
            "profile-too-short",
            f"The GPU profile has no sample: the case took {profile.duration_s:.2g} s, samples are "
            f"{profile.period_s:.2g} s apart.",
            "Score more items (--llmgpu-limit) or shorten --llmgpu-sample-period.",
        )
    return _info(
        "profile-gaps",
        f"{profile.missed:,} of {profile.samples + profile.missed:,} samples of the GPU profile are missing.",
        "Leave a CPU core to the sampler, or lengthen --llmgpu-sample-period.",
    )


def decide_path(result: CaseResult) -> _PathCode | None:
    """Return what is unusual about the links that carried the traffic of a result; None where nothing is.

    The traffic did not go over NVLink although it is there, or NVLink's counters differ from the bytes sent.
    """
    path = result.traffic.path if result.traffic is not None else None
    if path is None or path.link is None:
        return None
    if path.link != "nvlink":
        return "traffic-off-nvlink" if path.nvlink_bytes is not None else None
    return "traffic-counted-otherwise" if any(abs(share - 1) > AGREE for share in path.nvlink_shares) else None


def _describe_path(code: _PathCode, result: CaseResult) -> Finding:
    assert result.traffic is not None
    assert result.traffic.path is not None
    return _info(code, result.traffic.path.text, _PATH_ADVICE[code])


def _no_profile(reason: str) -> Finding:
    return _info(
        "no-profile",
        sentence(f"There is no GPU profile: {reason}"),
        "Make NVML usable (in a container: the `utility` driver capability) to get utilisation, communication and "
        "memory of the devices.",
    )


def _info(code: str, text: str, next_step: str) -> Finding:
    return Finding(code=code, severity="info", text=text, next_step=next_step)
