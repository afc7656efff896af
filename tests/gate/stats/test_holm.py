from __future__ import annotations

import pytest

from pytest_llmgpu.gate.stats.holm import first_confidence, holm


def test_holm_multiplies_by_the_number_of_remaining_tests() -> None:
    """An adjusted p is at least the one before it and at most 1, and the order is kept."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_by_weight() -> None:
    """A test with a tenth of the weight is multiplied by ten."""
    assert holm([0.01, 0.004], weights=[0.9, 0.1]) == pytest.approx([0.01 / 0.9, 0.01 / 0.9])
    assert holm([0.04, 0.004], weights=[0.9, 0.1]) == pytest.approx([0.04, 0.04])
    assert holm([0.02, 0.02, 0.001], weights=[0.9, 0.1, 1.0]) == pytest.approx([0.02 / 0.9, 0.02 / 0.9, 0.002])


def test_holm_by_family() -> None:
    """Each test is adjusted within its own family."""
    assert holm([0.01, 0.04, 0.03, 0.005], [True, False, True, False]) == pytest.approx([0.02, 0.04, 0.03, 0.01])


@pytest.mark.parametrize("family", [1, 1.1, 21])
def test_the_first_test_of_a_family_needs_the_confidence_of_holm(family: float) -> None:
    """A test with just this confidence alone is adjusted to the confidence of a single test."""
    others = [] if family == 1 else [family - 1]
    least = 1 - first_confidence(0.95, family)
    adjusted = holm([least, *[1.0] * len(others)], weights=[1.0, *others])
    assert adjusted[0] == pytest.approx(0.05)
