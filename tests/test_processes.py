from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_llmgpu import processes


def test_a_file_beside_the_tests_shadows_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the working directory nor the import path of the test run comes before the standard library."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('the wrong queue')\n")
    (tmp_path / "mine.py").write_text(
        "import queue, sys, other\nprint(queue.Queue.__name__, other.VALUE, sys.argv[1:])\n"
    )
    (tmp_path / "other.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = subprocess.run(
        processes.command("mine", "--flag", "a b"), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "Queue 7 ['--flag', 'a b']"
