from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from accelerate import init_empty_weights
from support import tiny_model, traffic_functions
from support.report_factory import known, make_case
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from pytest_llmgpu.inference import models, weights
from pytest_llmgpu.inference.bundled import PRESETS
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.recording import work
from pytest_llmgpu.recording.work import RANGE_PREFIX, Calls, Modules, NamedRow, PassKernels, Record, WorkReply
from pytest_llmgpu.report.kernel_families import family_of
from pytest_llmgpu.report.work import CollectiveWork, ModelSize, RankWork, WorkRow
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import Loaded

_TP = "support.rank_functions:UncompiledTensorParallel"
_CASE = make_case(strategy="tp", backend="transformers", model="bundled", dtype="float32", device="cpu", devices=2)
_DEVICE_FIGURES = {"device_time_s", "copy_s", "idle_s", "busy", "kernels", "rows", "clock_ghz"}
_HOST_FIGURES = {"runtime_calls", "host_syncs"}
_SIZE = ModelSize(parameters=10, weights_bytes=20, layers=2, attention_width=8)


@pytest.mark.parametrize(
    ("padded_tokens", "numbers"),
    [
        ([100] * 3, [0, 1, 2]),
        ([100] * 32, [4, 12, 20, 28]),
        ([1024] * 64, [8, 24, 40, 56]),
        ([2048] * 10, [2, 7]),
        ([2049] * 10, [5]),
        ([9000] * 3, [1]),
        ([9000], [0]),
        ([4000, 1000, 96], [0, 2]),
    ],
)
def test_batches_are_spread_over_the_plan(padded_tokens: list[int], numbers: list[int]) -> None:
    """As many as fit 4,096 padded tokens, at least 1 and at most 4, and none twice."""
    assert work.batches_used(padded_tokens) == numbers
    for planned in range(1, 70):
        used = work.batches_used([10] * planned)
        assert (used, len(used), used[-1] < planned) == (sorted(set(used)), min(4, planned), True)


def _loaded(**fields: Any) -> Loaded:
    model = tiny_model.random_model()
    cpu = torch.device("cpu")
    return Loaded(**{"model": model, "config": model.config, "input_device": cpu, "devices": (cpu,), **fields})


def test_a_cpu_counts_ops_and_flops() -> None:
    """Everything else is null with the reason; a finished batch is a sign of life; no hook stays behind."""
    finished: list[float] = []
    plan, loaded = traffic_functions.make_plan(), _loaded()
    reply = traffic_functions.measure_plan(loaded, plan, lambda latency_s, *_: finished.append(latency_s))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())
    assert (reply.batches, reply.eager_batches) == ([0, 1, 3, 4], [3]), "of five"
    assert len(finished) == 2, "one counts ops, one the calls of the host"
    assert (reply.work.flops or 0) > 0
    ops = reply.work.ops or {}
    assert ops["aten::mm"] == 8
    # Transformers reads one scalar back; the passes themselves add no synchronization to `host_syncs`.
    assert sum(ops.get(name, 0) for name in ("aten::_local_scalar_dense", "aten::item")) == 1, ops
    assert known(reply.work.host_calls).by_file["torch/nn/modules/linear.py"] == 8
    assert set(reply.work.why) == _DEVICE_FIGURES | _HOST_FIGURES
    assert len({*reply.work.why.values()}) == 1
    for name in reply.work.why:
        assert getattr(reply.work, name) is None, name
    found = work.join([reply], {}, _SIZE)
    assert (found.passes, found.collectives) == (0, None)
    assert found.why == {"collectives": reply.work.why["device_time_s"]}


def test_kernels_past_the_dispatcher_have_no_flops() -> None:
    """A count of a part of the FLOPs would be taken for all of them."""
    reply = traffic_functions.measure(_loaded(dispatched=False))
    assert reply.work.flops is None
    assert "dispatcher" in reply.work.why["flops"]
    assert reply.work.ops


