"""Why a report cannot be a baseline, whatever the present one is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import listed

NAMED = 3
"""Most cases that a reason lists."""


def unfit(candidate: Report) -> Iterator[str]:
    """Yield the reasons, each with its remedy; none for a report that can be one."""
    session = candidate.session
    if candidate.commit.sha is None:
        yield "the report does not record its commit: commit the benchmark (git init, git add, git commit) and measure"
    if candidate.commit.dirty:
        yield "files were changed after the commit: commit them (git status), and measure again"
    # Items of the gate fail a run whose tests passed: its exit status is 1 then.
    passed = not session.exit_status or (session.exit_status, session.failed_tests) == (1, 0)
    if not session.complete or session.interrupted or not passed:
        yield f"the run did not complete, or tests failed (exit status {session.exit_status})"
    bad = {"timeout", "crashed", "error", "interrupted"}
    failed = [f"{one.id} {one.outcome}" for one in candidate.cases if one.outcome in bad]
    failed += [f"wrong answers of {one.id}" for one in candidate.cases if one.has_wrong_answers]
    if failed or not any(one.outcome == "completed" for one in candidate.cases):
        yield f"failed: {listed(failed, NAMED) or 'no case completed'}"
