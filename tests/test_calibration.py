from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from stored_reports import H200, gpus
from verdict_factory import make_invalid, with_launches

from pytest_llmgpu.calibration import (
    ONE_SESSION,
    Measured,
    Noise,
    default_path,
    dump,
    in_force,
    in_words,
    left_out,
    load,
    measure,
)
from pytest_llmgpu.report import Commit, Environment, Report
from pytest_llmgpu.result import CaseResult
from pytest_llmgpu.statistics import change, holm


def _report(*cases: CaseResult, seen: str = "NVIDIA H200") -> Report:
    machine = Environment(python="3.12", platform="Linux", gpus=gpus(*[seen] * 4))
    return Report(
        created="2026-01-02T03:04:05Z",
        plugin_version=None,
        environment=machine,
        commit=Commit(sha="a" * 40),
        cases=list(cases),
    )


def _noisy(sd: float, launches: int = 10, seed: int = 1, **fields: Any) -> CaseResult:
    chance = random.Random(seed)
    return with_launches([math.exp(chance.gauss(0, sd)) for _ in range(launches)], **fields)


def test_noise_is_the_spread_of_log_times_between_launches() -> None:
    """Of each case by itself, with the machine and the commit that it was measured on."""
    loud, quiet = _noisy(0.03, 200, strategy="tp"), _noisy(0.005, 200)
    found = measure(_report(loud, quiet))
    assert (found.machine, found.commit) == (H200, "a" * 40)
    assert (found.time[loud.key].id, found.time[loud.key].launches) == ("tp-bs1", 200)
    assert found.time[loud.key].sd == pytest.approx(0.03, rel=0.15)
    assert found.time[quiet.key].sd == pytest.approx(0.005, rel=0.15)


def test_only_launches_that_can_be_compared_count() -> None:
    """Not a disturbed one, one without times, one that ran other batches; nor a case that has one left."""
    spoilt = _noisy(0.001, 6)
    make_invalid(spoilt.launches[1], "a stranger's process")
    spoilt.launches[2].plan_sha256 = "0" * 64
    spoilt.launches[3].batches.latency_s = spoilt.launches[3].batches.latency_s[:-1]
    once = _noisy(0.001, 2, batch_size=2)
    once.launches[1].batches.latency_s = []
    found = measure(_report(spoilt, once))
    assert {key: noise.launches for key, noise in found.time.items()} == {spoilt.key: 3}


@pytest.mark.parametrize("cases", [(), (_noisy(0.01, 1),)])
def test_one_launch_is_no_calibration(cases: tuple[CaseResult, ...]) -> None:
    """It is refused, with what to do."""
    with pytest.raises(ValueError, match=r"no case has 2 undisturbed launches .* 10 tell enough"):
        measure(_report(*cases))


def test_one_launch_twice_is_no_calibration() -> None:
    """A report that is given twice would say that there is no noise."""
    result = _noisy(0.01, 3)
    result.launches.append(result.launches[0])
    with pytest.raises(ValueError, match="mp-bs1: two launches took the same time to the last digit"):
        measure(_report(result))


def _sessions(days: int, between: float, within: float, launches: int, **fields: Any) -> list[Report]:
    chance = random.Random(9)
    found = []
    for _ in range(days):
        day = chance.gauss(0, between)
        levels = [math.exp(day + chance.gauss(0, within)) for _ in range(launches)]
        found.append(_report(with_launches(levels, **fields)))
    return found


def test_noise_between_sessions_is_kept_apart() -> None:
    """What days differ by is no part of the noise between launches; one session alone says nothing of it."""
    [noise] = measure(*_sessions(100, 0.015, 0.003, 5)).time.values()
    assert (noise.launches, noise.sessions) == (500, 100)
    assert noise.sd == pytest.approx(0.003, rel=0.1)
    assert noise.session_sd == pytest.approx(0.015, rel=0.2)
    assert noise.cautious_session == pytest.approx(noise.session_sd, rel=0.02)
    [noise] = measure(*_sessions(1, 0.015, 0.003, 5)).time.values()
    assert (noise.sessions, noise.session_sd, noise.cautious_session) == (1, None, None)


def test_sessions_of_one_launch_each_tell_no_noise_from_the_other() -> None:
    """Either may be all that they differ by."""
    [noise] = measure(*_sessions(50, 0.01, 0.01, 1)).time.values()
    assert noise.session_sd == noise.sd == pytest.approx(0.014, rel=0.2)
    assert noise.cautious == pytest.approx(noise.cautious_session)


def test_a_case_of_fewer_sessions_is_measured_in_those() -> None:
    """One that only a later session has, too."""
    first, second = _report(_noisy(0.01)), _report(_noisy(0.01, seed=2), _noisy(0.01, batch_size=2))
    found = measure(first, second).time
    assert sorted((noise.id, noise.sessions, noise.launches) for noise in found.values()) == [
        ("mp-bs1", 2, 20),
        ("mp-bs2", 1, 10),
    ]


