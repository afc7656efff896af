"""Findings on the profile of a case: a missing profile, gaps, disturbances, and devices that differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from pytest_llmgpu.analysis.finding_texts import finding, has_finding
from pytest_llmgpu.analysis.reference import same_series
from pytest_llmgpu.report import disturbances as window
from pytest_llmgpu.report.derived import device_times_s, of_window
from pytest_llmgpu.report.result import CaseResult, Finding, Launch
from pytest_llmgpu.report.text import GIB, plural

_MISSED_SAMPLES = 0.05  # a profile that misses more of its samples than this is incomplete

_ABOVE = 1.2
"""A device is reported if its value is above this many times the median of all devices."""

_ABOVE_GIB = 1.0
"""A smaller difference from the median is an output layer, an embedding or a context that only one device has."""

_ABOVE_PCT = 10
"""A smaller difference, in points of utilisation, is not seen: a driver may sample once per second."""

_SAMPLES = 60
"""Devices are not compared by their utilisation in a window with fewer samples, of 10 s by default: readings are of up
to a second, and those of two devices do not begin and end at the same time."""

_SLOWER = 1.05
"""A rank is reported if its device time is above this many times the median of all ranks. Between GPUs of one kind the
device time of an equal program differs by at most 3.5 % (measured on five H200)."""


def of_profile(result: CaseResult, earlier: Sequence[CaseResult]) -> list[Finding]:
    """Return the findings on the profile of a completed result, without its disturbances; see `findings.findings`.

    If several launches have the same finding, the first one counts. All batch sizes of a series split the model in the
    same way, and the machine is the cause of a missing profile: the series or the session has these findings once.
    """
    if result.case.device != "cuda":
        return []
    series = same_series(result, earlier)
    found: dict[str, Finding] = {}
    for one in (
        *(one for launch in result.launches for one in _of_samples(launch, earlier)),
        *(one for one in _of_path(result) if not has_finding(one.code, series)),
        *(one for launch in result.launches for one in imbalance(launch) if not has_finding(one.code, series)),
    ):
        found.setdefault(one.code, one)
    return list(found.values())


def _of_samples(launch: Launch, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield what is wrong with the samples of a profile: there are none, the window is too short, or some are missing.

    The first two are left out if an earlier case has them.
    """
    profile = launch.profile
    reason = launch.why.get("profile") if profile is None else profile.why.get("profile")
    if profile is None or reason:
        if not has_finding("no-profile", earlier):
            yield finding("no-profile", reason=reason or "no reason was recorded")
    elif not profile.samples and profile.duration_s < 2 * profile.period_s:
        if not has_finding("profile-too-short", earlier):
            yield finding("profile-too-short", duration_s=profile.duration_s, period_s=profile.period_s)
    elif profile.missed > _MISSED_SAMPLES * (profile.samples + profile.missed):
        yield finding("profile-gaps", missed=profile.missed, all=profile.samples + profile.missed)


def _of_path(result: CaseResult) -> Iterator[Finding]:
    """Yield the path of the traffic of a result that did not go over NVLink although it is there."""
    path = result.traffic.path if result.traffic is not None else None
    if path is not None and path.link not in (None, "nvlink") and path.nvlink_bytes is not None:
        yield finding("traffic-off-nvlink", path=path.text)


def disturbances(result: CaseResult, earlier: Sequence[CaseResult]) -> list[Finding]:
    """Return the findings on the disturbances of a result: one may be the cause of a failure; see `findings.findings`.

    Limits of power and heat are reported once: under full load a GPU works at the limit of its power.
    """
    texts = _once([text for profile in result.profiles for text in profile.invalid])
    power = [text for text in texts if window.is_power(text)]
    others = [text for text in texts if not window.is_power(text)]
    found = [finding("profile-invalid", disturbances="; ".join(others))] if others else []
    if power and not has_finding("clocks-held-down", earlier):
        found.append(finding("clocks-held-down", disturbances="; ".join(power)))
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


def imbalance(launch: Launch) -> Iterator[Finding]:
    """Yield the rank or the device of a launch that the others wait for, and the device that is full first.

    Ranks that share every layer wait for each other in kernels, which NVML counts as busy: their device times, which
    have no collectives, are compared. The devices of one rank are compared by their utilisation.
    """
    times_s = device_times_s(launch) or []
    yield from _largest("slower-rank", dict(enumerate(times_s)), above=_SLOWER)
    if (profile := launch.profile) is not None and profile.samples >= _SAMPLES and len(times_s) <= 1:
        metrics = {device.index: of_window(profile, device, "utilization_pct") for device in profile.devices}
        busy = {index: None if isinstance(metric, str) else metric.mean for index, metric in metrics.items()}
        yield from _largest("imbalanced-work", busy, least=_ABOVE_PCT)
    full, kind = {memory.index: memory.nvml_used_max_bytes for memory in launch.memory}, "in use"
    if None in full.values():
        full, kind = {memory.index: memory.peak_reserved_bytes for memory in launch.memory}, "reserved by torch"
    sizes = {index: None if size is None else size / GIB for index, size in full.items()}
    yield from _largest("imbalanced-memory", sizes, least=_ABOVE_GIB, kind=kind)


def _largest(
    code: str, values: Mapping[int, float | None], *, least: float = 0.0, above: float = _ABOVE, **figures: object
) -> Iterator[Finding]:
    """Yield the largest value, if it is above the median of all by `least` and by the factor `above`.

    Nothing is compared where a value is unknown, or there are fewer than two.
    """
    known = {index: value for index, value in values.items() if value is not None}
    if len(known) < max(2, len(values)):
        return
    index = max(known, key=known.__getitem__)
    median = statistics.median(known.values())
    if known[index] - median > least and known[index] > above * median:
        yield finding(code, index=index, value=known[index], median=median, **figures)
