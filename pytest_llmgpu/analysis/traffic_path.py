"""Finds which links carried the traffic of a case: the bytes that its devices counted beside those it sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import DeviceProfile, Link, Path, Profile, Traffic
from pytest_llmgpu.report.text import byte_size, percent, signed_percent

FASTEST_FIRST: tuple[Link, ...] = get_args(Link)
"""The links from the fastest to the slowest."""

NAMES: dict[Link, str] = {
    "nvlink": "NVLink",
    "mixed": "NVLink and PCIe",
    "pcie": "PCIe",
    "host": "PCIe by way of the host's memory",
}

_AGREE = 0.01
"""A rank agrees with all ranks together if their ratios of counted to sent bytes differ by this or less."""

_ALL = 0.9
"""A link that counted this fraction of the bytes that a rank sent carried them; one with the rest or less did not."""

_MOST = 0.5
"""PCIe, which is sampled, carried the bytes that NVLink did not carry if it counted this fraction of them. NVLink
carried all bytes if it counted this fraction and PCIe did not: sums in the NVLink switch take fewer bytes than a ring,
0.57 of them with 8 GPUs."""

_UNKNOWN = "an unknown part"

_COVERED = 0.9
"""Readings that cover less of a window miss bytes."""


class _Sender(NamedTuple):
    """A rank with its device, or a process with all of its devices; None where a device was not counted."""

    name: str
    """The name in messages: `GPU 2` or `all GPUs`."""
    expected: int
    """Bytes that the program itself sent."""
    nvlink: float | None
    """Bytes sent over NVLink."""
    pcie: float | None
    """Bytes sent over PCIe."""
    pcie_received: float | None
    """Bytes received over PCIe."""

    @property
    def share(self) -> float:
        """NVLink's bytes as a fraction of the bytes that the program sent."""
        return (self.nvlink or 0.0) / self.expected


def of_case(traffic: Traffic, profile: Profile, environment: Environment) -> Path:
    """Return the path of a case's traffic as the report holds it.

    Each rank is compared with its own device: in a sum over all ranks, one that sends too much hides one that sends too
    little. A process with several devices is compared with their sum, since its bytes are not counted per device.
    NVLink's counters are exact; PCIe's bytes include those to and from the host. The GPUs cannot distinguish bytes that
    go straight to another GPU over PCIe from bytes that go through the host's memory: that is known only where an NCCL
    variable forbids the direct path.
    """
    # GPUs do not count what they send to other nodes.
    sent = [sum(one.sent_bytes - (one.between_nodes_bytes or 0) for one in rank) for rank in traffic.ranks]
    total = _sender("all GPUs", sum(sent), profile, profile.devices)
    senders = [total] if total.expected and profile.devices else []
    if len(sent) == len(profile.devices):
        ranks = zip(sent, profile.devices, strict=True)
        senders = [_sender(f"GPU {device.index}", size, profile, [device]) for size, device in ranks if size]
    nvlinks = {gpu.uuid: gpu.nvlinks for gpu in environment.gpus}
    has_nvlink = not profile.devices or any(nvlinks.get(device.uuid, 1) for device in profile.devices)
    links = {_link(sender, has_nvlink=has_nvlink) for sender in senders}
    link: Link | None = None
    if senders and None not in links:
        link = links.pop() if len(links) == 1 else "mixed"
    variables = environment.variables
    indirect = variables.get("NCCL_P2P_DISABLE", "0") not in ("", "0")
    indirect = indirect or variables.get("NCCL_P2P_LEVEL") in ("0", "LOC")
    # Copies within one process do not use NCCL.
    if link == "pcie" and indirect and any(one.collective != "peer_copy" for rank in traffic.ranks for one in rank):
        link = "host"
    if total.expected == 0:
        text = f"Nothing is sent from GPU to GPU{' of the same node' if traffic.sent_bytes else ''}."
    elif not profile.devices:
        text = f"Not known: there is no GPU profile ({_reason(profile, '')})."
    elif link is None and total.nvlink is None and has_nvlink:
        text = f"Not known: bytes over NVLink were not counted ({_reason(profile, 'nvlink_tx')})."
    else:
        where = "Not known" if link is None else f"Over {NAMES[link]}"
        text = f"{where}: {_describe(link, total, senders, profile)}."
    return Path(link=link, nvlink_bytes=total.nvlink, pcie_bytes=total.pcie, expected_bytes=total.expected, text=text)


