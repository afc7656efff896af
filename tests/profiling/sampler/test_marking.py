"""The times at which the cumulative counters of a mark are read."""

from __future__ import annotations

from pytest_llmgpu.profiling.sampler.marking import Marking
from pytest_llmgpu.profiling.stream import MarkRecord


class Devices:
    """Devices whose counters take the time that the test sets, on a clock that advances only then."""

    def __init__(self, count: int, *, take_s: float) -> None:
        self.now_s = 0.0
        self.take_s = take_s
        self.written: list[MarkRecord] = []
        self.marking = Marking([self] * count, lambda: self.now_s, self.written.append)

    def cumulative(self) -> tuple[dict[str, float], dict[str, str]]:
        """Let the time pass and return a count."""
        self.now_s += self.take_s
        return {"energy_j": self.now_s}, {}

    def steps(self, due_s: float) -> int:
        """Return how many devices are read before a tick that is due then, and let the tick pass."""
        read = 0
        while self.marking.step(due_s):
            read += 1
        self.now_s = max(self.now_s, due_s)
        self.marking.ticked()
        return read


def test_no_tick_waits_for_a_device_with_the_expected_time() -> None:
    """Eight devices of 15 ms are read over two periods, and every tick begins when it is due."""
    devices = Devices(8, take_s=0.015)
    devices.marking.request()
    assert devices.steps(0.1) == 6
    assert devices.now_s == 0.1
    assert devices.steps(0.2) == 2
    (mark,) = devices.written
    assert [round(t_s, 3) for t_s in mark.t_s] == [0.0, 0.015, 0.03, 0.045, 0.06, 0.075, 0.1, 0.115]
    assert [round(t_s, 3) for t_s in mark.answered_s] == [0.015, 0.03, 0.045, 0.06, 0.075, 0.09, 0.115, 0.13]
    assert devices.steps(0.3) == 0


def test_marks_are_completed_with_a_period_shorter_than_a_reading() -> None:
    """One device is read after every tick in any case."""
    devices = Devices(3, take_s=0.05)
    devices.marking.request()
    assert [devices.steps(devices.now_s + 0.01) for _ in range(4)] == [1, 1, 1, 0]
    assert len(devices.written) == 1


def test_marks_are_in_the_order_of_their_requests() -> None:
    """Each has a number and its own reading of every device."""
    devices = Devices(2, take_s=0.001)
    devices.marking.request()
    devices.marking.request()
    assert devices.steps(1.0) == 4
    assert [mark.mark for mark in devices.written] == [1, 2]
    assert [len(mark.counters) for mark in devices.written] == [2, 2]
