"""What a command that shows a report shows it beside: a baseline, or verdicts that were made before."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmgpu.cli.arguments import source
from pytest_llmgpu.cli.gate_arguments import add_rules, policy_of, verdicts_of

if TYPE_CHECKING:
    from pytest_llmgpu.gate.policy import Policy
    from pytest_llmgpu.report.report import Report
    from pytest_llmgpu.report.verdicts import Candidate, Verdicts

__all__ = ["add_baseline", "beside", "read_verdicts", "refuse_rules"]

_RULES = ("policy", "today", "calibration")
_SHA_DIGITS = 8


def add_baseline(parser: argparse.ArgumentParser) -> None:
    """Declare `[BASELINE]`, `--verdicts` and the rules."""
    parser.add_argument("baseline", metavar="BASELINE", nargs="?", help="what to hold it against, named likewise")
    parser.add_argument("--verdicts", metavar="PATH", type=Path, help="show those that llmgpu gate --json wrote")
    add_rules(parser)


def beside(arguments: argparse.Namespace, report: Report) -> tuple[Report | None, Verdicts | None, Policy | None]:
    """Return the baseline, what is said of the report, and the policy in force.

    Args:
        arguments: of `add_baseline`. None where they do not say: the report's own verdicts stand.
        report: what is shown.

    Raises:
        ValueError: one line: what cannot be read, or an argument that would change nothing.
    """
    if arguments.baseline is None:
        refuse_rules(arguments, "BASELINE")
        return None, None if arguments.verdicts is None else read_verdicts(arguments.verdicts, report), None
    if arguments.verdicts is not None:
        raise ValueError("--verdicts: were made already, and with BASELINE they are made anew; give one of both")
    found, policy = source(arguments.baseline, arguments, beside=report), policy_of(arguments)
    base = found.report()
    return base, verdicts_of(arguments, policy, base, report, found.baseline(arguments.baseline, base)), policy


def refuse_rules(arguments: argparse.Namespace, baseline: str) -> None:
    """Raise ValueError where a rule is given although nothing is judged.

    Args:
        arguments: of `add_rules`.
        baseline: what would have to be given.
    """
    if unused := [name for name in _RULES if getattr(arguments, name) is not None]:
        raise ValueError(f"--{unused[0]}: is for {baseline}, which is not given")


def read_verdicts(path: Path, report: Report) -> Verdicts:
    """Return the verdicts of a file; ValueError in one line, also where they are of another report."""
    import msgspec

    from pytest_llmgpu.report import decompression
    from pytest_llmgpu.report.verdicts import Candidate, Verdicts

    try:
        found = msgspec.json.decode(decompression.unpack(decompression.read(path)), type=Verdicts)
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
