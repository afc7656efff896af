from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.measured_project import Project

import pytest_llmgpu
from pytest_llmgpu.cli import main
from pytest_llmgpu.report.text import printable_lines


@pytest.fixture
def llmgpu(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command with this exit status and nothing on stderr, and returns its stdout."""

    def run(*words: str, ends: int = 0) -> str:
        status = main(words)
        if status == 130:  # the command, which runs in this process, took the signal that ends pytest
            raise KeyboardInterrupt
        printed = capsys.readouterr()
        assert (status, printed.err) == (ends, "")
        return printed.out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command with exit status 2, which prints one line on stderr, and returns it."""

    def run(*words: str) -> str:
        try:
            status: object = main(words)
        except SystemExit as ended:  # argparse's
            status = ended.code
        printed = capsys.readouterr()
        assert (status, printed.out, printed.err.count("\n")) == (2, "", 1)
        assert printed.err.startswith("llmgpu")
        assert printable_lines(printed.err) == printed.err
        return printed.err

    return run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty project in the working directory; temporary files are outside it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    path = [str(Path(__file__).parents[1]), str(Path(pytest_llmgpu.__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    found = Project(tmp_path / "project")
    monkeypatch.chdir(found.root)
    return found
