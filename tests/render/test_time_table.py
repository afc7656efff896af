from __future__ import annotations

import pytest
from support.report_factory import make_accuracy, make_failed, make_result, paper_results

from pytest_llmgpu.render.time_table import LEGEND, Cell, TimeTable, make_time_table
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Outcome


def _cells(table: TimeTable) -> dict[str, Cell]:
    return {cell.id: cell for _, cells in table.rows for cell in cells}


def _wrong(result: CaseResult) -> CaseResult:
    result.accuracy_check = AccuracyCheck(
        metric="acc_norm", value=0.26, baseline=0.82, source="x", tolerance=0.01, ok=False, text="wrong"
    )
    return result


def test_batch_sizes_are_rows_and_strategies_are_columns() -> None:
    """Long times are in minutes, and the fastest batch size of each strategy is marked."""
    table = make_time_table(paper_results())
    assert table.title == "Time for 10,042 items / acc_norm"
    assert table.columns == ["mp", "tp", "iok"]
    assert [name for name, _ in table.rows] == ["1", "2", "4", "8", "16", "32", "64"]
    cells = _cells(table)
    assert (cells["mp-bs1"].time, cells["mp-bs1"].second, cells["mp-bs1"].kind) == ("171.0 min", "82.8 %", "plain")
    assert [name for name, cell in cells.items() if cell.kind == "best"] == ["iok-bs16", "mp-bs32", "tp-bs64"]
    assert (cells["iok-bs64"].word, cells["iok-bs64"].kind) == ("OOM", "oom")
    assert table.marks == [LEGEND["best"], LEGEND["oom"]]


def test_a_fast_wrong_answer_is_not_the_best() -> None:
    """A case with wrong answers is marked as wrong, never as the fastest."""
    cells = _cells(
        make_time_table([make_result(60), make_result(50, batch_size=2), _wrong(make_result(1, batch_size=4))])
    )
    assert [cell.kind for cell in cells.values()] == ["plain", "best", "wrong"]


@pytest.mark.parametrize(
    ("outcome", "kind", "word"),
    [
        ("oom", "oom", "OOM"),
        ("skipped_after_oom", "skipped", "-"),
        *((name, "failed", name) for name in ("timeout", "crashed", "error", "interrupted")),
    ],
)
def test_a_case_without_a_time_has_its_outcome(outcome: Outcome, kind: str, word: str) -> None:
    """The cell has a word instead of a time, and the legend explains the mark."""
    table = make_time_table([make_failed(outcome)])
    [cell] = _cells(table).values()
    assert (cell.kind, cell.word, cell.time) == (kind, word, "")
    assert table.marks == [LEGEND[kind]]


def test_the_accuracy_of_random_weights_is_left_out() -> None:
    """It is chance, and the title states why there is none."""
    table = make_time_table([make_result(accuracy=make_accuracy(), load_format="dummy")])
    assert _cells(table)["mp-bs1"].second == ""
    assert "random" in table.title


def test_an_unmeasured_batch_size_is_an_empty_cell() -> None:
    """Every row has one cell per column, and a second measurement has its own row."""
    table = make_time_table([make_result(), make_result(), make_result(strategy="tp", batch_size=2)])
    assert [name for name, _ in table.rows] == ["1", "1 #2", "2"]
    assert all(len(cells) == 2 for _, cells in table.rows)
    assert table.rows[0][1][1] == Cell()


def test_numbers_of_processes_on_a_cpu_are_columns() -> None:
    """They share a table; on GPUs each number of them has a table of its own."""
    few, many = (make_result(device="cpu", devices=devices, strategy="tp") for devices in (2, 4))
    assert make_time_table([few, many]).columns == ["tp 2 processes", "tp 4 processes"]
    assert make_time_table([few, make_result(device="cpu", devices=1)]).columns == ["tp", "mp"]


def test_cuda_graphs_are_marked() -> None:
    """Times with CUDA graphs and times of eager forwards do not compare."""
    table = make_time_table([make_result(execution="cuda_graphs"), make_result(batch_size=2)])
    assert [cell.graphs for cell in _cells(table).values()] == [True, False]
    assert LEGEND["graphs"] in table.marks


def test_the_title_has_the_number_of_launches() -> None:
    """The title names the median of several launches, or the range of their number."""
    one, several = make_result(), make_result(batch_size=2)
    assert "launches" not in make_time_table([one]).title
    several.launches *= 3
    assert "median of 3 launches" in make_time_table([several]).title
    assert "median of 1 to 3 launches" in make_time_table([one, several]).title
