from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny_model

from pytest_llmgpu.inference import cuda_graphs
from pytest_llmgpu.inference.cuda_graphs import GraphedDecoder

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class _Recorded:
    """A graph that computes its answer where it is replayed."""

    def __init__(self, decoder: GraphedDecoder, ids_BS: torch.Tensor, hidden_BSH: torch.Tensor) -> None:
        self._decoder, self._ids_BS, self._hidden_BSH = decoder, ids_BS, hidden_BSH

    def replay(self) -> None:
        hidden_BSH = self._decoder._eager(input_ids=self._ids_BS, use_cache=False).last_hidden_state
        self._hidden_BSH.copy_(hidden_BSH)


@pytest.fixture
def model() -> Any:
    """Return a random LLaMA of one layer."""
    return tiny_model.random_model()


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes that were recorded; what is recorded here computes on the CPU."""
    shapes: list[tuple[int, int]] = []

    def record(decoder: GraphedDecoder, input_ids: torch.Tensor, _others: dict[str, Any]) -> None:
        rows, width = input_ids.shape
        ids_BS, hidden_BSH = torch.zeros_like(input_ids), torch.zeros(rows, width, 32)
        graph: Any = _Recorded(decoder, ids_BS, hidden_BSH)
        decoder._graphs[rows, width] = graph, ids_BS, hidden_BSH
        shapes.append((rows, width))

    monkeypatch.setattr(GraphedDecoder, "_record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return shapes


def _ids(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 40, (rows, width), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def _logits(model: Any, ids_BS: torch.Tensor, **named: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids_BS, **{"use_cache": False, **named}).logits
    return logits


def test_where_graphs_cannot_be_recorded_there_is_a_reason(model: Any) -> None:
    """A CPU, several devices per process, and a model without a separate decoder are refused with the reason."""
    assert cuda_graphs.reason_against(model, (GPU,)) is None
    assert cuda_graphs.reason_against(model, (CPU,)) == "CUDA graphs need a GPU"
    several = cuda_graphs.reason_against(model, (GPU, torch.device("cuda", 1)))
    assert several is not None
    assert several.startswith("one process uses several GPUs")
    without = cuda_graphs.reason_against(torch.nn.Linear(1, 1), (GPU,))
    assert without == "Linear has no decoder separate from its output head"
    model.get_decoder = lambda: model
    assert cuda_graphs.reason_against(model, (GPU,)) == "LlamaForCausalLM has no decoder separate from its output head"


def test_each_shape_is_recorded_once_and_replayed_with_the_ids_of_the_batch(
    model: Any, recordings: list[tuple[int, int]]
) -> None:
    """A batch of a recorded shape gets its own result."""
    batches = [_ids(2, 16), _ids(2, 16, seed=1), _ids(1, 16), _ids(2, 16, seed=2)]
    expected = [_logits(model, ids_BS) for ids_BS in batches]
    with GraphedDecoder(model, CPU):
        found = [_logits(model, ids_BS) for ids_BS in batches]
    assert recordings == [(2, 16), (1, 16)]
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one, right, atol=0, rtol=0)


@pytest.mark.parametrize(
    "named",
    [
        {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])},
        {"position_ids": torch.tensor([[3, 4, 5, 7], [0, 1, 2, 3]])},
        {"use_cache": True},
    ],
    ids=["mask", "positions", "cache"],
)
def test_what_a_recording_does_not_know_runs_eagerly(
    model: Any, recordings: list[tuple[int, int]], named: dict[str, Any]
) -> None:
    """A forward with further arguments runs eagerly."""
    ids_BS = _ids(2, 4)
    expected = _logits(model, ids_BS, **named)
    with GraphedDecoder(model, CPU):
        found = [_logits(model, ids_BS, **named)]
        assert recordings == []
        _logits(model, ids_BS)
        assert recordings == [(2, 4)]
        found.append(_logits(model, ids_BS, **named))
    for one in found:
        torch.testing.assert_close(one, expected, atol=0, rtol=0)


def test_embeddings_run_eagerly(model: Any, recordings: list[tuple[int, int]]) -> None:
    """A forward without input ids runs eagerly."""
    embedded_BSH = torch.zeros(1, 4, 32)
    with GraphedDecoder(model, CPU), torch.inference_mode():
        model(inputs_embeds=embedded_BSH, use_cache=False)
    assert recordings == []


def test_nothing_is_recorded_inside_another_recording(
    model: Any, recordings: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a user records the whole model, the decoder runs eagerly."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with GraphedDecoder(model, CPU):
        _logits(model, _ids(1, 4))
    assert recordings == []


def test_suspended_and_left_it_is_the_model_as_it_was(model: Any, recordings: list[tuple[int, int]]) -> None:
    """Forwards are eager while suspended and after the exit, also after a failure, and no graph is kept."""
    decoder = GraphedDecoder(model, CPU)

    def fail() -> None:
        with decoder:
            with decoder.suspended():
                _logits(model, _ids(1, 4))
            assert recordings == []
            _logits(model, _ids(1, 4))
            assert recordings == [(1, 4)]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    _logits(model, _ids(2, 4))
    assert recordings == [(1, 4)]
    assert decoder._graphs == {}
    assert decoder._hidden is None
