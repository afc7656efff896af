from __future__ import annotations

import pytest
from support.report_factory import make_accuracy, make_failed, make_result, paper_results

from pytest_llmgpu.render.time_table import LEGEND, Cell, StudyTable, study_table
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Outcome


def _cells(table: StudyTable) -> dict[str, Cell]:
    return {cell.id: cell for _, cells in table.rows for cell in cells}


def _wrong(result: CaseResult) -> CaseResult:
    result.accuracy_check = AccuracyCheck(
        metric="acc_norm", value=0.26, baseline=0.82, source="x", tolerance=0.01, ok=False, text="wrong"
    )
    return result


def test_the_study_has_its_shape() -> None:
    """Batch sizes down, strategies across, in minutes, the fastest of each strategy marked."""
    table = study_table(paper_results())
    assert table.title == "Time for 10,042 items / acc_norm"
    assert table.columns == ["mp", "tp", "iok"]
    assert [name for name, _ in table.rows] == ["1", "2", "4", "8", "16", "32", "64"]
    cells = _cells(table)
    assert (cells["mp-bs1"].time, cells["mp-bs1"].accuracy, cells["mp-bs1"].kind) == ("171.0 min", "82.8 %", "plain")
    assert [name for name, cell in cells.items() if cell.kind == "best"] == ["iok-bs16", "mp-bs32", "tp-bs64"]
    assert (cells["iok-bs64"].word, cells["iok-bs64"].kind) == ("OoM", "oom")
    assert table.marks == [LEGEND["best"], LEGEND["oom"]]


def test_a_fast_wrong_answer_is_not_the_best() -> None:
    """It is marked as wrong instead."""
    cells = _cells(study_table([make_result(60), make_result(50, batch_size=2), _wrong(make_result(1, batch_size=4))]))
    assert [cell.kind for cell in cells.values()] == ["plain", "best", "wrong"]


@pytest.mark.parametrize(
    ("outcome", "kind", "word"),
    [("oom", "oom", "OoM"), ("skipped_after_oom", "skipped", "-"), ("timeout", "failed", "timeout")],
)
def test_how_a_case_ended_stands_in_its_place(outcome: Outcome, kind: str, word: str) -> None:
    """Without a time, with a mark in the legend."""
    table = study_table([make_failed(outcome)])
    [cell] = _cells(table).values()
    assert (cell.kind, cell.word, cell.time) == (kind, word, "")
    assert table.marks == [LEGEND[kind]]


def test_the_accuracy_of_random_weights_is_left_out() -> None:
    """It is chance, and the title says so."""
    table = study_table([make_result(accuracy=make_accuracy(), load_format="dummy")])
    assert _cells(table)["mp-bs1"].accuracy == ""
    assert "chance" in table.title


def test_what_was_not_measured_is_an_empty_cell() -> None:
    """The table stays a rectangle; a second measurement gets a row of its own."""
    table = study_table([make_result(), make_result(), make_result(strategy="tp", batch_size=2)])
    assert [name for name, _ in table.rows] == ["1", "1 #2", "2"]
    assert all(len(cells) == 2 for _, cells in table.rows)
    assert table.rows[0][1][1] == Cell()


def test_cuda_graphs_are_marked() -> None:
    """A time with them is no time of an eager forward."""
    table = study_table([make_result(execution="cuda_graphs"), make_result(batch_size=2)])
    assert [cell.graphs for cell in _cells(table).values()] == [True, False]
    assert LEGEND["graphs"] in table.marks


def test_launches_are_counted_where_there_are_several() -> None:
    """A time is their median then; a case may have more of them than another."""
    one, several = make_result(), make_result(batch_size=2)
    assert "launches" not in study_table([one]).title
    several.launches *= 3
    assert "median of 3 launches" in study_table([several]).title
    assert "median of 1 to 3 launches" in study_table([one, several]).title
