"""`llmgpu export`: a report in the format of another tool or page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmgpu import collector
from pytest_llmgpu.cli.arguments import REFERENCE, source
from pytest_llmgpu.cli.judging import add_rules, judged, policy_of
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.cli.protocol import Command
from pytest_llmgpu.exports import FORMATS

if TYPE_CHECKING:
    from pytest_llmgpu.report import Report
    from pytest_llmgpu.verdicts import Candidate, Verdicts

__all__ = ["COMMAND"]

_STDOUT = "-"
_SHA_DIGITS = 8
_RULES = ("policy", "today", "calibration")


class _Export:
    name = "export"
    help = "write a report in the format of another tool or page"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("format", metavar="FORMAT", choices=FORMATS, help=", ".join(FORMATS))
        parser.add_argument("head", metavar="REPORT", help=REFERENCE)
        parser.add_argument("--output", metavar="PATH", default=_STDOUT, help="file to write (default: -, stdout)")
        judges = parser.add_mutually_exclusive_group()
        judges.add_argument("--baseline", dest="base", metavar="REF", help="judge the report and export its verdicts")
        judges.add_argument("--verdicts", metavar="PATH", type=Path, help="export those that llmgpu gate --json wrote")
        add_rules(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from pytest_llmgpu.exports import export

        with collector.paused():
            report = source(arguments.head, arguments).report()
            if arguments.base is not None:
                policy = policy_of(arguments)
                report.verdicts = judged(arguments, policy, may_lack_base=policy.allow_no_baseline).verdicts
            elif unused := [name for name in _RULES if getattr(arguments, name) is not None]:
                raise ValueError(f"--{unused[0]}: is for --baseline, which is not given")
            elif arguments.verdicts is not None:
                report.verdicts = _read(arguments.verdicts, report)
            text = export(arguments.format).render(report)
        if arguments.output != _STDOUT:
            _write(Path(arguments.output), text)
        elif text:
            show(text)
        return 0


def _read(path: Path, report: Report) -> Verdicts:
    """Return the verdicts of a file; ValueError in one line, also where they are of another report."""
    import msgspec

    from pytest_llmgpu import unpacking
    from pytest_llmgpu.verdicts import Candidate, Verdicts

    try:
        found = msgspec.json.decode(unpacking.unpack(unpacking.read(path)), type=Verdicts)
    except OSError as error:
        raise ValueError(f"verdicts {path}: cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"verdicts {path}: {error}") from None
    ours = Candidate(created=report.created, commit=report.commit.sha)
    if found.head is not None and found.head != ours:
        raise ValueError(
            f"verdicts {path}: are of another report, of {_shown(found.head)}; this one is of {_shown(ours)}"
        )
    return found


def _shown(head: Candidate) -> str:
    return head.created if head.commit is None else f"{head.created} and commit {head.commit[:_SHA_DIGITS]}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n" if text else "", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"output {path}: cannot be written: {error.strerror}") from None


COMMAND: Command = _Export()
