"""Work passes: what the program of a case computes, in forwards of their own (torch, in a rank).

Passes in the execution of the case give the time of the kernels (`record`). Later, over one batch, an eager pass counts
ops and FLOPs, and an eager pass attributes kernels to modules and counts calls of the CUDA runtime (`measure`): these
numbers are exact, and both passes are slow. On a CPU, and where CUPTI cannot be used, ops and FLOPs alone are counted.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.inference.batching import Batch, Plan
from pytest_llmgpu.inference.scoring import synchronize
from pytest_llmgpu.ranks import kernel_records, ops
from pytest_llmgpu.ranks.kernel_records import RANGE_PREFIX, NamedRow, PassKernels, Record
from pytest_llmgpu.report.text import first_line
from pytest_llmgpu.report.work import CollectiveWork, ModelSize, RankWork, Work, WorkRow

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from pytest_llmgpu.strategies.protocol import Loaded

_LEAST_PASSES = 3
"""Fewest profiled passes in the execution of the case."""

_MOST_PASSES = 12
_FORWARDS = 24
"""Forwards that all passes together have where 12 passes suffice. Where a GPU is at its power limit, forwards differ by
1.4 % in device time, those of one launch as much as those of different ones: the mean of 24 differs by 0.3 %."""

_MOST_PADDED_TOKENS = 8192
_MOST_BATCHES = 16
_SCORING = "(scoring)"
"""Module of what runs before and after the model: the copy of the batch, log-softmax, and the choice of the targets."""

_ON_CPU = "kernels are recorded on CUDA devices only, and the case ran on a CPU"
_NO_RECORDS = "torch.profiler recorded no kernel: CUPTI has no permission, or another profiler uses it"
_BYPASSED = "kernels of this strategy are launched past torch's dispatcher, where FLOPs cannot be counted"
_DEVICE_FIGURES = ("device_time_s", "copy_s", "idle_s", "busy", "kernels", "kernels_sha256", "rows")
_HOST_FIGURES = ("runtime_calls", "host_syncs")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

_DETACHING = "TEARDOWN_CUPTI"
"""The environment variable by which torch.profiler detaches CUPTI."""

_USERS_CHOICE = os.environ.get(_DETACHING)
_DETACHED = f"torch.profiler recorded no kernel: {_DETACHING}=1 detaches CUPTI while a pass runs; unset it"

_CUPTI_DETACHES = (12, 6)
"""The first CUDA with which CUPTI can be detached while CUDA graphs exist. torch.profiler names it
(`_KinetoProfile.prepare_trace`): with older ones the second profile after a detachment crashes."""


Forward = Callable[[Batch], object]
"""Launches the work of one batch."""


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of one rank in the execution of the case."""

    batches: list[int]
    """The numbers of the batches that each pass ran."""
    kernels: list[PassKernels] = []
    """The kernels of each pass."""
    seconds: list[float] = []
    """The duration of each pass in seconds."""
    why: str | None = None
    """The reason why there is no pass."""


