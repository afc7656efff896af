from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import make_profile, make_result, make_work

from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.disturbances import TITLES, busy_cpu, find
from pytest_llmgpu.report.result import DeviceProfile, HostUse, Launch, Profile
from pytest_llmgpu.report.text import GIB, MIB

RANKS = {"GPU-0": 1, "GPU-1": 1}


def _profile(**fields: Any) -> Profile:
    """Return a profile of 100 s of two devices; `fields` are those of the second device, GPU 7."""
    counters = {"ecc_uncorrected": 0.0, "xids": 0.0, "compute_processes": 1.0, **fields.pop("counters", {})}
    return make_profile(
        duration_s=100.0,
        devices=[
            DeviceProfile(index=4, uuid="GPU-0", throttled_s=0.0),
            DeviceProfile(index=7, uuid="GPU-1", counters=counters, **{"throttled_s": 0.0, **fields}),
        ],
    )


def test_an_undisturbed_profile_has_no_disturbances() -> None:
    """An empty list means that the figures are those of the case; values that could not be read are none."""
    assert find(_profile(), RANKS, {"GPU-0": 0, "GPU-1": 4 * MIB}) == []
    bare = [DeviceProfile(index=0, uuid="GPU-0"), DeviceProfile(index=1, uuid="GPU-1")]
    assert find(msgspec.structs.replace(_profile(), devices=bare), RANKS) == []


_LOST = "nvmlDeviceGetPowerUsage: GPU is lost"


@pytest.mark.parametrize(
    ("profile", "ranks", "expected"),
    [
        # Power capping at the start of work does not count; the sum of both causes stays below 100 %.
        *((_profile(throttled_s=seconds), RANKS, None) for seconds in (None, 0.5)),
        (_profile(throttled_s=0.53125), RANKS, "throttled: GPU 7 for 0.5 % of the time"),
        (_profile(throttled_s=150.0), RANKS, "throttled: GPU 7 for 100.0 % of the time"),
        # More processes than ranks belong to other programs. Process ids in a container mean nothing outside it.
        (_profile(counters={"compute_processes": 2.0}), {"GPU-1": 1}, "processes: GPU 7 has 1 besides 1 of this run"),
        (_profile(counters={"compute_processes": 2.0}), {"GPU-1": 4}, None),
        (_profile(), {}, "processes: GPU 7 has 1 besides 0 of this run"),
        (_profile(counters={"compute_processes": 9.0}), None, None),
        (_profile(counters={"xids": 1.0}), None, "xid: GPU 7 had 1"),
        # Several metrics of a lost GPU have one reason; a metric that is not supported is no disturbance.
        (_profile(why={"energy_j": "x: Not Supported", "a": _LOST, "b": _LOST}), RANKS, f"lost: GPU 7 ({_LOST})"),
        (_profile(why={"a": "x: GPU requires restart"}), RANKS, "lost: GPU 7 (x: GPU requires restart)"),
    ],
)
def test_a_disturbance_is_found(profile: Profile, ranks: dict[str, int] | None, expected: str | None) -> None:
    """A disturbed figure is not that of the case alone."""
    kind, _, text = (expected or "").partition(":")
    assert find(profile, ranks) == ([f"{TITLES[kind]}:{text}"] if expected else [])


