from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import make_profile, make_report

from pytest_llmgpu.analysis.traffic_path import describe_move, of_case, pcie_bytes
from pytest_llmgpu.report.report import Environment, Gpu
from pytest_llmgpu.report.result import Collective, CollectiveKind, DeviceProfile, Metric, Path, Profile, Traffic

GB = 10**9
_Devices = tuple[tuple[float | None, float | None], ...]
"""For each device the GB that it sent over NVLink and over PCIe; None where they were not counted."""


def _profile(
    devices: _Devices, *, coverage: float | None = 1.0, received: float | None = None, why: dict[str, str] | None = None
) -> Profile:
    """Return the counters of devices over 50 s; over PCIe they received as much as they sent, or `received` GB each."""
    found = []
    for index, (nvlink, pcie) in zip((2, 1), devices, strict=False):
        reasons = {"nvlink_tx_bytes": "it was not read at the start"} if nvlink is None else {}
        reasons |= {"pcie_rx_bytes_per_s": "PCIe: Not Supported"} if pcie is None else {}
        ways = {"tx": pcie, "rx": pcie if received is None else received}
        rates = {way: None if size is None else size * GB / 50 for way, size in ways.items()}
        metrics = {
            f"pcie_{way}_bytes_per_s": Metric(mean=rate, max=rate, method="gpm", coverage=coverage)
            for way, rate in rates.items()
        }
        counters = {} if nvlink is None else {"nvlink_tx_bytes": nvlink * GB, "nvlink_rx_bytes": nvlink * GB}
        found.append(DeviceProfile(index=index, uuid=f"GPU-{index}", counters=counters, metrics=metrics, why=reasons))
    return make_profile(duration_s=50.0, devices=found, why=why or {})


def _traffic(*sent: float, kind: CollectiveKind = "all_reduce", between: float = 0.0) -> Traffic:
    """Return the traffic of ranks that send so many GB; `between` is the part that goes to other nodes."""
    ranks = []
    for size in sent:
        wire = int(size * GB)
        one = Collective(
            collective=kind, calls=9, payload_bytes=wire, wire_bytes=wire, between_nodes_bytes=int(wire * between)
        )
        received = Collective(collective="recv", calls=1, payload_bytes=7, wire_bytes=7)
        ranks.append(([one] if kind == "peer_copy" else [one, received]) if size else [])
    return Traffic(ranks=ranks, wire_bytes_per_sequence=1.0)


def _environment(*, nvlinks: int | None = 18, **variables: str) -> Environment:
    """Return a machine with three GPUs; the case runs on the last two."""
    environment = make_report().environment
    environment.gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="A", nvlinks=nvlinks) for index in range(3)]
    environment.variables = variables
    return environment


def _path(
    devices: _Devices, traffic: Traffic | None = None, environment: Environment | None = None, **seen: Any
) -> Path:
    return of_case(traffic or _traffic(5, 5), _profile(devices, **seen), environment or _environment())


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
def test_a_path_is_one_link_if_every_rank_uses_it(devices: _Devices, link: str | None) -> None:
    """Each rank sends 5 GB: NVLink carries nine tenths, or half with sums in its switch; with PCIe it is mixed."""
    assert _path(devices).link == link


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
def test_a_variable_sends_traffic_over_the_host(variables: dict[str, str], kind: CollectiveKind, link: str) -> None:
    """Copies within a process are direct."""
    environment = msgspec.structs.replace(_environment(), variables=variables)
    path = _path(((0.0, 5.4),) * 2, _traffic(5, 5, kind=kind), environment)
    assert path.link == link
    assert path.pcie_bytes == pytest.approx(10.8 * GB)


