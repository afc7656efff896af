"""Forwards of a decoder as CUDA graphs: recorded once per shape, then replayed by one launch instead of hundreds.

Below a batch size of about 16, a GPU waits for the CPU that launches its kernels; with tensor parallelism even more.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_llmgpu.report.text import first_line

if TYPE_CHECKING:
    import torch

    _Graph = tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]
    """A recorded forward, its input and its output."""

_T = TypeVar("_T")
MOST_TOKENS = 8192
"""With `auto`, forwards of more tokens, padding included, run eagerly: the GPU is the limit there."""


class RecordingError(RuntimeError):
    """A forward could not be recorded; the message names the operation, its line and the error."""


def reason_against(model: torch.nn.Module, devices: tuple[torch.device, ...]) -> str | None:
    """Return the reason why the forwards of a model cannot be recorded; None if they can."""
    if devices[0].type != "cuda":
        return "CUDA graphs need a GPU"
    if len(devices) > 1:
        return "one process uses several GPUs, and accelerate's copies between them cannot be recorded"
    decoder = getattr(model, "get_decoder", lambda: None)()
    if decoder is None or decoder is model:
        return f"{type(model).__name__} has no decoder separate from its output head"
    return None


class Recorder:
    """Records functions as CUDA graphs, which share one pool of memory: they must be replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs: cuBLAS keeps a workspace for each stream.
        self._stream = torch.cuda.Stream(device)

    def rehearse(self, run: Callable[[], _T]) -> _T:
        """Run a function once on another stream, before it is recorded, and return what it returns.

        Libraries plan and allocate at the first forward of a shape, which a graph must not record.
        """
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                result = run()
        except torch.OutOfMemoryError as error:  # Without the memory of the graphs the forward might have fitted.
            raise RecordingError(_described(error)) from error
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result

    def record(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return a function as a graph; nothing is computed before it is replayed."""
        import torch

        graph = torch.cuda.CUDAGraph()
        failed: Exception | None = None
        try:
            # Other threads, such as NCCL's watchdog, use CUDA during the recording.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    run()
                except Exception as error:
                    failed = error
                    raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            # After a failed operation the end of the recording fails, too, with an error that does not name it.
            cause = failed or error
            raise RecordingError(_described(cause)) from cause
        return graph


class GraphedDecoder:
    """A context manager in which the decoder (the model without its output head) records new shapes and replays others.

    The next replay overwrites the hidden states that a replay returned.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        import torch

        self._decoder = model.get_decoder()
        self._device = device
        self._recorder = Recorder(device)
        self.graphs: dict[tuple[int, int], _Graph] = {}
        """Rows and tokens per row to the graph of this shape."""
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._hidden: torch.Tensor | None = None

    def __enter__(self) -> GraphedDecoder:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._eager = self._decoder.forward
        self._decoder.forward = self._forward
        return self

    def __exit__(self, *_: object) -> None:
        self._decoder.forward = self._eager
        self.graphs.clear()
        self._hidden = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context manager in which forwards run eagerly."""
        self._decoder.forward = self._eager
        try:
            yield
        finally:
            self._decoder.forward = self._forward

    def _forward(self, input_ids: torch.Tensor | None = None, **others: Any) -> Any:
        import torch

        other_arguments = [name for name, value in others.items() if value is not None and name != "use_cache"]
        if input_ids is None or other_arguments or others.get("use_cache") or torch.cuda.is_current_stream_capturing():
            return self._eager(input_ids=input_ids, **others)
        shape = (input_ids.shape[0], input_ids.shape[1])
        if shape not in self.graphs:
            self.graphs[shape] = self._record(input_ids, others)
        graph, ids_BS, hidden_BSH = self.graphs[shape]
        ids_BS.copy_(input_ids)
        graph.replay()
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=hidden_BSH)

    def _record(self, input_ids: torch.Tensor, others: dict[str, Any]) -> _Graph:
        import torch

        rows, width = input_ids.shape
        if self._ids.numel() < input_ids.numel():
            self._ids = torch.empty(input_ids.numel(), dtype=torch.int64, device=self._device)
        ids_BS = self._ids[: input_ids.numel()].view(rows, width)
        ids_BS.copy_(input_ids)
        hidden_BSH = self._recorder.rehearse(lambda: self._eager(input_ids=ids_BS, **others).last_hidden_state)
        if self._hidden is None or self._hidden.numel() < hidden_BSH.numel():
            # One buffer for all shapes. Graphs that were recorded before keep their smaller one.
            self._hidden = torch.empty_like(hidden_BSH).flatten()
        out_BSH = self._hidden[: hidden_BSH.numel()].view(hidden_BSH.shape)
        del hidden_BSH
        graph = self._recorder.record(lambda: out_BSH.copy_(self._eager(input_ids=ids_BS, **others).last_hidden_state))
        return graph, ids_BS, out_BSH


def _described(error: Exception) -> str:
    """Return the innermost line outside of torch that an error passed through, with the message of the error."""
    import torch

    message = first_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    library = str(Path(torch.__file__).parent)
    frame = next((one for one in reversed(frames) if not one.filename.startswith(library)), frames[-1])
    return f"`{frame.line or frame.name}` ({Path(frame.filename).name}, line {frame.lineno}): {message}"
