"""GitHub annotations: workflow commands that a step prints, shown at the line of the test.

A test whose line the report does not have is shown at the first line of its file. GitHub shows the first 10 of a step.
The worst come first, and the last one has the number of those that are left out.
"""

from __future__ import annotations

from pytest_llmgpu.render.exports.escaping import command_property, command_value, one_line
from pytest_llmgpu.render.exports.notices import Notice, notices
from pytest_llmgpu.report.report import Report

LIMIT = 10
"""Most annotations of one step."""

_COMMANDS = {"failure": "error", "warning": "warning", "info": "notice"}


def render(report: Report) -> str:
    """Return the notices of the report as workflow commands."""
    found = notices(report)
    if len(found) > LIMIT:
        rest = found[LIMIT - 1 :]
        text = f"{len(rest)} more are not shown, because GitHub shows {LIMIT}: see the summary or the report."
        found = [*found[: LIMIT - 1], Notice(level=rest[0].level, title="And more", text=text)]
    lines = {result.nodeid: result.line for result in report.cases}
    return "\n".join(_command(notice, lines.get(notice.nodeid) or 1) for notice in found)


def _command(notice: Notice, number: int) -> str:
    properties = [f"title={command_property(one_line(f'pytest-llmgpu: {notice.title}'))}"]
    if notice.nodeid:
        file = command_property(one_line(notice.nodeid.partition("::")[0]))
        properties = [f"file={file}", f"line={number}", *properties]
    text = "\n".join(one_line(line) for line in notice.text.splitlines() if line.strip())
    # GitHub ignores an annotation without a message.
    return f"::{_COMMANDS[notice.level]} {','.join(properties)}::{command_value(text or notice.level)}"