class WorkReply(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one rank's work passes."""

    batches: list[int]
    """The numbers of the batches of the passes in the execution of the case."""
    eager_batches: list[int]
    """The numbers of the batches of the eager passes."""
    work: RankWork
    """The figures of the rank, without its rows."""
    rows: list[NamedRow] | None = None
    """The rows with names of kernels; None where no kernel was recorded."""
    collective_s: list[dict[str, list[float]]] = []
    """[passes] Kind of a collective to the durations of its calls in their order."""


class _Recording:
    """The records of torch.profiler while `_recorded` was entered."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.why: str | None = None
        """The reason why there is no record."""


def batches_used(padded_tokens: Sequence[int]) -> list[int]:
    """Return the numbers of the batches that work passes run: spread evenly over the plan, the same in every launch.

    As many as have 8,192 padded tokens together, at least 1 and at most 16.
    """
    planned = len(padded_tokens)
    for count in range(min(_MOST_BATCHES, planned), 1, -1):
        numbers = [(2 * place + 1) * planned // (2 * count) for place in range(count)]
        if sum(padded_tokens[number] for number in numbers) <= _MOST_PADDED_TOKENS:
            return numbers
    return [planned // 2]


def passes_of(batches: int) -> int:
    """Return how many passes run in the execution of a case, the same in every launch."""
    return max(_LEAST_PASSES, min(_MOST_PASSES, -(-_FORWARDS // batches)))


def record(
    loaded: Loaded, plan: Plan, forward: Forward, *, on_batch: Callable[[Batch, float], None], first: bool = True
) -> Passes:
    """Run the passes in the execution of the case; every rank must do so at the same time.

    Args:
        loaded: The model, whose forwards run as in the case: its CUDA graphs are still recorded.
        plan: The plan that the case has run.
        forward: Runs a batch.
        on_batch: Called after each batch with its latency in seconds, as a sign of life.
        first: These are the first passes of the case.
    """
    numbers = batches_used([batch.padded_tokens for batch in plan.batches])
    if loaded.devices[0].type != "cuda":
        return Passes(batches=numbers, why=_ON_CPU)
    batches = [plan.batches[number] for number in numbers]
    # The first profile of a process initialises CUPTI, and its records are left out.
    with _recorded(loaded.devices, first=first):
        _run(loaded, [plan.batches[_middle(numbers)]], forward, on_batch)
    kernels, seconds = [], []
    why = None
    for _ in range(passes_of(len(numbers))):
        with _recorded(loaded.devices) as recording:
            pass_s = _run(loaded, batches, forward, on_batch)
        # All passes are run whatever a profiler does: ranks that stop would leave the others waiting in a collective.
        why = why or recording.why
        kernels.append(kernel_records.of_pass(recording.records))
        seconds.append(pass_s)
    return Passes(batches=numbers, why=why) if why else Passes(batches=numbers, kernels=kernels, seconds=seconds)


def measure(
    loaded: Loaded,
    plan: Plan,
    passes: Passes,
    forward: Forward,
    *,
    on_batch: Callable[[Batch, float], None],
    last: bool = True,
) -> WorkReply:
    """Run the eager passes over one batch, the middle one of the passes before; every rank must do so at the same time.

    Args:
        loaded: The model, whose forwards run eagerly now.
        plan: The plan that the case has run.
        passes: What `record` returned.
        forward: Runs a batch eagerly.
        on_batch: Called after each batch with its latency in seconds, as a sign of life.
        last: These are the last passes of the case.
    """
    number = _middle(passes.batches)

    def run() -> float:
        return _run(loaded, [plan.batches[number]], forward, on_batch)

    counted = ops.count(run, loaded.model)
    why = {} if loaded.dispatched else {"flops": _BYPASSED}
    modules = None
    if loaded.devices[0].type == "cuda":
        with _recorded(loaded.devices, ranges=True, last=last) as attribution, _module_ranges(loaded.model):
            run()
        if attribution.why is None:
            modules = kernel_records.modules(attribution.records)
        else:
            why |= dict.fromkeys(_HOST_FIGURES, attribution.why)
    else:
        why |= dict.fromkeys(_HOST_FIGURES, _ON_CPU)
    figures = RankWork(
        uuids=_uuids(loaded.devices),
        ops=counted.ops,
        flops=counted.flops if loaded.dispatched else None,
        flops_by_module=counted.flops_by_module if loaded.dispatched else None,
        runtime_calls=None if modules is None else modules.runtime_calls,
        host_syncs=None if modules is None else modules.host_syncs,
        why=why,
    )
    if passes.why is not None:
        why |= dict.fromkeys(_DEVICE_FIGURES, passes.why)
        return WorkReply(batches=passes.batches, eager_batches=[number], work=figures)
    return WorkReply(
        batches=passes.batches,
        eager_batches=[number],
        work=_with_passes(figures, passes),
        rows=kernel_records.rows(passes.kernels, modules),
        collective_s=[one.collective_s for one in passes.kernels],
    )


def join(replies: Sequence[WorkReply], kernel_names: dict[str, int], model: ModelSize | str) -> Work:
    """Return the record of one launch from what its ranks answered.

    Args:
        replies: One for each rank.
        kernel_names: Name of a kernel to its number in the report; names that are new are added.
        model: The size of the model, or the reason why it is not known.
    """
    collectives = _collectives([reply.collective_s for reply in replies])
    reasons = [reply.work.why["device_time_s"] for reply in replies if reply.rows is None]
    if reasons:
        collectives = reasons[0]
    why = {"collectives": collectives} if isinstance(collectives, str) else {}
    if isinstance(model, str):
        why["model"] = model
    return Work(
        batches=replies[0].batches,
        eager_batches=replies[0].eager_batches,
        passes=len(replies[0].collective_s),
        collectives=None if isinstance(collectives, str) else collectives,
        ranks=[msgspec.structs.replace(reply.work, rows=_numbered(reply.rows, kernel_names)) for reply in replies],
        model=None if isinstance(model, str) else model,
        why=why,
    )


def model_size(model: PreTrainedModel, dtype_bytes: int) -> ModelSize | str:
    """Return what a model computes at least, or the reason why the formula does not hold for it.

    Args:
        model: The whole model; its weights may be on the meta device.
        dtype_bytes: Size of one weight.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in _EXPERTS):
        return "a token passes through some of the model's experts only"
    apart = [model.get_input_embeddings(), model.get_output_embeddings()]
    left_out = {id(parameter) for module in apart if module is not None for parameter in module.parameters()}
    parameters = sum(part.numel() for part in model.parameters() if id(part) not in left_out)
    heads = config.num_attention_heads
    return ModelSize(
        parameters=parameters,
        weights_bytes=parameters * dtype_bytes,
        layers=config.num_hidden_layers,
        attention_width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
    )


