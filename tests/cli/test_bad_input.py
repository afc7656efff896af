"""Bad input of any command is one line on stderr and exit status 2."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.verdict_factory import on_h200

from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.verdicts import Verdicts

_CODES = "\x1b]0;x\x07\n::error::x"


@pytest.fixture(autouse=True)
def _files(empty_folder: None) -> None:  # noqa: ARG001
    """Write a report and files that are none."""
    dump(on_h200(), Path("report.json"))
    Path("text.json").write_bytes(b"hello")
    Path("other.json").write_bytes(b'{"benchmarks": [], "version": "5.3.1"}')
    Path("deep.json").write_bytes(b'{"x":' + b"[" * 100_000)
    Path("cut.json.gz").write_bytes(b"\x1f\x8b\x08\x00")
    Path("future.json").write_text('{"schema_version": 99, "cases": []}')
    unknown = on_h200()
    unknown.verdicts = Verdicts(policy="margn = 1")
    dump(unknown, Path("rules.json"))
    Path("v.json").write_bytes(msgspec.json.encode(unknown.verdicts))
    Path("bad.toml").write_text("margn = 1\n")
    Path("baseline").mkdir()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        # Arguments. A file's name with control characters comes from a shell's `*`.
        ("", "a command is needed: ab, bisect, export, gate, "),
        ("shcema", "shcema"),
        ("schema extra", "extra"),
        (f"schema '{_CODES}'", "unrecognized arguments: "),
        ("--no", "--no"),
        ("show", "REPORT"),
        ("list --storage", "--storage"),
        (f"list --storage {'x' * 5000}", "File name too long"),
        ("gate report.json", "BASE and HEAD are needed"),
        ("promote", "REF"),
        ("promote report.json --force ' '", "--force: a reason is needed"),
        ("export xml report.json", "xml"),
        ("ab base", "HEAD_REF"),
        ("ab base head", "COMMAND"),
        ("ab base head --launches 0 -- pytest", "whole number from 1"),
        ("export csv report.json --policy p.toml", "--policy: has an effect only with a baseline"),
        ("plot report.json --output out --format gif", "argument --format: invalid choice: 'gif'"),
        ("plot report.json --output out --case mp-bs8", "--case 'mp-bs8': the report has no such case; its cases are"),
        # Reports.
        ("export csv nope", "'nope'"),
        ("show git:x", "'git:x': the form git:REV:PATH is needed"),
        ("show none.json report.json", "report none.json: cannot be read"),
        ("show text.json", "report text.json: is not valid JSON"),
        ("gate text.json report.json --allow-no-baseline", "report text.json: is not valid JSON"),
        ("gate report.json none.json --allow-no-baseline", "report none.json: cannot be read"),
        ("promote report.json --to text.json", "report text.json: is not valid JSON"),
        ("export csv report.json --baseline none.json", "report none.json: cannot be read"),
        # Verdicts and policies.
        ("gate --verdicts none.json", "report none.json: cannot be read: No such file"),
        ("gate --verdicts text.json", "report text.json: is not valid JSON: JSON is malformed"),
        ("gate --verdicts other.json", "report other.json: is not a report of pytest-llmgpu"),
        ("gate --verdicts v.json", "pytest --llmgpu-json=FILE writes one, llmgpu gate --json verdicts alone (Object "),
        ("gate --verdicts report.json", "has no verdicts, because its run was not compared: pass --llmgpu-compare"),
        ("gate --verdicts future.json", "report future.json: schema_version 99 is newer than 2"),
        ("gate --verdicts rules.json", "the policy of these verdicts cannot be read: "),
        ("gate report.json --verdicts v.json", "--verdicts: cannot be combined with BASE: nothing is judged again"),
        ("gate report.json report.json --verdicts v.json", "--verdicts: cannot be combined with BASE"),
        ("gate --strict --verdicts v.json", "--verdicts: cannot be combined with --strict"),
        ("gate --allow-no-baseline --verdicts v.json", "--verdicts: cannot be combined with --allow-no-baseline"),
        ("gate --verdicts deep.json", "report deep.json: "),
        ("promote report.json --policy none.toml", "policy none.toml: cannot be read"),
        ("gate --dump-policy --policy bad.toml", "policy bad.toml: margn is not allowed: allowed are "),
        # Output.
        ("gate report.json report.json --json report.json/x", "report.json/x: cannot be written"),
        ("promote report.json --to baseline.txt", "the name must end in .json"),
        ("promote report.json", "name 'baseline': is a file or folder here"),
        ("export csv report.json --output .", ".: cannot be written: Is a directory"),
        ("plot report.json --output report.json --format svg", "image report.json/time.svg: cannot be written: "),
    ],
)
def test_bad_input_is_one_line_and_exit_2(refused: Callable[..., str], command: str, reason: str) -> None:
    """The line names the argument or the file and the reason; 1 would mean a regression. Nothing is written."""
    before = sorted(Path().iterdir())
    assert reason in refused(*shlex.split(command))
    assert sorted(Path().iterdir()) == before
