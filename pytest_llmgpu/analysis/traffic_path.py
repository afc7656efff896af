"""Which links carried a case's traffic, by the devices' counters; and whether two cases went the same way."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, get_args

from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.machine import Environment
from pytest_llmgpu.report.result import DeviceProfile, Link, Path, Profile, Traffic

__all__ = ["AGREE", "FASTEST_FIRST", "NAMES", "moved", "of_case", "pcie_bytes"]

AGREE = 0.01
"""Counters and account are the same within this."""

FASTEST_FIRST: tuple[Link, ...] = get_args(Link)

NAMES: dict[Link, str] = {
    "nvlink": "NVLink",
    "mixed": "NVLink and PCIe",
    "pcie": "PCIe",
    "host": "PCIe by way of the host's memory",
}

_ALL = 0.9
"""A link that shows so much of what a rank sent has carried it; one that shows no more than the rest has not."""

_MOST = 0.5
"""PCIe, which is sampled, has carried what NVLink has not if it shows so much of it. NVLink has carried all if it shows
so much and PCIe does not: sums that its switch computes take fewer bytes than a ring's, 0.57 of them with 8 GPUs."""

_COVERED = 0.9
"""Readings that speak for less of a window leave bytes out."""

_LL128 = (1.05, 1.08)
"""What NCCL's LL128 protocol sends per byte: 8 bytes of every 128 are flags."""

_LL = (1.5, 2.1)
"""The same of its LL protocol, in which every second 4 bytes are a flag; less where some messages are sent without."""

_MIXED_BYTES = 32 << 20
"""NCCL chooses a protocol by the size of a message: 4 H200 over NVLink sent less than 2 MB by LL, less than 10 MB by
LL128, and a mix of sizes between 1.04 and 1.71 bytes per byte. Cases whose messages are larger than this have none."""

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class _Sender(NamedTuple):
    """A rank and its device, or a process with all of its; in bytes, None where one of them was not counted."""

    name: str
    expected: int
    """What it put on the wire, by the program's own account."""
    nvlink: float | None
    """Sent over NVLink."""
    nvlink_received: float | None
    pcie: float | None
    """Sent over PCIe."""
    pcie_received: float | None

    @property
    def share(self) -> float:
        """What NVLink shows of what it sent."""
        return (self.nvlink or 0.0) / self.expected


def of_case(traffic: Traffic, profile: Profile, environment: Environment) -> Path:
    """Return the path of what a case sent.

    A rank is held against its own device: in a sum over all of them, one that sends too much hides one that sends too
    little. A process that has several devices is held against their sum, since nobody counts for which of them it
    sends. NVLink's counters are exact; on PCIe everything counts that goes to or comes from the host too. Whether bytes
    on PCIe went straight to the other GPU or by way of the host's memory looks alike to the GPUs: that is known only
    where NCCL was told not to go straight.

    Args:
        traffic: What the program itself sent in the window.
        profile: What the devices' counters saw in it, in the order of the ranks.
        environment: Of the session: its GPUs, how they are joined, and NCCL's variables.
    """
    message_bytes = _message_bytes(traffic)
    total = _sum("all GPUs", traffic.sent_bytes, profile, profile.devices)
    senders = _senders(traffic, profile, total)
    links = {_link(sender, without_nvlink=_without_nvlink(profile, environment)) for sender in senders}
    link: Link | None = None
    if senders and None not in links:
        link = next(iter(links)) if len(links) == 1 else "mixed"
    if link == "pcie" and _by_host(traffic, environment):
        link = "host"
    joined = _joined(profile, environment)
    if total.expected == 0:
        text = "Nothing is sent from GPU to GPU"
    elif not profile.devices:
        text = f"Not known: there is no GPU profile ({_reason(profile, '')})"
    elif link == "nvlink":
        text = f"Over {NAMES[link]}{joined}: {_compared(total, senders, profile, message_bytes)}"
    elif link == "mixed":
        text = f"Over {NAMES[link]}{joined}: NVLink shows {_size(total.nvlink or 0)}, PCIe {_on_pcie(total, profile)}"
    elif link is not None:
        nvlink = "there is no NVLink" if total.nvlink is None else f"NVLink shows {_size(total.nvlink)}"
        text = f"Over {NAMES[link]}{joined}: {_on_pcie(total, profile)}; {nvlink}"
    elif total.nvlink is None and not _without_nvlink(profile, environment):
        text = f"Not known: what went over NVLink was not counted ({_reason(profile, 'nvlink_tx')})"
    elif total.pcie is None or total.pcie_received is None:
        nvlink = f"; NVLink shows {_size(total.nvlink)} of {_size(total.expected)}" if total.nvlink else ""
        text = f"Not known: what went over PCIe was not counted ({_reason(profile, 'pcie_')}){nvlink}"
    else:
        text = (
            f"Not known: of the {_size(total.expected)} that the program sent, NVLink shows {_size(total.nvlink or 0)} "
            f"and PCIe {_size(total.pcie)} sent and {_size(total.pcie_received)} received"
        )
    return Path(
        link=link,
        nvlink_bytes=total.nvlink,
        pcie_bytes=total.pcie,
        expected_bytes=total.expected,
        nvlink_shares=[] if total.nvlink is None else [round(sender.share, 6) for sender in senders],
        text=f"{text}.",
    )


