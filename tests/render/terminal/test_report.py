from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from support.prose import Prose
from support.report_factory import (
    make_accuracy,
    make_answers,
    make_case,
    make_failed,
    make_report,
    make_result,
    paper_results,
)

from pytest_llmgpu.analysis.assess import assess
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.render.terminal.report import headline, progress, tables
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Report, next_id
from pytest_llmgpu.report.result import Accuracy, CaseResult, Failure


def _report(results: Sequence[CaseResult], gpus: int = 4) -> Report:
    """Return the report that a session makes of these results."""
    report = make_report(gpus=gpus)
    for result in results:
        result.id = next_id([one.id for one in report.cases], result.case)
        options = Options(accuracy_baseline=0.828)
        report.cases.append(assess([result], earlier=report.cases, environment=report.environment, options=options))
    return report


def _machine(count: int = 4) -> Machine:
    gpus = make_report(gpus=count).environment.gpus
    return Machine(device="cuda", devices=count, gpus=gpus, facts=TorchFacts(version="2.13.0"))


def test_the_headline_names_everything_that_is_measured() -> None:
    """The first line of a log names the machine, the models, the strategies and the batch sizes."""
    cases = [make_case(strategy=name, batch_size=size) for name in ("mp", "tp") for size in (8, 1)]
    assert headline(_machine(), cases, [8, 1, 8]) == (
        "llmgpu: 4 x NVIDIA H200 (cuda); huggyllama/llama-30b; float16; hellaswag dataset; strategies mp, tp; "
        "batch sizes 1, 8"
    )


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "batch_size", "line"),
    [
        (120, 502, 12.9, 132, "mp-bs8  120/502 batches  1 228 seq/s  ETA 0:41"),
        (0, 502, 12.4, 8, "mp-bs8  0/502 batches  0:12"),
        (0, 502, 0.0, 8, "mp-bs8  0/502 batches  0:00"),
        (3, 3, 6.0, 1, "mp-bs8  3/3 batches  0.50 seq/s  ETA 0:00"),
        (1, 3601, 1.0, 8, "mp-bs8  1/3601 batches  8.00 seq/s  ETA 1:00:00"),
    ],
)
def test_the_live_line(done: int, total: int, elapsed_s: float, batch_size: int, line: str) -> None:
    """It has the finished batches, the rate and the remaining time; before the first batch the elapsed time."""
    assert progress("mp-bs8", done, total, elapsed_s, batch_size=batch_size) == line


def test_tables_come_before_findings() -> None:
    """The worst finding is the first one."""
    text = tables(_report(paper_results()), verbose=True)
    places = [
        text.index(part)
        for part in (
            "huggyllama/llama-30b, float16, 4 x NVIDIA H200, hellaswag dataset",
            "Time for 10,042 items",
            "Communication per GPU",
            "Memory per GPU",
            "FAILURE  iok-bs32: ",
            "INFO     mp-bs64: ",
            "INFO     iok-bs64: ",
        )
    ]
    assert places == sorted(places)
    assert text.count("-> ") == 3


def test_the_short_text_of_21_cases_has_at_most_40_lines() -> None:
    """It has one table, and no table of communication or memory."""
    text = tables(_report(paper_results()))
    assert len(text.splitlines()) <= 40 - len(["", "report", "next"])
    assert "per GPU:" not in text


@pytest.mark.parametrize("series", [72, 3000])
def test_many_cases_are_folded(series: int) -> None:
    """The text stays short and narrow, and names the number of cases that it leaves out."""
    names = [f"s{number}" for number in range(series)]
    results = [make_result(1.0 / size, strategy=name, batch_size=size) for name in names for size in (1, 2)]
    lines = tables(make_report(results)).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert any(line.startswith(f"{2 * series - 30:,} cases not shown") for line in lines)
    assert len(tables(make_report(results), verbose=True).splitlines()) > 2 * series


def test_everything_fits_the_width() -> None:
    """No line is longer than 100 columns, and none ends with a space."""
    failure = Failure(phase="forward", message="a very long message " * 20)
    report = _report([*paper_results(), make_failed("error", failure, batch_size=128)])
    lines = [line for verbose in (False, True) for line in tables(report, verbose=verbose).splitlines()]
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)


def test_colour_changes_no_text() -> None:
    """Without the styles the coloured report is the plain report."""
    report = _report(paper_results())
    coloured = tables(report, color=True)
    for style in ("0", "1", "31", "32", "33"):
        assert f"\x1b[{style}m" in coloured
        coloured = coloured.replace(f"\x1b[{style}m", "")
    assert coloured == tables(report)