@pytest.mark.parametrize(
    ("cuda", "users", "detaches"),
    [("13.0", None, True), ("12.6", None, True), ("12.6", "0", False), ("12.4", None, False), (None, None, False)],
)
def test_the_last_profile_detaches_cupti_where_cuda_allows_it(
    gpu: Loaded, monkeypatch: pytest.MonkeyPatch, cuda: str | None, users: str | None, detaches: bool
) -> None:
    """Attached, it slows the next cases; detached while a profile runs, that is empty; a value of the user stays."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    # Set first, so that the end of the test removes what the passes set.
    monkeypatch.setenv("TEARDOWN_CUPTI", users or "")
    monkeypatch.setattr(work, "_USERS_CHOICE", users)
    if users is None:
        del os.environ["TEARDOWN_CUPTI"]
    for _ in range(2):
        profiler = _Profiler(_recordings())
        monkeypatch.setattr(torch.profiler, "profile", profiler)
        traffic_functions.measure(gpu)
        assert profiler.started == (["1", "0", "0", "0", "0"] if detaches else [users] * 5)
        assert profiler.stopped == (["0", "0", "0", "0", "1"] if detaches else [users] * 5)


class _Event:
    """A kineto record, as torch.profiler has it on a machine with a GPU."""

    def __init__(self, record: Record) -> None:
        kind: Any = torch.autograd.DeviceType  # type: ignore[attr-defined]
        self.name = lambda: record.name
        self.device_type = lambda: kind.CPU if record.device is None else kind.CUDA
        self.is_user_annotation = lambda: False
        self.device_index = lambda: record.device
        self.start_ns = lambda: record.start_ns
        self.duration_ns = lambda: record.duration_ns
        self.correlation_id = lambda: record.correlation


class _Profiler:
    """Stands for `torch.profiler.profile`: each gives the next of a list of recordings."""

    def __init__(self, recordings: Iterator[list[Record]]) -> None:
        self._recordings = recordings
        self.started: list[str | None] = []
        self.stopped: list[str | None] = []
        """The choice to detach CUPTI at each start and end."""
        self.exported: list[tuple[int, str]] = []
        """The number of each recording whose trace was written, from 1, and its file."""

    def __call__(self, **_: Any) -> _Profiler:
        return self

    def start(self) -> None:
        self.started.append(os.environ.get("TEARDOWN_CUPTI"))

    def stop(self) -> None:
        self.stopped.append(os.environ.get("TEARDOWN_CUPTI"))
        events = [_Event(record) for record in next(self._recordings)]
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(b"")
        self.exported.append((len(self.stopped), path))


class _Refusing(_Profiler):
    def start(self) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\nat CuptiActivityApi.cpp")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """A model that is said to be on a GPU, and computes on the CPU."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(work, "PASSES", 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    clock = SimpleNamespace(
        stamp=lambda _: None,
        ghz=lambda intervals: [[1.5] * len(intervals)],
        seconds=lambda intervals: [0.1] * len(intervals),
        why=None,
    )
    monkeypatch.setattr(work, "SmClock", lambda *_: clock)
    return _loaded(devices=(torch.device("cuda", 0),))


def _recordings() -> Iterator[list[Record]]:
    """Give the warm-up, three passes, and the eager pass with its ranges."""
    yield [Record("cold", 0, 0, 99, 1)]
    for number in range(3):
        yield [
            Record("gemm", 0, 0, 10 + number, 1),
            Record("ncclDevKernel_AllReduce_Sum_f16", 0, 100, 5, 2),
            Record("Memcpy HtoD", 0, 200, 3, 3),
        ]
    yield [
        Record("llmgpu:lm_head", None, 0, 10, 0),
        Record("cudaLaunchKernel", None, 5, 1, 8),
        Record("gemm", 0, 20, 30, 8),
    ]


