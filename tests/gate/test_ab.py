from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from support.report_factory import make_report
from support.verdict_factory import make_verdicts, with_launches

from pytest_llmgpu.gate.ab import SIDES, Both, Side, compare, left_out, looks, split, undecided
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import SEVERITY, Row, Verdict, Verdicts

POLICY = Policy()
NOT_ENOUGH: Verdict = "UNDECIDED"


def _result(size: int, test: str | None = None) -> CaseResult:
    result = with_launches([1.0], batch_size=size)
    result.nodeid = f"b.py::t[{result.id}]" if test is None else test
    return result


class _Machine:
    """Runs launches without processes."""

    def __init__(self, sizes: Callable[[Side, int], Sequence[int]] = lambda *_: (1, 2)) -> None:
        self.ran: list[str] = []
        self.deselected: list[list[str]] = []
        self._sizes = sizes

    def __call__(self, side: Side, number: int, deselected: Sequence[str]) -> Report:
        self.ran.append(f"{side}-{number}")
        self.deselected.append(list(deselected))
        results = [_result(size) for size in self._sizes(side, number)]
        return make_report([result for result in results if result.nodeid not in deselected])


def _decided_at(needed: dict[int, int], then: Verdict = "OK", metric: str = "time") -> Callable[[Both], Verdicts]:
    """Return a gate that decides a batch size from a number of launches of it on."""

    def judge(both: Both) -> Verdicts:
        rows = [
            Row.of(
                result,
                metric,
                then if len(result.launches) >= needed.get(result.case.batch_size, 1) else NOT_ENOUGH,
                "",
            )
            for result in both.head.cases
        ]
        return make_verdicts(*rows)

    return judge


def _again(verdicts: Verdicts) -> set[str]:
    return undecided(verdicts, POLICY)


def _launches(report: Report) -> dict[str, int]:
    return {result.id: len(result.launches) for result in report.cases}


def _in_turn(numbers: Sequence[int]) -> list[str]:
    return [f"{side}-{number}" for number in numbers for side in SIDES]


@pytest.mark.parametrize(("needed", "ran"), [(1, 1), (2, 3), (3, 3), (4, 5), (8, 8), (9, 8)])
def test_the_comparison_stops_at_the_look_that_decides(needed: int, ran: int) -> None:
    """Launches alternate, and the looks are after 1, 3, 5 and 8 launches of each version."""
    machine = _Machine()
    both, verdicts = compare(machine, _decided_at({1: needed, 2: needed}), _again, looks(8))
    assert machine.ran == _in_turn(range(1, ran + 1))
    assert [_launches(report) for report in both] == [{"mp-bs1": ran, "mp-bs2": ran}] * 2
    assert {row.verdict for row in verdicts.rows} == {"OK" if needed <= ran else NOT_ENOUGH}


def test_undecided_cases_alone_are_launched_again() -> None:
    """Decided cases keep their launches."""
    machine = _Machine()
    both, _ = compare(machine, _decided_at({2: 5}), _again, looks(8))
    assert machine.ran == _in_turn(range(1, 6))
    assert machine.deselected == [[]] * 2 + [["b.py::t[mp-bs1]"]] * 8
    assert [_launches(report) for report in both] == [{"mp-bs1": 1, "mp-bs2": 5}] * 2


def test_a_regression_ends_the_comparison() -> None:
    """No further launch changes the result, even if other cases are undecided."""
    machine = _Machine()
    compare(machine, _decided_at({1: 1, 2: 9}, then="REGRESSED"), _again, looks(8))
    assert machine.ran == ["base-1", "head-1"]


@pytest.mark.parametrize("verdict", SEVERITY)
def test_verdicts_that_more_launches_can_change(verdict: Verdict) -> None:
    """They are those of gated times that lack data; not of exact metrics, and not of accepted regressions."""
    rows = [
        Row.of(_result(1), "time", verdict, ""),
        Row.of(_result(2), "time", verdict, "", gated=False),
        Row.of(_result(4), "time", verdict, "", allowed="accepted"),
        Row.of(_result(8), "accuracy", verdict, ""),
    ]
    expected = {rows[0].key} if verdict in {NOT_ENOUGH, "UNDECIDED"} else set()
    assert undecided(make_verdicts(*rows), POLICY) == expected


def test_a_row_without_a_test_of_its_own_needs_every_case() -> None:
    """A row over all cases, and a case without a node id, cannot be selected alone."""
    for key in ("all cases", _result(2).key):
        machine = _Machine()
        row = msgspec.structs.replace(Row.of(_result(2), "time", NOT_ENOUGH, ""), key=key)
        verdicts = make_verdicts(row)

        def measure(side: Side, number: int, deselected: Sequence[str], machine: _Machine = machine) -> Report:
            report = machine(side, number, deselected)
            report.cases[1].nodeid = None
            return report

        def judge(_: Both, found: Verdicts = verdicts) -> Verdicts:
            return found

        both, _ = compare(measure, judge, _again, looks(3))
        assert machine.deselected == [[]] * 6
        assert [_launches(report) for report in both] == [{"mp-bs1": 3, "mp-bs2": 3}] * 2


def test_other_cases_of_a_later_launch_are_ignored() -> None:
    """A command that ignores --deselect measures other cases too, and these do not change the reports."""
    machine = _Machine(sizes=lambda _, number: (1, 2) if number == 1 else (2, 4))
    both, _ = compare(lambda side, number, _: machine(side, number, []), _decided_at({2: 9}), _again, looks(3))
    assert _launches(both.head) == {"mp-bs1": 1, "mp-bs2": 3}


def test_launches_that_measured_other_cases_are_refused() -> None:
    """The message names both launches."""
    machine = _Machine(sizes=lambda side, number: (1,) if (side, number) == ("head", 3) else (1, 2))
    with pytest.raises(ValueError, match="head-2 and head-3 measured different cases"):
        compare(machine, _decided_at({1: 9, 2: 9}), _again, looks(3))


def test_a_test_is_not_deselected_by_the_beginning_of_its_node_id() -> None:
    """Deselecting a node id deselects all that begin with it."""
    cases = [_result(1, "b.py::t"), _result(2, "b.py::t_more"), _result(4, "b.py::other")]
    assert left_out(make_report(cases), {cases[1].key}) == ["b.py::other"]
    assert left_out(make_report(cases), {cases[0].key}) == ["b.py::t_more", "b.py::other"]


def test_the_rate_of_false_alarms_is_split_over_the_looks() -> None:
    """Each of four looks gets a quarter of it, and a single one gets all."""
    assert [looks(most) for most in (1, 2, 5, 8, 20)] == [(1,), (1, 2), (1, 3, 5), (1, 3, 5, 8), (1, 3, 5, 8, 20)]
    assert split(POLICY, 1) == POLICY
    assert split(POLICY, 4).confidence == pytest.approx(1 - (1 - POLICY.confidence) / 4)
