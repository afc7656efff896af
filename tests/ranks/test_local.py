from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support import rank_functions as ranks

from pytest_llmgpu import processes
from pytest_llmgpu.ranks import local, memory
from pytest_llmgpu.ranks.local import LocalLauncher, Rank
from pytest_llmgpu.ranks.protocol import FinishedBatch, RankFailedError

_ANSWER_S = 300


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """One rank."""
    (started,) = LocalLauncher(tmp_path).start([{"LLMGPU_TEST": "here"}], lambda *_: None)
    yield started
    started.kill()


def _answer(future: Future[Any]) -> Any:
    return future.result(_ANSWER_S)


def _failure(rank: Rank, fn: Callable[..., Any], *args: Any) -> RankFailedError:
    error = rank.submit(fn, *args).exception(_ANSWER_S)
    assert isinstance(error, RankFailedError)
    return error


def test_a_rank_runs_commands_in_order(rank: Rank) -> None:
    """Commands that are submitted together run in the order of submission."""
    futures = [rank.submit(ranks.add, number, 1) for number in range(5)]
    assert [_answer(future) for future in futures] == [1, 2, 3, 4, 5]


def test_a_rank_has_its_environment_before_anything_is_imported(rank: Rank) -> None:
    """Variables such as CUDA_VISIBLE_DEVICES are set when the process starts."""
    assert _answer(rank.submit(ranks.variable, "LLMGPU_TEST")) == "here"


def test_a_rank_is_a_session_of_its_own_and_ignores_ctrl_c(rank: Rank) -> None:
    """Ctrl-C at the terminal reaches only pytest, which then ends the ranks."""
    pid, session = _answer(rank.submit(ranks.identity))
    assert pid == session != os.getsid(0)
    assert _answer(rank.submit(ranks.interrupt_yourself)) == "still here"


def test_an_exception_becomes_a_record_and_the_rank_continues(rank: Rank) -> None:
    """An exception that does not unpickle arrives as one line, with its traceback in the log."""
    error = _failure(rank, ranks.fail)
    assert error.outcome == "error"
    assert error.failure.message == "CannotPickleError: first line"
    assert error.failure.rank == 0
    assert "in fail" in (error.failure.log_tail or "")
    assert _answer(rank.submit(ranks.add, 1, 1)) == 2


@pytest.mark.slow
def test_out_of_memory_is_an_outcome_of_its_own(rank: Rank) -> None:
    """The rank decides which outcome its exception is, and reports the rule."""
    error = _failure(rank, ranks.run_out)
    assert (error.outcome, error.failure.evidence) == ("oom", "host allocator")


@pytest.mark.parametrize("value", [ranks.unreadable, ranks.unsendable])
def test_a_result_that_does_not_pickle_is_an_error(rank: Rank, value: Callable[..., Any]) -> None:
    """A function of the user may return any object; the rank continues."""
    error = _failure(rank, value)
    assert error.outcome == "error"
    assert "the answer does not " in error.failure.message
    assert _answer(rank.submit(ranks.add, 1, 1)) == 2


def test_the_output_of_a_rank_is_taken_once(tmp_path: Path) -> None:
    """Each call returns what was written since the last one, with real paths, also of a process that has ended."""
    launcher = LocalLauncher(tmp_path)
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
    again.close()


def test_an_exit_is_a_crash_with_its_status(rank: Rank) -> None:
    """A process that exits without an answer has crashed, for later commands as well."""
    error = _failure(rank, ranks.leave, 3)
    assert (error.outcome, error.failure.exit_code, error.failure.signal) == ("crashed", 3, None)
    assert _failure(rank, ranks.add, 1, 1).failure.exit_code == 3


def test_a_signal_is_a_crash_with_its_number_and_stacks(rank: Rank) -> None:
    """The log of a segmentation fault has the function where it happened."""
    error = _failure(rank, ranks.die, signal.SIGSEGV)
    assert (error.outcome, error.failure.signal, error.failure.exit_code) == ("crashed", signal.SIGSEGV, None)
    assert "in die" in (error.failure.log_tail or "")


def test_the_reason_of_an_abort_is_kept_however_many_threads_there_are(rank: Rank) -> None:
    """NCCL's watchdog writes why it ends the process, which has a dozen threads."""
    error = _failure(rank, ranks.abort_among_threads, "collective operation timeout")
    assert error.failure.signal == signal.SIGABRT
    assert "collective operation timeout" in (error.failure.log_tail or "")
    assert "in abort_among_threads" in (error.failure.log_tail or "")


