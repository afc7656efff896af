from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import make_report

from pytest_llmgpu.analysis.traffic_path import describe_move, has_moved, of_case, pcie_bytes
from pytest_llmgpu.report.report import Environment, Gpu
from pytest_llmgpu.report.result import Collective, CollectiveKind, DeviceProfile, Metric, Path, Profile, Traffic

GB = 10**9
_UNCOUNTED = "the counter was not read at the window's start"


def _traffic(sent: int = 10 * GB, kind: CollectiveKind = "all_reduce", ranks: int = 2) -> Traffic:
    """Return traffic that the ranks share equally."""
    one = Collective(collective=kind, calls=1000, payload_bytes=sent // ranks, wire_bytes=sent // ranks)
    received_one = Collective(collective="recv", calls=1, payload_bytes=7, wire_bytes=7)
    return Traffic(
        ranks=[([one] if kind == "peer_copy" else [one, received_one]) if sent else [] for _ in range(ranks)],
        wire_bytes_per_sequence=1.0,
    )


def _profile(nvlink: float | None = None, pcie: float | None = 0.1 * GB, **fields: Any) -> Profile:
    """Return the counters of two devices over 50 s: the bytes of both together over NVLink and PCIe."""
    counters: dict[str, float] = {}
    why = {"nvlink_tx_bytes": _UNCOUNTED} if nvlink is None else {}
    if nvlink is not None:
        counters = {"nvlink_tx_bytes": nvlink / 2, "nvlink_rx_bytes": nvlink / 2}
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
    """Return a machine with three GPUs; the case runs on the last two."""
    environment = make_report().environment
    environment.gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="A", nvlinks=nvlinks) for index in range(3)]
    environment.topology = [["X", "SYS", "SYS"], ["SYS", "X", joined], ["SYS", joined, "X"]]
    environment.variables = variables or {}
    return environment


def test_a_case_that_sends_nothing_has_no_path() -> None:
    """Bytes that its links carried are not its own."""
    path = of_case(_traffic(0), _profile(5.0 * GB, 5.0 * GB), _environment())
    assert (path.link, path.expected_bytes, path.text) == (None, 0, "Nothing is sent from GPU to GPU.")


