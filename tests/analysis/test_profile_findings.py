from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support.report_factory import GIB, make_memory, make_profile, make_result, make_traffic

from pytest_llmgpu.analysis.profile_findings import disturbances, imbalance, of_profile
from pytest_llmgpu.report import disturbances as evidence
from pytest_llmgpu.report.result import (
    CaseResult,
    DeviceMemory,
    Finding,
    Launch,
    Link,
    Metric,
    Path,
    Profile,
    Series,
)


def _codes(results: Sequence[CaseResult]) -> list[list[str]]:
    """Judge results one after another, as a session does, and return their findings' codes."""
    for number, result in enumerate(results):
        result.findings = [*disturbances(result, results[:number]), *of_profile(result, results[:number])]
    return [[finding.code for finding in result.findings] for result in results]


def _only(result: CaseResult) -> Finding:
    (finding,) = of_profile(result, [])
    return finding


def _busy(*values: float | None) -> Profile:
    """Return a profile whose devices are busy for so many percent."""
    profile = make_profile(len(values))
    for device, value in zip(profile.devices, values, strict=True):
        device.metrics["utilization_pct"] = Metric(mean=value, max=value, method="nvml", coverage=None)
    return profile


def test_few_moments_do_not_tell_devices_apart() -> None:
    """Ten readings of 0 or 100 % are no imbalance; the driver's own ring, which misses nothing, is."""
    few = msgspec.structs.replace(_busy(34.0, 16.0, 15.0, 17.0), samples=10)
    assert imbalance(Launch(profile=few)) == []
    for device in few.devices:
        device.metrics["utilization_pct"] = msgspec.structs.replace(device.metrics["utilization_pct"], coverage=1.0)
    assert [found.code for found in imbalance(Launch(profile=few))] == ["imbalanced-work"]


def _full(*gib: float) -> list[DeviceMemory]:
    """Return the memory of devices that are so full, by NVML; torch reserved half of it."""
    return [
        DeviceMemory(index=3 - index, nvml_used_max_bytes=int(size * GIB), peak_reserved_bytes=int(size * GIB / 2))
        for index, size in enumerate(gib)
    ]


def test_a_machine_without_nvml_is_said_once() -> None:
    """Not for every case, and not on a CPU, where nobody expects a profile."""
    blind = make_profile(0, samples=0, why={"profile": "NVML Shared Library Not Found"})
    results = [make_result(8.0 / size, None, blind, batch_size=size) for size in (1, 2)]
    assert _codes(results) == [["no-profile"], []]
    assert "NVML Shared Library Not Found" in results[0].findings[0].text
    assert _codes([make_result(1.0, None, blind, device="cpu", devices=1)]) == [[]]


def test_a_profile_with_gaps_says_so() -> None:
    """More than one sample in twenty is missing."""
    assert _codes([make_result(1.0, None, make_profile(samples=96, missed=4))]) == [[]]
    finding = _only(make_result(1.0, None, make_profile(samples=90, missed=10)))
    assert finding.text == "10 of 100 samples of the GPU profile are missing."


def test_a_case_shorter_than_a_sample_says_so_once() -> None:
    """The bundled model on a GPU is done before the first tick."""
    short = make_profile(0, samples=0, duration_s=0.05)
    results = [make_result(8.0 / size, None, short, batch_size=size) for size in (1, 2)]
    assert _codes(results) == [["profile-too-short"], []]
    assert "0.05 s" in results[0].findings[0].text


def test_a_disturbed_window_warns() -> None:
    """A stranger's process on the GPU makes the figures worthless, and is named."""
    profile = make_profile(invalid=["programs of others at work: GPU 0", "memory in use before the start: GPU 1"])
    (finding,) = disturbances(make_result(1.0, None, profile), [])
    assert (finding.code, finding.severity) == ("profile-invalid", "warning")
    assert finding.text == (
        "The measurement was disturbed: programs of others at work: GPU 0; memory in use before the start: GPU 1."
    )


def test_full_load_at_the_limit_of_power_is_told_once() -> None:
    """It is how GPUs work, and no warning about somebody else."""
    held_down = msgspec.structs.replace(make_profile(1).devices[0], throttled_s=30.0)
    profile = make_profile(devices=[held_down])
    profile = msgspec.structs.replace(profile, invalid=evidence.describe(evidence.find(profile)))
    assert len(profile.invalid) == 1
    results = [make_result(8.0 / size, None, profile, batch_size=size) for size in (1, 2)]
    assert _codes(results) == [["clocks-held-down"], []]
    assert results[0].findings[0].severity == "info"