def test_the_gate_reckons_with_sessions(tmp_path: Path) -> None:
    """By case, no quieter than half of them but for luck; a calibration of before, or of one session, has none."""
    loud, quiet = (
        measure(*_sessions(5, sd, 0.001, 3, strategy=name)).time for name, sd in (("tp", 0.02), ("mp", 0.01))
    )
    dump(Measured(machine=H200, time={**loud, **quiet}), default_path(tmp_path, H200))
    found = in_force(tmp_path, _report(_noisy(0.01)))
    assert found is not None
    [loud_key], [quiet_key] = loud, quiet
    wide = [noise.cautious_session for noise in (*loud.values(), *quiet.values())]
    assert None not in wide
    assert found.between_sessions(loud_key) == found.between_sessions("another") == wide[0]
    assert found.between_sessions(quiet_key) == pytest.approx(statistics.median(w for w in wide if w is not None))
    (tmp_path / "old.json").write_text(_written())
    old = in_force(tmp_path, _report(_noisy(0.01)), tmp_path / "old.json")
    assert old is not None
    assert old.of("k") == pytest.approx(0.0115, rel=0.01)
    assert old.between_sessions("k") == 0.0


def test_a_case_that_surely_is_quieter_counts_as_that(tmp_path: Path) -> None:
    """One that keeps its GPU busy beside two that wait for the CPU: by as much as luck may have made it look quiet."""
    loud, usual, quiet = _noisy(0.3, strategy="tp"), _noisy(0.2, strategy="iok"), _noisy(0.005)
    dump(measure(_report(loud, usual, quiet)), default_path(tmp_path, H200))
    found = in_force(tmp_path, _report(loud, usual, quiet))
    assert found is not None
    seen = measure(_report(loud, usual, quiet)).time[quiet.key].sd
    # scipy.stats.chi2.ppf(0.01 / 3, 9) is 1.56.
    assert found.of(quiet.key) == pytest.approx(seen * (9 / 1.56) ** 0.5, rel=0.03)
    few = _noisy(0.3, 2, strategy="tp"), _noisy(0.2, 2, strategy="iok"), _noisy(0.005, 2)
    dump(measure(_report(*few)), default_path(tmp_path, H200))
    found = in_force(tmp_path, _report(*few))
    assert found is not None
    assert found.of(few[2].key) == statistics.median(found.sd.values()), "two launches are no proof"


def test_few_launches_count_as_noisier_than_they_look() -> None:
    """By how unsure they leave the noise: false alarms stay as rare with few launches as with many."""
    assert Noise(id="x", sd=0.01, launches=2).cautious == pytest.approx(0.0648, rel=0.01)
    assert Noise(id="x", sd=0.01, launches=10).cautious == pytest.approx(0.0115, rel=0.01)
    assert Noise(id="x", sd=0.01, launches=1000).cautious == pytest.approx(0.01, rel=0.01)


def test_the_gate_reads_the_calibration_of_the_machine(tmp_path: Path) -> None:
    """By itself, where there is one; nothing that may be luck counts as quieter than half of the cases, what is new as
    the noisiest.
    """
    loud, usual, quiet = _noisy(0.03, strategy="tp"), _noisy(0.01, strategy="iok"), _noisy(0.006)
    head = _report(loud, usual, quiet)
    assert in_force(tmp_path, head) is None
    measured = measure(head)
    dump(measured, default_path(tmp_path, H200))
    found = in_force(tmp_path, head)
    assert found is not None
    assert found.of(quiet.key) == found.of(usual.key) == pytest.approx(measured.time[usual.key].cautious)
    assert found.of("another") is None, "what was not calibrated counts as such"
    assert found.of(loud.key) == pytest.approx(measured.time[loud.key].cautious)
    dump(measure(_report(_noisy(0.5, strategy="tp"))), tmp_path / "loud.json")
    worse = in_force(tmp_path, head, tmp_path / "loud.json")
    assert worse is not None
    assert worse.of("another") == worse.of(loud.key) == worse.typical, "and as no quieter than what was"
    assert worse.sd[loud.key] > 0.2
    assert found.sha256 == load(default_path(tmp_path, H200))[1]
    assert in_force(tmp_path, _report(loud, seen="NVIDIA A100")) is None


