"""Finds which links carried the traffic of a case, from the counters of its devices.

`decide` returns the link and the bytes, `describe` words them; `has_moved` compares the paths of two cases.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, get_args

from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import DeviceProfile, Link, Path, Profile, Traffic
from pytest_llmgpu.report.text import byte_size, percent, signed_percent

AGREE = 0.01
"""Counters agree with the bytes that the program sent if they differ by this fraction or less."""

FASTEST_FIRST: tuple[Link, ...] = get_args(Link)
"""The links from the fastest to the slowest."""

NAMES: dict[Link, str] = {
    "nvlink": "NVLink",
    "mixed": "NVLink and PCIe",
    "pcie": "PCIe",
    "host": "PCIe by way of the host's memory",
}

_ALL = 0.9
"""A link that counted this fraction of the bytes that a rank sent carried them; one with the rest or less did not."""

_MOST = 0.5
"""PCIe, which is sampled, carried the bytes that NVLink did not carry if it counted this fraction of them. NVLink
carried all bytes if it counted this fraction and PCIe did not: sums in the NVLink switch take fewer bytes than a ring,
0.57 of them with 8 GPUs."""

_COVERED = 0.9
"""Readings that cover less of a window miss bytes."""

_LL128 = (1.05, 1.08)
"""The range of bytes that NCCL's LL128 protocol sends per byte: 8 bytes of every 128 are flags."""

_LL = (1.5, 2.1)
"""The range of bytes that NCCL's LL protocol sends per byte: every second 4 bytes are a flag. Some messages may be sent
without flags."""

_MIXED_BYTES = 32 << 20
"""Messages above this size have no flags. NCCL chooses a protocol by the size of a message: on 4 H200 over NVLink
messages below 2 MB used LL, below 10 MB LL128, and mixed sizes sent 1.04 to 1.71 bytes per byte."""


class Sender(NamedTuple):
    """A rank with its device, or a process with all of its devices; None where a device was not counted."""

    name: str
    """The name in messages: `GPU 2` or `all GPUs`."""
    expected: int
    """Bytes that the program itself sent."""
    nvlink: float | None
    """Bytes sent over NVLink."""
    nvlink_received: float | None
    """Bytes received over NVLink."""
    pcie: float | None
    """Bytes sent over PCIe."""
    pcie_received: float | None
    """Bytes received over PCIe."""

    @property
    def share(self) -> float:
        """NVLink's bytes as a fraction of the bytes that the program sent."""
        return (self.nvlink or 0.0) / self.expected


class Decision(NamedTuple):
    """The path of a case's traffic, before it is worded."""

    link: Link | None
    """The link that carried the traffic; None where it is unknown or nothing was sent."""
    total: Sender
    """The bytes of all devices together."""
    senders: list[Sender]
    """Each rank that sent something, with its own device; all devices together where a process has several."""


def of_case(traffic: Traffic, profile: Profile, environment: Environment) -> Path:
    """Return the path of a case's traffic as the report holds it; see `decide` for the arguments."""
    decision = decide(traffic, profile, environment)
    total = decision.total
    return Path(
        link=decision.link,
        nvlink_bytes=total.nvlink,
        pcie_bytes=total.pcie,
        expected_bytes=total.expected,
        nvlink_shares=[] if total.nvlink is None else [round(sender.share, 6) for sender in decision.senders],
        text=describe(decision, traffic, profile, environment),
    )


