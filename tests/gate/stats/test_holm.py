from __future__ import annotations

import pytest

from pytest_llmgpu.gate.stats.holm import holm


def test_holm_multiplies_by_the_number_of_remaining_tests() -> None:
    """An adjusted p is at least the one before it and at most 1, and the order is kept."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_by_family() -> None:
    """Each test is adjusted within its own family."""
    assert holm([0.01, 0.04, 0.03, 0.005], [True, False, True, False]) == pytest.approx([0.02, 0.04, 0.03, 0.01])