def moved(base: Path, head: Path) -> str | None:
    """Return that the traffic takes another path than before, in words without a stop; None where it does not.

    Args:
        base: The path of the baseline.
        head: The path of the case in question.
    """
    if base.link is None or head.link is None or base.link == head.link:
        return None
    if base.nvlink_bytes is None and head.nvlink_bytes is None:
        name, then, now = "PCIe", base.pcie_bytes, head.pcie_bytes
    else:
        name, then, now = "NVLink", base.nvlink_bytes, head.nvlink_bytes
    return (
        f"moved from {NAMES[base.link]} to {NAMES[head.link]}: {name} carried {_counted(then)} for "
        f"{_size(base.expected_bytes)} sent, now {_counted(now)} for {_size(head.expected_bytes)}"
    )


def pcie_bytes(profile: Profile, device: DeviceProfile, way: str) -> float | None:
    """Return the bytes over PCIe that a device's readings account for; None where they leave some of the window out.

    Of a tenth at most of the window, at its very ends, there may be no reading: for it nothing is added.

    Args:
        profile: The window.
        device: One of its devices.
        way: `tx` for what the device sent, `rx` for what it received.
    """
    metric = device.metrics.get(f"pcie_{way}_bytes_per_s")
    if metric is None or metric.mean is None or metric.coverage is None or metric.coverage < _COVERED:
        return None
    return metric.mean * metric.coverage * profile.duration_s


def _senders(traffic: Traffic, profile: Profile, total: _Sender) -> list[_Sender]:
    """Return who sent something, each with its own device; of all together where a process has several."""
    sent = [sum(one.sent_bytes for one in rank) for rank in traffic.ranks]
    if len(sent) != len(profile.devices):
        return [total] if total.expected and profile.devices else []
    ranks = zip(sent, profile.devices, strict=True)
    return [_sum(f"GPU {device.index}", size, profile, [device]) for size, device in ranks if size]


def _sum(name: str, expected: int, profile: Profile, devices: list[DeviceProfile]) -> _Sender:
    nvlink = [[device.counters.get(f"nvlink_{way}_bytes") for device in devices] for way in ("tx", "rx")]
    pcie = [[pcie_bytes(profile, device, way) for device in devices] for way in ("tx", "rx")]
    return _Sender(name, expected, *(_total(sizes) for sizes in (*nvlink, *pcie)))


def _total(sizes: list[float | None]) -> float | None:
    """Return the sum; None where one of them is not known, or there is none."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _link(sender: _Sender, *, without_nvlink: bool) -> Link | None:
    """Return what carried what a rank sent, straight or not; None where its device's counters cannot tell."""
    if sender.nvlink is None and not without_nvlink:
        return None
    if sender.share >= _ALL:
        return "nvlink"
    if sender.pcie is None or sender.pcie_received is None:
        return "pcie" if sender.nvlink is None else None  # where there is no NVLink, it is the only way
    if min(sender.pcie, sender.pcie_received) >= _MOST * (1 - sender.share) * sender.expected:
        return "pcie" if sender.share <= 1 - _ALL else "mixed"
    return "nvlink" if sender.share >= _MOST else None


