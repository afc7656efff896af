"""The experiment of Shin et al. 2024 in benchmarks/paper: its settings, its separation, and the claims."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import tiny_model
from support.report_factory import (
    GIB,
    known,
    make_accuracy,
    make_check,
    make_failed,
    make_profile,
    make_report,
    make_result,
    paper_results,
)

from pytest_llmgpu.plugin import options
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Outcome

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAPER = BENCHMARKS / "paper"
REPORTS = (
    PAPER / "results" / "paper-4xH200.json.gz",
    BENCHMARKS / "reports" / "llama-30b-4xH200-no-p2p.json.gz",
    BENCHMARKS / "reports" / "llama-30b-4xH200.json.gz",
)
VARIABLE = "NCCL_P2P_DISABLE"


@pytest.fixture(autouse=True)
def _peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is not set before and after the test."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


def test_the_settings_are_those_of_the_publication(pytester: pytest.Pytester) -> None:
    """One file has the settings of its server, harness and profiler."""
    chosen = options.resolve(pytester.parseconfigure(str(PAPER)))
    assert chosen.strategy == ("mp", "tp", "iok")
    assert (chosen.model, chosen.load_format, chosen.dtype) == ("llama-30b", "dummy", "float16")
    assert (chosen.device, chosen.devices) == ("cuda", 4)
    assert chosen.gpu_memory == pytest.approx(32 * GIB, rel=0.02)
    assert known(chosen.gpu_memory) < 31.75 * GIB, "the memory of a card of 32 GB"
    assert (chosen.scoring, chosen.cuda_graphs, chosen.iok_min_tokens) == ("harness", "off", 1)
    assert chosen.profile_method == "polling"
    assert chosen.sample_period == pytest.approx(1 / 6)
    assert os.environ[VARIABLE] == "1"


def test_the_main_job_does_not_collect_the_experiment(pytester: pytest.Pytester) -> None:
    """`pytest benchmarks` collects none of it, and none of its settings apply."""
    result = pytester.runpytest_inprocess(str(BENCHMARKS), "--collect-only", "-q", "-p", "no:cacheprovider")
    tests = [line for line in result.outlines if "::" in line]
    assert tests
    assert all("test_inference.py::test_hellaswag[mp-bs" in test for test in tests)
    assert VARIABLE not in os.environ


def test_its_own_command_collects_the_experiment(pytester: pytest.Pytester) -> None:
    """The command collects every strategy at every batch size, and nothing else."""
    flags = ("--strategy=mp,tp,iok", "--collect-only", "-q", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess(str(PAPER), *flags)
    sizes = [2**power for power in range(11)]
    expected = [f"study.py::test_hellaswag[{name}-bs{size}]" for name in ("mp", "tp", "iok") for size in sizes]
    assert [line for line in result.outlines if "::" in line] == expected


@pytest.mark.slow
def test_the_command_measures(model: Path, pytester: pytest.Pytester) -> None:
    """On a CPU, which has no memory to cap, the experiment runs and its report has the settings."""
    tiny_model.write_dataset(pytester.path / "items.jsonl")
    folder = pytester.path / "paper"
    shutil.copytree(PAPER, folder, ignore=shutil.ignore_patterns("__pycache__", "*.json.gz"))
    settings = (folder / "pytest.ini").read_text()
    (folder / "pytest.ini").write_text(settings.replace("llmgpu_gpu_memory = 31.7GiB\n", ""))
    for_the_cpu = ("--llmgpu-device=cpu", "--llmgpu-devices=1", "--llmgpu-dtype=float32")
    flags = (
        "--strategy=mp",
        f"--llmgpu-model={model}",
        f"--llmgpu-dataset={pytester.path / 'items.jsonl'}",
        "--llmgpu-batch-sizes=2,8",
    )
    # A process of its own: pytester would forget the parts of torch that are imported on the way.
    result = pytester.runpytest_subprocess("paper", *flags, *for_the_cpu, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    report = file.load(folder / "report.json.gz")
    assert {case.id: case.case.scoring for case in report.cases} == {"mp-bs2": "harness", "mp-bs8": "harness"}
    assert report.environment.variables[VARIABLE] == "1"
    assert report.options["--llmgpu-scoring"] == "harness"


def _rows(results: Sequence[CaseResult]) -> dict[str, tuple[str, bool | None]]:
    """Return the value for each claim, and whether it holds."""
    return {one.text: (one.ours, one.holds) for one in import_module("claims").claims(make_report(results))}


def _table(reports: dict[str, Report]) -> list[str]:
    """Return the lines of the tables."""
    lines: list[str] = import_module("claims").markdown(reports).splitlines()
    return lines


def test_the_published_figures_support_the_claims() -> None:
    """In a report of Table 2 the claims about times, thresholds and accuracy hold."""
    results = [*paper_results(), *(make_failed(strategy=strategy, batch_size=128) for strategy in ("mp", "tp"))]
    for one in results:
        one.case = msgspec.structs.replace(one.case, gpu_memory_bytes=32 * GIB)
    rows = _rows(results)
    expected = {
        "mp: best batch size": ("32 (3705.00 s)", True),
        "tp: best batch size": ("64 (4079.00 s)", True),
        "iok: best batch size": ("16 (4027.00 s)", True),
        "order at batch size 1": ("iok 4959.00 s, tp 6548.00 s, mp 10258.00 s", True),
        "mp passes iok as the batch grows": ("at 8", True),
        "iok gains least by batching (time at 1 over the best)": ("mp 2.77, tp 1.61, iok 1.23", True),
        "mp: largest batch size in 32 GiB a GPU": ("between 64, which fits, and 128, which does not", True),
        "tp: largest batch size in 32 GiB a GPU": ("between 64, which fits, and 128, which does not", True),
        "iok: largest batch size in 32 GiB a GPU": ("between 32, which fits, and 64, which does not", True),
        "mp: accuracy over batch sizes": ("82.8 %", True),
        "tp: accuracy over batch sizes": ("82.8 %", True),
        "iok: accuracy over batch sizes": ("26.0 to 82.8 %", True),
    }
    assert {text: rows[text] for text in expected} == expected
    assert rows["tp: PCIe TX at the largest batch size, GB/s"] == ("6.87 (at 64)", None)
    assert rows["iok: memory in use grows with the batch"][1] is True
    assert rows["tp sends two orders more a second than mp: PCIe TX"] == ("79 to 79 times (at 1)", False)


def test_a_wrong_answer_is_no_best_time() -> None:
    """A fast case with wrong answers is not the best, and its cell has the accuracy."""
    results = [
        make_result(seconds, make_accuracy(right), strategy="iok", batch_size=size)
        for size, seconds, right in ((16, 60.0, 0.82), (32, 1.0, 0.26))
    ]
    results[1].accuracy_check = make_check()
    assert _rows(results)["iok: best batch size"][0] == "16 (60.00 s)"
    lines = [line for line in _table({"a": make_report(results)}) if line.startswith(("| 16 |", "| 32 |"))]
    assert [line.rpartition(" | ")[2] for line in lines] == ["**60.00** |", "1.00 (26 %) |"]


@pytest.mark.parametrize(
    ("cap", "ours", "holds"),
    [
        (32, "", False),
        (31.75, " (with 31.75 GiB)", False),
        (17, " (with 17 GiB)", None),
        (None, " (with no cap)", None),
    ],
)
def test_a_threshold_is_compared_at_the_published_cap_only(cap: float | None, ours: str, holds: bool | None) -> None:
    """A different amount of memory has a different threshold."""
    fields: dict[str, Any] = {"strategy": "mp", "gpu_memory_bytes": cap and int(cap * GIB)}
    rows = _rows([make_result(batch_size=1, **fields), make_failed(batch_size=2, **fields)])
    assert rows["mp: largest batch size in 32 GiB a GPU"] == (f"1: 2 is out of memory{ours}", holds)


@pytest.mark.parametrize(
    ("busy", "holds"), [((90.0, 60.0, 40.0, 30.0), True), ((40.0, 60.0, 80.0, 90.0), False), ((90.0,) * 4, False)]
)
def test_utilisation_is_compared_with_traffic(busy: tuple[float, ...], holds: bool) -> None:
    """It falls as traffic grows, or it does not; a constant one does not fall."""
    results = [
        make_result(profile=make_profile(tx=(1 + number) * 1e9, busy=value), strategy="tp", batch_size=2**number)
        for number, value in enumerate(busy)
    ]
    assert _rows(results)["tp: utilisation falls as traffic grows"][1] is holds


@pytest.mark.parametrize(("outcome", "cell"), [("oom", "OoM"), ("skipped_after_oom", ""), ("timeout", "timeout")])
def test_the_outcome_of_a_case_is_shown_in_place_of_its_time(outcome: Outcome, cell: str) -> None:
    """A cell of the table has the outcome of a case without a time."""
    results = [make_result(60.0, strategy="tp", batch_size=32), make_failed(outcome, strategy="tp", batch_size=64)]
    lines = _table({"a": make_report(results)})
    assert "| 32 | **3,705** | 4,087 | 4,201 (26 %) | **60.00** |" in lines
    assert f"| 64 | 3,800 | **4,079** | OoM | {cell} |" in lines


def test_the_readme_has_the_figures_of_the_reports() -> None:
    """Its tables are the output of the script for the stored reports; a new run needs new tables."""
    readme = (PAPER / "README.md").read_text().splitlines()
    reports = {path.name: file.load(path) for path in REPORTS}
    table = _table(reports)
    rows = table[table.index(f"| claim | Shin et al. | {' | '.join(reports)} |") + 2 :]
    assert len(rows) > 20
    assert [row for row in rows if row not in readme] == []
    seconds = _table({REPORTS[0].name: reports[REPORTS[0].name]})
    times = [line.split("|")[5:-1] for line in seconds if re.match(r"\| \d", line)]
    shown = [line.split("|")[5:-1] for line in readme if re.match(r"\| \d+ \|", line)]
    assert [[cell.strip(" s") for cell in row] for row in shown] == [[cell.strip() for cell in row] for row in times]