def test_a_path_has_expected_and_counted_bytes() -> None:
    """Bytes to other nodes, and ranks that send nothing, do not count; a process has one sum for its devices."""
    found = [
        _path(((2.5, 0.0),) * 2, _traffic(5, 5, between=0.5)),
        _path(((5.0, 0.0), (0.0, 0.0)), _traffic(5, 0)),
        _path(((10.0, 0.0), (0.0, 0.0)), _traffic(10, kind="peer_copy")),
        _path(((5.0, 0.0), (None, 0.0))),
    ]
    assert [(path.link, path.expected_bytes, path.nvlink_bytes) for path in found] == [
        ("nvlink", 5 * GB, 5 * GB),
        ("nvlink", 5 * GB, 5 * GB),
        ("nvlink", 10 * GB, 10 * GB),
        (None, 10 * GB, None),
    ]


def test_paths_read_as(prose: Prose) -> None:
    """The text has the link, the bytes counted and sent with their ratio, or the reason why the path is unknown."""
    alone = _environment()
    alone.gpus = alone.gpus[:1]
    unknown = _environment()
    unknown.topology = None
    paths = [
        _path(((5.0, 0.0), (5.0, 0.0))),
        _path(((5.335, 0.0), (5.335, 0.0))),
        _path(((6.0, 0.0), (4.0, 0.0))),
        _path(((5.0, 0.0), (0.0, 5.4)), None, _environment()),
        _path(((0.0, 5.4), (0.0, 5.4))),
        _path(((0.0, 5.4), (0.0, 5.4)), None, _environment(NCCL_P2P_DISABLE="1")),
        _path(((None, 5.4), (None, 5.4)), None, _environment(nvlinks=None)),
        # The profiler of Shin et al. covers an eighth of the time; without NVLink, PCIe is the only path.
        _path(((None, 5.4), (None, 5.4)), None, _environment(nvlinks=None), coverage=0.12),
        _path(((1.0, 5.4), (1.0, 5.4)), coverage=0.12),
        _path(((None, 5.4), (None, 5.4))),
        _path(((0.0, None), (0.0, None))),
        _path(((0.0, 5.4), (0.0, 5.4)), coverage=0.0, why={"samples": "no reading fell inside"}),
        _path(((0.0, 5.4), (0.0, 5.4)), received=0.05),  # bytes that only leave the GPUs go to the host
        _path((), why={"profile": "no GPU is visible"}),
        _path(((2.0, 2.0), (2.0, 2.0)), _traffic(0, 0)),
        _path(((0.0, 0.1), (0.0, 0.1)), _traffic(5, 5, between=1.0)),
        _path(((5.0, 0.0), (5.0, 0.0)), None, alone),
        _path(((5.0, 0.0), (5.0, 0.0)), None, unknown),
    ]
    assert prose == "\n".join(f"{path.link}: {path.text}" for path in paths)


@pytest.mark.parametrize(("coverage", "counted"), [(0.9, 0.9), (1.0, 1.0), (0.89, None), (0.0, None), (None, None)])
def test_pcie_is_counted_if_readings_cover_nine_tenths(coverage: float | None, counted: float | None) -> None:
    """The bytes are those of the readings; with a smaller coverage they are unknown."""
    profile = _profile(((0.0, 50.0),), coverage=coverage)
    expected = None if counted is None else pytest.approx(counted * 50e9)
    assert pcie_bytes(profile, profile.devices[0], "rx") == expected
    without = msgspec.structs.replace(profile.devices[0], metrics={})
    assert pcie_bytes(profile, without, "tx") is None


def _went(link: Any, nvlink: float | None = None, pcie: float | None = None) -> Path:
    return Path(link=link, nvlink_bytes=nvlink, pcie_bytes=pcie, expected_bytes=10 * GB, text="")


def test_traffic_that_takes_another_path_reads_as(prose: Prose) -> None:
    """The text has both paths and the bytes of NVLink, or else of PCIe, then and now."""
    pairs = [
        (_went("nvlink", 10.0 * GB), _went("pcie", 0.0)),
        (_went("host"), _went("nvlink", 10.0 * GB)),
        (_went("pcie", None, 10.9 * GB), _went("host", None, 25.0 * GB)),
    ]
    assert prose == "\n".join(describe_move(base, head) for base, head in pairs)
