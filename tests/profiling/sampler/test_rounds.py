"""The times at which readings begin, on a fake clock, and calls that block."""

from __future__ import annotations

import threading
from itertools import islice
from typing import cast

import pytest

from pytest_llmgpu.profiling.sampler.devices import Device
from pytest_llmgpu.profiling.sampler.rounds import BlockingCall, ticks


@pytest.mark.parametrize(
    ("drift", "work_s", "expected"),
    [
        (False, [0.3, 0.9, 0.0, 0.5], [(0, 100.0), (1, 101.0), (2, 102.0), (3, 103.0)]),
        # The tick after a late one is on time; a deadline that has passed entirely is skipped.
        (False, [1.25, 0.25, 0.0], [(0, 100.0), (1, 101.25), (2, 102.0)]),
        (False, [3.5, 0.0, 0.0], [(0, 100.0), (3, 103.5), (4, 104.0)]),
        # The method polling: a delay is never made up.
        (True, [0.3, 1.25, 0.5, 0.0], [(0, 100.0), (1, 101.0), (2, 102.25), (3, 103.25)]),
    ],
)
def test_rounds_begin_at_their_deadlines(drift: bool, work_s: list[float], expected: list[tuple[int, float]]) -> None:
    """The next round begins at t0 + k * period, however long each takes within the period of 1 s."""
    now_s = [100.0]

    def pass_s(seconds: float) -> bool:
        now_s[0] += seconds
        return False

    taken = []
    for tick, work in zip(ticks(100.0, 1.0, lambda: now_s[0], pass_s, drift=drift), work_s, strict=False):
        taken.append(tick)
        pass_s(work)
    assert taken == expected


def test_a_wait_that_ends_early_is_continued() -> None:
    """A tick never begins before its deadline, and a late one notices the request to end."""
    now_s, waits = 100.0, list[float]()

    def wait(seconds: float) -> bool:
        nonlocal now_s
        waits.append(seconds)
        now_s += 0.4 if seconds > 0.5 else seconds
        return False

    assert list(islice(ticks(100.5, 1.0, lambda: now_s, wait), 2)) == [(0, 100.5), (1, 101.5)]
    assert waits == pytest.approx([0.5, 0.0, 1.0, 0.6, 0.2, 0.0])
    assert list(ticks(100.0, 1.0, lambda: 105.0, lambda _: True)) == []


class _GatedDevice:
    """A device whose blocking call returns when the test says so."""

    def __init__(self) -> None:
        self.index = 0
        self.why: dict[str, str] = {}
        self.gate = threading.Semaphore(0)
        self.calls = 0

    def read(self, metric: str) -> float:
        assert metric == "pcie_tx_bytes_per_s"
        self.calls += 1
        assert self.gate.acquire(timeout=300)
        return float(self.calls)


def test_a_hung_call_gives_none_until_it_returns() -> None:
    """A call that was given up is not repeated while it hangs, and its late result belongs to no tick."""
    device = _GatedDevice()
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
