"""The times at which readings begin, on a fake clock."""

from __future__ import annotations

from itertools import islice

import pytest

from pytest_llmgpu.profiling.sampler.rounds import ticks


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