@pytest.mark.parametrize(
    ("fields", "captions"),
    [
        ({"dtype": "bfloat16"}, ("30b, float16, 4", "30b, bfloat16, 4")),
        ({"devices": 1}, ("4 x NVIDIA", "1 x NVIDIA")),
        ({"gpu_memory_bytes": 18 * 2**30}, ("hellaswag dataset", "hellaswag dataset, memory limit 18.0 GiB per GPU")),
        ({"limit": 100}, ("hellaswag dataset", "hellaswag dataset (first 100 items)")),
        ({"cuda_graphs": "off"}, ("dataset, cuda_graphs auto", "dataset, cuda_graphs off")),
        ({"revision": "0123456789abcdef"}, ("dataset, revision None", "dataset, revision 0123456789ab")),
    ],
)
def test_measurements_that_differ_have_blocks_with_captions(fields: dict[str, Any], captions: tuple[str, str]) -> None:
    """Cases that do not compare are in separate tables, and the captions name the difference."""
    text = tables(_report([make_result(2.0), make_result(1.0, **fields)]))
    lines = [line for line in text.splitlines() if line.startswith("huggyllama")]
    assert len(lines) == 2
    for line, caption in zip(lines, captions, strict=True):
        assert caption in line
    assert text.count("strategy  ") == 2


def test_findings_with_the_same_next_step_are_joined() -> None:
    """Three findings have their text, the other cases are named, and the next step is written once."""
    first, wrong = make_result(64.0, make_accuracy(items=100)), make_accuracy(items=100, loglikelihoods=[-2.0] * 400)
    others = [make_result(64.0 / size, wrong, batch_size=size) for size in (2, 4, 8, 16, 32)]
    report = _report([first, *others])
    step = report.cases[-1].findings[0].next_step
    lines = tables(report, verbose=True).splitlines()
    assert [
        name
        for name in ("mp-bs2", "mp-bs4", "mp-bs8", "mp-bs16", "mp-bs32")
        if any(f" {name}: " in line for line in lines)
    ] == ["mp-bs2", "mp-bs4", "mp-bs8"]
    others_line = next(line for line in lines if "mp-bs16, mp-bs32" in line)
    assert "finding" in others_line
    assert len([line for line in lines if line.strip().startswith(f"-> {step[:20]}")]) == 1


def _answers(flipped: Sequence[int], difference: float = 0.0, items: int = 200) -> Accuracy:
    """Return answers of which nine in ten are right; these items flip, and all log-likelihoods differ by this."""
    right = [number % 10 != 0 for number in range(items)]
    numbers = [-1.0 - difference] * (4 * items)
    return make_answers([hit != (number in flipped) for number, hit in enumerate(right)], numbers)


def test_each_strategys_worst_batch_size_is_compared_with_mp(prose: Prose) -> None:
    """Below the table are flips, items lost and won, their probability, and the difference of log-likelihoods."""
    cases = {
        ("mp", 1): _answers([]),
        ("mp", 8): _answers([]),
        ("tp", 1): _answers([0], 1e-4),
        ("tp", 8): _answers([0, 1, 10], 2e-3),
        ("iok", 1): _answers([]),
    }
    results = [make_result(1.0, given, strategy=name, batch_size=size) for (name, size), given in cases.items()]
    lines = tables(_report(results), verbose=True).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("tp compared"))
    assert lines[first - 1].startswith("* most sequences/s of its strategy")
    text = "\n".join(lines[first : lines.index("", first)])
    assert "worst at batch size 8: 3 of 200 items flipped (1 lost, 2 won, p = 1)" in text
    assert prose == text


def test_the_short_text_counts_the_comparisons_that_it_leaves_out() -> None:
    """Three strategies are compared with mp; the verbose text has all of them."""
    results = [
        make_result(1.0, _answers([0] * (name != "mp")), strategy=name) for name in ("mp", "a", "b", "c", "d", "e")
    ]
    assert "\nand 2 more comparisons with mp\n" in tables(_report(results))
    assert "e compared with mp" in tables(_report(results), verbose=True)


def test_random_weights_are_compared_by_their_log_likelihoods() -> None:
    """Their predictions are chance; log-likelihoods that are not finite are the worst case."""
    dummy: dict[str, Any] = {"load_format": "dummy"}
    numbers = {1: [-1.0] * 4, 2: [-1.002] * 4, 4: [-1.001] * 4}
    results = [make_result(1.0, make_accuracy(0.25, 1, [0], [-1.0] * 4), **dummy)]
    results += [
        make_result(1.0, make_accuracy(0.25, 1, [1], values), strategy="tp", batch_size=size, **dummy)
        for size, values in numbers.items()
    ]
    [line] = [line for line in tables(_report(results)).splitlines() if "compared with mp" in line]
    assert "worst at batch size 2: " in line
    assert "0.2 % (largest)" in line
    assert "flipped" not in line
    results[2].launches = make_result(1.0, make_accuracy(0.25, 1, [1], [math.nan] * 4)).launches
    [line] = [line for line in tables(_report(results)).splitlines() if "compared with mp" in line]
    assert line.endswith("worst at batch size 2: not all log-likelihoods are finite")


def test_flips_without_labels_have_no_probability() -> None:
    """Reports made before labels were kept have no items lost or won."""
    assert "tp compared" not in tables(_report(paper_results()))
    lines = tables(_report(paper_results()), verbose=True).splitlines()
    [line] = [line for line in lines if line.startswith("tp compared with mp at every batch size: ")]
    assert line.endswith("0 of 10,042 items flipped, log-likelihoods equal")
    assert max(map(len, lines)) <= 100
