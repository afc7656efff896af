"""Recorded launches are judged as when they were recorded; the scripts that try the gate and estimate noise on them."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from pytest_llmgpu.gate import program
from pytest_llmgpu.gate.headline import headline
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.render.terminal.verdicts import table
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Verdicts

REPORTS = Path(__file__).parents[2] / "benchmarks" / "reports"


def _in_a_row(name: str, launch: int, factor: float | None = 1.0) -> Report:
    """Return a launch of each case of a recording; its replays in a row take a multiple of their time, or are none."""
    report = file.load(REPORTS / f"in-a-row-7b-{name}.json.gz")
    for case in report.cases:
        case.launches = [case.launches[launch]]
        work = case.launches[0].work
        assert work is not None
        (rank,) = work.ranks
        times_s = None if factor is None else [factor * one for one in rank.replays_s or ()]
        case.launches[0].work = msgspec.structs.replace(work, ranks=[msgspec.structs.replace(rank, replays_s=times_s)])
    return report


def _times(base: Report, head: Report, *, in_turn: bool = False) -> Verdicts:
    found = judge(base, head, Policy(), today=datetime.date(2026, 1, 1), in_turn=in_turn)
    return msgspec.structs.replace(found, rows=[row for row in found.rows if row.metric == "time"])


def test_one_launch_finds_slower_replays_in_a_row() -> None:
    """Two percent are found where the timed batches show nothing, and the host is not named as the cause."""
    base = _in_a_row("gpu-1", 0)
    assert {(row.verdict, row.part) for row in _times(base, _in_a_row("gpu-1", 1)).rows} == {("OK", None)}
    assert {(row.verdict, row.part) for row in _times(base, _in_a_row("gpu-2", 0)).rows} <= {
        ("OK", None),
        ("UNDECIDED", None),
    }
    slower = _times(base, _in_a_row("gpu-1", 1, 1.02))
    assert [(row.verdict, row.part) for row in slower.rows] == [("REGRESSED", "replays in a row")] * 4
    assert not any("host" in row.reason for row in slower.rows)
    assert " wall time of the replays in a row +2." in headline(slower, Policy()).text
    assert "time (replays in a row)" in table(slower, Policy())
    real = _times(base, _in_a_row("slower-1", 0))
    assert {row.verdict for row in real.rows} == {"REGRESSED"}


def test_a_baseline_without_replays_in_a_row_is_said_so() -> None:
    """The batches decide alone; a candidate without them is compared as before."""
    without, having = _in_a_row("gpu-1", 0, None), _in_a_row("gpu-1", 1, 1.02)
    found = _times(without, having)
    assert {(row.verdict, row.part) for row in found.rows} == {("OK", None)}
    assert found.not_compared["time: replays in a row: this baseline has none of these batches, promote a new one"] == 4
    assert "replays" not in " ".join(_times(having, without).not_compared)


def _of_host(name: str, launches: Sequence[int], factor: float = 1.0, *, beside: bool = True) -> Report:
    """Return launches of the eager case of batch size 2, whose host takes a multiple of its time."""
    report = file.load(REPORTS / f"own-loop-7b-{name}.json.gz")
    case = report.cases[0]
    case.launches = [case.launches[number] for number in launches]
    for batches in (launch.batches for launch in case.launches):
        batches.latency_s = [factor * one for one in batches.latency_s]
        batches.launch_s = [factor * one for one in batches.launch_s] if beside else []
        batches.reference_s = batches.reference_s if beside else []
    return msgspec.structs.replace(report, cases=[case])


def test_a_slower_host_is_found_at_equal_speed() -> None:
    """Five percent are found from three launches, whose wall times differ by 10 %, and equal programs are OK."""
    base, other = _of_host("gpu-1", (0, 1)), (2, 3, 4)
    walls = [math.fsum(launch.batches.latency_s) for launch in _of_host("gpu-1", range(5)).cases[0].launches]
    assert max(walls) > 1.4 * min(walls)
    (equal,) = _times(base, _of_host("gpu-1", other)).rows
    assert (equal.verdict, equal.part) == ("OK", "host at equal speed")
    for slower in (_of_host("gpu-1", other, 1.07), _of_host("slower-1", (0, 1, 2))):
        found = _times(base, slower)
        (row,) = found.rows
        assert (row.verdict, row.part) == ("REGRESSED", "host at equal speed")
        assert row.threshold == pytest.approx(0.02)
        assert " times as long for equal work." in row.reason
        assert "wall time of the host at equal speed +" in headline(found, Policy()).text


def test_a_host_is_compared_with_its_like_alone() -> None:
    """A baseline without its speed is named; of another torch or CPU the speed is another one."""
    base, head = _of_host("gpu-1", (0, 1), beside=False), _of_host("gpu-1", (2, 3, 4))
    found = _times(base, head)
    assert [(row.verdict, row.part) for row in found.rows] == [("UNDECIDED", None)]
    assert found.not_compared["time: host at equal speed: this baseline has none, promote a new one"] == 1
    assert not any("equal speed" in reason for reason in _times(head, base).not_compared)
    base = _of_host("gpu-1", (0, 1))
    for environment in (
        msgspec.structs.replace(head.environment, cpu="another"),
        msgspec.structs.replace(head.environment, versions={**head.environment.versions, "torch": "9"}),
    ):
        (row,) = _times(base, msgspec.structs.replace(head, environment=environment)).rows
        assert (row.verdict, row.part) == ("UNDECIDED", None)


def test_what_slows_the_reference_as_well_is_decided_in_turn_alone() -> None:
    """Another program does so, and a thread that holds Python's lock: batches of three times their time are stated."""
    base, head = _of_host("gpu-1", (0, 1, 2)), _of_host("gpu-1", (3, 4))
    for batches in (launch.batches for launch in head.cases[0].launches):
        for column in (batches.latency_s, batches.launch_s, batches.reference_s):
            column[:] = [3 * one for one in column]
    (row,) = _times(base, head).rows
    assert (row.verdict, row.part) == ("UNDECIDED", "host at equal speed")
    assert re.search(r" Wall time \+1\d\d\.\d %: other programs can cause it\.", row.reason)
    assert "llmgpu ab" in row.next_step
    (row,) = _times(base, head, in_turn=True).rows
    assert (row.verdict, row.part) == ("REGRESSED", None)


