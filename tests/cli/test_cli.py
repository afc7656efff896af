from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import jsonschema
import pytest
from support.report_factory import make_failed
from support.verdict_factory import H200, measured

from pytest_llmgpu.cli import commands as folder
from pytest_llmgpu.cli import main, parser
from pytest_llmgpu.cli.commands import COMMANDS
from pytest_llmgpu.profiling.machine import installed_version
from pytest_llmgpu.render.terminal.report import tables
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.report import Session
from pytest_llmgpu.report.result import Failure, Finding
from pytest_llmgpu.report.schema import schema
from pytest_llmgpu.store.store import DEFAULT, save, stored


def test_schema_and_version_print_nothing_else(llmgpu: Callable[..., str]) -> None:
    """The schema is a JSON Schema, and the version is the installed one."""
    printed = json.loads(llmgpu("schema"))
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed == schema()
    assert llmgpu("--version") == f"llmgpu {installed_version('pytest-llmgpu') or '(not installed)'}\n"


def test_no_command_takes_signals_that_end_pytest(llmgpu: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run commands in their own process: the end of a job would be one failed test, and the run would go on."""
    monkeypatch.setattr("pytest_llmgpu.report.schema.schema", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llmgpu("schema")


def test_help_names_the_commands() -> None:
    """Heavy modules are imported by the command that needs them, and each module of the folder has a command."""
    code = (
        "import sys; from pytest_llmgpu.cli import main; heavy = {'msgspec', 'tabulate', 'pytest_llmgpu.report.file'}\n"
        "try: main(['--help'])\n"
        "except SystemExit as ended: sys.exit(ended.code or ' '.join(heavy & set(sys.modules)) or None)"
    )
    environ = {**os.environ, "COLUMNS": "200"}  # argparse wraps long help
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    for name, (_, text) in COMMANDS.items():
        assert f"    {name}" in done.stdout
        assert text in " ".join(done.stdout.split())
    assert parser().format_help()
    modules = {module.name for module in pkgutil.iter_modules(folder.__path__)}
    assert modules == {place for place, _ in COMMANDS.values()}


def test_an_error_has_a_traceback_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    """It distinguishes a bug from bad input; the last line and the exit status are the same."""
    monkeypatch.setenv("LLMGPU_DEBUG", "0")
    line = refused("list", "--storage", "nowhere")
    assert line == "llmgpu: storage nowhere: is not a folder\n"
    monkeypatch.setenv("LLMGPU_DEBUG", "1")
    assert main(["list", "--storage", "nowhere"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback ")
    assert shown.endswith(f"\nValueError: storage nowhere: is not a folder\n{line}")


def test_output_that_cannot_be_written_is_one_line_and_exit_2() -> None:
    """A full disk is an error."""
    command = [sys.executable, "-m", "pytest_llmgpu.cli", "schema"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "llmgpu: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("redirected", "lines"), [("list >&-", 1), ("--version >&-", 1), ("gate 2>/dev/full", 0), ("gate 2>&-", 0)]
)
def test_closed_output_is_exit_2_and_at_most_one_line(redirected: str, lines: int) -> None:
    """Exit status 1 would read as a regression."""
    command = f"{sys.executable} -m pytest_llmgpu.cli {redirected}"
    done = subprocess.run(command, check=False, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", lines)


@pytest.mark.usefixtures("empty_folder")
def test_a_report_is_removed_by_its_name(
    llmgpu: Callable[..., str], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is found from a subfolder; none of several is removed if one of them is no report of the store."""
    for name in ("one", "two"):
        save(measured(), DEFAULT, name)
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    assert "two" in llmgpu("list")
    dump(measured(), Path("other.json"))
    for other in ("other.json", "latest"):
        assert f"{other}: names no report of ../.llmgpu: give a number" in refused("rm", "one", other)
    assert "_one.json" in llmgpu("rm", "one")
    assert [one.name for one in stored(Path("..") / DEFAULT)] == ["two"]
    Path(".git").mkdir()  # the root of another repository
    assert "the store .llmgpu is empty" in llmgpu("list")


def test_a_reader_that_leaves_early_does_not_change_the_exit_status(tmp_path: Path) -> None:
    """A broken report still gives exit status 2 if `head` has ended."""
    save(measured(), tmp_path)
    save(measured(), tmp_path).write_bytes(b"{")
    code = (
        "import os, sys; reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1);"
        "from pytest_llmgpu.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "list", "--storage", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"llmgpu: report {tmp_path}")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("empty_folder")
def test_list_shows_the_store(llmgpu: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each report is one line; a broken one is named, and the exit status shows that the list is incomplete."""
    empty = f"the store {DEFAULT} is empty; pytest --llmgpu-save keeps the report of a run in it\n"
    assert llmgpu("list") == empty
    assert main(["trend"]) == 2
    assert capsys.readouterr().err == f"llmgpu: {empty}"
    save(measured(), DEFAULT, "base")
    heads, _, line = llmgpu("list").splitlines()
    assert heads.split() == ["number", "name", "when", "commit", "machine", "strategies", "cases", "outcomes"]
    assert line.split()[:2] == ["0001", "base"]
    broken = save(measured(), DEFAULT)
    broken.write_bytes(b"{")
    assert main(["list", "--storage", str(DEFAULT)]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 3
    assert printed.err == f"llmgpu: report {broken}: is not valid JSON: Input data was truncated\n"
    with pytest.raises(SystemExit):
        main(["list", "--help"])
    assert f"(default: the nearest {DEFAULT})" in capsys.readouterr().out


def test_show_prints_the_tables_of_a_run(tmp_path: Path, llmgpu: Callable[..., str]) -> None:
    """The first line names the report, and the tables and findings are those of the terminal."""
    report = measured()
    report.cases[0].findings = [Finding(code="x", severity="warning", text="It is slow.", next_step="Look.")]
    report.session = Session(complete=False)
    path = save(report, tmp_path)
    head, rest = llmgpu("show", "1", "--storage", str(tmp_path)).split("\n\n", 1)
    assert head == f"{path}, {H200}, 2026-01-02T03:04:05Z, commit 3b1f09ac main"
    assert rest == tables(report) + "\n"
    assert "It is slow." in rest


def test_show_prints_the_log_of_a_case(tmp_path: Path, llmgpu: Callable[..., str], refused: Callable[..., str]) -> None:
    """The log of a failed case is printed alone; a case without one is an error that names those with one."""
    report = measured()
    failure = Failure(phase="forward", message="x", log_tail='Traceback\n  File "a.py"\x1b[2J')
    report.cases.append(make_failed("error", failure, batch_size=64))
    path = str(save(report, tmp_path))
    assert llmgpu("show", path, "--log", "mp-bs64") == 'Traceback\n  File "a.py" [2J\n'
    for wrong, why in ((report.cases[0].id, "has no log"), ("mp-bs3", "no such case")):
        assert f"{why}: cases with a log: mp-bs64" in refused("show", path, "--log", wrong)
