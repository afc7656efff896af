"""The times at which readings begin, on a fake clock, and calls that block."""

from __future__ import annotations

import threading
from itertools import islice
from typing import ClassVar, cast

import pytest

from pytest_llmgpu.profiling.sampler import rounds
from pytest_llmgpu.profiling.sampler.devices import CALLS, METRICS, Device
from pytest_llmgpu.profiling.sampler.rounds import Sampler, ticks

_TX = "pcie_tx_bytes_per_s"


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

    index, method = 0, "auto"
    chosen: ClassVar = {_TX: CALLS[_TX]}
    lacking: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        self.why: dict[str, str] = {}
        self.gate = threading.Semaphore(1)
        self.calls = 0

    def read(self, metric: str) -> float:
        assert metric == _TX
        self.calls += 1
        assert self.gate.acquire(timeout=300)
        return float(self.calls)

    def averages(self, now_s: float, *, window_ended: bool) -> dict[str, tuple[float, float]]:  # noqa: ARG002
        return {}

    def poll(self, now_s: float) -> None:
        """Poll nothing."""


def test_a_hung_call_gives_none_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was given up is not repeated while it hangs, and its late result belongs to no tick."""
    device = _GatedDevice()
    sampler = Sampler([cast("Device", device)])

    def read() -> float | None:
        return sampler.round(1.0)[0][0][METRICS.index(_TX)]

    monkeypatch.setattr(rounds, "_GIVE_UP_S", 0.0)
    assert (read(), read()) == (None, None)
    assert device.why == {_TX: "nvmlDeviceGetPcieThroughput: did not return within 0 s"}
    device.gate.release(2)
    monkeypatch.setattr(rounds, "_GIVE_UP_S", 300.0)
    assert sampler._latest[0, _TX].result(300) == 2.0
    assert (read(), device.calls) == (3.0, 3)
