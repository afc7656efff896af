"""Records of the work of a program, and of the shortest time in which the machine could do it.

A work pass runs some batches of a case again, after everything that is measured, under torch.profiler. Its figures are
quiet where wall time is not: the number of kernel calls is exact, and the time of the kernels alone hardly differs
between launches. Times come from passes in the execution of the case, modules and exact numbers from eager ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pytest_llmgpu.report.bounds import Amount, Count, Fraction, Reasons, Seconds

KERNEL_NAME_LENGTH = 120
"""Names of kernels are cut to this number of characters: C++ templates make some of them thousands long. A cut name
ends with 8 hexadecimal digits of the hash of the whole name."""

OTHER_MODULE = "other"
"""Module of the rows that sum all modules without a row of their own, one row for each family."""

WORK_OFF = "work passes are switched off for this case (--llmgpu-work=off)"
NO_WORK = "work passes run for completed cases only"
WORK_UNSEEN = "work cannot be recorded"
WORK_STOPPED = "the work passes were stopped"
"""Reasons in `why` of a launch; the last one if it was interrupted after its measured forwards."""

WORK_ON = "Measure the candidate again without --llmgpu-work=off."
"""Next step where the candidate has `WORK_OFF` and the baseline has work."""

TRAFFIC_FAILED = "the forwards in which traffic is counted failed"
TRAFFIC_STOPPED = "the counting of traffic was stopped"
"""Reasons in `why` of a completed case; the first one is followed by the error of a rank."""

KernelFamily = Literal["GEMM", "attention", "norm", "elementwise", "copy", "collective", "other"]
"""The kind of computation of a kernel, by its name (see `kernel_families`)."""


class WorkRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The calls of one kernel on one rank, in a whole pass or in one module of the model."""

    module: str | None
    """The module that launched the kernel in the eager pass over `eager_batches`, with layer numbers folded:
    `layers.*.mlp.down_proj`. Null: the row holds all calls of the kernel in a pass over `batches` in the execution of
    the case (the median over the passes)."""
    kernel: Count | None
    """The number of the kernel in `environment.kernel_names`. Null: the sum of kernels of the family without a row."""
    family: KernelFamily
    """The family of the kernel, or of all kernels that the row sums."""
    calls: Count
    """The number of calls in one pass."""
    time_s: Seconds
    """The sum of the durations of these calls in seconds. The time of a collective contains waiting."""
    passes_s: list[Seconds] | None = None
    """For each pass, the sum of the durations of the calls of the kernel in seconds. Null for rows of modules, and in
    older reports."""


