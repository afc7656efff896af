from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest
import torch
from support import tiny_model
from torch import distributed

from pytest_llmgpu.inference import cuda_graphs, logits, scoring
from pytest_llmgpu.inference.batching import Plan, Request, Requests
from pytest_llmgpu.ranks import device_memory, graph_trial
from pytest_llmgpu.ranks.graph_trial import Choice
from pytest_llmgpu.strategies.errors import WorkspaceError
from pytest_llmgpu.strategies.protocol import Loaded, Workspace

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_BATCH_SIZE = 2


class _Gpu:
    """A clock, and a GPU that computes what a CPU launches: a forward takes the longer of both."""

    def __init__(self) -> None:
        self.launching_s = 0.010
        self.computing_s = 0.002
        self.capturing_s = 0.020
        self.error = 0.0
        """By how much hidden states of graphs are off, as a fraction."""
        self.peak_bytes = 120 << 20
        """20 MiB of an eager forward's own."""
        self.graphed = False
        self.recorded: set[tuple[int, ...]] = set()
        self._now_s = 0.0
        self._idle_s = 0.0

    def replays(self) -> bool:
        return self.graphed

    def perf_counter(self) -> float:
        return self._now_s

    def synchronize(self, _device: torch.device | None = None) -> None:
        self._now_s = max(self._now_s, self._idle_s)

    def forward(self, _module: torch.nn.Module, _arguments: tuple[Any, ...], _named: dict[str, Any], out: Any) -> None:
        launching_s = 0.0001 if self.graphed else self.launching_s
        self._idle_s = self._now_s + max(launching_s, self.computing_s)
        self._now_s += launching_s
        if self.graphed:
            out.last_hidden_state *= 1 + self.error


class _Decoder:
    """What `graphs.GraphedDecoder` is to `execution`, on the emulated GPU."""

    gpu: _Gpu

    def __init__(self, _model: torch.nn.Module, device: torch.device) -> None:
        assert device == GPU
        self.capture_s = [self.gpu.capturing_s]

    def __enter__(self) -> _Decoder:  # noqa: PYI034 - typing.Self needs Python 3.11
        self.gpu.graphed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.gpu.graphed = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self.gpu.graphed = False
        yield
        self.gpu.graphed = True


@pytest.fixture
def model() -> Any:
    """A random one-layer LLaMA."""
    return tiny_model.random_model()


