"""Which links carried a case's traffic, by the devices' counters; and whether two cases went the same way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from pytest_llmgpu.report import Environment
from pytest_llmgpu.result import DeviceProfile, Path, Profile, Traffic

__all__ = ["moved", "of_case"]

_MOST = 0.5
"""A link that shows so much of what was sent has carried it."""

_AGREE = 0.01
"""Counters and account are the same within this."""

_LL128 = (1.05, 1.09)
"""What NCCL's LL128 protocol sends per byte: 8 bytes of every 128 are flags."""

_LL = (1.5, 2.1)
"""The same of its LL protocol, in which every second 4 bytes are a flag; less where some messages are sent without."""

_NAMES = {"nvlink": "NVLink", "pcie": "PCIe", "host": "the host's memory"}

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def of_case(traffic: Traffic, profile: Profile, environment: Environment) -> Path:
    """Return the path of what a case sent.

    NVLink's counters are exact; of PCIe the mean rate times the window is taken, in which everything counts that
    goes to or comes from the host too. Whether bytes on PCIe went straight to the other GPU or by way of the host's
    memory looks alike to the GPUs: that is known only where NCCL was told not to go straight.

    Args:
        traffic: What the program itself sent in the window.
        profile: What the devices' counters saw in it.
        environment: Of the session: its GPUs, how they are joined, and NCCL's variables.
    """
    expected = sum(one.wire_bytes for rank in traffic.ranks for one in rank if one.collective != "recv")
    sent, received = (_total(profile.devices, f"nvlink_{way}") for way in ("tx", "rx"))
    pcie = [_total(profile.devices, f"pcie_{way}", profile.duration_s) for way in ("tx", "rx")]
    link: Literal["nvlink", "pcie", "host"] | None = None
    if expected == 0:
        text = "Nothing is sent from GPU to GPU"
    elif not profile.devices:
        text = f"Not known: there is no GPU profile ({_reason(profile, '')})"
    elif sent is not None and sent >= _MOST * expected:
        link = "nvlink"
        text = f"Over NVLink{_joined(profile, environment)}: {_compared(sent, received, pcie[0], expected, profile)}"
    elif sent is None and not _without_nvlink(profile, environment):
        text = f"Not known: what went over NVLink was not counted ({_reason(profile, 'nvlink_tx')})"
    elif None in pcie:
        text = f"Not known: what went over PCIe was not counted ({_reason(profile, 'pcie_')})"
    elif min(size or 0.0 for size in pcie) >= _MOST * expected:
        link = "host" if _by_host(traffic, environment) else "pcie"
        over = "Over PCIe by way of the host's memory" if link == "host" else "Over PCIe"
        text = f"{over}{_joined(profile, environment)}: {_on_pcie(pcie, sent, expected)}"
    else:
        text = (
            f"Not known: of the {_size(expected)} that the program sent, NVLink shows {_size(sent or 0.0)} and PCIe "
            f"{_size(pcie[0] or 0.0)} sent and {_size(pcie[1] or 0.0)} received"
        )
    return Path(link=link, nvlink_bytes=sent, pcie_bytes=pcie[0], expected_bytes=expected, text=f"{text}.")


def moved(base: Path, head: Path) -> str | None:
    """Return that the traffic takes another path than before, in words without a stop; None where it does not.

    Args:
        base: The path of the baseline.
        head: The path of the case in question.
    """
    if base.link is None or head.link is None or base.link == head.link:
        return None
    return (
        f"moved from {_NAMES[base.link]} to {_NAMES[head.link]}: NVLink carried {_counted(base.nvlink_bytes)} of "
        f"{_size(base.expected_bytes)}, now {_counted(head.nvlink_bytes)} of {_size(head.expected_bytes)}"
    )


