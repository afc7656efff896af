from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pytest_llmgpu.profiling.profiler import Profiler
from pytest_llmgpu.report.disturbances import first_alike, invalid
from pytest_llmgpu.report.result import DeviceProfile, Profile, Series

GIB = 1 << 30
RANKS = {"GPU-0": 1, "GPU-1": 1}


def _profile(clock_mhz: float | list[float | None] = 1980.0, samples: int = 5, **fields: Any) -> Profile:
    """Return a profile of two devices of 100 s, the fields those of the second device, which has that clock."""
    clocks: list[float | None] = clock_mhz if isinstance(clock_mhz, list) else [clock_mhz] * samples
    counters = {"ecc_uncorrected": 0.0, "xids": 0.0, "compute_processes": 1.0, **fields.pop("counters", {})}
    return Profile(
        period_s=1.0,
        duration_s=100.0,
        samples=samples,
        missed=0,
        lateness_p99_s=None,
        devices=[
            DeviceProfile(index=4, uuid="GPU-0", throttled_s=0.0),
            DeviceProfile(index=7, uuid="GPU-1", counters=counters, **{"throttled_s": 0.0, **fields}),
        ],
        series=Series(
            t_s=[float(t) for t in range(samples)],
            devices=[{"sm_clock_mhz": [1980.0 for _ in range(samples)]}, {"sm_clock_mhz": clocks}],
        ),
    )


def test_a_quiet_machine_gives_no_evidence() -> None:
    """Silence means that the figures are the case's."""
    assert invalid(_profile(), _profile(), RANKS, {"GPU-0": 0, "GPU-1": 4 << 20}) == []


@pytest.mark.parametrize(
    ("throttled_s", "said"),
    [
        (None, []),
        (0.5, []),
        (0.51, ["throttled by power or heat: GPU 7 for 0.5 % of the time"]),
        (12.0, ["throttled by power or heat: GPU 7 for 12.0 % of the time"]),
        (150.0, ["throttled by power or heat: GPU 7 for 100.0 % of the time"]),
    ],
)
def test_throttling_counts_from_half_a_percent_of_the_window(throttled_s: float | None, said: list[str]) -> None:
    """A step from idle to busy is no throttling, and power and heat together are never more than all the time."""
    assert invalid(_profile(throttled_s=throttled_s), None, RANKS, {}) == said


@pytest.mark.parametrize(
    ("mhz", "off"), [(1980.0, False), (1881.5, False), (1880.0, True), (2078.0, False), (2080.0, True)]
)
def test_a_clock_is_compared_with_the_first_cases(mhz: float, off: bool) -> None:
    """More than 5 % up or down is another machine's."""
    said = invalid(_profile(mhz), _profile(), RANKS, {})
    expected = (
        f"SM clock more than 5 % off that of the session's first case: GPU 7 ran at {mhz:,.0f} instead of 1,980 MHz"
    )
    assert said == ([expected] if off else [])


def test_the_clock_is_the_median() -> None:
    """A dip is no clock, and neither is a reading that could not be had."""
    assert invalid(_profile([1980.0, 300.0, None, 1980.0, 1980.0]), _profile(), RANKS, {}) == []


@pytest.mark.parametrize("few", [_profile(300.0, samples=2), _profile([300.0, None, None, None, 300.0])])
def test_few_readings_have_no_clock(few: Profile) -> None:
    """One moment of a short case says nothing, on either side."""
    assert invalid(few, _profile(), RANKS, {}) == []
    assert invalid(_profile(), few, RANKS, {}) == []
    assert invalid(msgspec.structs.replace(few, series=None), _profile(), RANKS, {}) == []


@pytest.mark.parametrize(
    ("ranks", "processes", "said"),
    [
        ({"GPU-1": 1}, 1.0, []),
        ({"GPU-1": 1}, 2.0, ["programs of others at work: GPU 7 has 1 beside 1 of ours"]),
        ({"GPU-1": 4}, 2.0, []),
        ({}, 1.0, ["programs of others at work: GPU 7 has 1 beside 0 of ours"]),
    ],
)
def test_more_processes_than_ranks_are_somebody_elses(ranks: dict[str, int], processes: float, said: list[str]) -> None:
    """They are counted: of a container's process ids nothing is to be believed, and fewer than ours is no evidence."""
    assert invalid(_profile(counters={"compute_processes": processes}), None, ranks, {}) == said


