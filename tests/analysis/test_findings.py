from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from support.assessed import CPU, assessed, codes, finding_of
from support.prose import Prose
from support.report_factory import (
    GIB,
    make_accuracy,
    make_answers,
    make_failed,
    make_memory,
    make_profile,
    make_result,
    make_traffic,
    make_work,
)

from pytest_llmgpu.analysis.findings import disagreements
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import CaseResult, DeviceMemory, Failure, Launch, Link, Metric, Outcome, Path, Profile
from pytest_llmgpu.report.work import NO_WORK, TRAFFIC_FAILED, WORK_OFF, WORK_STOPPED, RankWork, Routing

_forward = partial(Failure, phase="forward", message="x")
_load = partial(Failure, phase="load", message="x")


def test_a_good_case_has_no_finding() -> None:
    """Without a finding there is nothing to do; a device with the output layer differs a little."""
    results = [make_result(60.0 / n, make_accuracy(), make_profile(), make_memory(), batch_size=n) for n in (1, 2, 4)]
    assert codes(*results, make_failed("skipped_after_oom", batch_size=8)) == [[], [], [], []]


def test_out_of_memory_names_the_limit() -> None:
    """The larger batch size has the finding; a smaller one ran to find the limit."""
    fits, oom, smaller = make_result(batch_size=8, **CPU), *(make_failed(batch_size=size, **CPU) for size in (32, 16))
    assert codes(fits, oom, smaller) == [[], ["out-of-memory"], []]


def test_finished_batches_are_named_where_the_case_can_be_continued() -> None:
    """Only an interrupted case has a use for them."""
    outcomes: tuple[Outcome, ...] = ("oom", "timeout", "crashed", "error", "interrupted")
    results = [make_failed(outcome) for outcome in outcomes]
    for named in ([], ["interrupted"]):
        assert [one.outcome for one in results if "batches that finished" in finding_of(one).next_step] == named
        for result in results:
            result.launches[0].batches.latency_s.append(1.0)


_STACKS = """Extension modules: numpy.linalg (total: 1)
Thread 0x00007f (most recent call first):
  File "a.py", line 3 in f
Current thread 0x00007e [python] (most recent call first):
"""


_LOGS = (
    'Traceback (most recent call last):\n  File "a"\nRuntimeError: NCCL\n[W] x\n',
    "torch.cuda.AcceleratorError: illegal\n  hint\n",
    "loading\nterminate called\n\n",
    "ValueError: x\nFatal Python error: Aborted\n\nCurrent thread 0x7f\n",
    "x" * 1000,
    # A dump of threads names no cause, and the message is not repeated.
    _STACKS,
    "ValueError: bad shape\n",
    "a.module.ValueError: bad shape\n",
)
"""Logs in which one line is decisive: the exception, not what a library prints when it ends; a long line is cut."""


def test_a_disturbance_is_reported_with_the_failure() -> None:
    """Memory of another program, or a lost GPU, may be its cause; gaps in its profile are no finding."""
    for failed, code in ((make_failed("oom"), "out-of-memory"), (make_failed("crashed"), "failed")):
        failed.launches[0].profile = make_profile(samples=90, missed=10, invalid=["memory in use: GPU 0 had 90.00 GiB"])
        assert codes(failed) == [[code, "profile-invalid"]]


@pytest.mark.parametrize(
    ("seconds", "far"),
    [
        ({1: 300.0, 2: 4.0}, True),
        ({1: 4.0, 2: 300.0}, True),
        ({1: 4.0, 2: 19.0}, False),
        ({1: 40.0, 8: 1.01}, False),
        ({1: 40.0, 8: 0.9}, True),
    ],
)
def test_batch_sizes_whose_throughput_is_far_apart_are_a_finding(seconds: dict[int, float], far: bool) -> None:
    """No model gets 75 times as fast by one batch size; eight times the sequences may be up to 40 times as fast."""
    results = assessed(*(make_result(s, batch_size=size, **CPU) for size, s in seconds.items()))
    assert codes(*results) == [[], ["times-far-apart"] * far]
    results[1].case = msgspec.structs.replace(results[1].case, execution="cuda_graphs")
    assert codes(*results) == [[], []], "another execution is not compared"


