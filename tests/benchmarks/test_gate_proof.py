"""The scripts of benchmarks/gate: their results for given launches, and that they can fail."""

from __future__ import annotations

import argparse
import importlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
from support.judged_reports import on_h200, timed

from pytest_llmgpu.analysis import launch_merging
from pytest_llmgpu.gate import judge as gate
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.timing.calibration import Calibration
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Verdict, Verdicts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that imports a script, with the scripts of its folder."""
    monkeypatch.syspath_prepend(BENCHMARKS / "gate")
    return importlib.import_module


@pytest.fixture
def resample(script: Callable[[str], ModuleType]) -> ModuleType:
    """Import resample.py."""
    return script("resample")


def recorded(sd: float, launches: int = 40) -> Report:
    """Return a report of one case whose launches have this standard deviation."""
    chance = random.Random(1)
    return on_h200([timed(*(1 + chance.gauss(0, sd) for _ in range(launches)))])


def test_quiet_launches_keep_the_promises_of_the_gate(resample: ModuleType) -> None:
    """No false alarm, and threshold + 2 points is found with the minimum launches required."""
    found = resample.study(recorded(0.002), [1], trials=40, calibrating=10, seed=0)
    assert found["slowdown"] == pytest.approx(0.04)
    assert found["launches_asked_for"] == 5
    last = found["trials"][-1]
    assert last["same"]["trials_regressed"] == 0
    assert last["slower"]["rows_regressed"] >= 0.95
    assert found["checks"] == {"no_false_alarms": True, "slower_is_never_ok": True, "launches_asked_for_show_it": True}
    assert found["ok"]


def test_recorded_slower_launches_are_drawn_from(resample: ModuleType) -> None:
    """A recorded fault of 10 % is found with the minimum launches required; one of 0 % is not."""
    quiet, slow = recorded(0.002), recorded(0.002)
    for launch in slow.cases[0].launches:
        launch.batches.latency_s = [1.1 * each for each in launch.batches.latency_s]
    found = resample.study(quiet, [1], trials=20, calibrating=10, seed=0, slower=slow, fault=0.1)
    assert (found["slowdown"], found["launches_asked_for"]) == (0.1, 5)
    assert found["trials"][-1]["slower"]["rows_regressed"] == 1
    same = resample.study(quiet, [1], trials=20, calibrating=10, seed=0, slower=quiet, fault=0.1)
    assert same["trials"][-1]["slower"]["rows_regressed"] == 0


def test_no_more_slower_launches_are_drawn_than_there_are(resample: ModuleType) -> None:
    """The launches with the fault may be fewer than those without it."""
    found = resample.study(recorded(0.002), [1, 3, 5], trials=2, calibrating=10, seed=0, slower=recorded(0.002, 3))
    assert found["most_launches_a_side"] == 3
    assert [one["launches"] for one in found["trials"]] == [1, 3]


def test_some_cases_can_be_chosen(resample: ModuleType) -> None:
    """A case that does not exist is refused."""
    both = on_h200([timed(1.0), timed(1.0, batch_size=2)])
    assert [result.id for result in resample.chosen(both, ["mp-bs2"]).cases] == ["mp-bs2"]
    assert resample.chosen(both, None).cases == both.cases
    with pytest.raises(SystemExit, match="has no mp-bs4"):
        resample.chosen(both, ["mp-bs2", "mp-bs4"])


def test_a_change_within_the_noise_has_not_enough_data(resample: ModuleType) -> None:
    """The minimum launches required are more than there are; fewer launches are never OK."""
    found = resample.study(recorded(0.04), [1, 3], trials=20, calibrating=10, seed=0)
    assert found["launches_asked_for"] > found["most_launches_a_side"] == 15
    assert [one["launches"] for one in found["trials"]] == [1, 3]
    assert found["checks"]["launches_asked_for_show_it"] is None
    assert all(one["slower"]["rows"]["NOT_ENOUGH_DATA"] for one in found["trials"])


@pytest.mark.parametrize(("verdict", "broken"), [("REGRESSED", "no_false_alarms"), ("OK", "slower_is_never_ok")])
def test_a_gate_with_a_constant_verdict_fails_the_proof(
    resample: ModuleType, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, broken: str
) -> None:
    """This holds for both verdicts."""

    def judge(base: Report, head: Report, *arguments: object, **named: object) -> Verdicts:
        found = gate_judge(base, head, *arguments, **named)  # type: ignore[arg-type]
        return msgspec.structs.replace(
            found, rows=[msgspec.structs.replace(row, verdict=verdict) for row in found.rows]
        )

    gate_judge = gate.judge
    monkeypatch.setattr(gate, "judge", judge)
    found = resample.study(recorded(0.002), [1], trials=5, calibrating=10, seed=0)
    assert found["checks"][broken] is False
    assert not found["ok"]


def test_calibration_is_that_of_the_command(resample: ModuleType) -> None:
    """Its noise is that of the drawn launches."""
    noise = resample.calibrated(recorded(0.01), range(10))
    assert isinstance(noise, Calibration)
    [sd] = noise.sd.values()
    assert 0.005 < sd < 0.03


def test_the_recorded_launches_are_complete(resample: ModuleType) -> None:
    """There are forty launches of every case of the main job on a CPU, each with its batches."""
    path = BENCHMARKS / "reports" / "launches-cpu.json.gz"
    found = file.load(path)
    cases = resample.completed(found)
    assert [result.case.batch_size for result in cases] == [1, 2, 4, 8, 16, 32, 64]
    assert {len(result.launches) for result in cases} == {40}
    few = resample.part(found, [0, 1])
    assert all(result.inference_s is not None for result in few.cases)


def test_launches_of_a_busy_gpu_keep_the_promises_of_the_gate(resample: ModuleType) -> None:
    """With real launches of an H200 at batch size 32 a change of 4 % is found, and the same program is OK.

    Batch size 2, which waits for the CPU, has not enough data.
    """
    found = file.load(BENCHMARKS / "reports" / "launches-gpu-2.json.gz")
    assert {len(result.launches) for result in found.cases} == {20}
    busy = resample.study(resample.chosen(found, ["mp-bs32"]), [], trials=40, calibrating=10, seed=0)
    assert busy["launches_asked_for"] == busy["trials"][0]["launches"] == 5
    assert all(busy["checks"].values())
    assert busy["trials"][0]["same"]["rows"] == {"OK": 40}
    waiting = resample.study(resample.chosen(found, ["mp-bs2"]), [3], trials=40, calibrating=10, seed=0)
    assert waiting["launches_asked_for"] is None
    assert waiting["ok"]
    noise = resample.calibrated(found, range(10))
    quiet, *loud = sorted(noise.of(result.key) for result in found.cases)
    assert quiet < min(loud) / 4, "a case that is significantly quieter has a smaller noise estimate"


def test_two_sessions_are_merged(resample: ModuleType) -> None:
    """Launches of two machines of a kind are given as several reports of one command."""
    paths = [BENCHMARKS / "reports" / f"launches-gpu-{number}.json.gz" for number in (1, 2)]
    both = launch_merging.merge([file.load(path) for path in paths])
    found = resample.study(both, [10], trials=20, calibrating=10, seed=0)
    assert (found["launches_recorded"], found["cases"]) == (39, 3)
    assert found["checks"]["slower_is_never_ok"]
    assert found["trials"][0]["slower"]["rows_regressed"] < 0.2, "two machines differ by more than the launches of one"


def test_the_recorded_proof_is_judged_the_same(resample: ModuleType, script: Callable[[str], ModuleType]) -> None:
    """In 20 rounds of launches on four H200 a strategy that sleeps 10 % is REGRESSED in each, the same one in none."""
    sides = ("calibrating", "without", "with")
    found = {side: file.load(BENCHMARKS / "reports" / f"slow-gpu-2-{side}.json.gz") for side in sides}
    noise = resample.calibrated(found["calibrating"], range(10))
    launches = resample.asked_for(found["calibrating"], Policy(), noise, slowdown=0.1)
    assert [len(found[side].cases[0].launches) for side in sides] == [10, 20 * launches, 20 * launches]
    without, slower = (
        [resample.part(found[side], range(launches * n, launches * (n + 1))) for n in range(20)] for side in sides[1:]
    )

    def time_verdict(base: Report, head: Report) -> str:
        # Only the first launch has its answers: only its round has a verdict of accuracy.
        found_verdicts = gate.judge(base, head, Policy(), today=resample.TODAY, calibration=noise)
        [row] = [row for row in found_verdicts.rows if row.metric == "time"]
        return row.verdict

    assert [time_verdict(base, head) for base, head in zip(without, slower, strict=True)] == ["REGRESSED"] * 20
    following = script("end_to_end").following
    alike = Counter(time_verdict(base, without[following(n, 20, 4)]) for n, base in enumerate(without))
    assert set(alike) <= {"OK", "NOT_ENOUGH_DATA"}
    assert alike["OK"] >= 10, "a false alarm is not hidden by noise"


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
