"""The scripts of benchmarks/gate: their results for given launches, and that they can fail."""

from __future__ import annotations

import argparse
import datetime
import importlib
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
from support.judged_reports import on_h200, timed

from pytest_llmgpu.gate import calibration
from pytest_llmgpu.gate import judge as gate
from pytest_llmgpu.gate.calibration import Calibration
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.report import Report

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that imports a script, with the scripts of its folder."""
    monkeypatch.syspath_prepend(BENCHMARKS / "gate")
    return importlib.import_module


def launches(name: str, count: int) -> list[Report]:
    """Return reports of the launches of a recorded case, a number of launches in each."""
    whole = file.load(BENCHMARKS / "reports" / f"{name}.json.gz")
    (result,) = whole.cases
    found = []
    for start in range(0, len(result.launches), count):
        part = msgspec.structs.replace(result, launches=result.launches[start : start + count])
        derive(part)
        found.append(msgspec.structs.replace(whole, cases=[part]))
    return found


@pytest.mark.slow
def test_the_recorded_proof_is_judged_the_same(script: Callable[[str], ModuleType]) -> None:
    """In 20 rounds of launches on four H200 a strategy that sleeps 10 % is REGRESSED in each, the same one in none."""
    end_to_end = script("end_to_end")
    calibrating = file.load(BENCHMARKS / "reports" / "slow-gpu-2-calibrating.json.gz")
    noise = Calibration(cases=calibration.measure(calibrating).cases)
    needed = end_to_end.launches_needed(calibrating, noise, 0.1)
    assert needed == 7
    without, slower = (launches(f"slow-gpu-2-{side}", 5) for side in ("without", "with"))
    assert len(without) == len(slower) == 20

    def time_verdict(base: Report, head: Report) -> str:
        # Only the first launch has its answers: only its round has a verdict of accuracy.
        found = gate.judge(base, head, Policy(), today=datetime.date(2026, 1, 1), calibration=noise)
        [row] = [row for row in found.rows if row.metric == "time"]
        return row.verdict

    assert [time_verdict(base, head) for base, head in zip(without, slower, strict=True)] == ["REGRESSED"] * 20
    alike = Counter(time_verdict(base, without[end_to_end.following(n, 20, 4)]) for n, base in enumerate(without))
    assert set(alike) <= {"OK", "NOT_ENOUGH_DATA"}
    assert alike["OK"] >= 10, "a false alarm is not hidden by noise"


def test_the_recorded_launches_are_complete() -> None:
    """There are forty launches of every case of the main job on a CPU, each with its batches."""
    found = file.load(BENCHMARKS / "reports" / "launches-cpu.json.gz")
    assert [result.case.batch_size for result in found.cases] == [1, 2, 4, 8, 16, 32, 64]
    assert {len(result.launches) for result in found.cases} == {40}


def test_an_interrupted_run_continues(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches in the folder are not measured again: only the second round is."""
    bench = script("end_to_end").Bench("slow", 0.1, tmp_path, [])
    launched = []

    def launch(name: str, _gpu: str | None = None, launches: int = 1, *, faulty: bool = False) -> Report:
        launched.append((name, faulty))
        assert launches == 1
        return on_h200([timed(1.0 + len(launched) / 100)])

    monkeypatch.setattr(bench, "launch", launch)
    first = bench.calibrating(2), bench.round(0, 1)
    assert len(launched) == 4
    assert (bench.calibrating(2), bench.round(0, 1)) == first
    assert len(launched) == 4
    bench.round(1, 2)
    assert launched[4:] == [("1-a-0", False), ("1-b-0", True), ("1-a-1", False), ("1-b-1", True)]


