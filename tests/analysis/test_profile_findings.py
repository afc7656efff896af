from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import GIB, make_memory, make_profile, make_result, make_traffic, make_work

from pytest_llmgpu.analysis.profile_findings import disturbances, imbalance, of_profile
from pytest_llmgpu.report import disturbances as window
from pytest_llmgpu.report.result import (
    CaseResult,
    DeviceMemory,
    Finding,
    Launch,
    Link,
    Metric,
    Path,
    Profile,
)
from pytest_llmgpu.report.work import RankWork


def _codes(results: Sequence[CaseResult]) -> list[list[str]]:
    """Assess results one after another, as a session does, and return the codes of their findings."""
    for number, result in enumerate(results):
        result.findings = [*disturbances(result, results[:number]), *of_profile(result, results[:number])]
    return [[finding.code for finding in result.findings] for result in results]


def _only(result: CaseResult) -> Finding:
    (finding,) = of_profile(result, [])
    return finding


def _imbalance(launch: Launch) -> list[str]:
    return [finding.code for finding in imbalance(launch)]


def _busy(*values: float | None) -> Profile:
    """Return a profile whose devices are busy for these percentages of the time."""
    profile = make_profile(len(values))
    for device, value in zip(profile.devices, values, strict=True):
        device.metrics["utilization_pct"] = Metric(mean=value, max=value, method="nvml", coverage=None)
    return profile


def test_devices_are_not_compared_in_a_short_window() -> None:
    """A reading of up to a second may lie beyond the window of one device: less than 10 s show no imbalance."""
    profile = _busy(34.0, 16.0, 15.0, 17.0)
    assert _imbalance(Launch(profile=profile)) == ["imbalanced-work"]
    assert _imbalance(Launch(profile=msgspec.structs.replace(profile, samples=59))) == []


def _full(*gib: float) -> list[DeviceMemory]:
    """Return the memory of devices with these GiB in use, by NVML; torch reserved half of it."""
    return [
        DeviceMemory(index=3 - index, nvml_used_max_bytes=int(size * GIB), peak_reserved_bytes=int(size * GIB / 2))
        for index, size in enumerate(gib)
    ]


def test_a_machine_without_nvml_is_reported_once() -> None:
    """On a CPU, where no profile is expected, it is not reported."""
    blind = make_profile(0, samples=0, why={"profile": "NVML Shared Library Not Found"})
    results = [make_result(8.0 / size, None, blind, batch_size=size) for size in (1, 2)]
    assert _codes(results) == [["no-profile"], []]
    assert "NVML Shared Library Not Found" in results[0].findings[0].text
    assert _codes([make_result(1.0, None, blind, device="cpu", devices=1)]) == [[]]


def test_a_profile_with_gaps_is_a_finding() -> None:
    """More than one sample of twenty is missing."""
    assert _codes([make_result(1.0, None, make_profile(samples=96, missed=4))]) == [[]]
    finding = _only(make_result(1.0, None, make_profile(samples=90, missed=10)))
    assert finding.code == "profile-gaps"
    assert "10 of 100" in finding.text


def test_a_case_shorter_than_a_sample_is_reported_once() -> None:
    """The bundled model on a GPU ends before the first sample."""
    short = make_profile(0, samples=0, duration_s=0.05)
    results = [make_result(8.0 / size, None, short, batch_size=size) for size in (1, 2)]
    assert _codes(results) == [["profile-too-short"], []]
    assert "0.05 s" in results[0].findings[0].text


def test_a_disturbed_window_warns() -> None:
    """The disturbances are in the text."""
    profile = make_profile(invalid=["programs of others at work: GPU 0", "memory in use before the start: GPU 1"])
    (finding,) = disturbances(make_result(1.0, None, profile), [])
    assert (finding.code, finding.severity) == ("profile-invalid", "warning")
    assert all(text in finding.text for text in profile.invalid)


