from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import rank_functions as ranks
from support import worlds

from pytest_llmgpu import processes
from pytest_llmgpu.ranks import memory
from pytest_llmgpu.ranks.local import FinishedBatch, LocalLauncher, Rank, RankFailedError

_ANSWER_S = 300


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    """A launcher whose logs are in a folder of the test."""
    return LocalLauncher(tmp_path)


@pytest.fixture
def rank(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """One rank of a process that is itself part of a job."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    (started,) = launcher.start([{"LLMGPU_TEST": "here"}], lambda *_: None)
    yield started
    started.close(0)


def _ask(rank: Rank, fn: Callable[..., Any], *args: Any) -> Any:
    return rank.submit(fn, *args).result(_ANSWER_S)


def _failure(rank: Rank, fn: Callable[..., Any], *args: Any) -> RankFailedError:
    error = rank.submit(fn, *args).exception(_ANSWER_S)
    assert isinstance(error, RankFailedError)
    return error


def test_a_rank_runs_commands_in_order_in_a_session_and_an_environment_of_its_own(rank: Rank) -> None:
    """Ctrl-C reaches only pytest, which then ends the ranks, and a single rank waits for no other ranks of the job."""
    futures = [rank.submit(ranks.add, number, 1) for number in range(5)]
    assert [future.result(_ANSWER_S) for future in futures] == [1, 2, 3, 4, 5]
    assert [_ask(rank, ranks.variable, name) for name in ("LLMGPU_TEST", "WORLD_SIZE")] == ["here", None]
    pid, _, session = _ask(rank, ranks.identity)
    assert pid == session != os.getsid(0)
    assert _ask(rank, ranks.receive, signal.SIGINT) == "still here"
    rank.close(_ANSWER_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_exception_becomes_a_record_and_the_rank_continues(rank: Rank) -> None:
    """An exception or a result of a user that does not pickle arrives as one line, with its traceback in the log."""
    error = _failure(rank, ranks.fail)
    assert (error.outcome, error.failure.rank) == ("error", 0)
    assert error.failure.message == "CannotPickleError: first line"
    assert "in fail" in (error.failure.log_tail or "")
    for value in (ranks.unreadable, ranks.unsendable):
        error = _failure(rank, value)
        assert error.outcome == "error"
        assert "the answer does not " in error.failure.message
    shortage = _failure(rank, ranks.run_out)
    assert (shortage.outcome, shortage.failure.evidence) == ("oom", "host allocator")
    full = _failure(rank, ranks.fail_on_a_full_disk)
    assert (full.outcome, full.failure.message) == ("error", "ValueError: the layer is broken")
    assert _ask(rank, ranks.add, 1, 1) == 2


def test_the_output_of_a_rank_is_taken_once(launcher: LocalLauncher) -> None:
    """Each call returns what was written since the last one, with real paths, also of a process that has ended."""
    (rank,) = launcher.start([{}], lambda *_: None)
    assert launcher.take_output() == {}
    _failure(rank, ranks.fail)
    output = launcher.take_output()
    assert list(output) == [0]
    assert f'File "{ranks.__file__}", line' in output[0]
    assert launcher.take_output() == {}
    _failure(rank, ranks.log_and_die, 10_000, "the last line")
    assert launcher.take_output()[0].endswith("the last line")
    (again,) = launcher.start([{}], lambda *_: None)
    _failure(again, ranks.fail)
    assert list(launcher.take_output()) == [0]
    again.close(_ANSWER_S)


_UNNAMED = signal.SIGRTMIN + 3


@pytest.mark.parametrize(
    ("fn", "arguments", "code", "message", "log"),
    [
        (ranks.leave, (3,), 3, "rank 0 ended with exit status 3", ""),
        (ranks.receive, (signal.SIGSEGV,), -signal.SIGSEGV, "rank 0 ended with signal SIGSEGV", "in receive"),
        (ranks.receive, (_UNNAMED,), -_UNNAMED, f"rank 0 ended with signal {_UNNAMED}", ""),
        (ranks.abort_among_threads, ("NCCL timeout",), -signal.SIGABRT, "rank 0 ended with signal", "NCCL timeout"),
        (ranks.abort_among_threads, ("timeout",), -signal.SIGABRT, "rank 0 ended", "in abort_among_threads"),
        # A forked process holds the pipes open.
        (ranks.fork_and_die, (), -signal.SIGSEGV, "rank 0 ended with signal SIGSEGV", ""),
        # A library writes to a wrong descriptor.
        (ranks.write_to_the_pipe, (b"INFO: a library\n" * 9,), -signal.SIGKILL, "rank 0 was ended: it sent data", ""),
        (ranks.write_to_the_pipe, (b"\0\0\0\4text",), -signal.SIGKILL, "rank 0 was ended: it sent data", ""),
    ],
)
def test_a_process_that_ends_is_a_crash_with_its_status_and_its_log(
    rank: Rank, fn: Callable[..., Any], arguments: tuple[Any, ...], code: int, message: str, log: str
) -> None:
    """Commands that follow fail in the same way."""
    for error in (_failure(rank, fn, *arguments), _failure(rank, ranks.add, 1, 1)):
        assert error.outcome == "crashed"
        assert (error.failure.exit_code, error.failure.signal) == ((code, None) if code >= 0 else (None, -code))
        assert error.failure.message.startswith(message)
        assert log in (error.failure.log_tail or "")
    assert not rank.alive


def test_a_second_answer_to_a_command_ends_the_rank(rank: Rank) -> None:
    """A process that a forward forked gives one: the answers after it would be those of other commands."""
    assert _ask(rank, ranks.answer, "first") == "first"
    error = _failure(rank, ranks.add, 1, 1)
    assert (error.outcome, "command 0 was answered a second time" in error.failure.message) == ("crashed", True)


def test_a_folder_that_was_removed_is_made_again(launcher: LocalLauncher, rank: Rank, tmp_path: Path) -> None:
    """A program that cleans up, or a test that empties TMPDIR, ends no run."""
    assert _ask(rank, ranks.add, 1, 1) == 2
    shutil.rmtree(tmp_path)
    assert _ask(rank, ranks.add, 1, 1) == 2
    assert (launcher.take_output(), rank.stacks()) == ({}, "")
    (again,) = launcher.start([{}], lambda *_: None)
    assert _ask(again, ranks.add, 1, 1) == 2
    again.close(0)


def test_a_crash_on_a_full_disk_names_it(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit status alone explains nothing, and the log has no room for the reason."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**20, 2**20, 0))
    message = _failure(rank, ranks.leave, 1).failure.message
    assert message == "rank 0 ended with exit status 1, and the disk of its log is full (TMPDIR)"


@pytest.mark.parametrize(("size_bytes", "last"), [(2**31, "the reason"), (0, 50_000_000 * "x")])
def test_a_log_of_gigabytes_is_read_from_its_end(rank: Rank, size_bytes: int, last: str) -> None:
    """A report has the last lines, each cut, and pytest's process stays small."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log = _failure(rank, ranks.log_and_die, size_bytes, last).failure.log_tail
    assert log is not None
    assert len(log) < 50_000
    assert "bytes of the log left out)" in log.splitlines()[0]
    assert last[:100] in log
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2**17


def test_a_kill_by_the_host_is_out_of_memory(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter of the kernel grew during the command; batches that were sent before are received."""
    counts = iter([3, 7, 8])  # at the start, when the command was sent, when the process was gone
    monkeypatch.setattr(memory, "host_kills", lambda: next(counts))
    received: list[FinishedBatch] = []
    (rank,) = launcher.start([{}], lambda _, batch: received.append(batch))
    error = _failure(rank, ranks.finish_batches, 50, ranks.receive, signal.SIGKILL)
    assert (error.outcome, error.failure.signal) == ("oom", signal.SIGKILL)
    assert "oom_kill 7 -> 8" in (error.failure.evidence or "")
    assert [batch.latency_s for batch in received] == [number + 1.0 for number in range(50)]
    rank.close(_ANSWER_S)


def test_a_rank_that_has_not_begun_has_no_stacks(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGUSR1 ends a process that has no handler for it yet."""
    waiting = [sys.executable, "-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr(processes, "command", lambda *_: waiting)
    (rank,) = launcher.start([{}], lambda *_: None)
    future = rank.submit(ranks.identity)
    assert rank.stacks() == ""
    rank.close(0)
    with pytest.raises(RankFailedError) as failed:
        future.result(_ANSWER_S)
    assert failed.value.failure.signal == signal.SIGKILL


def test_a_child_in_a_session_of_its_own_ends_with_its_rank(rank: Rank) -> None:
    """A daemon that a library starts would use the GPU during the next case."""
    pid = _ask(rank, ranks.start_daemon)
    rank.close(0)
    assert worlds.ends(pid)


_PARENT = """
import os, sys
from pathlib import Path
from support import rank_functions
from pytest_llmgpu.ranks.local import LocalLauncher
(rank,) = LocalLauncher(Path(sys.argv[1])).start([{}], lambda *_: None)
print(rank.submit(rank_functions.identity).result()[0], flush=True)
sys.stdin.read()
"""


def test_a_rank_dies_with_its_parent(tmp_path: Path) -> None:
    """A killed pytest leaves no process that uses a GPU."""
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert worlds.ends(pid)