@pytest.fixture
def gpu(model: Any, monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    """The GPU that the model is timed on, whose graphs pay for themselves unless it is told otherwise."""
    gpu = _Gpu()
    model.get_decoder().register_forward_hook(gpu.forward, with_kwargs=True)
    for module in (graph_trial, scoring):
        monkeypatch.setattr(module, "time", gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(device_memory, "reset", lambda _devices: None)
    monkeypatch.setattr(device_memory, "allocated", lambda devices: [100 << 20 for _ in devices])
    monkeypatch.setattr(device_memory, "peaks", lambda devices: [gpu.peak_bytes for _ in devices])
    monkeypatch.setattr(device_memory, "spare", lambda devices: [400 << 20 for _ in devices])
    monkeypatch.setattr(cuda_graphs, "GraphedDecoder", type("_DecoderOf", (_Decoder,), {"gpu": gpu}))
    return gpu


def _requests() -> Requests:
    # 17 rows of 21 to 37 tokens: 9 batches, of 9 widths that are padded to 2: 3 shapes, as the last has one row.
    rows = [tuple((7 * row + place) % 40 for place in range(21 + row)) for row in range(17)]
    return Requests(
        item_ids=tuple(f"{row}" for row in range(17)),
        endings=(1,) * 17,
        requests=tuple(Request(tokens=row, ending=2) for row in rows),
        max_length=64,
    )


def _loaded(model: Any, *devices: torch.device, world_size: int = 1) -> Loaded:
    # Ids stay on the CPU, which is where the model really is.
    return Loaded(model=model, config=model.config, input_device=CPU, devices=devices or (GPU,), world_size=world_size)


def _workspace(plan: Plan) -> Workspace:
    return Workspace(tokens_requested=plan.tokens, tokens_granted=plan.tokens, workspace_bytes=1)


def _choose(
    loaded: Loaded, asked: str, prepare: Callable[[Plan], Workspace | None] = _workspace, dtype: str = "float16"
) -> Choice:
    with graph_trial.chosen(loaded, _requests(), _BATCH_SIZE, requested=asked, dtype=dtype, prepare=prepare) as choice:
        return choice


def _padded(choice: Choice) -> bool:
    widths = {batch.width for batch in choice.plan.batches}
    return widths == {32, 36}


@pytest.mark.parametrize(
    ("asked", "devices", "why"),
    [
        ("off", (GPU,), "no CUDA graphs: they were switched off"),
        ("auto", (CPU,), "no CUDA graphs: CUDA graphs need a GPU"),
        ("auto", (GPU, torch.device("cuda", 1)), "no CUDA graphs: one process drives several GPUs"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_without_graphs_forwards_are_eager_with_the_reason(
    model: Any, asked: str, devices: tuple[torch.device, ...], why: str
) -> None:
    """Where there is nothing to decide nothing is timed, and rows are padded no further than they need."""
    choice = _choose(_loaded(model, *devices), asked)
    assert choice.execution == "eager"
    assert choice.why.startswith(why)
    assert choice.plan.sha256 == scoring.plan(_requests(), _BATCH_SIZE).sha256
    assert choice.workspace == _workspace(choice.plan)


@pytest.mark.parametrize("asked", ["auto", "on"])
@pytest.mark.usefixtures("gpu")
def test_a_forward_that_keeps_a_cache_is_not_recorded(model: Any, asked: str) -> None:
    """Scored as the harness does nothing is tried, and the sentence names the option."""
    with graph_trial.chosen(
        _loaded(model),
        _requests(),
        _BATCH_SIZE,
        requested=asked,
        dtype="float16",
        prepare=_workspace,
        workload=logits.FULL_LOGITS,
    ) as choice:
        pass
    assert choice.execution == "eager"
    assert choice.why.startswith("no CUDA graphs: --llmgpu-scoring=harness keeps a KV cache")
    assert choice.plan.sha256 == scoring.plan(_requests(), _BATCH_SIZE).sha256


def test_graphs_that_were_asked_for_are_not_weighed(model: Any, gpu: _Gpu) -> None:
    """`on` takes them whatever they cost, for as long as the case lasts."""
    gpu.capturing_s, gpu.computing_s = 1000.0, 1000.0
    prepared: list[Plan] = []

    def prepare(plan: Plan) -> None:
        assert not gpu.replays(), "a graph has the workspace's address"
        prepared.append(plan)

    with graph_trial.chosen(
        _loaded(model), _requests(), _BATCH_SIZE, requested="on", dtype="float16", prepare=prepare
    ) as choice:
        assert gpu.replays()
    assert not gpu.replays()
    assert (choice.execution, choice.why) == ("cuda_graphs", "CUDA graphs were asked for")
    assert _padded(choice)
    assert prepared == [choice.plan]


@pytest.mark.parametrize("devices", [(CPU,), (GPU, torch.device("cuda", 1))], ids=["CPU", "two GPUs"])
@pytest.mark.usefixtures("gpu")
def test_where_graphs_cannot_be_had_forwards_run_eagerly(model: Any, devices: tuple[torch.device, ...]) -> None:
    """`on` is for every strategy that can: mp over several GPUs is measured beside the others, and says why."""
    choice = _choose(_loaded(model, *devices), "on")
    assert (choice.execution, choice.why) == ("eager", f"no CUDA graphs: {cuda_graphs.reason_against(model, devices)}")


def test_graphs_that_pay_are_taken(model: Any, gpu: _Gpu) -> None:
    """9 batches that save 8 ms each pay for 3 recordings of 20 ms, and the sentence has these figures."""
    loaded, prepared = _loaded(model), list[int]()

    def prepare(plan: Plan) -> Workspace:
        prepared.append(plan.tokens)
        return _workspace(plan)

    with graph_trial.chosen(
        loaded, _requests(), _BATCH_SIZE, requested="auto", dtype="float16", prepare=prepare
    ) as choice:
        assert gpu.replays()
    assert not gpu.replays()
    assert choice.execution == "cuda_graphs"
    assert choice.why.startswith(
        "CUDA graphs: a batch takes 2.0 ms as a graph and 10.0 ms eagerly, 3 recordings 20.0 ms each; "
    )
    assert _padded(choice)
    assert prepared == [36], "padded rows are no longer than the longest"
    assert choice.workspace == _workspace(choice.plan)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"computing_s": 0.021}, "eager: the GPU is the bottleneck, kernels are launched in 10.0 ms of 21.0 ms"),
        (
            {"capturing_s": 0.025},
            "eager: CUDA graphs would not pay for themselves over 9 batches: a batch takes 2.0 ms",
        ),
        ({"error": 0.5}, "eager: as a CUDA graph, log-likelihoods differ by "),
    ],
    ids=["busy", "too dear", "other answers"],
)
def test_graphs_that_do_not_help_are_not_taken(
    model: Any, gpu: _Gpu, monkeypatch: pytest.MonkeyPatch, changes: dict[str, float], why: str
) -> None:
    """The case is as if they had not been tried: its own batches, its own workspace, and a clean memory before it."""
    for name, value in changes.items():
        setattr(gpu, name, value)
    events: list[str] = []
    monkeypatch.setattr(device_memory, "reset", lambda _devices: events.append("reset"))

    def prepare(plan: Plan) -> Workspace:
        events.append(f"{plan.tokens}")
        return _workspace(plan)

    choice = _choose(_loaded(model), "auto", prepare)
    assert choice.execution == "eager"
    assert choice.why.startswith(why)
    assert choice.plan.sha256 == scoring.plan(_requests(), _BATCH_SIZE).sha256
    assert choice.workspace == _workspace(choice.plan)
    assert events == ["36", "reset"]
    assert not gpu.replays()


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "eager"), ("bfloat16", "cuda_graphs")])
def test_how_equal_answers_must_be_is_the_dtypes(model: Any, gpu: _Gpu, dtype: str, expected: str) -> None:
    """What is rounding in bfloat16 is a difference in float32."""
    gpu.error = 1e-2
    assert _choose(_loaded(model), "auto", dtype=dtype).execution == expected


