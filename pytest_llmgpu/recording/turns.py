"""Work passes in a worker of an engine: those of `work`, one batch at a time (torch, in a worker).

A worker runs what its engine sends it, and no function of this package can call the engine there. So the passes run in
a thread of their own up to the place where they need a batch; then the rank lets the engine run it, in the main thread
of every worker, and lets the passes go on.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from pytest_llmgpu.inference.batching import Batch, Plan
from pytest_llmgpu.recording import work
from pytest_llmgpu.recording.work import Program, WorkReply

if TYPE_CHECKING:
    import torch

_LATEST: list[WorkReply] = []
_ARRIVED: SimpleQueue[int | WorkReply | Exception] = SimpleQueue()
"""The number of the batch that the passes wait for, or what they ended with."""
_RUN: SimpleQueue[None] = SimpleQueue()
"""Something for each batch that was run."""


def start(
    device: torch.device,
    plan: Plan,
    trace: str | None,
    *,
    dispatched: bool = True,
    eager: bool = False,
    whole_texts: bool = False,
) -> int | WorkReply:
    """Start the passes of `work.record`, or then of `work.measure`; the arguments are theirs.

    Return the number of the batch that every worker must run now, or the reply.
    """
    import torch

    program, numbers = Program((device,), dispatched), {id(batch): number for number, batch in enumerate(plan.batches)}
    trace = trace and trace.replace("-rank0-", f"-rank{torch.distributed.get_rank()}-")

    def forward(batch: Batch) -> None:
        _ARRIVED.put(numbers[id(batch)])
        _RUN.get()

    def on_batch(*_: float) -> None:
        """Report no progress: the rank does, which lets the engine run the batch."""

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # it is one of each thread
            if eager:
                reply = work.measure(program, plan, _LATEST.pop(), forward, on_batch=on_batch, trace=trace)
            else:
                reply = work.record(program, plan, forward, on_batch=on_batch, whole_texts=whole_texts, trace=trace)
                _LATEST[:] = [reply]
            _ARRIVED.put(reply)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            _ARRIVED.put(error)

    Thread(target=run, daemon=True).start()
    return _next()


def go_on(device: torch.device) -> int | WorkReply:  # noqa: ARG001 - as every function for a worker
    """Go on after a batch; returns as `start` does."""
    _RUN.put(None)
    return _next()


def _next() -> int | WorkReply:
    if isinstance(found := _ARRIVED.get(), Exception):
        raise found
    return found