def test_the_launches_of_a_report_may_be_of_one_run(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run of pytest makes the launches of a round of each report."""
    bench = script("end_to_end").Bench("slow", 0.1, tmp_path, [], together=True)
    ran = []

    def run(command: list[str], **_: object) -> None:
        ran.append([word for word in command if word.startswith("--llmgpu-launches")])
        raise SystemExit

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(SystemExit):
        bench.round(0, 5)
    assert ran == [["--llmgpu-launches=5"]]
    with pytest.raises(SystemExit):
        bench.calibrating(1)
    assert ran[1:] == [[]]


def test_rounds_are_split_over_the_gpus(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Each round runs on one GPU, in the order of their numbers."""
    bench = script("end_to_end").Bench("slow", 0.1, tmp_path, [], ["0", "1", "2"])
    assert bench.dealt(7, lambda number, gpu: (number, gpu)) == [(number, str(number % 3)) for number in range(7)]


def test_a_launch_that_fails_ends_them_all(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches that run on other GPUs are completed; no other begins."""
    end_to_end = script("end_to_end")
    failed = threading.Event()  # the event of the bench: others continue when it is set
    monkeypatch.setattr(end_to_end, "threading", SimpleNamespace(Event=lambda: failed))
    begun, known = [], []

    def make(number: int, _gpu: str) -> None:
        begun.append(number)
        if number == 0:
            raise SystemExit("round 0")
        known.append(failed.wait(300))

    with pytest.raises(SystemExit, match="round 0"):
        end_to_end.Bench("slow", 0.1, tmp_path, [], ["0", "1", "2"]).dealt(300, make)
    assert max(begun) < 3
    assert all(known)


def test_a_round_is_compared_with_the_next_one_of_its_gpu(script: Callable[[str], ModuleType]) -> None:
    """A round is never compared with itself, which would be equal for any gate."""
    following = script("end_to_end").following
    assert [following(number, 5, 1) for number in range(5)] == [1, 2, 3, 4, 0]
    assert [following(number, 5, 2) for number in range(5)] == [2, 3, 4, 1, 0]
    assert [following(number, 2, 2) for number in range(2)] == [1, 0]
    assert following(0, 1, 1) is None


def test_a_folder_of_a_different_experiment_is_refused(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """A folder can only be continued with the same settings."""
    asked = {
        "probe": "slow",
        "fault": 0.1,
        "launches": 1,
        "calibrating": 2,
        "most": 20,
        "together": False,
        "pytest": ["-q"],
        "gpus": ["0", "1"],
    }
    end_to_end = script("end_to_end")
    for gpus in (["0", "1"], ["2", "3"]):  # other GPUs of the same number get the same rounds
        end_to_end._refuse_another(argparse.Namespace(keep=tmp_path, **asked | {"gpus": gpus}))
    others: dict[str, object] = {
        "probe": "chatty",
        "fault": 0.2,
        "launches": 2,
        "calibrating": 3,
        "most": 10,
        "together": True,
        "pytest": [],
        "gpus": ["0"],
    }
    assert others.keys() == asked.keys()
    for name, other in others.items():
        with pytest.raises(SystemExit, match=r"has reports of a different experiment: .*slow"):
            end_to_end._refuse_another(argparse.Namespace(keep=tmp_path, **asked | {name: other}))


Trial = tuple[int, Counter[str]]
SEEN: Trial = (1, Counter(REGRESSED=2))
HIDDEN: Trial = (0, Counter(NOT_ENOUGH_DATA=2))
NOTHING: Trial = (0, Counter(OK=1, NOT_ENOUGH_DATA=1))


@pytest.mark.parametrize(
    ("with_fault", "without_fault", "ok"),
    [
        ([SEEN, HIDDEN, (1, Counter(REGRESSED=1, NOT_ENOUGH_DATA=1))], [NOTHING, HIDDEN, (0, Counter(OK=2))], True),
        ([SEEN], [], True),  # one round has no next one
        ([SEEN, (3, Counter(NOT_ENOUGH_DATA=2))], [(3, Counter(NOT_ENOUGH_DATA=1, OK=1))], True),
        ([SEEN], [(3, Counter(OK=2))], False),
        ([], [], False),
        ([SEEN, (0, Counter())], [NOTHING, NOTHING], False),
        ([SEEN, SEEN], [NOTHING, (0, Counter())], False),
        ([SEEN, (5, Counter())], [NOTHING, NOTHING], False),
        ([SEEN, SEEN], [NOTHING, (5, Counter())], False),
        ([(0, Counter(INVALID=2))], [NOTHING], False),
        ([SEEN], [(0, Counter(INVALID=2))], False),
        ([SEEN, (0, Counter(IMPROVED=1))], [NOTHING, NOTHING], False),
        ([SEEN, (0, Counter(OK=1))], [NOTHING, NOTHING], False),
        ([SEEN, SEEN], [NOTHING, SEEN], False),
        ([SEEN], [(0, Counter(IMPROVED=1, OK=1))], False),
        ([(0, Counter(REGRESSED=1))], [NOTHING], False),
        ([(1, Counter(NOT_ENOUGH_DATA=1))], [NOTHING], False),
        ([SEEN], [(1, Counter(OK=1))], False),
        ([(1, Counter(REGRESSED=1, OK=0))], [NOTHING], True),
    ],
)
def test_a_proof_needs_a_correct_row_in_every_round(
    script: Callable[[str], ModuleType], with_fault: list[Trial], without_fault: list[Trial], ok: bool
) -> None:
    """Every round has a correct or an undecided row, and an exit status that agrees."""
    assert script("end_to_end").proven(with_fault=with_fault, without_fault=without_fault) is ok


def test_rounds_are_summarised(script: Callable[[str], ModuleType]) -> None:
    """The summary has exit statuses, verdicts, and the rounds in which the fault was found."""
    trials = [(1, Counter(REGRESSED=2)), (0, Counter(OK=1, NOT_ENOUGH_DATA=1))]
    assert script("end_to_end").summary(trials) == {
        "exit_status": {"0": 1, "1": 1},
        "rounds_regressed": 1,
        "rows": {"NOT_ENOUGH_DATA": 1, "OK": 1, "REGRESSED": 2},
    }
