"""The arguments of commands that show a report: a baseline to compare it with, or existing verdicts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_llmgpu.cli.arguments import source
from pytest_llmgpu.cli.gate_arguments import add_rules, policy_of, rules_of
from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Candidate, Verdicts, with_present_names

_RULES = ("policy", "today", "calibration")
_SHA_DIGITS = 8


class Comparison(NamedTuple):
    """The comparison that is shown with a report."""

    base: Report | None = None
    """The baseline; None if none is given."""
    verdicts: Verdicts | None = None
    """The verdicts; None if the report's own verdicts are shown."""
    policy: Policy | None = None
    """The policy of the verdicts; None without a baseline."""


def add_baseline(parser: argparse.ArgumentParser) -> None:
    """Declare `[BASELINE]`, `--verdicts` and the rules."""
    parser.add_argument(
        "baseline", metavar="BASELINE", nargs="?", help="report to compare it with, named in the same ways"
    )
    parser.add_argument(
        "--verdicts", metavar="PATH", type=Path, help="show the verdicts in this file, which llmgpu gate --json wrote"
    )
    add_rules(parser)


def comparison(arguments: argparse.Namespace, report: Report) -> Comparison:
    """Return the comparison that the arguments of `add_baseline` ask for.

    Raises:
        ValueError: one line: a file cannot be read, or an argument would have no effect.
    """
    if arguments.baseline is None:
        refuse_rules(arguments, "BASELINE")
        return Comparison(verdicts=read_verdicts(arguments.verdicts, report) if arguments.verdicts else None)
    if arguments.verdicts is not None:
        raise ValueError(
            "--verdicts: cannot be combined with BASELINE, which computes new verdicts; give one of the two"
        )
    found, policy = source(arguments.baseline, arguments, same_machine_as=report), policy_of(arguments)
    base, (today, noise) = found.report(), rules_of(arguments, report)
    baseline = found.baseline(arguments.baseline, base)
    verdicts = judge.judge(
        base, report, policy, today=today, calibration=noise, baseline=baseline, in_turn=arguments.in_turn
    )
    return Comparison(base, verdicts, policy)


def refuse_rules(arguments: argparse.Namespace, baseline: str) -> None:
    """Raise ValueError if a rule is given although nothing is judged."""
    if unused := [name for name in _RULES if getattr(arguments, name) is not None]:
        raise ValueError(f"--{unused[0]}: has an effect only with {baseline}, which is not given")


def read_verdicts(path: Path, report: Report) -> Verdicts:
    """Return the verdicts in a file; ValueError in one line, also if they belong to another report."""
    try:
        data = with_present_names(file.unpack(file.read(path)))
        found = msgspec.json.decode(data, type=Verdicts)
    except OSError as error:
        raise ValueError(f"verdicts {path}: cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"verdicts {path}: {error}") from None
    ours = Candidate(created=report.created, commit=report.commit.sha)
    if found.head is not None and (found.head.created, found.head.commit) != (ours.created, ours.commit):
        raise ValueError(
            f"verdicts {path}: belong to another report, of {_shown(found.head)}; this one is of {_shown(ours)}"
        )
    return found


def _shown(head: Candidate) -> str:
    return head.created if head.commit is None else f"{head.created} and commit {head.commit[:_SHA_DIGITS]}"
