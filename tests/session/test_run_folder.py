from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_llmgpu.session.run_folder import RunFolder

_RUN = """
import os, sys
from pytest_llmgpu.session.run_folder import RunFolder
folder = RunFolder()
(folder.path / "log").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT])
def test_the_next_run_removes_the_folder_of_a_killed_one(number: signal.Signals) -> None:
    """The folder of a run that lives stays."""
    with subprocess.Popen([sys.executable, "-c", _RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        abandoned = Path(run.stdout.readline().decode().strip())
        first = RunFolder()
        assert (abandoned / "log").exists()
        run.send_signal(number)
    second = RunFolder()
    assert not abandoned.exists()
    assert first.path.exists()
    for folder in (first, second):
        folder.remove()
        folder.remove()
        assert not folder.path.exists()


def test_links_and_other_folders_stay(tmp_path: Path) -> None:
    """Another user of the temporary folder cannot choose what is removed; a kept report is no folder of a run."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "lock").touch()
    (tmp_path / "llmgpu-run-link").symlink_to(victim)
    (tmp_path / "llmgpu-run-unlocked").mkdir()
    (tmp_path / "llmgpu-report-kept").mkdir()
    RunFolder().remove()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["llmgpu-report-kept", "llmgpu-run-link", "llmgpu-run-unlocked", "victim"]
    assert (victim / "lock").exists()
