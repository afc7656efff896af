from __future__ import annotations

import datetime
import json
import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.noisy_reports import noisy, on_h200
from support.quiet_policy import calibrated
from support.report_factory import make_work
from support.stored_reports import H200
from support.verdict_factory import make_invalid, with_launches

from pytest_llmgpu.gate.calibration import Calibration, default_path, dump, in_force, in_words, load, measure
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.times import Deviation
from pytest_llmgpu.report.result import CaseResult

_OLD: dict[str, Any] = {
    "calibration_version": 1,
    "machine": H200,
    "commit": "a" * 40,
    "time": {
        "k": {"id": "mp-bs1", "sd": 0.01, "launches": 6, "sessions": 3, "session_sd": 0.02},
        "one": {"id": "mp-bs2", "sd": 0.03, "launches": 2, "sessions": 2, "session_sd": 0.03},
    },
}


def _with(launches: int, **time: float) -> dict[str, Any]:
    return {"cases": {"k": {"id": "x", "launches": launches, "time": time}}}


def _worked(*levels: float) -> CaseResult:
    result = with_launches(levels)
    for launch, level in zip(result.launches, levels, strict=True):
        work = make_work()
        ranks = [
            msgspec.structs.replace(rank, device_time_s=[0.5 * math.exp(factor * math.log(level))])
            for rank, factor in zip(work.ranks, (0.1, 0.2), strict=True)
        ]
        launch.work = msgspec.structs.replace(work, ranks=ranks)
    return result


def test_the_deviation_of_launches_is_measured() -> None:
    """It is the standard deviation of the log times, with its degrees of freedom and the commit."""
    levels = [1.0, 1.02, 0.97, 1.01]
    found = measure(on_h200(with_launches(levels)))
    assert (found.machine, found.commit) == (H200, "a" * 40)
    (noise,) = found.cases.values()
    assert (noise.id, noise.launches, noise.time.degrees, noise.device_time) == ("mp-bs1", 4, 3, None)
    assert noise.time.sd == pytest.approx(statistics.stdev(map(math.log, levels)))


def test_the_deviation_of_device_time_is_the_mean_variance_over_the_ranks() -> None:
    """The ranks of one launch share its conditions, so that they add no degrees of freedom."""
    levels = [1.0, 1.02, 0.97]
    (noise,) = measure(on_h200(_worked(*levels))).cases.values()
    assert noise.device_time is not None
    wall = statistics.stdev(map(math.log, levels))
    assert noise.device_time.sd == pytest.approx(wall * math.sqrt((0.1**2 + 0.2**2) / 2))
    assert noise.device_time.degrees == 2
    partly = _worked(*levels)
    partly.launches[0].work = partly.launches[1].work = None
    assert next(iter(measure(on_h200(partly)).cases.values())).device_time is None


def test_a_difference_between_sessions_is_no_noise_of_launches() -> None:
    """The deviation is within the sessions; sessions of one launch each count as one."""
    days = [on_h200(with_launches([level, level * 1.001])) for level in (1.0, 1.1, 0.9)]
    (noise,) = measure(*days).cases.values()
    assert (noise.launches, noise.time.degrees) == (6, 3)
    assert noise.time.sd < 0.001
    (single,) = measure(*(on_h200(with_launches([level])) for level in (1.0, 1.1, 0.9))).cases.values()
    assert (single.launches, single.time.degrees) == (3, 2)
    assert single.time.sd > 0.05


def test_launches_that_do_not_count_are_left_out() -> None:
    """They are disturbed, or ran other batches; a case with one launch has no noise."""
    result = noisy(0.01, launches=5)
    make_invalid(result.launches[0], "processes of other programs")
    result.launches[1].plan_sha256 = "0" * 64
    result.launches[2].plan_sha256 = "0" * 64
    found = measure(on_h200(result, noisy(0.01, launches=1, batch_size=2)))
    assert [noise.launches for noise in found.cases.values()] == [2]


def test_unusable_launches_are_refused() -> None:
    """Too few of them, or one of them twice."""
    with pytest.raises(ValueError, match="no case has 2 undisturbed launches of the same batches"):
        measure(on_h200(with_launches([1.0])))
    with pytest.raises(ValueError, match="mp-bs1: two launches have identical times: name each report once"):
        measure(on_h200(with_launches([1.0, 1.1, 1.0])))


