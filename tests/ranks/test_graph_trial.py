from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, get_args

import pytest
import torch
from support import tiny_model
from support.prose import Prose
from torch import distributed

from pytest_llmgpu.inference import cuda_graphs, logits, scoring
from pytest_llmgpu.inference.batching import Plan, Request, Requests
from pytest_llmgpu.ranks import device_memory, graph_trial
from pytest_llmgpu.ranks.graph_trial import Choice, Comparison, Decision, Reason, describe
from pytest_llmgpu.strategies.errors import WorkspaceError
from pytest_llmgpu.strategies.protocol import Loaded, Workspace

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_TWO_GPUS = (GPU, torch.device("cuda", 1))
_BATCH_SIZE = 2


class _Gpu:
    """A clock, and a GPU that computes the kernels that a CPU launches: a forward takes the longer of the two times."""

    def __init__(self) -> None:
        self.launching_s = 0.010
        self.computing_s = 0.002
        self.capturing_s = 0.020
        self.error = 0.0
        """The hidden states of graphs differ by this fraction."""
        self.failure: Exception | None = None
        """A forward under graphs raises this."""
        self.peak_bytes = 120 << 20
        """An eager forward takes 20 MiB of it."""
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
        if self.graphed and self.failure is not None:
            raise self.failure
        launching_s = 0.0001 if self.graphed else self.launching_s
        self._idle_s = self._now_s + max(launching_s, self.computing_s)
        self._now_s += launching_s
        if self.graphed:
            out.last_hidden_state *= 1 + self.error


class _Decoder:
    """`cuda_graphs.GraphedDecoder` on the emulated GPU."""

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
    """The GPU of the model; its graphs are worth their recording unless a test changes a time."""
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
    # 17 rows of 21 to 37 tokens: 9 batches of 9 widths, which padding reduces to 2. The last batch has one row, so that
    # there are 3 shapes.
    rows = [tuple((7 * row + place) % 40 for place in range(21 + row)) for row in range(17)]
    return Requests(
        item_ids=tuple(f"{row}" for row in range(17)),
        endings=(1,) * 17,
        requests=tuple(Request(tokens=row, ending=2) for row in rows),
        max_length=64,
    )


def _loaded(model: Any, *devices: torch.device, world_size: int = 1) -> Loaded:
    # The model and its ids are on the CPU.
    return Loaded(model=model, config=model.config, input_device=CPU, devices=devices or (GPU,), world_size=world_size)


def _workspace(plan: Plan) -> Workspace:
    return Workspace(tokens_requested=plan.tokens, tokens_granted=plan.tokens, workspace_bytes=1)


def _choose(
    loaded: Loaded, requested: str, prepare: Callable[[Plan], Workspace | None] = _workspace, dtype: str = "float16"
) -> Choice:
    with graph_trial.chosen(
        loaded, _requests(), _BATCH_SIZE, requested=requested, dtype=dtype, prepare=prepare
    ) as choice:
        return choice


def _padded(choice: Choice) -> bool:
    widths = {batch.width for batch in choice.plan.batches}
    return widths == {32, 36}


@pytest.mark.parametrize(
    ("requested", "devices"),
    [("off", (GPU,)), ("auto", (CPU,)), ("auto", _TWO_GPUS), ("on", (CPU,)), ("on", _TWO_GPUS)],
)
def test_excluded_graphs_are_not_tried(
    model: Any, gpu: _Gpu, requested: str, devices: tuple[torch.device, ...]
) -> None:
    """Nothing is timed, and rows are padded no further than a batch needs; `on` is no error."""
    choice = _choose(_loaded(model, *devices), requested)
    assert choice.decision.reason == "excluded"
    assert choice.decision.detail == (cuda_graphs.reason_against(model, devices) or "CUDA graphs are switched off")
    assert gpu.perf_counter() == 0.0
    assert choice.plan.sha256 == scoring.plan(_requests(), _BATCH_SIZE).sha256
    assert choice.workspace == _workspace(choice.plan)


@pytest.mark.parametrize("requested", ["auto", "on"])
@pytest.mark.usefixtures("gpu")
def test_a_forward_that_keeps_a_cache_is_not_recorded(model: Any, requested: str) -> None:
    """Scoring as the harness excludes CUDA graphs, and the reason names the option."""
    with graph_trial.chosen(
        _loaded(model),
        _requests(),
        _BATCH_SIZE,
        requested=requested,
        dtype="float16",
        prepare=_workspace,
        workload=logits.FULL_LOGITS,
    ) as choice:
        pass
    assert choice.decision.reason == "excluded"
    assert "--llmgpu-scoring=harness" in choice.decision.detail
    assert choice.plan.sha256 == scoring.plan(_requests(), _BATCH_SIZE).sha256


