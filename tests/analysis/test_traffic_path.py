from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from support.report_factory import make_report

from pytest_llmgpu.analysis.traffic_path import moved, of_case, pcie_bytes
from pytest_llmgpu.report.machine import Environment, Gpu
from pytest_llmgpu.report.result import Collective, CollectiveKind, DeviceProfile, Metric, Path, Profile, Traffic

GB = 10**9
_UNCOUNTED = "the counter was not read at the window's start"


def _traffic(sent: int = 10 * GB, kind: CollectiveKind = "all_reduce", ranks: int = 2, *, calls: int = 1000) -> Traffic:
    """Return what the ranks send, each the same part."""
    one = Collective(collective=kind, calls=calls, payload_bytes=sent // ranks, wire_bytes=sent // ranks)
    heard = Collective(collective="recv", calls=1, payload_bytes=7, wire_bytes=7)
    return Traffic(
        ranks=[([one] if kind == "peer_copy" else [one, heard]) if sent else [] for _ in range(ranks)],
        wire_bytes_per_sequence=1.0,
    )


def _profile(
    nvlink: float | None = None, pcie: float | None = 0.1 * GB, received: float | None = None, **fields: Any
) -> Profile:
    """Return two devices' counters over 50 s: what both together sent over NVLink and PCIe, and received."""
    counters: dict[str, float] = {}
    why = {"nvlink_tx_bytes": _UNCOUNTED} if nvlink is None else {}
    if nvlink is not None:
        counters = {"nvlink_tx_bytes": nvlink / 2, "nvlink_rx_bytes": (nvlink if received is None else received) / 2}
    mean = None if pcie is None else pcie / 2 / 50
    metrics = {
        f"pcie_{way}_bytes_per_s": Metric(mean=mean, max=mean, method="gpm", coverage=1.0) for way in ("tx", "rx")
    }
    if pcie is None:
        why["pcie_rx_bytes_per_s"] = "PCIe: Not Supported"
    devices = [
        DeviceProfile(index=index, uuid=f"GPU-{index}", counters=counters, metrics=dict(metrics), why=why)
        for index in (2, 1)
    ]
    defaults: dict[str, Any] = {
        "period_s": 1.0,
        "duration_s": 50.0,
        "samples": 50,
        "missed": 0,
        "lateness_p99_s": None,
        "devices": devices,
    }
    return Profile(**{**defaults, **fields})


def _environment(
    nvlinks: int | None = 18, joined: str = "NV18", variables: dict[str, str] | None = None
) -> Environment:
    """Return a machine of three GPUs, the first of which is not the case's."""
    environment = make_report().environment
    environment.gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="A", nvlinks=nvlinks) for index in range(3)]
    environment.topology = [["X", "SYS", "SYS"], ["SYS", "X", joined], ["SYS", joined, "X"]]
    environment.variables = variables or {}
    return environment


def test_a_case_that_sends_nothing_has_no_path() -> None:
    """Whatever its devices' links carried meanwhile."""
    path = of_case(_traffic(0), _profile(5.0 * GB, 5.0 * GB), _environment())
    assert (path.link, path.expected_bytes, path.text) == (None, 0, "Nothing is sent from GPU to GPU.")


@pytest.mark.parametrize(("counted", "agrees"), [(10.0, "+0.00 %"), (10.09, "+0.90 %"), (9.91, "-0.90 %")])
def test_nvlink_that_counted_what_was_sent_agrees(counted: float, agrees: str) -> None:
    """Within 1 %; what is received is not counted twice."""
    path = of_case(_traffic(), _profile(counted * GB), _environment())
    assert (path.link, path.expected_bytes, path.nvlink_bytes) == ("nvlink", 10 * GB, counted * GB)
    assert path.pcie_bytes == pytest.approx(0.1 * GB)
    assert path.text == f"Over NVLink (NV18): {counted * GB / GB:.2f} GB, what the program sent ({agrees})."


