"""Log-likelihoods of endings given their contexts: the numbers of lm-evaluation-harness, without its waste.

The batches are the same (see `batching`). What differs is that logits exist only where an ending's tokens are
predicted (unless its memory is what is to be measured: see `logits`), and that a batch costs one copy to the device and
one back.

Shapes: N predicted tokens, R requests, L tokens of the longest ending.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from pytest_llmgpu.inference import logits
from pytest_llmgpu.inference.batching import Batch, Plan, Requests, encode, plan
from pytest_llmgpu.report.result import Batches

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "Plan", "Requests", "Scores", "encode", "plan", "run", "score", "warm_up"]


class Scores(msgspec.Struct, frozen=True):
    """What a run over a plan gave."""

    batches: Batches
    loglikelihoods: list[list[float]]
    """[items][endings], in the dataset's order."""


def warm_up(
    model: torch.nn.Module,
    plan: Plan,
    *,
    on_batch: Callable[[float, int, int, int], None] | None = None,
    input_device: torch.device,
    devices: Sequence[torch.device] = (),
    workload: str = logits.LEAN,
) -> None:
    """Run a batch of every shape, and the largest once more, so that no measured batch pays for a first time.

    Every shape, since libraries plan for each: the first forward of a new width was seen to take 110 ms longer on 4
    H200s (LLaMA-30B, cuDNN's attention), which is three times the forward itself at batch size 1.
    """
    of_each_shape = {(batch.rows, batch.width): batch for batch in plan.batches}
    _pin(plan, input_device)
    batches = [plan.batches[0], *of_each_shape.values()]
    run(model, batches, on_batch=on_batch, input_device=input_device, devices=devices, workload=workload)


def score(
    model: torch.nn.Module,
    plan: Plan,
    *,
    on_batch: Callable[[float, int, int, int], None] | None = None,
    input_device: torch.device,
    devices: Sequence[torch.device] = (),
    workload: str = logits.LEAN,
) -> Scores:
    """Score every request of a plan.

    Args:
        model: A causal language model of transformers, in eval mode.
        plan: What to run; page-locked here where it goes to a CUDA device.
        on_batch: Called after each batch, outside its time, with one row of `result.Batches`: latency in seconds, rows,
            input tokens, tokens with padding.
        input_device: Where input ids are put. Best where the output head is: accelerate brings logits back to them.
        devices: Every device the model is on, idle when a batch's clock starts and stops.
        workload: One of `logits.WORKLOADS`.

    Raises:
        ValueError: A log-likelihood is not finite: the model's numbers are broken, and no choice can be made by them.
    """
    _pin(plan, input_device)
    batches, answers = run(
        model, plan.batches, on_batch=on_batch, input_device=input_device, devices=devices, workload=workload
    )
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
    workload: str = logits.LEAN,
) -> tuple[Batches, dict[int, float]]:
    """Return the batches' columns and the log-likelihood of each request, by its number."""
    import torch

    columns = Batches()
    answers: dict[int, float] = {}
    with logits.way(model, workload) as chosen, torch.inference_mode():
        for number, batch in enumerate(batches, start=1):
            _synchronize(devices)
            started_s = time.perf_counter()
            values = _loglikelihoods(chosen, batch, input_device).tolist()
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


def _loglikelihoods(chosen: logits.Way, batch: Batch, input_device: torch.device) -> torch.Tensor:
    """Return the float32 log-likelihoods [R] of a batch's requests, on the device."""
    import torch

    packed = batch.packed.to(input_device, non_blocking=True)
    ids, rows_N, targets_N, slots_N = packed.split(batch.sizes)
    picked_N = chosen.log_probabilities(ids.view(batch.rows, batch.width), rows_N, targets_N)
    # Summed as rows of a padded table: the order of atomic additions, as of index_add, differs from run to run.
    table_RL = torch.zeros(len(batch.requests), batch.longest, device=input_device)
    table_RL.view(-1).index_copy_(0, slots_N, picked_N)
    return table_RL.sum(dim=1)


def _synchronize(devices: Sequence[torch.device]) -> None:
    import torch

    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
