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


class TimeChange(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one part of the program in a work pass, in both reports."""

    name: str
    """Name of the part: a family of kernels, a module with layer numbers folded, or a `Place` that is no kernel."""
    family: KernelFamily | None = None
    """Family of the kernels; null for a part that is no kernel of the program itself."""
    before_s: Seconds
    """Time in the baseline in seconds."""
    after_s: Seconds
    """Time in the candidate in seconds."""
    share: float
    """Growth of a place, as a fraction of the growth of all those that grew; negative for one that became faster."""

    @property
    def growth_s(self) -> float:
        """The time in the candidate less that in the baseline."""
        return self.after_s - self.before_s


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
    """Time of one work pass in the baseline to which the parts add up: device time, or the time of the whole pass for a
    verdict on wall time. Null for a verdict on a number."""
    after_s: Seconds | None = None
    """The same time in the candidate."""
    parts: list[TimeChange] = []
    """Parts that changed, the largest growth first: families of kernels in the execution of the case, and for wall time
    also the collectives, the copies, and the idle time of the GPU. They add up to the difference. The list is empty if
    the work passes do not show the change of wall time."""
    modules: list[TimeChange] = []
    """Modules with a share of more than 10 % of the growth, by family, the largest share first. Their times are those
    of the eager pass. The family grew in the execution of the case too."""
    kernels: list[CallsChange] = []
    """Kernels with another number of calls, the largest change first."""
    runtime_calls: list[CallsChange] = []
    """Functions of the CUDA runtime with another number of calls; those that make the host wait come first."""
    ops: list[CallsChange] = []
    """Ops of torch with another number of calls, the largest change first."""
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