def _total(devices: Sequence[DeviceProfile], name: str, duration_s: float | None = None) -> float | None:
    """Return the bytes of all devices, by their counters or, with a duration, by their mean rates.

    None where one of them does not know.
    """
    sizes: list[float | None] = []
    for device in devices:
        metric = device.metrics.get(f"{name}_bytes_per_s")
        # Without coverage it is a reading of another time.
        rate = None if metric is None or metric.coverage == 0 else metric.mean
        if duration_s is None:
            sizes.append(device.counters.get(f"{name}_bytes"))
        else:
            sizes.append(None if rate is None else rate * duration_s)
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _compared(sent: float, received: float | None, pcie: float | None, expected: int, profile: Profile) -> str:
    """Return what NVLink's counters say of the account."""
    ratio = sent / expected
    if abs(ratio - 1) <= _AGREE:
        return f"{_size(sent)}, what the program sent ({_pct(ratio - 1, 2)})"
    gap = f"{_size(sent)} where the program sent {_size(expected)} ({_pct(ratio - 1, 1)})"
    return f"{gap}. {'. '.join(_explanations(sent, received, pcie, expected, profile))}"


def _explanations(
    sent: float, received: float | None, pcie: float | None, expected: int, profile: Profile
) -> list[str]:
    """Return what may explain the gap, as far as the data tell: sentences without their stops."""
    ratio = sent / expected
    found = []
    if received is not None and abs(sent - received) > _AGREE * max(sent, received):
        found.append(
            f"These GPUs received {_size(received)}: the rest of it went to or came from a GPU of another tenant"
        )
    if profile.invalid:
        found.append("Something else was at work in this window (`profile.invalid`)")
    if _LL128[0] <= ratio <= _LL128[1]:
        found.append("NCCL's LL128 protocol sends 8 bytes of flags with every 120: 6.7 % more")
    elif _LL[0] <= ratio <= _LL[1]:
        found.append("NCCL's LL protocol, for small messages, sends as many bytes of flags as of data")
    elif ratio < 1 and pcie is not None and pcie >= _MOST * (expected - sent):
        found.append(f"PCIe carried {_size(pcie)} meanwhile: a part may have gone that way")
    elif ratio < 1:
        found.append("Sums that the NVLink switch computes (NVLS) take fewer bytes than a ring's")
    if not found:
        found.append("Look for another program on these GPUs, or another algorithm of NCCL's (NCCL_DEBUG=INFO tells)")
    return found


def _on_pcie(pcie: Sequence[float | None], sent: float | None, expected: int) -> str:
    out, back = (size or 0.0 for size in pcie)
    nvlink = "there is no NVLink" if sent is None else f"NVLink shows {_size(sent)}"
    return (
        f"{_size(out)} sent and {_size(back)} received, packet headers and the host's own included, where the program "
        f"sent {_size(expected)}; {nvlink}"
    )


def _by_host(traffic: Traffic, environment: Environment) -> bool:
    """Return whether NCCL was told not to go straight; what one process copies is none of NCCL's."""
    variables = environment.variables
    told = variables.get("NCCL_P2P_DISABLE", "0") not in ("", "0") or variables.get("NCCL_P2P_LEVEL") in ("0", "LOC")
    return told and any(one.collective != "peer_copy" for rank in traffic.ranks for one in rank)


def _without_nvlink(profile: Profile, environment: Environment) -> bool:
    """Return whether none of the devices has an active NVLink."""
    links = {gpu.uuid: gpu.nvlinks for gpu in environment.gpus}
    return bool(profile.devices) and not any(links.get(device.uuid, 1) for device in profile.devices)


def _joined(profile: Profile, environment: Environment) -> str:
    """Return how the devices are joined: ` (NV18)`, each kind once; nothing where that is not known."""
    places = {gpu.uuid: place for place, gpu in enumerate(environment.gpus)}
    ours = [places[device.uuid] for device in profile.devices if device.uuid in places]
    if environment.topology is None or len(ours) < len(profile.devices):
        return ""
    kinds = {environment.topology[a][b] for a, b in itertools.combinations(ours, 2)}
    return f" ({', '.join(sorted(kinds))})" if kinds else ""


def _reason(profile: Profile, name: str) -> str:
    """Return why something was not counted."""
    told = (reason for device in profile.devices for key, reason in device.why.items() if key.startswith(name))
    otherwise = profile.why.get("profile") or profile.why.get("samples") or "no reason was recorded"
    return next(told, otherwise).rstrip(".")


def _counted(size: float | None) -> str:
    return "an unknown part" if size is None else _size(size)


def _pct(fraction: float, digits: int) -> str:
    return f"{100 * fraction:+.{digits}f} %"


def _size(size: float) -> str:
    """Return bytes as people read them, with three significant digits and more."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.{2 if size < 100 * unit else 1}f} {name}"
    return f"{size:.0f} bytes"
