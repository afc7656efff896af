"""The record of one session: the whole object of the JSON file."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from pytest_llmgpu.report.bounds import Count
from pytest_llmgpu.report.capacity import Capacity
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.machine import Commit, Environment
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.verdicts import Verdicts

SCHEMA_VERSION = 2
"""Version of the report's format. It grows by optional fields; a reader ignores fields that it does not know."""

OptionValue = str | int | float | bool | None | list[str | int | float]
"""The value of an option in JSON."""


class Session(msgspec.Struct, kw_only=True):
    """The tests that pytest selected and how far it got. It distinguishes a missing case from a deselected one."""

    complete: bool = False
    """True if every collected case has a result."""
    interrupted: bool = False
    """True if the session was ended by Ctrl-C, `-x` or a signal."""
    exit_status: int | None = None
    """Exit status of pytest; null if the report was written before the session ended."""
    failed_tests: Count | None = None
    """Number of tests of a model that failed, without the items of the gate; null in reports of versions that did not
    record it."""
    collected: Count = 0
    """Number of tests left after deselection."""
    deselected: list[str] = []
    """Node ids that `-k` or `-m` deselected, and other selections of this run: `--lf`, or tests named as arguments."""


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """A later start of pytest that continued the session of a report with the cases that were missing."""

    created: str
    """Time at which the session was resumed, in UTC as RFC 3339."""
    argv: list[str] = []
    """Arguments of pytest, as in `argv` of the report."""
    source: str
    """Name of the report that was continued, as the user gave it but without private folders."""
    sha256: str
    """SHA-256 of the file of that report."""
    kept: Count
    """Number of its cases that were kept. Cases that were interrupted are measured again."""


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """The promotion of a report to the baseline in spite of objections."""

    reason: str
    """Reason that the user gave."""
    objections: list[str]
    """Objections of `llmgpu promote`."""


class Report(msgspec.Struct, kw_only=True):
    """One session: the whole object of the JSON file."""

    schema_version: int = SCHEMA_VERSION
    """Version of the report's format."""
    created: str
    """Time at which the report was created, in UTC as RFC 3339."""
    plugin_version: str | None
    """Version of pytest-llmgpu; null if it is not known."""
    argv: list[str] = []
    """Arguments of pytest. Paths are relative to the rootdir; of paths outside it only the base name is kept."""
    options: dict[str, OptionValue] = {}
    """Option flag mapped to its value."""
    session: Session = msgspec.field(default_factory=Session)
    """The selected tests and how far the session got."""
    resumed: list[Resumption] = []
    """Later starts of pytest that continued the session; empty if one start measured all cases."""
    environment: Environment
    """The machine and its libraries."""
    commit: Commit = Commit()
    """The source that was measured."""
    cases: list[CaseResult] = []
    """Results of the cases in the order in which they ran."""
    capacity: list[Capacity] = []
    """Largest batch size of each series of cases, as measured and as predicted."""
    verdicts: Verdicts | None = None
    """Verdicts of the gate; null if nothing was compared."""
    promotion: Promotion | None = None
    """Promotion in spite of objections; null for other baselines, and for reports that are none."""


def started(report: Report, launch: Launch) -> str:
    """Return the time at which the start of pytest that measured a launch began, as the report has it."""
    number = launch.resumption
    return report.resumed[number - 1].created if 0 < number <= len(report.resumed) else report.created


def next_id(used: Collection[str], case: Case) -> str:
    """Return the id for the next result of a case, which is not in use: `mp-bs8`, then `mp-bs8#2`."""
    name, number = case.id, 1
    while name in used:
        number += 1
        name = f"{case.id}#{number}"
    return name
