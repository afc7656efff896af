"""The times at which readings begin, on a fake clock."""

from __future__ import annotations

from itertools import islice

import pytest

from pytest_llmgpu.profiling.sampler.deadlines import Tick, ticks


class FakeClock:
    """A clock that advances only when the test says so."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def wait(self, seconds: float) -> bool:
        """Let time pass."""
        self.now_s += seconds
        return False


def run_ticks(clock: FakeClock, work_s: list[float]) -> list[Tick]:
    """Take one tick per entry, each with that much work, with a period of 1 s from t0 = 100 s."""
    taken = []
    for tick, work in zip(ticks(100.0, 1.0, clock, clock.wait), work_s, strict=False):
        taken.append(tick)
        clock.now_s += work
    return taken


def test_deadlines_do_not_drift() -> None:
    """The next reading begins at t0 + k * period, however long each reading takes within the period."""
    taken = run_ticks(FakeClock(100.0), [0.3, 0.9, 0.0, 0.5])
    assert taken == [Tick(0, 100.0), Tick(1, 101.0), Tick(2, 102.0), Tick(3, 103.0)]


def test_a_late_tick_begins_at_once_and_the_next_is_on_time() -> None:
    """A reading that takes longer than the period delays the next tick only."""
    assert run_ticks(FakeClock(100.0), [1.25, 0.25, 0.0]) == [Tick(0, 100.0), Tick(1, 101.25), Tick(2, 102.0)]


def test_a_deadline_that_passed_entirely_is_skipped() -> None:
    """After a reading of three and a half periods one tick follows, for the latest deadline."""
    assert run_ticks(FakeClock(100.0), [3.5, 0.0, 0.0]) == [Tick(0, 100.0), Tick(3, 103.5), Tick(4, 104.0)]


def test_a_wait_that_ends_early_is_continued() -> None:
    """A tick never begins before its deadline."""
    clock = FakeClock(100.0)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        clock.now_s += 0.4 if seconds > 0.5 else seconds
        return False

    assert list(islice(ticks(100.5, 1.0, clock, wait), 2)) == [Tick(0, 100.5), Tick(1, 101.5)]
    assert waits == pytest.approx([0.5, 0.0, 1.0, 0.6, 0.2, 0.0])


def test_ticks_end_on_request() -> None:
    """A late tick also notices the request to end."""
    clock = FakeClock(105.0)
    assert list(ticks(100.0, 1.0, clock, lambda _: True)) == []


def test_a_drifting_round_never_makes_up_for_a_delay() -> None:
    """A round that takes longer than the period is followed at once, and the delay remains."""
    clock = FakeClock(100.0)
    taken = []
    for tick, work in zip(ticks(100.0, 1.0, clock, clock.wait, drift=True), [0.3, 1.25, 0.5, 0.0], strict=False):
        taken.append(tick)
        clock.now_s += work
    assert taken == [Tick(0, 100.0), Tick(1, 101.0), Tick(2, 102.25), Tick(3, 103.25)]