def _with_work(passes: Any, **why: str) -> CaseResult:
    result = make_result(1.0, None, make_profile())
    result.launches[0].work, result.launches[0].why = passes, why
    return result


def _unrecorded(*uuids: str) -> CaseResult:
    rank = RankWork(uuids=list(uuids), why={"device_time_s": "torch.profiler did not start"})
    return _with_work(msgspec.structs.replace(make_work(), ranks=[rank]))


_PASSES_FAILED = (
    _with_work(None, work="the work passes failed: CUDA error"),
    _unrecorded("GPU-0"),
    msgspec.structs.replace(_with_work(None), why={"traffic": TRAFFIC_FAILED}),
)


def test_passes_that_failed_are_a_warning() -> None:
    """The cause is the machine, not the case, so that one case has the finding. A CPU has no kernels to record."""
    assert codes(*_PASSES_FAILED, _PASSES_FAILED[1]) == [["passes-failed"]] * 3 + [[]]
    stopped = assessed(_with_work(None, work=WORK_STOPPED))[0].findings
    assert ["--llmgpu-resume" in one.next_step for one in stopped] == [True]
    quiet = [_with_work(None, work=WORK_OFF), _with_work(None, work=NO_WORK), _with_work(make_work()), _unrecorded()]
    assert codes(_with_work(None), *quiet) == [[]] * 5


def _routed(load_format: str = "dummy") -> CaseResult:
    work = make_work()
    routing = Routing(experts=128, tokens=40, touched=[72, 64], busiest=[10, 14])
    result = _with_work(msgspec.structs.replace(work, ranks=[msgspec.structs.replace(work.ranks[0], routing=routing)]))
    result.case = msgspec.structs.replace(result.case, load_format=load_format)
    return result


def test_the_routing_of_random_weights_is_stated_once(prose: Prose) -> None:
    """Trained weights route as they are used; the busiest expert of any layer counts."""
    assert codes(_routed("auto"), _routed(), _routed()) == [[], ["random-routing"], []]
    (found,) = assessed(_routed())[0].findings
    assert prose == f"{found.text} {found.next_step}"