def test_memory_in_use_before_the_start_belongs_to_other_programs() -> None:
    """The few MiB of an idle GPU do not count, nor does a device of another case."""
    used = {"GPU-0": 64 * MIB, "GPU-1": 3 * GIB // 2, "GPU-of-another-case": 9 * GIB}
    assert find(_profile(), RANKS, used) == ["memory in use before the start: GPU 7 had 1.50 GiB"]


def test_each_kind_of_disturbance_is_one_sentence_with_its_devices(prose: Prose) -> None:
    """Eight GPUs do not fill a screen."""
    profile = _profile(
        throttled_s=10.0,
        counters={"xids": 1.0, "ecc_uncorrected": 2.0, "compute_processes": 3.0},
        why={"power_w": "nvmlDeviceGetPowerUsage: GPU is lost"},
    )
    profile.devices[0] = msgspec.structs.replace(profile.devices[0], throttled_s=20.0)
    found = find(profile, RANKS, {"GPU-1": 3 * GIB})
    assert prose == "\n".join(found)


@pytest.mark.parametrize(
    ("fields", "on_cpu", "busy"),
    [
        ({}, True, None),
        ({"waited_s": [0.9, 1.5]}, True, "rank 1 waited for a core for 15 % of the time"),
        ({"waited_s": [0.9, 1.5]}, False, "rank 1 waited for a core for 15 % of the time"),
        ({"waited_s": [0.9, 1.0]}, True, None),
        ({"waited_s": [None, None], "cpu_s": [18.0, 9.0]}, True, "rank 1 had 45 % of its CPU time"),
        ({"waited_s": [None, None], "cpu_s": [18.0, 9.0], "pressure_s": 0.5}, True, None),
        ({"waited_s": [None, None], "cpu_s": [18.0, 9.0], "pressure_s": None}, True, None),
        ({"waited_s": [None, None], "cpu_s": [1.0, 0.5]}, False, None),
        ({"wall_s": 0.0}, True, None),
    ],
)
def test_a_rank_that_waits_for_a_core_makes_the_machine_busy(
    fields: dict[str, Any], on_cpu: bool, busy: str | None
) -> None:
    """More than a tenth of the window counts; a GPU's rank may be idle, and then the pressure decides nothing."""
    idle: dict[str, Any] = {"threads": [2, 2], "cpu_s": [18.0, 18.0], "waited_s": [0.0, 0.1], "pressure_s": 3.0}
    found = busy_cpu(HostUse(**{"wall_s": 10.0, **idle, **fields}), on_cpu=on_cpu)
    assert found == (None if busy is None else f"CPU cores too busy: {busy}")


_POWER = "throttled by power or heat: GPU 1 for 60.0 % of the time"
_CPU = "CPU cores too busy: rank 1 waited for a core for 15 % of the time"


@pytest.mark.parametrize(
    ("invalid", "latency_s", "disturbed", "untimed"),
    [
        ([], 0.5, None, None),
        ([_POWER, "SM clock differs: GPU 1 ran at 1,000 MHz"], 0.5, None, None),
        ([_POWER, "another: GPU 0."], 0.5, "another: GPU 0", "another: GPU 0"),
        ([_CPU], 0.5, None, _CPU),
        ([], 0.0, None, "the time of a batch is 0 s"),
    ],
)
def test_a_disturbance_spoils_all_figures_or_times_only(
    invalid: list[str], latency_s: float, disturbed: str | None, untimed: str | None
) -> None:
    """Throttling alone keeps the times. Memory, traffic and the time of kernels are the same on a busy machine."""
    launch: Launch = make_result().launches[0]
    launch.profile = msgspec.structs.replace(_profile(), invalid=invalid)
    launch.batches.latency_s[0] = latency_s
    assert disturbances.disturbed(launch) == disturbed
    assert disturbances.untimed(launch) == untimed


@pytest.mark.parametrize("metric", ["time", "first_token", "token_time", "device_time"])
def test_a_busy_cpu_leaves_device_time_where_every_rank_launched_ahead(metric: str) -> None:
    """Wall times are longer there; so is the time of kernels whose GPU waits for the host between them."""
    result = make_result()
    (launch,) = result.launches
    launch.profile = msgspec.structs.replace(_profile(), invalid=[_CPU])
    for ahead, used in (([True, True], metric == "device_time"), ([True, False], False), ([], False)):
        ranks = [msgspec.structs.replace(make_work().ranks[0], launched_ahead=one) for one in ahead]
        launch.work = msgspec.structs.replace(make_work(), ranks=ranks)
        assert disturbances.untimed(launch, metric) == (None if used else _CPU)
        assert disturbances.of_case(result, metric) == (None if used else _CPU)
    launch.profile = msgspec.structs.replace(_profile(), invalid=[_CPU, "another: GPU 0"])
    assert disturbances.untimed(launch, "device_time") is not None


@pytest.mark.parametrize(("counter", "kind"), [("ecc_uncorrected", "ecc"), ("xids", "xid")])
def test_a_counter_of_errors_disturbs_without_a_sentence(counter: str, kind: str) -> None:
    """A report whose `invalid` is empty has them in its counters alone; with the sentence nothing is stated twice."""
    launch: Launch = make_result().launches[0]
    launch.profile = _profile(counters={counter: 2.0})
    text = f"{TITLES[kind]}: GPU 7 had 2"
    assert disturbances.untimed(launch) == disturbances.disturbed(launch) == text
    assert disturbances.of_profile(msgspec.structs.replace(launch.profile, invalid=[text])) == [text]
