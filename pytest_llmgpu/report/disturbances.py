"""Whether a profile speaks for its case alone: evidence that something else was measured with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from pytest_llmgpu.report.result import DeviceProfile, Launch, Profile

__all__ = ["clocks_mhz", "disturbed", "first_alike", "invalid", "is_power", "slowest_mhz", "untimed"]

_THROTTLED = 0.005
"""Throttled for no more of a window than this is not worth a word. NVML counts the few milliseconds of power capping
with which many a step from idle to busy begins, too; and less than this can change a time by no more than this, a
quarter of the 2 % by which launches differ anyway."""

_CLOCK = 0.05
"""An SM clock that is off by more than this is another machine's, as far as times go."""

_KIND_THROTTLED = "throttled by power or heat"
_KIND_CLOCK = f"SM clock more than {100 * _CLOCK:.0f} % off that of the session's first case"

_FEW_READINGS = 3
"""The median of fewer readings of a clock is one moment's."""

_IDLE_BYTES = 64 << 20
"""An idle GPU has a few MiB in use beside the driver's reserve; the context of a program alone is over 100 MiB."""

_GONE = ("GPU is lost", "GPU requires restart")
"""How NVML words that a GPU fell off the bus, or has to be reset."""

_GIB = 1 << 30
_NOT_KNOWN: Mapping[str, int] = MappingProxyType({})


def invalid(
    profile: Profile,
    first: Profile | None = None,
    ranks_per_device: Mapping[str, int] | None = None,
    used_before: Mapping[str, int] = _NOT_KNOWN,
) -> list[str]:
    """Return what speaks against a profile, each kind of it in a sentence without its stop; nothing where all is well.

    Processes are counted, since process ids seen from a container are of another namespace. What could not be read
    (the reason is in the device's `why`) is no evidence.

    Args:
        profile: What was seen of the case.
        first: What was seen of the session's first case on these devices; None where there is none.
        ranks_per_device: UUID to how many of our processes compute there; others have none. None where that is not
            known.
        used_before: UUID to the bytes in use before any rank was started, as far as that is known.
    """
    clocks = {} if first is None else clocks_mhz(first)
    kinds: dict[str, Callable[[DeviceProfile], str | None]] = {
        "no longer answering": _lost,
        _KIND_THROTTLED: lambda device: _throttled(device, profile.duration_s),
        _KIND_CLOCK: (lambda device: _off_clock(clocks_mhz(profile).get(device.uuid), clocks.get(device.uuid))),
        "programs of others at work": lambda device: _strangers(device, ranks_per_device),
        "memory in use before the start": lambda device: _occupied(used_before.get(device.uuid, 0)),
        "memory errors that ECC could not correct": lambda device: _count(device, "ecc_uncorrected"),
        "errors of the GPU that the driver logged (Xid, see dmesg)": lambda device: _count(device, "xids"),
    }
    sentences = []
    for kind, say in kinds.items():
        said = [f"GPU {device.index} {text}" for device in profile.devices if (text := say(device))]
        if said:
            sentences.append(f"{kind}: {', '.join(said)}")
    return sentences


def is_power(sentence: str) -> bool:
    """Return whether a sentence of `invalid` says how fast these GPUs are allowed to be, and blames nobody else."""
    return sentence.startswith((_KIND_THROTTLED, _KIND_CLOCK))


def disturbed(profile: Profile) -> str | None:
    """Return the first sentence of `invalid` that blames somebody else; full load at the power limit is none."""
    return next((text for text in profile.invalid if not is_power(text)), None)


def untimed(launch: Launch) -> str | None:
    """Return why a launch's times count for nothing, without its stop; None where they count."""
    if launch.profile is not None and (told := disturbed(launch.profile)) is not None:
        return told.rstrip(".")
    if launch.batches.latency_s and min(launch.batches.latency_s) <= 0:
        return "a batch took no time at all"
    return None


def first_alike(profiles: Iterable[Profile | None], profile: Profile) -> Profile | None:
    """Return the first profile of the same devices that knows their clocks; None where there is none.

    Args:
        profiles: Those of the session so far, in order.
        profile: The one to find a yardstick for.
    """
    uuids = {device.uuid for device in profile.devices}
    for other in profiles:
        if other is not None and {device.uuid for device in other.devices} == uuids == set(clocks_mhz(other)):
            return other
    return None


def _lost(device: DeviceProfile) -> str | None:
    return next((f"({reason})" for reason in device.why.values() if reason.endswith(_GONE)), None)


def _throttled(device: DeviceProfile, duration_s: float) -> str | None:
    throttled_s = device.throttled_s or 0.0
    if throttled_s <= _THROTTLED * duration_s:
        return None
    # Power and heat are counted apart and may overlap, and the counters are read a moment beyond the window's ends.
    fraction = min(1.0, throttled_s / duration_s) if duration_s else 1.0
    return f"for {100 * fraction:.1f} % of the time"


def clocks_mhz(profile: Profile) -> dict[str, float]:
    """Return UUID to the median SM clock, of those with enough readings."""
    if profile.series is None or profile.samples < _FEW_READINGS:
        return {}
    columns = (column.get("sm_clock_mhz", []) for column in profile.series.devices)
    readings = [[mhz for mhz in column if mhz is not None] for column in columns]
    return {
        device.uuid: statistics.median(of_device)
        for device, of_device in zip(profile.devices, readings, strict=True)
        if len(of_device) >= _FEW_READINGS
    }


def slowest_mhz(profile: Profile) -> float | None:
    """Return the mean SM clock of the device that had the lowest; None where a device's is not known."""
    means = [
        None if (clock := device.metrics.get("sm_clock_mhz")) is None else clock.mean for device in profile.devices
    ]
    return min((mhz for mhz in means if mhz is not None), default=None) if None not in means else None


def _off_clock(mhz: float | None, first_mhz: float | None) -> str | None:
    if mhz is None or first_mhz is None or abs(mhz - first_mhz) <= _CLOCK * first_mhz:
        return None
    return f"ran at {mhz:,.0f} instead of {first_mhz:,.0f} MHz"


def _strangers(device: DeviceProfile, ranks_per_device: Mapping[str, int] | None) -> str | None:
    if ranks_per_device is None:
        return None
    ours, processes = ranks_per_device.get(device.uuid, 0), device.counters.get("compute_processes", 0)
    return f"has {processes - ours:.0f} beside {ours} of ours" if processes > ours else None


def _occupied(used_bytes: int) -> str | None:
    return f"had {used_bytes / _GIB:.2f} GiB" if used_bytes > _IDLE_BYTES else None


def _count(device: DeviceProfile, name: str) -> str | None:
    count = device.counters.get(name, 0)
    return f"had {count:.0f}" if count > 0 else None
