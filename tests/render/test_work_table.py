"""The table of the work of each case."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest
from support.report_factory import make_failed, make_generation, make_report, make_result

from pytest_llmgpu.render.exports import export
from pytest_llmgpu.render.terminal.cases import WIDTH, work_table
from pytest_llmgpu.render.work_table import make_work_table, make_work_tables
from pytest_llmgpu.report.derived import batch_latency_s, derive
from pytest_llmgpu.report.report import Commit
from pytest_llmgpu.report.result import Batches, CaseResult, Collective, Traffic
from pytest_llmgpu.report.work import Bound, RankWork, Work


def _worked(*, strategy: str = "tp", **fields: float) -> CaseResult:
    result = make_result(strategy=strategy)
    ranks = [
        RankWork(uuids=["GPU-0"], device_time_s=[0.06, 0.0672, 0.07]),
        RankWork(uuids=["GPU-1"], device_time_s=[0.05] * 3),
    ]
    result.launches[0].work = Work(batches=[0], passes=3, ranks=ranks)
    result.bound = Bound(compute_s=1.0, memory_s=0.5, wire_s=0.0, bound_s=1.0, limited_by="compute", share=0.25)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def test_a_case_has_device_time_share_of_the_bound_and_energy() -> None:
    """The slowest rank has the device time, and the time of the ranks' kernels is part of that of the batch."""
    table = make_work_table([_worked(energy_j_per_sequence=12.5, energy_j_per_token=0.125)])
    assert table is not None
    assert [column.name for column in table.columns][1:] == [
        *("device_time_s", "bound_share", "device_busy"),
        *("energy_j_per_sequence", "energy_j_per_token"),
        *("batch_p50_s", "batch_p95_s"),
    ]
    [(title, size, cells)] = table.rows
    assert (title, size, list(cells)[1:]) == ("tp", "1", ["0.067", "25", "6.25", "12.5", "0.125", "938", "938"])


def test_bytes_between_nodes_are_a_column_on_several_nodes() -> None:
    """It is the sum over the ranks for each sequence."""
    result = _worked()
    sent = Collective(collective="all_reduce", calls=1, payload_bytes=8, wire_bytes=8 * 10**9)
    ranks = [[sent], [msgspec.structs.replace(sent, between_nodes_bytes=2 * 10**9)]]
    result.traffic = Traffic(ranks=ranks, wire_bytes_per_sequence=1.0)
    table = make_work_table([result])
    assert table is not None
    assert "between_nodes_bytes_per_sequence" not in [column.name for column in table.columns]
    result.traffic = Traffic(ranks=[ranks[1]] * 2, wire_bytes_per_sequence=1.0)
    sequences = sum(result.launches[0].batches.sequences)
    [row] = csv.DictReader(io.StringIO(export("csv", make_report([result]))))
    assert float(row["between_nodes_bytes_per_sequence"]) == 4 * 10**9 / sequences


def test_cases_that_did_not_complete_have_no_table() -> None:
    """A column without a figure is left out, and so is a case without any."""
    assert make_work_table([make_failed()]) is None
    assert work_table([make_failed()]) == ""
    table = make_work_table([make_failed(), _worked()])
    assert table is not None
    assert [row[0] for row in table.rows] == ["tp"]
    assert not any(column.name.startswith("energy") for column in table.columns)


def test_a_case_that_generates_has_a_table_of_its_tokens() -> None:
    """The KV cache is beside its formula, the bytes of a token are those of all ranks; a score has no such table."""
    result = make_result(strategy="tp", workload="generate", prompt_tokens=9, new_tokens=3)
    texts = make_generation([[1] * 3], [[-1.0] * 3], [[-1.0] * 3], step_s=[0.01, 0.03], kv_cache_bytes=3 << 20)
    result.launches[0] = msgspec.structs.replace(
        result.launches[0], generation=texts, batches=Batches(latency_s=[1.0], sequences=[2], tokens=[9])
    )
    sent = Collective(collective="all_reduce", calls=1, payload_bytes=8, wire_bytes=10**6)
    result.traffic = Traffic(ranks=[[sent]] * 2, wire_bytes_per_sequence=1.0, step=[[sent]] * 2)
    derive(result)
    _, tokens = make_work_tables([result])
    assert [column.name for column in tokens.columns] == [
        *("token_p95_s", "kv_cache_bytes", "kv_cache_formula_bytes", "wire_bytes_per_token")
    ]
    [(_, _, cells)] = tokens.rows
    assert cells == ("29.0", "3", "1", "1")
    assert len(make_work_tables([_worked()])) == 1


def test_a_narrow_table_drops_the_latencies_first() -> None:
    """The columns that matter least are named below the table."""
    result = _worked(strategy="a" * 50, energy_j_per_sequence=12.5, energy_j_per_token=0.125)
    text = work_table([result])
    assert max(map(len, text.splitlines()[:-1])) <= WIDTH
    assert text.splitlines()[-1].startswith("Columns dropped to fit the width (the report has them): batch p95 ms")
    assert "device time" in text


def test_the_csv_table_has_the_columns() -> None:
    """They are empty for a case without them."""
    text = export("csv", make_report([_worked(energy_j_per_sequence=12.5), make_result()]))
    first, second = csv.DictReader(io.StringIO(text))
    assert (first["device_time_s"], first["bound_share"]) == ("0.0672", "0.25")
    assert float(first["device_busy"]) == pytest.approx(0.0625, rel=1e-3)
    assert (first["energy_j_per_sequence"], first["energy_j_per_token"]) == ("12.5", "")
    assert (second["bound_share"], second["device_busy"]) == ("", "")


def test_the_csv_table_has_the_session_of_each_case() -> None:
    """Rows of several reports can be put together."""
    report = make_report([make_result(gpu_memory_bytes=2**34), make_failed(batch_size=8)])
    report.commit = Commit(sha="ab" * 20)
    first, second = csv.DictReader(io.StringIO(export("csv", report)))
    for row in (first, second):
        assert (row["created"], row["commit"], row["gpu"]) == (report.created, "ab" * 20, "NVIDIA H200")
        assert row["machine"].startswith("4x-NVIDIA-H200")
    assert (first["gpu_memory_bytes"], second["gpu_memory_bytes"]) == (str(2**34), "")
    assert (first["batch_p50_s"], second["batch_p50_s"]) == ("0.9375", "")


@pytest.mark.parametrize(("batches", "has_p99"), [(99, False), (100, True)])
def test_the_99th_percentile_needs_100_batches(batches: int, *, has_p99: bool) -> None:
    """With fewer it would be the largest one."""
    result = make_result(sequences=batches)
    result.launches[0].batches.latency_s = [float(number + 1) for number in range(batches)]
    assert batch_latency_s(result, 0.5) == (batches + 1) / 2
    assert (batch_latency_s(result, 0.99) is not None) is has_p99
    result.outcome = "error"
    assert batch_latency_s(result, 0.5) is None
