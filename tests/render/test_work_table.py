"""The table of the work of each case."""

from __future__ import annotations

import csv
import io

from support.report_factory import make_report, make_result

from pytest_llmgpu.render.exports import export
from pytest_llmgpu.render.terminal.cases import WIDTH, work_table
from pytest_llmgpu.render.work_table import make_work_table
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.work import Bound, RankWork, Work


def _worked(busy: float = 0.5, *, strategy: str = "tp", **fields: float) -> CaseResult:
    result = make_result(strategy=strategy)
    ranks = [
        RankWork(uuids=["GPU-0"], device_time_s=[0.06, 0.0672, 0.07], busy=busy),
        RankWork(uuids=["GPU-1"], device_time_s=[0.05] * 3, busy=busy / 2),
    ]
    result.launches[0].work = Work(batches=[0], passes=3, ranks=ranks)
    result.bound = Bound(compute_s=1.0, memory_s=0.5, wire_s=0.0, bound_s=1.0, limited_by="compute", share=0.25)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def test_a_case_has_device_time_share_of_the_bound_and_energy() -> None:
    """The slowest rank has the device time, and the ranks have the mean of their busy shares."""
    table = make_work_table([_worked(energy_j_per_sequence=12.5, energy_j_per_token=0.125)])
    assert table is not None
    assert [column.name for column in table.columns][1:] == [
        *("device_time_s", "bound_share", "device_busy"),
        *("energy_j_per_sequence", "energy_j_per_token"),
    ]
    [(title, size, cells)] = table.rows
    assert (title, size, list(cells)[1:]) == ("tp", "1", ["0.067", "25", "37.5", "12.5", "0.125"])


def test_cases_without_work_have_no_table() -> None:
    """A column without a figure is left out, and so is a table of nothing but times."""
    assert make_work_table([make_result()]) is None
    assert work_table([make_result()]) == ""
    table = make_work_table([make_result(), _worked()])
    assert table is not None
    assert [row[0] for row in table.rows] == ["tp"]
    assert not any(column.name.startswith("energy") for column in table.columns)


def test_a_narrow_table_drops_the_energy_first() -> None:
    """The columns that matter least are named below the table."""
    result = _worked(strategy="a" * 50, energy_j_per_sequence=12.5, energy_j_per_token=0.125)
    text = work_table([result])
    assert max(map(len, text.splitlines()[:-1])) <= WIDTH
    assert text.splitlines()[-1].startswith("Columns dropped to fit the width (the report has them): energy J/token")
    assert "device time" in text


def test_the_csv_table_has_the_columns() -> None:
    """They are empty for a case without them."""
    text = export("csv", make_report([_worked(energy_j_per_sequence=12.5), make_result()]))
    first, second = csv.DictReader(io.StringIO(text))
    assert (first["device_time_s"], first["bound_share"], first["device_busy"]) == ("0.0672", "0.25", "0.375")
    assert (first["energy_j_per_sequence"], first["energy_j_per_token"]) == ("12.5", "")
    assert (second["bound_share"], second["device_busy"]) == ("", "")
