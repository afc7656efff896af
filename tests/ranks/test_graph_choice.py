from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
import pytest
import torch
from support import tiny_model
from support.prose import Prose
from support.report_factory import known, make_case
from support.request_factory import make_requests

from pytest_llmgpu.inference import batching, cuda_graphs, scoring
from pytest_llmgpu.inference.batching import Requests
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.ranks import graph_choice, memory, worker
from pytest_llmgpu.ranks.graph_choice import Decision, Reason
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import Loaded, Workspace

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_TWO_GPUS = (GPU, torch.device("cuda", 1))
_BATCH_SIZE = 2


@dataclass
class _Graphs:
    """CUDA graphs without a GPU: what they replay differs from an eager forward by a factor."""

    factor: float = 1.0
    entered: list[bool] = field(default_factory=list)
    _replaying: bool = False

    @contextmanager
    def decoder(self, model: Any, device: torch.device) -> Iterator[_Graphs]:
        """Stand for `cuda_graphs.GraphedDecoder`."""
        assert device == GPU
        handle = model.get_decoder().register_forward_hook(self._change)
        self.entered.append(True)
        self._replaying = True
        try:
            yield self
        finally:
            handle.remove()
            self.entered.append(False)

    def _change(self, _module: Any, _inputs: Any, out: Any) -> None:
        out.last_hidden_state *= self.factor if self._replaying else 1.0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self._replaying = False
        yield
        self._replaying = True


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> _Graphs:
    """What stands for CUDA graphs in this test."""
    made = _Graphs()
    monkeypatch.setattr(worker, "GraphedDecoder", made.decoder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: None)
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    """A random one-layer LLaMA."""
    return tiny_model.random_model()


def _requests(longest: int = 37) -> Requests:
    rows = [tuple((7 * row + place) % 40 for place in range(longest - row)) for row in range(17)]
    return make_requests([(row, 2) for row in rows], max_length=10_000)


def _loaded(model: Any, *devices: torch.device, **fields: Any) -> Loaded:
    # The model and its ids are on the CPU.
    return Loaded(model=model, config=model.config, input_device=CPU, devices=devices or (GPU,), **fields)


def _decide(loaded: Loaded, requested: str = "auto", **named: Any) -> Decision:
    return graph_choice.decide(loaded, named.pop("requests", _requests()), _BATCH_SIZE, requested=requested, **named)


@pytest.mark.parametrize("option", ["auto", "on"])
@pytest.mark.parametrize(
    ("devices", "fields", "logits", "reason"),
    [
        ((CPU,), {}, scoring.LEAN, None),
        (_TWO_GPUS, {}, scoring.LEAN, None),
        ((GPU,), {"recordable": False}, scoring.LEAN, "the strategy forbids CUDA graphs"),
        ((GPU,), {}, scoring.HARNESS, "--llmgpu-scoring=harness keeps a KV cache, which a CUDA graph does not"),
    ],
)
def test_excluded_graphs_are_named(
    model: Any, option: str, devices: tuple[torch.device, ...], fields: dict[str, Any], logits: str, reason: str | None
) -> None:
    """`on` is no error. On GPUs the batches have few shapes; on a CPU, or with a cache, rows are not padded further."""
    decision = _decide(_loaded(model, *devices, **fields), option, logits=logits)
    assert (decision.reason, decision.execution) == ("excluded", "eager")
    assert decision.detail == (reason or cuda_graphs.reason_against(model, devices))
    few = devices != (CPU,) and logits == scoring.LEAN
    assert decision.plan.sha256 == batching.plan(_requests(), _BATCH_SIZE, few_shapes=few).sha256
    assert (decision.padding > 0) == few
    off = _decide(_loaded(model), "off")
    assert (off.reason, off.detail) == ("excluded", "CUDA graphs are switched off")


@pytest.mark.parametrize(("most", "reason"), [(71, "large"), (72, "small"), (73, "small")])
def test_the_largest_forward_decides(model: Any, monkeypatch: pytest.MonkeyPatch, most: int, reason: str) -> None:
    """Above the limit the case runs eagerly without padding, which costs time there, unless graphs are requested."""
    monkeypatch.setattr(cuda_graphs, "MOST_TOKENS", most)
    decision = _decide(_loaded(model))
    assert (decision.reason, decision.execution) == (reason, "eager" if reason == "large" else "cuda_graphs")
    requested = _decide(_loaded(model), "on")
    assert (requested.reason, requested.execution) == ("requested", "cuda_graphs")
    few = batching.plan(_requests(), _BATCH_SIZE, few_shapes=True)
    own = batching.plan(_requests(), _BATCH_SIZE)
    assert requested.plan.sha256 == few.sha256 != own.sha256
    assert decision.plan.sha256 == (own if reason == "large" else few).sha256
    eager = _decide(_loaded(model), "off"), _decide(_loaded(model, *_TWO_GPUS))
    assert [(other.execution, other.plan.sha256) for other in eager] == [("eager", decision.plan.sha256)] * 2
    assert 0 < requested.padding <= 0.02