def test_requested_graphs_are_not_tried_first(model: Any, gpu: _Gpu) -> None:
    """`on` uses CUDA graphs at any cost, until the case ends."""
    gpu.capturing_s, gpu.computing_s = 1000.0, 1000.0
    prepared: list[Plan] = []

    def prepare(plan: Plan) -> None:
        assert not gpu.replays(), "a graph keeps the address of the workspace"
        prepared.append(plan)

    with graph_trial.chosen(
        _loaded(model), _requests(), _BATCH_SIZE, requested="on", dtype="float16", prepare=prepare
    ) as choice:
        assert gpu.replays()
    assert not gpu.replays()
    assert choice.decision == Decision(reason="requested")
    assert _padded(choice)
    assert prepared == [choice.plan]


def test_graphs_that_are_worth_it_are_chosen(model: Any, gpu: _Gpu) -> None:
    """9 batches save 8 ms each, more than 3 recordings of 20 ms take."""
    loaded, prepared = _loaded(model), list[int]()

    def prepare(plan: Plan) -> Workspace:
        prepared.append(plan.tokens)
        return _workspace(plan)

    with graph_trial.chosen(
        loaded, _requests(), _BATCH_SIZE, requested="auto", dtype="float16", prepare=prepare
    ) as choice:
        assert gpu.replays()
    assert not gpu.replays()
    assert (choice.decision.reason, choice.decision.execution) == ("worth_it", "cuda_graphs")
    compared = choice.decision.comparison
    assert compared is not None
    assert (compared.graph_s, compared.eager_s, compared.capture_s) == pytest.approx((0.002, 0.010, 0.020))
    assert (compared.shapes, compared.batches) == (3, 9)
    assert compared.saved_s == pytest.approx(9 * 0.008)
    assert _padded(choice)
    assert prepared == [36], "padded rows are no longer than the longest row"
    assert choice.workspace == _workspace(choice.plan)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"computing_s": 0.021}, "gpu_bound"),
        ({"capturing_s": 0.025}, "not_worth_it"),
        ({"error": 0.5}, "answers_differ"),
        ({"failure": RuntimeError("operation not permitted when stream is capturing\nmore")}, "not_recordable"),
        ({"failure": ValueError("log-likelihood nan")}, "not_finite"),
    ],
)
def test_rejected_graphs_leave_the_case_as_without_a_trial(
    model: Any, gpu: _Gpu, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    """The case has its own batches, its own workspace, and a reset of the memory before it."""
    for name, value in changes.items():
        setattr(gpu, name, value)
    events: list[str] = []
    monkeypatch.setattr(device_memory, "reset", lambda _devices: events.append("reset"))

    def prepare(plan: Plan) -> Workspace:
        events.append(f"{plan.tokens}")
        return _workspace(plan)

    choice = _choose(_loaded(model), "auto", prepare)
    assert (choice.decision.reason, choice.decision.execution) == (reason, "eager")
    assert choice.plan.sha256 == scoring.plan(_requests(), _BATCH_SIZE).sha256
    assert choice.workspace == _workspace(choice.plan)
    assert events == ["36", "reset"]
    assert not gpu.replays()


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "eager"), ("bfloat16", "cuda_graphs")])
def test_the_tolerance_of_log_likelihoods_depends_on_the_dtype(
    model: Any, gpu: _Gpu, dtype: str, expected: str
) -> None:
    """A difference of 1 % is rounding in bfloat16 and an error in float32."""
    gpu.error = 1e-2
    assert _choose(_loaded(model), "auto", dtype=dtype).decision.execution == expected


def test_graphs_are_not_tried_without_free_memory(model: Any, gpu: _Gpu) -> None:
    """A trial that runs out of memory on one of several ranks would end a case that fits eagerly."""
    gpu.peak_bytes = 148 << 20
    assert _choose(_loaded(model), "auto").decision.reason == "worth_it"
    gpu.peak_bytes = 149 << 20
    decision = _choose(_loaded(model), "auto").decision
    assert decision == Decision(reason="memory_short", missing_bytes=3 << 20)


