"""Log-likelihoods of endings given their contexts, equal to those of lm-evaluation-harness and computed faster.

The batches are the same (see `batching`). The differences: logits are computed only for the tokens of an ending (unless
the scoring asks for all of them), and each batch needs one copy to the device and one copy back.

Shapes: B rows of a batch, S tokens of its longest row, N predicted tokens, H hidden size, V vocabulary, R requests,
L tokens of the longest ending.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference.batching import Batch, Plan
from pytest_llmgpu.inference.sm_clock import SmClock
from pytest_llmgpu.report.result import Batches

if TYPE_CHECKING:
    import torch

LEAN, HARNESS = SCORINGS = "lean", "harness"
"""Values of `--llmgpu-scoring` and of `Case.scoring`."""

_MOST_BYTES = 64 * 2**20

OnBatch = Callable[[float, int, int, int], None]
"""Called after each batch, outside its measured time, with its latency in seconds, rows, input tokens and tokens with
padding."""


def check(model: torch.nn.Module) -> None:
    """Refuse a module that cannot be called as `model(input_ids=...)` (ValueError)."""
    if not takes(model, "input_ids"):
        needed = "which gets the tokens [rows, tokens]: add it, or return a module that has it and calls this one"
        raise ValueError(f"{type(model).__name__}.forward has no argument input_ids, {needed}")


def output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that computes logits from hidden states, as transformers names it; None if there is none."""
    try:
        head: torch.nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    except NotImplementedError:  # the base class of transformers
        return None
    return head


