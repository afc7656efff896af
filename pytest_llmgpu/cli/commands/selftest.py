"""`llmgpu selftest`: check that the gate detects regressions injected into copies of a report."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_llmgpu.cli.arguments import REFERENCE, source
from pytest_llmgpu.cli.gate_arguments import add_rules, policy_of, rules_of
from pytest_llmgpu.cli.output import show, write_json
from pytest_llmgpu.report.text import plural, printable

if TYPE_CHECKING:
    from pytest_llmgpu.gate.selftest.selftest import Missed, SelfTest, Trial

_SLOWER = ("time", "first-token", "token-time", "device-time", "prefill", "flops", "host-sync", "kernel")
"""The regressions that make forwards slower."""
_NAMES = (*_SLOWER, "collective", "memory", "batch-size", "answers")
_SHOWN = 3
"""Most reasons per regression."""
_INDENT = "    "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = (
        "exit status: 0 every injected regression is detected and an unchanged copy passes, 1 otherwise, "
        "2 bad usage or an unreadable file"
    )
    parser.add_argument("report", metavar="REPORT", help=REFERENCE)
    parser.add_argument(
        "--plant",
        metavar="NAME",
        action="append",
        choices=_NAMES,
        help=f"inject only this regression, may be repeated: {', '.join(_NAMES)} (default: all)",
    )
    parser.add_argument(
        "--slowdown",
        metavar="PERCENT",
        type=_percent,
        default=0.05,
        help="size of the slowdowns in percent (default: 5)",
    )
    add_rules(parser)
    parser.add_argument("--json", metavar="PATH", help="write the result as JSON; - prints it instead of the text")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from pytest_llmgpu.gate.selftest import selftest
    from pytest_llmgpu.gate.selftest.injected_regressions import regressions

    policy = policy_of(arguments)
    injected = [one for one in regressions(arguments.slowdown) if one.name in (arguments.plant or _NAMES)]
    report = source(arguments.report, arguments).report()
    today, noise = rules_of(arguments, report)
    found = selftest.selftest(
        report, policy, today=today, calibration=noise, injected=injected, in_turn=arguments.in_turn
    )
    # Before the text is printed, because its reader may close the pipe early.
    if not write_json(found, arguments.json):
        show("\n".join(_text(found, assumed=noise is None)))
    return 0 if found.ok else 1


def _text(found: SelfTest, *, assumed: bool) -> Iterator[str]:
    """Yield the lines on the result: each regression, the reasons for undetected ones, and the conclusion."""
    width = max((len(trial.text) for trial in found.trials), default=0)
    for trial in found.trials:
        yield f"{trial.plant:<11} {trial.text:<{width}}  {_score(trial)}"
    if found.left_out:
        yield f"{'left out':<11} {', '.join(found.left_out)}: no case has the figure"
    if found.not_gated:
        yield f"{'not gated':<11} {', '.join(found.not_gated)}: {_instead(found)}"
    lost = f"{len(found.control):,} WORSE" if found.control else "none is worse"
    yield f"{'control':<11} an unchanged copy, {plural(found.compared, 'row')} compared: {lost}"
    for trial in found.trials:
        yield from _misses(trial.missed, f"{trial.plant} is not detected", assumed=assumed)
    yield from _misses(found.control, "an unchanged copy is worse", assumed=False)
    yield ""
    yield _conclusion(found)


def _score(trial: Trial) -> str:
    if not trial.cases:
        return "NOT DETECTED: no case completed"
    cases = plural(trial.cases, "case")
    return f"detected in {cases}" if trial.caught else f"NOT DETECTED in {len(trial.missed):,} of {cases}"


def _instead(found: SelfTest) -> str:
    """Return which gated metrics show slowdowns."""
    caught = [trial.plant for trial in found.trials if trial.plant in _SLOWER and trial.caught]
    return f"slowdowns are detected only by {', '.join(caught)}" if caught else "slowdowns are not detected"


def _misses(missed: Sequence[Missed], title: str, *, assumed: bool) -> Iterator[str]:
    """Yield why a regression is not detected, with the cases of one reason together."""
    from pytest_llmgpu.gate.classify import TIMES
    from pytest_llmgpu.render.terminal.cases import WIDTH

    by_reason: dict[tuple[str, str], list[Missed]] = {}
    for one in missed:
        by_reason.setdefault((one.verdict or "", one.reason), []).append(one)
    if by_reason:
        yield ""
    for (verdict, reason), cases in list(by_reason.items())[:_SHOWN]:
        more = f" and {len(cases) - 1:,} more" if len(cases) > 1 else ""
        yield printable(f"{title}: {cases[0].id}{more}{f', {verdict}' if verdict else ''}")
        yield from (textwrap.indent(textwrap.fill(printable(line), WIDTH), _INDENT) for line in reason.splitlines())
        if verdict in {"NOT_ENOUGH_DATA", "REGRESSED"} and cases[0].metric in TIMES:
            yield f"{_INDENT}{_launches(cases)}{' (built-in noise: llmgpu calibrate)' if assumed else ''}"
    if len(by_reason) > _SHOWN:
        yield f"{_INDENT}and {len(by_reason) - _SHOWN:,} more reasons: see --json"


def _launches(cases: Sequence[Missed]) -> str:
    from pytest_llmgpu.gate.noise_model import PRACTICAL_LAUNCHES

    needed = [one.launches_needed for one in cases if one.launches_needed is not None]
    most = max(needed) if len(needed) == len(cases) else PRACTICAL_LAUNCHES + 1
    shown = f"{most}" if most <= PRACTICAL_LAUNCHES else f"more than {PRACTICAL_LAUNCHES}"
    return f"minimum launches required in each report to detect it: {shown}"


def _conclusion(found: SelfTest) -> str:
    if found.ok:
        return "PROVEN: this policy detects every injected regression in this report"
    if not found.trials:
        return "NOT PROVEN: no regression was injected"
    missed = [trial.plant for trial in found.trials if not trial.caught]
    parts = [f"{len(missed)} of {len(found.trials)} regressions would pass: {', '.join(missed)}"] if missed else []
    parts += ["an unchanged copy fails"] if found.control else []
    return f"NOT PROVEN: {'; '.join(parts)}"


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1000:  # noqa: PLR2004 - a factor of 11 needs no gate
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage above 0 and up to 1000")
    return value / 100
