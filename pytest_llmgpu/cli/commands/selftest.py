"""`llmgpu selftest`: whether the gate can fail, shown by losses that are planted into copies of a report."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmgpu.cli.arguments import REFERENCE, source
from pytest_llmgpu.cli.gate_arguments import add_rules, policy_of, rules_of
from pytest_llmgpu.cli.output import as_json, save, show
from pytest_llmgpu.cli.protocol import Command
from pytest_llmgpu.report.file import paused

if TYPE_CHECKING:
    from pytest_llmgpu.gate.selftest.injected_regressions import Plant
    from pytest_llmgpu.gate.selftest.selftest import Missed, SelfTest, Trial

__all__ = ["COMMAND"]

_NAMES = ("time", "collective", "memory", "batch-size", "answers")
_SHOWN = 3
_INDENT = "    "


class _Selftest:
    name = "selftest"
    help = "show that the gate catches losses planted in a report"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "exit status: 0 each loss is caught and an unchanged copy has none, 1 not so, 2 bad usage or unreadable"
        )
        parser.add_argument("report", metavar="REPORT", help=REFERENCE)
        parser.add_argument(
            "--plant",
            metavar="NAME",
            action="append",
            choices=_NAMES,
            help=f"plant this one only, may be repeated: {', '.join(_NAMES)} (default: all)",
        )
        parser.add_argument(
            "--slowdown", metavar="PERCENT", type=_percent, default=0.05, help="more time, in percent (default: 5)"
        )
        add_rules(parser)
        parser.add_argument("--json", metavar="PATH", help="write what was found; - prints it in place of the text")

    def run(self, arguments: argparse.Namespace) -> int:
        from pytest_llmgpu.gate.selftest import selftest

        policy = policy_of(arguments)
        losses = _chosen(arguments.slowdown, arguments.plant)
        with paused():
            report = source(arguments.report, arguments).report()
            today, noise = rules_of(arguments, report)
            found = selftest.selftest(report, policy, today=today, calibration=noise, losses=losses)
        data = as_json(found)
        # Before anything is printed: whoever reads the text may leave early.
        if arguments.json not in {None, "-"}:
            save(f"{data}\n", Path(arguments.json))
        show(data if arguments.json == "-" else "\n".join(_text(found, assumed=noise is None)))
        return 0 if found.ok else 1


def _chosen(slowdown: float, names: Sequence[str] | None) -> list[Plant]:
    from pytest_llmgpu.gate.selftest.injected_regressions import plants

    return [plant for plant in plants(slowdown) if names is None or plant.name in names]


def _text(found: SelfTest, *, assumed: bool) -> Iterator[str]:
    """Yield the lines for people: what was planted and caught, what was missed and why, and how it ends."""
    width = max((len(trial.text) for trial in found.trials), default=0)
    for trial in found.trials:
        yield f"{trial.plant:<11} {trial.text:<{width}}  {_score(trial)}"
    yield f"{'control':<11} {_control(found)}"
    for trial in found.trials:
        yield from _misses(trial.missed, f"{trial.plant} is not caught", assumed=assumed)
    yield from _misses(found.control, "an unchanged copy loses", assumed=False)
    yield ""
    yield _conclusion(found)


def _score(trial: Trial) -> str:
    if not trial.cases:
        return "NOT CAUGHT: no case completed"
    cases = f"{trial.cases:,} case{'s' * (trial.cases != 1)}"
    return f"caught in {cases}" if trial.caught else f"NOT CAUGHT in {len(trial.missed):,} of {cases}"


def _control(found: SelfTest) -> str:
    rows = f"{found.compared:,} row{'s' * (found.compared != 1)}"
    return f"an unchanged copy, {rows} compared: {f'{len(found.control):,} LOST' if found.control else 'nothing lost'}"


def _misses(missed: Sequence[Missed], title: str, *, assumed: bool) -> Iterator[str]:
    """Yield why cases miss a loss, those of one reason together."""
    from pytest_llmgpu.render.terminal.cases import WIDTH

    if not missed:
        return
    told: dict[tuple[str, str], list[Missed]] = {}
    for one in missed:
        told.setdefault((one.verdict or "", one.reason), []).append(one)
    yield ""
    for number, ((verdict, reason), cases) in enumerate(told.items()):
        if number == _SHOWN:
            yield f"    and {len(told) - number:,} reasons more: see --json"
            return
        more = f" and {len(cases) - 1:,} more" if len(cases) > 1 else ""
        yield _plain(f"{title}: {cases[0].id}{more}{f', {verdict}' if verdict else ''}")
        yield from (textwrap.indent(textwrap.fill(_plain(line), WIDTH), _INDENT) for line in reason.splitlines())
        if verdict in {"INCONCLUSIVE", "REGRESSED"} and cases[0].metric == "time":
            yield f"    {_launches(cases)}{' (noise assumed: llmgpu calibrate)' if assumed else ''}"


def _launches(cases: Sequence[Missed]) -> str:
    needed = [one.launches_needed for one in cases]
    most = None if None in needed else max(count for count in needed if count is not None)
    return f"{'more than 1,000' if most is None else f'{most:,}'} launches a side would show it with 95 % probability"


def _conclusion(found: SelfTest) -> str:
    missed = [trial.plant for trial in found.trials if not trial.caught]
    if found.ok:
        return "PROVEN: this policy catches every planted loss in this report"
    parts = [f"{len(missed)} of {len(found.trials)} losses would pass: {', '.join(missed)}"] * bool(missed)
    parts += ["an unchanged copy fails, too"] * bool(found.control)
    return f"NOT PROVEN: {'; '.join(parts)}"


def _plain(text: str) -> str:
    """Return text that a terminal only shows: a report may come from anywhere."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1000:  # noqa: PLR2004 - ten times as slow is no regression that needs a gate
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: percent above 0 up to 1000 are needed")
    return value / 100


COMMAND: Command = _Selftest()
