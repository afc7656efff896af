from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import known, make_answers, make_failed, make_memory, make_report, make_traffic
from support.verdict_factory import make_row, make_verdicts, noise, with_launches

from pytest_llmgpu.gate import headline
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Allowed, Policy
from pytest_llmgpu.render.summary import cases
from pytest_llmgpu.render.terminal.report import WIDTH
from pytest_llmgpu.render.terminal.verdicts import conclusion, table
from pytest_llmgpu.report.metrics import JUDGED
from pytest_llmgpu.report.result import CaseResult, Failure
from pytest_llmgpu.report.verdicts import Row, Verdicts

TODAY = datetime.date(2026, 6, 1)


def _full(slower: float = 1.0, calls: int = 64, wrong: int = 0, **fields: Any) -> CaseResult:
    answers = make_answers([number >= wrong for number in range(100)])
    result = with_launches([slower] * 3, accuracy=answers, memory=make_memory(), **fields)
    result.traffic = make_traffic(calls)
    return result


def _judge(base: list[CaseResult], head: list[CaseResult], **policy: Any) -> tuple[Verdicts, Policy]:
    rules = Policy(**policy)
    with noise(0.001):
        return judge(make_report(base), make_report(head), rules, today=TODAY), rules


def _lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def test_the_worst_case_comes_first() -> None:
    """Cases are sorted by their worst row; the rows of a case are in the order of the table of metrics."""
    sizes = [_full(batch_size=size) for size in (1, 2, 4)]
    found, _ = _judge(sizes, [sizes[0], _full(1.05, batch_size=2), make_failed("crashed", batch_size=4)])
    head, _, *rows = table(found, Policy()).split("\n\n")[0].splitlines()
    assert head.split() == ["case", "metric", "verdict", "was", "now", "change", "interval"]
    assert [row.split()[0] for row in rows if row.startswith("mp")] == ["mp-bs4", "mp-bs2"]
    assert rows[0].split() == ["mp-bs4", "outcome", "REGRESSED"]
    _, _, *rows = table(found, Policy(), most=None).split("\n\n")[0].splitlines()
    metrics = [row.removeprefix("mp-bs2").split()[0] for row in rows[1:5]]
    assert metrics == [metric for metric in JUDGED if metric in metrics]
    assert metrics[0] == "time"


def test_a_row_shows_both_figures_their_change_and_its_interval() -> None:
    """The figures have units; equal figures have the word `same`."""
    found, _ = _judge([_full()], [_full(1.05, calls=65, wrong=20)])
    text = table(found, Policy(), most=None).split("\n\n")[0]
    assert _lines(text, "time")[0].split()[2:] == [
        *("REGRESSED", "210", "s", "220.5", "s", "+5.0", "%"),
        *("+4.9", "to", "+5.1", "%"),
    ]
    assert _lines(text, "accuracy")[0].split()[1:] == [
        *("REGRESSED", "100.00", "%", "80.00", "%", "-20.00", "pt"),
        *("-20.00", "to", "-11.77", "pt"),
    ]
    assert _lines(text, "traffic")[0].split()[1:] == ["REGRESSED", "0.1311", "MB", "0.1331", "MB", "+1.6", "%"]
    assert _lines(text, "memory")[0].split()[1:] == ["OK", "17.00", "GiB", "17.00", "GiB", "same"]


def test_every_row_that_is_not_ok_has_its_reason() -> None:
    """The worst comes first, rows with the same reason share it, and rows that are OK have none."""
    sizes = [_full(batch_size=size) for size in (1, 2)]
    failure = Failure(phase="forward", message="gone")
    broken = [make_failed("crashed", failure, batch_size=size) for size in (1, 2)]
    text = table(*_judge([*sizes, _full(batch_size=4)], [*broken, _full(calls=65, batch_size=4)]))
    reasons = text.split("\n\n")[1].splitlines()
    assert reasons[:3] == ["REGRESSED  outcome: mp-bs1, mp-bs2", "    The case crashed.", "    gone"]
    assert reasons[3] == "REGRESSED  traffic: mp-bs4"
    assert "all_reduce 128 -> 130 calls" in reasons[4]
    assert "OK  " not in text.split("\n\n")[1]