def test_where_memory_is_short_graphs_are_not_tried(model: Any, gpu: _Gpu) -> None:
    """A trial that runs out of memory on one of several ranks would end a case that fits eagerly."""
    gpu.peak_bytes = 148 << 20
    assert _choose(_loaded(model), "auto").execution == "cuda_graphs"
    gpu.peak_bytes = 149 << 20
    choice = _choose(_loaded(model), "auto")
    assert (choice.execution, choice.why) == ("eager", "eager: 3 MiB too little is free to try CUDA graphs")


def test_no_room_at_all_is_out_of_memory(model: Any, gpu: _Gpu) -> None:  # noqa: ARG001 - nothing is timed for real
    """What does not hold the rows as they are is the case's outcome."""

    def prepare(plan: Plan) -> None:
        raise WorkspaceError(plan.tokens, 0)

    with pytest.raises(WorkspaceError):
        _choose(_loaded(model), "auto", prepare)


@pytest.mark.parametrize("first_says", [True, False])
def test_ranks_do_as_the_first_one_says(
    model: Any, gpu: _Gpu, monkeypatch: pytest.MonkeyPatch, first_says: bool
) -> None:
    """A rank whose own figures say otherwise goes along: else it would wait for the others in a collective for ever."""
    gpu.capturing_s = 1000.0 if first_says else 0.0
    own: list[bool] = []

    def broadcast(said: torch.Tensor, src: int) -> None:
        assert src == 0
        own.append(bool(said))
        # Of whether the GPU is busy and whether the answers agree, the two ranks are of one mind.
        said.fill_(first_says if len(own) == 3 else bool(said))

    _on_cpu(monkeypatch)
    monkeypatch.setattr(distributed, "broadcast", broadcast)
    monkeypatch.setattr(distributed, "all_reduce", lambda _told, op: None)  # noqa: ARG005 - called by name
    choice = _choose(_loaded(model, world_size=2), "auto")
    assert own == [False, True, not first_says]
    assert choice.execution == ("cuda_graphs" if first_says else "eager")


def test_what_is_missing_on_one_rank_is_missing_on_all(model: Any, gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Memory that only another rank has too little of keeps graphs from this one, too."""

    def all_reduce(told: torch.Tensor, op: Any) -> None:
        assert op == distributed.ReduceOp.MAX
        if float(told) <= 0.0:
            told.fill_(5.0 * 2**20)

    _on_cpu(monkeypatch)
    monkeypatch.setattr(distributed, "broadcast", lambda _said, src: None)  # noqa: ARG005 - called by name
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    choice = _choose(_loaded(model, world_size=2), "auto")
    assert choice.why == "eager: 5 MiB too little is free to try CUDA graphs"


def test_graphs_are_left_where_a_case_fails(model: Any, gpu: _Gpu) -> None:
    """The next case finds the model as it was."""

    def fail() -> None:
        with graph_trial.chosen(
            _loaded(model), _requests(), _BATCH_SIZE, requested="auto", dtype="float16", prepare=_workspace
        ) as choice:
            assert choice.execution == "cuda_graphs"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not gpu.replays()


def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors that ranks exchange be made here, whatever device they are meant for."""
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, **named: make(data, **{**named, "device": CPU}))


def test_a_forward_that_cannot_be_recorded_runs_eagerly(model: Any, gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are an offer: a model that asks the GPU for a number in the middle of its forward is measured without."""
    assert gpu.launching_s

    def capture(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graph_trial, "_compare", capture)
    choice = _choose(_loaded(model), "auto")
    assert choice.execution == "eager"
    assert choice.why == ("eager: its forwards cannot be recorded: operation not permitted when stream is capturing")


def test_out_of_memory_in_one_of_several_ranks_is_told(model: Any, gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its siblings may wait in a collective, so nobody is asked whether to go on."""
    assert gpu.launching_s

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(graph_trial, "_compare", run_out)
    monkeypatch.setattr(graph_trial, "_agree", lambda _loaded, yes: yes)
    monkeypatch.setattr(graph_trial, "_largest", lambda _loaded, value: value)
    with pytest.raises(torch.OutOfMemoryError):
        _choose(_loaded(model, world_size=2), "auto")
    assert _choose(_loaded(model), "auto").execution == "eager"
