from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import report_factory, tiny_model
from support.prose import Prose
from support.report_factory import GIB, known

from pytest_llmgpu import processes
from pytest_llmgpu.inference import tasks
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.profiling.profiler import Profiler
from pytest_llmgpu.ranks import serving, worker
from pytest_llmgpu.ranks.local import BatchListener, FinishedBatch, LocalLauncher, Rank, RankFailedError
from pytest_llmgpu.ranks.worker import Measured
from pytest_llmgpu.recording.work import NamedRow, WorkReply
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.report import Gpu
from pytest_llmgpu.report.result import (
    Batches,
    CaseResult,
    Collective,
    DeviceMemory,
    Failure,
    HostUse,
    Launch,
    Outcome,
    Profile,
    Traffic,
)
from pytest_llmgpu.report.work import NO_WORK, WORK_OFF, Ceilings, DeviceCeilings, ModelSize, RankWork, WorkRow
from pytest_llmgpu.session import runner
from pytest_llmgpu.session.runner import CaseRequest, Runner
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.tp import TensorParallel

_GPUS = [Gpu(index=3, uuid="GPU-c", name="H", memory_bytes=10), Gpu(index=1, uuid="GPU-a", name="H", memory_bytes=10)]
_MACHINE = Machine(device="cuda", devices=2, gpus=_GPUS, facts=TorchFacts(version="2"))
_MP, _TP = "pytest_llmgpu.strategies.mp:LayerParallel", "pytest_llmgpu.strategies.tp:TensorParallel"
_SENT = Collective(collective="all_reduce", calls=3, payload_bytes=80, wire_bytes=120)


def _measured() -> Measured:
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


def _worked() -> list[WorkReply]:
    rows = [NamedRow(None, "gemm", "GEMM", 1, 0.5)]
    rank = RankWork(uuids=["GPU-c"], flops=7)
    return [WorkReply(batches=[1], eager_batches=[1], work=rank, rows=rows, collective_s=[{}] * 3)]


_ANSWERS: dict[str, Any] = {
    "load": [DeviceMemory(index=0, held_bytes=2), DeviceMemory(index=1)],
    "measure": lambda *_: _measured(),
    "account": ([_SENT], None),
    "run_eager_passes": lambda *_: _worked(),
    "model_size": ModelSize(parameters=1, weights_bytes=2, layers=3, attention_width=4),
    "measure_ceilings": Ceilings(devices=[DeviceCeilings(uuid="GPU-c", gemm_flops_per_s={"float16": 3.0})]),
}
"""The answer of a rank to a command, or a function that returns it; None for other commands."""

_NEVER = object()
"""No answer to a command."""


@dataclasses.dataclass
class _FakeRank:
    """A rank that answers at once, in this process."""

    rank: int
    bench: _Bench
    alive: bool = True

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            answer = self.bench.answer(fn.__name__, args)
            if answer is not _NEVER:
                future.set_result(answer)
        except RankFailedError as error:
            future.set_exception(error)
        return future

    def stacks(self) -> str:
        return "stuck"

    def close(self, limit_s: float) -> None:
        self.bench.ended.append("closed" if limit_s else "killed")


class _FakeProfiler(Profiler):
    def __init__(self, did: list[str]) -> None:
        super().__init__(1.0)
        self.windows: list[tuple[float, float, dict[str, int]]] = []
        self.did = did
        self.samples = 1

    def mark(self, *, wait: bool = False) -> None:
        self.did.append("mark, wait" if wait else "mark")

    def start(self) -> None:
        pass

    def used_bytes(self) -> Mapping[str, int]:
        return {"GPU-c": 2 * GIB}

    def slice(
        self, starts_s: Sequence[float], ends_s: Sequence[float], held_bytes: Mapping[str, int] | None = None
    ) -> Profile:
        self.windows.append((starts_s[0], ends_s[0], dict(self.held_bytes if held_bytes is None else held_bytes)))
        (device,) = report_factory.make_profile(1).devices
        counters = {"compute_processes": 2.0, "xids": 1.0}
        device = msgspec.structs.replace(device, index=3, uuid="GPU-c", counters=counters)
        why = {} if self.samples else {"samples": "no reading fell inside"}
        return report_factory.make_profile(samples=self.samples, devices=[device], why=why)


