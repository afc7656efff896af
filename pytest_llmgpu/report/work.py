"""What a program computes, and the shortest time in which the machine could compute it: the records.

A work pass runs some batches of a case again, after everything that is measured, under torch.profiler. Its figures are
quiet where wall time is not: the number of kernel calls is exact, and the time of the kernels alone hardly differs
between launches.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "KERNEL_NAME_LENGTH",
    "OTHER_MODULE",
    "Bound",
    "Ceilings",
    "CollectiveWork",
    "DeviceCeilings",
    "KernelFamily",
    "ModelSize",
    "RankWork",
    "Work",
    "WorkRow",
]

KERNEL_NAME_LENGTH = 120
"""Names of kernels are cut to this number of characters: C++ templates make some of them thousands long."""

OTHER_MODULE = "other"
"""Module of the row that sums all modules without a row of their own."""

KernelFamily = Literal["GEMM", "attention", "norm", "elementwise", "copy", "collective", "other"]
"""The kind of computation of a kernel, by its name (see `kernel_families`)."""


class WorkRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The calls of one kernel on one rank, in a whole pass or in one module of the model."""

    module: str | None
    """The module that launched the kernel in the eager pass, with layer numbers folded: `layers.*.mlp.down_proj`. Null:
    the row holds all calls of the kernel in a pass in the execution of the case (the median over the passes)."""
    kernel: int | None
    """The number of the kernel in `environment.kernel_names`. Null: the row sums the kernels without a row of their
    own."""
    family: KernelFamily
    """The family of the kernel. A row that sums several modules has the family `other`."""
    calls: int
    """The number of calls in one pass."""
    time_s: float
    """The sum of the durations of these calls in seconds. The time of a collective contains waiting."""


class CollectiveWork(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one kind of collective in the work passes, over all ranks."""

    collective: str
    """The kind of the collective, such as `all_reduce`, by the name of its kernel."""
    calls: int
    """The number of calls on each rank in one pass."""
    transfer_s: list[float]
    """[passes] The sum over the calls of the shortest duration on any rank: only while all ranks are inside a
    collective can it transfer data."""
    wait_s: list[float]
    """[passes] The remaining time in these kernels, averaged over the ranks: each rank waits for the others."""


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank computed in the work passes. A figure that could not be measured is null, with its reason in
    `why`.
    """

    uuids: list[str]
    """The UUIDs of the GPUs that the rank computes on, as NVML writes them. Empty on a CPU."""
    device_time_s: list[float] | None = None
    """[passes] The sum of the durations of the rank's kernels that are no collective, in seconds."""
    copy_s: list[float] | None = None
    """[passes] The sum of the durations of copies and memsets in seconds."""
    idle_s: list[float] | None = None
    """[passes] The time of the pass during which no kernel ran on any GPU of the rank, in seconds."""
    busy: float | None = None
    """The fraction of a pass during which a kernel ran on a GPU of the rank (the median over the passes)."""
    kernels: int | None = None
    """The number of kernel calls in a pass, collectives included."""
    kernels_sha256: str | None = None
    """The SHA-256 of the sorted names and numbers of calls of all kernels in a pass."""
    ops: dict[str, int] | None = None
    """Name of each op of torch (`aten::mm`) to its number of calls on local tensors in an eager pass."""
    flops: int | None = None
    """The floating-point operations of this rank in an eager pass, by torch's formulas for matrix products,
    convolutions and attention. Tensors that are split over ranks count with the part of this rank."""
    runtime_calls: dict[str, int] | None = None
    """Name of each function of the CUDA runtime and driver to its number of calls in an eager pass. Calls that poll,
    and the calls by which results are read back, are left out."""
    host_syncs: int | None = None
    """The number of calls in an eager pass that make the host wait for the GPU, plus the number of copies to the host.
    A scalar that is read back counts as two: its copy and its synchronization."""
    rows: list[WorkRow] | None = None
    """The kernels with the largest times, at most 100 rows. The time of the remaining kernels is summed by family, the
    time of the remaining modules in one row with the module `other`."""
    why: dict[str, str] = {}
    """Name of a field that is null to the reason."""


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a model that decide how much a forward has to compute at least."""

    parameters: int
    """The number of parameters of the decoder, without the input embeddings and the output head."""
    weights_bytes: int
    """The size of these parameters in the dtype of the case."""
    layers: int
    """The number of decoder layers."""
    attention_width: int
    """The number of query heads times the size of a head."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What the program computed in the work passes of one launch."""

    batches: list[int]
    """The numbers of the batches of the plan that each pass ran. They are equal where `plan_sha256` is."""
    passes: int
    """The number of profiled passes in the execution of the case. 0 on a CPU, where ops and FLOPs alone are counted."""
    collectives: list[CollectiveWork] | None = None
    """The collectives of the passes by kind. Empty where the ranks have none. Null with its reason in `why` where the
    calls of the ranks do not correspond."""
    ranks: list[RankWork]
    """[ranks] What each rank computed."""
    model: ModelSize | None = None
    """The size of the model, from which `bound` is computed."""
    why: dict[str, str] = {}
    """Name of a field that is null to the reason."""


class DeviceCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that one GPU reached in a short benchmark."""

    uuid: str
    """The UUID of the GPU as NVML writes it."""
    gemm_flops_per_s: dict[str, float] = {}
    """Dtype to the floating-point operations per second of a product of two 8192 x 8192 matrices."""
    copy_bytes_per_s: float | None = None
    """The bytes that a copy within the memory of the GPU reads and writes per second."""
    why: dict[str, str] = {}
    """Name of a figure that is missing to the reason."""


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of the machine, measured once a session."""

    devices: list[DeviceCeilings] = []
    """One record for each GPU that a case used."""
    all_reduce_bytes_per_s: float | None = None
    """The bytes that each rank sends per second in a large all-reduce, counted as in the ring algorithm."""
    all_reduce_latency_s: float | None = None
    """The time of an all-reduce of a few bytes in seconds."""
    why: dict[str, str] = {}
    """Name of a figure that is null to the reason."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The shortest time in which the measured ceilings allow all batches of a case."""

    compute_s: float
    """The time of the matrix products and of attention of all batches in seconds."""
    memory_s: float
    """The time in seconds to read the weights from memory once per batch."""
    wire_s: float
    """The time of the collectives in seconds. 0 where nothing is sent between ranks."""
    bound_s: float
    """The sum over batches of the larger of compute and memory, plus the wire, in seconds."""
    limited_by: Literal["compute", "memory", "wire"]
    """The largest of the three times."""
    share: float
    """The bound divided by `inference_s`: 1 where the case is as fast as the ceilings allow."""