def test_a_kill_by_the_host_is_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL is out of memory if the out-of-memory counter of the kernel grew during the command."""
    counts = iter([3, 7, 8])  # at the start, when the command was sent, when the process was gone
    monkeypatch.setattr(memory, "host_kills", lambda: next(counts))
    (rank,) = LocalLauncher(tmp_path).start([{}], lambda *_: None)
    error = _failure(rank, ranks.die, signal.SIGKILL)
    assert error.outcome == "oom"
    assert "oom_kill 7 -> 8" in (error.failure.evidence or "")
    rank.close()


def test_finished_batches_of_a_rank_that_dies_are_kept(tmp_path: Path) -> None:
    """Every batch that was sent is received before the failure is reported."""
    received: list[FinishedBatch] = []
    (rank,) = LocalLauncher(tmp_path).start([{}], lambda _, batch: received.append(batch))
    error = _failure(rank, ranks.finish_batches_then_die, 50)
    assert error.failure.signal == signal.SIGKILL
    assert [batch.latency_s for batch in received] == [number + 1.0 for number in range(50)]
    rank.close()


def test_stacks_show_where_a_rank_hangs(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacks of a rank that waits for ever have the function."""
    monkeypatch.setattr(local, "_STACKS_S", _ANSWER_S)
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    rank.submit(ranks.hang_in_a_collective, str(begun))
    begun.read_bytes()
    assert "hang_in_a_collective" in rank.stacks()


def test_a_rank_that_has_not_begun_survives_being_asked_for_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 ends a process that has no handler for it yet."""
    waiting = [sys.executable, "-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr(processes, "command", lambda *_: waiting)
    (rank,) = LocalLauncher(tmp_path).start([{}], lambda *_: None)
    future = rank.submit(ranks.identity)
    assert rank.stacks() == ""
    rank.kill()
    with pytest.raises(RankFailedError) as failed:
        future.result(_ANSWER_S)
    assert failed.value.failure.signal == signal.SIGKILL


def test_close_waits_for_the_process(tmp_path: Path) -> None:
    """When close returns, the process is gone and its devices are free."""
    (rank,) = LocalLauncher(tmp_path).start([{}], lambda *_: None)
    pid, _ = _answer(rank.submit(ranks.identity))
    rank.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_real_time_signal_is_reported_by_its_number(rank: Rank) -> None:
    """A signal without a name is a crash like any other."""
    number = signal.SIGRTMIN + 3
    failure = _failure(rank, ranks.die, number).failure
    assert (failure.signal, failure.message) == (number, f"rank 0 ended with signal {number}")


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
        descriptor = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    gone, _, _ = select.select([descriptor], [], [], _ANSWER_S)
    os.close(descriptor)
    assert gone


def test_a_child_of_a_rank_does_not_hide_its_death(rank: Rank) -> None:
    """A forked process that holds the pipes open is ended with the rank, and the crash is reported at once."""
    error = _failure(rank, ranks.fork_and_die)
    assert (error.outcome, error.failure.signal) == ("crashed", signal.SIGSEGV)
    assert not rank.alive


def test_a_child_in_a_session_of_its_own_ends_with_its_rank(rank: Rank) -> None:
    """A daemon that a library starts would use the GPU during the next case."""
    descriptor = os.pidfd_open(_answer(rank.submit(ranks.start_daemon)))
    rank.kill()
    gone, _, _ = select.select([descriptor], [], [], _ANSWER_S)
    os.close(descriptor)
    assert gone


@pytest.mark.parametrize("text", [b"INFO: a library starts\n" * 9, b"\0\0\0\4text"])
def test_text_in_the_pipe_of_a_rank_is_a_crash_at_once(rank: Rank, text: bytes) -> None:
    """A library that writes to a wrong descriptor ends the case, and the message names the reason."""
    error = _failure(rank, ranks.write_to_the_pipe, text)
    assert error.outcome == "crashed"
    assert error.failure.message.startswith("rank 0 was ended: it sent data that is no answer (")


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


@pytest.mark.slow
def test_a_message_of_megabytes_is_cut(rank: Rank) -> None:
    """The failure has the beginning of the message and the number of bytes that are left out."""
    error = _failure(rank, ranks.raise_at_length, 200_000_000)
    assert error.outcome == "error"
    assert error.failure.message.endswith("... (199,998,014 bytes left out)")
    assert len(error.failure.log_tail or "") < 50_000


def test_an_error_on_a_full_disk_is_still_that_error(rank: Rank) -> None:
    """The traceback does not fit in the log, and the failure arrives all the same."""
    error = _failure(rank, ranks.fail_on_a_full_disk)
    assert (error.outcome, error.failure.message) == ("error", "ValueError: the layer is broken")


def test_a_crash_on_a_full_disk_names_it(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit status alone explains nothing, and the log has no room for the reason."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**20, 2**20, 0))
    message = _failure(rank, ranks.leave, 1).failure.message
    assert message == "rank 0 ended with exit status 1, and the disk of its log is full (TMPDIR)"


def test_a_rank_does_not_inherit_the_rank_variables_of_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes and Slurm jobs export WORLD_SIZE: a single rank would wait for processes that do not exist."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    (rank,) = LocalLauncher(tmp_path).start([{}], lambda *_: None)
    try:
        assert rank.submit(ranks.variable, "WORLD_SIZE").result(_ANSWER_S) is None
    finally:
        rank.kill()
