"""Findings on a case, each with its next step; a finding that needs no action is left out.

The functions `decide...` return data, the functions `describe...` word it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

import msgspec

from pytest_llmgpu.analysis import accuracy_findings, profile_findings
from pytest_llmgpu.analysis.finding_texts import finding, has_finding
from pytest_llmgpu.analysis.reference import same_series
from pytest_llmgpu.report.result import CaseResult, Failure, Finding
from pytest_llmgpu.report.text import gib, percent, sentence
from pytest_llmgpu.report.work import TRAFFIC_FAILED

_LONGEST_LOG_LINE = 200
_NO_TEXT = (" ", "Traceback", "Current thread", "Thread 0x", "Extension modules: ")
_FAR = 5.0
"""Batch sizes that follow each other differ by less than this factor in throughput, beside the ratio of their sizes."""
_SLOWER = 0.98  # launches differ by 2 %: a batch size within 2 % of the best is as fast

_STOPPED_PAYING = "batching-stopped-paying"
_OUTCOMES = {"timeout": "Timed out", "crashed": "Crashed", "error": "Failed", "interrupted": "Interrupted"}


def findings(result: CaseResult, earlier: Sequence[CaseResult], *, searching: bool = False) -> list[Finding]:
    """Return the findings on a result.

    Args:
        result: The result with its derived figures, its accuracy check and its comparison.
        earlier: Results of the same session before it, with their findings: a finding on a whole series or on the
            machine is reported once.
        searching: Whether the run searches the largest batch size that fits (--llmgpu-find-max-batch).
    """
    if result.outcome == "skipped_after_oom":
        return []  # the out-of-memory case before it has the finding
    series = same_series(result, earlier)
    found: list[Finding] = []
    if result.outcome == "completed":
        found += accuracy_findings.describe(accuracy_findings.decide(result, earlier), result)
        if (reason := result.why.get("traffic", "")).startswith(TRAFFIC_FAILED):
            found.append(finding("traffic-failed", reason=reason))
        found += _of_throughput(result, series)
    elif result.outcome != "oom":
        found.append(_describe_failure(result))
    elif (decision := decide_memory_limit(result, series, searching=searching)) is not None:
        found.append(_describe_out_of_memory(decision, result))
    found += profile_findings.disturbances(result, earlier)
    if result.outcome == "completed":
        found += profile_findings.of_profile(result, earlier)
    return found


class MemoryLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a case that ran out of memory, before they are worded."""

    loading: bool
    """True if the model itself did not fit."""
    largest_completed: int | None
    """The largest smaller batch size that completed; None where none did."""
    search: bool
    """True if --llmgpu-find-max-batch would narrow the limit."""


def decide_memory_limit(
    result: CaseResult, series: Sequence[CaseResult], *, searching: bool = False
) -> MemoryLimit | None:
    """Return what to report about a case that ran out of memory; None where a larger batch size has the finding."""
    size = result.case.batch_size
    if any(other.outcome == "oom" and other.case.batch_size > size for other in series):
        return None  # this size was run only to find the limit
    fitted = [other.case.batch_size for other in series if other.outcome == "completed"]
    largest = max((fit for fit in fitted if fit < size), default=None)
    loading = result.failure is not None and result.failure.phase == "load"
    return MemoryLimit(
        loading=loading,
        largest_completed=largest,
        search=largest is not None and largest + 1 < size and not loading and not searching,
    )