def test_passes_are_recorded_on_a_gpu(gpu: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first recording is a warm-up, three give the time, the last gives modules and calls of the host."""
    monkeypatch.setattr(torch.profiler, "profile", _Profiler(_recordings()))
    reply = traffic_functions.measure(gpu)
    found = reply.work
    assert found.why == {}
    assert found.uuids == ["GPU-1234"]
    assert found.device_time_s == pytest.approx([10e-9, 11e-9, 12e-9])
    assert found.copy_s == pytest.approx([3e-9] * 3)
    assert found.kernels == 2
    assert found.runtime_calls == {"cudaLaunchKernel": 1}
    assert found.host_syncs == 0
    assert min(known(found.idle_s)) > 0
    assert 0 < known(found.busy) < 1
    assert reply.collective_s == [{"all_reduce": pytest.approx([5e-9])}] * 3
    assert found.clock_ghz == [[1.5, 1.5, 1.5]]
    assert (found.replays_s, found.replays_ghz) == (None, None), "the forwards are eager"
    assert {(row.module, row.kernel, row.family, row.calls) for row in known(reply.rows)} == {
        (None, "gemm", "GEMM", 1),
        (None, "Memcpy HtoD", "copy", 1),
        (None, "ncclDevKernel_AllReduce_Sum_f16", "collective", 1),
        ("lm_head", "gemm", "GEMM", 1),
    }


def test_graphs_are_replayed_in_a_row(gpu: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every second pass, between two stamps, after a forward that keeps the GPU busy; nothing waits between."""
    plan, order = traffic_functions.make_plan(), list[object]()
    monkeypatch.setattr(torch.profiler, "profile", _Profiler(_recordings()))
    monkeypatch.setattr(work, "synchronize", lambda devices: order.extend(["wait"] * len(devices)))
    monkeypatch.setattr(work, "batches_used", lambda _: [0, 1])
    clock: Any = work.SmClock  # type: ignore[attr-defined]
    monkeypatch.setattr(clock(), "stamp", order.append)
    of_batch, ran = {id(batch): f"batch {number}" for number, batch in enumerate(plan.batches)}, list[float]()
    reply = work.record(
        work.Program(gpu.devices, gpu.dispatched, gpu.model),
        plan,
        lambda batch: order.append(of_batch[id(batch)]),
        on_batch=lambda latency_s, *_: ran.append(latency_s),
        replayed=True,
    )
    row = ["wait", "batch 0", 0, "batch 0", "batch 1", 1, "wait"]
    assert any(order[place : place + len(row)] == row for place in range(len(order)))
    assert (reply.work.replays_s, reply.work.replays_ghz) == ([0.1], [[1.5]])
    assert min(ran) >= 0
    assert len(ran) == 2 + 4 * 2, (
        "one before the first profile, one before the row, both in three passes and in the row"
    )


class _Clock:
    """A clock that notes what is launched on its GPU, and whose GPU waits in vain in one hold."""

    why = None

    def __init__(self, gpu: int | None, order: list[object], is_late: bool) -> None:
        self._gpu, self._order, self._comes_late, self._late = gpu, order, is_late, False

    def hold(self, number: int) -> None:
        self._order.append(f"hold {self._gpu}.{number}")
        self._late |= self._comes_late

    def release(self, number: int) -> None:
        self._order.append(f"release {self._gpu}.{number}")

    def stamp(self, number: int) -> None:
        self._order.append(number)

    def is_late(self) -> bool:
        return self._late

    def seconds(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        return [10e-9 * (1 + first % 4) for first, _ in pairs]

    def ghz(self, pairs: Sequence[tuple[int, int]]) -> list[list[float]]:
        return [[1.0 + first % 4 for first, _ in pairs]]


def _held(
    monkeypatch: pytest.MonkeyPatch,
    order: list[object],
    *,
    gpus: Sequence[int] = (0, 0),
    late_clock: int | None = None,
    hook: Callable[..., None] | None = None,
) -> RankWork:
    """Run passes of two batches of two layers on given GPUs, of which one is launched ahead; the second has a hook."""
    model, devices = tiny_model.random_model(num_hidden_layers=2), [torch.device("cuda", number) for number in gpus]
    layers: Any = model.get_decoder().layers
    monkeypatch.setattr(torch.profiler, "profile", _Profiler(_recordings()))
    monkeypatch.setattr(work, "batches_used", lambda _: [0, 1])
    monkeypatch.setattr(work, "_LAYERS_AHEAD", 1)
    made = itertools.count()
    monkeypatch.setattr(work, "SmClock", lambda of, *_: _Clock(of[0].index, order, next(made) == late_clock))
    hooks = [layer.register_forward_hook(lambda *_: order.append("layer")) for layer in layers]
    for layer, device in zip(layers, devices, strict=True):
        monkeypatch.setattr(layer, "parameters", lambda device=device: iter([SimpleNamespace(device=device)]))
    model.lm_head.register_forward_hook(lambda *_: order.append("head"))
    if hook is not None:
        layers[1].input_layernorm.register_forward_pre_hook(hook)
    program = work.Program(tuple(dict.fromkeys(devices)), dispatched=True, model=model)
    try:
        with work.scoring_forward(model, torch.device("cpu"), "lean") as forward:
            plan = traffic_functions.make_plan()
            return work.record(program, plan, forward, on_batch=lambda *_: None, alone=True).work
    finally:
        for one in hooks:
            one.remove()
        assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in layers)


def _group(number: int, gpu: int = 0) -> list[object]:
    return [f"hold {gpu}.{number}", 2 * number, "layer", 2 * number + 1, f"release {gpu}.{number}"]


_PLAIN = ["layer", "layer", "head"]


@pytest.mark.usefixtures("gpu")
def test_forwards_are_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one that counts the groups of layers and one that tries it. The clock of a pass is that of its layers."""
    order = list[object]()
    found = _held(monkeypatch, order)
    one, other = [*_group(0), *_group(1), "head"], [*_group(2), *_group(3), "head"]
    first = [*_PLAIN, *one, 0, *one, *other, 1, *_PLAIN, *_PLAIN, 1]
    assert order[: len(first)] == first
    holds = [one for one in order if "hold" in str(one)]
    assert holds == [f"hold 0.{number}" for number in [*range(2), *range(3 * 4)]]
    assert known(found.clock_ghz)[0] == pytest.approx([(10 * 1 + 30 * 3) / 40] * 3)
    assert found.launched_ahead


@pytest.mark.usefixtures("gpu")
def test_each_gpu_of_a_model_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of later layers is stamped when that of the earlier ones is done; each has a clock of its own."""
    order = list[object]()

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(gpu=device.index, wait_stream=lambda other: order.append((device.index, other.gpu)))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    found = _held(monkeypatch, order, gpus=[0, 1])
    first = [*_PLAIN, *_group(0), (1, 0), *_group(0, gpu=1), "head"]
    assert order[: len(first)] == first
    assert found.launched_ahead
    assert known(found.clock_ghz) == [[pytest.approx((10 * 1 + 30 * 3) / 40)] * 3] * 2


@pytest.mark.usefixtures("gpu")
def test_a_forward_that_waits_for_the_gpu_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes run as they would without, and their clock is that of the whole pass."""
    order = list[object]()
    found = _held(monkeypatch, order, late_clock=0)
    assert [one for one in order if str(one).startswith(("hold", "release"))] == ["hold 0.0", "release 0.0"]
    assert not found.launched_ahead
    assert found.clock_ghz == [[1.0, 1.0 + 2, 1.0]], "of the stamps around the passes"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("is_late", [True, False])
def test_passes_of_which_some_were_held_have_no_clock(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """A GPU waited in vain in one of them, or a layer was not called: the clock of a pass has the time of the wait."""
    order, calls = list[object](), itertools.count()

    found = _held(monkeypatch, order, late_clock=1) if is_late else None
    if found is None:
        run = work._run

        def skip(devices: Any, batches: Any, forward: Any, on_batch: Any, **ways: Any) -> float:
            return run(devices, batches[: 1 if next(calls) == 2 else None], forward, on_batch, **ways)

        monkeypatch.setattr(work, "_run", skip)
        found = _held(monkeypatch, order)
    assert found.clock_ghz is None
    assert "waited in vain for the host" in found.why["clock_ghz"]
    assert not found.launched_ahead


@pytest.mark.usefixtures("gpu")
def test_a_forward_that_fails_releases_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what frees its memory would wait for the GPU in vain. Nothing is launched after a fault of the device."""
    order = list[object]()

    def fail(*_: object) -> None:
        if "hold 0.1" in order:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        _held(monkeypatch, order, hook=fail)
    assert order[-3:] == ["hold 0.1", 2, "release 0.1"]


def test_traces_are_of_the_last_pass_and_of_the_pass_by_modules(
    gpu: Loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their folder is made. A trace that cannot be written costs no figure, and the log of the rank has the reason."""
    (tmp_path / "file").touch()
    passes, modules = str(tmp_path / "new" / "passes.json.gz"), str(tmp_path / "new" / "modules.json.gz")
    for traces, written in (((passes, modules), [(4, passes), (5, modules)]), ((str(tmp_path / "file/x"), None), [])):
        profiler = _Profiler(_recordings())
        monkeypatch.setattr(torch.profiler, "profile", profiler)
        reply = traffic_functions.measure_plan(gpu, traffic_functions.make_plan(), lambda *_: None, traces)
        assert (profiler.exported, reply.traces) == (written, [path for _, path in written])
        assert (reply.work.why, reply.work.kernels, reply.work.host_syncs) == ({}, 2, 0)
    assert "file/x could not be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("profiler", "users", "reason"),
    [
        (_Refusing(iter(())), None, "torch.profiler did not start: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"),
        (_Profiler(itertools.repeat([Record("cudaLaunchKernel", None, 0, 1, 1)])), None, "CUPTI"),
        (_Profiler(itertools.repeat([])), "1", "TEARDOWN_CUPTI=1"),
    ],
)
def test_without_cupti_ops_and_flops_stay(
    gpu: Loaded, monkeypatch: pytest.MonkeyPatch, profiler: _Profiler, users: str | None, reason: str
) -> None:
    """Whether the profiler does not start or records no kernel, every pass is run, since other ranks may wait in it."""
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    monkeypatch.setattr(work, "_USERS_CHOICE", users)
    runs: list[float] = []
    plan = traffic_functions.make_plan()
    reply = traffic_functions.measure_plan(gpu, plan, lambda latency_s, *_: runs.append(latency_s))
    # A warm-up, three passes with a run before the second one, and three eager forwards.
    assert len(runs) == 1 + (3 + 1) * len(reply.batches) + 3
    assert reply.work.ops
    assert reply.work.flops
    assert set(reply.work.why) == _DEVICE_FIGURES | _HOST_FIGURES
    assert all(reason in why for why in reply.work.why.values())
    found = work.join([reply], {}, "it is not known")
    assert found.ranks[0].rows is None
    assert set(found.why) == {"collectives", "model"}


def test_a_profiler_is_stopped_where_a_forward_fails(gpu: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one could not start."""
    profiler = _Profiler(_recordings())
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    gpu.model.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        traffic_functions.measure(gpu)
    assert len(profiler.stopped) == 1


def _reply(*passes: dict[str, list[float]], rows: tuple[NamedRow, ...] = ()) -> WorkReply:
    return WorkReply(
        batches=[0], eager_batches=[0], work=RankWork(uuids=[]), rows=list(rows), collective_s=list(passes)
    )


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            [
                [{"all_reduce": [1.0, 5.0]}, {"all_reduce": [1.0, 1.0]}],
                [{"all_reduce": [4.0, 2.0]}, {"all_reduce": [1.0, 3.0]}],
            ],
            [CollectiveWork(collective="all_reduce", calls=2, transfer_s=[3.0, 2.0], wait_s=[3.0, 1.0])],
        ),
        ([[{}, {}]], []),
        ([[{"broadcast": [2.0]}]], [CollectiveWork(collective="broadcast", calls=1, transfer_s=[2.0], wait_s=[0.0])]),
        ([[{"all_reduce": [1.0]}], [{"all_reduce": [1.0, 2.0]}]], None),
    ],
)
def test_the_shortest_duration_of_a_call_is_its_transfer(
    ranks: list[list[dict[str, list[float]]]], expected: list[CollectiveWork] | None
) -> None:
    """A kernel of NCCL spins while it waits for the other ranks; calls that do not correspond are not joined."""
    found = work.join([_reply(*passes) for passes in ranks], {}, _SIZE)
    assert found.collectives == expected
    assert ("number of collectives" in found.why.get("collectives", "")) is (expected is None)