def _middle(numbers: Sequence[int]) -> int:
    """Return the number of the batch that the eager passes run."""
    return numbers[len(numbers) // 2]


def _with_passes(figures: RankWork, passes: Passes) -> RankWork:
    last = passes.kernels[-1]
    covered = [(one.covered_s, pass_s) for one, pass_s in zip(passes.kernels, passes.seconds, strict=True)]
    return msgspec.structs.replace(
        figures,
        device_time_s=[one.device_time_s for one in passes.kernels],
        copy_s=[one.copy_s for one in passes.kernels],
        idle_s=[max(0.0, pass_s - covered_s) for covered_s, pass_s in covered],
        busy=statistics.median(min(1.0, covered_s / pass_s) for covered_s, pass_s in covered),
        kernels=sum(calls.calls for calls in last.kernels.values()),
        kernels_sha256=kernel_records.kernels_sha256(last.kernels),
    )


def _collectives(ranks: Sequence[Sequence[dict[str, list[float]]]]) -> list[CollectiveWork] | str:
    """Split the time of each kind of collective into transfer and waiting.

    Args:
        ranks: [ranks][passes] kind to the durations of its calls.

    Returns:
        One record a kind, or the reason why calls cannot be joined.
    """
    counts = {tuple(sorted((kind, len(calls)) for kind, calls in one.items())) for passes in ranks for one in passes}
    if len(counts) > 1:
        return "the ranks do not run the same number of collectives in every pass"
    found = []
    for kind, number in next(iter(counts), ()):
        transfer_s, wait_s = [], []
        for of_ranks in zip(*ranks, strict=True):
            durations = [one[kind] for one in of_ranks]
            transfer_s.append(sum(map(min, zip(*durations, strict=True))))
            wait_s.append(max(0.0, sum(map(sum, durations)) / len(durations) - transfer_s[-1]))
        found.append(CollectiveWork(collective=kind, calls=number, transfer_s=transfer_s, wait_s=wait_s))
    return found


def _numbered(rows: Sequence[NamedRow] | None, kernel_names: dict[str, int]) -> list[WorkRow] | None:
    if rows is None:
        return None
    # The answer of each rank has the names of the modules again, in strings of its own.
    return [
        WorkRow(
            module=row.module and sys.intern(row.module),
            kernel=None if row.kernel is None else kernel_names.setdefault(row.kernel, len(kernel_names)),
            family=row.family,
            calls=row.calls,
            time_s=row.time_s,
        )
        for row in rows
    ]


@contextmanager
def scoring_forward(loaded: Loaded, logits: str) -> Iterator[Forward]:
    """Return a context manager whose value scores a batch; `logits` is one of `scoring.SCORINGS`."""
    with scoring.way(loaded.model, logits) as chosen:

        def forward(batch: Batch) -> None:
            packed = batch.packed.to(loaded.input_device, non_blocking=True)
            ids, rows_N, targets_N, _ = packed.split(batch.sizes)
            chosen.log_probabilities(ids.view(batch.rows, batch.width), rows_N, targets_N)

        yield forward


def _run(loaded: Loaded, batches: Sequence[Batch], forward: Forward, on_batch: Callable[[Batch, float], None]) -> float:
    """Run batches once and return the seconds of all of them, the devices idle at both ends of each."""
    import torch

    total_s = 0.0
    with torch.inference_mode():
        for batch in batches:
            synchronize(loaded.devices)
            began_s = time.perf_counter()
            with torch.profiler.record_function(RANGE_PREFIX + _SCORING):
                forward(batch)
            synchronize(loaded.devices)
            latency_s = time.perf_counter() - began_s
            on_batch(batch, latency_s)
            total_s += latency_s
    return total_s


@contextmanager
def _recorded(
    devices: Sequence[torch.device], *, ranges: bool = False, first: bool = False, last: bool = False
) -> Iterator[_Recording]:
    """While entered, torch.profiler records the kernels of this process.

    Args:
        devices: The devices of the model.
        ranges: The ranges of modules are recorded, too.
        first: This is the first profile of the case.
        last: No profile of the case follows, and CUPTI is detached.
    """
    from torch.profiler import ProfilerActivity, profile

    recording = _Recording()
    if devices[0].type != "cuda":
        recording.why = _ON_CPU
        yield recording
        return
    profiler = profile(activities=[ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if ranges else [])])
    try:
        _set_detaching(wanted=first)
        profiler.start()
    except RuntimeError as error:
        recording.why = f"torch.profiler did not start: {first_line(error)}"
        yield recording
        return
    try:
        yield recording
    finally:
        try:
            _set_detaching(wanted=last)
            profiler.stop()
            # The raw records: to build torch's events and averages takes ten times as long.
            results: Any = profiler.profiler
            recording.records = kernel_records.read(results.kineto_results.events())
        except RuntimeError as error:
            recording.why = f"torch.profiler did not stop: {first_line(error)}"
    if recording.why is None and not any(record.device is not None for record in recording.records):
        recording.why = _NO_RECORDS if _USERS_CHOICE != "1" else _DETACHED