class _Bench(LocalLauncher):
    """A runner with fake ranks and a fake profiler; it is their launcher, too."""

    def __init__(self, **answers: Any) -> None:
        """Set what a rank answers to a command: a value, an exception, or a function of the arguments."""
        self.answers = {**_ANSWERS, **answers}
        self.did: list[str] = []
        """Commands to the ranks and marks of the profiler, in their order."""
        self.ended: list[str] = []
        self.environments: list[Sequence[Mapping[str, str]]] = []
        self.recorded: list[CaseResult] = []
        self.lines: list[str] = []
        self.profiler = _FakeProfiler(self.did)
        self.steps: list[str] = []
        """The steps whose progress was shown, in their order."""
        progress = lambda _, step, *__: self.steps.append(step)  # noqa: E731
        self.runner = Runner(self, lambda _: self.profiler, progress, self.lines.append)

    def answer(self, command: str, args: tuple[Any, ...]) -> Any:
        self.did.append(command)
        found = self.answers.get(command)
        if isinstance(found, BaseException):
            raise found
        return found(*args) if callable(found) else found

    def start(self, environments: Sequence[Mapping[str, str]], on_batch: BatchListener) -> Sequence[Any]:
        self.environments.append(environments)
        self.on_batch = on_batch
        self.ranks = [_FakeRank(number, self) for number in range(len(environments))]
        return self.ranks

    def take_output(self, but_for: Collection[Rank] = ()) -> dict[int, str]:
        self.left = list(but_for)
        return {}

    def run(self, case: Case, strategy: str = _MP, **fields: Any) -> CaseResult:
        return self.runner.run(self.request(case, strategy, **fields), self.recorded.append)

    def request(
        self, case: Case, strategy: str = _MP, *, work: bool = False, machine: Machine = _MACHINE, **fields: Any
    ) -> CaseRequest:
        return CaseRequest(
            case=case,
            machine=machine,
            source=tiny_model.source({}),
            strategy=strategy,
            task=tasks.BUILT_IN["hellaswag"],
            items=(),
            timeout_s=60.0,
            load_timeout_s=60.0,
            work=work,
            **fields,
        )

    def failure(self, case: Case, strategy: str = _MP, **fields: Any) -> Failure:
        """Run a case that fails; return its failure."""
        return known(self.run(case, strategy, **fields).failure)


def _case(batch_size: int = 4, **fields: Any) -> Case:
    case = report_factory.make_case(batch_size=batch_size)
    return msgspec.structs.replace(case, **{"strategy": "mp", "device": "cuda", "devices": 2, **fields})


def _failed(message: str = "gone", outcome: Outcome = "crashed", **fields: Any) -> RankFailedError:
    return RankFailedError(outcome, Failure(phase="forward", message=message, **fields))


def _disturbances(launch: Launch) -> list[str]:
    """Return the kinds of disturbances in the profile of a launch."""
    titles = [sentence.partition(":")[0] for sentence in known(launch.profile).invalid]
    return [kind for kind, title in disturbances.TITLES.items() if title in titles]


