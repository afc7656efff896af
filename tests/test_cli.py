from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from pytest_llmgpu.cli import main
from pytest_llmgpu.environment import installed_version
from pytest_llmgpu.report import schema


def _run(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest_llmgpu.cli", *arguments]
    return subprocess.run(command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_schema_prints_the_reports_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is a JSON Schema, and nothing else is."""
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed == schema()


def test_version_prints_the_installed_version(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for bug reports."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"llmgpu {installed_version('pytest-llmgpu') or '(not installed)'}\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Help is no error."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "schema" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"), [([], "schema"), (["shcema"], "shcema"), (["schema", "extra"], "extra"), (["--no"], "--no")]
)
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It names what is wrong, or what there is."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("llmgpu: ")
    assert printed.err.count("\n") == 1
    assert named in printed.err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """`llmgpu schema | head` ends without a traceback."""
    code = (
        "import os, sys; reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1);"
        "from pytest_llmgpu.cli import main; sys.exit(main(['schema']))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_cannot_be_written_is_one_line_and_exit_2() -> None:
    """A full disk does not pass as a schema."""
    with Path("/dev/full").open("w") as full:
        done = _run("schema", stdout=full.fileno())
    assert done.returncode == 2
    assert done.stderr == "llmgpu: the output cannot be written: No space left on device\n"


def test_nothing_heavy_is_imported() -> None:
    """The command answers at once on a laptop without torch."""
    code = (
        "import sys; from pytest_llmgpu.cli import main; main(['schema']);"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'numpy', 'pynvml', 'pytest', 'deepspeed'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == "[]\n"
