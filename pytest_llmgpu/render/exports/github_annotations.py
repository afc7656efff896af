"""Annotations of GitHub: workflow commands that a step prints, shown at the test's file.

GitHub keeps the first 10 of a step and drops the rest without a word, so the worst come first and the last one says how
many more there are.
"""

from __future__ import annotations

from pytest_llmgpu.render.exports.escaping import command_property, command_value, one_line
from pytest_llmgpu.render.exports.notices import Notice, notices
from pytest_llmgpu.render.exports.protocol import Export
from pytest_llmgpu.report.report import Report

__all__ = ["EXPORT", "LIMIT"]

LIMIT = 10
"""Annotations of one step."""

_COMMANDS = {"failure": "error", "warning": "warning", "info": "notice"}


class _GitHubAnnotations:
    def render(self, report: Report) -> str:
        told = notices(report)
        shown = told if len(told) <= LIMIT else told[: LIMIT - 1]
        lines = [_command(notice) for notice in shown]
        if rest := told[len(shown) :]:
            text = f"{len(rest)} more are not shown, GitHub has room for {LIMIT}: see the summary or the report."
            lines.append(_command(Notice(level=rest[0].level, title="And more", text=text)))
        return "\n".join(lines)


def _command(notice: Notice) -> str:
    properties = [f"title={command_property(one_line(f'pytest-llmgpu: {notice.title}'))}"]
    if notice.nodeid:
        file = command_property(one_line(notice.nodeid.partition("::")[0]))
        properties = [f"file={file}", "line=1", *properties]
    text = "\n".join(one_line(line) for line in notice.text.splitlines() if line.strip())
    # An empty message makes GitHub drop the annotation.
    return f"::{_COMMANDS[notice.level]} {','.join(properties)}::{command_value(text or notice.level)}"


EXPORT: Export = _GitHubAnnotations()
