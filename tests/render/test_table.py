from __future__ import annotations

import msgspec
import pytest
from support.report_factory import make_check, make_failed, make_generation, make_result, paper_results

from pytest_llmgpu.render.table import COLUMNS, Cell, TimeTable, figure_tables, make_time_table
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.result import Batches, CaseResult, Collective, Outcome, Traffic
from pytest_llmgpu.report.work import Bound, RankWork, Work


def _worked(*, strategy: str = "tp", **fields: float) -> CaseResult:
    result = make_result(strategy=strategy)
    ranks = [
        RankWork(uuids=["GPU-0"], device_time_s=[0.06, 0.0672, 0.07]),
        RankWork(uuids=["GPU-1"], device_time_s=[0.05] * 3),
    ]
    result.launches[0].work = Work(batches=[0], eager_batches=[0], passes=3, ranks=ranks)
    result.bound = Bound(compute_s=1.0, memory_s=0.5, wire_s=0.0, bound_s=1.0, limited_by="compute", share=0.25)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def test_a_case_has_device_time_share_of_the_bound_and_energy() -> None:
    """The slowest rank has the device time, and the time of the ranks' kernels is part of that of the batch."""
    table = figure_tables([_worked(energy_j_per_sequence=12.5, energy_j_per_token=0.125)])["work"]
    assert [column.name for column in table.columns][1:] == [
        *("device_time_s", "bound_share", "device_busy"),
        *("energy_j_per_sequence", "energy_j_per_token"),
    ]
    [(title, size, cells)] = table.rows
    assert (title, size, list(cells)[1:]) == ("tp", "1", ["0.067", "25", "6.25", "12.5", "0.125"])


def test_bytes_between_nodes_are_a_column_on_several_nodes() -> None:
    """It is the sum over the ranks for each sequence."""
    result = _worked()
    sent = Collective(collective="all_reduce", calls=1, payload_bytes=8, wire_bytes=8 * 10**9)
    ranks = [[sent], [msgspec.structs.replace(sent, between_nodes_bytes=2 * 10**9)]]
    result.traffic = Traffic(ranks=ranks, wire_bytes_per_sequence=1.0)
    table = figure_tables([result])["work"]
    assert "between_nodes_bytes_per_sequence" not in [column.name for column in table.columns]
    result.traffic = Traffic(ranks=[ranks[1]] * 2, wire_bytes_per_sequence=1.0)
    sequences = sum(result.launches[0].batches.sequences)
    assert COLUMNS["between_nodes_bytes_per_sequence"].value(result) == 4 * 10**9 / sequences


def test_a_case_that_generates_has_a_table_of_its_tokens() -> None:
    """The bytes of a token are those of all ranks; a score has no such table."""
    result = make_result(strategy="tp", workload="generate", prompt_tokens=9, new_tokens=3)
    texts = make_generation([[1] * 3], [[-1.0] * 3], [[-1.0] * 3], step_s=[0.01, 0.03], kv_cache_bytes=3 << 20)
    result.launches[0] = msgspec.structs.replace(
        result.launches[0], generation=texts, batches=Batches(latency_s=[1.0], sequences=[2], tokens=[9])
    )
    sent = Collective(collective="all_reduce", calls=1, payload_bytes=8, wire_bytes=10**6)
    result.traffic = Traffic(ranks=[[sent]] * 2, wire_bytes_per_sequence=1.0, step=[[sent]] * 2)
    derive(result)
    tokens = figure_tables([result])["tokens"]
    assert [column.name for column in tokens.columns] == [*("token_p95_s", "kv_cache_bytes", "wire_bytes_per_token")]
    [(_, _, cells)] = tokens.rows
    assert list(cells) == ["29.0", "3", "1"]
    assert list(figure_tables([_worked()])) == ["work"]
    assert figure_tables([make_failed()]) == {}


def _cells(table: TimeTable) -> dict[str, Cell]:
    return {cell.id: cell for _, cells in table.rows for cell in cells}


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
    assert list(table.legend) == ["best", "oom"]


def test_a_fast_wrong_answer_is_not_the_best() -> None:
    """A case with wrong answers is marked as wrong, never as the fastest."""
    results = [make_result(60), make_result(50, batch_size=2, execution="cuda_graphs"), make_result(1, batch_size=4)]
    results[2].accuracy_check = make_check()
    cells = _cells(make_time_table(results)).values()
    assert [(cell.kind, cell.graphs) for cell in cells] == [("plain", False), ("best", True), ("wrong", False)]


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
    assert list(table.legend) == [kind]


def test_an_unmeasured_batch_size_is_an_empty_cell() -> None:
    """A row has a cell per column, a second measurement its own row, a number of processes on a CPU its own column."""
    few, many = (make_result(device="cpu", devices=devices, strategy="tp") for devices in (2, 4))
    assert make_time_table([few, many]).columns == ["tp 2 processes", "tp 4 processes"]
    table = make_time_table([make_result(), make_result(), make_result(strategy="tp", batch_size=2)])
    assert [name for name, _ in table.rows] == ["1", "1 #2", "2"]
    assert all(len(cells) == 2 for _, cells in table.rows)
    assert table.rows[0][1][1] == Cell()


def test_the_title_has_the_number_of_launches() -> None:
    """The title names the median of several launches, or the range of their number."""
    one, several = make_result(), make_result(batch_size=2)
    assert "launches" not in make_time_table([one]).title
    several.launches *= 3
    assert "median of 3 launches" in make_time_table([several]).title
    assert "median of 1 to 3 launches" in make_time_table([one, several]).title
