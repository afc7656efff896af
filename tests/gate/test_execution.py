from __future__ import annotations

import pytest
from support.prose import Prose
from support.report_factory import make_result

from pytest_llmgpu.gate.execution import execution_row, other_execution
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row


def _ran(execution: str, requested: str = "auto", choice: str | None = None) -> CaseResult:
    result = make_result(execution=execution, cuda_graphs=requested)
    result.launches[0].execution_choice = choice
    return result


@pytest.mark.parametrize(
    ("was", "now", "verdict"),
    [
        ("cuda_graphs", "eager", "REGRESSED"),
        ("compile", "eager", "REGRESSED"),
        ("eager", "cuda_graphs", "IMPROVED"),
        ("eager", "eager", None),
        ("cuda_graphs", "cuda_graphs", None),
        ("cuda_graphs", "compile", None),
    ],
)
def test_recorded_forwards_that_become_eager_are_a_regression(was: str, now: str, verdict: str | None) -> None:
    """The reverse is an improvement, and an unchanged execution has no row."""
    row = execution_row(_ran(was), _ran(now), gated=True)
    assert (row.result if row is not None else None) == verdict
    assert (other_execution(_ran(was), _ran(now)) is None) == (was == now)


def test_the_row_has_the_reason_of_the_execution(prose: Prose) -> None:
    """It is the reason that the ranks of the candidate recorded."""
    head = _ran("eager", choice="Recording failed: aten::item reads from the GPU.")
    row = execution_row(_ran("cuda_graphs"), head, gated=False)
    assert isinstance(row, Row)
    assert not row.gated
    assert prose == row.reason


def test_an_execution_that_was_asked_for_is_no_regression() -> None:
    """The user of the candidate switched the graphs off."""
    assert execution_row(_ran("cuda_graphs"), _ran("eager", "off"), gated=True) is None
