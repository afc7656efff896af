from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest
from support.report_factory import make_answers, make_failed, make_memory, make_report
from support.verdict_factory import make_invalid, make_traffic, with_latencies, with_launches

from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Known, Policy
from pytest_llmgpu.gate.timing.calibration import Calibration
from pytest_llmgpu.render.terminal.cases import WIDTH
from pytest_llmgpu.render.terminal.verdicts import conclusion, table
from pytest_llmgpu.report.metrics import JUDGED
from pytest_llmgpu.report.result import CaseResult, Failure
from pytest_llmgpu.report.verdicts import Verdicts

TODAY = datetime.date(2026, 6, 1)


def _full(slower: float = 1.0, calls: int = 64, wrong: int = 0, **fields: Any) -> CaseResult:
    answers = make_answers([number >= wrong for number in range(100)])
    result = with_launches([slower] * 3, accuracy=answers, memory=make_memory(), **fields)
    result.traffic = make_traffic(calls)
    return result


def _spoilt() -> CaseResult:
    result = _full()
    for launch in result.launches:
        make_invalid(launch, "a stranger's process")
    return result


def _judge(base: list[CaseResult] | None, head: list[CaseResult], **policy: Any) -> tuple[Verdicts, Policy]:
    rules = Policy(**policy)
    before = None if base is None else make_report(base)
    found = judge(before, make_report(head), rules, today=TODAY, calibration=Calibration(typical=0.001))
    return found, rules


def _lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def test_the_worst_case_comes_first_and_its_outcome_before_numbers() -> None:
    """Cases by their worst row; within a case outcome, time, accuracy, traffic and memory in that order."""
    sizes = [_full(batch_size=size) for size in (1, 2, 4)]
    found, _ = _judge(sizes, [sizes[0], _full(1.05, batch_size=2), make_failed("crashed", batch_size=4)])
    head, _, *rows = table(found).split("\n\n")[0].splitlines()
    assert head.split() == ["case", "metric", "verdict", "was", "now", "change", "interval"]
    assert [row.split()[0] for row in rows if row.startswith("mp")] == ["mp-bs4", "mp-bs2", "mp-bs1", "mp"]
    assert rows[0].split() == ["mp-bs4", "outcome", "FAILED"]
    metrics = [row.removeprefix("mp-bs2").split()[0] for row in rows[1:6]]
    assert metrics == [metric for metric in JUDGED if metric in metrics]
    assert metrics[0] == "time"


def test_a_row_shows_both_figures_their_change_and_its_interval() -> None:
    """In the units that people read; what is the same says so."""
    found, _ = _judge([_full()], [_full(1.05, calls=65, wrong=20)])
    text = table(found).split("\n\n")[0]
    assert _lines(text, "time")[0].split()[2:] == [
        *("REGRESSED", "210", "s", "220.5", "s", "+5.0", "%"),
        *("+4.8", "to", "+5.2", "%"),
    ]
    assert _lines(text, "accuracy")[0].split()[1:] == [
        *("REGRESSED", "100.00", "%", "80.00", "%", "-20.00", "pt"),
        *("-20.00", "to", "-14.44", "pt"),
    ]
    assert _lines(text, "traffic")[0].split()[1:] == ["REGRESSED", "0.1311", "MB", "0.1331", "MB", "+1.6", "%"]
    assert _lines(text, "memory")[0].split()[1:] == ["OK", "17.00", "GiB", "17.00", "GiB", "same"]


def test_every_row_that_is_not_ok_has_its_reason() -> None:
    """In words, worst first, those that are told the same together; what is OK needs none."""
    sizes = [_full(batch_size=size) for size in (1, 2)]
    failure = Failure(phase="forward", message="gone")
    broken = [make_failed("crashed", failure, batch_size=size) for size in (1, 2)]
    text = table(_judge([*sizes, _full(batch_size=4)], [*broken, _full(calls=65, batch_size=4)])[0])
    reasons = text.split("\n\n")[1].splitlines()
    assert reasons[:3] == ["FAILED  mp-bs1 and 1 case more: outcome", "    crashed.", "    gone"]
    assert reasons[3] == "REGRESSED  mp-bs4: traffic"
    assert "all_reduce 128 -> 130 calls" in reasons[4]
    assert "OK  " not in text.split("\n\n")[1]


def test_how_much_was_compared_and_could_be_shown_is_told() -> None:
    """Rows compared, gated, and not armed with the reason; the smallest slowdown of these launches; notes."""
    found, _ = _judge([with_launches([1.0] * 3)], [with_launches([1.0] * 3)])
    found = msgspec.structs.replace(found, warnings=["differs from the baseline: driver 1 -> 2"])
    account = table(found).split("\n\n")[-1].splitlines()
    assert account[0] == "2 rows compared, 1 of them gated; 3 not armed"
    assert "    1 x memory: memory was not measured" in account
    assert account[-2].startswith("smallest slowdown that these launches show with 95 % probability: 2.3 %")
    assert account[-1] == "note: differs from the baseline: driver 1 -> 2"


def test_sums_beside_another_change_are_explained() -> None:
    """Equal sums of batches that became slower and others that became faster are not the same."""
    head = with_latencies([[0.9] * 19 + [2.9]])
    found = judge(make_report([with_latencies([[1.0] * 20])]), make_report([head]), Policy(), today=TODAY)
    text = table(found)
    assert "-10.0 % a batch" in _lines(text, "time")[0]
    assert "Time in all changed by +0.0 %: not all batches changed alike." in " ".join(text.split())