def test_full_load_at_the_limit_of_power_is_reported_once() -> None:
    """GPUs work at this limit, so it is information, not a warning."""
    held_down = msgspec.structs.replace(make_profile(1).devices[0], throttled_s=30.0)
    profile = make_profile(devices=[held_down])
    profile = msgspec.structs.replace(profile, invalid=window.describe(window.find(profile)))
    assert len(profile.invalid) == 1
    results = [make_result(8.0 / size, None, profile, batch_size=size) for size in (1, 2)]
    assert _codes(results) == [["clocks-held-down"], []]
    assert results[0].findings[0].severity == "info"


def test_devices_that_differ_a_little_are_no_finding() -> None:
    """One device has the output layer or the embedding."""
    assert _codes([make_result(1.0, None, make_profile(), make_memory())]) == [[]]


def test_the_busiest_device_is_a_finding() -> None:
    """It is compared with the median of all devices."""
    finding = _only(make_result(1.0, None, _busy(25.0, 24.0, 41.0, 26.5)))
    assert (finding.code, finding.severity) == ("imbalanced-work", "info")
    assert all(text in finding.text for text in ("GPU 2", "41 %", "26 %"))


@pytest.mark.parametrize(
    ("values", "differs"),
    [
        ([20.0, 20.0, 20.0, 30.1], True),
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
def test_utilisation_differs_by_a_fifth_and_ten_points(values: list[float | None], differs: bool) -> None:
    """A smaller difference is noise; one device alone is not compared, nor are devices with unknown values."""
    assert bool(_imbalance(Launch(profile=_busy(*values)))) is differs


def _timed(*seconds: float, busy: Sequence[float] = ()) -> Launch:
    """Return a launch whose ranks have these device times, on devices that are busy for these percentages."""
    ranks = [RankWork(uuids=[f"GPU-{index}"], device_time_s=[time_s] * 3) for index, time_s in enumerate(seconds)]
    return Launch(work=msgspec.structs.replace(make_work(), ranks=ranks), profile=_busy(*busy))


@pytest.mark.parametrize(
    ("seconds", "figures"),
    [
        ((1.0, 1.06, 1.0, 1.0), ("Rank 1", "1.06 s", "is 1 s")),
        ((1.0, 1.04, 1.0, 1.0), None),
        ((1.0, 1.25), ("Rank 1", "1.25 s", "is 1.125 s")),
        ((1.0,), None),
    ],
)
def test_a_rank_with_more_device_time_is_a_finding(seconds: Sequence[float], figures: Sequence[str] | None) -> None:
    """Other ranks wait for it in kernels that count as busy: the utilisation of several ranks is not compared."""
    found = list(imbalance(_timed(*seconds, busy=[88.0, 20.0, 20.0, 20.0][: len(seconds)])))
    assert [one.code for one in found] == ([] if figures is None else ["slower-rank"])
    assert all(text in found[0].text for text in figures or ())


def test_every_launch_is_assessed() -> None:
    """A finding of several launches has the figures of the first that has it."""
    result = make_result(1.0, None, make_profile())
    uneven = [Launch(profile=_busy(20.0, 20.0, busiest)) for busiest in (60.0, 70.0)]
    result.launches = [*result.launches, *uneven]
    assert "busy for 60 %" in _only(result).text


def _going(
    link: Link | None, shares: Sequence[float] = (1.0, 1.0), nvlink: float | None = 1.0, size: int = 1
) -> CaseResult:
    path = Path(link=link, expected_bytes=10, nvlink_bytes=nvlink, nvlink_shares=list(shares), text="As counted.")
    traffic = msgspec.structs.replace(make_traffic(), path=path)
    return make_result(1.0, None, make_profile(), traffic=traffic, batch_size=size)


@pytest.mark.parametrize(
    ("result", "codes"),
    [
        (_going("nvlink", [1.0, 1.07]), []),
        (_going("mixed", [1.0, 0.0]), ["traffic-off-nvlink"]),
        (_going("pcie", [0.0, 0.0], 0.0), ["traffic-off-nvlink"]),
        (_going("host", [], None), []),
        (_going(None), []),
    ],
)
def test_traffic_off_nvlink_is_a_finding(result: CaseResult, codes: list[str]) -> None:
    """It did not go over NVLink although it is there."""
    assert _codes([result]) == [codes]
    for finding in result.findings:
        assert (finding.severity, finding.text) == ("info", "As counted.")


def test_the_links_of_a_series_are_reported_once() -> None:
    """The other batch sizes of the series have no finding."""
    assert _codes([_going("pcie", [0.0, 0.0], 0.0, size) for size in (1, 2)]) == [["traffic-off-nvlink"], []]


def test_the_fullest_device_is_a_finding() -> None:
    """NVML's index and NVML's bytes count."""
    (found,) = imbalance(Launch(memory=_full(10.0, 10.5, 15.0, 10.5)))
    assert found.code == "imbalanced-memory"
    assert all(text in found.text for text in ("GPU 1", "15.0 GiB in use", "is 10.5 GiB"))


@pytest.mark.parametrize(
    ("gib", "differs"),
    [([4.0, 4.0, 5.1], True), ([4.0, 4.0, 5.0], False), ([10.0, 10.0, 12.0], False), ([0.1, 0.1, 0.9], False)],
)
def test_memory_differs_by_a_fifth_and_a_gibibyte(gib: list[float], differs: bool) -> None:
    """A context or an output layer more is no finding."""
    assert bool(_imbalance(Launch(memory=_full(*gib)))) is differs


def test_without_nvml_the_reserved_memory_is_compared() -> None:
    """One device without a sample suffices."""
    memory = _full(20.0, 20.0, 30.0)
    memory[0] = msgspec.structs.replace(memory[0], nvml_used_max_bytes=None)
    (found,) = imbalance(Launch(memory=memory))
    assert all(text in found.text for text in ("GPU 1", "15.0 GiB reserved by torch", "is 10.0 GiB"))


def test_findings_on_profiles_read_as(prose: Prose) -> None:
    """Each finding has its text and its next step."""
    blind = make_profile(0, samples=0, why={"profile": "NVML Shared Library Not Found"})
    disturbed = make_profile(invalid=["programs of others at work: GPU 0", "memory in use before the start: GPU 1"])
    held_down = make_profile(1)
    held_down = msgspec.structs.replace(
        held_down, devices=[msgspec.structs.replace(held_down.devices[0], throttled_s=30.0)]
    )
    held_down = msgspec.structs.replace(held_down, invalid=window.describe(window.find(held_down)))
    reserved = [msgspec.structs.replace(memory, nvml_used_max_bytes=None) for memory in _full(20.0, 20.0, 30.0)]
    launches = [
        Launch(profile=_busy(25.0, 24.0, 41.0, 26.0)),
        _timed(1.0, 1.1, 1.0),
        Launch(memory=_full(10.0, 10.5, 15.0)),
        Launch(memory=reserved),
    ]
    found = [
        *of_profile(make_result(1.0, None, blind), []),
        *of_profile(make_result(1.0, None, make_profile(0, samples=0, duration_s=0.05)), []),
        *of_profile(make_result(1.0, None, make_profile(samples=90, missed=10)), []),
        *of_profile(_going("pcie", [0.0, 0.0], 0.0), []),
        *disturbances(make_result(1.0, None, disturbed), []),
        *disturbances(make_result(1.0, None, held_down), []),
        *(finding for launch in launches for finding in imbalance(launch)),
    ]
    assert prose == "\n".join(f"{finding.code}: {finding.text} {finding.next_step}" for finding in found)


def test_imbalance_is_reported_once_per_series() -> None:
    """Every batch size of a strategy splits the model in the same way."""
    uneven = _busy(20.0, 20.0, 60.0)
    sizes = [make_result(8.0 / size, None, uneven, batch_size=size) for size in (1, 2)]
    other = make_result(8.0, None, uneven, strategy="tp")
    assert _codes([*sizes, other]) == [["imbalanced-work"], [], ["imbalanced-work"]]


def test_equal_disturbances_of_several_launches_are_named_once() -> None:
    """The first launch has the figures, and the others are counted."""
    texts = ["processes of other programs: GPU 0 has 2", "processes of other programs: GPU 0 has 1", "another: x"]
    result = make_result(1.0, None, make_profile(invalid=texts[:1]))
    result.launches += [Launch(profile=make_profile(invalid=[text])) for text in texts[1:]]
    [finding] = disturbances(result, [])
    assert finding.text.endswith("GPU 0 has 2 (also in 1 more launch); another: x.")