def takes(model: torch.nn.Module, name: str) -> bool:
    """Return whether the forward of a module has an argument of this name."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


class EndingHead:
    """A context manager in which the output head gets only the hidden states that predict a token of an ending.

    A hook replaces the head's input [B, S, H] by its rows [1, N, H] just before the head. All other steps of the
    forward run unchanged, also those after the head: scaling and capping of logits, heads split over devices,
    accelerate's hooks. The tensor [B, S, V] never exists.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        head = output_head(model)
        assert head is not None, "the model was checked"
        self._model, self._head = model, head
        self._has_cache = takes(model, "use_cache")
        self.rows_N: torch.Tensor | None = None
        """The rows of [B * S, H] whose logits the next forward computes."""

    def __enter__(self) -> EndingHead:  # noqa: PYI034 - typing.Self needs Python 3.11
        # Before all other hooks, because tensor parallelism replicates the head's input in a hook.
        self._handle = self._head.register_forward_pre_hook(self._gather, prepend=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def forward(self, ids_BS: torch.Tensor, rows_N: torch.Tensor, **cached: Any) -> torch.Tensor:
        """Return the logits [1, N, V] of the given rows of the hidden states.

        They are rows of [B * S]. Further arguments of the model are those of a forward with a KV cache.
        """
        self.rows_N = rows_N
        # No attention mask: with padding on the right and causal attention, no scored token depends on the padding.
        if self._has_cache:
            cached["use_cache"] = bool(cached)
        logits_1NV = _logits(self._model, ids_BS, **cached)
        if logits_1NV.shape[:2] != (1, len(rows_N)):
            found = f"its logits have shape {logits_1NV.shape}"
            raise ValueError(f"{type(self._model).__name__} does not call its output head: {found}")
        return logits_1NV

    def log_probabilities(self, ids_BS: torch.Tensor, rows_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """Return the float32 log-probability [N] of the target of each row."""
        return log_probabilities(self.forward(ids_BS, rows_N)[0], targets_N)

    def _gather(self, _head: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        assert self.rows_N is not None
        hidden_BSH, *others = inputs
        # The devices differ only if the last layer and the head are on different ones, as with tied embeddings.
        rows_N = self.rows_N.to(hidden_BSH.device, non_blocking=True)
        return hidden_BSH.flatten(0, 1).index_select(0, rows_N).unsqueeze(0), *others


class FullLogits(AbstractContextManager["FullLogits"]):
    """A context manager that scores as lm-evaluation-harness 0.4.13 does, with the same memory use.

    The model computes the logits of every position and keeps its KV cache until the forward ends (`HFLM._model_call`
    does not change the model's `use_cache`). Their log-softmax exists at the same time, in the model's dtype. The
    selected values are summed in float32, whereas the harness sums in the model's dtype; this needs no more memory and
    gives fewer ties. Strategy iok always has its KV cache in its workspace, so only its logits differ.
    """

    use_cache = True
    """The model keeps its KV cache until the forward ends, if it has one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._named = {"use_cache": self.use_cache} if takes(model, "use_cache") else {}

    def __exit__(self, *_: object) -> None:
        """Do nothing, since `__enter__` changes nothing."""

    def forward(self, ids_BS: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - all rows are computed
        """Return the logits [B, S, V] of every position."""
        logits_BSV = _logits(self._model, ids_BS, **self._named)
        if logits_BSV.shape[:2] != ids_BS.shape:
            found = f"their shape is {logits_BSV.shape}"
            raise ValueError(f"{type(self._model).__name__} does not return the logits of every position: {found}")
        return logits_BSV

    def log_probabilities(self, ids_BS: torch.Tensor, rows_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """Return the log-probability [N] of the target of each row, rounded to the model's dtype, as float32."""
        import torch

        logp_BSV = torch.log_softmax(self.forward(ids_BS, rows_N), dim=-1)
        return logp_BSV.flatten(0, 1)[rows_N, targets_N].float()


class SelectedLogits(FullLogits):
    """A context manager for modules without an output head: all logits are computed, and those of endings are used."""

    use_cache = False

    def log_probabilities(self, ids_BS: torch.Tensor, rows_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """Return the float32 log-probability [N] of the target of each row."""
        logits_NV = self.forward(ids_BS, rows_N).flatten(0, 1).index_select(0, rows_N)
        return log_probabilities(logits_NV, targets_N)


Way = EndingHead | FullLogits


def way(model: torch.nn.Module, logits: str) -> Way:
    """Return the context manager of a `Case.scoring`; enter it before the first forward."""
    if logits == HARNESS:
        return FullLogits(model)
    return SelectedLogits(model) if output_head(model) is None else EndingHead(model)


def _logits(model: torch.nn.Module, ids_BS: torch.Tensor, **named: Any) -> torch.Tensor:
    """Return the logits of a forward, which are its result or the attribute `logits` of it."""
    import torch

    answer = model(input_ids=ids_BS, **named)
    logits = getattr(answer, "logits", answer)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:  # noqa: PLR2004 - rows, tokens, vocabulary
        found = f"a tensor of {logits.dim()} dimensions" if isinstance(logits, torch.Tensor) else type(answer).__name__
        needed = "the logits [rows, tokens, vocabulary] are needed, or an object with them as its attribute logits"
        raise ValueError(f"{type(model).__name__} returned {found}: {needed}")
    return logits


def log_probabilities(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Return the float32 log-probability [N] of each row's target; the logits may be overwritten.

    At most `_MOST_BYTES` of float32 log-probabilities exist at one time.
    """
    import torch

    if logits_NV.dtype == torch.float32 and logits_NV.device.type == "cpu":
        # In place takes half the time, and is safe: ATen's vec_log_softmax_lastdim writes a row after its sum is known.
        torch.log_softmax(logits_NV, dim=-1, out=logits_NV)
        return logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    rows = max(1, _MOST_BYTES // (4 * logits_NV.shape[-1]))
    picked = [
        torch.log_softmax(logits_nV, dim=-1, dtype=torch.float32).gather(1, targets_n.unsqueeze(1)).squeeze(1)
        for logits_nV, targets_n in zip(logits_NV.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.cat(picked)


class Scores(msgspec.Struct, frozen=True):
    """The results of all batches of a plan."""

    batches: Batches
    """The time, size and SM clock of each batch."""
    why_no_clock: str | None
    """The reason why there is no clock."""
    loglikelihoods: list[list[float]]
    """The log-likelihoods [items][requests] in the order of the dataset."""


def warm_up(model: torch.nn.Module, plan: Plan, *, input_device: torch.device, **others: Any) -> None:
    """Run one batch of every shape, so that no measured batch is the first of its shape.

    Libraries plan for each shape: on 4 H200 the first forward of a new width took 110 ms longer (LLaMA-30B, cuDNN's
    attention), which is three times the forward itself at batch size 1. The arguments are those of `score`.
    """
    plan.pin(input_device)
    batches = [*{(batch.rows, batch.width): batch for batch in plan.batches}.values()]
    run(model, batches, input_device=input_device, **others)


def score(
    model: torch.nn.Module, plan: Plan, *, input_device: torch.device, devices: Sequence[torch.device], **others: Any
) -> Scores:
    """Score every request of a plan, whose batches are page-locked here for a CUDA device.

    The model is on `devices`, in eval mode; they are idle when the clock of a batch starts and stops. The input ids are
    best on the device of the output head: accelerate returns logits to the device of the input. `logits` is one of
    `SCORINGS`. The others are those of `run`. ValueError if a log-likelihood is not finite.
    """
    plan.pin(input_device)
    clock = SmClock(devices, 2 * len(plan.batches))
    batches, answers = run(model, plan.batches, input_device=input_device, devices=devices, clock=clock, **others)
    batches.clock_ghz = clock.ghz([(2 * number, 2 * number + 1) for number in range(len(plan.batches))])
    in_order = [answers[number] for number in range(len(plan.requests.requests))]
    ends = accumulate(plan.requests.endings)
    return Scores(
        batches=batches,
        why_no_clock=clock.why,
        loglikelihoods=[in_order[end - n : end] for end, n in zip(ends, plan.requests.endings, strict=True)],
    )


def run(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    *,
    on_batch: OnBatch = lambda *_: None,
    input_device: torch.device,
    devices: Sequence[torch.device] = (),
    logits: str = LEAN,
    clock: SmClock | None = None,
    beside: Callable[[], float] | None = None,
) -> tuple[Batches, dict[int, float]]:
    """Run batches; return their times and sizes, and the log-likelihood of each request by its index.

    A clock gets two stamps for each batch, and what runs `beside` them is called before and after, outside of its time.
    """
    import torch

    columns = Batches()
    answers: dict[int, float] = {}
    clock = clock or SmClock((), 0)
    with way(model, logits) as chosen, torch.inference_mode():
        before_s = 0.0 if beside is None else beside()
        for number, batch in enumerate(batches):
            clock.stamp(2 * number)
            synchronize(devices)
            started_s = time.perf_counter()
            sums = of_tokens(chosen, batch, input_device).sum(dim=1)
            launched_s = time.perf_counter() - started_s
            values = sums.tolist()
            synchronize(devices)
            latency_s = time.perf_counter() - started_s
            clock.stamp(2 * number + 1)
            if beside is not None:
                columns.launch_s.append(launched_s)
                columns.reference_s.append((before_s + (after_s := beside())) / 2)
                before_s = after_s
            add_batch(columns, batch, latency_s, values, of=len(batches))
            answers.update(zip(batch.requests, values, strict=True))
            on_batch(latency_s, batch.rows, batch.tokens, batch.padded_tokens)
        synchronize(devices)
    return columns, answers


def add_batch(columns: Batches, batch: Batch, latency_s: float, loglikelihoods: Iterable[float], *, of: int) -> None:
    """Add the time and the size of a finished batch, `of` so many; ValueError if a log-likelihood is not finite."""
    columns.latency_s.append(latency_s)
    columns.sequences.append(batch.rows)
    columns.tokens.append(batch.tokens)
    columns.padded_tokens.append(batch.padded_tokens)
    broken = next((value for value in loglikelihoods if not math.isfinite(value)), None)
    if broken is not None:
        where = f"batch {len(columns.latency_s)} of {of} ({batch.rows} rows of {batch.width} tokens)"
        remedy = "try another dtype, or check the checkpoint"
        raise ValueError(f"{where}: log-likelihood {broken}: the logits overflow or are NaN: {remedy}")


def of_tokens(chosen: Way, batch: Batch, input_device: torch.device) -> torch.Tensor:
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
