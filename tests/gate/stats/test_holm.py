from __future__ import annotations

import pytest

from pytest_llmgpu.gate.stats.holm import first_confidence, holm


def test_holm_by_hand() -> None:
    """The smallest by the number of tests, the next by one less, never below one before it, at most 1, in order."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_by_weight() -> None:
    """What has a tenth of the chance of a false alarm pays ten times, and leaves the rest to the other."""
    assert holm([0.01, 0.004], weights=[0.9, 0.1]) == pytest.approx([0.01 / 0.9, 0.01 / 0.9])
    assert holm([0.04, 0.004], weights=[0.9, 0.1]) == pytest.approx([0.04, 0.04])
    assert holm([0.02, 0.02, 0.001], weights=[0.9, 0.1, 1.0]) == pytest.approx([0.02 / 0.9, 0.02 / 0.9, 0.002])


def test_holm_by_family() -> None:
    """Each test among those of its own family."""
    assert holm([0.01, 0.04, 0.03, 0.005], [True, False, True, False]) == pytest.approx([0.02, 0.04, 0.03, 0.01])


@pytest.mark.parametrize("family", [1, 1.1, 21])
def test_the_first_of_a_family_has_to_be_as_sure_as_holm_asks(family: float) -> None:
    """What is just as sure alone is adjusted to the confidence that was asked of each."""
    others = [] if family == 1 else [family - 1]
    least = 1 - first_confidence(0.95, family)
    adjusted = holm([least, *[1.0] * len(others)], weights=[1.0, *others])
    assert adjusted[0] == pytest.approx(0.05)
