"""How the forwards of a case are run, eagerly or as CUDA graphs: decided once, before anything is measured.

With `auto` graphs are taken where they give the same answers, save more time over the case than recording them costs,
and the GPU waits for the CPU at all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from pytest_llmgpu.inference import cuda_graphs, logits, scoring
from pytest_llmgpu.inference.batching import Batch, Plan, Requests, plan
from pytest_llmgpu.ranks import device_memory
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, typical_difference
from pytest_llmgpu.strategies.protocol import Loaded, Workspace

__all__ = ["Choice", "Prepare", "chosen"]

Prepare = Callable[[Plan], Workspace | None]
"""Makes room for the rows and tokens of a plan."""

_TRIALS = 3
_WAITING = 0.5
"""Launching takes less than so much of a forward only where the GPU, not the CPU, is what it waits for."""

_OF_FORWARDS = 3
_OF_GRAPHS_BYTES = 256 << 20
"""What must be free beside the weights to try graphs: so many times what an eager forward of the median batch takes,
for the longest batch in the pool of the graphs and eagerly; and what the graphs themselves and their streams take."""


class Choice(msgspec.Struct, frozen=True):
    """What was chosen for a case."""

    execution: str
    """`eager` or `cuda_graphs`."""
    why: str
    """In a sentence, with the figures that decided."""
    plan: Plan
    """The batches, padded as it needs them."""
    workspace: Workspace | None
    """What the strategy set aside for them."""


@contextmanager
def chosen(
    loaded: Loaded,
    requests: Requests,
    batch_size: int,
    *,
    requested: str,
    dtype: str,
    prepare: Prepare,
    workload: str = logits.LEAN,
) -> Iterator[Choice]:
    """While entered, forwards run as is best.

    Args:
        loaded: The model.
        requests: What will be scored.
        batch_size: Sequences per forward.
        requested: `auto`, `on` (where they can be recorded) or `off`.
        dtype: Of the model, which decides how equal answers must be.
        prepare: Called once, before anything runs.
        workload: One of `logits.WORKLOADS`.
    """
    against = (
        cuda_graphs.reason_against(loaded.model, loaded.devices) if loaded.recordable else "the strategy forbids them"
    )
    if workload == logits.FULL_LOGITS:
        against = "--llmgpu-scoring=harness keeps a KV cache, which a recorded forward does not"
    if requested == "on" and not against:
        graphed = plan(requests, batch_size, multiple=cuda_graphs.MULTIPLE)
        workspace = prepare(graphed)
        with cuda_graphs.GraphedDecoder(loaded.model, loaded.devices[0]):
            yield Choice("cuda_graphs", "CUDA graphs were asked for", graphed, workspace)
        return
    eager = plan(requests, batch_size)
    workspace = prepare(eager)
    if requested == "off" or against:
        yield Choice("eager", f"no CUDA graphs: {against or 'they were switched off'}", eager, workspace)
        return
    against = _gpu_is_busy(loaded, eager) or _no_room(loaded)
    if against is None:
        # Padded, but no longer than the longest sequence: what was set aside does for both.
        graphed = plan(requests, batch_size, multiple=cuda_graphs.MULTIPLE)
        with cuda_graphs.GraphedDecoder(loaded.model, loaded.devices[0]) as decoder:
            against, in_favour = _tried(loaded, eager, graphed, decoder, dtype)
            if against is None:
                yield Choice("cuda_graphs", in_favour, graphed, workspace)
                return
    # What was run to decide is not the case's.
    device_memory.reset(loaded.devices)
    yield Choice("eager", against, eager, workspace)


def _gpu_is_busy(loaded: Loaded, eager: Plan) -> str | None:
    """Return why graphs cannot help: the GPU, not the CPU, is what a forward waits for; None where they may."""
    import torch

    batch = eager.batches[len(eager.batches) // 2]
    ids_BS = batch.packed[: batch.rows * batch.width].view(batch.rows, batch.width).to(loaded.input_device)
    decoder: Any = loaded.model.get_decoder()  # type: ignore[operator]  # `graphs.reason_against` has seen it
    launching_s, done_s = [], []
    with torch.inference_mode():
        for _ in range(1 + _TRIALS):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            decoder(input_ids=ids_BS, use_cache=False)
            launching_s.append(time.perf_counter() - began_s)
            torch.cuda.synchronize()
            done_s.append(time.perf_counter() - began_s)
    # Of the slowest rank: the others wait for its part of every layer.
    launching, done = _largest(loaded, statistics.median(launching_s[1:])), statistics.median(done_s[1:])
    if _agree(loaded, launching < _WAITING * done):
        return f"eager: the GPU is the bottleneck, kernels are launched in {_ms(launching)} of {_ms(done)}"
    return None


def _no_room(loaded: Loaded) -> str | None:
    """Return why graphs are not even tried: several ranks that run out of memory in the trial cannot be led back.

    The forwards of `_gpu_is_busy` have shown what one takes.
    """
    held, most = device_memory.allocated(loaded.devices), device_memory.peaks(loaded.devices)
    missing = [
        _OF_FORWARDS * ((peak or 0) - (now or 0)) + _OF_GRAPHS_BYTES - spare
        for now, peak, spare in zip(held, most, device_memory.spare(loaded.devices), strict=True)
    ]
    if (short := _largest(loaded, float(max(missing)))) > 0:
        return f"eager: {short / 2**20:,.0f} MiB too little is free to try CUDA graphs"
    return None


def _tried(
    loaded: Loaded, eager: Plan, graphed: Plan, decoder: cuda_graphs.GraphedDecoder, dtype: str
) -> tuple[str | None, str]:
    """Return what `_compare` does, and as a reason against graphs that a forward cannot be recorded."""
    try:
        return _compare(loaded, eager, graphed, decoder, dtype)
    except RuntimeError as error:
        if loaded.world_size > 1:
            raise  # the siblings may have got further, and wait: the group hears of it and ends them
        return f"eager: its forwards cannot be recorded: {str(error).splitlines()[0]}", ""


def _compare(
    loaded: Loaded, eager: Plan, graphed: Plan, decoder: cuda_graphs.GraphedDecoder, dtype: str
) -> tuple[str | None, str]:
    """Return why graphs are not worth it, None where they are, and what speaks for them."""
    number = len(eager.batches) // 2
    with decoder.suspended():
        eager_s, expected = _time(loaded, eager.batches[number])
    try:
        graph_s, found = _time(loaded, graphed.batches[number])
    except ValueError as error:  # not finite, on every rank alike
        return f"eager: as a CUDA graph, {error}", ""
    capture_s = statistics.median(decoder.capture_s)
    shapes = len({(batch.rows, batch.width) for batch in graphed.batches})
    # Of all together: a single one near 0 may differ by more from rounding alone.
    difference = typical_difference(found, expected)
    saved_s = (eager_s - graph_s) * len(eager.batches)
    figures = (
        f"a batch takes {_ms(graph_s)} as a graph and {_ms(eager_s)} eagerly, {shapes} recordings {_ms(capture_s)} each"
    )
    if not _agree(loaded, difference <= LOGLIKELIHOOD_TOLERANCES[dtype]):
        return f"eager: as a CUDA graph, log-likelihoods differ by {difference:.1e}", ""
    if not _agree(loaded, saved_s > shapes * capture_s):
        return f"eager: CUDA graphs would not pay for themselves over {len(eager.batches)} batches: {figures}", ""
    return None, f"CUDA graphs: {figures}; log-likelihoods within {difference:.1e}"


def _time(loaded: Loaded, batch: Batch) -> tuple[float, list[float]]:
    """Return the median latency of a batch once it has run, and its log-likelihoods."""
    latencies_s: list[float] = []
    answers: dict[int, float] = {}
    for _ in range(1 + _TRIALS):
        columns, answers = scoring.run(loaded.model, [batch], input_device=loaded.input_device, devices=loaded.devices)
        latencies_s += columns.latency_s
    return statistics.median(latencies_s[1:]), [answers[number] for number in sorted(answers)]


def _agree(loaded: Loaded, yes: bool) -> bool:
    """Return what the first rank says: ranks that decide for themselves would wait for each other in a collective."""
    if loaded.world_size == 1:
        return yes
    import torch
    from torch import distributed

    said = torch.tensor([int(yes)], device=loaded.devices[0])
    distributed.broadcast(said, src=0)
    return bool(said.item())


def _largest(loaded: Loaded, value: float) -> float:
    """Return the largest value of any rank."""
    if loaded.world_size == 1:
        return value
    import torch
    from torch import distributed

    told = torch.tensor([value], dtype=torch.float64, device=loaded.devices[0])
    distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
    return float(told.item())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
