from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
from support.report_factory import make_report
from support.verdict_factory import make_row, make_verdicts, with_launches

from pytest_llmgpu.gate.ab import SIDES, Both, Side, compare, left_out, looks, split, undecided
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import SEVERITY, Row, Verdict, Verdicts


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


def _decided_at(*needed: int, then: Verdict = "OK") -> Callable[[Both], Verdicts]:
    """Return a gate that decides each case from a number of launches of it on."""

    def judge(both: Both) -> Verdicts:
        pairs = zip(both.head.cases, needed, strict=True)
        return make_verdicts(
            *(Row.of(one, "time", then if len(one.launches) >= least else "UNDECIDED", "") for one, least in pairs)
        )

    return judge


_again = functools.partial(undecided, policy=Policy())


def _launches(both: Both) -> list[list[int]]:
    return [[len(result.launches) for result in report.cases] for report in both]


@pytest.mark.parametrize(
    ("needed", "then", "ran"),
    [
        ((1, 1), "OK", (1, 1)),
        ((2, 2), "OK", (3, 3)),
        ((3, 3), "OK", (3, 3)),
        ((4, 4), "OK", (5, 5)),
        ((8, 8), "OK", (8, 8)),
        ((9, 9), "UNDECIDED", (8, 8)),
        ((1, 5), "OK", (1, 5)),
        ((1, 9), "REGRESSED", (1, 1)),
    ],
)
def test_the_comparison_stops_at_the_look_that_decides(
    needed: tuple[int, int], then: Verdict, ran: tuple[int, int]
) -> None:
    """Versions alternate, with looks after 1, 3, 5 and 8 launches; decided cases keep theirs, a regression ends it."""
    machine = _Machine()
    both, verdicts = compare(machine, _decided_at(*needed, then=then), _again, looks(8))
    assert machine.ran == [f"{side}-{number}" for number in range(1, max(ran) + 1) for side in SIDES]
    assert machine.deselected[2:] == [["b.py::t[mp-bs1]"] if ran[0] < ran[1] else []] * (len(machine.ran) - 2)
    assert _launches(both) == [list(ran)] * 2
    assert verdicts.rows[0].verdict == then


@pytest.mark.parametrize("verdict", SEVERITY)
def test_verdicts_that_more_launches_can_change(verdict: Verdict) -> None:
    """They are those of gated times that lack data; not of exact metrics, and not of accepted regressions."""
    rows = [
        Row.of(_result(1), "time", verdict, ""),
        Row.of(_result(2), "time", verdict, "", gated=False),
        Row.of(_result(4), "time", verdict, "", allowed="accepted"),
        Row.of(_result(8), "accuracy", verdict, ""),
    ]
    assert _again(make_verdicts(*rows)) == ({rows[0].key} if verdict == "UNDECIDED" else set())


def test_a_case_without_a_test_of_its_own_needs_every_case() -> None:
    """Without a node id it cannot be selected alone."""
    machine = _Machine()
    verdicts = make_verdicts(make_row("UNDECIDED", key=_result(2).key))

    def measure(side: Side, number: int, deselected: Sequence[str]) -> Report:
        report = machine(side, number, deselected)
        report.cases[1].nodeid = None
        return report

    both, _ = compare(measure, lambda _: verdicts, _again, looks(3))
    assert machine.deselected == [[]] * 6
    assert _launches(both) == [[3, 3]] * 2


def test_other_cases_of_a_later_launch_are_ignored() -> None:
    """A command that ignores --deselect measures other cases too, and these do not change the reports."""
    machine = _Machine(sizes=lambda _, number: (1, 2) if number == 1 else (2, 4))
    both, _ = compare(lambda side, number, _: machine(side, number, []), _decided_at(1, 9), _again, looks(3))
    assert [{one.id: len(one.launches) for one in report.cases} for report in both] == [{"mp-bs1": 1, "mp-bs2": 3}] * 2


def test_launches_that_measured_other_cases_are_refused() -> None:
    """The message names both launches."""
    machine = _Machine(sizes=lambda side, number: (1,) if (side, number) == ("head", 3) else (1, 2))
    with pytest.raises(ValueError, match="head-2 and head-3 measured different cases"):
        compare(machine, _decided_at(9, 9), _again, looks(3))


def test_a_test_is_not_deselected_by_the_beginning_of_its_node_id() -> None:
    """Deselecting a node id deselects all that begin with it."""
    cases = [_result(1, "b.py::t"), _result(2, "b.py::t_more"), _result(4, "b.py::other")]
    assert left_out(make_report(cases), {cases[1].key}) == ["b.py::other"]
    assert left_out(make_report(cases), {cases[0].key}) == ["b.py::t_more", "b.py::other"]


def test_the_rate_of_false_alarms_is_split_over_the_looks() -> None:
    """Each of four looks gets a quarter of it, and a single one gets all."""
    assert [looks(most) for most in (1, 2, 5, 8, 20)] == [(1,), (1, 2), (1, 3, 5), (1, 3, 5, 8), (1, 3, 5, 8, 20)]
    assert split(Policy(), 1) == Policy()
    assert split(Policy(), 4).confidence == pytest.approx(1 - 0.01 / 4)
