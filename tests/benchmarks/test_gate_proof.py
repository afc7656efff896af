"""The recorded launches that the gate's promises were proved with are judged as when they were recorded."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest

from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.report import Report

REPORTS = Path(__file__).parents[2] / "benchmarks" / "reports"
_GPUS = 4


def launches(name: str, count: int) -> list[Report]:
    """Return reports of the launches of a recorded case, a number of launches in each."""
    whole = file.load(REPORTS / f"{name}.json.gz")
    (result,) = whole.cases
    found = []
    for start in range(0, len(result.launches), count):
        part = msgspec.structs.replace(result, launches=result.launches[start : start + count])
        derive(part)
        found.append(msgspec.structs.replace(whole, cases=[part]))
    return found


@pytest.mark.slow
def test_a_strategy_that_sleeps_is_found_and_an_equal_one_is_not() -> None:
    """In 20 rounds of five launches on four H200 a sleep of 10 % is REGRESSED in 15, OK in none; equal ones never."""
    without, slower = (launches(f"slow-gpu-2-{which}", 5) for which in ("without", "with"))

    def time_verdict(base: Report, head: Report) -> str:
        # Only the first launch has its answers: only its round has a verdict of accuracy.
        found = judge(base, head, Policy(), today=datetime.date(2026, 1, 1))
        [row] = [row for row in found.rows if row.metric == "time"]
        return row.verdict

    found = [time_verdict(base, head) for base, head in zip(without, slower, strict=True)]
    assert (len(found), found.count("REGRESSED"), found.count("OK")) == (20, 15, 0)
    # The next round of the same GPU is the same program.
    alike = [time_verdict(base, head) for base, head in zip(without, without[_GPUS:], strict=False)]
    assert "REGRESSED" not in alike


def test_the_recorded_launches_are_complete() -> None:
    """There are forty launches of every case of the main job on a CPU, each with its batches."""
    found = file.load(REPORTS / "launches-cpu.json.gz")
    assert [result.case.batch_size for result in found.cases] == [1, 2, 4, 8, 16, 32, 64]
    assert {len(result.launches) for result in found.cases} == {40}