@pytest.mark.parametrize(
    ("counted", "fields", "gap", "explained"),
    [
        (10.67, {}, "+6.7 %", "LL128 protocol"),
        (19.9, {}, "+99.0 %", "LL protocol"),
        (8.33, {}, "-16.7 %", "NVLS"),
        (5.72, {}, "-42.8 %", "NVLS"),
        (9.3, {"pcie": 0.5 * GB}, "-7.0 %", "PCIe carried 500.0 MB meanwhile"),
        (22.0, {}, "+120.0 %", "Look for another program"),
        (22.0, {"received": 10.0 * GB}, "+120.0 %", "received 10.00 GB: the rest of it went to or came from a GPU of"),
        (22.0, {"invalid": ["programs of others at work: GPU 1"]}, "+120.0 %", "`profile.invalid`"),
        (22.0, {"invalid": ["throttled by power or heat: GPU 1"]}, "+120.0 %", "Look for another"),
    ],
)
def test_a_gap_is_told_with_what_may_explain_it(
    counted: float, fields: dict[str, Any], gap: str, explained: str
) -> None:
    """Protocol, algorithm, another path or another tenant, by what the data show."""
    path = of_case(_traffic(), _profile(counted * GB, **fields), _environment())
    assert path.link == "nvlink"
    assert f"{counted:.2f} GB where the program sent 10.00 GB ({gap}). " in path.text
    assert explained in path.text
    others = {"LL128 protocol", "LL protocol", "NVLS", "meanwhile", "Look for", "tenant", "invalid"}
    assert len([word for word in others if word in path.text]) == 1
    assert re.fullmatch(r"[^\n]*[^.]\.", path.text)


@pytest.mark.parametrize(
    ("counted", "mixed"), [(10.42, True), (10.67, False), (10.89, True), (12.46, True), (19.0, False), (9.8, False)]
)
def test_small_messages_may_go_by_several_protocols(counted: float, mixed: bool) -> None:
    """As 65B's and 13B's did at batch size 8; none sends less, and no protocol has flags for large messages."""
    words = "smaller of these messages (5.00 MB on average) by its LL"
    small, large = (of_case(_traffic(calls=calls), _profile(counted * GB), _environment()) for calls in (1000, 100))
    assert (words in small.text, "LL" in small.text, "LL" in large.text) == (mixed, counted > 10, False)
    copied = of_case(_traffic(calls=1000, kind="peer_copy"), _profile(counted * GB), _environment())
    assert "LL" not in copied.text, "NCCL did not send it"


def test_several_explanations_are_several_sentences() -> None:
    """None hides another."""
    path = of_case(_traffic(), _profile(10.67 * GB, received=10.0 * GB, invalid=["x"]), _environment())
    assert [word in path.text for word in ("tenant. Something", "`profile.invalid`). NCCL's LL128", "more.")] == [
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("variables", "kind", "link"),
    [
        ({}, "all_reduce", "pcie"),
        ({"NCCL_P2P_DISABLE": "0"}, "all_reduce", "pcie"),
        ({"NCCL_P2P_DISABLE": "1"}, "all_reduce", "host"),
        ({"NCCL_P2P_LEVEL": "LOC"}, "all_reduce", "host"),
        ({"NCCL_P2P_LEVEL": "PIX"}, "all_reduce", "pcie"),
        ({"NCCL_P2P_DISABLE": "1"}, "peer_copy", "pcie"),
    ],
)
def test_what_nvlink_did_not_carry_went_over_pcie(variables: dict[str, str], kind: CollectiveKind, link: str) -> None:
    """By way of the host where NCCL was told not to go straight, which is nothing to copies within one process."""
    path = of_case(_traffic(kind=kind), _profile(0.0, 10.9 * GB), _environment(variables=variables))
    assert path.link == link
    assert path.pcie_bytes == pytest.approx(10.9 * GB)
    assert ("by way of the host's memory" in path.text) is (link == "host")
    assert "10.90 GB sent and 10.90 GB received" in path.text
    assert path.text.endswith("where the program sent 10.00 GB; NVLink shows 0 bytes.")


def _shown(*devices: tuple[float, float]) -> Profile:
    """Return what each of two devices sent in GB, over NVLink and over PCIe, and received as much."""
    profile = _profile(0.0)
    for place, (nvlink, pcie) in enumerate(devices):
        mean = pcie * GB / profile.duration_s
        profile.devices[place] = msgspec.structs.replace(
            profile.devices[place],
            counters={f"nvlink_{way}_bytes": nvlink * GB for way in ("tx", "rx")},
            metrics={
                f"pcie_{way}_bytes_per_s": Metric(mean=mean, max=mean, method="gpm", coverage=1.0)
                for way in ("tx", "rx")
            },
        )
    return profile


