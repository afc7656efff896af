"""Log-likelihoods of endings given their contexts: the numbers of lm-evaluation-harness, without its waste.

The batches are the same (see `batching`). What differs is that logits exist only where an ending's tokens are
predicted, and that a batch costs one copy to the device and one back.

Shapes: B rows of a batch, S tokens of its longest row, N predicted tokens, R requests, L tokens of the longest ending,
H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.batching import Batch, Plan, Requests, encode, plan
from pytest_llmgpu.result import Batches
from pytest_llmgpu.tasks.hellaswag import accuracy

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "EndingHead", "Plan", "Requests", "Scores", "accuracy", "encode", "plan", "run", "score", "warm_up"]

_CHUNK_BYTES = 64 * 2**20
"""Bound of the float32 log-probabilities that exist at once, beside logits of another dtype."""


class Scores(msgspec.Struct, frozen=True):
    """What a run over a plan gave."""

    batches: Batches
    loglikelihoods: list[list[float]]
    """[items][endings], in the dataset's order."""


class EndingHead:
    """While entered, the model's output head sees only the hidden states that predict an ending's token.

    The head's input [B, S, H] is replaced by its rows [1, N, H] just before the head, so that everything else of the
    model's forward, what comes after the head included, runs as it is: scaling and capping of logits, heads split over
    devices, accelerate's hooks. The [B, S, V] tensor never exists.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]  # every transformers model has it
        if head is None:
            raise ValueError(f"{type(model).__name__} has no output head: a causal language model is needed")
        self._head: torch.nn.Module = head
        self.rows_N: torch.Tensor | None = None
        """Rows of [B * S, H] that the next forward computes logits of."""

    def __enter__(self) -> EndingHead:  # noqa: PYI034 - typing.Self needs Python 3.11
        # Before every other hook: tensor parallelism replicates the head's input in one.
        self._handle = self._head.register_forward_pre_hook(self._gather, prepend=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.remove()

    def _gather(self, _head: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        assert self.rows_N is not None
        hidden_BSH, *others = inputs
        # They differ only where the last layer and the head are on different devices, as with tied embeddings.
        rows_N = self.rows_N.to(hidden_BSH.device, non_blocking=True)
        return hidden_BSH.flatten(0, 1).index_select(0, rows_N).unsqueeze(0), *others


def warm_up(
    model: torch.nn.Module,
    plan: Plan,
    *,
    on_batch: Callable[[float, int, int, int], None] | None = None,
    input_device: torch.device,
    devices: Sequence[torch.device] = (),
) -> None:
    """Run a batch of every shape, and the largest once more, so that no measured batch pays for a first time.

    Every shape, since libraries plan for each: the first forward of a new width was seen to take 110 ms longer on 4
    H200s (LLaMA-30B, cuDNN's attention), which is three times the forward itself at batch size 1.
    """
    of_each_shape = {(batch.rows, batch.width): batch for batch in plan.batches}
    _pin(plan, input_device)
    batches = [plan.batches[0], *of_each_shape.values()]
    run(model, batches, on_batch=on_batch, input_device=input_device, devices=devices)


def score(
    model: torch.nn.Module,
    plan: Plan,
    *,
    on_batch: Callable[[float, int, int, int], None] | None = None,
    input_device: torch.device,
    devices: Sequence[torch.device] = (),
) -> Scores:
    """Score every request of a plan.

    Args:
        model: A causal language model of transformers, in eval mode.
        plan: What to run; page-locked here where it goes to a CUDA device.
        on_batch: Called after each batch, outside its time, with one row of `result.Batches`: latency in seconds, rows,
            input tokens, tokens with padding.
        input_device: Where input ids are put. Best where the output head is: accelerate brings logits back to them.
        devices: Every device the model is on, idle when a batch's clock starts and stops.

    Raises:
        ValueError: A log-likelihood is not finite: the model's numbers are broken, and no choice can be made by them.
    """
    _pin(plan, input_device)
    batches, answers = run(model, plan.batches, on_batch=on_batch, input_device=input_device, devices=devices)
    in_order = [answers[number] for number in range(len(plan.requests.requests))]
    ends = accumulate(plan.requests.endings)
    return Scores(
        batches=batches,
        loglikelihoods=[in_order[end - n : end] for end, n in zip(ends, plan.requests.endings, strict=True)],
    )


def run(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    *,
    on_batch: Callable[[float, int, int, int], None] | None = None,
    input_device: torch.device,
    devices: Sequence[torch.device],
) -> tuple[Batches, dict[int, float]]:
    """Return the batches' columns and the log-likelihood of each request, by its number."""
    import torch

    columns = Batches()
    answers: dict[int, float] = {}
    with EndingHead(model) as head, torch.inference_mode():
        for number, batch in enumerate(batches, start=1):
            _synchronize(devices)
            started_s = time.perf_counter()
            values = _loglikelihoods(model, head, batch, input_device).tolist()
            _synchronize(devices)
            latency_s = time.perf_counter() - started_s
            if not all(map(math.isfinite, values)):
                raise ValueError(
                    f"batch {number} of {len(batches)} ({batch.rows} rows of {batch.width} tokens): "
                    f"log-likelihood {next(value for value in values if not math.isfinite(value))}: "
                    "the logits overflow or hold NaN (try another dtype; check the checkpoint)"
                )
            answers.update(zip(batch.requests, values, strict=True))
            row = (batch.rows, batch.tokens, batch.padded_tokens)
            columns.latency_s.append(latency_s)
            for column, value in zip((columns.sequences, columns.tokens, columns.padded_tokens), row, strict=True):
                column.append(value)
            if on_batch is not None:
                on_batch(latency_s, *row)
    return columns, answers


def _pin(plan: Plan, input_device: torch.device) -> None:
    if input_device.type == "cuda":
        plan.pin()


def _loglikelihoods(model: torch.nn.Module, head: EndingHead, batch: Batch, input_device: torch.device) -> torch.Tensor:
    """Return the float32 log-likelihoods [R] of a batch's requests, on the device."""
    import torch

    packed = batch.packed.to(input_device, non_blocking=True)
    ids, head.rows_N, targets_N, slots_N = packed.split(batch.sizes)
    # No mask: with padding on the right and causal attention, nothing that is scored sees it.
    logits_1NV = model(input_ids=ids.view(batch.rows, batch.width), use_cache=False).logits
    if logits_1NV.shape[:2] != (1, batch.predicted):
        raise ValueError(
            f"{type(model).__name__} does not call its output head: its logits have shape {logits_1NV.shape}"
        )
    picked_N = _log_probabilities(logits_1NV[0], targets_N)
    # Summed as rows of a padded table: the order of atomic additions, as of index_add, differs from run to run.
    table_RL = torch.zeros(len(batch.requests), batch.longest, device=input_device)
    table_RL.view(-1).index_copy_(0, slots_N, picked_N)
    return table_RL.sum(dim=1)


def _log_probabilities(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Return the float32 log-probability [N] of each row's target; the logits may be overwritten."""
    import torch

    if logits_NV.dtype == torch.float32 and logits_NV.device.type == "cpu":
        # In place, which takes half the time: a row is written once its sum is known (ATen's vec_log_softmax_lastdim).
        torch.log_softmax(logits_NV, dim=-1, out=logits_NV)
        return logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    rows = max(1, _CHUNK_BYTES // (4 * logits_NV.shape[-1]))
    picked = [
        torch.log_softmax(logits_nV, dim=-1, dtype=torch.float32).gather(1, targets_n.unsqueeze(1)).squeeze(1)
        for logits_nV, targets_n in zip(logits_NV.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.cat(picked)


def _synchronize(devices: Sequence[torch.device]) -> None:
    import torch

    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
