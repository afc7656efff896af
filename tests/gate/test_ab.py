from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

import pytest
from support.report_factory import make_report
from support.verdict_factory import with_launches

from pytest_llmgpu.gate.ab import Both, Side, compare, left_out, split
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy, TimeRule
from pytest_llmgpu.gate.timing.calibration import Calibration
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Verdicts

QUIET = Calibration(typical=0.001)
POLICY = Policy()


def _result(level: float, size: int, test: str | None = None) -> CaseResult:
    result = with_launches([level], batch_size=size)
    result.nodeid = f"b.py::t[{result.id}]" if test is None else test
    return result


def _judged(both: Both) -> Verdicts:
    return judge(both.base, both.head, POLICY, today=datetime.date(2026, 6, 1), calibration=QUIET)


class _Machine:
    """Runs launches without processes: batch size 2 of the head differs from launch to launch."""

    def __init__(self, spread: Sequence[float] = (), sizes: Callable[[str], Sequence[int]] = lambda _: (1, 2)) -> None:
        self.ran: list[tuple[str, list[str]]] = []
        self._spread = list(spread)
        self._sizes = sizes

    def __call__(self, side: Side, name: str, deselected: Sequence[str]) -> Report:
        self.ran.append((name, list(deselected)))
        odd = self._spread.pop(0) if side == "head" and self._spread else 0.0
        results = [_result(1.0 + (odd if size == 2 else 0.0), size) for size in self._sizes(name)]
        return make_report([result for result in results if result.nodeid not in deselected])


def _verdict(verdicts: Verdicts, name: str) -> str:
    return next(row.verdict for row in verdicts.rows if (row.id, row.metric) == (name, "time"))


def _launches(report: Report) -> dict[str, int]:
    return {result.id: len(result.launches) for result in report.cases}


def test_launches_alternate() -> None:
    """The order is base, head, base, head, and conclusive cases are measured once."""
    machine = _Machine()
    both, verdicts = compare(machine, _judged, launches=3, again=2)
    assert [name for name, _ in machine.ran] == ["base-1", "head-1", "base-2", "head-2", "base-3", "head-3"]
    assert [_launches(report) for report in both] == [{"mp-bs1": 3, "mp-bs2": 3}] * 2
    assert {row.verdict for row in verdicts.rows if row.gated} == {"OK"}


def test_undecided_cases_alone_are_measured_again() -> None:
    """Their launches alternate and add up until they are conclusive; other cases do not change."""
    machine = _Machine([0.06, -0.06])
    both, verdicts = compare(machine, _judged, launches=2, again=2)
    assert [name for name, _ in machine.ran[4:8]] == [
        "base-again1-1",
        "head-again1-1",
        "base-again1-2",
        "head-again1-2",
    ]
    assert all(deselected == ["b.py::t[mp-bs1]"] for _, deselected in machine.ran[4:])
    rounds = len(machine.ran) // 4
    assert rounds > 1
    assert [_launches(report) for report in both] == [{"mp-bs1": 2, "mp-bs2": 2 * rounds}] * 2
    assert _verdict(verdicts, "mp-bs1") == "OK"


def test_measuring_again_has_an_end() -> None:
    """After `again` rounds a case stays NOT_ENOUGH_DATA."""
    for again in (0, 1, 2):
        machine = _Machine([0.3, -0.3] * 9)
        both, verdicts = compare(machine, _judged, launches=2, again=again)
        assert len(machine.ran) == 4 * (again + 1)
        assert _launches(both.head)["mp-bs2"] == 2 * (again + 1)
        assert _verdict(verdicts, "mp-bs2") == "NOT_ENOUGH_DATA"


def test_other_cases_of_a_repeated_round_are_ignored() -> None:
    """A command that ignores --deselect measures other cases too, and these do not change the reports."""
    machine = _Machine([0.3, -0.3] * 9, sizes=lambda name: (2, 4) if "again1-1" in name else (1, 2))
    both, _ = compare(lambda side, name, _: machine(side, name, []), _judged, launches=2, again=1)
    assert _launches(both.head) == {"mp-bs1": 2, "mp-bs2": 4}


def test_launches_that_measured_other_cases_are_refused() -> None:
    """The message names both launches."""
    machine = _Machine(sizes=lambda name: (1,) if name == "head-2" else (1, 2))
    with pytest.raises(ValueError, match="head-1 and head-2 measured different cases"):
        compare(machine, _judged, launches=2, again=0)


def test_cases_that_are_not_gated_are_not_measured_again() -> None:
    """Cases without a node id are not measured again either, because their test cannot be selected."""
    machine = _Machine([0.3, -0.3])
    policy = Policy(time=TimeRule(gate=False))
    compare(
        machine,
        lambda both: judge(both.base, both.head, policy, today=datetime.date(2026, 6, 1), calibration=QUIET),
        launches=2,
        again=2,
    )
    assert len(machine.ran) == 4

    nameless = _Machine([0.3, -0.3])

    def measure(side: Side, name: str, deselected: Sequence[str]) -> Report:
        report = nameless(side, name, deselected)
        for result in report.cases:
            result.nodeid = None
        return report

    compare(measure, _judged, launches=2, again=2)
    assert len(nameless.ran) == 4


def test_a_test_is_not_deselected_by_the_beginning_of_its_node_id() -> None:
    """Deselecting a node id deselects all that begin with it."""
    cases = [_result(1.0, 1, "b.py::t"), _result(1.0, 2, "b.py::t_more"), _result(1.0, 4, "b.py::other")]
    assert left_out(make_report(cases), {cases[1].key}) == ["b.py::other"]
    assert left_out(make_report(cases), {cases[0].key}) == ["b.py::t_more", "b.py::other"]


def test_the_rate_of_false_alarms_is_split_over_the_comparisons() -> None:
    """Each of three comparisons gets a third of it, and a single one gets all."""
    assert split(POLICY, 0) == POLICY
    assert split(POLICY, 2).confidence == pytest.approx(1 - 0.05 / 3)