def test_names_of_kernels_stand_once_in_a_report() -> None:
    """Ranks and cases share their numbers; a row that sums several kernels has none."""
    names = {"add": 0}
    rows = NamedRow(None, "gemm", "GEMM", 2, 1.0), NamedRow(None, "add", "other", 1, 0.5)
    rest = NamedRow("other", None, "other", 7, 0.1)
    found = work.join([_reply({}, rows=(*rows, rest)), _reply({}, rows=rows[:1])], names, _SIZE)
    assert names == {"add": 0, "gemm": 1}
    assert found.ranks[0].rows == [
        WorkRow(module=None, kernel=1, family="GEMM", calls=2, time_s=1.0),
        WorkRow(module=None, kernel=0, family="other", calls=1, time_s=0.5),
        WorkRow(module="other", kernel=None, family="other", calls=7, time_s=0.1),
    ]
    assert [row.kernel for row in found.ranks[1].rows or []] == [1]


def test_an_attention_that_compiled_layers_replaced_is_named() -> None:
    """The eager pass, which counts ops, runs that of torch."""
    source = Path(work.__file__).parents[1] / "inference" / "decode_kernels.py"
    assert "def _attention_of_one_query(" in source.read_text("utf-8"), "its module needs a GPU"
    kinds = {"attention": "sdpa (cudnn)", "linear attention": "torch", "experts": "grouped_mm (_grouped_mm)"}
    row = NamedRow(None, "_attention_of_one_query", "attention", 2, 1.0)
    for rows, expected in (((), kinds), ((row,), {**kinds, "attention": "sdpa (one query)"})):
        reply = _reply({}, rows=rows)
        reply = msgspec.structs.replace(reply, work=msgspec.structs.replace(reply.work, implementations=kinds))
        assert work.join([reply], {}, _SIZE).ranks[0].implementations == expected


