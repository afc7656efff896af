"""How child processes start and end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_llmgpu import processes


def test_a_file_in_the_working_directory_shadows_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library comes before the working directory and before the import path of the test run."""
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


def test_a_listener_and_its_descendants_are_found() -> None:
    """Also in a session of its own, and for a port of IPv6."""
    listens = (
        "import os, socket, sys, subprocess as s; one = socket.create_server(('::1', 0), family=socket.AF_INET6)\n"
        "child = s.Popen(['cat'], stdin=sys.stdin, stdout=s.PIPE, start_new_session=True)\n"
        "print(one.getsockname()[1], child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", listens], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port, child = map(int, process.stdout.readline().split())
        found = processes.listeners(port)
        assert process.pid in found  # a server of another test may have that port of IPv4
        assert child not in found
        assert processes.family({process.pid}) == {process.pid, child}
        assert child in processes.family({os.getpid()})
        process.communicate()
    assert process.pid not in processes.listeners(port)


def test_a_process_whose_parent_has_ended_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that starts too late for its parent does not run on without it."""
    (tmp_path / "child.py").write_text(
        "import sys\nfrom pytest_llmgpu.processes import die_with_parent\n"
        "die_with_parent(int(sys.argv[1]))\nprint('runs')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = subprocess.run(processes.command("child", "1"), check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("process 1,")
