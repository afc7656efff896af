from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.report_factory import known, make_generation
from support.verdict_factory import any_unseen, on_h200, timed

from pytest_llmgpu.analysis.merging import merge
from pytest_llmgpu.gate.judge import exit_status, judge
from pytest_llmgpu.gate.policy import Policy, dump_policy, load_policy, misspelt
from pytest_llmgpu.render.table import figure_tables
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import Declared
from pytest_llmgpu.report.verdicts import Row, Verdicts

_TODAY = datetime.date(2026, 11, 24)
_RATE = Declared(better="larger", threshold=0.01)
_WAITING = Declared(better="smaller", rule="time", threshold=0.04, unit="ms")
_SPEED = Declared(better="larger", rule="time", threshold=0.04)


def _report(values: Sequence[float], declared: Declared | None = _RATE, **fields: Any) -> Report:
    """Return a report with one launch for each value of the figure `own`, or with one launch without it."""
    result = timed(*[1.0] * max(1, len(values)), **fields)
    for launch, value in zip(result.launches, values, strict=False):
        launch.figures = {"own": value}
    result.declared = {} if declared is None else {"own": declared}
    return on_h200([result])


def _policy(folder: Path, text: str) -> Policy:
    (folder / "gate.toml").write_text(text)
    return load_policy(folder / "gate.toml")


def _judged(base: Report | None, head: Report, policy: Policy | None = None) -> Verdicts:
    with any_unseen():
        return judge(base, head, policy or Policy(), today=_TODAY)


def _row(verdicts: Verdicts) -> Row | None:
    return next((row for row in verdicts.rows if row.metric == "own"), None)


@pytest.mark.parametrize(
    ("declared", "then", "now", "expected"),
    [
        (_RATE, [0.9], [0.9], "OK"),
        (_RATE, [0.9], [0.891], "OK"),
        (_RATE, [0.9], [0.88], "REGRESSED"),
        (_RATE, [0.9], [0.95], "IMPROVED"),
        (_RATE, [0.9, 0.8], [0.85], "UNDECIDED"),
        (_RATE, [-100.0], [-102.0], "REGRESSED"),
        (_RATE, [0.0], [-1.0], "REGRESSED"),
        (Declared(better="smaller"), [3.0], [3.001], "REGRESSED"),
        (Declared(better="smaller"), [3.0], [2.0], "IMPROVED"),
        (_RATE, [0.9], [], "MISSING"),
        (_RATE, [], [0.9], None),
        (None, [0.9], [0.1], None),
        (_WAITING, [5.0], [5.1], "UNDECIDED"),
        (_WAITING, [5.0, 5.01, 4.99, 5.0] * 5, [6.0, 6.01, 5.99, 6.0] * 5, "REGRESSED"),
        (_WAITING, [5.0, 5.01, 4.99, 5.0] * 5, [4.0, 4.01, 3.99, 4.0] * 5, "IMPROVED"),
        (_SPEED, [5.0, 5.01, 4.99, 5.0] * 5, [4.0, 4.01, 3.99, 4.0] * 5, "REGRESSED"),
        (_SPEED, [5.0, 5.01, 4.99, 5.0] * 5, [5.01, 5.0, 5.01, 4.99] * 5, "OK"),
        (_WAITING, [5.0], [0.0], "UNDECIDED"),
    ],
)
def test_a_figure_is_judged_as_it_declares(
    declared: Declared | None, then: list[float], now: list[float], expected: str | None
) -> None:
    """The direction and the rule decide; a figure without a declaration is not judged."""
    row = _row(_judged(_report(then, declared), _report(now, declared)))
    assert (None if row is None else row.result) == expected
    if row is not None and len(now) > 5:
        assert (row.head, row.ratio) == pytest.approx((now[0], now[0] / then[0]), rel=0.01)


def test_a_launch_of_texts_without_the_figure_is_left_out() -> None:
    """Its decode steps are no value of it."""
    base, head = _report([10.0, 10.0, 10.0], _WAITING), _report([10.0, 10.0, 10.0], _WAITING)
    for launch in head.cases[0].launches:
        launch.generation = make_generation([[1, 2, 3]], [[-1.0] * 3], [[-1.0] * 3])
    head.cases[0].launches[1].figures = {}
    row = known(_row(_judged(base, head)))
    assert row.n == 2
    assert row.head == pytest.approx(10.0)
    assert "2 of 3 launches of the candidate are used" in row.reason


@pytest.mark.parametrize(
    ("before", "after", "value", "expected"),
    [
        (_RATE, Declared(better="larger", threshold=0.5), 0.8, "REGRESSED"),
        (Declared(better="larger", threshold=0.5), _RATE, 0.8, "REGRESSED"),
        (_RATE, None, 0.8, "REGRESSED"),
        (None, _RATE, 0.8, "REGRESSED"),
        (_RATE, Declared(better="smaller", threshold=0.01), 0.9, "NOT_COMPARABLE"),
        (_RATE, _SPEED, 0.9, "NOT_COMPARABLE"),
    ],
)
def test_a_candidate_cannot_widen_its_declaration(
    before: Declared | None, after: Declared | None, value: float, expected: str
) -> None:
    """The smaller threshold counts, and a declaration that is gone counts still."""
    row = _row(_judged(_report([0.9], before), _report([value], after)))
    assert row is not None
    assert row.verdict == expected