def test_the_size_of_a_model_leaves_embeddings_and_head_out() -> None:
    """They are looked up, and computed for the predicted tokens only; a token does not meet all experts."""
    model = tiny_model.random_model()
    found = work.model_size(model, 2, None)
    layer = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert found == ModelSize(parameters=layer + 32, weights_bytes=2 * (layer + 32), layers=1, attention_width=32)
    model.config.num_local_experts = 8
    assert "num_experts_per_tok" in str(work.model_size(model, 2, None))


def test_a_token_passes_through_its_active_experts() -> None:
    """2.95 of 30 billion parameters of Qwen3-30B-A3B are active, without embeddings; windows attend to few tokens."""
    found = work.model_size(weights.skeleton(tiny_model.source(PRESETS["qwen3-30b-a3b"]), torch.float16), 2, None)
    assert isinstance(found, ModelSize)
    assert (found.layers, found.active_experts) == (48, 8 / 128)
    attention = 2048 * 128 * (2 * 32 + 2 * 4) + 2 * 128
    layer, experts = attention + 2048 * 128 + 2 * 2048, 3 * 2048 * 768
    assert found.parameters == 48 * (layer + 8 * experts) + 2048
    assert found.experts_bytes == 2 * 48 * 128 * experts
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "kv_channels": 8, "vocab_size": 64}
    jetmoe = AutoConfig.for_model("jetmoe", **sizes, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2)
    with init_empty_weights():
        other = work.model_size(AutoModelForCausalLM.from_config(jetmoe), 2, None)
    assert isinstance(other, ModelSize)
    # Its experts have other names, and a router of its attention has theirs.
    assert other.experts_bytes == 2 * 8 * (3 * 32 * 48 + 2 * 32 * 32) + 2 * (8 * 32 + 32)
    gpt_oss = work.model_size(weights.skeleton(tiny_model.source(PRESETS["gpt-oss-20b"]), torch.float16), 2, None)
    assert isinstance(gpt_oss, ModelSize)
    assert gpt_oss.layers == 12


