"""Disturbances of a profile: signs that the figures of a window are not those of the case alone."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_llmgpu.report.result import CaseResult, HostUse, Launch, Profile
from pytest_llmgpu.report.text import GIB, MIB

_THROTTLED = 0.005
"""Throttling up to this fraction of a window is ignored: a time changes by no more than it. NVML also counts the
milliseconds of power capping with which many steps from idle to busy begin."""

_IDLE_BYTES = 64 * MIB
"""An idle GPU uses a few MiB besides what the driver reserves; a CUDA context needs over 100 MiB."""

_BUSY = 0.1
"""A thread that waits for a core for a larger part makes a window longer; on an idle machine it is below 0.01."""

_LOST = ("GPU is lost", "GPU requires restart")
"""NVML's messages for a GPU that is no longer on the bus or must be reset."""

_COOLER = "Cool the GPUs, or lock their clocks (nvidia-smi --lock-gpu-clocks)."
_ALONE = "End the other programs on these GPUs; nvidia-smi lists them."
_BROKEN = "Read the driver's log (dmesg), and reset or replace the GPU."
_FREE = "End the other programs on this machine (top lists them), or lower OMP_NUM_THREADS to its free cores."

_KINDS: dict[str, tuple[str, str, str]] = {
    "lost": ("GPU no longer reachable", "GPU {index} ({value})", _BROKEN),
    "throttled": ("throttled by power or heat", "GPU {index} for {value:.1f} % of the time", _COOLER),
    "processes": (
        "processes of other programs",
        "GPU {index} has {value:.0f} besides {expected:.0f} of this run",
        _ALONE,
    ),
    "memory": ("memory in use before the start", "GPU {index} had {value:.2f} GiB", _ALONE),
    "ecc": ("uncorrectable ECC errors", "GPU {index} had {value:.0f}", _BROKEN),
    "xid": ("GPU errors in the driver log (Xid, see dmesg)", "GPU {index} had {value:.0f}", _BROKEN),
    "cpu": ("CPU cores too busy", "", _FREE),
}
"""The beginning of the sentence about each kind, the text about one device, and the next step."""

TITLES = {kind: title for kind, (title, _, _) in _KINDS.items()}
"""The beginning of the sentence about each kind."""


def find(
    profile: Profile, ranks_per_device: Mapping[str, int] | None = None, used_before: Mapping[str, int] | None = None
) -> list[str]:
    """Return one sentence for each kind of disturbance of a profile, with all its devices and without a full stop.

    A value that could not be read is no disturbance. By the UUID of a device, `ranks_per_device` has the number of this
    run's processes, None if it is not known, and `used_before` the bytes in use before any rank was started.
    """
    found: dict[str, list[str]] = {}
    for device in profile.devices:

        def add(kind: str, value: float | str, expected: float = 0, index: int = device.index) -> None:
            found.setdefault(kind, []).append(_KINDS[kind][1].format(index=index, value=value, expected=expected))

        lost = [reason for reason in device.why.values() if reason.endswith(_LOST)]
        if lost:
            add("lost", lost[0])
        if (throttled_s := device.throttled_s or 0.0) > _THROTTLED * profile.duration_s:
            # Power and heat are counted separately and can overlap; the counters are read just outside the window.
            add("throttled", 100 * min(1.0, throttled_s / profile.duration_s) if profile.duration_s else 100)
        # Not compared by id: process ids in a container are of another namespace.
        ours, processes = (ranks_per_device or {}).get(device.uuid, 0), device.counters.get("compute_processes", 0)
        if ranks_per_device is not None and processes > ours:
            add("processes", processes - ours, ours)
        if (used_bytes := (used_before or {}).get(device.uuid, 0)) > _IDLE_BYTES:
            add("memory", used_bytes / GIB)
        if (errors := device.counters.get("ecc_uncorrected", 0)) > 0:
            add("ecc", errors)
        if (errors := device.counters.get("xids", 0)) > 0:
            add("xid", errors)
    return [f"{title}: {', '.join(found[kind])}" for kind, title in TITLES.items() if kind in found]


def busy_cpu(host: HostUse, *, on_cpu: bool) -> str | None:
    """Return a sentence on the rank that waited longest for a CPU core; None where the machine was idle enough.

    Where the kernel does not count how long a thread waits, a rank that computes on the CPU counts as waiting if its
    threads ran for too short a time while processes of the machine waited. On a GPU one thread starts the kernels.
    """
    if not host.wall_s:
        return None
    pressure = (host.pressure_s or 0.0) / host.wall_s
    found = []
    for rank, (threads, cpu_s, waited_s) in enumerate(zip(host.threads, host.cpu_s, host.waited_s, strict=True)):
        got = cpu_s / (host.wall_s * (threads if on_cpu else 1))
        if waited_s is None:
            lost, text = 1 - got if on_cpu and pressure > _BUSY else 0.0, f"had {100 * got:.0f} % of its CPU time"
        else:
            lost = waited_s / host.wall_s
            text = f"waited for a core for {100 * lost:.0f} % of the time"
        found.append((lost, -rank, f"{TITLES['cpu']}: rank {rank} {text}"))
    lost, _, text = max(found, default=(0.0, 0, ""))
    return text if lost > _BUSY else None


def is_power(sentence: str) -> bool:
    """Return whether a sentence of `find` is about the power and heat limits of a GPU."""
    return sentence.startswith(("throttled by power", "SM clock"))  # the second one in earlier reports


def remedy(sentence: str) -> str:
    """Return the next step for the disturbance of a sentence of `find`; empty for other sentences."""
    return next((_KINDS[kind][2] for kind, title in TITLES.items() if sentence.startswith(title)), "")


def of_profile(profile: Profile) -> list[str]:
    """Return the disturbances of a profile: `invalid`, and what its counters show (errors of ECC, Xid, a lost GPU)."""
    return list(dict.fromkeys([*profile.invalid, *find(profile)]))


def disturbed(launch: Launch, *, by_host: bool = False) -> str | None:
    """Return the first disturbance of the GPUs of a launch, or also of its host, without a full stop.

    A GPU under full load reaches its power limit. A busy CPU changes times, not memory.
    """
    found = [] if launch.profile is None else of_profile(launch.profile)
    texts = (text for text in found if not is_power(text) and (by_host or not text.startswith(TITLES["cpu"])))
    return next((text.rstrip(".") for text in texts), None)


def untimed(launch: Launch, metric: str = "time") -> str | None:
    """Return the reason why a time of a launch is not used, without a full stop; None if it is used.

    A busy CPU does not change the device time of forwards that were launched ahead.
    """
    ahead = metric == "device_time" and bool(launch.ranks) and all(rank.launched_ahead for rank in launch.ranks)
    no_time = bool(launch.batches.latency_s) and min(launch.batches.latency_s) <= 0
    return disturbed(launch, by_host=not ahead) or ("the time of a batch is 0 s" if no_time else None)


def of_case(result: CaseResult, metric: str = "time") -> str | None:
    """Return why a time of a case is not used: half of its launches are disturbed; else the median is not."""
    found = [why for launch in result.launches if (why := untimed(launch, metric)) is not None]
    return found[0] if found and 2 * len(found) >= len(result.launches) else None
