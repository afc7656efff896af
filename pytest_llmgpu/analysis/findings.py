"""What a person should know of a result, each with what to do next. Nothing that nobody would act on."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

from pytest_llmgpu.analysis.accuracy_findings import capital, of_accuracy, said
from pytest_llmgpu.analysis.profile_findings import disturbances, of_profile
from pytest_llmgpu.report.result import CaseResult, Failure, Finding

__all__ = ["findings"]

_GIB = 2**30
_LAST_WORDS_LENGTH = 200
_NO_TEXT = (" ", "Traceback", "Current thread", "Thread 0x", "Extension modules: ")
_SLOWER = 0.98  # a batch size within 2 % of the best is as fast as it, by the noise between launches


def findings(result: CaseResult, earlier: Sequence[CaseResult], *, searching: bool = False) -> list[Finding]:
    """Return what to say of a result.

    Args:
        result: with its derived figures, its accuracy check and its comparison.
        earlier: results of the same session before it, with their findings: what is true of a whole series or of the
            machine is said once.
        searching: whether the largest batch size that fits is looked for (--llmgpu-find-max-batch).
    """
    series = [other for other in earlier if other is not result and other.case.series == result.case.series]
    if result.outcome == "skipped_after_oom":
        return []  # the out-of-memory case before it has said all
    if result.outcome == "completed":
        found = [*of_accuracy(result, earlier), *_of_speed(result, series)]
    elif result.outcome != "oom":
        found = [_failed(result)]
    elif any(other.outcome == "oom" and other.case.batch_size > result.case.batch_size for other in series):
        found = []  # the larger size has said it; this one was run to find the limit
    else:
        found = [_out_of_memory(result, series, searching=searching)]
    found += disturbances(result, earlier)
    return [*found, *of_profile(result, earlier)] if result.outcome == "completed" else found


def _out_of_memory(result: CaseResult, series: Sequence[CaseResult], *, searching: bool) -> Finding:
    case, failure = result.case, result.failure
    fitted = [other.case.batch_size for other in series if other.outcome == "completed"]
    largest = max((size for size in fitted if size < case.batch_size), default=None)
    loading = failure is not None and failure.phase == "load"
    text = "Out of memory while loading the model" if loading else f"Out of memory at batch size {case.batch_size}"
    if not loading:
        text += f"; {largest} is the largest that completed" if largest else "; no smaller batch size completed"
    if failure is not None and failure.tokens_requested is not None and failure.tokens_granted is not None:
        text += f". The workspace has room for {failure.tokens_granted:,} of {failure.tokens_requested:,} tokens"
    elif failure is not None and failure.requested_bytes is not None and failure.free_bytes is not None:
        text += f". It asked for {failure.requested_bytes / _GIB:.2f} GiB with {failure.free_bytes / _GIB:.2f} GiB free"
    elif failure is not None and failure.evidence:
        text += f" ({failure.evidence})"

    remedies = ["spread it over more GPUs (--llmgpu-devices)"]
    if case.gpu_memory_bytes is not None:
        remedies.insert(0, f"raise --llmgpu-gpu-memory ({case.gpu_memory_bytes / _GIB:.1f} GiB in force)")
    if case.dtype == "float32":
        remedies.append("halve it with --llmgpu-dtype=float16")
    advice = ", or ".join(remedies)
    if not loading and not searching and largest and largest + 1 < case.batch_size:
        advice = (
            f"The limit lies between {largest} and {case.batch_size}: --llmgpu-find-max-batch finds it. Else {advice}"
        )
    return Finding(code="out-of-memory", severity="info", text=f"{text}.", next_step=f"{capital(advice)}.")


def _failed(result: CaseResult) -> Finding:
    failure = result.failure
    if failure is None:
        failure = Failure(phase="forward", message="no reason was recorded")
    where = "while loading the model" if failure.phase == "load" else f"at batch size {result.case.batch_size}"
    rank = "" if failure.rank is None else f" on rank {failure.rank}"
    words = {"timeout": "Timed out", "crashed": "Crashed", "error": "Failed", "interrupted": "Interrupted"}
    text = f"{words[result.outcome]} {where}{rank}: {failure.message.strip().rstrip('.')}"
    last = _last_words(failure.log_tail or "")
    # A traceback has the exception's module before its name, the message has not.
    if last and last not in failure.message and failure.message not in last:
        text += f". Its log ends: {last}"

    if result.outcome == "timeout":
        option = "--llmgpu-load-timeout" if failure.phase == "load" else "--llmgpu-timeout"
        advice = f"Raise {option} if it was only slow; if it hung, `failure.log_tail` in the report shows where."
    elif result.outcome == "interrupted":
        finished = any(launch.batches.latency_s for launch in result.launches)
        advice = "Run it again; the batches that finished are in the report." if finished else "Run it again."
    elif failure.signal == signal.SIGKILL:
        advice = "Somebody killed it: see the kernel log (dmesg) for the host's out-of-memory killer or a job limit."
    elif failure.signal == signal.SIGTERM:
        advice = "Somebody ended it: a person, or a scheduler at a job's time limit; run it again with more time."
    else:
        advice = "Read `failure.log_tail` in the report for the traceback."
    return Finding(code=result.outcome, severity="failure", text=f"{text}.", next_step=advice)


def _last_words(log: str) -> str:
    """Return the log line that says most: what killed Python, else the last exception, else the last line of text.

    Frames of a traceback and faulthandler's headings, which every dump of stacks has, are no text.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error: ")]
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    plain = [line for line in lines if not line.startswith(_NO_TEXT)]
    last = (fatal or exceptions or plain or [""])[-1].strip().rstrip(".")
    return last if len(last) <= _LAST_WORDS_LENGTH else f"{last[: _LAST_WORDS_LENGTH - 1]}…"


def _of_speed(result: CaseResult, series: Sequence[CaseResult]) -> Iterator[Finding]:
    smaller = [
        other
        for other in series
        if other.sequences_per_s is not None
        and other.case.batch_size < result.case.batch_size
        # Few batches do not pay for CUDA graphs: that a larger size ran without them says nothing of batching.
        and other.case.execution == result.case.execution
    ]
    wrong = result.accuracy_check is not None and result.accuracy_check.ok is False
    if not smaller or wrong or result.sequences_per_s is None or said("batching-stopped-paying", series):
        return
    if result.case.device == "cpu":
        return  # other programs share a CPU: its seconds are no ground for advice
    best = max(smaller, key=lambda other: other.sequences_per_s or 0.0)
    if best.sequences_per_s and result.sequences_per_s < _SLOWER * best.sequences_per_s:
        slower = 100 * (1 - result.sequences_per_s / best.sequences_per_s)
        yield Finding(
            code="batching-stopped-paying",
            severity="info",
            text=f"Batching stopped paying: {slower:.0f} % fewer sequences a second than at batch size "
            f"{best.case.batch_size} ({_rate(result.sequences_per_s)} against {_rate(best.sequences_per_s)}).",
            next_step=f"Serve with batch size {best.case.batch_size}: larger ones cost memory and time.",
        )


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"  # noqa: PLR2004 - three significant digits