def test_a_calibration_is_read_back(tmp_path: Path) -> None:
    """The file of the machine is found in the store, and another machine's is refused."""
    report = on_h200(noisy(0.01))
    measured, path = measure(report), default_path(tmp_path, H200)
    assert in_force(tmp_path, report) is None
    dump(measured, path)
    found = in_force(tmp_path, report)
    assert found is not None
    assert found == load(path)
    assert found.cases == measured.cases
    assert (len(found.sha256 or ""), found.warnings) == (64, [])
    key = report.cases[0].key
    assert found.of(key, "time") == measured.cases[key].time
    assert found.of(key, "device_time") is None
    assert found.of("unknown", "time") is None
    with pytest.raises(ValueError, match=f"was measured on {H200}, the report on"):
        in_force(tmp_path, on_h200(noisy(0.01), seen="NVIDIA A100"), path)


def test_a_calibration_of_version_1_is_read_with_one_warning(tmp_path: Path) -> None:
    """Its deviation between launches counts, the one between sessions has no effect."""
    path = tmp_path / "old.json"
    path.write_text(json.dumps(_OLD))
    found = load(path)
    assert found.of("k", "time") == Deviation(sd=0.01, degrees=3)
    assert found.of("one", "time") == Deviation(sd=0.03, degrees=1)
    assert found.of("k", "device_time") is None
    (warning,) = found.warnings
    assert warning.startswith("old.json is a calibration of version 1: ")
    base, head = on_h200(with_launches([1.0])), on_h200(with_launches([1.0]))
    today = datetime.date(2026, 1, 1)
    assert judge(base, head, Policy(), today=today, calibration=found).warnings == [warning]


def test_a_calibration_lets_one_launch_decide() -> None:
    """Ten thousand quiet launches outweigh the prior of forwards that wait for the host."""
    base, head = on_h200(with_launches([1.0])), on_h200(with_launches([1.05]))
    today = datetime.date(2026, 1, 1)
    noise = calibrated(H200, *base.cases)
    verdicts = []
    for found in (None, noise):
        known = None if found is None else Calibration(cases=found.cases)
        rows = judge(base, head, Policy(), today=today, calibration=known).rows
        verdicts += [row.verdict for row in rows if row.metric == "time"]
    assert verdicts == ["UNDECIDED", "REGRESSED"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"calibration_version": 3}, "calibration_version 3 is not supported; allowed is 2"),
        (
            {"cases": {"k": {"id": "x", "launches": 1, "time": {"sd": 0.1, "degrees": 1}}}},
            "expected 2 launches or more",
        ),
        (
            {"cases": {"k": {"id": "x", "launches": 3, "time": {"sd": 9.0, "degrees": 1}}}},
            r"0 to 2, got 9\.0 .*time\.sd",
        ),
        (
            {"cases": {"k": {"id": "x", "launches": 3, "time": {"sd": 0.1, "degrees": 3}}}},
            "from 1 to 2, got 3 .*degrees",
        ),
        ({"cases": {"k": {"id": "x"}}}, "missing required field `launches`"),
        ({"cases": {"k": {"id": "x", "launches": 10**400}}}, r"launches"),
        ({"machine": None}, r"machine"),
    ],
)
def test_a_broken_calibration_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """The line has the file, the place and what is allowed."""
    whole = {"calibration_version": 2, "machine": H200, "commit": None, "cases": {}}
    path = tmp_path / "noise.json"
    path.write_text(json.dumps(whole | change))
    with pytest.raises(ValueError, match=rf"^calibration .*noise\.json: .*{message}") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"^calibration .*noise\.json: "):
        load(path)


def test_the_noise_is_named() -> None:
    """The line has the file and its launches, or what counts without one."""
    assert in_words(None).startswith("noise: built-in priors")
    found = Calibration(cases=calibrated(H200, with_launches([1.0])).cases)
    assert in_words(found) == "noise: calibration.json, 10,000 launches"
    assert in_words(found, Path("a/mine.json")) == "noise: mine.json, 10,000 launches"