@pytest.mark.parametrize(
    ("devices", "link"),
    [
        (((4.5, 0.0), (4.5, 0.0)), "nvlink"),
        (((4.5, 2.5), (4.5, 2.5)), "nvlink"),
        (((2.75, 2.4), (2.75, 2.4)), "mixed"),
        (((2.5, 2.7), (2.5, 2.7)), "mixed"),
        (((5.0, 0.0), (0.0, 5.4)), "mixed"),
        (((5.0, 0.0), (2.75, 2.4)), "mixed"),
        (((0.4, 5.0), (0.4, 5.0)), "pcie"),
        (((2.85, 0.1), (2.85, 0.1)), "nvlink"),
        (((2.0, 0.1), (2.0, 0.1)), None),
        (((10.0, 0.0), (0.0, 0.1)), None),
    ],
)
def test_a_path_is_one_link_where_every_rank_takes_it(
    devices: tuple[tuple[float, float], ...], link: str | None
) -> None:
    """Of 5 GB of each: nine tenths, or what its switch's sums leave; PCIe that shows the rest makes it mixed."""
    path = of_case(_traffic(), _shown(*devices), _environment())
    assert path.link == link
    assert path.nvlink_shares == [round(nvlink / 5, 6) for nvlink, _ in devices]


def test_a_mixed_path_tells_both_links() -> None:
    """Its figures are of all GPUs together."""
    path = of_case(_traffic(), _shown((5.0, 0.0), (0.0, 5.4)), _environment(joined="NV4"))
    assert path.text == (
        "Over NVLink and PCIe (NV4): NVLink shows 5.00 GB, PCIe 5.40 GB sent and 5.40 GB received, packet headers and "
        "the host's own included, where the program sent 10.00 GB."
    )


def test_a_device_that_sends_too_much_hides_none_that_sends_too_little() -> None:
    """The sum agrees to the byte; the device that is farthest off is named, with its rank's account."""
    path = of_case(_traffic(), _shown((6.0, 0.0), (4.0, 0.0)), _environment())
    assert path.link == "nvlink"
    assert path.text.startswith(
        "Over NVLink (NV18): 10.00 GB where the program sent 10.00 GB (+0.0 %), "
        "GPU 2 6.00 GB where its rank sent 5.00 GB (+20.0 %). Look for another program"
    )


def test_a_process_with_several_devices_is_held_against_their_sum() -> None:
    """Which of them sends is nobody's account."""
    path = of_case(_traffic(kind="peer_copy", ranks=1), _shown((10.0, 0.0), (0.0, 0.0)), _environment())
    assert (path.link, path.nvlink_shares) == ("nvlink", [1.0])
    assert path.text.endswith("10.00 GB, what the program sent (+0.00 %).")


def test_ranks_that_send_nothing_take_no_path() -> None:
    """What their devices show says nothing of the others' way."""
    traffic = _traffic()
    traffic.ranks[1] = []
    path = of_case(traffic, _shown((5.0, 0.0), (0.0, 0.0)), _environment())
    assert (path.link, path.expected_bytes, path.nvlink_shares) == ("nvlink", 5 * GB, [1.0])


@pytest.mark.parametrize(("coverage", "counted"), [(0.9, 0.9), (1.0, 1.0), (0.89, None), (0.0, None), (None, None)])
def test_pcie_is_counted_where_readings_speak_for_nine_tenths(coverage: float | None, counted: float | None) -> None:
    """Bytes are those of the readings; of less than that nobody knows them."""
    metric = Metric(mean=1e9, max=1e9, method="gpm", coverage=coverage)
    device = DeviceProfile(index=0, uuid="GPU-0", metrics={"pcie_rx_bytes_per_s": metric})
    expected = None if counted is None else pytest.approx(counted * 50e9)
    assert pcie_bytes(_profile(devices=[device]), device, "rx") == expected
    assert pcie_bytes(_profile(devices=[device]), device, "tx") is None


def test_pcie_that_was_read_now_and_then_is_no_path_beside_nvlink() -> None:
    """The study's own profiler sees an eighth of the time; without NVLink there is no other way to take."""
    profile = _profile(2.0 * GB, 10.9 * GB)
    for device in profile.devices:
        for name, metric in device.metrics.items():
            device.metrics[name] = msgspec.structs.replace(metric, coverage=0.12)
    path = of_case(_traffic(), profile, _environment())
    reason = "its readings speak for 12 % of the time"
    assert (path.link, path.pcie_bytes) == (None, None)
    assert path.text == (
        f"Not known: what went over PCIe was not counted ({reason}); NVLink shows 2.00 GB of 10.00 GB."
    )
    devices = [msgspec.structs.replace(device, counters={}, why={}) for device in profile.devices]
    without = msgspec.structs.replace(profile, devices=devices)
    path = of_case(_traffic(), without, _environment(None, "PIX"))
    assert (path.link, path.text) == (
        "pcie",
        f"Over PCIe (PIX): an unknown part of 10.00 GB ({reason}); there is no NVLink.",
    )


