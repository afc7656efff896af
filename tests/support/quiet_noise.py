"""The noise of times between launches as a test needs it, instead of the built-in priors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from pytest_llmgpu.gate import judge, times
from pytest_llmgpu.gate.times import PRIORS, Prior


@contextmanager
def noise(s0: float = 0.001, df0: float = 1000) -> Iterator[None]:
    """Give the times of every regime this deviation between launches, well known by default."""
    with patch.object(times, "PRIORS", dict.fromkeys(PRIORS, Prior(s0=s0, df0=df0, source="test"))):
        yield


@contextmanager
def any_unseen() -> Iterator[None]:
    """Let a gate pass that would have seen no slowdown."""
    with patch.object(judge, "LARGEST_UNSEEN", 99.0):
        yield
