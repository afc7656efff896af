from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from pytest_llmgpu.inference.cuda_graphs import RecordingError
from pytest_llmgpu.ranks import serving


def _raised(cause: Exception) -> RecordingError:
    error = RecordingError(f"`x.item()` (model.py, line 3): {cause}")
    error.__cause__ = cause
    return error


def test_a_failed_recording_is_named_with_its_operation() -> None:
    """The evidence, of any other error its class, tells that the case can be measured eagerly; the message is plain."""
    outcome, failure = serving.failure_of(_raised(RuntimeError("operation not permitted")), "forward")
    assert (outcome, failure.evidence) == ("error", serving.NOT_RECORDED)
    assert failure.message == "`x.item()` (model.py, line 3): operation not permitted"
    outcome, failure = serving.failure_of(ValueError("broken\nmore"), "load")
    assert (outcome, failure.phase, failure.message) == ("error", "load", "ValueError: broken")
    assert failure.evidence == "ValueError was raised"


def test_out_of_memory_while_recording_is_out_of_memory() -> None:
    """The evidence has the rule and the recording, the message the flag that switches it off."""
    cause = RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has 3 GiB of which 1.00 MiB is free.")
    outcome, failure = serving.failure_of(_raised(cause), "forward")
    assert outcome == "oom"
    assert failure.evidence == "torch's allocator, while a CUDA graph was recorded"
    assert (failure.requested_bytes, failure.free_bytes) == (2 << 20, 1 << 20)
    assert "--llmgpu-cuda-graphs=off" in failure.message


class CodeError(ValueError):
    """An exception whose constructor takes other arguments than it passes on."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"code {code}: {why}")

    class InnerError(Exception):
        """An exception of a class inside another."""


class Unprintable(Exception):  # noqa: N818 - the name of a user
    """An exception whose text needs more than its arguments."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        """Return the text."""
        return f"code {self.code}"


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (ValueError("the layer is broken"), None),
        (ValueError(), None),
        (KeyError("name"), None),
        (FileNotFoundError(2, "No such file", "/tmp/x"), None),
        (IndexError(("a", 1, [None, 2.5])), None),
        (CodeError(3, why="it broke"), None),
        (CodeError.InnerError("inside", b"bytes"), None),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), None),
        (json.JSONDecodeError("bad", "text", 2), None),
        (RuntimeError("a tensor", object), None),
        # One needs more than its arguments, and one is not imported here.
        (Unprintable(3), Exception),
        (type("NotImportedError", (LookupError,), {})("x"), LookupError),
    ],
    ids=lambda one: type(one).__name__,
)
def test_an_exception_is_made_again_by_class_and_text(error: Exception, base: type[Exception] | None) -> None:
    """The class is that of the rank, or the next one in its order that can be made; plain arguments are kept."""
    again = serving.rebuild(serving.describe(error))
    assert type(again) is (base or type(error))
    assert str(again) == str(error)
    assert again is not None
    if base is None and serving.describe(error).args == error.args and type(again) is not FileNotFoundError:
        assert again.args == error.args


@pytest.mark.parametrize("make", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_would_end_pytest_is_not_made(make: Callable[[], BaseException]) -> None:
    """A function that exits its rank does not exit pytest."""
    assert serving.rebuild(serving.describe(make())) is None


def test_a_long_text_is_cut() -> None:
    """A message of megabytes does not fill the pipe."""
    described = serving.describe(ValueError("x" * 10**6))
    assert len(described.text) < 70_000
    assert "bytes left out" in str(serving.rebuild(described))