def test_the_noise_in_force_is_said_in_a_line(tmp_path: Path) -> None:
    """The file without its folder, and how many launches it rests on; else that the noise is assumed."""
    head = _report(_noisy(0.03, strategy="tp"), _noisy(0.01, launches=4))
    assert in_words(tmp_path, head) == "noise: 20 % assumed (llmgpu calibrate)"
    path = default_path(tmp_path, H200)
    dump(measure(head), path)
    assert in_words(tmp_path, head, in_turn=True) == "noise: calibration.json, 4 to 10 launches"
    assert in_words(tmp_path, head) == f"noise: calibration.json, 4 to 10 launches\n{ONE_SESSION}"
    dump(measure(_report(head.cases[1])), tmp_path / "mine.json")
    assert in_words(tmp_path, head, tmp_path / "mine.json").splitlines()[0] == "noise: mine.json, 4 launches"
    mine = in_force(tmp_path, head, tmp_path / "mine.json")
    assert left_out(mine, head) == "not calibrated: 1 case, 20 % assumed"
    assert left_out(mine, _report(head.cases[1])) == left_out(None, head) == ""
    dump(measure(_report(_noisy(0.01)), _report(_noisy(0.01, seed=2))), path)
    assert in_words(tmp_path, head) == "noise: calibration.json, 20 launches in 2 sessions"
    assert in_words(tmp_path, head, in_turn=True) == "noise: calibration.json, 20 launches"
    dump(Measured(machine=H200, time={}), path)
    assert in_words(tmp_path, head) == "noise: 20 % assumed (calibration.json has no case)"


def test_a_calibration_of_another_machine_is_refused(tmp_path: Path) -> None:
    """The one that was named, and one that was copied into the machine's folder."""
    head = _report(_noisy(0.01))
    path = default_path(tmp_path, H200)
    dump(Measured(machine="CPU-x", time={}), path)
    for given in (None, path):
        with pytest.raises(ValueError, match="is of CPU-x, and the report of 4x-NVIDIA-H200-140GiB"):
            in_force(tmp_path, head, given)


def test_a_calibration_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    """No silent fall back to assumed noise."""
    with pytest.raises(ValueError, match=r"calibration .*nothing.json: cannot be read: No such file or directory"):
        in_force(tmp_path, _report(_noisy(0.01)), tmp_path / "nothing.json")


def test_it_is_read_back_as_written(tmp_path: Path) -> None:
    """As JSON for people, over an older one, with nothing left beside it."""
    measured = measure(_report(_noisy(0.01)))
    path = tmp_path / "new" / "calibration.json"
    dump(Measured(machine="old", time={}), path)
    dump(measured, path)
    assert load(path)[0] == measured
    assert path.read_text().startswith('{\n  "calibration_version": 1,\n')
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def _written(**noise: Any) -> str:
    return json.dumps({"machine": H200, "time": {"k": {"id": "mp-bs1", "sd": 0.01, "launches": 10, **noise}}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Input data was truncated"),
        ("[" * 1000, "Expected `object`, got `array`"),
        ("{}", "missing required field `machine`"),
        (_written(sd=-0.01), "Expected a number of at least 0, got -0.01 - at `$.time['k'].sd`"),
        (_written(sd=math.nan), "JSON is malformed"),
        (_written().replace("0.01", "1e999"), "Number out of range"),
        (_written(sd="x"), "Expected `float`, got `str`"),
        (_written(sessions=2, session_sd=-0.1), "sessions and their noise do not belong together - at `$.time['k']`"),
        (_written(session_sd=0.1), "do not belong together"),
        (_written(sessions=11, session_sd=0.1), "do not belong together"),
        (_written(sessions=0), "do not belong together"),
        (_written(launches=1), "Expected 2 launches or more, got 1 - at `$.time['k'].launches`"),
        (_written().replace("{", '{"calibration_version": 2, ', 1), "calibration_version 2 is unknown"),
    ],
)
def test_a_broken_calibration_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    """It names the file, and the place where there is one."""
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="calibration") as caught:
        load(path)
    assert str(caught.value).startswith(f"calibration {path}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_calibration_is_none(tmp_path: Path) -> None:
    """Every case counts as uncalibrated."""
    dump(Measured(machine=H200, time={}), default_path(tmp_path, H200))
    found = in_force(tmp_path, _report(_noisy(0.01)))
    assert found is not None
    assert found.of("any") is None


def test_false_alarms_stay_rare_on_a_calibrated_runner(tmp_path: Path) -> None:
    """In simulation: of runs of 21 cases in which nothing changed, at most 1 % are REGRESSED.

    With one launch a side and a noise of 6 % that no more than five launches told.
    """
    chance, path, alarms, runs = random.Random(1), tmp_path / "calibration.json", 0, 300
    for _ in range(runs):
        seen = [statistics.stdev([chance.gauss(0, 0.06) for _ in range(5)]) for _ in range(21)]
        time = {f"{number}": Noise(id="x", sd=sd, launches=5) for number, sd in enumerate(seen)}
        dump(Measured(machine=H200, time=time), path)
        known = in_force(tmp_path, _report(_noisy(0.01)), path)
        assert known is not None
        changes = [change([0.0], [chance.gauss(0, 0.06 * math.sqrt(2))], sd) for sd in known.sd.values()]
        alarms += min(holm([one.p_above(math.log1p(0.02)) for one in changes])) <= 0.05
    assert alarms <= 0.01 * runs