def test_the_first_rank_has_the_size_of_the_whole_model(tmp_path: Any) -> None:
    """No weights are needed. A model of a user can lack any attribute: the error is the reason then."""
    state = worker.RankState(lambda _: None)
    state.case, state.loaded = msgspec.structs.replace(_CASE, dtype="float16"), _loaded()
    state.source = models.resolve("llama-7b", load_format="dummy", texts=["a text"], rootdir=tmp_path)
    parameters = 6_476_271_616
    size = ModelSize(parameters=parameters, weights_bytes=2 * parameters, layers=32, attention_width=4096)
    assert worker.model_size(state) == size
    state.model_size, state.source = None, object()  # type: ignore[assignment]
    assert "AttributeError" in str(worker.model_size(state))
    state.loaded = _loaded(rank=1)
    assert worker.model_size(state) is None


_GEMM, _ADD = "nvjet_hsh_128x256_64x4", "vectorized_elementwise_kernel<CUDAFunctor_add>"
_REDUCED = "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def _kernel(name: str, start_ns: int, duration_ns: int, correlation: int = 0, device: int = 0) -> Record:
    return Record(name, device, start_ns, duration_ns, correlation)


def _call(name: str, start_ns: int, correlation: int) -> Record:
    return Record(name, None, start_ns, 1, correlation)


def _range(module: str, start_ns: int, end_ns: int) -> Record:
    return Record(RANGE_PREFIX + module, None, start_ns, end_ns - start_ns, 0)


