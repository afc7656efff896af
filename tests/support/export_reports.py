"""Reports with all figures of an export, and with text that needs escaping."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from pytest_llmgpu.analysis.capacity import capacities
from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Failure, Finding
from support.report_factory import GIB, make_accuracy, make_failed, make_memory, make_report, make_result, make_traffic
from support.verdict_factory import any_unseen, make_row, make_verdicts

NASTY = (
    "<script>alert(1)</script> | a`b` *c* _d_ $x$ @team #7 https://evil.test www.evil.test\n::error::%0A \x1b[31m\u202e"
)
"""A name with the special characters of each format."""

TODAY = datetime.date(2026, 1, 2)


def two_strategies(*, sent: float = 40e6, oom: Sequence[int] = (64,)) -> Report:
    """Return a report of mp and tp at batch sizes 8 and 64; the sizes in `oom` are out of memory with tp."""
    results: list[CaseResult] = []
    for strategy in ("mp", "tp"):
        for size in (8, 64):
            if strategy == "tp" and size in oom:
                failure = Failure(phase="forward", rank=1, message="CUDA out of memory.\nTried to allocate 2 GiB")
                results.append(make_failed("oom", failure, strategy=strategy, batch_size=size))
            else:
                results.append(
                    make_result(
                        60.0,
                        make_accuracy(0.75, items=16),
                        memory=make_memory(peak=(15 + size / 8) * GIB),
                        traffic=make_traffic(wire_bytes_per_sequence=sent),
                        strategy=strategy,
                        batch_size=size,
                    )
                )
    for result in results:
        result.nodeid = f"benchmarks/test_inference.py::test_hellaswag[{result.id}]"
    report = make_report(results)
    report.capacity = capacities(report.cases)
    report.session.complete = True
    return report


def judged(head: Report, base: Report | None, policy: Policy | None = None) -> Report:
    """Return `head` with the verdicts of a gate."""
    with any_unseen():
        head.verdicts = judge.judge(base, head, policy or Policy(), today=TODAY)
    return head


def nasty() -> Report:
    """Return a report in which every text that users control is `NASTY`."""
    failure = Failure(phase="forward", message=NASTY)
    fields: dict[str, Any] = {"strategy": NASTY, "model": NASTY, "dataset": NASTY, "strategy_options": {NASTY: NASTY}}
    report = make_report([make_result(batch_size=1, **fields), make_failed("crashed", failure, batch_size=2, **fields)])
    for result in report.cases:
        result.nodeid = f"{NASTY}::test[{result.id}]"
        result.findings = [Finding(code="code", severity="failure", text=NASTY, next_step=NASTY)]
    report.capacity = capacities(report.cases)
    rows = [make_row("REGRESSED", id=report.cases[0].id, reason=NASTY), make_row("MISSING", id=NASTY)]
    report.verdicts = make_verdicts(*rows)
    return report
