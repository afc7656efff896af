from __future__ import annotations

from pytest_llmgpu.inference.cuda_graphs import RecordingError
from pytest_llmgpu.ranks import serving


def _raised(cause: Exception) -> RecordingError:
    error = RecordingError(f"`x.item()` (model.py, line 3): {cause}")
    error.__cause__ = cause
    return error


def test_a_failed_recording_is_named_with_its_operation() -> None:
    """The launcher sees by the evidence that the case can be measured eagerly, and gets the operation alone."""
    outcome, failure = serving.failure_of(_raised(RuntimeError("operation not permitted")), "forward")
    assert (outcome, failure.evidence) == ("error", serving.NOT_RECORDED)
    assert failure.message == "`x.item()` (model.py, line 3): operation not permitted"


def test_out_of_memory_while_recording_is_out_of_memory() -> None:
    """The evidence has the rule and the recording, the message the flag that switches it off."""
    cause = RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has 3 GiB of which 1.00 MiB is free.")
    outcome, failure = serving.failure_of(_raised(cause), "forward")
    assert outcome == "oom"
    assert failure.evidence == "torch's allocator, while a CUDA graph was recorded"
    assert (failure.requested_bytes, failure.free_bytes) == (2 << 20, 1 << 20)
    assert "--llmgpu-cuda-graphs=off" in failure.message


def test_another_failure_is_an_error_of_its_own() -> None:
    """Its evidence is the name of the exception."""
    outcome, failure = serving.failure_of(ValueError("broken\nmore"), "load")
    assert (outcome, failure.phase, failure.message) == ("error", "load", "ValueError: broken")
    assert failure.evidence == "ValueError was raised"