def test_other_gpus_neither_accuse_nor_excuse_a_program() -> None:
    """One kernel of two H200 differs by 0.33 % of device time, all by 1.1 %: equal is OK, a copy has its price."""
    reach = import_module("reach")
    ones, twos = (file.load(REPORTS / f"in-a-row-7b-gpu-{number}.json.gz") for number in (1, 2))
    (one, two) = (reach._of(report, report.cases[0], report.cases[0].launches[0]) for report in (ones, twos))
    for base, head in ((one, two), (two, one)):
        names = base.environment.kernel_names, head.environment.kernel_names
        (pair,) = program.pairs_of(base.cases[0], head.cases[0], names)
        assert not pair.same_gpus
        assert not [row for row in reach._rows(base, head) if row.worse]
        slower = reach._rows(base, reach._changed(head, reach._with_copies))
        assert [row.verdict for row in slower if row.metric == "program"] == ["REGRESSED"]
    ratios = [row.ratio for row in reach._rows(one, two) if row.metric == "device_time"]
    assert abs((ratios[0] or 1.0) - 1) > 0.005, "more than the price of the copy"
    # On the same GPU a program that became faster is excused.
    for launch in two.cases[0].launches:
        assert launch.work is not None
        ranks = [msgspec.structs.replace(rank, uuids=one.cases[0].launches[0].ranks[0].uuids) for rank in launch.ranks]
        launch.work = msgspec.structs.replace(launch.work, ranks=ranks)
    base, head = (one, two) if (ratios[0] or 1.0) < 1 else (two, one)
    rows = reach._rows(base, reach._changed(head, reach._with_copies))
    assert [row.verdict for row in rows if row.metric == "program"] == ["CHANGED"]


def test_a_gpu_that_idles_more_did_not_become_slower() -> None:
    """The host slows one of four launches: its passes have a higher clock, and its kernels take as long as others."""
    report = file.load(REPORTS / "own-loop-7b-240-gpu-3.json.gz")
    case = report.cases[1]
    reports = [import_module("reach")._of(report, case, case.launches[number]) for number in (0, 1, 7, 9)]
    rows = [
        (one, other, row)
        for (one, base), (other, head) in itertools.permutations(enumerate(reports), 2)
        for row in judge(base, head, Policy(), today=datetime.date(2026, 1, 1)).rows
        if row.metric == "device_time"
    ]
    assert len(rows) == 12
    assert {row.verdict for one, other, row in rows if {one, other} == {0, 1}} == {"OK"}
    (row,) = (row for one, other, row in rows if (one, other) == (0, 3))
    assert (row.ratio or 1.0) > 1.01
    assert (row.clock_ratio or 1.0) > 1.03
    assert not [row for _, _, row in rows if row.verdict == "REGRESSED"]


