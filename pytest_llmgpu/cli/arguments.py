"""The arguments that several commands take: reports, the policy, a baseline; and the verdicts for these arguments."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.policy import Policy, in_force
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Verdicts
from pytest_llmgpu.store import git, store
from pytest_llmgpu.store.store import Source

REFERENCE = (
    "a path; a number or a name in the store; latest; the first digits of a commit; MACHINE/ followed by any of these; "
    "or git:REV:PATH"
)
"""The ways to name a report, for a command's help."""


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Declare `--storage DIR`."""
    text = "folder of the store (default: the nearest .llmgpu)"
    parser.add_argument("--storage", metavar="DIR", type=Path, help=text)


def storage_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the store."""
    folder: Path = arguments.storage or store.find()
    return folder


def source(reference: str, arguments: argparse.Namespace, *, machine: str | None = None) -> Source:
    """Return the report that a reference names, that of `machine` if several have one; ValueError in one line."""
    return store.resolve(reference, storage_of(arguments), machine=machine)


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Declare the policy and the store, on which verdicts depend."""
    text = "TOML file of the policy, or git:REV:PATH (default: [tool.llmgpu.gate] in the nearest pyproject.toml that "
    text += "has this table, up to the root of the repository; without one, the built-in policy)"
    parser.add_argument("--policy", metavar="FILE", type=Path, help=text)
    text = "launches of the two reports alternated, as in llmgpu ab: the threshold of wall time is 2 %%, not 4 %%"
    parser.add_argument("--in-turn", action="store_true", help=text)
    add_storage(parser)


def add_switches(parser: argparse.ArgumentParser, *, baseline: bool = True) -> None:
    """Declare the switches of the policy."""
    parser.add_argument("--strict", action="store_true", help="fail on rows that are undecided")
    if baseline:
        text = "pass if the baseline does not exist, nor one of a similar name; a broken baseline is always an error"
        parser.add_argument("--allow-no-baseline", action="store_true", help=text)


def policy_of(arguments: argparse.Namespace) -> tuple[Policy, str]:
    """Return the policy in force, and the line that names it; ValueError in one line."""
    return in_force(arguments.policy, arguments)


def today() -> datetime.date:
    """Return the day to judge at, by UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date()


def judged(
    arguments: argparse.Namespace, reference: str, head: Report, policy: Policy
) -> tuple[Report | None, Verdicts]:
    """Read a baseline and judge a report; ValueError in one line if a file cannot be read.

    The baseline may be absent if the policy allows that, else or if it may be misspelt it is a git.AbsentError.
    """
    base = baseline = None
    try:
        found = source(reference, arguments, machine=store.hardware(head))
        base = found.report()
        baseline = found.baseline(reference, base)
    except git.AbsentError as error:
        if isinstance(error, git.MisspeltError) or not policy.allow_no_baseline:
            is_misspelt, is_gate = isinstance(error, git.MisspeltError), hasattr(arguments, "allow_no_baseline")
            remedy = git.FIRST if is_misspelt else "; use --allow-no-baseline if this is the first run"
            raise type(error)(f"{error}{remedy if is_gate else ''}") from None
    verdicts = judge.judge(base, head, policy, today=today(), baseline=baseline, in_turn=arguments.in_turn)
    return base, verdicts


def comparison(arguments: argparse.Namespace, report: Report) -> tuple[Report | None, Verdicts | None, Policy | None]:
    """Return baseline, verdicts and policy; all None without a baseline. ValueError if an argument has no effect."""
    if arguments.baseline is not None:
        policy, _ = policy_of(arguments)
        return *judged(arguments, arguments.baseline, report, policy), policy
    if arguments.policy is not None:
        raise ValueError("--policy: has an effect only with a baseline, which is not given")
    return None, None, None