def _of_throughput(result: CaseResult, series: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield what is unusual about the throughput of a case compared with that of smaller batch sizes of its series.

    A larger batch shares each weight among more sequences: its throughput grows at most by the ratio of the sizes. Only
    cases that ran in the same execution are compared: CUDA graphs do not pay off for a few large batches, which is no
    limit of the batch size. Only the first batch size that is slower counts. Other programs share a CPU: its times are
    no basis for advice.
    """
    size, now = result.case.batch_size, result.sequences_per_s
    smaller = {
        other.case.batch_size: other.sequences_per_s
        for other in series
        if other.sequences_per_s and other.case.batch_size < size and other.case.execution == result.case.execution
    }
    if not smaller or not now:
        return
    neighbour, best = max(smaller), max(smaller, key=smaller.__getitem__)
    if not 1 / _FAR <= now / smaller[neighbour] <= _FAR * size / neighbour:
        (less, slow), (more, fast) = sorted([(now, size), (smaller[neighbour], neighbour)])
        rates = {"more": _rate(more), "less": _rate(less)}
        yield finding("batch-sizes-far-apart", fast=fast, slow=slow, factor=more / less, **rates)
        return
    advised = has_finding(_STOPPED_PAYING, series) or result.case.device == "cpu" or result.has_wrong_answers
    if now < _SLOWER * smaller[best] and not advised:
        rates = {"more": _rate(smaller[best]), "less": _rate(now)}
        yield finding(_STOPPED_PAYING, loss=percent(1 - now / smaller[best], 0), best=best, **rates)


def _describe_out_of_memory(decision: MemoryLimit, result: CaseResult) -> Finding:
    case, failure, largest = result.case, result.failure, decision.largest_completed
    if decision.loading:
        text = "Out of memory while loading the model"
    else:
        text = f"Out of memory at batch size {case.batch_size}; "
        text += f"the largest that completed is {largest}" if largest else "no smaller batch size completed"
    if failure is not None and failure.tokens_requested is not None and failure.tokens_granted is not None:
        text += f". The workspace holds {failure.tokens_granted:,} of {failure.tokens_requested:,} tokens"
    elif failure is not None and failure.requested_bytes is not None and failure.free_bytes is not None:
        text += f". The allocation of {gib(failure.requested_bytes)} failed with {gib(failure.free_bytes)} free"
    elif failure is not None and failure.evidence:
        text += f" ({failure.evidence})"

    remedies = ["spread the model over more GPUs (--llmgpu-devices)"]
    if case.gpu_memory_bytes is not None:
        remedies.insert(0, f"raise --llmgpu-gpu-memory ({gib(case.gpu_memory_bytes, 1)} in force)")
    if case.dtype == "float32":
        remedies.append("halve the memory with --llmgpu-dtype=float16")
    advice = ", or ".join(remedies)
    if decision.search:
        advice = f"run with --llmgpu-find-max-batch to find the limit between these two batch sizes, or {advice}"
    return Finding(code="out-of-memory", severity="info", text=f"{text}.", next_step=sentence(advice))


def _describe_failure(result: CaseResult) -> Finding:
    failure = result.failure
    if failure is None:
        failure = Failure(phase="forward", message="no reason was recorded")
    where = "while loading the model" if failure.phase == "load" else f"at batch size {result.case.batch_size}"
    rank = "" if failure.rank is None else f" on rank {failure.rank}"
    text = f"{_OUTCOMES[result.outcome]} {where}{rank}: {failure.message.strip().rstrip('.')}"
    last = _decisive_line(failure.log_tail or "")
    # In a traceback the name of an exception has its module, in the message it has not.
    if last and last not in failure.message and failure.message not in last:
        text += f". Its log ends: {last}"

    if result.outcome == "timeout":
        option = "--llmgpu-load-timeout" if failure.phase == "load" else "--llmgpu-timeout"
        advice = f"Raise {option} if the case is slow. If it hung, `llmgpu show REPORT --log CASE` shows where."
    elif result.outcome == "interrupted":
        finished = any(launch.batches.latency_s for launch in result.launches)
        more = " The report has the batches that finished." if finished else ""
        advice = f"Continue it with the same options and --llmgpu-resume=REPORT, its path or latest.{more}"
    elif failure.signal == signal.SIGKILL:
        advice = "Look for what killed it: the host's out-of-memory killer (kernel log, dmesg) or a limit of the job."
    elif failure.signal == signal.SIGTERM:
        advice = "A user or a scheduler ended it, perhaps at the job's time limit. Run it again with more time."
    else:
        log = "`llmgpu show REPORT --log CASE` prints the traceback."
        advice = log if failure.log_tail else "Remove the cause, and run it again."
    return Finding(code=result.outcome, severity="failure", text=f"{text}.", next_step=advice)


def _decisive_line(log: str) -> str:
    """Return the line of a log that names the cause: a fatal Python error, else the last exception, else the last line.

    Lines of a traceback and the headings of faulthandler, which every dump of stacks has, do not count.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error: ")]
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    plain = [line for line in lines if not line.startswith(_NO_TEXT)]
    last = (fatal or exceptions or plain or [""])[-1].strip().rstrip(".")
    return last if len(last) <= _LONGEST_LOG_LINE else f"{last[: _LONGEST_LOG_LINE - 1]}…"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"  # noqa: PLR2004 - three significant digits