@pytest.mark.slow
def test_recorded_launches_show_what_the_gate_finds(capsys: pytest.CaptureFixture[str]) -> None:
    """One launch finds half a percent in a copy and one percent of all kernels, and leaves equal programs alone."""
    names = ["clock-7b-gpu-1.json.gz", "clock-7b-gpu-2.json.gz", "own-kernel-7b-gpu-3.json.gz"]
    slower = "own-kernel-7b-slower-3.json.gz"
    flags = ["--slower", str(REPORTS / slower), "--trials=4"]
    assert import_module("reach").main([*(str(REPORTS / name) for name in names), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["launches"] == {**dict(zip(names, (6, 1, 2), strict=True)), slower: 2}
    scatter = [case["fixed_clock_pct"] for recording in found["device_time"].values() for case in recording.values()]
    assert max(scatter) < 0.05
    for pairs in (*found["same_gpu"].values(), *found["other_gpu"].values()):
        assert pairs["equal_program"]["regressed"] == 0
        assert pairs["half_a_percent_in_a_copy"] == {"regressed": 1, "named": 1}
    for pairs in found["same_gpu"].values():
        assert pairs["half_a_percent_in_one_kernel"]["regressed"] == 1
        assert pairs["one_percent_of_all_kernels"]["regressed"] == 1
        assert sum(real["pairs"] for real in pairs["slower_kernel"].values()) == 4
        assert {(real["regressed"], real["named"]) for real in pairs["slower_kernel"].values()} == {(1, 1)}
    assert found["reports_of_21_cases"]["equal_program"] == 0


@pytest.mark.slow
def test_fewer_passes_scatter_more(capsys: pytest.CaptureFixture[str]) -> None:
    """With the first two of four passes alone launches differ by more at a fixed clock."""
    scatter = []
    for flags in ([], ["--passes=2"]):
        assert import_module("reach").main([str(REPORTS / "mp-7b-2xH200-ahead.json.gz"), "--trials=1", *flags]) == 0
        (found,) = json.loads(capsys.readouterr().out)["device_time"].values()
        scatter.append([case["fixed_clock_pct"] for case in found.values()])
    assert all(many < few for many, few in zip(*scatter, strict=True))


@pytest.mark.slow
def test_two_gpus_of_one_host_are_other_gpus() -> None:
    """Both recordings name both GPUs of their host, and each used one. The program is the same: nothing is worse."""
    one, two = (file.load(REPORTS / f"replayed-7b-gpu-{number}.json.gz") for number in (1, 2))
    assert {gpu.uuid for gpu in one.environment.gpus} == {gpu.uuid for gpu in two.environment.gpus}
    for base, head in ((one, two), (two, one)):
        rows = judge(base, head, Policy(), today=datetime.date(2026, 1, 1)).rows
        times = [row for row in rows if row.metric in {"time", "device_time"}]
        assert all("other GPUs" in row.reason for row in times)
        assert len(times) == 8, "no row over all cases"
        assert not [row for row in rows if row.worse]


def _rounds(name: str) -> list[Report]:
    """Return the recorded launches of a case, five in each report."""
    whole = file.load(REPORTS / f"slow-gpu-2-{name}.json.gz")
    (result,) = whole.cases
    found = []
    for start in range(0, len(result.launches), 5):
        part = msgspec.structs.replace(result, launches=result.launches[start : start + 5])
        derive(part)
        found.append(msgspec.structs.replace(whole, cases=[part]))
    return found


@pytest.mark.slow
def test_a_strategy_that_sleeps_is_found_and_an_equal_one_is_not() -> None:
    """In 20 rounds of five launches on four H200 a sleep of 10 % is REGRESSED in 15, OK in none; equal ones never."""
    without, slower = _rounds("without"), _rounds("with")

    def time_verdict(base: Report, head: Report) -> str:
        # Only the first launch has its answers: only its round has a verdict of accuracy.
        rows = judge(base, head, Policy(), today=datetime.date(2026, 1, 1)).rows
        return next(row.verdict for row in rows if row.metric == "time")

    found = [time_verdict(base, head) for base, head in zip(without, slower, strict=True)]
    assert (len(found), found.count("REGRESSED"), found.count("OK")) == (20, 15, 0)
    # The next round of the same GPU, of four, is the same program.
    alike = [time_verdict(base, head) for base, head in zip(without, without[4:], strict=False)]
    assert "REGRESSED" not in alike


@pytest.mark.parametrize(("s0", "df0"), [(0.01, 4.0), (0.002, 20.0)])
def test_the_prior_of_many_machines_is_recovered(s0: float, df0: float) -> None:
    """Variances of groups that are drawn from a prior give its deviation and its degrees of freedom."""
    chance = random.Random(1)
    groups = []
    for _ in range(4000):
        variance = s0**2 * df0 / chance.gammavariate(df0 / 2, 2)
        groups.append((variance * chance.gammavariate(9 / 2, 2) / 9, 9))
    found_s0, found_df0 = import_module("priors").fit(groups)
    assert found_s0 == pytest.approx(s0, rel=0.05)
    assert found_df0 == pytest.approx(df0, rel=0.25)


def test_groups_of_one_deviation_have_a_prior_that_counts_for_everything() -> None:
    """Machines that differ by chance alone have the pooled deviation and the most degrees of freedom."""
    s0, df0 = import_module("priors").fit([(0.01**2, 11), (0.0101**2, 11), (0.0099**2, 11)])
    assert math.isclose(s0, 0.01, rel_tol=0.01)
    assert df0 == 1000
