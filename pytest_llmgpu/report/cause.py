"""The record of the cause of a verdict: the parts of the program in which the difference to the baseline lies."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_llmgpu.report.bounds import Count, Seconds
from pytest_llmgpu.report.work import KernelFamily

Place = Literal["device", "kernel", "transfer", "waiting", "copies", "host", "program"]
"""The place of a difference. device: kernels that are no collective. kernel: one of them, called as often as before.
transfer: collectives while all ranks are inside.
waiting: collectives of ranks that wait for another one. copies: copies and memsets. host: the GPU is idle and waits for
the host. program: the number of ops, kernels or runtime calls changed, and no time was compared."""


class SlowerKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that is called as often as before, and became slower than the others."""

    name: str
    """Name of the kernel."""
    family: KernelFamily
    """Family of the kernel."""
    module: str | None
    """Module that has most of the time of its family; null if none has half of it."""
    growth: float
    """Growth of its time beyond the factor that all unchanged kernels have in common, as a fraction of it."""
    excess: float
    """The same growth as a fraction of device time."""
    error: float
    """Standard error of `excess`."""


class CallsChange(msgspec.Struct, frozen=True, kw_only=True):
    """The number of calls of one function in a work pass, in both reports."""

    name: str
    """Name of a kernel, of an op of torch, of a function of the CUDA runtime, or of a source file."""
    module: str | None = None
    """Module of the model whose number of calls changed most; null if it is not known."""
    layers: Count | None = None
    """Largest number of layers that can have the added calls, if these are fewer than the layers of the model; null for
    a module without a layer number, and where all layers may have changed."""
    per_layer: Count | None = None
    """Number of calls that every layer has more, or fewer, in one forward; null where layers can differ."""
    before: Count
    """Number of calls in the baseline."""
    after: Count
    """Number of calls in the candidate."""

    @property
    def growth(self) -> int:
        """The number of calls in the candidate less that in the baseline."""
        return self.after - self.before


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a verdict by the work passes of both reports. Several launches of a report count by their median."""

    place: Place
    """Place of the largest part of the difference."""
    rank: Count | None = None
    """The one rank that became slower, so that the other ranks wait for it; null if all ranks changed alike."""
    before_s: Seconds | None = None
    """Time of the place in one work pass of the baseline; null for a verdict on a number, and where no part of a pass
    grew as wall time did."""
    after_s: Seconds | None = None
    """The same time in the candidate."""
    kernel: SlowerKernel | None = None
    """The kernel of the place `kernel`; null for other places."""
    kernels: list[CallsChange] = []
    """Kernels with another number of calls, the largest change first."""
    runtime_calls: list[CallsChange] = []
    """Functions of the CUDA runtime with another number of calls; those that make the host wait come first."""
    ops: list[CallsChange] = []
    """Ops of torch with another number of calls, the largest change first."""
    moved: str | None = None
    """A module that ops left, and the one that has them: `layers.*.mlp to layers.*.mlp.mlp`; null if none moved."""
    host_calls: list[CallsChange] = []
    """Source files of Python functions with another number of calls in a forward, the largest change first."""
    price: float | None = None
    """Time of the calls of kernels that were added less that of those that went, as a fraction of the device time of a
    pass, at the clock of the candidate. Null where the kernels are the same, or their times are not known."""
    price_error: float | None = None
    """Largest error of `price`, as a fraction of device time."""
    forwards: Count = 1
    """Forwards of the pass in which kernels are counted."""

    @property
    def calls(self) -> list[CallsChange]:
        """Everything that is called more or less often."""
        return [*self.ops, *self.kernels, *self.runtime_calls, *self.host_calls]
