"""Ranks as processes of this machine, over pipes.

Written here because concurrent.futures' ProcessPoolExecutor hides exit codes and signals, breaks on an exception
that does not unpickle, and leaves workers behind that outlive a killed parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu import processes
from pytest_llmgpu.ranks import oom
from pytest_llmgpu.ranks.protocol import BatchListener, FinishedBatch, RankFailedError
from pytest_llmgpu.report.result import Failure

__all__ = ["LocalLauncher", "LocalRank"]

_SEAT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_LOG_TAIL_LINES = 40
_CLOSE_S = 10.0
_STACKS_S = 1.0
_DRAIN_S = 2.0
"""How long what is still in a pipe may take to be read."""


class LocalLauncher:
    """Starts ranks with this interpreter and this process's import path."""

    name = "local"

    def __init__(self, log_directory: Path) -> None:
        self._log_directory = log_directory
        self._started = 0

    def start(self, environments: Sequence[Mapping[str, str]], on_batch: BatchListener) -> Sequence[LocalRank]:
        """Start one process per environment."""
        ranks: list[LocalRank] = []
        # A file is where the ranks find each other: no port that another program may take first.
        meeting = {"LLMGPU_RENDEZVOUS": str(self._log_directory / f"launch{self._started}-rendezvous")}
        for number, environment in enumerate(environments):
            log = self._log_directory / f"launch{self._started}-rank{number}.log"
            ranks.append(LocalRank(number, {**meeting, **environment}, log, on_batch))
        self._started += 1
        return ranks


class LocalRank:
    """One process; commands and answers are pickles, finished batches stream over a pipe of their own."""

    def __init__(self, rank: int, environment: Mapping[str, str], log: Path, on_batch: BatchListener) -> None:
        self.rank = rank
        self._log = log
        self._pending: deque[Future[Any]] = deque()
        self._lock = threading.Lock()
        self._heard = threading.Condition()
        self._batches_heard = 0
        self._ended: RankFailedError | None = None
        self._kills_before = oom.host_kills()
        command_in, command_out = os.pipe()
        answer_in, answer_out = os.pipe()
        batch_in, batch_out = os.pipe()
        handed_over = (command_in, answer_out, batch_out)
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                processes.command("pytest_llmgpu.ranks", "--serve", *map(str, (os.getpid(), *handed_over))),
                env={**_inherited(), **environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=handed_over,
                start_new_session=True,
            )
        for descriptor in handed_over:
            os.close(descriptor)
        self._commands = Connection(command_out, readable=False)
        self._threads = [
            threading.Thread(
                target=self._read_batches, args=(Connection(batch_in, writable=False), on_batch), daemon=True
            ),
            threading.Thread(target=self._read_answers, args=(Connection(answer_in, writable=False),), daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run `fn(state, *args)` on the rank; see `protocol.Rank`."""
        future: Future[Any] = Future()
        command = pickle.dumps((fn, args))
        with self._lock:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            self._pending.append(future)
            # What the host has killed before is no evidence of what ends this command.
            self._kills_before = oom.host_kills()
        # A rank that died meanwhile is told by the reading thread, which knows its exit status.
        with contextlib.suppress(BrokenPipeError):
            self._commands.send_bytes(command)
        return future

    def close(self) -> None:
        """Let the process end by itself, then see to it that it has."""
        with contextlib.suppress(OSError):
            self._commands.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._join()

    def kill(self) -> None:
        """End the process at once and wait for it."""
        self._end_group()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._commands.close()
        self._join()

    def stacks(self) -> str:
        """Have the process write where each of its threads is, and return the end of its log.

        It works while the process is stuck in native code (faulthandler answers SIGUSR1 in the handler itself).
        """
        before = self._log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_S
        while self._log.stat().st_size == before and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.log_tail()

    def log_tail(self) -> str:
        """Return the last lines the process wrote, as it wrote them."""
        try:
            text = self._log.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def _read_answers(self, answers: Connection) -> None:
        while True:
            try:
                payload = answers.recv_bytes()
            except (EOFError, OSError):
                break
            with self._lock:
                future = self._pending.popleft()
            try:
                streamed, done, answer = pickle.loads(payload)  # noqa: S301 - written by our own child
            except Exception as error:  # noqa: BLE001 - a user's object may raise anything while it is unpickled
                failure = Failure(phase="forward", message=f"the answer does not unpickle: {error}")
                streamed, done, answer = 0, False, ("error", failure, [])
            self._hear_out(streamed)
            if done:
                future.set_result(answer)
            else:
                outcome, failure, use = answer
                failure = msgspec.structs.replace(failure, rank=self.rank, log_tail=self.log_tail())
                future.set_exception(RankFailedError(outcome, failure, use))
        answers.close()

    def _watch(self) -> None:
        """Tell those who wait that the process has ended: its pipes need not, where a child of it holds them open."""
        self._process.wait()
        self._end_group()
        for reader in self._threads[:2]:
            reader.join(_DRAIN_S)
        self._fail_pending(self._death())

    def _end_group(self) -> None:
        """End the process and the children it has forked: it leads a session, so they are its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read_batches(self, batches: Connection, on_batch: BatchListener) -> None:
        while True:
            try:
                payload = batches.recv_bytes()
            except (EOFError, OSError):
                break
            on_batch(self.rank, FinishedBatch(*pickle.loads(payload)))  # noqa: S301 - written by our own child
            with self._heard:
                self._batches_heard += 1
                self._heard.notify_all()
        batches.close()

    def _hear_out(self, streamed: int) -> None:
        """Wait until every batch that was streamed before an answer has been heard: two pipes keep no order."""
        with self._heard:
            self._heard.wait_for(lambda: self._batches_heard >= streamed, _DRAIN_S)

    def _death(self) -> RankFailedError:
        code = self._process.wait()
        evidence = oom.evidence_of_death(code, self.log_tail(), self._kills_before, oom.host_kills())
        ended = f"signal {_signal_name(-code)}" if code < 0 else f"exit status {code}"
        failure = Failure(
            phase="forward",
            rank=self.rank,
            message=f"rank {self.rank} ended with {ended}",
            evidence=evidence.rule if evidence else ended,
            log_tail=self.log_tail(),
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
        )
        return RankFailedError("oom" if evidence else "crashed", failure)

    def _fail_pending(self, error: RankFailedError) -> None:
        with self._lock:
            self._ended = error
            pending, self._pending = self._pending, deque()
        for future in pending:
            future.set_exception(error)

    def _join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * _DRAIN_S)


def _inherited() -> dict[str, str]:
    """Return this process's variables but for its own seat in a job of several: a rank's is its launcher's to give."""
    return {name: value for name, value in os.environ.items() if name not in _SEAT}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal: only the first and the last have names
        return str(number)