def test_the_time_of_a_pass_is_that_of_its_kernels() -> None:
    """Collectives and copies are counted apart; idle is the time in which no kernel runs, overlaps counted once."""
    found = work.of_pass(
        [
            _kernel(_ADD, 500, 100),
            _kernel(_REDUCED, 610, 40),
            _kernel(_GEMM, 0, 200),
            _kernel(_GEMM, 100, 200, device=1),
            _kernel(_REDUCED, 250, 100),
            _kernel("Memcpy HtoD (Pinned -> Device)", 400, 50),
            _kernel("Memcpy PtoP (Device -> Device)", 500, 70),
            _call("cudaLaunchKernel", 0, 1),
        ]
    )
    assert found.device_time_s == pytest.approx(500e-9)
    assert found.copy_s == pytest.approx(50e-9)
    assert found.covered_s == pytest.approx(490e-9)
    calls = {_GEMM: 2, _REDUCED: 2, _ADD: 1, "Memcpy HtoD (Pinned -> Device)": 1, "Memcpy PtoP (Device -> Device)": 1}
    assert {name: calls.calls for name, calls in found.kernels.items()} == calls
    assert found.kernels[_GEMM].time_s == pytest.approx(400e-9)
    by_kind = {"all_reduce": pytest.approx([100e-9, 40e-9]), "peer_copy": pytest.approx([70e-9])}
    assert found.collective_s == by_kind, "in the order of their start"
    assert work.of_pass([]) == PassKernels(0.0, 0.0, 0.0, {}, {})


def test_a_kernel_belongs_to_the_innermost_range_around_its_launch() -> None:
    """The time of its call decides. A scalar that is read back is a copy and a synchronization; polls do not count."""
    records = [
        _range("model", 0, 100),
        _range("layers.*", 10, 60),
        _range("layers.*.mlp", 20, 40),
        _range("layers.*", 60, 90),
        _call("cudaLaunchKernel", 5, 1),
        _call("cuLaunchKernelEx", 25, 2),
        _call("cudaLaunchKernel", 45, 3),
        _call("cudaLaunchKernel", 60, 4),
        _call("cudaLaunchKernel", 95, 5),
        _call("cudaLaunchKernel", 100, 6),
        *(_kernel(_ADD, 1000 + number, 10 * number, correlation=number) for number in range(1, 7)),
        _range("(scoring)", 110, 190),
        _call("cudaMemcpyAsync", 120, 7),
        _call("cudaStreamSynchronize", 121, 8),
        _call("cudaMemcpyAsync", 130, 9),
        _call("cudaEventQuery", 140, 10),
        _call("cudaStreamIsCapturing", 141, 11),
        _call("cudaThreadExchangeStreamCaptureMode", 142, 14),  # by NCCL's watchdog, each time that it looks
        _call("cudaDeviceSynchronize", 200, 12),
        _kernel("Memcpy DtoH (Device -> Pageable)", 122, 1, correlation=7),
        _kernel("Memcpy HtoD (Pinned -> Device)", 132, 1, correlation=9),
        _kernel("Memcpy DtoH (Device -> Pageable)", 300, 1, correlation=13),
    ]
    found = work.attribute(records)
    kernels = {module: calls.calls for (module, name), calls in found.kernels.items() if name == _ADD}
    assert kernels == {"model": 2, "layers.*.mlp": 1, "layers.*": 2, work.OUTSIDE: 1}
    copies = {(module, name): calls.calls for (module, name), calls in found.kernels.items() if name != _ADD}
    assert copies == {
        ("(scoring)", "Memcpy DtoH (Device -> Pageable)"): 1,
        ("(scoring)", "Memcpy HtoD (Pinned -> Device)"): 1,
        (work.OUTSIDE, "Memcpy DtoH (Device -> Pageable)"): 1,
    }
    assert found.kernels["layers.*", _ADD].time_s == pytest.approx(70e-9)
    calls = {"cuLaunchKernelEx": 1, "cudaLaunchKernel": 4, "cudaMemcpyAsync": 2, "cudaStreamSynchronize": 1}
    assert (found.runtime_calls, found.host_syncs) == (calls, 2)


def _pass(**time_s: float) -> PassKernels:
    return PassKernels(0.0, 0.0, 0.0, {name: Calls(2, value) for name, value in time_s.items()}, {})


