"""The arguments of commands that judge reports, and the verdicts for these arguments."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import NamedTuple

from pytest_llmgpu.cli.arguments import REFERENCE, add_storage, source, storage_of
from pytest_llmgpu.gate import calibration, judge, policy_file
from pytest_llmgpu.gate.calibration import Calibration
from pytest_llmgpu.gate.policy import Policy, switched
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Verdicts
from pytest_llmgpu.store import git
from pytest_llmgpu.store.references import Source


class Judged(NamedTuple):
    """The verdicts on two reports."""

    verdicts: Verdicts
    """The verdicts."""
    judged_by: str | None
    """The lines that name the noise estimate and the policy of the verdicts; None without a baseline."""


def add_reports(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Declare `BASE HEAD...` for several candidates, else `[BASE] [HEAD]`, which an option can make needless."""
    text = "the candidate, named in the same ways" + "; several are shown side by side" * several
    parser.add_argument("base", metavar="BASE", nargs=None if several else "?", help=f"the baseline: {REFERENCE}")
    parser.add_argument("head", metavar="HEAD", nargs="+" if several else "?", help=text)


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Declare the policy, the day, the calibration and the store, on which verdicts depend."""
    parser.add_argument(
        "--policy",
        metavar="FILE",
        type=Path,
        help="TOML file of the policy, or git:REV:PATH (default: [tool.llmgpu.gate] in the nearest pyproject.toml that "
        "has this table, up to the root of the repository; without one, the built-in policy)",
    )
    parser.add_argument(
        "--today", metavar="DATE", type=_date, help="day for the expiry of known regressions (default: today, UTC)"
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help="file with the noise between launches, or git:REV:PATH (default: the one that llmgpu calibrate wrote to "
        "the store for the candidate's machine)",
    )
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="launches of the two reports alternated, as in llmgpu ab: the threshold of wall time is 2 %%, not 4 %%",
    )
    add_storage(parser)


def policy_of(arguments: argparse.Namespace) -> Policy:
    """Return the policy in force: the file, overridden by the command line; ValueError in one line."""
    return switched(policy_file.load(_policy_path(arguments)), arguments)


def judged(arguments: argparse.Namespace, policy: Policy, *, may_lack_base: bool = False) -> Judged:
    """Read BASE and HEAD and judge them.

    Args:
        arguments: the parsed arguments of `add_reports` and `add_rules`.
        policy: the policy in force.
        may_lack_base: whether the baseline may be absent. A broken one is always an error.

    Raises:
        ValueError: one line: a file cannot be read.
    """
    head = source(arguments.head, arguments).report()
    base_source = _base(arguments, head, may_lack_base=may_lack_base)
    base = base_source.report() if base_source is not None else None
    baseline = base_source.baseline(arguments.base, base) if base_source is not None and base is not None else None
    del base_source
    today, noise = rules_of(arguments, head)
    found = judge.judge(
        base, head, policy, today=today, calibration=noise, baseline=baseline, in_turn=arguments.in_turn
    )
    in_words = calibration.in_words(noise, arguments.calibration), policy_file.in_words(_policy_path(arguments))
    return Judged(found, None if base is None else "\n".join(in_words))


def rules_of(arguments: argparse.Namespace, head: Report) -> tuple[datetime.date, Calibration | None]:
    """Return the day and the calibration to judge a report with: the given ones, or the defaults of `add_rules`."""
    today: datetime.date = arguments.today or datetime.datetime.now(datetime.timezone.utc).date()
    return today, calibration.in_force(storage_of(arguments), head, arguments.calibration)


def _policy_path(arguments: argparse.Namespace) -> Path | None:
    path: Path | None = arguments.policy
    return policy_file.find(Path()) if path is None else path


def _base(arguments: argparse.Namespace, head: Report, *, may_lack_base: bool) -> Source | None:
    try:
        return source(arguments.base, arguments, same_machine_as=head)
    except git.AbsentError as error:
        if may_lack_base:
            return None
        raise ValueError(f"{error}; use --allow-no-baseline if this is the first run") from None


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date such as 2026-01-31") from None
