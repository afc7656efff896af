"""Log-likelihoods of endings given their contexts, equal to those of lm-evaluation-harness and computed faster.

The batches are the same (see `batching`). The differences: logits are computed only for the tokens of an ending (unless
the workload asks for all of them, see `logits`), and each batch needs one copy to the device and one copy back.

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
from pytest_llmgpu.inference.batching import Batch, Plan
from pytest_llmgpu.report.result import Batches

if TYPE_CHECKING:
    import torch


class Scores(msgspec.Struct, frozen=True):
    """The results of all batches of a plan."""

    batches: Batches
    """The time and size of each batch."""
    loglikelihoods: list[list[float]]
    """The log-likelihoods [items][requests] in the order of the dataset."""


def warm_up(
    model: torch.nn.Module,
    plan: Plan,
    *,
    on_batch: Callable[[float, int, int, int], None] | None = None,
    input_device: torch.device,
    devices: Sequence[torch.device] = (),
    workload: str = logits.LEAN,
) -> None:
    """Run one batch of every shape, so that no measured batch is the first of its shape.

    Libraries plan for each shape: on 4 H200 the first forward of a new width took 110 ms longer (LLaMA-30B, cuDNN's
    attention), which is three times the forward itself at batch size 1. The arguments are those of `score`.
    """
    _pin(plan, input_device)
    batches = [*{(batch.rows, batch.width): batch for batch in plan.batches}.values()]
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
        plan: The batches; they are page-locked here if the input device is a CUDA device.
        on_batch: Called after each batch, outside its measured time, with its latency in seconds, rows, input tokens
            and tokens with padding.
        input_device: The device of the input ids. The device of the output head is best: accelerate returns logits to
            the device of the input.
        devices: All devices of the model; they are idle when the clock of a batch starts and stops.
        workload: One of `logits.WORKLOADS`.

    Raises:
        ValueError: A log-likelihood is not finite.
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
    """Run batches; return their times and sizes, and the log-likelihood of each request by its index."""
    import torch

    columns = Batches()
    answers: dict[int, float] = {}
    with logits.way(model, workload) as chosen, torch.inference_mode():
        for number, batch in enumerate(batches, start=1):
            synchronize(devices)
            started_s = time.perf_counter()
            values = _of_tokens(chosen, batch, input_device).sum(dim=1).tolist()
            synchronize(devices)
            latency_s = time.perf_counter() - started_s
            if not all(map(math.isfinite, values)):
                raise ValueError(
                    f"batch {number} of {len(batches)} ({batch.rows} rows of {batch.width} tokens): "
                    f"log-likelihood {next(value for value in values if not math.isfinite(value))}: "
                    "the logits overflow or are NaN: try another dtype, or check the checkpoint"
                )
            answers.update(zip(batch.requests, values, strict=True))
            row = (batch.rows, batch.tokens, batch.padded_tokens)
            columns.latency_s.append(latency_s)
            for column, value in zip((columns.sequences, columns.tokens, columns.padded_tokens), row, strict=True):
                column.append(value)
            if on_batch is not None:
                on_batch(latency_s, *row)
    return columns, answers


def run_tokens(
    model: torch.nn.Module, batches: Sequence[Batch], *, input_device: torch.device, devices: Sequence[torch.device]
) -> dict[int, list[float]]:
    """Return the log-likelihood of each token of endings of equal length, by the index of the request."""
    import torch

    answers: dict[int, list[float]] = {}
    with logits.EndingHead(model) as head, torch.inference_mode():
        for batch in batches:
            synchronize(devices)
            answers.update(zip(batch.requests, _of_tokens(head, batch, input_device).tolist(), strict=True))
    return answers


def _pin(plan: Plan, input_device: torch.device) -> None:
    if input_device.type == "cuda":
        plan.pin()


def _of_tokens(chosen: logits.Way, batch: Batch, input_device: torch.device) -> torch.Tensor:
    """Return the float32 log-likelihoods [R, L] of the tokens of each ending of a batch, 0 after its end."""
    import torch

    packed = batch.packed.to(input_device, non_blocking=True)
    ids, rows_N, targets_N, slots_N = packed.split(batch.sizes)
    picked_N = chosen.log_probabilities(ids.view(batch.rows, batch.width), rows_N, targets_N)
    # Summed by rows of a padded table: index_add uses atomic additions, whose order differs from run to run.
    table_RL = torch.zeros(len(batch.requests), batch.longest, device=input_device)
    table_RL.view(-1).index_copy_(0, slots_N, picked_N)
    return table_RL


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until GPUs are idle."""
    import torch

    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
