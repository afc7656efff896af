"""Calls that block: they run in threads of their own."""

from __future__ import annotations

import threading
from typing import cast

from pytest_llmgpu.profiling.sampler.devices import Device
from pytest_llmgpu.profiling.sampler.sampling import BlockingCall


class GatedDevice:
    """A device whose blocking call returns when the test says so."""

    def __init__(self) -> None:
        self.index = 0
        self.why: dict[str, str] = {}
        self.gate = threading.Semaphore(0)
        self.calls = 0

    def read(self, metric: str) -> float:
        """Return the number of the call."""
        assert metric == "pcie_tx_bytes_per_s"
        self.calls += 1
        assert self.gate.acquire(timeout=300)
        return float(self.calls)


def test_a_hung_call_gives_none_until_it_returns() -> None:
    """A call that was given up is not repeated while it hangs, and its late result belongs to no tick."""
    device = GatedDevice()
    call = BlockingCall(cast("Device", device), "pcie_tx_bytes_per_s")
    call.start()
    assert call.result(timeout_s=0) is None
    assert device.why == {"pcie_tx_bytes_per_s": "nvmlDeviceGetPcieThroughput: did not return within 1 s"}
    call.start()
    device.gate.release()
    call._results.put(call._results.get(timeout=300))  # wait for the late result
    assert call.result(timeout_s=300) is None
    device.gate.release()
    call.start()
    assert call.result(timeout_s=300) == 2.0
    assert device.calls == 2
