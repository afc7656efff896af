"""When the sampler asks for real-time priority."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from typing import Any

import pytest

from pytest_llmgpu.profiling.sampler.realtime import Promptness


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Take down what is asked of the system instead of asking it."""
    found: list[Any] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda *arguments: found.append(arguments[:2]))
    monkeypatch.setattr(resource, "setrlimit", lambda *arguments: found.append(arguments))
    monkeypatch.setattr(signal, "signal", lambda number, handler: found.append((number, handler)))
    return found


def test_ticks_in_time_ask_for_nothing(asked: list[Any]) -> None:
    """Where a core is free nothing that runs is pushed from its own."""
    promptness = Promptness()
    for k in range(100):
        promptness.began(k + 0.0009, k)
    assert asked == []


def test_a_tick_that_waited_for_a_core_asks_once(asked: list[Any]) -> None:
    """Real time comes with its limit, and a refusal is not asked for again."""
    promptness = Promptness()
    promptness.began(1.0015, 1.0)
    promptness.began(2.0015, 2.0)
    assert (resource.RLIMIT_RTTIME, (1_000_000, 10_000_000)) in asked
    assert asked.count((0, os.SCHED_FIFO)) == 1
    assert asked.index((0, os.SCHED_FIFO)) > asked.index((resource.RLIMIT_RTTIME, (1_000_000, 10_000_000)))


def test_whoever_runs_too_long_goes_back(asked: list[Any]) -> None:
    """The signal of the limit ends real time."""
    Promptness().began(1.0015, 1.0)
    handlers: dict[int, Callable[..., None]] = {entry[0]: entry[1] for entry in asked if callable(entry[1])}
    handlers[signal.SIGXCPU](signal.SIGXCPU, None)
    assert asked[-1] == (0, os.SCHED_OTHER)


def test_a_refusal_is_no_error(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to it the sampler goes on as it is."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    Promptness().began(1.0015, 1.0)
    assert asked
