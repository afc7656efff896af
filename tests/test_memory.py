from __future__ import annotations

import torch

from pytest_llmgpu import memory

_CPU = (torch.device("cpu"),)


def test_a_cpu_has_no_cap_and_no_figures() -> None:
    """What torch does not count on a CPU is None with its reason, never 0."""
    assert memory.hold(_CPU, 2**30) == [0]
    assert memory.allocated(_CPU) == [None]
    memory.reset(_CPU)
    (use,) = memory.usage(_CPU, [None], [None], [0])
    assert (use.uuid, use.peak_allocated_bytes, use.weights_bytes) == (None, None, None)
    assert set(use.why) == {"weights_bytes", "loading_peak_bytes", "peak_allocated_bytes", "peak_reserved_bytes"}