def test_devices_that_differ_a_little_say_nothing() -> None:
    """A head or an embedding has to be somewhere."""
    assert _codes([make_result(1.0, None, make_profile(), make_memory())]) == [[]]


def test_the_busiest_device_is_news() -> None:
    """Its figure stands beside the median of all, which the mean would hide."""
    result = make_result(1.0, None, _busy(25.0, 24.0, 41.0, 26.0))
    finding = _only(result)
    assert (finding.code, finding.severity) == ("imbalanced-work", "info")
    assert finding.text == "GPU 2 was busy for 41 % of the time, the median of the GPUs is 26 %."
    assert "GPU 2" in finding.next_step


@pytest.mark.parametrize(
    ("values", "stands_out"),
    [
        ([20.0, 20.0, 20.0, 30.1], True),
        ([59.0, 88.0, 88.0, 91.0], True),
        ([75.0, 90.0, 90.0, 90.0], False),
        ([10.0, 20.0, 20.0, 20.0], False),
        ([20.0, 20.0, 20.0, 30.0], False),
        ([80.0, 80.0, 80.0, 95.0], False),
        ([5.0, 5.0, 14.0], False),
        ([50.0, 90.0], True),
        ([90.0], False),
        ([20.0, None, 20.0, 60.0], False),
        ([], False),
    ],
)
def test_utilisation_stands_out_by_a_fifth_and_ten_points(values: list[float | None], stands_out: bool) -> None:
    """Less is noise of the driver's samples; one device has no others, and of some nobody knows the median."""
    assert bool(imbalance(Launch(profile=_busy(*values)))) is stands_out


def test_a_device_that_is_less_busy_than_the_others_is_news() -> None:
    """Ranks that share every layer wait for it in kernels, which count as busy."""
    (finding,) = imbalance(Launch(profile=_busy(59.0, 88.0, 88.0, 91.0)))
    assert (finding.code, finding.severity) == ("less-busy-device", "info")
    assert finding.text == "GPU 0 was busy for 59 % of the time, the median of the others is 88 %."


def _clocked(*mhz: float, throttled_s: Sequence[float | None] = ()) -> Profile:
    """Return a profile of 60 s whose devices run at these SM clocks, and are throttled for so long."""
    profile = _busy(*[90.0] * len(mhz))
    devices = [
        msgspec.structs.replace(device, throttled_s=seconds)
        for device, seconds in zip(profile.devices, throttled_s or [None] * len(mhz), strict=True)
    ]
    series = Series(t_s=[0.0, 1.0, 2.0], devices=[{"sm_clock_mhz": [clock, clock, 5.0]} for clock in mhz])
    return msgspec.structs.replace(profile, devices=devices, series=series)


@pytest.mark.parametrize(
    ("mhz", "throttled_s", "text"),
    [
        ((1980, 1200, 1980, 1980), (), "GPU 1 ran at 1,200 MHz, the median of the others is 1,980 MHz."),
        ((1800, 1770, 1830, 1800), (60, 60, 60, 60), None),
        ((1980, 1200), (None, 60), "GPU 1 ran at 1,200 MHz, the median of the others is 1,980 MHz."),
        (
            (1980, 1980, 1980, 1980),
            (0, 0, 24, 1.2),
            "GPU 2 was throttled for 40 % of the time, the median of the others is 0 %.",
        ),
        ((1980, 1980, 1980), (0, 0, 6), None),
        ((1980, 1980, 1980), (0, None, 60), None),
        ((1980,), (60,), None),
    ],
)
def test_a_device_that_may_not_run_as_fast_is_news(
    mhz: Sequence[float], throttled_s: Sequence[float | None], text: str | None
) -> None:
    """By its median clock against the others', or else by how long it was throttled: all wait for it, and look busy."""
    found = imbalance(Launch(profile=_clocked(*mhz, throttled_s=throttled_s)))
    assert [finding.text for finding in found if finding.code == "slower-device"] == ([] if text is None else [text])


