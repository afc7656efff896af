from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny_model

from pytest_llmgpu.inference import cuda_graphs
from pytest_llmgpu.inference.cuda_graphs import GraphedDecoder, Recorder, RecordingError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def model() -> Any:
    """Return a random LLaMA of one layer."""
    return tiny_model.random_model()


class _Stream:
    def __init__(self, _: torch.device) -> None: ...

    def wait_stream(self, other: object) -> None:
        """Wait for nothing: all kernels run at once on a CPU."""


@contextmanager
def _capture(*_: Any, **__: Any) -> Iterator[None]:
    """Stand for `torch.cuda.graph`: after a failed operation its end fails too, without a name."""
    try:
        yield
    except Exception as error:
        raise RuntimeError("operation failed due to a previous error during capture") from error


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Functions that were recorded; they run on the CPU when they are recorded and at each replay."""
    functions: list[Callable[[], object]] = []
    for name, value in {
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": SimpleNamespace,
        "graph": _capture,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    record = Recorder.record

    def record_and_keep(recorder: Recorder, run: Callable[[], object]) -> Any:
        graph: Any = record(recorder, run)
        functions.append(run)
        graph.replay = run
        return graph

    monkeypatch.setattr(Recorder, "record", record_and_keep)
    return functions


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
    assert "several GPUs" in str(cuda_graphs.reason_against(model, (GPU, torch.device("cuda", 1))))
    assert "Linear has no decoder" in str(cuda_graphs.reason_against(torch.nn.Linear(1, 1), (GPU,)))
    model.get_decoder = lambda: model
    assert "LlamaForCausalLM has no decoder" in str(cuda_graphs.reason_against(model, (GPU,)))


def test_each_shape_is_recorded_once_and_replayed_with_the_ids_of_the_batch(model: Any, recorded: list[Any]) -> None:
    """A batch of a recorded shape gets its own result, also after a larger batch than those before."""
    batches = [_ids(2, 16), _ids(2, 16, seed=1), _ids(1, 16), _ids(3, 16), _ids(2, 16, seed=2)]
    expected = [_logits(model, ids_BS) for ids_BS in batches]
    with GraphedDecoder(model, CPU) as decoder:
        found = [_logits(model, ids_BS) for ids_BS in batches]
        assert list(decoder.graphs) == [(2, 16), (1, 16), (3, 16)]
    assert len(recorded) == 3
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
def test_what_a_recording_does_not_know_runs_eagerly(model: Any, recorded: list[Any], named: dict[str, Any]) -> None:
    """A forward with further arguments runs eagerly, before and after its shape is recorded."""
    expected = _logits(model, _ids(2, 4), **named)
    with GraphedDecoder(model, CPU):
        for recordings in (0, 1):
            found = _logits(model, _ids(2, 4), **named)
            torch.testing.assert_close(found, expected, atol=0, rtol=0)
            assert len(recorded) == recordings
            _logits(model, _ids(2, 4))


def test_suspended_or_left_it_runs_eagerly(model: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards are eager, after the exit also after a failure, and no graph is kept."""
    with suppress(KeyError), GraphedDecoder(model, CPU) as decoder:
        with decoder.suspended():
            _logits(model, _ids(1, 4))
        with monkeypatch.context() as patched:  # a user records the whole model
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            _logits(model, _ids(1, 4))
        assert recorded == []
        _logits(model, _ids(1, 4))
        raise KeyError
    _logits(model, _ids(2, 4))
    assert (len(recorded), list(decoder.graphs)) == (1, [])


_CAPTURED = "operation not permitted when stream is capturing"
_OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


@pytest.mark.parametrize(
    ("forward", "error", "message"),
    [
        # The line of the operation and its own error, not that of the end of the recording.
        (1, RuntimeError(f"{_CAPTURED}\nmore"), rf"^`raise error` \(test_cuda_graphs\.py, line \d+\): {_CAPTURED}$"),
        (0, _OUT_OF_MEMORY, "Tried to allocate"),
        (1, _OUT_OF_MEMORY, "Tried to allocate"),
        # It would come eagerly as well.
        (0, ValueError("the layer is broken"), None),
    ],
    ids=["operation", "memory of the rehearsal", "memory of the recording", "model"],
)
def test_what_cannot_be_recorded_is_named(model: Any, forward: int, error: Exception, message: str | None) -> None:
    """The first forward of a shape is eager and the second is recorded; an error of the model is raised as it is."""
    forwards = count()

    def fail(*_: object) -> None:
        if next(forwards) == forward:
            raise error

    model.get_decoder().layers[0].register_forward_pre_hook(fail)
    with GraphedDecoder(model, CPU), pytest.raises((RecordingError, type(error)), match=message) as raised:
        _logits(model, _ids(1, 4))
    assert raised.value is error if message is None else raised.value.__cause__ is error