def decide(traffic: Traffic, profile: Profile, environment: Environment) -> Decision:
    """Decide which links carried the traffic of a case.

    Each rank is compared with its own device: in a sum over all ranks, one that sends too much hides one that sends too
    little. A process with several devices is compared with their sum, since its bytes are not counted per device.
    NVLink's counters are exact; PCIe's bytes include those to and from the host. The GPUs cannot distinguish bytes that
    go straight to another GPU over PCIe from bytes that go through the host's memory: that is known only where an NCCL
    variable forbids the direct path.

    Args:
        traffic: The bytes that the program itself sent in the window.
        profile: The counters of the devices in the window, in the order of the ranks.
        environment: The machine: its GPUs, their topology, and NCCL's variables.
    """
    # GPUs do not count what they send to other nodes.
    inside = sum(one.inside_bytes for rank in traffic.ranks for one in rank)
    total = _sum("all GPUs", inside, profile, profile.devices)
    senders = _senders(traffic, profile, total)
    links = {_link(sender, without_nvlink=_without_nvlink(profile, environment)) for sender in senders}
    link: Link | None = None
    if senders and None not in links:
        link = next(iter(links)) if len(links) == 1 else "mixed"
    if link == "pcie" and _by_host(traffic, environment):
        link = "host"
    return Decision(link, total, senders)


def describe(decision: Decision, traffic: Traffic, profile: Profile, environment: Environment) -> str:
    """Return the path of a case's traffic in words; see `decide` for the other arguments."""
    link, total, senders = decision
    joined = _joined(profile, environment)
    if total.expected == 0:
        where = " of the same node" if traffic.sent_bytes else ""
        text = f"Nothing is sent from GPU to GPU{where}"
    elif not profile.devices:
        text = f"Not known: there is no GPU profile ({_reason(profile, '')})"
    elif link == "nvlink":
        text = f"Over {NAMES[link]}{joined}: {_compared(total, senders, profile, _message_bytes(traffic))}"
    elif link == "mixed":
        nvlink = byte_size(total.nvlink or 0)
        text = f"Over {NAMES[link]}{joined}: NVLink carried {nvlink}, PCIe {_on_pcie(total, profile)}"
    elif link is not None:
        nvlink = "there is no NVLink" if total.nvlink is None else f"NVLink carried {byte_size(total.nvlink)}"
        text = f"Over {NAMES[link]}{joined}: {_on_pcie(total, profile)}; {nvlink}"
    elif total.nvlink is None and not _without_nvlink(profile, environment):
        text = f"Not known: bytes over NVLink were not counted ({_reason(profile, 'nvlink_tx')})"
    elif total.pcie is None or total.pcie_received is None:
        nvlink = f"; NVLink carried {byte_size(total.nvlink)} of {byte_size(total.expected)}" if total.nvlink else ""
        text = f"Not known: bytes over PCIe were not counted ({_reason(profile, 'pcie_')}){nvlink}"
    else:
        text = (
            f"Not known: the program sent {byte_size(total.expected)}, NVLink carried {byte_size(total.nvlink or 0)}, "
            f"PCIe {byte_size(total.pcie)} sent and {byte_size(total.pcie_received)} received"
        )
    return f"{text}."


def has_moved(base: Path, head: Path) -> bool:
    """Return whether traffic took another path than before; False where one of the paths is unknown."""
    return base.link is not None and head.link is not None and base.link != head.link


def describe_move(base: Path, head: Path) -> str:
    """Return how the path of traffic changed, in words without a full stop; both paths are known."""
    assert base.link is not None
    assert head.link is not None
    if base.nvlink_bytes is None and head.nvlink_bytes is None:
        name, then, now = "PCIe", base.pcie_bytes, head.pcie_bytes
    else:
        name, then, now = "NVLink", base.nvlink_bytes, head.nvlink_bytes
    return (
        f"moved from {NAMES[base.link]} to {NAMES[head.link]}: {name} carried {_counted(then)} for "
        f"{byte_size(base.expected_bytes)} sent, now {_counted(now)} for {byte_size(head.expected_bytes)}"
    )


def pcie_bytes(profile: Profile, device: DeviceProfile, way: str) -> float | None:
    """Return the bytes over PCIe in the readings of a device; None where the readings cover too little of the window.

    A tenth of the window, at its ends, may be without a reading: no bytes are added for it.

    Args:
        profile: The profile of the window.
        device: One of its devices.
        way: `tx` for sent bytes, `rx` for received ones.
    """
    metric = device.metrics.get(f"pcie_{way}_bytes_per_s")
    if metric is None or metric.mean is None or metric.coverage is None or metric.coverage < _COVERED:
        return None
    return metric.mean * metric.coverage * profile.duration_s


