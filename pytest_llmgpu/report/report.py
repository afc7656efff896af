"""One session as a record: the whole object of the JSON file."""

from __future__ import annotations

import msgspec

from pytest_llmgpu.report.capacity import Capacity
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.machine import Commit, Environment
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Verdicts

__all__ = ["SCHEMA_VERSION", "OptionValue", "Report", "Session", "next_id"]

SCHEMA_VERSION = 1
"""Version of the report's object. It grows by optional fields; a reader ignores the fields it does not know."""


OptionValue = str | int | float | bool | None | list[str | int | float]
"""What an option can hold in JSON."""


class Session(msgspec.Struct, kw_only=True):
    """What pytest was asked to run and how far it got, so that a missing case differs from a deselected one."""

    complete: bool = False
    """True once every collected case has its result."""
    interrupted: bool = False
    """Ended by Ctrl-C, `-x` or a signal."""
    exit_status: int | None = None
    """Pytest's exit status, None in a report written before the session ended."""
    collected: int = 0
    """Tests left after deselection."""
    deselected: list[str] = []
    """Node ids that `-k` or `-m` took out, and what else narrowed the run: `--lf`, tests named on the command line."""


class Report(msgspec.Struct, kw_only=True):
    """One session: the whole object of the JSON file."""

    schema_version: int = SCHEMA_VERSION
    created: str
    """RFC 3339, UTC."""
    plugin_version: str | None
    argv: list[str] = []
    """Arguments of pytest, with paths relative to the rootdir, else their basenames."""
    options: dict[str, OptionValue] = {}
    """Flag to the value in force."""
    session: Session = msgspec.field(default_factory=Session)
    environment: Environment
    commit: Commit = Commit()
    cases: list[CaseResult] = []
    """In the order they ran."""
    capacity: list[Capacity] = []
    """The largest batch size of each series of cases, as measured and as predicted."""
    verdicts: Verdicts | None = None
    """What a gate said; None as long as nothing was compared."""


def next_id(report: Report, case: Case) -> str:
    """Return the id of the report's next result for `case`: `mp-bs8`, then `mp-bs8#2`."""
    used = {result.id for result in report.cases}
    name, number = case.id, 1
    while name in used:
        number += 1
        name = f"{case.id}#{number}"
    return name