@pytest.mark.parametrize(
    ("text", "value", "verdict", "status"),
    [
        ("[own]\nat_least = 0.9", 0.9, None, 0),
        ("[own]\nat_least = 0.9", 0.899, "REGRESSED", 1),
        ("[own]\nat_most = 0.5", 0.7, "REGRESSED", 1),
        ("[own]\nat_least = 0.9\n[[allow]]\ncase = '*'\nmetric = 'own'\nreason = 'new'", 0.7, "REGRESSED", 0),
    ],
)
def test_a_bound_gates_with_and_without_a_baseline(
    tmp_path: Path, text: str, value: float, verdict: str | None, status: int
) -> None:
    """The bound is judged alone; a run without a baseline does not pass by it, unless the policy allows that."""
    policy = _policy(tmp_path, f"allow_no_baseline = true\n{text}")
    alone, compared = _judged(None, _report([value]), policy), _judged(_report([value]), _report([value]), policy)
    for verdicts, usual in ((alone, None), (compared, "OK")):
        row = _row(verdicts)
        assert (None if row is None else row.verdict) == (verdict or usual)
        assert exit_status(verdicts, policy) == status
    assert exit_status(_judged(None, _report([value])), Policy()) == 3


def test_merged_launches_keep_their_figures() -> None:
    """As `ab` and `bisect` merge runs of one launch; the page has the median."""
    (result,) = merge([_report([0.9]), _report([0.8])]).cases
    assert [launch.figures["own"] for launch in result.launches] == [0.9, 0.8]
    (column,) = [one for one in figure_tables([result])["work"].columns if one.name == "own"]
    assert column.title == "own"
    assert column.value(result) == pytest.approx(0.85)


def test_a_policy_can_only_tighten_a_threshold(tmp_path: Path) -> None:
    """A smaller threshold counts, a larger one is refused in one line; verdicts keep the policy."""
    base, head = _report([0.9]), _report([0.895])
    assert [row.verdict for row in [_row(_judged(base, head))] if row] == ["OK"]
    tight = _policy(tmp_path, "[own]\nthreshold = 0.001\nat_most = 1")
    assert [row.verdict for row in [_row(_judged(base, head, tight))] if row] == ["REGRESSED"]
    assert _policy(tmp_path, dump_policy(tight)) == tight
    with pytest.raises(ValueError, match=r"^policy: own: threshold = 0\.05 is above the declared 0\.01: .*$"):
        _judged(base, head, _policy(tmp_path, "[own]\nthreshold = 0.05"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[own]\ngate = false", "own: no metric, and for a figure of your own: gate is not allowed: allowed are .*"),
        ("[tme]\nabsolute_s = 1", r"tme: no metric \(did you mean time\?\), and .*: absolute_s is not"),
        ("[own]\nat_least = nan", "own.at_least = nan: a finite number is needed"),
        ("[[allow]]\ncase = '*'\nmetric = 'Own'\nreason = ''", r"allow\[0\]\.metric: 'Own' is no metric"),
        ("[[allow]]\ncase = '*'\nmetric = 'own'\nreason = ''\nup_to = 1", "own does not grow"),
    ],
)
def test_a_rule_that_is_no_rule_of_a_figure_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The line names the table or the key."""
    with pytest.raises(ValueError, match=message):
        _policy(tmp_path, text)


def test_a_misspelt_metric_is_no_figure(tmp_path: Path) -> None:
    """Its threshold would have no effect. A declared figure may have such a name, and not be measured."""
    policy = _policy(tmp_path, "[acuracy]\nthreshold = 0.01")
    with pytest.raises(ValueError, match=r"^policy: acuracy: no metric, .* \(did you mean accuracy\?\)$"):
        _judged(_report([0.5]), _report([0.5]), policy)
    assert not judge(_report([0.5]), _report([0.5]), policy, today=_TODAY, declared={"acuracy": _RATE}).warnings


def test_a_name_that_no_report_declares_is_a_warning(tmp_path: Path) -> None:
    """Older reports can be judged with a newer policy; an undeclared figure has no bound."""
    policy = _policy(tmp_path, "[own]\nat_least = 0.9")
    verdicts = _judged(_report([0.5], None), _report([0.5], None), policy)
    assert _row(verdicts) is None
    assert any("policy: own: no metric, and no figure" in line for line in verdicts.warnings)


def test_a_figure_of_ones_own_is_no_misspelt_metric() -> None:
    """Its name may be similar to that of a metric; a name of a metric with a letter too few or two in turn is not."""
    assert [misspelt(name) for name in ("decode_time", "kv_memory", "step_time", "kernel_time")] == [""] * 4
    assert misspelt("devcie_time") == " (did you mean device_time?)"
    assert misspelt("trafic") == " (did you mean traffic?)"
    assert misspelt("tiem") == " (did you mean time?)"