@pytest.mark.usefixtures("gpu")
def test_a_workspace_that_does_not_fit_is_an_error_of_the_case(model: Any) -> None:
    """The error of the strategy reaches the caller."""

    def prepare(plan: Plan) -> None:
        raise WorkspaceError(plan.tokens, 0)

    with pytest.raises(WorkspaceError):
        _choose(_loaded(model), "auto", prepare)


@pytest.mark.parametrize("first", [True, False])
def test_all_ranks_do_as_the_first_one(model: Any, gpu: _Gpu, monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """A rank with other figures follows the first one: it would else wait for ever in a collective."""
    gpu.capturing_s = 1000.0 if first else 0.0
    own: list[bool] = []

    def broadcast(answer: torch.Tensor, src: int) -> None:
        assert src == 0
        own.append(bool(answer))
        # The ranks differ in the third question only: whether the time saved exceeds the time to record.
        answer.fill_(first if len(own) == 3 else bool(answer))

    _on_cpu(monkeypatch)
    monkeypatch.setattr(distributed, "broadcast", broadcast)
    monkeypatch.setattr(distributed, "all_reduce", lambda _value, op: None)  # noqa: ARG005 - called by name
    choice = _choose(_loaded(model, world_size=2), "auto")
    assert own == [False, True, not first]
    assert choice.decision.reason == ("worth_it" if first else "not_worth_it")


@pytest.mark.usefixtures("gpu")
def test_memory_that_one_rank_lacks_keeps_all_ranks_from_a_trial(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest shortage of any rank decides."""

    def all_reduce(value: torch.Tensor, op: Any) -> None:
        assert op == distributed.ReduceOp.MAX
        if float(value) <= 0.0:
            value.fill_(5.0 * 2**20)

    _on_cpu(monkeypatch)
    monkeypatch.setattr(distributed, "broadcast", lambda _answer, src: None)  # noqa: ARG005 - called by name
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    choice = _choose(_loaded(model, world_size=2), "auto")
    assert choice.decision == Decision(reason="memory_short", missing_bytes=5 << 20)


def test_graphs_end_with_a_case_that_fails(model: Any, gpu: _Gpu) -> None:
    """The next case finds the model without graphs."""

    def fail() -> None:
        with graph_trial.chosen(
            _loaded(model), _requests(), _BATCH_SIZE, requested="auto", dtype="float16", prepare=_workspace
        ) as choice:
            assert choice.decision.execution == "cuda_graphs"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not gpu.replays()


def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the tensors that ranks exchange on the CPU."""
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, **named: make(data, **{**named, "device": CPU}))


def test_out_of_memory_on_one_of_several_ranks_ends_the_case(
    model: Any, gpu: _Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks may wait in a collective; a single rank continues eagerly."""
    gpu.failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
    assert _choose(_loaded(model), "auto").decision.reason == "not_recordable"
    _on_cpu(monkeypatch)
    monkeypatch.setattr(distributed, "broadcast", lambda _answer, src: None)  # noqa: ARG005 - called by name
    monkeypatch.setattr(distributed, "all_reduce", lambda _value, op: None)  # noqa: ARG005 - called by name
    with pytest.raises(torch.OutOfMemoryError):
        _choose(_loaded(model, world_size=2), "auto")


def test_each_decision_is_described_with_its_figures(prose: Prose) -> None:
    """The sentence of each decision has the cause or the figures that decided."""
    compared = Comparison(eager_s=0.01, graph_s=0.002, capture_s=0.02, shapes=3, batches=9, difference=1e-4)
    decisions = [
        Decision(reason="requested"),
        Decision(reason="excluded", detail="CUDA graphs need a GPU"),
        Decision(reason="gpu_bound", launching_s=0.01, forward_s=0.021),
        Decision(reason="memory_short", missing_bytes=3 << 20),
        Decision(reason="not_recordable", detail="operation not permitted when stream is capturing"),
        Decision(reason="not_finite", detail="log-likelihood nan"),
        *(Decision(reason=reason, comparison=compared) for reason in _COMPARED),
    ]
    assert {decision.reason for decision in decisions} == set(get_args(Reason))
    assert prose == "\n".join(describe(decision) for decision in decisions)


_COMPARED: tuple[Reason, ...] = ("answers_differ", "not_worth_it", "worth_it")