def test_the_limit_is_8192_tokens(model: Any) -> None:
    """This is what README and `--help` promise."""
    assert _decide(_loaded(model), requests=_requests(4097)).reason == "small"
    assert _decide(_loaded(model), requests=_requests(4098)).reason == "large"


@pytest.mark.parametrize("requested", ["auto", "on"])
def test_what_could_not_be_recorded_runs_eagerly(model: Any, requested: str) -> None:
    """The decision names the operation, and the batches are those that were to be recorded."""
    decision = _decide(_loaded(model), requested, not_recorded="`x.item()` (gate.py, line 3): not permitted")
    assert (decision.reason, decision.execution) == ("not_recorded", "eager")
    assert "x.item()" in graph_choice.describe(decision)
    assert decision.plan.sha256 == batching.plan(_requests(), _BATCH_SIZE, few_shapes=True).sha256


@pytest.fixture
def state(model: Any, graphs: _Graphs, monkeypatch: pytest.MonkeyPatch) -> RankState:
    """A rank with a loaded model that is said to be on a GPU, and a dataset."""
    assert graphs.entered == []
    monkeypatch.setattr(memory, "reset", lambda _devices: None)
    monkeypatch.setattr(memory, "since_reset", lambda *_: [])
    found = RankState(lambda _: None)
    found.case = make_case(batch_size=_BATCH_SIZE, dtype="float32", device="cuda", devices=1, dataset_sha256="data")
    found.source = object()  # type: ignore[assignment]  # the requests below need no tokenizer
    found.strategy = LayerParallel()
    found.loaded, found.devices = _loaded(model), (GPU,)
    found.datasets["data"] = HellaSwag(), ()
    found.requests["data", None, None] = _requests()
    return found


def _warm_up(state: RankState, not_recorded: str | None = None) -> None:
    worker.reset(state)
    worker.warm_up(state, state.case, not_recorded)


def test_graphs_stay_from_the_warm_up_to_the_first_eager_pass(state: RankState, graphs: _Graphs) -> None:
    """Work passes in the execution of the case replay them; counting traffic and user functions run eagerly."""
    _warm_up(state, "`x.item()` cannot be recorded")
    assert (graphs.entered, state.decision.detail) == ([], "`x.item()` cannot be recorded")
    _warm_up(state)
    assert graphs.entered == [True]
    worker.call(state, lambda _: None, ())
    assert graphs.entered == [True, False]
    _warm_up(state)
    _warm_up(state)
    assert graphs.entered == [True, False, True, False, True]
    worker.account(state)
    assert graphs.entered[-1] is False


@pytest.mark.parametrize(
    ("dtype", "factor", "fits"), [("float32", 1.0, True), ("float32", 0.99, False), ("bfloat16", 0.99, True)]
)
def test_a_replay_that_differs_fails(state: RankState, graphs: _Graphs, dtype: str, factor: float, fits: bool) -> None:
    """A difference of about 1 % is rounding in bfloat16 and an error of the case in float32; no graph stays behind."""
    graphs.factor = factor
    state.case = msgspec.structs.replace(state.case, dtype=dtype)
    if fits:
        _warm_up(state)
        return
    with pytest.raises(ValueError, match=r"batch 5 .* differ by .* float32 allows 0.001 %.*--llmgpu-cuda-graphs=off"):
        _warm_up(state)
    assert graphs.entered == [True, False]


def test_a_workspace_precedes_the_recording(state: RankState, graphs: _Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs keep its address; the launch has its tokens."""
    granted: list[tuple[int, int]] = []

    def prepare(_self: Any, _loaded: Loaded, batch_size: int, tokens: int) -> Workspace:
        assert graphs.entered == []
        granted.append((batch_size, tokens))
        return Workspace(tokens_requested=tokens, tokens_granted=tokens - 1, workspace_bytes=1)

    monkeypatch.setattr(LayerParallel, "prepare", prepare)
    _warm_up(state)
    assert granted == [(2, 36)]
    launch = known(state.launch)
    assert (launch.tokens_requested, launch.tokens_granted) == (36, 35)
    state.graphs.close()


def test_each_decision_is_described_with_its_figures(prose: Prose) -> None:
    """The sentence of each decision has the cause or the figures that decided."""
    own = batching.plan(_requests(), _BATCH_SIZE)
    few = batching.plan(_requests(), _BATCH_SIZE, few_shapes=True)
    decisions = [
        Decision(reason="requested", plan=few, padding=0.012),
        Decision(reason="small", plan=few, padding=0.012),
        Decision(reason="excluded", plan=own, detail="CUDA graphs need a GPU"),
        Decision(reason="large", plan=own),
        Decision(reason="not_recorded", plan=own, detail="`x.item()` (gate.py, line 3): operation not permitted"),
    ]
    assert {decision.reason for decision in decisions} == set(get_args(Reason))
    assert prose == "\n".join(graph_choice.describe(decision) for decision in decisions)