@pytest.mark.parametrize(
    ("link", "nvlink", "found"),
    [("nvlink", 1.0, False), ("mixed", 1.0, True), ("pcie", 0.0, True), ("host", None, False), (None, 1.0, False)],
)
def test_traffic_off_nvlink_is_a_finding(
    link: Link | None, nvlink: float | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not go over NVLink although it is there."""
    path = Path(link=link, expected_bytes=10, nvlink_bytes=nvlink, text="As counted.")
    monkeypatch.setattr("pytest_llmgpu.analysis.traffic_path.of_case", lambda *_: path)
    (result,) = assessed(make_result(1.0, None, make_profile(), traffic=make_traffic()))
    expected = [("info", "traffic-off-nvlink", "As counted.")] if found else []
    assert [(one.severity, one.code, one.text) for one in result.findings] == expected


def _profiled(profile: Profile, **fields: Any) -> CaseResult:
    return make_result(1.0, None, profile, **fields)


_GAPS = (
    make_profile(0, samples=0, why={"profile": "no NVML"}),
    make_profile(samples=90, missed=10),
    make_profile(0, samples=0, duration_s=0.05),
)


def test_a_profile_with_gaps_is_incomplete() -> None:
    """More than one sample of twenty is missing. On a CPU no profile is expected."""
    whole = make_profile(samples=96, missed=4)
    assert codes(*map(_profiled, (*_GAPS, whole))) == [["incomplete-profile"]] * 3 + [[]]
    assert codes(*(_profiled(profile, **CPU) for profile in _GAPS)) == [[]] * 3


def _busy(*values: float | None, samples: int = 60) -> Launch:
    """Return a launch whose devices are busy for these percentages of the time."""
    profile = make_profile(len(values), samples=samples)
    for device, value in zip(profile.devices, values, strict=True):
        device.metrics["utilization_pct"] = Metric(mean=value, max=value, method="nvml", coverage=None)
    return Launch(profile=profile)


def _timed(*seconds: float, busy: Sequence[float] = ()) -> Launch:
    """Return a launch whose ranks have these device times, on devices that are busy for these percentages."""
    ranks = [RankWork(uuids=[f"GPU-{index}"], device_time_s=[time_s] * 3) for index, time_s in enumerate(seconds)]
    return Launch(work=msgspec.structs.replace(make_work(), ranks=ranks), profile=_busy(*busy).profile)


def _full(*gib: float, nvml: bool = True) -> Launch:
    """Return a launch whose devices have these GiB in use, by NVML; torch reserved half of it."""
    memory = [
        DeviceMemory(
            index=3 - index,
            nvml_used_max_bytes=int(size * GIB) if nvml or index else None,  # one device without a sample suffices
            peak_reserved_bytes=int(size * GIB / 2),
        )
        for index, size in enumerate(gib)
    ]
    return Launch(memory=memory, profile=make_profile())


@pytest.mark.parametrize(
    ("launch", "text"),
    [
        (_busy(25.0, 24.0, 41.0, 26.5), "GPU 2 was busy for 41 % of the time, the median of the GPUs is 26 %."),
        (_busy(34.0, 16.0, 15.0, 17.0, samples=59), None),  # readings may lie beyond the window of one device
        (_busy(20.0, 20.0, 20.0, 30.1), "busy for 30 %"),
        (_busy(20.0, 20.0, 20.0, 30.0), None),
        (_busy(10.0, 20.0, 20.0, 20.0), None),
        (_busy(80.0, 80.0, 80.0, 95.0), None),
        (_busy(5.0, 5.0, 14.0), None),
        (_busy(50.0, 90.0), "busy for 90 %"),
        (_busy(90.0), None),
        (_busy(20.0, None, 20.0, 60.0), None),
        (_busy(), None),
        # Other ranks wait in kernels that count as busy: the utilisation of several ranks is not compared.
        (_timed(1.0, 1.06, 1.0, 1.0, busy=[88.0, 20.0, 20.0, 20.0]), "Rank 1 has a device time of 1.06 s in a"),
        (_timed(1.0, 1.04, 1.0, 1.0, busy=[88.0, 20.0, 20.0, 20.0]), None),
        (_timed(1.0, 1.25), "1.25 s in a work pass, the median of the ranks is 1.125 s."),
        (_timed(1.0), None),
        (_full(10.0, 10.5, 15.0, 10.5), "GPU 1 had 15.0 GiB in use at its fullest, the median of the GPUs is 10.5"),
        (_full(20.0, 20.0, 30.0, nvml=False), "GPU 1 had 15.0 GiB reserved by torch at its fullest, the median"),
        (_full(4.0, 4.0, 5.1), "5.1 GiB"),
        (_full(4.0, 4.0, 5.0), None),
        (_full(10.0, 10.0, 12.0), None),
        (_full(0.1, 0.1, 0.9), None),
    ],
)
def test_the_busiest_the_slowest_and_the_fullest_are_a_finding(launch: Launch, text: str | None) -> None:
    """A device is compared with the median of all: a fifth, and ten points or a gibibyte, above it."""
    result = make_result(1.0, None, make_profile())
    result.launches = [*result.launches, launch, _busy(20.0, 20.0, 99.0)]
    found = assessed(result)[0].findings[0]
    assert (found.code, found.severity) == ("imbalance", "info")
    assert (text or "GPU 2 was busy for 99 %") in found.text, "the first launch that has it counts"


def _launched(*seconds: float, device_s: Sequence[float] = (), **fields: Any) -> list[CaseResult]:
    """Return a result for each launch of a case."""
    results = [make_result(one, **fields) for one in seconds]
    for result, time_s in zip(results, device_s, strict=False):
        rank = msgspec.structs.replace(make_work().ranks[0], device_time_s=[time_s] * 3)
        result.launches[0].work = msgspec.structs.replace(make_work(ranks=1), ranks=[rank])
    return results


def _answering(*answers: Sequence[bool]) -> list[CaseResult]:
    return [make_result(1.0, make_answers(right)) for right in answers]


def _sending(*links: Link | None) -> list[CaseResult]:
    return [make_result(1.0, traffic=make_traffic(link=link)) for link in links]


_RECORDED, _PLANNED = (make_result(9.0, execution="cuda_graphs") for _ in range(2))
_PLANNED.launches[0].plan_sha256 = "0" * 64


_DIFFERENT = (
    _answering([True] * 3, [True] * 3, [True, False, True]),
    [make_result(1.0, traffic=make_traffic(calls)) for calls in (4, 2, 4)],
    _sending("pcie", "nvlink", None, "nvlink", "mixed"),
    # Launches of other batches or executions are not compared in time.
    [make_result(1.0), _RECORDED],
    [make_result(1.0), _PLANNED],
    # Where the wall time is not far apart, the device time may be.
    _launched(1.2, 1.0, 3.1),
    _launched(1.0, 3.1, execution="cuda_graphs"),
    _launched(1.0, 1.0, 1.0, device_s=(0.1, 0.31, 0.15)),
    [make_result(1.0), make_failed("crashed"), make_result(4.0)],  # a failed launch has a number
)
"""The launches of cases of which each has one finding."""


def test_launches_differ_only_a_little_in_time() -> None:
    """Chance explains a factor of 2.8 where the host decides."""
    names = [one.code for launches in _DIFFERENT for one in disagreements(launches)]
    assert names == ["launches-differ"] * 5 + ["times-far-apart"] * 4
    unscored = [*_answering([True]), make_failed("crashed")]
    quiet = _sending("nvlink", None, "nvlink"), _launched(1.0, 2.8), _launched(1.0, 1.0, device_s=(0.1, 0.19)), unscored
    assert [disagreements(launches) for launches in quiet] == [[]] * 4


def test_findings_read_as(prose: Prose) -> None:
    """Each has its severity, text and next step; what failed has its place and cause, and options that may help."""
    no_memory = _forward(requested_bytes=5 * GIB // 2, free_bytes=GIB // 2)
    failed: list[tuple[Outcome, Failure | None, dict[str, Any]]] = [
        ("oom", _forward(evidence="rule"), {}),
        ("oom", _forward(evidence="x", tokens_requested=1106, tokens_granted=0), {}),
        ("oom", no_memory, {}),
        ("oom", _load(evidence="torch"), {}),
        ("oom", _load(), {"gpu_memory_bytes": 18 * GIB}),
        ("oom", _load(), {"dtype": "float32"}),
        ("timeout", _forward(), {}),
        ("timeout", _forward(log_tail="File a.py"), {}),
        ("timeout", _load(), {}),
        ("crashed", _forward(rank=2, signal=signal.SIGKILL), {}),
        ("crashed", _forward(signal=signal.SIGTERM), {}),
        ("error", _load(log_tail="x"), {}),
        ("interrupted", _load(), {}),
        ("error", None, {}),
    ]
    # The first launch has the figures of a disturbance, and the others are counted.
    invalid = ["processes of other programs: GPU 0 has 2", "processes of other programs: GPU 0 has 1", "another: x"]
    disturbed = _profiled(make_profile(invalid=invalid[:1]))
    disturbed.launches += [Launch(profile=make_profile(invalid=[text])) for text in invalid[1:]]
    throttled = make_profile(devices=[msgspec.structs.replace(make_profile(1).devices[0], throttled_s=30.0)])
    uneven = _profiled(make_profile())
    uneven.launches = [msgspec.structs.replace(_timed(1.0, 1.1, 1.0), memory=_full(10.0, 10.5, 15.0).memory)]
    found = [
        *(finding_of(make_failed(outcome, failure, batch_size=4, **fields)) for outcome, failure, fields in failed),
        finding_of(make_result(batch_size=8, **CPU), make_failed(batch_size=32, **CPU)),
        finding_of(*(make_result(s, batch_size=size, **CPU) for size, s in {1: 300.0, 2: 4.0}.items())),
        *(finding_of(make_failed("crashed", _forward(message="ValueError: bad shape", log_tail=log))) for log in _LOGS),
        *map(finding_of, _PASSES_FAILED),
        *(finding_of(_profiled(profile)) for profile in _GAPS),
        finding_of(_profiled(make_profile(invalid=["memory in use before the start: GPU 1", "x: b"]))),
        finding_of(disturbed),
        finding_of(_profiled(msgspec.structs.replace(throttled, invalid=disturbances.find(throttled)))),
        finding_of(uneven),
        *(one for launches in _DIFFERENT for one in disagreements(launches)),
    ]
    assert prose == "\n".join(f"{one.severity} {one.code}: {one.text} {one.next_step}" for one in found)