def _senders(traffic: Traffic, profile: Profile, total: Sender) -> list[Sender]:
    """Return each rank that sent something with its device; all devices together where a process has several."""
    sent = [sum(one.inside_bytes for one in rank) for rank in traffic.ranks]
    if len(sent) != len(profile.devices):
        return [total] if total.expected and profile.devices else []
    ranks = zip(sent, profile.devices, strict=True)
    return [_sum(f"GPU {device.index}", size, profile, [device]) for size, device in ranks if size]


def _sum(name: str, expected: int, profile: Profile, devices: list[DeviceProfile]) -> Sender:
    nvlink = [[device.counters.get(f"nvlink_{way}_bytes") for device in devices] for way in ("tx", "rx")]
    pcie = [[pcie_bytes(profile, device, way) for device in devices] for way in ("tx", "rx")]
    return Sender(name, expected, *(_total(sizes) for sizes in (*nvlink, *pcie)))


def _total(sizes: list[float | None]) -> float | None:
    """Return the sum; None where one of the sizes is unknown, or there is none."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _link(sender: Sender, *, without_nvlink: bool) -> Link | None:
    """Return the link that carried the bytes of a rank, `pcie` also by way of the host; None where it is unknown."""
    if sender.nvlink is None and not without_nvlink:
        return None
    if sender.share >= _ALL:
        return "nvlink"
    if sender.pcie is None or sender.pcie_received is None:
        return "pcie" if sender.nvlink is None else None  # without NVLink it is the only path
    if min(sender.pcie, sender.pcie_received) >= _MOST * (1 - sender.share) * sender.expected:
        return "pcie" if sender.share <= 1 - _ALL else "mixed"
    return "nvlink" if sender.share >= _MOST else None


def _message_bytes(traffic: Traffic) -> float:
    """Return the mean payload of a message; infinite where the ranks do not send with NCCL."""
    sent = [one for rank in traffic.ranks for one in rank if one.sent_bytes and one.collective != "peer_copy"]
    return sum(one.payload_bytes for one in sent) / sum(one.calls for one in sent) if sent else math.inf


def _compared(total: Sender, senders: list[Sender], profile: Profile, message_bytes: float) -> str:
    """Return how NVLink's bytes differ from those sent: for all ranks, and for the rank with the largest difference."""
    ratio = total.share
    worst = max(senders, key=lambda sender: abs(sender.share - 1))
    if abs(worst.share - 1) <= AGREE:
        return f"{byte_size(total.nvlink or 0)}, as the program sent ({signed_percent(ratio - 1, 2)})"
    gap = f"{byte_size(total.nvlink or 0)}, the program sent {byte_size(total.expected)} ({signed_percent(ratio - 1)})"
    alike = abs(worst.share - ratio) <= AGREE
    if not alike:
        gap += (
            f"; {worst.name} {byte_size(worst.nvlink or 0)}, its rank sent {byte_size(worst.expected)} "
            f"({signed_percent(worst.share - 1)})"
        )
    seen = total if abs(ratio - 1) > AGREE else worst
    small_bytes = message_bytes if alike and message_bytes <= _MIXED_BYTES else None
    return f"{gap}. {'. '.join(_explanations(seen, profile, small_bytes))}"


