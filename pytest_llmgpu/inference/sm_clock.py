"""The clock of the SMs of GPUs while forwards run.

A stamp is a kernel in which each SM writes its cycle counter and the time. The cycles between two stamps divided by the
time between them are the mean clock of an SM; that of a GPU is the median over its SMs. NVML has one value in 20 to
167 ms, which is too coarse for a forward. The driver translates the kernel, and SMs write to memory of the host: no
compiler, memory of the GPU or copy is needed. A stamp takes 1.2 us on an H200, outside of measured times.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STAMP, HOLD = "llmgpu_stamp", "llmgpu_hold"
"""Names of the kernels in a profile."""
_LONGEST_HOLD_NS = 250_000_000
"""A host that waits for the GPU, or for a place in its queue, cannot release it."""
_PTX = f"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry {STAMP}(.param .u64 stamps) {{
    .reg .b32 %sm;
    .reg .b64 %to, %offset, %cycles, %ns;
    ld.param.u64 %to, [stamps];
    mov.u32 %sm, %smid;
    mov.u64 %ns, %globaltimer;
    mov.u64 %cycles, %clock64;
    mul.wide.u32 %offset, %sm, 16;
    add.s64 %to, %to, %offset;
    st.global.u64 [%to], %cycles;
    st.global.u64 [%to+8], %ns;
    ret;
}}
.visible .entry {HOLD}(.param .u64 words) {{
    .reg .b64 %at, %released, %begin, %ns, %late;
    .reg .pred %done, %early;
    ld.param.u64 %at, [words];
    mov.u64 %begin, %globaltimer;
again:
    ld.volatile.global.u64 %released, [%at];
    setp.ne.u64 %done, %released, 0;
    @%done ret;
    mov.u64 %ns, %globaltimer;
    sub.u64 %ns, %ns, %begin;
    setp.lt.u64 %early, %ns, {_LONGEST_HOLD_NS};
    @%early bra again;
    mov.u64 %late, 1;
    st.global.u64 [%at+8], %late;
    ret;
}}
"""
_BLOCKS_PER_SM = 2
"""With one block for each SM some SMs would get two and others none."""


class SmClock:
    """The SM clock of some GPUs between numbered stamps; without a clock `why` has the reason."""

    def __init__(self, devices: Sequence[torch.device], stamps: int) -> None:
        """Prepare a number of stamps on each device."""
        import torch

        self.why: str | None = None
        """Reason why there is no clock."""
        self._kernels: list[tuple[Callable[[int], None], Callable[[int], None]]] = []
        """[GPUs] What launches a stamp, and a wait."""
        self._stamps: list[torch.Tensor] = []
        """[GPUs] Cycles and nanoseconds [stamps, SMs, 2]; 0 where an SM has taken no stamp."""
        self._words = torch.zeros(stamps, 2, dtype=torch.int64)
        """[holds, 2]: 1 if it was released, and if a GPU waited in vain."""
        if any(device.type != "cuda" for device in devices):
            self.why = "the SM clock is measured on CUDA devices only, and the case ran on a CPU"
            return
        try:
            for gpu in devices:
                sms = torch.cuda.get_device_properties(gpu).multi_processor_count
                self._kernels.append((_launcher(gpu, STAMP, _BLOCKS_PER_SM * sms), _launcher(gpu, HOLD, 1)))
                self._stamps.append(torch.zeros(stamps, sms, 2, dtype=torch.int64).pin_memory())
            self._words = self._words.pin_memory()
        except (AttributeError, OSError, RuntimeError) as error:
            self.why = f"the kernel that reads the SM clock cannot run: {error}"

    def hold(self, number: int) -> None:
        """Let the GPUs wait, after everything that was launched before, for `release`, but at most 0.25 s."""
        for _, hold in self._kernels if self.why is None else ():
            hold(self._words[number].data_ptr())

    def release(self, number: int) -> None:
        """Let the GPUs go on."""
        self._words[number, 0] = 1

    def is_late(self) -> bool:
        """Return whether a GPU has waited in vain for a release."""
        return bool(self._words[:, 1].any())

    def stamp(self, number: int) -> None:
        """Take a stamp as soon as the GPUs have done everything that was launched before."""
        for (stamp, _), stamps in zip(self._kernels, self._stamps, strict=True) if self.why is None else ():
            stamp(stamps[number].data_ptr())

    def ghz(self, intervals: Sequence[tuple[int, int]]) -> list[list[float]] | None:
        """Return the mean clock [GPUs][intervals] between pairs of stamps; the GPUs must be idle. None: see `why`."""
        if self.why is not None:
            return None
        return [[between(stamps[one], stamps[other])[1] for one, other in intervals] for stamps in self._stamps]

    def seconds(self, intervals: Sequence[tuple[int, int]]) -> list[float] | None:
        """Return the time of the first GPU between pairs of stamps; None where `ghz` is."""
        return None if self.why else [between(*(self._stamps[0][one] for one in pair))[0] for pair in intervals]


def between(earlier: torch.Tensor, later: torch.Tensor) -> tuple[float, float]:
    """Return the time in seconds and the clock in GHz between two stamps [SMs, 2] of cycles and nanoseconds.

    Both are medians over the SMs. One that took no stamp has zeros and does not count; 0 where none took both.
    """
    passed = (later - earlier)[(earlier[:, 1] > 0) & (later[:, 1] > earlier[:, 1])].double()
    if not len(passed):
        return 0.0, 0.0
    return float(passed[:, 1].median()) * 1e-9, float((passed[:, 0] / passed[:, 1]).median())


@cache
def _launcher(gpu: torch.device, name: str, blocks: int) -> Callable[[int], None]:
    """Return what launches a kernel on the current stream of a GPU, for its parameter; loaded once in a process.

    OSError if there is no CUDA driver, RuntimeError if it refused the kernel.
    """
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(gpu):
        torch.cuda.synchronize()  # A context exists from here on.
        for status in (
            driver.cuModuleLoadData(ctypes.byref(module), _PTX.encode()),
            driver.cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()),
        ):
            if status:
                raise RuntimeError(f"error {status} of the CUDA driver")
    run = driver.cuLaunchKernel
    # So Python's own numbers can be passed, which takes less time than those of ctypes.
    run.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]

    def launch(parameter: int) -> None:
        # The driver copies the parameter before it returns.
        number = ctypes.c_uint64(parameter)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(number))
        # Another GPU may be the current one where a rank has several.
        with nullcontext() if torch.cuda.current_device() == gpu.index else torch.cuda.device(gpu):
            stream = torch.cuda.current_stream(gpu).cuda_stream
            if status := run(kernel, blocks, 1, 1, 1, 1, 1, 0, stream, arguments, None):
                raise RuntimeError(f"the kernel {name} failed: error {status} of the CUDA driver")

    return launch