def test_a_completed_case_holds_what_the_ranks_measured() -> None:
    """The profile begins with the first batch and ends with the last; devices, whose order may differ, join by UUID."""
    bench = _Bench()
    result = bench.run(_case())
    assert (bench.recorded, bench.environments) == ([result], [[{"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}]])
    assert (result.outcome, result.failure) == ("completed", None)
    (launch,) = result.launches
    assert (launch.batches.latency_s, launch.plan_sha256) == ([1.0, 2.0], "plan")
    assert (launch.warmup_s, launch.compile_s) == (0.5, 8.0)
    assert bench.profiler.windows == [(100.0, 103.0, {"GPU-c": 2, "GPU-a": 0})]
    assert launch.host == HostUse(wall_s=3.0, threads=[4], cpu_s=[2.0], waited_s=[0.9], pressure_s=0.5)
    assert _disturbances(launch) == ["processes", "memory", "xid", "cpu"]
    # The bytes of the warm-up do not count, and the devices are idle while counters are read. The second mark comes at
    # once: the answers are compared later, which takes longer than a mark may wait.
    assert bench.did[-5:] == ["warm_up", "mark, wait", "measure", "mark", "account"]
    first, second = launch.memory
    assert (first.index, first.weights_bytes, first.held_bytes, second.index, second.weights_bytes) == (3, 4, 2, 1, 5)
    assert (first.nvml_used_max_bytes, second.nvml_used_max_bytes) == (36 * GIB, None)
    assert "nvml_used_max_bytes" in second.why
    bench.profiler.samples = 0  # the nearest reading is of another moment and does not count
    first = bench.run(_case()).launches[0].memory[0]
    assert (first.nvml_used_max_bytes, first.nvml_used_mean_bytes) == (None, None)
    assert first.why["nvml_used_max_bytes"] == "no reading fell inside"


_OURS, _CHILD, _OTHER = os.getpid(), 3_999_999, 4_000_000  # about the largest id of Linux


@pytest.mark.parametrize(
    ("fields", "listed", "found"),
    [
        ({}, {_OTHER: 0}, ["processes", "memory"]),
        ({"elsewhere": True}, {_OURS: 0, _OTHER: 0}, ["processes", "memory"]),
        ({"elsewhere": True}, {_OURS: 0, _CHILD: 0}, ["memory"]),
        ({"elsewhere": True}, {_OTHER: 0, _OTHER + 1: 0}, ["memory"]),
        ({"elsewhere": True, "server_port": 80}, {_OTHER: 0, _OTHER + 1: 0}, []),
        ({"server_port": 80}, {_OURS: 0, _OTHER: 0}, []),
        ({"server_port": 80}, {_OURS: 0, _OTHER: GIB // 2}, ["memory"]),
        ({"server_port": 80}, {_OURS: 0, _OTHER: 2 * GIB - 2**20}, []),
    ],
    ids=["rank", "another", "workers", "other ids", "server", "beside", "memory of others", "memory of the server"],
)
def test_processes_of_the_run_and_of_its_server_are_no_disturbance(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], listed: dict[int, int], found: list[str]
) -> None:
    """Two compute on the GPU: descendants of this process, a server that the run names, or other programs."""
    monkeypatch.setattr(nvml, "computing", lambda _: {"GPU-c": listed})
    monkeypatch.setattr(processes, "listeners", lambda port: {_OTHER, _OTHER + 1} if port else set())
    monkeypatch.setattr(processes, "family", lambda roots: {*roots, *([_CHILD] if _OURS in roots else [])})
    launch = _Bench().run(_case(), **fields).launches[0]
    assert [kind for kind in _disturbances(launch) if kind not in ("xid", "cpu")] == found


def test_no_gpu_of_this_machine_is_watched_for_a_remote_server() -> None:
    """The report has the reason in place of a profile, and the times that this machine disturbed."""
    bench = _Bench()
    bench.runner = Runner(bench, lambda _: Profiler(1.0, []), lambda *_: None, bench.lines.append)
    remote = msgspec.structs.replace(_MACHINE, gpus=[])
    launch = bench.run(_case(strategy_options={"server": "remote"}), elsewhere=True, machine=remote).launches[0]
    profile = known(launch.profile)
    assert (profile.devices, profile.why) == ([], {"profile": "the server is remote: its GPUs are not watched"})
    assert _disturbances(launch) == ["cpu"]
    assert {memory.why["nvml_used_max_bytes"] for memory in launch.memory} == {*profile.why.values()}


def test_every_step_that_can_take_minutes_shows_its_progress() -> None:
    """Loading, compiling and work passes are no silence."""
    bench = _Bench()
    bench.run(_case(), work=True)
    assert [*dict.fromkeys(bench.steps)] == ["loading", "warm-up", "first batch", "work passes"]


def test_counters_are_read_where_a_phase_begins_and_where_a_case_fails() -> None:
    """An Xid or a memory error that may have caused a crash is in the profile of the crashed case."""
    bench = _Bench(load=[DeviceMemory(index=0, held_bytes=3)], measure=_failed())
    bench.ended = bench.did  # in one list, for the order
    for result in (bench.run(_case()), _Bench(load=_failed()).run(_case())):
        assert result.outcome == "crashed"
        assert _disturbances(result.launches[0]) == ["processes", "memory", "xid"]
    assert bench.profiler.windows[-1][2] == {"GPU-c": 3}, "held bytes are known although the rank crashed"
    before = ["mark", "import_libraries", "load", "give", "reset", "mark", "warm_up", "mark, wait", "measure"]
    assert bench.did == [*before, "mark", "killed"]


_ELSEWHERE = Gpu(index=5, uuid="GPU-e", name="H", memory_bytes=10)
_TWO_NODES = msgspec.structs.replace(_MACHINE, devices=3, gpus=[*_GPUS, _ELSEWHERE], nodes=[0, 0, 1])


def _spread(batch_size: int = 4, **fields: Any) -> Case:
    return _case(batch_size, **{"strategy": "tp", "devices": 3, **fields})


@pytest.mark.parametrize(
    ("nodes", "files"), [([0, 0, 1], "a-b"), ([0, 1, 0], "ab-"), ([0, 0, 1], "aab")], ids=["block", "cyclic", "all"]
)
def test_files_that_differ_between_nodes_are_refused_before_loading(nodes: list[int], files: str) -> None:
    """Ranks of other weights would compute nonsense. Slurm's --gpus-per-task makes each rank the first in its sight."""
    answers = iter([None if file == "-" else {"config.json": file} for file in files])
    bench = _Bench(file_hashes=lambda *_: next(answers))
    failure = bench.failure(_spread(model="tiny"), _TP, machine=msgspec.structs.replace(_TWO_NODES, nodes=nodes))
    assert set(bench.did) == {"mark", "file_hashes"}
    assert failure.phase == "load"
    assert failure.message == "the files of tiny differ: config.json a on node 0, b on node 1"


def test_work_passes_follow_the_measured_forwards() -> None:
    """Those in the execution of the case run before the traffic, while its graphs exist, the eager ones after it."""
    bench = _Bench()
    for batch_size in (4, 8):
        result = bench.run(_case(batch_size), work=True)
        assert result.outcome == "completed"
        found = known(result.launches[0].work)
        assert (found.batches, found.passes, found.ranks[0].flops) == ([1], 3, 7)
        assert found.model is not None
        assert found.ranks[0].rows == [WorkRow(module=None, kernel=0, family="GEMM", calls=1, time_s=0.5)]
        assert "work" not in result.launches[0].why
    assert bench.runner.kernel_names == {"gemm": 0}
    assert known(bench.runner.ceilings).devices[0].gemm_flops_per_s == {"float16": 3.0}
    asked = [name for name in bench.did if "mark" not in name]
    passes = ["measure", "record_work", "account", "run_eager_passes", "model_size", "measure_ceilings"]
    assert asked[asked.index("measure") :][:6] == passes
    assert (asked.count("measure_ceilings"), asked.count("run_eager_passes")) == (1, 2)


def test_each_rate_of_a_gpu_is_measured_once_a_session() -> None:
    """A strategy with several ranks adds the all-reduce, and another dtype its matrix product."""
    wanted: list[list[str]] = []

    def measure(one: list[str]) -> Ceilings:
        wanted.append(one)
        return Ceilings()

    bench = _Bench(measure_ceilings=measure)
    for dtype, strategy in (("float16", _MP), ("float16", _TP), ("bfloat16", _TP)):
        for batch_size in (4, 8):
            bench.run(_case(batch_size, dtype=dtype, strategy="mp" if strategy is _MP else "tp"), strategy, work=True)
    assert wanted == [["product", "copy"], *[["all_reduce"]] * 2, *[["product"]] * 2]


def test_cases_of_one_id_have_traces_of_different_names() -> None:
    """A later launch of a case replaces its traces; without a folder there is none."""

    def trace(begin: str | None) -> list[WorkReply]:
        return [msgspec.structs.replace(_worked()[0], traces=[] if begin is None else [f"{begin}-rank0"])]

    bench = _Bench(run_eager_passes=trace)
    assert bench.run(_case(), work=True).launches[0].traces == []
    bench.runner = Runner(bench, lambda _: bench.profiler, lambda *_: None, bench.lines.append, Path("out"))
    cases = (_case(), _case(dtype="bfloat16"), _case())
    found = [bench.run(case, work=True).launches[0].traces for case in cases]
    assert found == [["out/mp-bs4-rank0"], ["out/mp-bs4#2-rank0"], ["out/mp-bs4-rank0"]]


def test_traffic_is_recorded_per_rank() -> None:
    """Bytes per sequence are those of all ranks; tensor parallelism without a collective is an error that ends them."""
    counted = [_SENT, msgspec.structs.replace(_SENT, collective="recv")]
    result = _Bench(account=(counted, None)).run(_case(), _TP)
    assert result.traffic == Traffic(ranks=[counted, counted], wire_bytes_per_sequence=2 * 120 / 8)
    assert ("traffic" in result.why, result.launches[0].why) == (False, {"work": WORK_OFF})
    assert _Bench(measure=_failed()).run(_case(), work=True).launches[0].why == {"work": NO_WORK}
    bench = _Bench(account=([], None))
    result = bench.run(_case(), _TP, work=True)
    assert (result.outcome, set(bench.ended)) == ("error", {"killed"})
    assert "no collective was counted" in known(result.failure).message
    assert result.launches[0].batches.latency_s == [1.0, 2.0]
    assert "the ranks were ended" in result.launches[0].why["work"]


@pytest.mark.parametrize(
    ("command", "answer", "ended", "reasons"),
    [
        ("account", "c10d::new is not known", 0, {"traffic": "c10d::new"}),
        ("account", _failed("c10d::new is not known"), 2, {"traffic": "c10d::new", "work": "were ended when traffic"}),
        ("record_work", _failed("CUPTI crashed"), 2, {"work": "CUPTI crashed", "traffic": "the ranks were ended"}),
        ("run_eager_passes", _failed("out of memory", "oom"), 2, {"work": "out of memory"}),
        ("model_size", _failed("killed by SIGKILL"), 2, {"model": "killed by SIGKILL"}),
        ("measure_ceilings", _failed("cuBLAS failed"), 2, {"devices": "cuBLAS failed"}),
    ],
)
def test_a_pass_that_fails_costs_no_measurement(command: str, answer: Any, ended: int, reasons: dict[str, str]) -> None:
    """The case stays completed with the reason; the ranks, which may be stuck, are started again."""
    bench = _Bench(**{command: answer})
    result = bench.run(_case(), _TP, work=True)
    (launch,) = result.launches
    assert (result.outcome, result.failure, launch.batches.latency_s) == ("completed", None, [1.0, 2.0])
    assert bench.ended == ["killed"] * ended
    assert (result.traffic is None, launch.work is None) == ("traffic" in reasons, "work" in reasons)
    parts = (result, launch, launch.work or Launch(), bench.runner.ceilings or Launch())
    found = {name: reason for part in parts for name, reason in part.why.items()}
    assert found.keys() == reasons.keys()
    assert all(words in found[name] for name, words in reasons.items())
    assert bench.run(_case(8), _TP).outcome == "completed"


@pytest.mark.parametrize("interrupted", ["record_work", "account", "run_eager_passes"])
def test_an_interrupt_after_the_measurement_loses_nothing(interrupted: str) -> None:
    """Ctrl-C in a pass that follows the measured forwards leaves a completed case."""
    bench = _Bench(**{interrupted: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        bench.run(_case(), work=True)
    (result,) = bench.recorded
    assert (result.outcome, result.launches[0].batches.latency_s) == ("completed", [1.0, 2.0])
    assert "work" in result.launches[0].why
    assert bench.ended == ["killed"]


def test_a_model_is_loaded_once_for_all_batch_sizes() -> None:
    """Processes are kept from case to case; they are ended when another model is needed, and replaced when dead."""
    bench = _Bench()
    for batch_size in (1, 2, 4):
        bench.run(_case(batch_size))
    assert (len(bench.environments), bench.ended) == (1, [])
    bench.run(_case(1, model="another"))
    assert (len(bench.environments), bench.ended) == (2, ["closed"])
    bench.ranks[0].alive = False
    assert bench.run(_case(2, model="another")).outcome == "completed"
    assert len(bench.environments) == 3
    bench.runner.close()
    assert bench.ended == ["closed"] * 3


@pytest.mark.parametrize(
    ("changed", "starts", "ended"),
    [
        ("PYTEST_CURRENT_TEST", [1, 2], ["closed"]),
        ("NCCL_DEBUG", [1, 2, 2], ["closed", "killed", "killed"]),
        ("folder", [1, 2, 2], ["closed", "killed", "killed"]),
        ("cores", [1, 2, 2], ["closed", "killed", "killed"]),
        ("import path", [1, 2, 2], ["closed", "killed", "killed"]),
        ("another case", [1, 2, 2], ["closed", "killed", "killed"]),
        ("a crash", [1, 2, 2], ["closed", "killed", "killed"]),
        ("the end", [1, 2], ["closed", "killed", "killed"]),
    ],
)
def test_ranks_of_the_next_model_import_while_the_one_before_loads(
    changed: str, starts: list[int], ended: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are used if they are like new ones, and end with the session."""
    bench = _Bench()
    tp = _case(strategy="tp")
    bench.runner.expected = [bench.request(_case(batch_size)) for batch_size in (1, 2)] + [bench.request(tp, _TP)]
    bench.run(_case(1))
    assert [len(ranks) for ranks in bench.environments] == [1, 2]
    before = bench.did[: bench.did.index("load")]
    assert before == ["mark", *["import_libraries"] * 3], "those of the next model, then its own"
    bench.run(_case(2))
    bench.runner.take_output()
    assert [one.rank for one in bench.left] == [0, 1], "their output belongs to the test that uses them"
    if changed == "folder":
        monkeypatch.chdir(tmp_path)
    elif changed == "cores":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {999})
    elif changed == "import path":
        monkeypatch.syspath_prepend(tmp_path)
    elif changed == "another case":  # the test before was skipped
        tp = msgspec.structs.replace(tp, dtype="bfloat16")
    elif changed == "a crash":
        bench.ranks[0].alive = False
    elif changed != "the end":
        monkeypatch.setenv(changed, "changed")
    if changed == "the end":
        bench.runner.close()
    else:
        bench.run(tp, _TP)
    assert [len(ranks) for ranks in bench.environments] == starts
    assert bench.ended == ended
    bench.runner.take_output()
    assert bench.left == []


def test_ranks_of_the_next_model_outlive_a_failure_of_the_one_before() -> None:
    """A load that fails, or a case without memory, does not end them."""
    bench = _Bench(measure=_failed("CUDA out of memory", "oom"))
    tp = _case(strategy="tp")
    bench.runner.expected = [bench.request(_case(1)), bench.request(_case(2)), bench.request(tp, _TP)]
    assert bench.run(_case(1)).outcome == "oom"
    bench.answers["load"] = _failed()
    assert bench.run(_case(1, scoring="harness")).outcome == "crashed"
    bench.answers = dict(_ANSWERS)
    assert bench.run(tp, _TP).outcome == "completed"
    assert [len(ranks) for ranks in bench.environments] == [1, 2, 1]
    assert bench.ended == ["killed"] * 2


def test_ranks_start_ahead_on_this_machine_only_and_never_for_an_engine() -> None:
    """A process of a job has one rank at a time; an engine imports what it needs itself."""
    bench = _Bench()
    bench.runner.expected = [bench.request(_case()), bench.request(_case(strategy="tp"), _TP, engine=True)]
    bench.run(_case())
    assert len(bench.environments) == 1
    bench = _Bench()
    bench.runner.expected = [bench.request(_case()), bench.request(_case(strategy="tp"), _TP)]
    bench.starts_ahead = False
    bench.run(_case())
    assert len(bench.environments) == 1


def test_no_case_is_measured_beside_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the next model that still import after a while are ended."""
    monkeypatch.setattr(runner, "_IMPORT_S", 0.0)
    bench = _Bench(import_libraries=lambda case, _: _NEVER if case.strategy == "tp" else None)
    bench.runner.expected = [bench.request(_case()), bench.request(_case(strategy="tp"), _TP)]
    bench.ended = bench.did  # in one list, for the order
    bench.run(_case())
    assert bench.did.index("killed") < bench.did.index("warm_up")


def test_after_out_of_memory_only_the_same_series_is_skipped() -> None:
    """Larger or equal sizes of the same measurement are skipped; smaller ones and other measurements run."""

    def warm_up(case: Case, *_: Any) -> None:
        if case.batch_size >= 8:
            raise _failed("CUDA out of memory", "oom")

    bench = _Bench(warm_up=warm_up)
    cases = [_case(8), _case(8), _case(16), _case(4), _case(16, dtype="bfloat16")]
    outcomes = [bench.run(case).outcome for case in cases]
    assert outcomes == ["oom", "skipped_after_oom", "skipped_after_oom", "completed", "oom"]
    assert bench.ended == ["killed", "closed", "killed"], "the next case finds clean devices"


def test_a_session_that_is_resumed_knows_what_it_found() -> None:
    """Sizes that ran out of memory are skipped, and numbers of kernels and rates of GPUs stay as they are."""
    bench, oom = _Bench(), _case(8)
    report = report_factory.make_report([CaseResult(id=oom.id, key=oom.key, case=oom, outcome="oom")])
    report.environment.kernel_names = ["first", "second"]
    report.environment.ceilings = report_factory.make_ceilings()
    bench.runner.resume(report)
    assert [bench.run(_case(size)).outcome for size in (16, 4)] == ["skipped_after_oom", "completed"]
    assert bench.runner.kernel_names == {"first": 0, "second": 1}
    assert bench.runner.ceilings == report.environment.ceilings


def test_forwards_that_cannot_be_recorded_are_measured_eagerly() -> None:
    """All ranks are ended and started again; the following cases of the same loading do not try."""
    tried: list[tuple[int, str | None]] = []

    def warm_up(case: Case, reason: str | None) -> None:
        tried.append((case.batch_size, reason))
        if reason is None:
            raise _failed("`x.item()`", "error", evidence=serving.NOT_RECORDED)
        if case.model == "broken":
            raise _failed("broken", "error", evidence="ValueError was raised")

    bench = _Bench(warm_up=warm_up)
    for case in (_case(4), _case(8), _case(4, dtype="bfloat16")):
        result = bench.run(case)
        assert (result.outcome, len(result.launches)) == ("completed", 1)
    assert tried == [(4, None), (4, "`x.item()`"), (8, "`x.item()`"), (4, None), (4, "`x.item()`")]
    assert bench.ended == ["killed", "closed", "killed"]
    # The failure of the eager forwards is that of the case.
    assert bench.failure(_case(model="broken")).evidence == "ValueError was raised"
    assert len(tried) == 7


@pytest.mark.parametrize(
    ("outcome", "number"), [("error", None), ("crashed", signal.SIGSEGV), ("crashed", signal.SIGKILL), ("oom", None)]
)
def test_a_load_that_failed_is_not_tried_again(outcome: Outcome, number: int | None) -> None:
    """Other batch sizes fail at once with the same outcome, unless a process was killed. Another model is loaded."""
    again = outcome == "oom" or number == signal.SIGKILL
    failure = Failure(phase="load", message="it is broken", log_tail="Traceback", signal=number)

    def load(case: Case, *_: Any) -> Any:
        if case.model == "broken":
            raise RankFailedError(outcome, failure)
        return _ANSWERS["load"]

    bench = _Bench(load=load)
    for batch_size, model in ((4, "broken"), (2, "broken"), (4, "good")):
        bench.run(_case(batch_size, model=model))
    assert [result.outcome for result in bench.recorded] == [outcome, outcome, "completed"]
    assert len(bench.environments) == (3 if again else 2)
    second = known(bench.recorded[1].failure)
    if not again:
        assert second.message.endswith("mp-bs4 could not be loaded: it is broken")
        assert (second.phase, second.log_tail) == ("load", None)


def test_a_failure_keeps_the_finished_batches() -> None:
    """The result has the batches that finished before the failure, with memory and profile."""

    def measure(*_: Any) -> None:
        bench.on_batch(0, FinishedBatch(1.5, 4, 40, 44, 9))
        use = [DeviceMemory(index=0, peak_allocated_bytes=9)]
        raise RankFailedError("error", Failure(phase="forward", message="broken"), use)

    bench = _Bench(measure=measure)
    result = bench.run(_case())
    (launch,) = result.launches
    assert (result.outcome, launch.batches.latency_s) == ("error", [1.5])
    assert [device.peak_allocated_bytes for device in launch.memory] == [9]
    assert launch.profile is not None


@pytest.mark.parametrize(
    ("command", "error", "outcome", "phase"),
    [
        ("measure", KeyboardInterrupt(), "interrupted", "forward"),
        ("load", KeyboardInterrupt(), "interrupted", "load"),
        ("give", KeyboardInterrupt(), "interrupted", "load"),
        ("measure", OSError("no space left on device"), "error", "forward"),
    ],
)
def test_an_interrupt_and_a_bug_are_recorded(command: str, error: BaseException, outcome: Outcome, phase: str) -> None:
    """A case that did not begin has no batches of the case before it."""
    bench = _Bench()
    bench.run(_case())
    bench.answers[command] = error
    with pytest.raises(type(error)):
        bench.run(_case(model="another", dataset_sha256="f" * 64))
    result = bench.recorded[1]
    assert (result.outcome, known(result.failure).phase) == (outcome, phase)
    assert result.launches[0].batches == Batches()
    assert bench.ended[-1] == "killed"


def _of_ranks(*fields: dict[str, Any]) -> Callable[..., Measured]:
    """Return a function for the answers of ranks that differ in these fields of their launch."""
    launches = [msgspec.structs.replace(_measured().launch, **one) for one in fields]
    left = iter([_measured()._replace(launch=launch) for launch in launches])
    return lambda *_: next(left)


def test_the_ranks_of_a_case_are_joined() -> None:
    """The smallest workspace and the longest window count; figures of each rank are listed."""
    windows = [HostUse(wall_s=wall_s, threads=[4], cpu_s=[wall_s], waited_s=[None]) for wall_s in (3.0, 4.0)]
    ranks = [
        {"tokens_requested": 74, "tokens_granted": granted, "host": window}
        for granted, window in zip((64, 23), windows, strict=True)
    ]
    launch = _Bench(measure=_of_ranks(*ranks)).run(_case(), _TP).launches[0]
    assert (launch.tokens_requested, launch.tokens_granted) == (74, 23)
    assert launch.host == HostUse(wall_s=4.0, threads=[4, 4], cpu_s=[3.0, 4.0], waited_s=[None, None])


def test_a_rank_whose_answers_differ_is_an_error(prose: Prose) -> None:
    """Each rank computes all answers: a broken one is seen although rank 0 is right."""
    answers = [{"accuracy": report_factory.make_accuracy(1.0, 1, [0], [value] * 4)} for value in (-1.0, -1.1)]
    failure = _Bench(measure=_of_ranks(*answers)).failure(_case(), _TP)
    assert failure.rank == 1
    assert prose == failure.message


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were built for: strategies compile something before their ranks start, except for `broken`."""
    models: list[str] = []

    def build(_: object, case: Case, say: Callable[[str], None]) -> None:
        say("compiling ...")
        models.append(case.model)
        if case.model == "broken":
            raise RuntimeError("error: no such header")

    monkeypatch.setattr(LayerParallel, "build", build)
    monkeypatch.setattr(TensorParallel, "build", build)
    return models


@pytest.mark.parametrize("model", ["good", "broken"])
def test_a_strategy_is_built_once_before_its_ranks_start(builds: list[str], model: str) -> None:
    """Another model of the same strategy does not repeat it; after a failure the next case fails without a process."""
    bench, broken = _Bench(), model == "broken"
    results = [bench.run(_case(1, model=model)), bench.run(_case(2, model=model if broken else "another"))]
    assert (builds, bench.lines, len(bench.environments)) == ([model], ["compiling ..."], 0 if broken else 2)
    assert [result.outcome for result in results] == ["error" if broken else "completed"] * 2
    failures = [one.failure.message for one in results if one.failure is not None]
    assert all("error: no such header" in message for message in failures)


def test_every_node_builds_before_it_loads(builds: list[str]) -> None:
    """A failure has the number of its node, and is not tried again for the next case."""
    errors = iter([None, None, "error: no such header"])
    bench = _Bench(build=lambda *_: next(errors))
    failures = [bench.failure(_spread(n), _TP, machine=_TWO_NODES) for n in (1, 2)]
    assert failures[0].message == "node 1: error: no such header"
    assert failures[1].message.endswith("node 1: error: no such header")
    assert (bench.did.count("build"), bench.did.count("load"), len(bench.environments)) == (3, 0, 1)
    bench.run(_case(1), _TP)
    assert (bench.did.count("build"), bench.did.count("load"), len(builds)) == (3, 2, 1), "node 0 alone can load"


def test_the_first_rank_of_another_node_builds(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of pytest has built on node 0. The error of the build or of its check is the answer."""
    answers = []
    for rank, local_rank, model in ((0, 0, "good"), (1, 1, "good"), (2, 0, "good"), (2, 0, "broken")):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        state = worker.RankState(lambda _: None)
        answers.append(worker.build(state, _case(1, model=model), tiny_model.source({}), _MP))
    assert (answers, builds) == ([None, None, None, "error: no such header"], ["good", "broken"])