class CollectiveWork(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one kind of collective in the work passes, over all ranks."""

    collective: str
    """The kind of the collective, such as `all_reduce`, by the name of its kernel; `peer_copy`: copies between GPUs."""
    calls: Count
    """The number of calls on each rank in one pass."""
    transfer_s: list[Seconds]
    """For each pass, the sum over the calls of the shortest duration on any rank: only while all ranks are inside a
    collective can it transfer data."""
    wait_s: list[Seconds]
    """For each pass, the remaining time in these kernels, averaged over the ranks: each rank waits for the others."""


class HostCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of functions by the host in one eager forward, or one decode step, with the garbage collector off."""

    python: Count
    """The number of calls of Python functions on the thread of the forward."""
    c: Count
    """The number of calls of functions of C by Python code on this thread."""
    by_file: dict[str, Count]
    """Source file of a Python function, below the folder that it was imported from, to its part of `python`."""
    python_version: str
    """The minor version of Python (`3.12`). Other versions inline other functions: their numbers differ."""


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of the tokens of one forward, padding included, with a value for each layer that has experts."""

    experts: Count
    """The number of experts of a layer."""
    tokens: Count
    """The number of tokens of the forward."""
    touched: list[Count]
    """The number of experts that have a token."""
    busiest: list[Count]
    """The number of tokens of the expert that has most of them."""


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one rank. A figure that could not be measured is null, with its reason in `why`."""

    uuids: list[str]
    """The UUIDs of the GPUs that the rank computes on, as NVML writes them. Empty on a CPU."""
    device_time_s: list[Seconds] | None = None
    """For each pass, the sum of the durations of the rank's kernels that are no collective, in seconds."""
    copy_s: list[Seconds] | None = None
    """For each pass, the sum of the durations of copies within a GPU and with the host, and of memsets, in seconds."""
    idle_s: list[Seconds] | None = None
    """For each pass of the length of `busy`, the time during which no kernel ran on any GPU of the rank, in seconds."""
    clock_ghz: list[list[Amount]] | None = None
    """The mean clock of the SMs in each pass in GHz [GPUs][passes]: the median over the SMs of their cycles divided by
    the time. Null in older reports."""
    replays_s: list[Seconds] | None = None
    """For each row of CUDA graphs, the batches of a pass without a wait between them and without the profiler, its time
    on the GPU in seconds. Null for other forwards, cases that generate, several ranks or GPUs, where the clock is not
    known, and in older reports."""
    replays_ghz: list[list[Amount]] | None = None
    """The mean clock of the SMs in each row, as `clock_ghz`."""
    busy: Fraction | None = None
    """The fraction of a pass during which a kernel ran on a GPU of the rank (the median over the passes). Its length is
    the shortest of the same batches without the profiler; of CUDA graphs of one GPU with it, which makes a pass longer:
    that of LLaMA-7B at batch size 1 by 7 %."""
    launched_ahead: bool = False
    """Whether `clock_ghz` is that of the layers, which the host had launched before a GPU began with them: in forwards
    of one rank that are no CUDA graphs. False in older reports."""
    kernels: Count | None = None
    """The number of kernel calls in a pass, collectives included."""
    ops: dict[str, Count] | None = None
    """Name of each op of torch (`aten::mm`) to its number of calls on local tensors in an eager pass over
    `eager_batches`."""
    ops_by_module: dict[str, dict[str, Count]] | None = None
    """Name of a module, with layer numbers folded, to its part of `ops`: those that no module within it calls. Null in
    older reports."""
    flops: Count | None = None
    """The floating-point operations of this rank in an eager pass over `eager_batches`, by torch's formulas for matrix
    products, convolutions and attention. Tensors that are split over ranks count with the part of this rank."""
    flops_by_module: dict[str, Count] | None = None
    """Name of a module, with layer numbers folded, to its part of `flops`: that of ops which no module within it
    computes. Null where `flops` is, and in older reports."""
    runtime_calls: dict[str, Count] | None = None
    """Name of each function of the CUDA runtime and driver to its number of calls in an eager pass over
    `eager_batches`. Calls that poll, and the calls by which results are read back, are left out."""
    host_syncs: Count | None = None
    """The number of calls in an eager pass over `eager_batches` that make the host wait for the GPU, plus the number of
    copies to the host. A scalar that is read back counts as two: its copy and its synchronization. The pass itself adds
    none. transformers reads one scalar in each forward, to see if a row holds several sequences."""
    host_calls: HostCalls | None = None
    """The calls of functions by the host in the third eager forward over `eager_batches`. Null in older reports."""
    implementations: dict[str, str] = {}
    """Kind of layer (`attention` or, where layers differ, `sliding attention`, `full attention`, `linear attention`;
    `experts`) to its implementation in transformers and the kernels of the eager pass: `sdpa (flash)`. Compiled decode
    steps have `sdpa (one query)`, the kernel of this package. Empty without a config of transformers, and in older
    reports."""
    routing: Routing | None = None
    """The experts of the tokens of the first eager forward over `eager_batches`; null for a model without experts."""
    rows: Sequence[WorkRow] | None = None
    """A row for every kernel, copy and memset of a pass, and the at most 100 largest rows by module and kernel. The
    time of the remaining kernels of a module is summed by family, and that of the smallest of very many modules by
    family as `other`. In older reports the small kernels of a pass are summed by family too, and copies are missing."""
    why: Reasons = {}


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a model that decide how much a forward has to compute at least."""

    parameters: Count
    """The number of parameters of the decoder that a token passes through: without the input embeddings and the output
    head, and of experts those that are active for a token."""
    weights_bytes: Count
    """The size of all parameters of the decoder in the dtype of the case, without input embeddings and output head."""
    experts_bytes: Count = 0
    """The part of `weights_bytes` that belongs to experts, of which a forward reads those that its tokens are routed
    to."""
    active_experts: Fraction = 1.0
    """The experts that are active for a token, divided by the experts of a layer."""
    layers: Count
    """The number of decoder layers that attend to all tokens before, without sliding windows and linear attention."""
    attention_width: Count
    """The number of query heads times the size of a head."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the program in the work passes of one launch."""

    batches: list[Count]
    """The numbers of the batches of the plan that each pass in the execution of the case ran. They are equal where
    `plan_sha256` is."""
    eager_batches: list[Count]
    """The numbers of the batches that the eager passes ran, on which ops, FLOPs, calls of the CUDA runtime and rows of
    modules are based."""
    passes: Count
    """The number of profiled passes in the execution of the case. 0 on a CPU, where ops and FLOPs alone are counted."""
    collectives: list[CollectiveWork] | None = None
    """The collectives of the passes by kind. Empty where the ranks have none. Null with its reason in `why` where the
    calls of the ranks do not correspond."""
    ranks: list[RankWork]
    """The figures of each rank, in the order of the ranks."""
    model: ModelSize | None = None
    """The size of the model, from which `bound` is computed."""
    why: Reasons = {}


class DeviceCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that one GPU reached in a short benchmark."""

    uuid: str
    """The UUID of the GPU as NVML writes it."""
    gemm_flops_per_s: dict[str, Amount] = {}
    """Dtype to the floating-point operations per second of a product of two 8192 x 8192 matrices."""
    copy_bytes_per_s: Amount | None = None
    """The bytes that a copy within the memory of the GPU reads and writes per second."""
    why: Reasons = {}


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of the machine, measured once a session."""

    devices: list[DeviceCeilings] = []
    """One record for each GPU that a case used."""
    all_reduce_bytes_per_s: Amount | None = None
    """The bytes that each rank sends per second in a large all-reduce, counted as in the ring algorithm."""
    all_reduce_latency_s: Seconds | None = None
    """The time of an all-reduce of a few bytes in seconds."""
    why: Reasons = {}


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The shortest time in which the measured ceilings allow all batches of a case."""

    compute_s: Seconds
    """The time of the matrix products and of attention of all batches in seconds."""
    memory_s: Seconds
    """The time in seconds to read the weights from memory once per forward, and the KV cache once per decode step."""
    wire_s: Seconds
    """The time of the collectives in seconds. 0 where nothing is sent between ranks."""
    bound_s: Seconds
    """The sum over forwards of the larger of compute and memory, plus the wire, in seconds."""
    limited_by: Literal["compute", "memory", "wire"]
    """The largest of the three times."""
    share: Amount
    """The bound divided by `inference_s`: 1 where the case is as fast as the ceilings allow."""
    prefill_s: Seconds | None = None
    """The mean over batches of the bound of a prefill without its collectives, in seconds; null for a case that
    scores."""
    step_s: Seconds | None = None
    """The mean of the bound of a decode step without its collectives, in seconds; null for a case without steps."""
    experts_read: Amount | None = None
    """The mean over layers of the experts that had a token in the eager pass; null for a model without experts."""
    experts_expected: Amount | None = None
    """The number that is expected for uniform routing, on which the bound is based."""


def renumbered(work: Work, numbers: Sequence[int]) -> Work:
    """Return a record with the new number of each old one; a row that refers to none of them loses its kernel."""
    new: dict[int | None, int] = dict(enumerate(numbers))

    def of_rank(rank: RankWork) -> RankWork:
        rows = [msgspec.structs.replace(row, kernel=new.get(row.kernel)) for row in rank.rows or ()]
        return msgspec.structs.replace(rank, rows=None if rank.rows is None else rows)

    return msgspec.structs.replace(work, ranks=[of_rank(rank) for rank in work.ranks])
