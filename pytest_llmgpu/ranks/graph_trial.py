"""Choose how the forwards of a case run, eagerly or as CUDA graphs, before anything is measured.

With `auto`, CUDA graphs are chosen if the GPU waits for the CPU, the log-likelihoods stay the same, and the time saved
over the case exceeds the time that their recording takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from pytest_llmgpu.inference import cuda_graphs, logits, scoring
from pytest_llmgpu.inference.batching import Batch, Plan, Requests, plan
from pytest_llmgpu.ranks import device_memory
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, typical_difference
from pytest_llmgpu.report.text import MIB
from pytest_llmgpu.strategies.protocol import Loaded, Workspace

__all__ = ["Choice", "Comparison", "Decision", "Prepare", "chosen", "describe"]

Prepare = Callable[[Plan], Workspace | None]
"""Reserves the workspace for the rows and tokens of a plan."""

_TRIALS = 3
_MOST_LAUNCHING = 0.5
"""If launching takes at least this fraction of a forward, the GPU waits for the CPU."""

_EAGER_FORWARDS = 3
_GRAPH_BYTES = 256 * MIB
"""A trial of CUDA graphs needs this much free memory: the longest batch once in the pool of the graphs and once
eagerly, estimated as three times the memory of an eager forward of the median batch; and the graphs themselves."""

Reason = Literal[
    "requested",
    "excluded",
    "gpu_bound",
    "memory_short",
    "not_recordable",
    "not_finite",
    "answers_differ",
    "not_worth_it",
    "worth_it",
]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The median batch of a case, run eagerly and as a CUDA graph."""

    eager_s: float
    """The eager batch takes this many seconds."""
    graph_s: float
    """The replayed batch takes this many seconds."""
    capture_s: float
    """Recording one shape takes this many seconds."""
    shapes: int
    """The case has this many shapes to record."""
    batches: int
    """The case has this many batches."""
    difference: float
    """The log-likelihoods of the two runs typically differ by this fraction."""

    @property
    def saved_s(self) -> float:
        """Return the seconds that replays save over the case, without the time to record."""
        return (self.eager_s - self.graph_s) * self.batches


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which the forwards of a case run eagerly or as CUDA graphs, with its figures."""

    reason: Reason
    detail: str = ""
    """For `excluded`, `not_recordable` and `not_finite`, this is the cause."""
    launching_s: float = 0.0
    """For `gpu_bound`, the kernels of a forward are launched in this many seconds."""
    forward_s: float = 0.0
    """For `gpu_bound`, a forward takes this many seconds."""
    missing_bytes: float = 0.0
    """For `memory_short`, a trial needs this many more free bytes."""
    comparison: Comparison | None = None
    """These are the figures of the trial, if there was one."""

    @property
    def execution(self) -> str:
        """Return `eager` or `cuda_graphs`."""
        return "cuda_graphs" if self.reason in ("requested", "worth_it") else "eager"


class Choice(msgspec.Struct, frozen=True):
    """The execution of a case and what it needs."""

    decision: Decision
    plan: Plan
    """The batches, padded as the execution needs them."""
    workspace: Workspace | None
    """The strategy reserved this workspace for the batches."""


def describe(decision: Decision) -> str:
    """Return the reason of a decision in one sentence, with its figures."""
    compared = decision.comparison
    figures = difference = ""
    if compared is not None:
        difference = f"{compared.difference:.1e}"
        figures = (
            f"a batch takes {_ms(compared.graph_s)} as a graph and {_ms(compared.eager_s)} eagerly, "
            f"{compared.shapes} recordings take {_ms(compared.capture_s)} each"
        )
    batches = compared.batches if compared is not None else 0
    sentences: dict[Reason, str] = {
        "requested": "CUDA graphs: they were requested",
        "excluded": f"eager: {decision.detail}",
        "gpu_bound": (
            f"eager: the GPU is the bottleneck, kernels are launched in {_ms(decision.launching_s)} of "
            f"{_ms(decision.forward_s)}"
        ),
        "memory_short": f"eager: a trial of CUDA graphs needs {decision.missing_bytes / MIB:,.0f} MiB more free memory",
        "not_recordable": f"eager: the forwards cannot be recorded as CUDA graphs: {decision.detail}",
        "not_finite": f"eager: with CUDA graphs, {decision.detail}",
        "answers_differ": f"eager: with CUDA graphs, log-likelihoods differ by {difference}",
        "not_worth_it": f"eager: CUDA graphs save less than their recordings take over {batches} batches: {figures}",
        "worth_it": f"CUDA graphs: {figures}; log-likelihoods differ by {difference}",
    }
    return sentences[decision.reason]


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
    """While entered, the forwards of the model run as chosen.

    Args:
        loaded: The model.
        requests: The tokenised dataset.
        batch_size: Sequences per forward.
        requested: `auto`, `on` (CUDA graphs, if they can be recorded) or `off`.
        dtype: The dtype of the model, which sets the tolerance of the log-likelihoods.
        prepare: Called once, before the first forward.
        workload: One of `logits.WORKLOADS`.
    """
    exclusion = _exclusion(loaded, requested, workload)
    if requested == "on" and exclusion is None:
        graphed = plan(requests, batch_size, multiple=cuda_graphs.MULTIPLE)
        workspace = prepare(graphed)
        with cuda_graphs.GraphedDecoder(loaded.model, loaded.devices[0]):
            yield Choice(Decision(reason="requested"), graphed, workspace)
        return
    eager = plan(requests, batch_size)
    workspace = prepare(eager)
    if exclusion is not None:
        yield Choice(Decision(reason="excluded", detail=exclusion), eager, workspace)
        return
    decision = _decide_untried(loaded, eager)
    if decision is None:
        # Rows are padded, but not beyond the longest sequence: the workspace suffices for both plans.
        graphed = plan(requests, batch_size, multiple=cuda_graphs.MULTIPLE)
        with cuda_graphs.GraphedDecoder(loaded.model, loaded.devices[0]) as decoder:
            decision = _decide_by_trial(loaded, eager, graphed, decoder, tolerance=LOGLIKELIHOOD_TOLERANCES[dtype])
            if decision.execution == "cuda_graphs":
                yield Choice(decision, graphed, workspace)
                return
    # The memory of the trial is not the memory of the case.
    device_memory.reset(loaded.devices)
    yield Choice(decision, eager, workspace)


def _exclusion(loaded: Loaded, requested: str, workload: str) -> str | None:
    """Return why the forwards must not run as CUDA graphs; None if they may."""
    if workload == logits.FULL_LOGITS:
        return "--llmgpu-scoring=harness keeps a KV cache, which a CUDA graph does not"
    if not loaded.recordable:
        return "the strategy forbids CUDA graphs"
    if (reason := cuda_graphs.reason_against(loaded.model, loaded.devices)) is not None:
        return reason
    return "CUDA graphs are switched off" if requested == "off" else None


def _decide_untried(loaded: Loaded, eager: Plan) -> Decision | None:
    """Return the decision for eager forwards that a trial is not needed for; None if a trial has to decide."""
    import torch

    batch = eager.batches[len(eager.batches) // 2]
    ids_BS = batch.packed[: batch.rows * batch.width].view(batch.rows, batch.width).to(loaded.input_device)
    decoder: Any = loaded.model.get_decoder()  # type: ignore[operator]  # `reason_against` has checked it
    launching_s, forward_s = [], []
    with torch.inference_mode():
        for _ in range(1 + _TRIALS):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            decoder(input_ids=ids_BS, use_cache=False)
            launching_s.append(time.perf_counter() - began_s)
            torch.cuda.synchronize()
            forward_s.append(time.perf_counter() - began_s)
    # The slowest rank decides: the others wait for its part of every layer.
    launching, forward = _largest(loaded, statistics.median(launching_s[1:])), statistics.median(forward_s[1:])
    if _first_rank_decides(loaded, launching < _MOST_LAUNCHING * forward):
        return Decision(reason="gpu_bound", launching_s=launching, forward_s=forward)
    # A trial that runs out of memory on one of several ranks cannot be continued eagerly. The peaks are those of the
    # forwards above.
    held, peaks = device_memory.allocated(loaded.devices), device_memory.peaks(loaded.devices)
    missing_bytes = max(
        _EAGER_FORWARDS * ((peak or 0) - (now or 0)) + _GRAPH_BYTES - spare
        for now, peak, spare in zip(held, peaks, device_memory.spare(loaded.devices), strict=True)
    )
    if (missing := _largest(loaded, float(missing_bytes))) > 0:
        return Decision(reason="memory_short", missing_bytes=missing)
    return None


def _decide_by_trial(
    loaded: Loaded, eager: Plan, graphed: Plan, decoder: cuda_graphs.GraphedDecoder, *, tolerance: float
) -> Decision:
    """Run the median batch eagerly and as a CUDA graph, and decide."""
    number = len(eager.batches) // 2
    try:
        with decoder.suspended():
            eager_s, expected = _time(loaded, eager.batches[number])
        try:
            graph_s, found = _time(loaded, graphed.batches[number])
        except ValueError as error:  # A log-likelihood is not finite, on every rank alike.
            return Decision(reason="not_finite", detail=str(error))
    except RuntimeError as error:
        if loaded.world_size > 1:
            raise  # The other ranks may wait in a collective: the launcher has to end them.
        return Decision(reason="not_recordable", detail=str(error).splitlines()[0])
    comparison = Comparison(
        eager_s=eager_s,
        graph_s=graph_s,
        capture_s=statistics.median(decoder.capture_s),
        shapes=len({(batch.rows, batch.width) for batch in graphed.batches}),
        batches=len(eager.batches),
        # All log-likelihoods together: rounding alone can change a single one near 0 by more.
        difference=typical_difference(found, expected),
    )
    if not _first_rank_decides(loaded, comparison.difference <= tolerance):
        return Decision(reason="answers_differ", comparison=comparison)
    if not _first_rank_decides(loaded, comparison.saved_s > comparison.shapes * comparison.capture_s):
        return Decision(reason="not_worth_it", comparison=comparison)
    return Decision(reason="worth_it", comparison=comparison)


def _time(loaded: Loaded, batch: Batch) -> tuple[float, list[float]]:
    """Return the median latency of a batch after a first run, and its log-likelihoods."""
    latencies_s: list[float] = []
    answers: dict[int, float] = {}
    for _ in range(1 + _TRIALS):
        columns, answers = scoring.run(loaded.model, [batch], input_device=loaded.input_device, devices=loaded.devices)
        latencies_s += columns.latency_s
    return statistics.median(latencies_s[1:]), [answers[number] for number in sorted(answers)]


def _first_rank_decides(loaded: Loaded, own: bool) -> bool:
    """Return the answer of rank 0: ranks with different answers would wait for each other in a collective."""
    if loaded.world_size == 1:
        return own
    import torch
    from torch import distributed

    answer = torch.tensor([int(own)], device=loaded.devices[0])
    distributed.broadcast(answer, src=0)
    return bool(answer.item())


def _largest(loaded: Loaded, value: float) -> float:
    """Return the largest value of all ranks."""
    if loaded.world_size == 1:
        return value
    import torch
    from torch import distributed

    largest = torch.tensor([value], dtype=torch.float64, device=loaded.devices[0])
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return float(largest.item())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