def test_every_launch_is_looked_at() -> None:
    """What only a later one shows is said, and what several show once, as the first does."""
    result = make_result(1.0, None, make_profile())
    uneven = [Launch(profile=_busy(20.0, 20.0, busiest)) for busiest in (60.0, 70.0)]
    result.launches = [*result.launches, *uneven]
    assert _only(result).text == "GPU 2 was busy for 60 % of the time, the median of the GPUs is 20 %."


def _going(
    link: Link | None, shares: Sequence[float] = (1.0, 1.0), nvlink: float | None = 1.0, size: int = 1
) -> CaseResult:
    path = Path(link=link, expected_bytes=10, nvlink_bytes=nvlink, nvlink_shares=list(shares), text="As counted.")
    traffic = msgspec.structs.replace(make_traffic(), path=path)
    return make_result(1.0, None, make_profile(), traffic=traffic, batch_size=size)


@pytest.mark.parametrize(
    ("result", "codes"),
    [
        (_going("nvlink", [0.991, 1.009]), []),
        (_going("nvlink", [1.0, 1.02]), ["traffic-counted-otherwise"]),
        (_going("nvlink", [0.98, 1.0]), ["traffic-counted-otherwise"]),
        (_going("mixed", [1.0, 0.0]), ["traffic-off-nvlink"]),
        (_going("pcie", [0.0, 0.0], 0.0), ["traffic-off-nvlink"]),
        (_going("host", [], None), []),
        (_going(None), []),
    ],
)
def test_what_links_carried_is_news_where_it_is_not_what_was_sent(result: CaseResult, codes: list[str]) -> None:
    """Of any rank more than 1 % off, or off NVLink where there is one; a machine without one has no other way."""
    assert _codes([result]) == [codes]
    for finding in result.findings:
        assert (finding.severity, finding.text) == ("info", "As counted.")


def test_the_links_of_a_series_are_told_once() -> None:
    """Its other batch sizes are in the table's lines."""
    assert _codes([_going("pcie", [0.0, 0.0], 0.0, size) for size in (1, 2)]) == [["traffic-off-nvlink"], []]


def test_a_window_without_samples_tells_nothing_of_the_work() -> None:
    """What the nearest reading says is of another time."""
    profile = msgspec.structs.replace(_busy(20.0, 60.0), samples=0)
    assert imbalance(Launch(profile=profile)) == []
    assert imbalance(Launch()) == []


def test_the_fullest_device_is_news() -> None:
    """By NVML, under NVML's index: it is the first to be out of memory."""
    (finding,) = imbalance(Launch(memory=_full(10.0, 10.5, 15.0, 10.5)))
    assert (finding.code, finding.severity) == ("imbalanced-memory", "info")
    assert finding.text == "GPU 1 had 15.0 GiB at its fullest, the median of the GPUs is 10.5 GiB."


@pytest.mark.parametrize(
    ("gib", "stands_out"),
    [([4.0, 4.0, 5.1], True), ([4.0, 4.0, 5.0], False), ([10.0, 10.0, 12.0], False), ([0.1, 0.1, 0.9], False)],
)
def test_memory_stands_out_by_a_fifth_and_a_gibibyte(gib: list[float], stands_out: bool) -> None:
    """A context or a head more is no reason to spread a model otherwise."""
    assert bool(imbalance(Launch(memory=_full(*gib)))) is stands_out


def test_without_nvml_memory_is_torchs() -> None:
    """As soon as one device has no sample, all are compared by what torch reserved, and the text says so."""
    memory = _full(20.0, 20.0, 30.0)
    memory[0] = msgspec.structs.replace(memory[0], nvml_used_max_bytes=None)
    (finding,) = imbalance(Launch(memory=memory))
    assert finding.text == ("GPU 1 had 15.0 GiB reserved by torch at its fullest, the median of the GPUs is 10.0 GiB.")


def test_imbalance_is_said_once_a_series() -> None:
    """Every batch size of a strategy spreads the model alike."""
    uneven = _busy(20.0, 20.0, 60.0)
    sizes = [make_result(8.0 / size, None, uneven, batch_size=size) for size in (1, 2)]
    other = make_result(8.0, None, uneven, strategy="tp")
    assert _codes([*sizes, other]) == [["imbalanced-work"], [], ["imbalanced-work"]]