def test_without_knowing_what_is_ours_a_profile_blames_nobody() -> None:
    """A window of a test has processes that nobody has counted; what the devices say of themselves is told."""
    assert invalid(_profile(counters={"compute_processes": 9.0, "xids": 1.0})) == [
        "errors of the GPU that the driver logged (Xid, see dmesg): GPU 7 had 1"
    ]


def test_memory_in_use_before_the_start_is_somebody_elses() -> None:
    """Some MiB of an idle driver are not."""
    used = {"GPU-0": 64 << 20, "GPU-1": 3 * GIB // 2, "GPU-of-another-case": 9 * GIB}
    assert invalid(_profile(), None, RANKS, used) == ["memory in use before the start: GPU 7 had 1.50 GiB"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ecc_uncorrected", "memory errors that ECC could not correct: GPU 7 had 2"),
        ("xids", "errors of the GPU that the driver logged (Xid, see dmesg): GPU 7 had 2"),
    ],
)
def test_errors_in_the_window_are_evidence(name: str, said: str) -> None:
    """Counts, on the device that has them."""
    assert invalid(_profile(counters={name: 2.0}), None, RANKS, {}) == [said]


@pytest.mark.parametrize("reason", ["nvmlDeviceGetPowerUsage: GPU is lost", "x: GPU requires restart"])
def test_a_lost_gpu_is_named_with_the_call(reason: str) -> None:
    """Once, however many of its metrics say so; what is not supported is no evidence."""
    why = {"energy_j": "x: Not Supported", "power_w": reason, "sm_clock_mhz": reason}
    assert invalid(_profile(why=why), None, RANKS, {}) == [f"no longer answering: GPU 7 ({reason})"]


def test_what_is_not_supported_is_no_evidence() -> None:
    """A device without counters, clocks and throttled time is not suspected."""
    profile = _profile()
    bare = [DeviceProfile(index=0, uuid="GPU-0"), DeviceProfile(index=1, uuid="GPU-1")]
    assert invalid(msgspec.structs.replace(profile, devices=bare, series=None), profile, RANKS, {}) == []


def test_kinds_of_evidence_stand_apart_and_devices_together() -> None:
    """One sentence a kind with all its devices, so that eight GPUs do not fill a screen."""
    profile = _profile(throttled_s=10.0, counters={"xids": 1.0})
    profile.devices[0] = msgspec.structs.replace(profile.devices[0], throttled_s=20.0)
    assert invalid(profile, None, RANKS, {}) == [
        "throttled by power or heat: GPU 4 for 20.0 % of the time, GPU 7 for 10.0 % of the time",
        "errors of the GPU that the driver logged (Xid, see dmesg): GPU 7 had 1",
    ]


def test_the_yardstick_is_the_first_of_the_same_devices_that_knows_their_clocks() -> None:
    """Neither a case without a profile nor one of other devices, nor one too short to tell."""
    alone = msgspec.structs.replace(_profile(), devices=_profile().devices[:1], series=None)
    short, first, second = _profile(samples=2), _profile(1900.0), _profile(1800.0)
    assert first_alike([None, alone, short, first, second], second) is first
    assert first_alike([None, alone, short], second) is None


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, []),
        ({"ecc": "1:1"}, ["memory errors that ECC could not correct: GPU 1 had "]),
        ({"xid": "1:1"}, ["errors of the GPU that the driver logged (Xid, see dmesg): GPU 1 had "]),
        ({"processes": "2@1"}, ["programs of others at work: GPU 1 has 1 beside 1 of ours"]),
        ({"lost": "1:80"}, ["no longer answering: GPU 1 (nvmlDevice"]),
    ],
)
def test_what_nvml_tells_becomes_evidence(
    nvml_stub: Callable[..., dict[str, str]], settings: dict[str, str], kinds: list[str]
) -> None:
    """From the calls to the sentence: counts between the marks, processes, and a GPU that goes away."""
    profiler = Profiler(0.025, environment=nvml_stub(gpus=2, **settings))
    with profiler.window() as window:
        recording = profiler._recording
        assert recording is not None, profiler.why
        with profiler._changed:
            assert profiler._changed.wait_for(lambda: len(recording._kept) >= 25, 10)
    profiler.close()
    assert window.profile is not None
    ranks = {device.uuid: 1 for device in window.profile.devices}
    said = invalid(window.profile, None, ranks, {})
    assert len(said) == len(kinds)
    assert all(sentence.startswith(kind) for sentence, kind in zip(said, kinds, strict=True)), said
