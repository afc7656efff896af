"""What a report from anybody can do to a terminal and to the log of a CI system: nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.report_factory import make_failed, make_finding, make_full_report, make_report

from pytest_llmgpu.cli import main
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import Failure
from pytest_llmgpu.store import store

_EVIL = "\x1b]0;owned\x07\x1b[8m\r\x9b2J\u202e\n::error::owned\n##[error]owned\n##vso[task.complete]"
_FORBIDDEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]|^\s*::|##\w*\[", re.MULTILINE)


@pytest.fixture(scope="module")
def evil() -> Report:
    """A report in which every text that may be any text has control characters and commands, with a failed case."""
    failed = make_failed("error", Failure(phase="load", message="m", log_tail="log"), batch_size=64)
    failed.findings = [make_finding()]
    document = msgspec.to_builtins(make_report([*make_full_report().cases, failed]))

    def loads() -> bool:
        try:
            file.parse(msgspec.json.encode(document), "evil")
        except ValueError:
            return False
        return True

    def spoil(value: Any) -> None:
        for place in value if isinstance(value, dict) else range(len(value)):
            before = value[place]
            if isinstance(before, (dict, list)):
                spoil(before)
            elif isinstance(before, str) and place not in ("created", "loglikelihoods"):
                value[place] = f"{before[:5]}{_EVIL}{before[5:]}"
                if not loads():
                    value[place] = before

    spoil(document)
    return file.parse(msgspec.json.encode(document), "evil")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["show", *names] for names in (["evil.json"], ["evil.json"] * 3, [f"{_EVIL}.json"])),
        *(["export", name, "evil.json"] for name in ("markdown", "github-summary")),
        ["list"],
        ["trend"],
        ["gate", "evil.json", "evil.json"],
        ["promote", "evil.json"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.usefixtures("empty_folder")
def test_control_codes_are_not_printed(evil: Report, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the terminal's title nor an annotation of the CI system can be set from a report."""
    file.dump(evil, Path("evil.json"))
    for _ in range(2):
        store.save(evil, Path(".llmgpu"))
    main(arguments)
    printed = "".join(capsys.readouterr())
    assert printed
    found = _FORBIDDEN.search(printed)
    assert found is None, repr(printed[max(0, found.start() - 60) : found.end() + 60])


@pytest.mark.slow
def test_charts_are_drawn_from_any_text(evil: Report, tmp_path: Path) -> None:
    """The library that draws ends the process on some control characters."""
    file.dump(evil, tmp_path / "evil.json")
    command = ["plot", "evil.json", "--output", "charts", "--format", "png", "--format", "svg"]
    whole = [sys.executable, "-m", "pytest_llmgpu.cli", *command]
    ran = subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert list((tmp_path / "charts").glob("*.png"))
