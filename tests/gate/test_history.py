from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_llmgpu.gate.history import FEWEST, WINDOW, describe, shifts
from pytest_llmgpu.gate.noise_model import PRIORS, Prior

_PRIOR = PRIORS["device_compute"]

_FLAT = [1.0, 1.002, 0.999, 1.001, 0.998, 1.0, 1.001, 0.999, 1.0, 1.002]


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_a_step_is_found_with_the_report_where_it_began(factor: float) -> None:
    """One report is not enough, the second one shows it, and later reports find it no second time."""
    history = [*_FLAT, *(factor * value for value in _FLAT)]
    assert shifts(history[:11], _PRIOR) == []
    [step] = shifts(history, _PRIOR)
    assert (step.kind, step.first, step.found) == ("step", 10, 11)
    assert step.change == pytest.approx(factor - 1, abs=0.003)
    assert str(describe(step, [f"{number:04}" for number in range(20)])).count("0010") == 1


def test_a_drift_is_found_although_no_report_differs_from_the_one_before() -> None:
    """It begins near the first report that it changed."""
    history = [*_FLAT, *(value * 1.001**day for day, value in enumerate(_FLAT * 2, 1))]
    drift = shifts(history, _PRIOR)[0]
    assert drift.kind == "drift"
    assert 8 <= drift.first <= 13
    assert drift.found - drift.first < 14
    assert drift.change > 0.005


def test_two_steps_are_two_changes() -> None:
    """The search begins again with the first change."""
    history = [factor * value for factor in (1.0, 1.1, 1.0) for value in _FLAT]
    assert [(one.first, one.change > 0) for one in shifts(history, _PRIOR)] == [(10, True), (20, False)]


def test_few_reports_are_compared_with_the_noise_that_is_expected() -> None:
    """A step of 0.5 % after five quiet reports may be noise as others have it; many reports show their own."""
    quiet = [1.0001, 1.0, 1.0001, 1.0, 1.0001]
    step = [1.005 * value for value in quiet]
    assert shifts([*quiet, *step], Prior(s0=0.003, df0=40.0, source="test")) == []
    assert shifts([*quiet, *step], Prior(s0=0.0003, df0=40.0, source="test"))
    assert shifts([*(quiet * 6), *step], Prior(s0=0.003, df0=40.0, source="test"))


def test_a_change_has_to_be_clearer_among_many_cases() -> None:
    """Each of the histories may show one by chance."""
    history = [*_FLAT, *(1.01 * value for value in _FLAT)]
    alone, among = (shifts(history, _PRIOR, cases=cases)[0] for cases in (1, 1000))
    assert among.found > alone.found
    assert (among.kind, among.first) == (alone.kind, alone.first)


def test_one_report_with_another_figure_is_no_change() -> None:
    """It may be an accident of its session, in a short history and in a long one."""
    assert shifts([*_FLAT, 1.5], _PRIOR) == []
    assert shifts([*(_FLAT * 8), 1.5, *_FLAT], _PRIOR) == []


def test_a_change_that_is_too_small_to_matter_is_not_stated() -> None:
    """Figures that hardly vary would show any change."""
    assert shifts([1.0, 1.0 + 1e-9] * 10 + [1.001] * 10, _PRIOR) == []
    assert len(shifts([1.0, 1.0 + 1e-9] * 10 + [1.01] * 10, _PRIOR)) == 1


def test_a_long_history_is_searched_from_its_newest_reports() -> None:
    """A change after more reports than are searched has the number of its report."""
    draw = random.Random(3)
    history = [math.exp(draw.gauss(0, 0.003)) for _ in range(2 * WINDOW)]
    [step] = shifts([*history, *(1.05 * value for value in history[:10])], _PRIOR)
    assert step.first == 2 * WINDOW


@given(st.lists(st.floats(0.5, 2.0), max_size=30), st.floats(0.01, 100.0))
@settings(max_examples=60, deadline=None)
def test_changes_do_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    """Each is within the history, with enough reports before it, and in the order in which they were found."""
    found = shifts(values, _PRIOR)
    assert [one[:3] for one in shifts([unit * value for value in values], _PRIOR)] == [one[:3] for one in found]
    assert all(FEWEST - 2 <= one.first <= one.found < len(values) for one in found)
    assert all(one.found < other.found for one, other in itertools.pairwise(found))
