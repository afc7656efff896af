"""Work passes: what the program of a case computes, in forwards of their own (torch, in a rank).

Passes in the execution of the case give the time of the kernels and the SM clock (`record`). Later, over one batch, an
eager pass counts ops and FLOPs, one attributes kernels to modules and counts calls of the CUDA runtime, and one counts
calls of Python and C functions (`measure`): these numbers are exact, and the passes are slow. On a CPU, and where CUPTI
cannot be used, ops, FLOPs and calls of the host alone are counted.

The figures of a pass are computed from the records of torch.profiler by pure functions over plain tuples. A record of a
device is a kernel or a copy; one of the host is a call of the CUDA runtime or driver, or a range around a module. The
innermost range around the start of the call that launched a kernel is its module.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec

from pytest_llmgpu.inference import scoring, sm_clock
from pytest_llmgpu.inference.batching import Batch, Plan
from pytest_llmgpu.inference.models import experts_of
from pytest_llmgpu.inference.scoring import OnBatch, synchronize
from pytest_llmgpu.inference.sm_clock import SmClock
from pytest_llmgpu.inference.weights import layer_stacks
from pytest_llmgpu.recording.op_counts import count_calls, count_ops, module_hooks
from pytest_llmgpu.report.kernel_families import collective_of, family_of
from pytest_llmgpu.report.text import first_line
from pytest_llmgpu.report.work import (
    KERNEL_NAME_LENGTH,
    OTHER_MODULE,
    CollectiveWork,
    HostCalls,
    KernelFamily,
    ModelSize,
    RankWork,
    Work,
    WorkRow,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PASSES = 4
"""Profiled passes in the execution of the case."""
_LAYERS_AHEAD = 8
"""Layers that are launched while the GPU waits: it takes about 1,000 kernels ahead, and LLaMA-7B has 39 in a layer."""
_MOST_PADDED_TOKENS = 4096
_MOST_BATCHES = 4
_SCORING = "(scoring)"
"""Module of what runs before and after the model: the copy of the batch, log-softmax, and the choice of the targets."""
_ON_CPU = "kernels are recorded on CUDA devices only, and the case ran on a CPU"
_NO_RECORDS = "torch.profiler recorded no kernel: CUPTI has no permission, or another profiler uses it"
_BYPASSED = "kernels of this strategy are launched past torch's dispatcher, where FLOPs cannot be counted"
_LATE = "a GPU waited in vain for the host, or layers were not called as often as before"
_DEVICE_FIGURES = ("device_time_s", "copy_s", "idle_s", "busy", "kernels", "rows", "clock_ghz")
_HOST_FIGURES = ("runtime_calls", "host_syncs")
_DETACHING = "TEARDOWN_CUPTI"
"""The environment variable by which torch.profiler detaches CUPTI."""
_USERS_CHOICE = os.environ.get(_DETACHING)
_DETACHED = f"torch.profiler recorded no kernel: {_DETACHING}=1 detaches CUPTI while a pass runs; unset it"
_CUPTI_DETACHES = (12, 6)
"""With an older CUDA, where CUDA graphs exist, a later profile crashes (torch's `_KinetoProfile.prepare_trace`)."""
RANGE_PREFIX = "llmgpu:"
"""Begin of the name of a range that a work pass opens; the rest is the module's name."""
OUTSIDE = "(outside)"
"""Module of a kernel that was launched outside of every range."""
_NS = 1e-9
_CALL = re.compile(r"^(cuda|cu)[A-Z]")
_POLLS = re.compile(r"(Event|Stream)Query|(Get|PeekAt)LastError|IsCapturing|GetCaptureInfo|ExchangeStreamCaptureMode")
"""Calls without effect, some of them by other threads such as NCCL's watchdog: their number differs between passes."""
_SYNCHRONIZES = re.compile(r"^cuda(Stream|Device|Event)Synchronize|^cu(Stream|Ctx|Event)Synchronize")
_ONE_QUERY = "_attention_of_one_query"
"""The kernel of `inference.decode_kernels`."""
_COPY = re.compile(r"^Mem(cpy|set)\b")
_COPY_TO_HOST = "Memcpy DtoH"
_FAMILIES = get_args(KernelFamily)
_MODULE_ROWS = 100
"""Most rows of modules of a rank."""
_HASH = 8
"""Hexadecimal digits of the hash of a name that is cut."""


class Record(NamedTuple):
    """One record of torch.profiler."""

    name: str
    device: int | None
    """The index of the GPU; None: a record of the host."""
    start_ns: int
    duration_ns: int
    correlation: int
    """Joins a kernel or a copy to the call that launched it."""

    @property
    def end_ns(self) -> int:
        """The end on the same clock as the start."""
        return self.start_ns + self.duration_ns


class Calls(NamedTuple):
    """The calls of one kernel."""

    calls: int
    time_s: float


class PassKernels(NamedTuple):
    """The device records of one pass."""

    device_time_s: float
    """The sum over kernels that are no collective."""
    copy_s: float
    """The sum over copies and memsets, without copies between GPUs."""
    covered_s: float
    """The time during which a kernel ran on any GPU."""
    kernels: dict[str, Calls]
    """Full name of a kernel, a collective, a copy or a memset to its calls."""
    collective_s: dict[str, list[float]]
    """Kind of a collective, or of a copy between GPUs, to the durations of its calls in the order of their start."""


class Modules(NamedTuple):
    """The kernels of an eager pass by module, and the calls of the host that launched them."""

    kernels: dict[tuple[str, str], Calls]
    """Module and full name of a kernel to its calls."""
    runtime_calls: dict[str, int]
    """Function to its number of calls inside the ranges, calls that poll left out."""
    host_syncs: int
    """Calls inside the ranges that wait for the GPU, and copies to the host."""


class NamedRow(NamedTuple):
    """A `work.WorkRow` with the name of its kernel."""

    module: str | None
    kernel: str | None
    family: KernelFamily
    calls: int
    time_s: float
    passes_s: list[float] | None = None


Forward = Callable[[Batch], object]
"""Launches the work of one batch."""


class Program(NamedTuple):
    """What a rank runs: the loaded model of a strategy, or an engine."""

    devices: tuple[torch.device, ...]
    """It computes on these devices."""
    dispatched: bool
    """False if kernels are launched past torch's dispatcher, where FLOPs cannot be counted."""
    model: torch.nn.Module | None = None
    """Its modules have the names of reports; None: those of all modules that are called."""


class WorkReply(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one rank's work passes: `record` makes them, and `measure` adds those of the eager passes."""

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
    traces: list[str] = []
    """The trace files of this rank."""


class _HeldForward:
    """A forward in which a GPU waits before every eighth layer until the host has launched eight.

    Where the host launches more slowly than the GPU computes, the GPU would idle between kernels, at another clock than
    theirs, by an amount that differs from launch to launch. Stamps stand around layers that run without such gaps.
    Replayed graphs do not call layers, and compiled ones would trace the hooks: these are not held.
    """

    def __init__(self, forward: Forward, model: torch.nn.Module | None) -> None:
        decoder = getattr(model, "get_decoder", lambda: None)()
        stacks = (stack for _, stack in layer_stacks(decoder)) if decoder is not None else ()
        self._layers = [one for one in max(stacks, key=len, default=()) if one._compiled_call_impl is None]  # noqa: SLF001
        self._forward = forward
        by_gpu = itertools.groupby(self._layers, lambda layer: next((one.device for one in layer.parameters()), None))
        self._groups = [(layer, device) for device, layers in by_gpu for layer in [*layers][::_LAYERS_AHEAD] if device]
        """The first layers of groups, each on one GPU, and this GPU."""
        self._clocks: dict[torch.device, SmClock] = {}
        self._wanted: dict[torch.device, int] = {}
        self._begun: Counter[torch.device] = Counter()
        self._last: tuple[torch.device, int] | None = None
        """The groups of each GPU that are to be held, those that have begun, and the one that is held."""

    def prepare(self, devices: Sequence[torch.device], forwards: int) -> bool:
        """Hold so many forwards with as many groups as the last ones had, and return true; not if these were late."""
        wanted = {device: 0 if self._is_late() else self._begun[device] * forwards for device in devices}
        self._wanted = wanted if all(wanted.values()) else {}
        self._clocks = {device: SmClock([device], 2 * groups) for device, groups in self._wanted.items()}
        self._begun.clear()
        return bool(self._wanted)

    def __call__(self, batch: Batch) -> None:
        """Launch the work of a batch."""
        handles = [layer.register_forward_pre_hook(partial(self._begin, device)) for layer, device in self._groups]
        handles += [layer.register_forward_hook(self._end) for layer in self._layers[-1:]]
        try:
            self._forward(batch)
            self._end()
        finally:
            self._release()
            for handle in handles:
                handle.remove()

    def _is_late(self) -> bool:
        return any(clock.is_late() for clock in self._clocks.values())

    def _begin(self, device: torch.device, *_: object) -> None:
        import torch

        before, number = self._last, self._begun[device]
        self._end()
        self._begun[device] += 1
        if number < self._wanted.get(device, 0) and not self._is_late():
            if before is not None and before[0] != device:
                # Its stamp comes when the other GPU is done.
                torch.cuda.current_stream(device).wait_stream(torch.cuda.current_stream(before[0]))
            self._last = device, number
            self._clocks[device].hold(number)
            self._clocks[device].stamp(2 * number)

    def _end(self, *_: object) -> None:
        if self._last is not None:
            self._clocks[self._last[0]].stamp(2 * self._last[1] + 1)
        self._release()

    def _release(self) -> None:
        if self._last is not None:
            self._clocks[self._last[0]].release(self._last[1])
        self._last = None

    def ghz(self, passes: int) -> list[list[float]] | None:
        """Return the mean clock [GPUs][passes] of the layers; None where one was not held."""
        found = []
        for device, clock in self._clocks.items():
            groups = self._wanted[device]
            pairs = [(2 * number, 2 * number + 1) for number in range(groups)]
            seconds, ghz = clock.seconds(pairs), clock.ghz(pairs)
            if seconds is None or ghz is None or self._is_late() or self._begun[device] != groups:
                return None
            parts = [slice(begin, begin + groups // passes) for begin in range(0, groups, groups // passes)]
            cycles = list(map(operator.mul, ghz[0], seconds))
            found.append([sum(cycles[part]) / (sum(seconds[part]) or 1.0) for part in parts])
        return found or None


class _Recording:
    """The records of torch.profiler while `_recorded` was entered."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.why: str | None = None
        """The reason why there is no record."""
        self.traces: list[str] = []
        """The trace file, if it was written."""


def batches_used(padded_tokens: Sequence[int]) -> list[int]:
    """Return the numbers of the batches that work passes run: spread evenly over the plan, the same in every launch.

    As many as have 4,096 padded tokens together, at least 1 and at most 4.
    """
    planned = len(padded_tokens)
    for count in range(min(_MOST_BATCHES, planned), 1, -1):
        numbers = [(2 * index + 1) * planned // (2 * count) for index in range(count)]
        if sum(padded_tokens[number] for number in numbers) <= _MOST_PADDED_TOKENS:
            return numbers
    return [planned // 2]


def record(
    program: Program,
    plan: Plan,
    forward: Forward,
    *,
    on_batch: OnBatch,
    first: bool = True,
    whole_texts: bool = False,
    replayed: bool = False,
    alone: bool = False,
    trace: str | None = None,
) -> WorkReply:
    """Run the passes in the execution of the case, whose CUDA graphs are still recorded, and return their figures.

    Every rank must do so at the same time. `first` is true for the first passes of the case. Where a forward generates
    `whole_texts`, one batch is run. `replayed` forwards, CUDA graphs of one rank on one GPU, are also timed in a row.
    Those of a rank that is `alone` are held (`_HeldForward`). `trace` is the file for the trace of the last pass.
    """
    import torch

    padded_tokens = [batch.padded_tokens for batch in plan.batches]
    numbers = [len(padded_tokens) // 2] if whole_texts else batches_used(padded_tokens)
    gpus = [device for device in program.devices if device.type == "cuda"]
    uuids = [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus]
    figures = RankWork(uuids=uuids, why=dict.fromkeys(_DEVICE_FIGURES, _ON_CPU))
    reply = WorkReply(batches=numbers, eager_batches=[numbers[len(numbers) // 2]], work=figures)
    if not gpus:
        return reply
    batches = [plan.batches[number] for number in numbers]
    held = _HeldForward(forward, program.model if alone else None)
    # The first profile of a process initialises CUPTI, and its records are left out.
    with _recorded(first=first):
        _run(program.devices, [plan.batches[reply.eager_batches[0]]], held, on_batch)
    if held.prepare(program.devices, 1):  # whether a forward waits for the GPU, so that the host is late
        _run(program.devices, [plan.batches[reply.eager_batches[0]]], held, on_batch)
    is_held = held.prepare(program.devices, PASSES * len(batches))
    kernels, seconds, unprofiled_s, why = [], [], [], None
    clock = SmClock(program.devices, 2 * PASSES)
    in_a_row, rows = SmClock(program.devices, PASSES), [(number - 1, number) for number in range(1, PASSES, 2)]
    for number in range(PASSES):
        if number % 2:
            # Before a profile starts the GPU is idle and cools. At its power limit a pass after a forward has a clock
            # that is 3 to 5 % lower, and from passes at several clocks follows how the time depends on the clock.
            if replayed:
                # The first batch keeps the GPU busy until the row is launched.
                _run(program.devices, batches[:1], forward, on_batch, wait=False)
                in_a_row.stamp(number - 1)
            unprofiled_s.append(_run(program.devices, batches, forward, on_batch, wait=not replayed))
            in_a_row.stamp(number)
            synchronize(program.devices)
        with _recorded(trace=trace if number == PASSES - 1 else None) as recording:
            clock.stamp(2 * number)
            pass_s = _run(program.devices, batches, held, on_batch)
            clock.stamp(2 * number + 1)
            synchronize(program.devices)
        # All passes are run whatever a profiler does: ranks that stop would leave the others waiting in a collective.
        why = why or recording.why
        kernels.append(of_pass(recording.records))
        seconds.append(pass_s)
    reply = msgspec.structs.replace(reply, traces=recording.traces)
    if replayed:
        rows_s, rows_ghz = in_a_row.seconds(rows), in_a_row.ghz(rows)
        figures = msgspec.structs.replace(figures, replays_s=rows_s, replays_ghz=rows_ghz)
    if why:
        figures = msgspec.structs.replace(figures, why=dict.fromkeys(_DEVICE_FIGURES, why))
        return msgspec.structs.replace(reply, work=figures)
    # The time of a wait is in the other clock.
    clock_ghz = held.ghz(PASSES) if is_held else clock.ghz([(2 * number, 2 * number + 1) for number in range(PASSES)])
    if not replayed:
        seconds = [min(unprofiled_s)] * PASSES
    covered = [(one.covered_s, pass_s) for one, pass_s in zip(kernels, seconds, strict=True)]
    figures = msgspec.structs.replace(
        figures,
        device_time_s=[one.device_time_s for one in kernels],
        copy_s=[one.copy_s for one in kernels],
        idle_s=[max(0.0, pass_s - covered_s) for covered_s, pass_s in covered],
        busy=statistics.median(min(1.0, covered_s / pass_s) for covered_s, pass_s in covered),
        launched_ahead=is_held and clock_ghz is not None,
        kernels=sum(calls.calls for name, calls in kernels[-1].kernels.items() if not _COPY.match(name)),
        clock_ghz=clock_ghz,
        why={} if clock_ghz is not None else {"clock_ghz": clock.why or _LATE},
    )
    collective_s = [one.collective_s for one in kernels]
    return msgspec.structs.replace(reply, work=figures, rows=pass_rows(kernels), collective_s=collective_s)


def measure(
    program: Program,
    plan: Plan,
    reply: WorkReply,
    forward: Forward,
    *,
    on_batch: OnBatch,
    last: bool = True,
    trace: str | None = None,
) -> WorkReply:
    """Run the eager passes over the middle batch of the passes of `record`, and complete their reply.

    All forwards are eager now. Every rank must do so at the same time. `last` is true for the last passes of the case.
    `trace` is the file for the trace of the pass by modules, which on a CPU runs for the trace alone.
    """
    import torch

    batch, on_gpu = [plan.batches[number] for number in reply.eager_batches], program.devices[0].type == "cuda"
    figures = count_ops(lambda: _run(program.devices, batch, forward, on_batch), program.model, reply.work)
    rows, traces, why = reply.rows, reply.traces, dict(figures.why)
    unrecorded: str | None = _ON_CPU
    if on_gpu or trace is not None:
        profiled = _recorded(kernels=on_gpu, ranges=True, all_threads=program.model is None, last=last, trace=trace)
        ranges = module_hooks(program.model, lambda name: torch.profiler.record_function(RANGE_PREFIX + name))
        with profiled as recording, ranges:
            _run(program.devices, batch, forward, on_batch)
        traces = [*traces, *recording.traces]
        unrecorded = recording.why if on_gpu else _ON_CPU
    if unrecorded is None:
        found = attribute(recording.records)
        figures = msgspec.structs.replace(figures, runtime_calls=found.runtime_calls, host_syncs=found.host_syncs)
        rows = None if rows is None else [*rows, *module_rows(found)]
    else:
        why |= dict.fromkeys(_HOST_FIGURES, unrecorded)
    if not program.dispatched:
        why["flops"] = _BYPASSED
        figures = msgspec.structs.replace(figures, flops=None, flops_by_module=None)
    # The last one: what a model prepares in its first eager forwards is done.
    host_calls: list[HostCalls] = []
    if "host_calls" not in why:
        _run(program.devices, batch, lambda one: host_calls.append(count_calls(partial(forward, one))), on_batch)
    figures = msgspec.structs.replace(figures, host_calls=next(iter(host_calls), None), why=why)
    return msgspec.structs.replace(reply, work=figures, rows=rows, traces=traces)


def join(replies: Sequence[WorkReply], kernel_names: dict[str, int], model: ModelSize | str) -> Work:
    """Return the record of one launch from the answer of each rank.

    Names of kernels that are new are added to those with a number. `model` may be the reason why it has no size.
    """
    reasons = [reply.work.why["device_time_s"] for reply in replies if reply.rows is None]
    collectives = reasons[0] if reasons else _collectives([reply.collective_s for reply in replies])
    why = {"collectives": collectives} if isinstance(collectives, str) else {}
    if isinstance(model, str):
        why["model"] = model
    ranks = []
    for reply in replies:
        rows = [
            WorkRow(
                # The answer of each rank has the names of the modules again, in strings of its own.
                module=row.module and sys.intern(row.module),
                kernel=None if row.kernel is None else kernel_names.setdefault(row.kernel, len(kernel_names)),
                **{name: getattr(row, name) for name in NamedRow._fields[2:]},
            )
            for row in reply.rows or ()
        ]
        ran = reply.work.implementations
        if any(row.kernel == _ONE_QUERY for row in reply.rows or ()):  # compiled layers, which the eager pass is not
            ran = {kind: "sdpa (one query)" if name.startswith("sdpa") else name for kind, name in ran.items()}
        ranks.append(
            msgspec.structs.replace(reply.work, rows=None if reply.rows is None else rows, implementations=ran)
        )
    return Work(
        batches=replies[0].batches,
        eager_batches=replies[0].eager_batches,
        passes=len(replies[0].collective_s),
        collectives=None if isinstance(collectives, str) else collectives,
        ranks=ranks,
        model=None if isinstance(model, str) else model,
        why=why,
    )


def model_size(model: PreTrainedModel, dtype_bytes: int, stored: dict[str, tuple[str, int]] | None) -> ModelSize | str:
    """Return what a model computes at least, or the reason why the formula does not hold for it.

    It is the whole model; its weights may be on the meta device. `stored` has the bytes of quantised weights by name,
    as `quantization.stored` returns them; None for plain ones.
    """
    config = model.config.get_text_config()
    experts = experts_of(config)
    active: Any = getattr(config, "num_experts_per_tok", None)
    if experts and not active:
        return "its config has no num_experts_per_tok, the experts that a token passes through"
    apart = [model.get_input_embeddings(), model.get_output_embeddings()]
    left_out = {id(parameter) for module in apart if module is not None for parameter in module.parameters()}
    parts = {name: part for name, part in model.named_parameters() if id(part) not in left_out}
    counts = {name: part.numel() for name, part in parts.items()}
    # Some models have their experts under other names, always in one tensor.
    names = {
        name
        for name, part in parts.items()
        if experts and (".experts." in name or (part.dim() == 3 and part.shape[0] == experts))  # noqa: PLR2004 - experts, rows, columns
    }
    of_experts = sum(counts[name] for name in names)
    sizes = {name: count * dtype_bytes for name, count in counts.items()}
    if stored is not None:
        sizes = {name: size for name, (_, size) in stored.items()}
        if 4 * sum(sizes.values()) < sum(counts.values()):
            return f"its quantised weights are not in the model: {sum(sizes.values()):,} bytes are too few for them"
    share = active / experts if experts else 1.0
    heads, kinds = config.num_attention_heads, getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if kinds is None else None
    return ModelSize(
        parameters=sum(counts.values()) - round((1 - share) * of_experts),
        weights_bytes=sum(sizes.values()),
        experts_bytes=sum(size for name, size in sizes.items() if name in names or (experts and ".experts." in name)),
        active_experts=share,
        layers=(0 if window else config.num_hidden_layers) if kinds is None else kinds.count("full_attention"),
        attention_width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
    )


def _collectives(ranks: Sequence[Sequence[dict[str, list[float]]]]) -> list[CollectiveWork] | str:
    """Split the time of each kind of collective into transfer and waiting.

    From [ranks][passes] kind to the durations of its calls, to one record a kind, or to why calls cannot be joined.
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


@contextmanager
def scoring_forward(model: torch.nn.Module, input_device: torch.device, logits: str) -> Iterator[Forward]:
    """Return a context manager whose value scores a batch of a strategy; `logits` is one of `scoring.SCORINGS`."""
    with scoring.way(model, logits) as chosen:

        def forward(batch: Batch) -> None:
            packed = batch.packed.to(input_device, non_blocking=True)
            ids, rows_N, targets_N, _ = packed.split(batch.sizes)
            chosen.log_probabilities(ids.view(batch.rows, batch.width), rows_N, targets_N)

        yield forward


def _run(
    devices: Sequence[torch.device], batches: Sequence[Batch], forward: Forward, on_batch: OnBatch, *, wait: bool = True
) -> float:
    """Run batches once and return the seconds of all of them, the devices idle at both ends of each, or launch them."""
    import torch

    total_s = 0.0
    with torch.inference_mode():
        for batch in batches:
            synchronize(devices if wait else ())
            began_s = time.perf_counter()
            with torch.profiler.record_function(RANGE_PREFIX + _SCORING):
                forward(batch)
            synchronize(devices if wait else ())
            latency_s = time.perf_counter() - began_s
            on_batch(latency_s, batch.rows, batch.tokens, batch.padded_tokens)
            total_s += latency_s
    return total_s


@contextmanager
def _recorded(
    *,
    kernels: bool = True,
    ranges: bool = False,
    all_threads: bool = False,
    first: bool = False,
    last: bool = False,
    trace: str | None = None,
) -> Iterator[_Recording]:
    """While entered, torch.profiler records the kernels of this process, and the ranges of modules if wanted.

    Ranges are those of the calling thread, or of all threads. CUPTI is attached at the first profile of a case and
    detached after the last one. `trace` is the file for the trace.
    """
    from torch._C._profiler import _ExperimentalConfig  # as torch documents it (`torch.profiler.profile`)
    from torch.profiler import ProfilerActivity, profile

    recording = _Recording()
    profiler = profile(
        activities=[*[ProfilerActivity.CUDA] * kernels, *[ProfilerActivity.CPU] * ranges],
        experimental_config=_ExperimentalConfig(profile_all_threads=all_threads),
    )
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
            recording.records = read_records(results.kineto_results.events())
        except RuntimeError as error:
            recording.why = f"torch.profiler did not stop: {first_line(error)}"
    if recording.why is None and trace is not None:
        try:
            Path(trace).parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(trace)
            recording.traces.append(trace)
        except (OSError, RuntimeError) as error:  # it costs no figure of the case
            print(f"the trace {trace} could not be written: {first_line(error)}", file=sys.stderr)
    if recording.why is None and not any(record.device is not None for record in recording.records):
        recording.why = _NO_RECORDS if _USERS_CHOICE != "1" else _DETACHED


def _set_detaching(*, wanted: bool) -> None:
    """Let torch.profiler detach CUPTI where a profile starts or ends, or not; a value that the user has set stays.

    CUPTI that stays attached slows the cases after a profiled one: on an H200 (LLaMA-7B) replayed forwards took 0.9 to
    2 % longer and eager ones at batch size 1 45 %; detached, 0.2 % and 10 %. Kineto detaches it in another thread, and
    a profile that runs then has no kernels: so it is wanted from the last profile of a case to the first of the next.
    """
    import torch

    version = torch.version.cuda
    if version is None or tuple(map(int, version.split(".")[:2])) < _CUPTI_DETACHES or _USERS_CHOICE is not None:
        return
    os.environ[_DETACHING] = "1" if wanted else "0"


def read_records(events: Iterable[Any]) -> list[Record]:
    """Return the records that matter of `torch.profiler.profile(...).profiler.kineto_results.events()`.

    Ops of torch are left out, stamps of the clock, and ranges where they appear as records of a device a second time.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # as torch's own profiler does

    records = []
    for event in events:
        name = event.name()
        if event.device_type() != DeviceType.CPU:
            if event.is_user_annotation() or name in (sm_clock.STAMP, sm_clock.HOLD):
                continue
            device = event.device_index()
        elif name.startswith(RANGE_PREFIX) or _CALL.match(name):
            device = None
        else:
            continue
        records.append(Record(name, device, event.start_ns(), event.duration_ns(), event.correlation_id()))
    return records


def of_pass(records: Sequence[Record]) -> PassKernels:
    """Return the kernels of one pass."""
    time_ns: dict[str, int] = defaultdict(int)
    calls: Counter[str] = Counter()
    collectives: dict[str, list[float]] = defaultdict(list)
    device_ns = copy_ns = 0
    kernels = []
    for record in sorted(_on_device(records), key=lambda record: record.start_ns):
        calls[record.name] += 1
        time_ns[record.name] += record.duration_ns
        if is_kernel := not _COPY.match(record.name):
            kernels.append(record)
        if family_of(record.name) == "collective":
            collectives[collective_of(record.name)].append(record.duration_ns * _NS)
        elif not is_kernel:
            copy_ns += record.duration_ns
        else:
            device_ns += record.duration_ns
    covered_ns = end_ns = 0  # the length of the union of the kernels, which are sorted by their start
    for record in kernels:
        covered_ns += max(0, record.end_ns - max(end_ns, record.start_ns))
        end_ns = max(end_ns, record.end_ns)
    return PassKernels(
        device_time_s=device_ns * _NS,
        copy_s=copy_ns * _NS,
        covered_s=covered_ns * _NS,
        kernels={name: Calls(count, time_ns[name] * _NS) for name, count in calls.items()},
        collective_s=dict(collectives),
    )


def attribute(records: Sequence[Record]) -> Modules:
    """Attribute the kernels of an eager pass to the innermost range around the call that launched them."""
    on_host = sorted((one for one in records if one.device is None), key=lambda one: (one.start_ns, -one.end_ns))
    calls = [record for record in on_host if _CALL.match(record.name)]
    waiting = [record for record in on_host if record.name.startswith(RANGE_PREFIX)][::-1]
    module_of: dict[int, str] = {}
    opened: list[Record] = []  # ranges are nested
    for call in calls:
        while waiting and waiting[-1].start_ns <= call.start_ns:
            entered = waiting.pop()
            while opened and opened[-1].end_ns <= entered.start_ns:
                opened.pop()
            opened.append(entered)
        while opened and opened[-1].end_ns <= call.start_ns:
            opened.pop()
        if opened:
            module_of[call.correlation] = opened[-1].name.removeprefix(RANGE_PREFIX)
    time_ns: dict[tuple[str, str], int] = defaultdict(int)
    count: Counter[tuple[str, str]] = Counter()
    for record in _on_device(records):
        module = module_of.get(record.correlation, OUTSIDE)
        count[module, record.name] += 1
        time_ns[module, record.name] += record.duration_ns
    inside = [record.name for record in calls if record.correlation in module_of]
    to_host = [record for record in _on_device(records) if record.name.startswith(_COPY_TO_HOST)]
    return Modules(
        kernels={key: Calls(number, time_ns[key] * _NS) for key, number in count.items()},
        runtime_calls=dict(sorted(Counter(name for name in inside if not _POLLS.search(name)).items())),
        host_syncs=sum(_SYNCHRONIZES.match(name) is not None for name in inside)
        + sum(record.correlation in module_of for record in to_host),
    )


def pass_rows(passes: Sequence[PassKernels]) -> list[NamedRow]:
    """Return a row for each kernel and copy of the passes, the largest first; its time is the median over them."""
    found = []
    for name, calls in passes[-1].kernels.items():
        times_s = [one.kernels[name].time_s if name in one.kernels else 0.0 for one in passes]
        time_s = statistics.median([one for one in times_s if one] or [0.0])
        found.append(NamedRow(None, short_name(name), family_of(name), calls.calls, time_s, times_s))
    return sorted(found, key=lambda row: (-row.time_s, row.kernel or ""))


def module_rows(attributed: Modules) -> list[NamedRow]:
    """Return the at most 100 largest rows of the eager pass by module."""
    by_module = _by_time(
        NamedRow(module, name, family_of(name), *calls) for (module, name), calls in attributed.kernels.items()
    )
    # The others are summed by module and family, so that no family of a module is lost.
    for own in range(min(_MODULE_ROWS, len(by_module)), -1, -1):
        sums = _by_time(row._replace(kernel=None) for row in by_module[own:])
        if own + len(sums) <= _MODULE_ROWS:
            return [*by_module[:own], *sums]
    # A program of very many modules: a row `other` for each family sums the smallest modules.
    kept = _MODULE_ROWS - len(_FAMILIES)
    return [*sums[:kept], *_by_time(row._replace(module=OTHER_MODULE) for row in sums[kept:])]


def short_name(kernel: str) -> str:
    """Return the name of a kernel; a long one is cut and ends with digits of its hash, so that it stays different."""
    if len(kernel) <= KERNEL_NAME_LENGTH:
        return kernel
    return f"{kernel[: KERNEL_NAME_LENGTH - _HASH - 1]}~{hashlib.sha256(kernel.encode()).hexdigest()[:_HASH]}"


def _by_time(several: Iterable[NamedRow]) -> list[NamedRow]:
    """Return rows with cut names, equal ones summed, the largest time first."""
    summed: dict[tuple[str | None, str | None, KernelFamily], tuple[int, float]] = {}
    for row in several:
        key = row.module, None if row.kernel is None else short_name(row.kernel), row.family
        calls, time_s = summed.get(key, (0, 0.0))
        summed[key] = calls + row.calls, time_s + row.time_s
    found = [NamedRow(*key, *amounts) for key, amounts in summed.items()]
    return sorted(found, key=lambda row: (-row.time_s, row.module or "", row.kernel or ""))


def _on_device(records: Iterable[Record]) -> Iterator[Record]:
    return (record for record in records if record.device is not None)
