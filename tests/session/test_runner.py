from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import msgspec
import pytest
from support import report_factory, tiny_model
from support.prose import Prose

from pytest_llmgpu.inference import tasks
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.profiling.node_profilers import NodeProfilers
from pytest_llmgpu.profiling.profiler import Profiler
from pytest_llmgpu.ranks import serving, worker
from pytest_llmgpu.ranks.ceilings import Wanted
from pytest_llmgpu.ranks.local import LocalLauncher
from pytest_llmgpu.ranks.protocol import BatchListener, FinishedBatch, RankFailedError
from pytest_llmgpu.ranks.work import NamedRow, WorkReply
from pytest_llmgpu.ranks.worker import Measured
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.report import Gpu
from pytest_llmgpu.report.result import (
    Batches,
    CaseResult,
    Collective,
    DeviceMemory,
    DeviceProfile,
    Failure,
    HostUse,
    Launch,
    Metric,
    Outcome,
    Profile,
    Traffic,
)
from pytest_llmgpu.report.work import NO_WORK, WORK_OFF, Ceilings, DeviceCeilings, ModelSize, RankWork, WorkRow
from pytest_llmgpu.session.runner import Request, Runner
from pytest_llmgpu.strategies.mp import LayerParallel

_GPUS = [Gpu(index=3, uuid="GPU-c", name="H", memory_bytes=10), Gpu(index=1, uuid="GPU-a", name="H", memory_bytes=10)]
_MACHINE = Machine(device="cuda", devices=2, gpus=_GPUS, facts=TorchFacts(version="2"))


@dataclasses.dataclass
class _FakeRank:
    """A rank that answers at once, in this process."""

    rank: int
    answer: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
    ended: list[str]
    alive: bool = True

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self.answer(fn, args))
        except RankFailedError as error:
            future.set_exception(error)
        return future

    def stacks(self) -> str:
        return "stuck"

    def close(self) -> None:
        self.ended.append("closed")

    def kill(self) -> None:
        self.ended.append("killed")


