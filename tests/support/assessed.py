"""Cases as a session assesses them, one after another, with the checks and the findings on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_llmgpu.analysis.assess import assess
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Finding
from support.report_factory import known, make_report

CPU: dict[str, Any] = {"device": "cpu", "devices": 1}
"""Fields of a case without the findings on profiles of GPUs."""


def as_one(launches: Sequence[CaseResult], earlier: Sequence[CaseResult] = (), **options: Any) -> CaseResult:
    """Assess the launches of one case."""
    return assess(launches, earlier=earlier, environment=make_report().environment, options=Options(**options))


def assessed(*results: CaseResult, **options: Any) -> list[CaseResult]:
    """Assess results one after another."""
    done: list[CaseResult] = []
    for result in results:
        done.append(as_one([result], done, **options))
    return done


def codes(*results: CaseResult, **options: Any) -> list[list[str]]:
    """Return the codes of the findings on each of these results."""
    return [[finding.code for finding in result.findings] for result in assessed(*results, **options)]


def check_of(*results: CaseResult, **options: Any) -> AccuracyCheck:
    """Return the check of the last of these results."""
    return known(assessed(*results, **options)[-1].accuracy_check)


def finding_of(*results: CaseResult, **options: Any) -> Finding:
    """Return the only finding on the last of these results."""
    (found,) = assessed(*results, **options)[-1].findings
    return found