def _between(traffic: Traffic, share: int) -> Traffic:
    """Return traffic of which one part in `share` goes to other nodes."""
    ranks = [
        [msgspec.structs.replace(one, between_nodes_bytes=one.sent_bytes // share) for one in rank]
        for rank in traffic.ranks
    ]
    return msgspec.structs.replace(traffic, ranks=ranks)


def test_the_links_of_a_node_carry_what_stays_inside() -> None:
    """Bytes to other nodes are not expected on NVLink."""
    path = of_case(_between(_traffic(), 2), _profile(5.0 * GB), _environment())
    assert (path.link, path.expected_bytes) == ("nvlink", 5 * GB)
    path = of_case(_between(_traffic(), 1), _profile(0.0), _environment())
    assert (path.link, path.expected_bytes) == (None, 0)
    assert path.text == "Nothing is sent from GPU to GPU of the same node."


@pytest.mark.parametrize(
    ("counted", "gap"),
    [(10.0, "+0.00 %"), (9.91, "-0.90 %"), (10.67, "+6.70 %"), (19.9, "+99.00 %"), (5.72, "-42.80 %")],
)
def test_nvlink_has_the_bytes_counted_and_sent(counted: float, gap: str) -> None:
    """Received bytes are not counted twice; protocols and algorithms of NCCL count other bytes than were sent."""
    path = of_case(_traffic(), _profile(counted * GB), _environment())
    assert (path.link, path.expected_bytes, path.nvlink_bytes) == ("nvlink", 10 * GB, counted * GB)
    assert path.pcie_bytes == pytest.approx(0.1 * GB)
    assert path.text == f"Over NVLink (NV18): {counted:.2f} GB, the program sent 10.00 GB ({gap})."


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
def test_traffic_that_nvlink_did_not_carry_went_over_pcie(
    variables: dict[str, str], kind: CollectiveKind, link: str
) -> None:
    """It went by way of the host if a variable forbids NCCL the direct path; copies within a process are direct."""
    path = of_case(_traffic(kind=kind), _profile(0.0, 10.9 * GB), _environment(variables=variables))
    assert path.link == link
    assert path.pcie_bytes == pytest.approx(10.9 * GB)
    assert ("by way of the host's memory" in path.text) is (link == "host")
    assert "10.90 GB sent and 10.90 GB received" in path.text
    assert path.text.endswith("the program sent 10.00 GB; NVLink carried 0 bytes.")


def _shown(*devices: tuple[float, float]) -> Profile:
    """Return a profile in which two devices sent and received these GB over NVLink and over PCIe."""
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
def test_a_path_is_one_link_if_every_rank_uses_it(devices: tuple[tuple[float, float], ...], link: str | None) -> None:
    """Each rank sends 5 GB: NVLink carries nine tenths, or half with sums in its switch; with PCIe it is mixed."""
    path = of_case(_traffic(), _shown(*devices), _environment())
    assert path.link == link
    assert path.nvlink_shares == [round(nvlink / 5, 6) for nvlink, _ in devices]


def test_a_mixed_path_has_the_bytes_of_both_links(prose: Prose) -> None:
    """They are the bytes of all GPUs together."""
    path = of_case(_traffic(), _shown((5.0, 0.0), (0.0, 5.4)), _environment(joined="NV4"))
    assert (path.nvlink_bytes, path.expected_bytes) == (5.0 * GB, 10 * GB)
    assert path.pcie_bytes == pytest.approx(5.4 * GB)
    assert prose == path.text


def test_the_device_with_the_largest_difference_is_named(prose: Prose) -> None:
    """The sum of all devices may agree to the byte."""
    path = of_case(_traffic(), _shown((6.0, 0.0), (4.0, 0.0)), _environment())
    assert path.link == "nvlink"
    assert prose == path.text


def test_a_process_with_several_devices_is_compared_with_their_sum() -> None:
    """Its bytes are not counted per device."""
    path = of_case(_traffic(kind="peer_copy", ranks=1), _shown((10.0, 0.0), (0.0, 0.0)), _environment())
    assert (path.link, path.nvlink_shares) == ("nvlink", [1.0])
    assert path.text.endswith("10.00 GB, the program sent 10.00 GB (+0.00 %).")


def test_ranks_that_send_nothing_do_not_count() -> None:
    """The counters of their devices are not compared."""
    traffic = _traffic()
    traffic.ranks[1] = []
    path = of_case(traffic, _shown((5.0, 0.0), (0.0, 0.0)), _environment())
    assert (path.link, path.expected_bytes, path.nvlink_shares) == ("nvlink", 5 * GB, [1.0])


@pytest.mark.parametrize(("coverage", "counted"), [(0.9, 0.9), (1.0, 1.0), (0.89, None), (0.0, None), (None, None)])
def test_pcie_is_counted_if_readings_cover_nine_tenths(coverage: float | None, counted: float | None) -> None:
    """The bytes are those of the readings; with a smaller coverage they are unknown."""
    metric = Metric(mean=1e9, max=1e9, method="gpm", coverage=coverage)
    device = DeviceProfile(index=0, uuid="GPU-0", metrics={"pcie_rx_bytes_per_s": metric})
    expected = None if counted is None else pytest.approx(counted * 50e9)
    assert pcie_bytes(_profile(devices=[device]), device, "rx") == expected
    assert pcie_bytes(_profile(devices=[device]), device, "tx") is None


def test_pcie_with_few_readings_is_unknown_where_there_is_nvlink(prose: Prose) -> None:
    """The profiler of Shin et al. covers an eighth of the time; without NVLink, PCIe is the only path."""
    profile = _profile(2.0 * GB, 10.9 * GB)
    for device in profile.devices:
        for name, metric in device.metrics.items():
            device.metrics[name] = msgspec.structs.replace(metric, coverage=0.12)
    path = of_case(_traffic(), profile, _environment())
    assert (path.link, path.pcie_bytes) == (None, None)
    assert prose == path.text
    devices = [msgspec.structs.replace(device, counters={}, why={}) for device in profile.devices]
    without = msgspec.structs.replace(profile, devices=devices)
    path = of_case(_traffic(), without, _environment(None, "PIX"))
    assert path.link == "pcie"
    assert prose == path.text


def test_gpus_without_nvlink_need_no_counter_of_it() -> None:
    """Without NVLink PCIe is the only path; with uncounted NVLinks the path is unknown."""
    without = of_case(_traffic(), _profile(None, 10.9 * GB), _environment(None, "PIX"))
    assert (without.link, without.nvlink_bytes) == ("pcie", None)
    assert without.text.startswith("Over PCIe (PIX): ")
    assert without.text.endswith("; there is no NVLink.")
    uncounted = of_case(_traffic(), _profile(None, 10.9 * GB), _environment())
    assert (uncounted.link, uncounted.nvlink_bytes) == (None, None)
    assert _UNCOUNTED in uncounted.text
    unknown = _environment()
    unknown.gpus = []
    assert of_case(_traffic(), _profile(None, 10.9 * GB), unknown).link is None


def test_pcie_must_show_both_directions(prose: Prose) -> None:
    """Bytes that only leave the GPUs go to the host."""
    profile = _profile(0.0, 10.9 * GB)
    for device in profile.devices:
        device.metrics["pcie_rx_bytes_per_s"] = Metric(mean=1e6, max=1e6, method="gpm", coverage=1.0)
    path = of_case(_traffic(), profile, _environment())
    assert path.link is None
    assert prose == path.text


@pytest.mark.parametrize("coverage", [None, 0.0])
def test_pcie_that_was_not_read_is_no_path(coverage: float | None) -> None:
    """A refused reading and a reading outside the window do not count."""
    profile = _profile(0.0, None if coverage is None else 10.9 * GB, why={"samples": "no reading fell inside"})
    for device in profile.devices if coverage == 0.0 else []:
        for name, metric in device.metrics.items():
            device.metrics[name] = msgspec.structs.replace(metric, coverage=coverage)
    path = of_case(_traffic(), profile, _environment())
    assert (path.link, path.pcie_bytes) == (None, None)
    reason = "PCIe: Not Supported" if coverage is None else "no reading fell inside"
    assert f"({reason})" in path.text


def test_one_device_without_a_count_makes_the_sum_unknown() -> None:
    """A sum over some devices is no sum over all."""
    profile = _profile(10.0 * GB)
    profile.devices[1] = msgspec.structs.replace(profile.devices[1], counters={})
    assert of_case(_traffic(), profile, _environment()).nvlink_bytes is None


def test_a_case_without_a_profile_has_the_reason() -> None:
    """It ran on a CPU or without NVML."""
    path = of_case(_traffic(), _profile(devices=[], why={"profile": "no GPU is visible"}), _environment())
    assert path.link is None
    assert "(no GPU is visible)" in path.text


@pytest.mark.parametrize("topology", [None, [["X"]]])
def test_an_unknown_topology_is_left_out(topology: list[list[str]] | None) -> None:
    """The counters of the link suffice."""
    environment = _environment()
    environment.topology = topology
    environment.gpus = environment.gpus[:1] if topology else environment.gpus
    assert of_case(_traffic(), _profile(10.0 * GB), environment).text.startswith("Over NVLink: ")


def _path(link: Any, nvlink: float | None = None) -> Path:
    return Path(link=link, nvlink_bytes=nvlink, expected_bytes=10 * GB, text="")


def test_traffic_that_takes_another_path_has_moved(prose: Prose) -> None:
    """The text has both paths and the bytes of NVLink, or else of PCIe, then and now."""
    direct, by_host = (
        msgspec.structs.replace(_path(link), pcie_bytes=size * GB) for link, size in (("pcie", 10.9), ("host", 25.0))
    )
    pairs = [
        (_path("nvlink", 10.0 * GB), _path("pcie", 0.0)),
        (_path("host"), _path("nvlink", 10.0 * GB)),
        (direct, by_host),
    ]
    assert all(has_moved(base, head) for base, head in pairs)
    assert prose == "\n".join(describe_move(base, head) for base, head in pairs)


@pytest.mark.parametrize(("base", "head"), [("nvlink", "nvlink"), (None, "pcie"), ("nvlink", None), (None, None)])
def test_an_unknown_path_has_not_moved(base: str | None, head: str | None) -> None:
    """Nothing is compared with a counter that could not be read."""
    assert not has_moved(_path(base), _path(head))
