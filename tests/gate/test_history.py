from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_llmgpu.gate.history import FEWEST, WINDOW, describe, shifts

_FLAT = [1.0, 1.002, 0.999, 1.001, 0.998, 1.0, 1.001, 0.999, 1.0, 1.002]


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_a_step_is_found_with_the_report_where_it_began(factor: float) -> None:
    """One report is not enough, the second one shows it, and later reports find it no second time."""
    history = [*_FLAT, *(factor * value for value in _FLAT)]
    assert shifts(history[:11]) == []
    [step] = shifts(history)
    assert (step.kind, step.first, step.found) == ("step", 10, 11)
    assert step.change == pytest.approx(factor - 1, abs=0.003)
    assert str(describe(step, [f"{number:04}" for number in range(20)])).count("0010") == 1


def test_a_drift_is_found_although_no_report_differs_from_the_one_before() -> None:
    """It begins near the first report that it changed."""
    history = [*_FLAT, *(value * 1.001**day for day, value in enumerate(_FLAT * 2, 1))]
    drift = shifts(history)[0]
    assert drift.kind == "drift"
    assert 8 <= drift.first <= 13
    assert drift.found - drift.first < 14
    assert drift.change > 0.005


def test_two_steps_are_two_changes() -> None:
    """The search begins again with the first change."""
    history = [factor * value for factor in (1.0, 1.1, 1.0) for value in _FLAT]
    assert [(one.first, one.change > 0) for one in shifts(history)] == [(10, True), (20, False)]


def test_one_report_with_another_figure_is_no_change() -> None:
    """It may be an accident of its session, in a short history and in a long one."""
    assert shifts([*_FLAT, 1.5]) == []
    assert shifts([*(_FLAT * 8), 1.5, *_FLAT]) == []


def test_a_change_that_is_too_small_to_matter_is_not_stated() -> None:
    """Figures that hardly vary would show any change."""
    assert shifts([1.0, 1.0 + 1e-9] * 10 + [1.001] * 10) == []
    assert len(shifts([1.0, 1.0 + 1e-9] * 10 + [1.01] * 10)) == 1


def test_a_long_history_is_searched_from_its_newest_reports() -> None:
    """A change after more reports than are searched has the number of its report."""
    draw = random.Random(3)
    history = [math.exp(draw.gauss(0, 0.003)) for _ in range(2 * WINDOW)]
    [step] = shifts([*history, *(1.05 * value for value in history[:10])])
    assert step.first == 2 * WINDOW


@given(st.lists(st.floats(0.5, 2.0), max_size=30), st.floats(0.01, 100.0))
@settings(max_examples=60, deadline=None)
def test_changes_do_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    """Each is within the history, with enough reports before it, and in the order in which they were found."""
    found = shifts(values)
    assert [one[:3] for one in shifts([unit * value for value in values])] == [one[:3] for one in found]
    assert all(FEWEST - 2 <= one.first <= one.found < len(values) for one in found)
    assert all(one.found < other.found for one, other in itertools.pairwise(found))