def test_a_verdict_that_its_interval_does_not_explain_is_noted() -> None:
    """Exactly where rows that are judged together make it another; silent elsewhere."""
    sizes = [2**power for power in range(5)]
    noise = Calibration(typical=0.01)

    def judged(slower: float) -> str:
        base, head = (
            make_report([with_launches([level if size == 1 else 1.0], batch_size=size) for size in sizes])
            for level in (1.0, slower)
        )
        return table(judge(base, head, Policy(), today=TODAY, calibration=noise), most=None)

    text = judged(1.065)
    assert "+2.2 to +" in _lines(text, "mp-bs1 ")[0]
    assert "INCONCLUSIVE" in _lines(text, "mp-bs1 ")[0]
    note = "note: by the interval alone time of mp-bs1 would be REGRESSED. Rows are judged together (Holm):"
    assert note in " ".join(text.split())
    assert text.count("by the interval alone") == 1
    assert "by the interval alone" not in judged(1.0)
    assert "by the interval alone" not in judged(1.2)


def test_many_cases_are_cut_with_a_word_on_the_rest() -> None:
    """The worst are shown, and how many are not; all of them where asked for."""
    sizes = [_full(batch_size=2**power) for power in range(6)]
    found, _ = _judge(sizes, [_full(1.05, batch_size=1), *sizes[1:]])
    text = table(found, most=2)
    assert text.count("mp-bs") == 3  # two rows and a reason
    assert "and 5 cases more, the worst of them OK" in text
    assert all(f"mp-bs{2**power} " in table(found, most=None) for power in range(6))


def test_what_cannot_fail_the_gate_is_marked() -> None:
    """A known regression with its reason, and a metric that is only reported."""
    known = Known(case="mp-bs1", metric="time", reason="bug 7", expires=TODAY)
    found, rules = _judge([_full()], [_full(1.05, wrong=1)], known=[known])
    text = table(found)
    assert "REGRESSED (known)" in _lines(text, "time")[0]
    assert "REGRESSED (not gated)" in _lines(text, "predictions")[0]
    assert "    Known: bug 7" in text.splitlines()
    assert conclusion(found, rules) == "PASSED: 4 rows gated, 1 inconclusive, 1 known"


def test_text_of_a_report_cannot_drive_the_terminal() -> None:
    """Ids and messages may come from anywhere: what would move the cursor or break a line is shown as a blank."""
    result = make_failed("crashed", Failure(phase="load", message="a\x1b[2Jb\rc"))
    result.id = "mp\n\x1b[31m"
    text = table(_judge([_full()], [result])[0])
    assert "\x1b" not in text
    assert "\r" not in text
    assert "mp  [31m" in text


def test_text_fits_the_terminal() -> None:
    """However long a reason is."""
    result = make_failed("crashed", Failure(phase="load", message="word " * 100))
    text = table(_judge([_full()], [result])[0])
    assert max(map(len, text.splitlines())) <= WIDTH


def test_colours_are_the_only_difference_that_colour_makes() -> None:
    """Without them the text is the same."""
    found, rules = _judge([_full()], [_full(1.05)])
    for plain, painted in (
        (table(found), table(found, color=True)),
        (conclusion(found, rules), conclusion(found, rules, color=True)),
    ):
        assert "\x1b[31m" in painted
        for style in ("\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[1m", "\x1b[0m"):
            painted = painted.replace(style, "")  # noqa: PLW2901 - peeled
        assert painted == plain


@pytest.mark.parametrize(
    ("head", "policy", "said"),
    [
        ([_full()], {}, "PASSED: 4 rows gated"),
        ([_full(1.05, calls=65)], {}, "REGRESSED: 2 rows of 1 case fail the gate"),
        ([_full(1.02)], {"on_inconclusive": "fail"}, "INCONCLUSIVE, and the policy fails on it: 1 row of 1 case fail"),
        ([_full(1.02)], {}, "PASSED: 4 rows gated, 1 inconclusive"),
        ([_full(), make_failed("interrupted", batch_size=2)], {}, "INVALID: 1 row of 1 case fails the gate"),
        (
            [_spoilt()],
            {"on_inconclusive": "fail"},
            "INVALID, and the policy fails on it: 1 row of 1 case fails the gate",
        ),
        ([_full(dtype="float32")], {}, "NOT COMPARABLE: 1 row of 1 case fails the gate"),
        ([_full(), _full(batch_size=2)], {"require_armed": True}, "NOT ARMED: "),
    ],
)
def test_the_conclusion_says_how_the_gate_ends(head: list[CaseResult], policy: dict[str, Any], said: str) -> None:
    """One line, in words for each exit status."""
    text = conclusion(*_judge([_full()], head, **policy))
    assert text.startswith(said)
    assert "\n" not in text


def test_what_was_not_compared_at_all_is_no_slowdown() -> None:
    """One case is gone and another is another measurement: nothing has regressed that anybody knows of."""
    text = conclusion(*_judge([_full(), _full(batch_size=4)], [_full(dtype="float32")]))
    assert text.startswith("MISSING: 2 rows of 2 cases fail the gate")


@pytest.mark.parametrize(("allowed", "said"), [(True, "PASSED without a baseline: "), (False, "NOT ARMED: ")])
def test_no_baseline_is_no_plain_pass(allowed: bool, said: str) -> None:
    """Even where it is allowed, the line says so."""
    assert conclusion(*_judge(None, [_full()], allow_no_baseline=allowed)).startswith(said)
