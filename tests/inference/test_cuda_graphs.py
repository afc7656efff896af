from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny_model

from pytest_llmgpu.inference import cuda_graphs
from pytest_llmgpu.inference.cuda_graphs import GraphedDecoder, RecordingError

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

    def record(decoder: GraphedDecoder, input_ids: torch.Tensor, _others: dict[str, Any]) -> tuple[Any, ...]:
        rows, width = input_ids.shape
        ids_BS, hidden_BSH = torch.zeros_like(input_ids), torch.zeros(rows, width, 32)
        shapes.append((rows, width))
        return _Recorded(decoder, ids_BS, hidden_BSH), ids_BS, hidden_BSH

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
    assert decoder.shapes == []


class _Stream:
    def wait_stream(self, other: object) -> None:
        """Wait for nothing: all kernels run at once on a CPU."""


@contextmanager
def _capture(*_: Any, **__: Any) -> Iterator[None]:
    """Stand for `torch.cuda.graph`: after a failed operation its end fails too, without a name."""
    try:
        yield
    except Exception as error:
        raise RuntimeError("operation failed due to a previous error during capture") from error


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings run on the CPU."""
    for name, value in {
        "Stream": lambda _: _Stream(),
        "current_stream": lambda _: _Stream(),
        "stream": lambda _: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": _capture,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def _fail_at(model: Any, number: int, error: Exception) -> None:
    """Make a forward of the decoder fail, counted from 0: the second is the one that is recorded."""
    forwards = count()

    def hook(*_: object) -> None:
        if next(forwards) == number:
            raise error

    model.get_decoder().layers[0].register_forward_pre_hook(hook)


@pytest.mark.usefixtures("capturing")
def test_what_cannot_be_recorded_is_named(model: Any) -> None:
    """The message has the line of the operation and its own error, not that of the end of the recording."""
    _fail_at(model, 1, RuntimeError("operation not permitted when stream is capturing\nmore"))
    with GraphedDecoder(model, CPU), pytest.raises(RecordingError) as raised:
        _logits(model, _ids(1, 4))
    assert re.fullmatch(
        r"`raise error` \(test_cuda_graphs\.py, line \d+\): operation not permitted when stream is capturing",
        str(raised.value),
    )


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("number", [0, 1])
def test_out_of_memory_while_recording_keeps_its_cause(model: Any, number: int) -> None:
    """It is decided by the error of torch, whether the eager forward or the recording itself ran out."""
    _fail_at(model, number, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."))
    with GraphedDecoder(model, CPU), pytest.raises(RecordingError, match="Tried to allocate") as raised:
        _logits(model, _ids(1, 4))
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.usefixtures("capturing")
def test_an_error_of_the_model_itself_is_no_failed_recording(model: Any) -> None:
    """It would come eagerly as well."""
    _fail_at(model, 0, ValueError("the layer is broken"))
    with GraphedDecoder(model, CPU), pytest.raises(ValueError, match="the layer is broken"):
        _logits(model, _ids(1, 4))
