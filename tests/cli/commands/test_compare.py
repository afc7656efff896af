from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.judged_reports import on_h200, timed

from pytest_llmgpu.cli import main
from pytest_llmgpu.report.file import dump


@pytest.fixture(autouse=True)
def _reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline, an equal report, one that is slower in one case, and one that sends more."""
    monkeypatch.chdir(tmp_path)
    quiet = (1.0, 1.001, 0.999)
    sizes = {"base": (1.0, 64), "equal": (1.0, 64), "slow": (2.0, 64), "chatty": (1.0, 65)}
    for name, (factor, calls) in sizes.items():
        changed = timed(*(factor * one for one in quiet), batch_size=2, calls=calls)
        dump(on_h200([timed(*quiet), changed], sha=f"{len(name)}" * 40), Path(f"{name}.json"))


def test_several_reports_are_compared_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """Each report has a line and a column; rows that are OK in every report are left out."""
    assert main(["compare", "base.json", "equal.json", "slow.json", "chatty.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[:2] for line in lines[:3]] == [
        ["1  equal.json", " PASSED"],
        ["2  slow.json", " REGRESSED"],
        ["3  chatty.json", " REGRESSED"],
    ]
    assert re.split(" {2,}", lines[4]) == ["case", "metric", "was", "1", "2", "3"]
    case, time, *_ = re.split(" {2,}", lines[6])
    assert (case, time, "+100.0 % REGRESSED" in lines[6]) == ("mp-bs2", "time", True)
    assert re.split(" {2,}", lines[7].strip()) == ["traffic", "0.1311 MB", "same OK", "same OK", "+1.6 % REGRESSED"]
    assert sum("traffic" in line for line in lines[5:]) == 1, "mp-bs1 sends the same in every report"


@pytest.mark.parametrize(("given", "needed"), [([], "BASE, HEAD"), (["base.json"], "HEAD")])
def test_reports_that_are_not_given_are_named(
    given: list[str], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A comparison needs a baseline and one candidate; further ones are optional."""
    with pytest.raises(SystemExit) as ended:
        main(["compare", *given])
    assert ended.value.code == 2
    assert f"required: {needed};" in capsys.readouterr().err


def test_all_cases_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """With --all a row that is OK everywhere is there."""
    assert main(["compare", "base.json", "equal.json", "slow.json", "--all"]) == 0
    assert sum("traffic" in line for line in capsys.readouterr().out.splitlines()[3:]) == 2


def test_a_report_that_is_missing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names it, wherever it stands."""
    assert main(["compare", "base.json", "equal.json", "none.json"]) == 2
    assert "none.json" in capsys.readouterr().err