class _FakeLauncher(LocalLauncher):
    name = "fake"

    def __init__(self, answer: Callable[[Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        self.answer = answer
        self.ended: list[str] = []
        self.environments: list[Sequence[Mapping[str, str]]] = []
        self.on_batch: BatchListener | None = None

    def start(self, environments: Sequence[Mapping[str, str]], on_batch: BatchListener) -> Sequence[Any]:
        self.environments.append(environments)
        self.on_batch = on_batch
        self.ranks = [_FakeRank(number, self.answer, self.ended) for number in range(len(environments))]
        return self.ranks

    def take_output(self) -> dict[int, str]:
        return {}


class _FakeProfiler(Profiler):
    def __init__(self) -> None:
        super().__init__(1.0)
        self.windows: list[tuple[float, float, dict[str, int]]] = []
        self.did: list[str] = []

    def mark(self, *, wait: bool = False) -> None:
        self.did.append(f"mark, {wait=}")

    def start(self) -> None:
        pass

    def slice(self, start_s: float, end_s: float, held_bytes: Mapping[str, int] | None = None) -> Profile:
        self.windows.append((start_s, end_s, dict(self.held_bytes if held_bytes is None else held_bytes)))
        used = Metric(mean=5.0, max=7.0, method="nvml", coverage=None)
        return Profile(
            period_s=1.0,
            duration_s=end_s - start_s,
            samples=1,
            missed=0,
            lateness_p99_s=None,
            devices=[DeviceProfile(index=3, uuid="GPU-c", metrics={"memory_used_bytes": used})],
        )


def _case(batch_size: int, **fields: Any) -> Case:
    return msgspec.structs.replace(
        report_factory.make_case(batch_size=batch_size), strategy="mp", device="cuda", devices=2, **fields
    )


_MP, _TP = "pytest_llmgpu.strategies.mp:LayerParallel", "pytest_llmgpu.strategies.tp:TensorParallel"


def _request(case: Case, strategy: str = _MP, *, work: bool = False) -> Request:
    source = tiny_model.source({})
    return Request(
        case=case,
        machine=_MACHINE,
        source=source,
        strategy=strategy,
        task=tasks.BUILT_IN["hellaswag"],
        items=(),
        timeout_s=60.0,
        load_timeout_s=60.0,
        work=work,
    )


def _reply(fn: Callable[..., Any], _args: tuple[Any, ...]) -> Any:
    if fn is worker.load:
        return [DeviceMemory(index=0, held_bytes=2), DeviceMemory(index=1)]
    if fn is worker.account:
        return [], None
    if fn is not worker.measure:
        return None
    launch = Launch(
        warmup_s=0.5,
        compile_s=8.0,
        plan_sha256="plan",
        execution_choice="they were switched off",
        batches=Batches(latency_s=[1.0, 2.0], sequences=[4, 4], tokens=[40, 30], padded_tokens=[40, 40]),
        accuracy=report_factory.make_accuracy(),
        memory=[DeviceMemory(index=0, weights_bytes=4, held_bytes=2), DeviceMemory(index=1, weights_bytes=5)],
        host=HostUse(wall_s=3.0, threads=[4], cpu_s=[2.0], waited_s=[0.9], pressure_s=0.5),
    )
    return Measured(launch, "eager", 100.0, 103.0)


@pytest.fixture
def recorded() -> list[CaseResult]:
    """The results that were passed to `record`."""
    return []


def _one_node(profiler: Profiler) -> Callable[[Machine], NodeProfilers]:
    profilers = NodeProfilers([profiler])
    return lambda _machine: profilers


def _runner(launcher: _FakeLauncher) -> tuple[Runner, _FakeProfiler]:
    profiler = _FakeProfiler()
    return Runner(launcher, _one_node(profiler), lambda *_: None, lambda _: None), profiler


def test_a_completed_case_holds_what_the_ranks_measured(recorded: list[CaseResult]) -> None:
    """Batches and accuracy come from the ranks; the profile begins with the first batch and ends with the last."""
    runner, profiler = _runner(_FakeLauncher(_reply))
    result = runner.run(_request(_case(4)), recorded.append)
    assert recorded == [result]
    assert (result.outcome, result.failure) == ("completed", None)
    (launch,) = result.launches
    assert (launch.batches.latency_s, launch.plan_sha256) == ([1.0, 2.0], "plan")
    assert (launch.warmup_s, launch.compile_s) == (0.5, 8.0)
    assert profiler.windows == [(100.0, 103.0, {"GPU-c": 2, "GPU-a": 0})]
    assert launch.host == HostUse(wall_s=3.0, threads=[4], cpu_s=[2.0], waited_s=[0.9], pressure_s=0.5)
    assert launch.profile is not None
    [disturbance] = launch.profile.invalid
    assert disturbance.startswith(disturbances.TITLES["cpu"])


def test_counters_are_read_between_warm_up_and_measurement(recorded: list[CaseResult]) -> None:
    """Bytes of the warm-up do not count, and the devices are idle while counters are read."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        profiler.did.append(fn.__name__)
        return _reply(fn, args)

    runner, profiler = _runner(_FakeLauncher(answer))
    runner.run(_request(_case(4)), recorded.append)
    # The second mark comes at once: the answers are compared later, which takes longer than a mark may wait.
    assert profiler.did[-5:] == ["warm_up", "mark, wait=True", "measure", "mark, wait=False", "account"]


def test_counters_are_read_where_a_phase_begins_and_where_a_case_fails(recorded: list[CaseResult]) -> None:
    """The window of a failed case begins with loading or warm-up and ends before its ranks end."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        profiler.did.append(fn.__name__)
        if fn is worker.measure:
            raise RankFailedError("crashed", Failure(phase="forward", message="gone"))
        return _reply(fn, args)

    launcher = _FakeLauncher(answer)
    runner, profiler = _runner(launcher)
    launcher.ended = profiler.did  # in one list, for the order
    runner.run(_request(_case(4)), recorded.append)
    mark = "mark, wait=False"
    assert profiler.did == [
        *(mark, "load", "give", "reset", mark, "warm_up", "mark, wait=True", "measure"),
        *(mark, "killed"),
    ]


@pytest.mark.usefixtures("patient_profiler")
@pytest.mark.parametrize("failing", [worker.load, worker.measure])
def test_a_failed_case_has_the_disturbances_of_its_window(
    nvml_stub: Callable[..., dict[str, str]], recorded: list[CaseResult], failing: Callable[..., Any]
) -> None:
    """An Xid or a memory error that may have caused a crash is in the profile of the crashed case."""
    profiler = Profiler(0.025, environment=nvml_stub(xid="0:1", ecc="0:1", processes="2"))

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is failing:
            profiler.mark(wait=True)  # some time passes
            raise RankFailedError("crashed", Failure(phase="forward", message="gone"))
        return _reply(fn, args)

    runner = Runner(_FakeLauncher(answer), _one_node(profiler), lambda *_: None, lambda _: None)
    try:
        result = runner.run(_request(_case(4)), recorded.append)
    finally:
        profiler.close()
    profile = result.launches[0].profile
    assert profile is not None
    assert [sentence.partition(":")[0] for sentence in profile.invalid] == [
        disturbances.TITLES["processes"],
        disturbances.TITLES["ecc"],
        disturbances.TITLES["xid"],
    ]


def test_memory_is_unknown_without_a_reading_inside_the_window(
    recorded: list[CaseResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest reading is of another moment and does not count."""
    runner, profiler = _runner(_FakeLauncher(_reply))
    slice_ = profiler.slice
    monkeypatch.setattr(
        profiler,
        "slice",
        lambda *ends: msgspec.structs.replace(slice_(*ends), samples=0, why={"samples": "no reading fell inside"}),
    )
    memory = runner.run(_request(_case(4)), recorded.append).launches[0].memory[0]
    assert (memory.nvml_used_max_bytes, memory.nvml_used_mean_bytes) == (None, None)
    assert memory.why["nvml_used_max_bytes"] == "no reading fell inside"


_TWO_NODES = Machine(
    device="cuda",
    devices=3,
    gpus=[*_GPUS, Gpu(index=5, uuid="GPU-e", name="H", memory_bytes=10)],
    facts=TorchFacts(version="2"),
    nodes=[0, 0, 1],
)


def _on_two_nodes(case: Case) -> Request:
    case = msgspec.structs.replace(case, strategy="tp", devices=3)
    return msgspec.structs.replace(_request(case, _TP), machine=_TWO_NODES)


def test_a_rank_has_the_devices_of_its_node(recorded: list[CaseResult]) -> None:
    """The variables are those that torchrun sets on each node."""
    launcher = _FakeLauncher(_reply)
    _runner(launcher)[0].run(_on_two_nodes(_case(4)), recorded.append)
    [environments] = launcher.environments
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "LLMGPU_NODES")
    assert [[variables[name] for name in names] for variables in environments] == [
        ["0", "0", "3", "2", "GPU-c,GPU-a", "0,0,1"],
        ["1", "1", "3", "2", "GPU-c,GPU-a", "0,0,1"],
        ["2", "0", "3", "1", "GPU-e", "0,0,1"],
    ]


@pytest.mark.parametrize("nodes", [[0, 0, 1], [0, 1, 0]], ids=["block", "cyclic"])
def test_files_that_differ_between_nodes_are_refused_before_loading(
    recorded: list[CaseResult], nodes: list[int]
) -> None:
    """Ranks that load other weights would compute nonsense together, for hours."""
    asked: list[str] = []
    answers: list[dict[str, str] | None] = [{"config.json": "a"}, None, None]
    answers[nodes.index(1)] = {"config.json": "b"}

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        asked.append(fn.__name__)
        return answers[len(asked) - 1] if fn is worker.file_hashes else _reply(fn, args)

    request = _on_two_nodes(_case(4, model="tiny"))
    request = msgspec.structs.replace(request, machine=msgspec.structs.replace(_TWO_NODES, nodes=nodes))
    result = _runner(_FakeLauncher(answer))[0].run(request, recorded.append)
    assert set(asked) == {"file_hashes"}
    assert (result.outcome, result.failure and result.failure.phase) == ("error", "load")
    assert result.failure is not None
    assert result.failure.message == "the files of tiny differ: config.json a on node 0, b on node 1"


def test_nodes_are_compared_where_each_rank_is_the_first_one_in_its_own_sight(recorded: list[CaseResult]) -> None:
    """Slurm's --gpus-per-task gives each rank the local number 0: the ranks of a node are one node all the same."""
    files = [{"config.json": "a"}, {"config.json": "a"}, {"config.json": "b"}]

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return files.pop(0) if fn is worker.file_hashes else _reply(fn, args)

    request = msgspec.structs.replace(
        _on_two_nodes(_case(4, model="tiny")), machine=msgspec.structs.replace(_TWO_NODES, nodes=[0, 0, 1])
    )
    result = _runner(_FakeLauncher(answer))[0].run(request, recorded.append)
    assert result.failure is not None
    assert result.failure.message == "the files of tiny differ: config.json a on node 0, b on node 1"


_SENT = Collective(collective="all_reduce", calls=3, payload_bytes=80, wire_bytes=120)


def test_traffic_is_recorded_per_rank(recorded: list[CaseResult]) -> None:
    """The bytes per sequence are the sum over all ranks."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return ([_SENT], None) if fn is worker.account else _reply(fn, args)

    runner, _ = _runner(_FakeLauncher(answer))
    result = runner.run(_request(_case(4), _TP), recorded.append)
    assert result.traffic == Traffic(ranks=[[_SENT], [_SENT]], wire_bytes_per_sequence=2 * 120 / 8)
    assert "traffic" not in result.why


def test_ranks_that_send_nothing_are_an_error_that_keeps_the_measurement(recorded: list[CaseResult]) -> None:
    """A tensor parallel model without a collective is an error; its batches stay in the result."""
    launcher = _FakeLauncher(_reply)
    runner, _ = _runner(launcher)
    result = runner.run(_request(_case(4), _TP), recorded.append)
    assert (result.outcome, set(launcher.ended)) == ("error", {"killed"})
    assert result.failure is not None
    assert "no collective was counted" in result.failure.message
    assert result.launches[0].batches.latency_s == [1.0, 2.0]


@pytest.mark.parametrize("raised", [True, False])
def test_a_case_whose_traffic_is_not_counted_stays_measured(recorded: list[CaseResult], raised: bool) -> None:
    """An unknown op, or a failed forward, costs the traffic alone, and `why` has the reason."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is not worker.account:
            return _reply(fn, args)
        if raised:
            raise RankFailedError("oom", Failure(phase="forward", message="c10d::new is not known"))
        return "c10d::new is not known"

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    result = runner.run(_request(_case(4), _TP), recorded.append)
    assert (result.outcome, result.traffic) == ("completed", None)
    assert "c10d::new is not known" in result.why["traffic"]
    assert set(launcher.ended) == ({"killed"} if raised else set())
    assert runner.run(_request(_case(8), _TP), recorded.append).outcome == "completed"


def _working(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Answer as ranks do that send and compute something."""
    if fn is worker.account:
        return [_SENT], None
    if fn is worker.run_eager_passes:
        return [
            WorkReply(
                batches=[1],
                eager_batches=[1],
                work=RankWork(uuids=["GPU-c"], flops=7),
                rows=[NamedRow(None, "gemm", "GEMM", 1, 0.5)],
                collective_s=[{}] * 3,
            )
        ]
    if fn is worker.model_size:
        return ModelSize(parameters=1, weights_bytes=2, layers=3, attention_width=4)
    if fn is worker.measure_ceilings:
        return Ceilings(devices=[DeviceCeilings(uuid="GPU-c", gemm_flops_per_s={"float16": 3.0})])
    return _reply(fn, args)


def test_work_passes_follow_the_measured_forwards(recorded: list[CaseResult]) -> None:
    """Those in the execution of the case run before the traffic, while its graphs exist, the eager ones after it."""
    asked: list[str] = []

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        asked.append(fn.__name__)
        return _working(fn, args)

    runner, _ = _runner(_FakeLauncher(answer))
    for batch_size in (4, 8):
        result = runner.run(_request(_case(batch_size), work=True), recorded.append)
        assert result.outcome == "completed"
        found = result.launches[0].work
        assert found is not None
        assert (found.batches, found.passes, found.ranks[0].flops) == ([1], 3, 7)
        assert found.model is not None
        assert found.ranks[0].rows == [WorkRow(module=None, kernel=0, family="GEMM", calls=1, time_s=0.5)]
        assert "work" not in result.launches[0].why
    assert runner.kernel_names == {"gemm": 0}
    assert runner.ceilings is not None
    assert runner.ceilings.devices[0].gemm_flops_per_s == {"float16": 3.0}
    first = asked[asked.index("measure") :]
    assert first[:6] == ["measure", "record_work", "account", "run_eager_passes", "model_size", "measure_ceilings"]
    assert asked.count("measure_ceilings") == 1
    assert asked.count("run_eager_passes") == 2


def test_each_rate_of_a_gpu_is_measured_once_a_session(recorded: list[CaseResult]) -> None:
    """A strategy with several ranks adds the all-reduce, and another dtype its matrix product."""
    wanted: list[Wanted] = []

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.measure_ceilings:
            wanted.extend(args)
        return _working(fn, args)

    runner, _ = _runner(_FakeLauncher(answer))
    for batch_size in (4, 8):
        runner.run(_request(_case(batch_size), work=True), recorded.append)
    for dtype in (_case(4).dtype, "bfloat16"):
        for batch_size in (4, 8):
            case = msgspec.structs.replace(_case(batch_size, dtype=dtype), strategy="tp")
            runner.run(_request(case, _TP, work=True), recorded.append)
    assert wanted == [
        Wanted(products=[0, 1], copies=[0, 1], all_reduce=False),
        *[Wanted(products=[], copies=[], all_reduce=True)] * 2,
        *[Wanted(products=[0, 1], copies=[], all_reduce=False)] * 2,
    ]


def test_ranks_that_end_in_a_work_pass_count_no_traffic(recorded: list[CaseResult]) -> None:
    """Both have the reason, and the case stays completed."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.record_work:
            raise RankFailedError("crashed", Failure(phase="forward", message="CUPTI crashed"))
        return _working(fn, args)

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    result = runner.run(_request(_case(4), work=True), recorded.append)
    assert (result.outcome, result.traffic, result.launches[0].work) == ("completed", None, None)
    for reason in (result.why["traffic"], result.launches[0].why["work"]):
        assert "CUPTI crashed" in reason
    assert launcher.ended == ["killed"]


def test_a_model_without_a_size_keeps_its_work(recorded: list[CaseResult]) -> None:
    """The bound alone needs the size. Here the ranks fail; an error within the computation is an answer."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.model_size:
            raise RankFailedError("crashed", Failure(phase="forward", message="killed by SIGKILL"))
        return _working(fn, args)

    runner, _ = _runner(_FakeLauncher(answer))
    (launch,) = runner.run(_request(_case(4), work=True), recorded.append).launches
    assert launch.work is not None
    assert launch.work.ranks[0].flops == 7
    assert launch.work.model is None
    assert "SIGKILL" in launch.work.why["model"]
    assert "work" not in launch.why
    assert runner.ceilings is None


def test_failed_work_passes_cost_no_measurement(recorded: list[CaseResult]) -> None:
    """The case stays completed with the reason; the ranks, which may be stuck, are started again."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.run_eager_passes:
            raise RankFailedError("oom", Failure(phase="forward", message="CUDA out of memory"))
        return _working(fn, args)

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    result = runner.run(_request(_case(4), work=True), recorded.append)
    assert (result.outcome, result.failure) == ("completed", None)
    assert result.traffic is not None
    (launch,) = result.launches
    assert (launch.work, launch.batches.latency_s) == (None, [1.0, 2.0])
    assert "CUDA out of memory" in launch.why["work"]
    assert launcher.ended == ["killed"]
    assert runner.run(_request(_case(8)), recorded.append).outcome == "completed"


def test_failed_ceilings_cost_no_work(recorded: list[CaseResult]) -> None:
    """They are null with the reason, and are not tried again."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.measure_ceilings:
            raise RankFailedError("error", Failure(phase="forward", message="cuBLAS failed"))
        return _working(fn, args)

    runner, _ = _runner(_FakeLauncher(answer))
    for batch_size in (4, 8):
        result = runner.run(_request(_case(batch_size), work=True), recorded.append)
        assert result.launches[0].work is not None
    assert runner.ceilings is not None
    assert "cuBLAS failed" in runner.ceilings.why["devices"]


def test_work_passes_are_left_out_where_they_are_switched_off(recorded: list[CaseResult]) -> None:
    """`why` has the reason: the option, the outcome, or ranks that were ended before."""
    runner, _ = _runner(_FakeLauncher(_working))
    assert runner.run(_request(_case(4)), recorded.append).launches[0].why == {"work": WORK_OFF}

    def failing(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.measure:
            raise RankFailedError("crashed", Failure(phase="forward", message="gone"))
        return _working(fn, args)

    runner, _ = _runner(_FakeLauncher(failing))
    assert runner.run(_request(_case(4), work=True), recorded.append).launches[0].why == {"work": NO_WORK}
    runner, _ = _runner(_FakeLauncher(_reply))
    result = runner.run(_request(_case(4), _TP, work=True), recorded.append)
    assert result.outcome == "error"
    assert "the ranks were ended" in result.launches[0].why["work"]


@pytest.mark.parametrize("interrupted", [worker.record_work, worker.account, worker.run_eager_passes])
def test_an_interrupt_after_the_measurement_loses_nothing(
    recorded: list[CaseResult], interrupted: Callable[..., Any]
) -> None:
    """Ctrl-C in a pass that follows the measured forwards leaves a completed case."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is interrupted:
            raise KeyboardInterrupt
        return _working(fn, args)

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    with pytest.raises(KeyboardInterrupt):
        runner.run(_request(_case(4), work=True), recorded.append)
    assert recorded[0].outcome == "completed"
    assert recorded[0].launches[0].batches.latency_s == [1.0, 2.0]
    assert "work" in recorded[0].launches[0].why
    assert launcher.ended == ["killed"]


def test_memory_is_recorded_by_nvml_index(recorded: list[CaseResult]) -> None:
    """Devices are joined by UUID, since CUDA may order them differently; `why` has the reason of a missing reading."""
    runner, _ = _runner(_FakeLauncher(_reply))
    first, second = runner.run(_request(_case(4)), recorded.append).launches[0].memory
    assert (first.index, first.weights_bytes, first.held_bytes, first.nvml_used_max_bytes) == (3, 4, 2, 7)
    assert (second.index, second.weights_bytes, second.nvml_used_max_bytes) == (1, 5, None)
    assert "nvml_used_max_bytes" in second.why


def test_ranks_see_the_chosen_devices_in_order(recorded: list[CaseResult]) -> None:
    """Devices are passed by UUID, independent of the caller's CUDA_VISIBLE_DEVICES."""
    launcher = _FakeLauncher(_reply)
    _runner(launcher)[0].run(_request(_case(4)), recorded.append)
    assert launcher.environments == [[{"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}]]


@pytest.mark.parametrize("chosen", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_threads_on_a_cpu_do_not_spin_for_long(
    recorded: list[CaseResult], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the user has precedence."""
    if chosen is not None:
        monkeypatch.setenv(chosen, "1")
    launcher = _FakeLauncher(_reply)
    for strategy in (_MP, _TP):
        case = msgspec.structs.replace(_case(4), device="cpu")
        _runner(launcher)[0].run(_request(case, strategy), recorded.append)
    short = None if chosen else "1000"
    assert [[one.get("GOMP_SPINCOUNT") for one in ranks] for ranks in launcher.environments] == [[short], [short] * 2]


@pytest.mark.parametrize(("chosen", "threads"), [(None, "3"), ("5", "5")])
def test_ranks_of_a_node_split_its_cores(
    recorded: list[CaseResult], chosen: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all cores for each rank, threads would wait for each other. A variable of the user has precedence."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    launcher = _FakeLauncher(_reply)
    _runner(launcher)[0].run(_request(_case(4), _TP), recorded.append)
    assert [[one["OMP_NUM_THREADS"] for one in ranks] for ranks in launcher.environments] == [[threads] * 2]


def test_a_model_is_loaded_once_for_all_batch_sizes(recorded: list[CaseResult]) -> None:
    """Processes are kept from case to case and ended when another model is needed."""
    launcher = _FakeLauncher(_reply)
    runner, _ = _runner(launcher)
    for batch_size in (1, 2, 4):
        runner.run(_request(_case(batch_size)), recorded.append)
    assert (len(launcher.environments), launcher.ended) == (1, [])
    runner.run(_request(_case(1, model="another")), recorded.append)
    assert (len(launcher.environments), launcher.ended) == (2, ["closed"])
    runner.close()
    assert launcher.ended == ["closed", "closed"]


def test_after_out_of_memory_only_the_same_series_is_skipped(recorded: list[CaseResult]) -> None:
    """Larger or equal sizes of the same measurement are skipped; smaller ones and other measurements run."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.warm_up and args[0].batch_size >= 8:
            raise RankFailedError("oom", Failure(phase="forward", message="CUDA out of memory"))
        return _reply(fn, args)

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    cases = [_case(8), _case(8), _case(16), _case(4), _case(16, dtype="bfloat16")]
    outcomes = [runner.run(_request(case), recorded.append).outcome for case in cases]
    assert outcomes == ["oom", "skipped_after_oom", "skipped_after_oom", "completed", "oom"]
    assert launcher.ended == ["killed", "closed", "killed"], "the next case finds clean devices"


def test_a_session_that_is_resumed_knows_what_it_found(recorded: list[CaseResult]) -> None:
    """Sizes that ran out of memory are skipped, and numbers of kernels and rates of GPUs stay as they are."""
    launcher = _FakeLauncher(_reply)
    runner, _ = _runner(launcher)
    oom = _case(8)
    report = report_factory.make_report([CaseResult(id=oom.id, key=oom.key, case=oom, outcome="oom")])
    report.environment.kernel_names = ["first", "second"]
    report.environment.ceilings = report_factory.make_ceilings()
    runner.resume(report)
    assert [runner.run(_request(_case(size)), recorded.append).outcome for size in (16, 4)] == [
        "skipped_after_oom",
        "completed",
    ]
    assert runner.kernel_names == {"first": 0, "second": 1}
    assert runner.ceilings == report.environment.ceilings


def test_forwards_that_cannot_be_recorded_are_measured_eagerly(recorded: list[CaseResult]) -> None:
    """All ranks are ended and started again; the following cases of the same loading do not try."""
    tried: list[tuple[int, str | None]] = []

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.warm_up:
            tried.append((args[0].batch_size, args[1]))
            if args[1] is None:
                raise RankFailedError(
                    "error", Failure(phase="forward", message="`x.item()`", evidence=serving.NOT_RECORDED)
                )
        return _reply(fn, args)

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    for case in (_case(4), _case(8), _case(4, dtype="bfloat16")):
        result = runner.run(_request(case), recorded.append)
        assert (result.outcome, len(result.launches)) == ("completed", 1)
    assert tried == [(4, None), (4, "`x.item()`"), (8, "`x.item()`"), (4, None), (4, "`x.item()`")]
    assert launcher.ended == ["killed", "closed", "killed"]


def test_a_rank_that_fails_eagerly_too_is_not_asked_a_third_time(recorded: list[CaseResult]) -> None:
    """The failure of the eager forwards is that of the case."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.warm_up:
            evidence = serving.NOT_RECORDED if args[1] is None else "ValueError was raised"
            raise RankFailedError("error", Failure(phase="forward", message="broken", evidence=evidence))
        return _reply(fn, args)

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    result = runner.run(_request(_case(4)), recorded.append)
    assert result.failure is not None
    assert (result.outcome, result.failure.evidence) == ("error", "ValueError was raised")
    assert launcher.ended == ["killed", "killed"]


def test_a_failure_keeps_the_finished_batches(recorded: list[CaseResult]) -> None:
    """The result has the batches that finished before the failure, with memory and profile."""

    def answer(fn: Callable[..., Any], _args: tuple[Any, ...]) -> Any:
        if fn is worker.measure:
            assert launcher.on_batch is not None
            launcher.on_batch(0, FinishedBatch(1.5, 4, 40, 44, 9))
            use = [DeviceMemory(index=0, peak_allocated_bytes=9)]
            raise RankFailedError("error", Failure(phase="forward", message="broken"), use)
        return [] if fn is worker.load else None

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    result = runner.run(_request(_case(4)), recorded.append)
    (launch,) = result.launches
    assert result.outcome == "error"
    assert launch.batches.latency_s == [1.5]
    assert [device.peak_allocated_bytes for device in launch.memory] == [9]
    assert launch.profile is not None


def test_an_interrupt_is_recorded_and_raised(recorded: list[CaseResult]) -> None:
    """Ctrl-C in the middle of a case leaves a result with the outcome `interrupted`."""

    def answer(fn: Callable[..., Any], _args: tuple[Any, ...]) -> Any:
        if fn is worker.measure:
            raise KeyboardInterrupt
        return [] if fn is worker.load else None

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    with pytest.raises(KeyboardInterrupt):
        runner.run(_request(_case(4)), recorded.append)
    (result,) = recorded
    assert result.outcome == "interrupted"
    assert result.failure is not None
    assert result.failure.phase == "forward"
    assert launcher.ended == ["killed"]


@pytest.mark.parametrize("while_doing", [worker.load, worker.give])
def test_an_interrupt_before_the_first_batch_is_in_the_phase_load(
    recorded: list[CaseResult], while_doing: Callable[..., Any]
) -> None:
    """This holds although an earlier case had finished batches."""
    launcher = _FakeLauncher(_reply)
    runner, _ = _runner(launcher)
    runner.run(_request(_case(4)), recorded.append)

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is while_doing:
            raise KeyboardInterrupt
        return _reply(fn, args)

    launcher.answer = answer
    with pytest.raises(KeyboardInterrupt):
        runner.run(_request(_case(4, model="another")), recorded.append)
    failure = recorded[1].failure
    assert failure is not None
    assert failure.phase == "load"
    assert recorded[1].launches[0].batches == Batches()


def test_a_rank_that_died_while_idle_costs_no_case(recorded: list[CaseResult]) -> None:
    """Dead processes are started again, and the next case completes."""
    launcher = _FakeLauncher(_reply)
    runner, _ = _runner(launcher)
    assert runner.run(_request(_case(1)), recorded.append).outcome == "completed"
    launcher.ranks[0].alive = False
    assert runner.run(_request(_case(2)), recorded.append).outcome == "completed"
    assert len(launcher.environments) == 2


def test_held_bytes_are_known_once_a_model_is_loaded(recorded: list[CaseResult]) -> None:
    """A crashed rank cannot report its held bytes; its profile subtracts them all the same."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.load:
            return [DeviceMemory(index=0, held_bytes=3)]
        if fn is worker.measure:
            assert profiler.held_bytes == {"GPU-c": 3}
            raise RankFailedError("crashed", Failure(phase="forward", message="gone"))
        return _reply(fn, args)

    runner, profiler = _runner(_FakeLauncher(answer))
    assert runner.run(_request(_case(4)), recorded.append).outcome == "crashed"
    assert profiler.windows[-1][2] == {"GPU-c": 3}


@pytest.mark.parametrize("outcome", ["error", "crashed", "oom"])
def test_a_load_that_failed_is_not_tried_again(recorded: list[CaseResult], outcome: Outcome) -> None:
    """Other batch sizes fail at once with the same outcome. Another model is loaded."""

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if fn is worker.load and args[0].model == "broken":
            raise RankFailedError(outcome, Failure(phase="load", message="it is broken", log_tail="Traceback"))
        return _reply(fn, args)

    launcher = _FakeLauncher(answer)
    runner, _ = _runner(launcher)
    for batch_size, model in ((4, "broken"), (2, "broken"), (4, "good")):
        runner.run(_request(_case(batch_size, model=model)), recorded.append)
    assert [result.outcome for result in recorded] == [outcome, outcome, "completed"]
    assert len(launcher.environments) == (3 if outcome == "oom" else 2)
    first, second = (result.failure for result in recorded[:2])
    assert first is not None
    assert second is not None
    if outcome != "oom":
        assert second.message.endswith("mp-bs4 could not be loaded: it is broken")
        assert (second.phase, second.log_tail) == ("load", None)


def test_an_exception_in_this_process_is_an_error(recorded: list[CaseResult]) -> None:
    """A bug or a full disk is recorded as `error`, not as `interrupted`, and the exception is raised."""

    def answer(fn: Callable[..., Any], _args: tuple[Any, ...]) -> Any:
        if fn is worker.measure:
            raise OSError("no space left on device")
        return [] if fn is worker.load else None

    runner, _ = _runner(_FakeLauncher(answer))
    with pytest.raises(OSError, match="no space left"):
        runner.run(_request(_case(4)), recorded.append)
    assert recorded[0].outcome == "error"


class _Building:
    """The builds of the strategy `Building`."""

    builds: ClassVar[list[str]] = []
    broken = False


class Building(LayerParallel):
    """A strategy that compiles something before its ranks start."""

    name = "building"

    def build(self, case: Case, say: Callable[[str], None]) -> None:
        """Count the build, or fail."""
        say("compiling ...")
        _Building.builds.append(case.id)
        if _Building.broken:
            raise RuntimeError("error: no such header")


class SpreadBuilding(Building):
    """The same with a rank on each device."""

    def ranks(self, devices: int) -> int:
        """Return one rank for each device."""
        return devices


def _builder(launcher: _FakeLauncher, lines: list[str], monkeypatch: pytest.MonkeyPatch, *, broken: bool) -> Runner:
    monkeypatch.setattr(_Building, "builds", [])
    monkeypatch.setattr(_Building, "broken", broken)
    profiler = _FakeProfiler()
    return Runner(launcher, _one_node(profiler), lambda *_: None, lines.append)


_BUILDING = f"{__name__}:Building"


def _built(case: Case) -> Request:
    return msgspec.structs.replace(_request(case), strategy=_BUILDING)


def test_a_strategy_is_built_once_before_its_ranks_start(
    recorded: list[CaseResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load time excludes the build, and another model of the same strategy does not repeat it."""
    launcher, lines = _FakeLauncher(_reply), list[str]()
    runner = _builder(launcher, lines, monkeypatch, broken=False)
    runner.run(_built(_case(1)), recorded.append)
    runner.run(_built(_case(2, model="another")), recorded.append)
    assert (len(_Building.builds), lines) == (1, ["compiling ..."])
    assert [result.outcome for result in recorded] == ["completed", "completed"]
    assert len(launcher.environments) == 2


def test_every_node_builds_before_it_loads(recorded: list[CaseResult], monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure has the number of its node, and is not tried again where that node takes part."""
    errors, asked = [None, None, "error: no such header"], list[str]()
    spread = f"{__name__}:SpreadBuilding"

    def answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        asked.append(fn.__name__)
        return errors[asked.count("build") - 1] if fn is worker.build else _reply(fn, args)

    launcher = _FakeLauncher(answer)
    runner = _builder(launcher, [], monkeypatch, broken=False)
    for batch_size in (1, 2):
        request = _on_two_nodes(_case(batch_size, model=f"model{batch_size}"))
        machine = msgspec.structs.replace(_TWO_NODES, nodes=[0, 0, 1])
        runner.run(msgspec.structs.replace(request, machine=machine, strategy=spread), recorded.append)
    assert [result.failure and result.failure.message for result in recorded] == ["node 1: error: no such header"] * 2
    assert (asked.count("build"), asked.count("load"), len(launcher.environments)) == (3, 0, 1)
    runner.run(_request(_case(1), spread), recorded.append)
    assert (asked.count("build"), asked.count("load"), len(_Building.builds)) == (3, 2, 1), "node 0 alone can load"


def test_the_first_rank_of_another_node_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of pytest has built on node 0. The error of the build or of its check is the answer."""
    monkeypatch.setattr(_Building, "builds", [])
    answers = []
    for rank, local_rank, broken in ((0, 0, False), (1, 1, False), (2, 0, False), (2, 0, True)):
        monkeypatch.setattr(_Building, "broken", broken)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        state = worker.RankState(lambda _: None)
        answers.append(worker.build(state, _case(1), tiny_model.source({}), _BUILDING))
    assert answers == [None, None, None, "error: no such header"]
    assert len(_Building.builds) == 2


def test_what_does_not_compile_is_an_error_and_is_not_tried_again(
    recorded: list[CaseResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second case fails at once, without a process."""
    launcher = _FakeLauncher(_reply)
    runner = _builder(launcher, [], monkeypatch, broken=True)
    for batch_size in (1, 2):
        result = runner.run(_built(_case(batch_size)), recorded.append)
        assert result.outcome == "error"
        assert result.failure is not None
        assert (result.failure.phase, result.failure.message) == ("load", "error: no such header")
    assert len(_Building.builds) == 1
    assert launcher.environments == []


def test_the_smallest_workspace_of_all_ranks_counts(recorded: list[CaseResult]) -> None:
    """Wrong numbers of one rank are summed into the numbers of all ranks."""
    granted = iter((64, 23))

    def reply(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        answer = _reply(fn, args)
        if isinstance(answer, Measured):
            answer.launch.tokens_requested, answer.launch.tokens_granted = 74, next(granted)
        return answer

    request = _request(_case(4), _TP)
    launch = _runner(_FakeLauncher(reply))[0].run(request, recorded.append).launches[0]
    assert (launch.tokens_requested, launch.tokens_granted) == (74, 23)


def test_ranks_that_answer_differently_are_an_error(recorded: list[CaseResult], prose: Prose) -> None:
    """Each rank computes all log-likelihoods, so that a broken device is seen although rank 0 is right."""
    numbers = iter(([-1.0] * 4, [-1.1] * 4))

    def reply(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        answer = _reply(fn, args)
        if isinstance(answer, Measured):
            answer.launch.accuracy = report_factory.make_accuracy(1.0, 1, [0], next(numbers))
        return answer

    request = _request(_case(4), _TP)
    result = _runner(_FakeLauncher(reply))[0].run(request, recorded.append)
    assert result.outcome == "error"
    assert result.failure is not None
    assert result.failure.rank == 1
    assert prose == result.failure.message