def test_the_time_of_a_row_is_the_median_over_the_passes() -> None:
    """Rows are sorted by time. Names are cut, and two that begin alike stay different."""
    long, other = "gemm" * 100, "gemm" * 101
    passes = [_pass(add=0.1, **{long: value, other: 0.2}) for value in (3.0, 1.0, 2.0)]
    found = [*work.pass_rows(passes), *work.module_rows(Modules({("lm_head", long): Calls(1, 5.0)}, {}, 0))]
    name = found[0].kernel or ""
    assert (name[:111], len(name)) == (long[:111], 120)
    assert [row[2:5] for row in found] == [("GEMM", 2, 2.0), ("GEMM", 2, 0.2), ("other", 2, 0.1), ("GEMM", 1, 5.0)]
    assert found[1].kernel not in {name, other}
    assert found[3][:2] == ("lm_head", name)


_KINDS = ("gemm", "sdpa", "elementwise", "copy_kernel", "rms_norm", "nccl", "x")


def _by_family(rows: Sequence[NamedRow]) -> dict[str, tuple[int, int]]:
    """Return the calls and microseconds of each family."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        calls, time_us = found.get(row.family, (0, 0))
        found[row.family] = calls + row.calls, time_us + round(1e6 * row.time_s)
    return found


@pytest.mark.parametrize("modules", [1, 5, 200])
def test_every_kernel_has_a_row_and_modules_have_at_most_100(modules: int) -> None:
    """Small modules are summed by family: a change of a family is seen whole."""
    names = [f"{kind}{number}" for kind in _KINDS for number in range(50)]
    kernels = {name: Calls(1, 1.0 + number) for number, name in enumerate(names)}
    in_modules = {(f"mlp{n % modules}", name): Calls(1, 1.0 + n) for n, name in enumerate(names)}
    rows, found = (
        work.pass_rows([PassKernels(0.0, 0.0, 0.0, kernels, {})]),
        work.module_rows(Modules(in_modules, {}, 0)),
    )
    every = [NamedRow(None, name, family_of(name), *calls, [calls.time_s]) for name, calls in kernels.items()]
    assert sorted(rows) == sorted(every)
    assert len(found) <= 100
    assert _by_family(found) == _by_family(every)
    # A model has fewer modules and families than rows: none of them is lost.
    assert ("other" in {row.module for row in found}) is (modules == 200)


def test_records_are_read_from_torchs_profiler(gpu: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of modules and records of the device are kept; ops, and ranges that a device repeats, are left out."""
    monkeypatch.setattr(torch.profiler, "profile", _Profiler(_recordings()))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        traffic_functions.measure(gpu)
    results: Any = recorded.profiler
    found = work.read_records(results.kineto_results.events())
    assert all(one.device is None and one.duration_ns > 0 and one.name.startswith("llmgpu:") for one in found)
    modules = {one.name.removeprefix("llmgpu:") for one in found}
    assert {"(scoring)", "model", "layers.*", "layers.*.mlp.down_proj", "layers.*.self_attn", "lm_head"} <= modules
    kernel, repeated = _Event(Record(_GEMM, 1, 10, 5, 7)), _Event(Record("nccl:all_reduce", 1, 10, 5, 7))
    repeated.is_user_annotation = lambda: True
    stamp = _Event(Record("llmgpu_stamp", 1, 10, 5, 8))
    assert work.read_records([kernel, repeated, stamp]) == [Record(_GEMM, 1, 10, 5, 7)]


_LINEAR = {f"layers.*.self_attn.{name}_proj" for name in "qkvo"} | {
    f"layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")
}


@pytest.mark.slow
def test_each_rank_of_tp_has_half_of_every_linear_layer(gloo_pair: RankGroup, bundled: ModelSource) -> None:
    """FLOPs are counted on local tensors: a counter above DTensor would report the whole model on every rank."""
    whole = LayerParallel().load(msgspec.structs.replace(_CASE, strategy="mp", devices=1), bundled)
    gloo_pair.ask(worker.load, _CASE, bundled, _TP, phase="load", timeout_s=300)
    one, two = gloo_pair.ask(worker.call, traffic_functions.measure, (), phase="forward", timeout_s=300)
    assert (one.work.ops, one.work.flops_by_module) == (two.work.ops, two.work.flops_by_module)
    flops = traffic_functions.measure(whole).work.flops_by_module or {}
    assert {name: 2 * one.work.flops_by_module[name] for name in _LINEAR} == {name: flops[name] for name in _LINEAR}
    assert sum(flops.values()) / 2 <= one.work.flops < 0.6 * sum(flops.values())