def _sender(name: str, expected: int, profile: Profile, devices: Sequence[DeviceProfile]) -> _Sender:
    nvlink = [device.counters.get("nvlink_tx_bytes") for device in devices]
    pcie, received = ([pcie_bytes(profile, device, way) for device in devices] for way in ("tx", "rx"))
    totals = (None if None in all_ or not all_ else sum(filter(None, all_), 0.0) for all_ in (nvlink, pcie, received))
    return _Sender(name, expected, *totals)


def _link(sender: _Sender, *, has_nvlink: bool) -> Link | None:
    """Return the link that carried the bytes of a rank, `pcie` also by way of the host; None where it is unknown."""
    if sender.nvlink is None and has_nvlink:
        return None
    if sender.share >= _ALL:
        return "nvlink"
    if sender.pcie is None or sender.pcie_received is None:
        return "pcie" if sender.nvlink is None else None  # without NVLink it is the only path
    if min(sender.pcie, sender.pcie_received) >= _MOST * (1 - sender.share) * sender.expected:
        return "pcie" if sender.share <= 1 - _ALL else "mixed"
    return "nvlink" if sender.share >= _MOST else None


def _describe(link: Link | None, total: _Sender, senders: Sequence[_Sender], profile: Profile) -> str:
    """Return the bytes that the program sent and those that the links counted, in words."""
    text = f"the program sent {byte_size(total.expected)}"
    text += "; there is no NVLink" if total.nvlink is None else f"; NVLink carried {byte_size(total.nvlink)}"
    if link == "nvlink":
        worst = max(senders, key=lambda sender: abs(sender.share - 1))
        text += f" ({signed_percent(total.share - 1, 2)})"
        return text + f", of {worst.name} {signed_percent(worst.share - 1)}" * (abs(worst.share - total.share) > _AGREE)
    if total.pcie is None or total.pcie_received is None:
        return f"{text}; bytes over PCIe were not counted ({_reason(profile, 'pcie_')})"
    both = f"{byte_size(total.pcie)} sent and {byte_size(total.pcie_received)} received"
    return f"{text}; PCIe {both}, with packet headers and the host's bytes"


def _reason(profile: Profile, name: str) -> str:
    """Return why something was not counted."""
    reasons = [reason for device in profile.devices for key, reason in device.why.items() if key.startswith(name)]
    metrics = [item for device in profile.devices for item in device.metrics.items()]
    covered = [one.coverage for key, one in metrics if key.startswith(name) and one.coverage]
    if not reasons and covered and min(covered) < _COVERED:
        reasons = [f"its readings cover {percent(min(covered), 0)} of the time"]
    default = profile.why.get("profile") or profile.why.get("samples") or "no reason was recorded"
    return (reasons or [default])[0].rstrip(".")


def pcie_bytes(profile: Profile, device: DeviceProfile, way: str) -> float | None:
    """Return the bytes over PCIe in the readings of a device; None where the readings cover too little of the window.

    A tenth of the window, at its ends, may be without a reading: no bytes are added for it. `way` is `tx` for sent
    bytes, `rx` for received ones.
    """
    metric = device.metrics.get(f"pcie_{way}_bytes_per_s")
    if metric is None or metric.mean is None or metric.coverage is None or metric.coverage < _COVERED:
        return None
    return metric.mean * metric.coverage * profile.duration_s


def describe_move(base: Path, head: Path) -> str:
    """Return how the path of traffic changed, in words without a full stop; both paths are known."""
    assert base.link is not None
    assert head.link is not None
    name, sizes = "NVLink", [base.nvlink_bytes, head.nvlink_bytes]
    if sizes == [None, None]:
        name, sizes = "PCIe", [base.pcie_bytes, head.pcie_bytes]
    then, now = (_UNKNOWN if size is None else byte_size(size) for size in sizes)
    before, after = byte_size(base.expected_bytes), byte_size(head.expected_bytes)
    carried = f"{name} carried {then} for {before} sent, now {now} for {after}"
    return f"moved from {NAMES[base.link]} to {NAMES[head.link]}: {carried}"