def test_gpus_without_nvlink_need_no_counter_of_it() -> None:
    """Then PCIe is the only way; where there are links and no count of them, nothing is known."""
    without = of_case(_traffic(), _profile(None, 10.9 * GB), _environment(None, "PIX"))
    assert (without.link, without.nvlink_bytes) == ("pcie", None)
    assert without.text.startswith("Over PCIe (PIX): ")
    assert without.text.endswith("; there is no NVLink.")
    uncounted = of_case(_traffic(), _profile(None, 10.9 * GB), _environment())
    assert (uncounted.link, uncounted.nvlink_bytes) == (None, None)
    assert uncounted.text == f"Not known: what went over NVLink was not counted ({_UNCOUNTED})."
    unknown = _environment()
    unknown.gpus = []
    assert of_case(_traffic(), _profile(None, 10.9 * GB), unknown).link is None


def test_pcie_must_show_both_directions() -> None:
    """What only leaves the GPUs is on its way to the host."""
    profile = _profile(0.0, 10.9 * GB)
    for device in profile.devices:
        device.metrics["pcie_rx_bytes_per_s"] = Metric(mean=1e6, max=1e6, method="gpm", coverage=1.0)
    path = of_case(_traffic(), profile, _environment())
    assert path.link is None
    assert path.text == (
        "Not known: of the 10.00 GB that the program sent, NVLink shows 0 bytes and PCIe 10.90 GB sent and 100.0 MB "
        "received."
    )


@pytest.mark.parametrize("coverage", [None, 0.0])
def test_pcie_that_was_not_read_is_no_path(coverage: float | None) -> None:
    """Neither a refusal nor a reading of another time."""
    profile = _profile(0.0, None if coverage is None else 10.9 * GB, why={"samples": "no reading fell inside"})
    for device in profile.devices if coverage == 0.0 else []:
        for name, metric in device.metrics.items():
            device.metrics[name] = msgspec.structs.replace(metric, coverage=coverage)
    path = of_case(_traffic(), profile, _environment())
    assert (path.link, path.pcie_bytes) == (None, None)
    reason = "PCIe: Not Supported" if coverage is None else "no reading fell inside"
    assert path.text == f"Not known: what went over PCIe was not counted ({reason})."


def test_one_device_that_does_not_know_leaves_the_sum_unknown() -> None:
    """A sum over some devices is none over all."""
    profile = _profile(10.0 * GB)
    profile.devices[1] = msgspec.structs.replace(profile.devices[1], counters={})
    assert of_case(_traffic(), profile, _environment()).nvlink_bytes is None


def test_a_case_without_a_profile_says_why() -> None:
    """On a CPU, or without NVML."""
    path = of_case(_traffic(), _profile(devices=[], why={"profile": "no GPU is visible"}), _environment())
    assert (path.link, path.text) == (None, "Not known: there is no GPU profile (no GPU is visible).")


@pytest.mark.parametrize("topology", [None, [["X"]]])
def test_a_topology_that_is_not_known_is_left_out(topology: list[list[str]] | None) -> None:
    """The link is told by its counters all the same."""
    environment = _environment()
    environment.topology = topology
    environment.gpus = environment.gpus[:1] if topology else environment.gpus
    assert of_case(_traffic(), _profile(10.0 * GB), environment).text.startswith("Over NVLink: ")


def _path(link: Any, nvlink: float | None = None) -> Path:
    return Path(link=link, nvlink_bytes=nvlink, expected_bytes=10 * GB, text="")


def test_traffic_that_takes_another_path_has_moved() -> None:
    """The finding names both paths and what NVLink carried then and now."""
    assert moved(_path("nvlink", 10.0 * GB), _path("pcie", 0.0)) == (
        "moved from NVLink to PCIe: NVLink carried 10.00 GB for 10.00 GB sent, now 0 bytes for 10.00 GB"
    )
    assert moved(_path("host"), _path("nvlink", 10.0 * GB)) == (
        "moved from PCIe by way of the host's memory to NVLink: NVLink carried an unknown part for 10.00 GB sent, "
        "now 10.00 GB for 10.00 GB"
    )
    slower = msgspec.structs.replace(_path("host"), pcie_bytes=25.0 * GB)
    assert moved(msgspec.structs.replace(_path("pcie"), pcie_bytes=10.9 * GB), slower) == (
        "moved from PCIe to PCIe by way of the host's memory: PCIe carried 10.90 GB for 10.00 GB sent, "
        "now 25.00 GB for 10.00 GB"
    )


@pytest.mark.parametrize(("base", "head"), [("nvlink", "nvlink"), (None, "pcie"), ("nvlink", None), (None, None)])
def test_a_path_that_is_not_known_has_not_moved(base: str | None, head: str | None) -> None:
    """Nobody is alarmed by a counter that could not be read."""
    assert moved(_path(base), _path(head)) is None