def _explanations(seen: Sender, profile: Profile, small_bytes: float | None) -> list[str]:
    """Return the possible causes of a difference, as sentences without full stops.

    Args:
        seen: The sender with the difference.
        profile: The profile of the window.
        small_bytes: Mean size of the messages, if NCCL's protocols may be the cause in all ranks; else None.
    """
    ratio, sent, received, pcie = seen.share, seen.nvlink or 0.0, seen.nvlink_received, seen.pcie
    found = []
    if received is not None and abs(sent - received) > AGREE * max(sent, received):
        found.append(
            f"These GPUs received {byte_size(received)}: the rest went to or came from a GPU of another tenant"
        )
    if disturbances.disturbed(profile) is not None:
        found.append("The window was disturbed (see `profile.invalid`)")
    if small_bytes is not None and _LL128[0] <= ratio <= _LL128[1]:
        found.append("NCCL's LL128 protocol sends 8 bytes of flags with every 120: 6.7 % more")
    elif small_bytes is not None and _LL[0] <= ratio <= _LL[1]:
        found.append("NCCL's LL protocol, for small messages, sends as many bytes of flags as of data")
    elif small_bytes is not None and 1 < ratio < _LL[0]:
        found.append(
            f"NCCL may have sent the smaller of these messages ({byte_size(small_bytes)} on average) with its LL "
            "protocol, as many bytes of flags as of data, or with LL128, 6.7 % of flags"
        )
    elif ratio < 1 and pcie is not None and pcie >= _MOST * (seen.expected - sent):
        found.append(f"PCIe carried {byte_size(pcie)} meanwhile: a part may have used that path")
    elif ratio < 1:
        found.append("Sums that the NVLink switch computes (NVLS) take fewer bytes than a ring")
    if not found:
        found.append(
            "Look for another program on these GPUs, or for another algorithm of NCCL (NCCL_DEBUG=INFO shows it)"
        )
    return found


def _on_pcie(total: Sender, profile: Profile) -> str:
    if total.pcie is None or total.pcie_received is None:
        return f"{_counted(None)} of {byte_size(total.expected)} ({_reason(profile, 'pcie_')})"
    return (
        f"{byte_size(total.pcie)} sent and {byte_size(total.pcie_received)} received, with packet headers and the "
        f"host's bytes; the program sent {byte_size(total.expected)}"
    )


def _by_host(traffic: Traffic, environment: Environment) -> bool:
    """Return whether a variable forbids NCCL the direct path; copies within one process do not use NCCL."""
    variables = environment.variables
    forbidden = variables.get("NCCL_P2P_DISABLE", "0") not in ("", "0") or variables.get("NCCL_P2P_LEVEL") in (
        "0",
        "LOC",
    )
    return forbidden and any(one.collective != "peer_copy" for rank in traffic.ranks for one in rank)


def _without_nvlink(profile: Profile, environment: Environment) -> bool:
    """Return whether none of the devices has an active NVLink."""
    links = {gpu.uuid: gpu.nvlinks for gpu in environment.gpus}
    return bool(profile.devices) and not any(links.get(device.uuid, 1) for device in profile.devices)


def _joined(profile: Profile, environment: Environment) -> str:
    """Return how the devices are joined: ` (NV18)`, each kind once; an empty text where that is unknown."""
    places = {gpu.uuid: place for place, gpu in enumerate(environment.gpus)}
    ours = [places[device.uuid] for device in profile.devices if device.uuid in places]
    if environment.topology is None or len(ours) < len(profile.devices):
        return ""
    kinds = {environment.topology[a][b] for a, b in itertools.combinations(ours, 2)}
    return f" ({', '.join(sorted(kinds))})" if kinds else ""


def _reason(profile: Profile, name: str) -> str:
    """Return why something was not counted."""
    reasons = [reason for device in profile.devices for key, reason in device.why.items() if key.startswith(name)]
    metrics = [item for device in profile.devices for item in device.metrics.items()]
    covered = [one.coverage for key, one in metrics if key.startswith(name) and one.coverage]
    if not reasons and covered and min(covered) < _COVERED:
        reasons = [f"its readings cover {percent(min(covered), 0)} of the time"]
    default = profile.why.get("profile") or profile.why.get("samples") or "no reason was recorded"
    return (reasons or [default])[0].rstrip(".")


def _counted(size: float | None) -> str:
    return "an unknown part" if size is None else byte_size(size)