def test_the_end_counts_the_comparisons(prose: Prose) -> None:
    """It has the rows compared, gated and not compared with their reasons, the smallest slowdown, and the notes."""
    found, _ = _judge([with_launches([1.0] * 3)], [with_launches([1.0] * 3)])
    found = msgspec.structs.replace(found, warnings=["differs from the baseline: driver 1 -> 2"])
    assert prose == table(found, Policy()).split("\n\n")[-1]


def test_a_command_can_be_copied() -> None:
    """It is one line, however long; nothing breaks at a hyphen."""
    found, policy = _judge([_full()], [_full(1.5)])
    command = f"pytest suite --llmgpu-limit=24 {' '.join(f'--llmgpu-number-{n}={n}' for n in range(9))}"
    head = msgspec.structs.replace(known(found.head), commit="b" * 40, command=command, states=[])
    base = msgspec.structs.replace(known(found.baseline), commit="a" * 40)
    text = table(msgspec.structs.replace(found, head=head, baseline=base), policy)
    assert any(line.endswith(f"-- {command}`") for line in text.splitlines())


def test_a_long_table_is_cut() -> None:
    """The worst cases are shown with the number of the others; without a limit all are shown."""
    sizes = [_full(batch_size=2**power) for power in range(6)]
    found, _ = _judge(sizes, [_full(1.05, batch_size=1), *sizes[1:]])
    text = table(found, Policy(), most=2)
    assert text.count("mp-bs") == 2  # a row and a reason
    assert "5 more cases" not in text, "rows that are OK are counted"
    assert all(f"mp-bs{2**power} " in table(found, Policy(), most=None) for power in range(6))


def test_rows_that_cannot_fail_the_gate_are_marked() -> None:
    """A known regression has its reason, and a metric that is not gated is marked."""
    known = Allowed(case="mp-bs1", metric="time", reason="bug 7", expires=TODAY)
    found, rules = _judge([_full()], [_full(1.05, wrong=1)], allow=[known])
    text = table(found, Policy())
    assert "REGRESSED (allowed)" in _lines(text, "  time")[0]
    assert "CHANGED" in _lines(text, "predictions")[0]
    assert "    Allowed: bug 7" in text.splitlines()
    assert "1 allowed regression" in conclusion(found, rules)


def test_text_of_a_report_cannot_drive_the_terminal() -> None:
    """Control characters of ids and messages are replaced by spaces, and a long reason is wrapped."""
    result = make_failed("crashed", Failure(phase="load", message="a\x1b[2Jb\rc" + "word " * 100))
    result.id = "mp\n\x1b[31m"
    text = table(*_judge([_full()], [result]))
    assert "\x1b" not in text
    assert "\r" not in text
    assert "mp  [31m" in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("rows", "style"),
    [
        ([make_row("OK")], "32"),
        ([make_row("OK"), make_row("UNDECIDED", gated=False)], "32"),
        ([make_row("OK"), make_row("UNDECIDED")], "33"),
        ([make_row("REGRESSED")], "31"),
        ([make_row("NOT_COMPARABLE", "outcome")], "31"),
    ],
)
def test_the_conclusion_is_the_headline_in_the_colour_of_the_status(rows: list[Row], style: str) -> None:
    """It is green only if the gate passes and every gated row is decided."""
    verdicts, policy = make_verdicts(*rows), Policy()
    text = headline.headline(verdicts, policy).text
    assert conclusion(verdicts, policy) == text
    assert conclusion(verdicts, policy, color=True) == f"\x1b[{style}m{text}\x1b[0m"


def test_each_case_has_one_row() -> None:
    """Wrong answers and a changed outcome come first, then the largest slowdown; device time comes before wall time."""
    rows = [
        make_row("REGRESSED", "time", "a", ratio=1.5),
        make_row("OK", "device_time", "a", ratio=1.01),
        make_row("UNDECIDED", "time", "b", ratio=3.0),
        make_row("MISSING", "outcome", "c"),
        make_row("NOT_COMPARABLE", "time", "d"),
        make_row("NEW", "outcome", "e"),
        make_row("REGRESSED", "accuracy", "e"),
    ]
    assert [f"{row.id} {row.metric}" for row in cases(rows)] == [
        *("e accuracy", "c outcome", "b time", "a device_time", "d time")
    ]