def _set_detaching(*, wanted: bool) -> None:
    """Let torch.profiler detach CUPTI where a profile starts or ends, or not; a value that the user has set stays.

    CUPTI that stays attached slows the cases after a profiled one: on an H200 (LLaMA-7B, torch 2.11, CUDA 13) replayed
    forwards took 0.9 to 2 % longer and eager ones at batch size 1 45 %; detached, 0.2 % and 10 %. Kineto detaches it in
    another thread, at the end of a profile and at the start of one where it is still attached, and the profile that
    runs then has no record of a kernel. So it is wanted at the end of the last profile of a case, and until the first
    profile of the next one has started, which attaches CUPTI again.
    """
    import torch

    version = torch.version.cuda
    if version is None or tuple(map(int, version.split(".")[:2])) < _CUPTI_DETACHES or _USERS_CHOICE is not None:
        return
    os.environ[_DETACHING] = "1" if wanted else "0"


def _module_ranges(model: torch.nn.Module) -> AbstractContextManager[None]:
    """While entered, each forward of a module of the model is a range of torch.profiler with the module's name."""
    import torch

    opened: list[torch.profiler.record_function] = []

    def enter(name: str) -> None:
        opened.append(torch.profiler.record_function(RANGE_PREFIX + name))
        opened[-1].__enter__()

    return ops.module_hooks(model, enter, lambda: opened.pop().__exit__(None, None, None))


def _uuids(devices: Sequence[torch.device]) -> list[str]:
    import torch

    return [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices if device.type == "cuda"]