def _message_bytes(traffic: Traffic) -> float:
    """Return the mean payload of what ranks send at once; infinite where they do not send by NCCL."""
    sent = [one for rank in traffic.ranks for one in rank if one.sent_bytes and one.collective != "peer_copy"]
    return sum(one.payload_bytes for one in sent) / sum(one.calls for one in sent) if sent else math.inf


def _compared(total: _Sender, senders: list[_Sender], profile: Profile, message_bytes: float) -> str:
    """Return what NVLink's counters say of the account: of all together, and of the rank that is farthest off."""
    ratio = total.share
    worst = max(senders, key=lambda sender: abs(sender.share - 1))
    if abs(worst.share - 1) <= AGREE:
        return f"{_size(total.nvlink or 0)}, what the program sent ({_pct(ratio - 1, 2)})"
    gap = f"{_size(total.nvlink or 0)} where the program sent {_size(total.expected)} ({_pct(ratio - 1, 1)})"
    alike = abs(worst.share - ratio) <= AGREE
    if not alike:
        gap += (
            f", {worst.name} {_size(worst.nvlink or 0)} where its rank sent {_size(worst.expected)} "
            f"({_pct(worst.share - 1, 1)})"
        )
    seen = total if abs(ratio - 1) > AGREE else worst
    small_bytes = message_bytes if alike and message_bytes <= _MIXED_BYTES else None
    return f"{gap}. {'. '.join(_explanations(seen, profile, small_bytes))}"


def _explanations(seen: _Sender, profile: Profile, small_bytes: float | None) -> list[str]:
    """Return what may explain the gap, as far as the data tell: sentences without their stops.

    Args:
        seen: Whose gap it is.
        profile: Of the window.
        small_bytes: Mean size of the messages where NCCL's protocols may explain a gap that all ranks share; else None.
    """
    ratio, sent, received, pcie = seen.share, seen.nvlink or 0.0, seen.nvlink_received, seen.pcie
    found = []
    if received is not None and abs(sent - received) > AGREE * max(sent, received):
        found.append(
            f"These GPUs received {_size(received)}: the rest of it went to or came from a GPU of another tenant"
        )
    if disturbances.disturbed(profile) is not None:
        found.append("Something else was at work in this window (`profile.invalid`)")
    if small_bytes is not None and _LL128[0] <= ratio <= _LL128[1]:
        found.append("NCCL's LL128 protocol sends 8 bytes of flags with every 120: 6.7 % more")
    elif small_bytes is not None and _LL[0] <= ratio <= _LL[1]:
        found.append("NCCL's LL protocol, for small messages, sends as many bytes of flags as of data")
    elif small_bytes is not None and 1 < ratio < _LL[0]:
        found.append(
            f"NCCL may have sent the smaller of these messages ({_size(small_bytes)} on average) by its LL protocol, "
            "with as many bytes of flags as of data, or by LL128, with 6.7 % of flags"
        )
    elif ratio < 1 and pcie is not None and pcie >= _MOST * (seen.expected - sent):
        found.append(f"PCIe carried {_size(pcie)} meanwhile: a part may have gone that way")
    elif ratio < 1:
        found.append("Sums that the NVLink switch computes (NVLS) take fewer bytes than a ring's")
    if not found:
        found.append("Look for another program on these GPUs, or another algorithm of NCCL's (NCCL_DEBUG=INFO tells)")
    return found


def _on_pcie(total: _Sender, profile: Profile) -> str:
    if total.pcie is None or total.pcie_received is None:
        return f"{_counted(None)} of {_size(total.expected)} ({_reason(profile, 'pcie_')})"
    return (
        f"{_size(total.pcie)} sent and {_size(total.pcie_received)} received, packet headers and the host's own "
        f"included, where the program sent {_size(total.expected)}"
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
    told = [reason for device in profile.devices for key, reason in device.why.items() if key.startswith(name)]
    metrics = [item for device in profile.devices for item in device.metrics.items()]
    covered = [one.coverage for key, one in metrics if key.startswith(name) and one.coverage]
    if not told and covered and min(covered) < _COVERED:
        told = [f"its readings speak for {100 * min(covered):.0f} % of the time"]
    otherwise = profile.why.get("profile") or profile.why.get("samples") or "no reason was recorded"
    return (told or [otherwise])[0].rstrip(".")


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
