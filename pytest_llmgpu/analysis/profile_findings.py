"""Findings on the profile of a case: a missing profile, gaps, disturbances, and a device that differs from the others.

The functions `decide...` return data, the functions `describe...` word it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from pytest_llmgpu.analysis.accuracy_findings import has_finding
from pytest_llmgpu.analysis.reference import same_series
from pytest_llmgpu.analysis.traffic_path import AGREE
from pytest_llmgpu.report import disturbances as window
from pytest_llmgpu.report.derived import device_times_s
from pytest_llmgpu.report.profile_figures import of_window
from pytest_llmgpu.report.result import CaseResult, Finding, Launch, Metric, Profile
from pytest_llmgpu.report.text import GIB, gib, plural, sentence

_MISSED_SAMPLES = 0.05  # a profile that misses more of its samples than this is incomplete

_ABOVE = 1.2
"""A device is reported if its value is above this many times the median of all devices."""

_ABOVE_BYTES = GIB
"""A smaller difference from the median is an output layer, an embedding or a context that only one device has."""

_ABOVE_PCT = 10
"""A smaller difference, in points of utilisation, is not seen in a short case: a driver may sample once per second."""

_READINGS = 30
"""A mean of fewer readings is not compared: a mean of ten readings of 0 or 100 % has an error of 13 points."""

_WHOLE = 0.9
"""A mean that covers this part of a window counts for all of it."""

_SLOWER = 1.05
"""A rank is reported if its device time is above this many times the median of all ranks. Between GPUs of one kind the
device time of an equal program differs by at most 3.5 % (measured on five H200)."""


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
    series = same_series(result, earlier)
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
    """A device or a rank that differs from the others."""

    index: int
    """NVML index of the device, or number of the rank."""
    value: float
    """Its value."""
    median: float
    """The median over all of them."""


class Imbalance(msgspec.Struct, frozen=True, kw_only=True):
    """The rank or the device of a launch that the others wait for, and the device that is full first."""

    slowest: Outlier | None = None
    """The rank with the largest device time of a work pass, in seconds."""
    busiest: Outlier | None = None
    """The busiest device, in percent of the time, where the device times of several ranks are not known."""
    fullest: Outlier | None = None
    """The fullest device, in bytes."""
    by_reserved: bool = False
    """True if the bytes are those that torch reserved, because NVML has no figure."""


def decide_imbalance(launch: Launch) -> Imbalance:
    """Return what differs between the devices of a launch.

    Ranks that share every layer wait for each other in kernels, which NVML counts as busy: their device times, which
    have no collectives, are compared. The devices of one rank are compared by their utilisation.
    """
    times_s = device_times_s(launch) or []
    full = {memory.index: memory.nvml_used_max_bytes for memory in launch.memory}
    by_reserved = None in full.values()
    if by_reserved:
        full = {memory.index: memory.peak_reserved_bytes for memory in launch.memory}
    return Imbalance(
        slowest=_largest(dict(enumerate(times_s)), above=_SLOWER),
        busiest=_busiest(launch.profile) if launch.profile is not None and len(times_s) <= 1 else None,
        fullest=_largest(full, least=_ABOVE_BYTES),
        by_reserved=by_reserved,
    )


def _busiest(profile: Profile) -> Outlier | None:
    metrics = {device.index: of_window(profile, device, "utilization_pct") for device in profile.devices}
    busy = {
        index: None if isinstance(metric, str) or _few(metric, profile) else metric.mean
        for index, metric in metrics.items()
    }
    # The readings of two devices do not begin and end at the same time.
    apart_pct = _ABOVE_PCT + 200 * profile.period_s / profile.duration_s if profile.duration_s else 100
    return _largest(busy, least=apart_pct)


def _few(metric: Metric, profile: Profile) -> bool:
    """Return whether a mean has too few readings to compare devices, and does not cover the whole window."""
    return profile.samples < _READINGS and (metric.coverage or 0.0) < _WHOLE


def _largest(values: Mapping[int, float | None], *, least: float = 0.0, above: float = _ABOVE) -> Outlier | None:
    """Return the largest value, if it is above the median of all by `least` and by the factor `above`.

    Returns:
        None where no value is above, one is unknown, or there are fewer than two.
    """
    known = {index: value for index, value in values.items() if value is not None}
    if len(known) < max(2, len(values)):
        return None
    index = max(known, key=known.__getitem__)
    median = statistics.median(known.values())
    if known[index] - median <= least or known[index] <= above * median:
        return None
    return Outlier(index=index, value=known[index], median=median)


def describe_imbalance(found: Imbalance) -> list[Finding]:
    """Return a finding for each difference."""
    findings = []
    if (one := found.slowest) is not None:
        findings.append(
            _info(
                "slower-rank",
                f"Rank {one.index} has a device time of {one.value:.4g} s in a work pass, the median of the ranks is "
                f"{one.median:.4g} s.",
                "The others wait for it: see the power limit and the cooling of its GPU, and what else runs there "
                "(nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE). If each rank has layers of its own, give this rank "
                "fewer of them.",
            )
        )
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
