from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.quiet_policy import calibrated
from support.report_factory import make_answers, make_failed, make_memory, make_report, make_work
from support.verdict_factory import make_traffic, with_launches

from pytest_llmgpu.cli import main, parser
from pytest_llmgpu.gate import calibration
from pytest_llmgpu.gate.selftest.injected_regressions import regressions
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.store import store


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """A report of one launch with every metric, in report.json; the folder has no policy and no calibration."""
    monkeypatch.chdir(tmp_path)
    results = [
        with_launches(
            [1.0],
            accuracy=make_answers([True] * 100),
            memory=make_memory(2),
            traffic=make_traffic(link="nvlink"),
            batch_size=size,
            sequences=20 * size,
        )
        for size in (1, 2)
    ]
    for result in results:
        result.launches[0].work = make_work()
    found = make_report(results)
    file.dump(found, Path("report.json"))
    return found


def _calibrate(measured: Report, sd: float) -> None:
    """Write a calibration with so many launches that the prior has no weight."""
    machine = store.hardware(measured)
    calibration.dump(calibrated(machine, *measured.cases, sd=sd), calibration.default_path(Path(".llmgpu"), machine))


def test_a_gate_that_detects_every_regression_is_proven(measured: Report, capsys: pytest.CaptureFixture[str]) -> None:
    """The calibration of the machine is read from the store."""
    _calibrate(measured, 0.001)
    assert main(["selftest", "report.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:8]] == [
        "time",
        "device-time",
        "flops",
        "host-sync",
        "collective",
        "memory",
        "batch-size",
        "answers",
    ]
    assert lines[0].endswith("  detected in 2 cases")
    assert lines[6].endswith("  detected in 1 case")
    assert lines[8] == "left out    first-token, token-time, prefill: no case has the figure"
    assert lines[9].startswith("not gated   kernel: slowdowns are detected only by time, device-time, flops")
    assert lines[10] == "control     an unchanged copy, 17 rows compared: none is worse"
    assert lines[11:] == ["", "PROVEN: this policy detects every injected regression in this report"]


@pytest.mark.usefixtures("measured")
def test_an_undetected_regression_has_the_number_of_launches_required(capsys: pytest.CaptureFixture[str]) -> None:
    """With the built-in noise, the line also names `llmgpu calibrate`."""
    assert main(["selftest", "report.json"]) == 1
    out = capsys.readouterr().out
    assert "NOT DETECTED in 2 of 2 cases" in out.splitlines()[0]
    assert "time is not detected: mp-bs1 and 1 more, NOT_ENOUGH_DATA" in out
    assert re.search(r"minimum launches required .*: (more than )?[\d,]+ \(built-in noise: llmgpu calibrate\)", out)
    assert out.endswith("NOT PROVEN: 1 of 8 regressions would pass: time\n")


def test_a_calibrated_noise_is_not_called_built_in(measured: Report, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no hint to calibrate."""
    _calibrate(measured, 0.02)
    assert main(["selftest", "report.json"]) == 1
    out = capsys.readouterr().out
    assert "minimum launches required" in out
    assert "calibrate" not in out


@pytest.mark.usefixtures("measured")
def test_regressions_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """The size of a slowdown can be chosen too."""
    assert main(["selftest", "report.json", "--plant", "memory", "--plant", "answers"]) == 0
    assert "time" not in capsys.readouterr().out
    assert main(["selftest", "report.json", "--plant", "time", "--slowdown", "999"]) == 0
    assert "999 % more time" in capsys.readouterr().out
    for one in regressions():
        assert parser().parse_args(["selftest", "report.json", "--plant", one.name]).plant == [one.name]


@pytest.mark.usefixtures("measured")
def test_the_policy_in_force_is_tested(capsys: pytest.CaptureFixture[str]) -> None:
    """Regressions of a metric that the policy does not gate are not injected; the line has what is gated instead."""
    policy = Path("pyproject.toml")
    policy.write_text("[tool.llmgpu.gate.time]\ngate = false\n")
    assert main(["selftest", "report.json", "--plant", "time"]) == 1
    out = capsys.readouterr().out
    assert "not gated   time: slowdowns are not detected\n" in out
    assert out.endswith("\nNOT PROVEN: no regression was injected\n")
    assert main(["selftest", "report.json"]) == 0
    assert "not gated   time, kernel: slowdowns are detected only by device-time, flops, host-sync\n" in (
        capsys.readouterr().out
    )
    Path("other.toml").write_text("[memory]\nmargin = 0.001\n")
    assert main(["selftest", "report.json", "--plant", "memory", "--policy", "other.toml"]) == 0


@pytest.mark.usefixtures("measured")
def test_the_result_is_available_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """It goes to a file in addition to the text, or to stdout instead of it, with the same bytes."""
    assert main(["selftest", "report.json", "--json", "out/found.json"]) == 1
    assert "NOT PROVEN" in capsys.readouterr().out
    assert main(["selftest", "report.json", "--json", "-"]) == 1
    printed = capsys.readouterr().out
    assert printed == Path("out/found.json").read_text()
    found = json.loads(printed)
    assert found["ok"] is False
    assert [trial["plant"] for trial in found["trials"] if not trial["caught"]] == ["time"]
    assert found["trials"][0]["missed"][0]["verdict"] == "NOT_ENOUGH_DATA"
    Path("file").write_text("")
    assert main(["selftest", "report.json", "--json", "file/a/found.json"]) == 2
    assert capsys.readouterr().err == "llmgpu: file/a/found.json: cannot be written: Not a directory\n"


def test_a_gate_that_fails_an_unchanged_copy_is_not_proven(
    measured: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters of the report are not printed."""
    broken = make_failed("crashed", strategy="tp")
    broken.id = "tp\x1b[2J"
    measured.cases.append(broken)
    file.dump(measured, Path("report.json"))
    assert main(["selftest", "report.json", "--plant", "memory"]) == 1
    out = capsys.readouterr().out
    assert "an unchanged copy is worse: tp [2J, FAILED" in out
    assert out.endswith("NOT PROVEN: an unchanged copy fails\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["selftest"], "REPORT"),
        (["selftest", "report.json", "--plant", "noise"], "noise"),
        (["selftest", "report.json", "--slowdown", "0"], "percentage above 0"),
        (["selftest", "report.json", "--slowdown", "nan"], "percentage above 0"),
    ],
)
def test_bad_usage_is_exit_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the wrong argument."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("measured")
def test_bad_input_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the report or the policy that cannot be read."""
    Path("broken.json").write_text("{")
    Path("broken.toml").write_text("colour = 1")
    for arguments, named in (
        (["broken.json"], "report broken.json: is not valid JSON"),
        (["nowhere.json"], "report nowhere.json: cannot be read"),
        (["report.json", "--policy", "broken.toml"], "colour is not a key"),
    ):
        assert main(["selftest", *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert named in printed.err
        assert printed.err.count("\n") == 1
