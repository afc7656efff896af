"""The launcher of ranks on this machine, and the process of a rank, which is driven through pipes.

Launchers of several nodes start the process of a rank on its node with `LocalProcess` as well.

concurrent.futures' ProcessPoolExecutor cannot replace it: it hides exit codes and signals, it breaks on an exception
that does not unpickle, and its workers outlive a killed parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from pytest_llmgpu import processes
from pytest_llmgpu.ranks import oom, world
from pytest_llmgpu.ranks.futures import Answer, End, Listener, ProcessRank
from pytest_llmgpu.ranks.oom import Death
from pytest_llmgpu.ranks.protocol import BatchListener, FinishedBatch
from pytest_llmgpu.report.result import Failure
from pytest_llmgpu.report.text import log_tail

_NOT_INHERITED = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|(PMI|PMIX|OMPI_COMM_WORLD|MV2_COMM_WORLD|TORCHELASTIC)_.*"
    rf"|{world.KEY}"
)
"""Variables of this process as a rank of a job, which libraries would read, and the secret of its nodes."""
_MARK = "LLMGPU_RANK_OF"
"""This variable of a rank is inherited by every process that the rank starts."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""All ranks run on this machine: nobody on the network can connect to them, whatever these variables are for other
programs. NVLink, PCIe and shared memory do not depend on them. NCCL takes a name without `=` as the start of one."""
_CLOSE_S = 10.0
_STACKS_S = 1.0
_PAUSE_S = 0.05
_MOST_BYTES = 2**29
"""An answer is at most this long. Text that a library writes to the pipe by mistake would be a longer one."""
_FULL_BYTES = 2**16
_OUTPUT_LINES = 1_000
"""Most lines of the output of a rank that belong to one test."""
_DRAIN_S = 2.0
"""Time limit for the data that is still in a pipe when the process has ended."""


class LocalLauncher:
    """Starts ranks with the interpreter and the import path of this process."""

    name = "local"

    def __init__(self, log_directory: Path) -> None:
        self._log_directory = log_directory
        self._started = 0
        self._processes: list[LocalProcess] = []

    def start(self, environments: Sequence[Mapping[str, str]], on_batch: BatchListener) -> Sequence[ProcessRank]:
        """Start one process per environment."""
        ours = self.meeting()
        return [
            ProcessRank(number, on_batch, functools.partial(self.start_process, number, {**ours, **environment}))
            for number, environment in enumerate(environments)
        ]

    def meeting(self) -> dict[str, str]:
        """Return the variables with which ranks of this machine find each other, and nobody else finds them."""
        # By a file: another program may take a port first.
        return {**_LOOPBACK, "LLMGPU_RENDEZVOUS": str(self._log_directory / f"rendezvous{self._started}")}

    def start_process(
        self, rank: int, environment: Mapping[str, str], listener: Listener, inherited: Sequence[int] = ()
    ) -> LocalProcess:
        """Start the process of one rank (see `LocalProcess`); its output is that of the rank."""
        log = self._log_directory / f"process{self._started}-rank{rank}.log"
        self._started += 1
        process = LocalProcess(rank, environment, log, listener, inherited)
        self._processes.append(process)
        return process

    def take_output(self) -> dict[int, str]:
        """Return what the processes of each rank wrote since the last call; of long output the end."""
        output: dict[int, str] = {}
        started, self._processes = self._processes, [process for process in self._processes if process.alive]
        for process in started:
            if text := process.take_output():
                output[process.rank] = "\n".join(filter(None, (output.get(process.rank), text)))
        return output


class LocalProcess:
    """The process of a rank. Commands and answers are pickled; finished batches arrive on a pipe of their own."""

    def __init__(
        self,
        rank: int,
        environment: Mapping[str, str],
        log: Path,
        listener: Listener,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start the process.

        Args:
            rank: The number of the rank.
            environment: Variables that are added to those of this process, or replace them.
            log: The file for the output of the process.
            listener: Receives what the process sends, and its end.
            inherited: Further file descriptors that the process gets, under the same numbers.
        """
        self.rank = rank
        self._log = log
        self._taken_bytes = 0
        """The bytes of the log that `take_output` has returned."""
        self._mark = secrets.token_hex(16)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Commands for the process; None ends the pipe."""
        self._unreadable: str | None = None
        """The reason why the process was ended: it sent something else than answers and batches."""
        self._batch_received = threading.Condition()
        self._batches_received = 0
        self._kills_before = oom.host_kills()
        command_in, command_out = os.pipe()
        answer_in, answer_out = os.pipe()
        batch_in, batch_out = os.pipe()
        ends = (command_in, answer_out, batch_out)
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                processes.command("pytest_llmgpu.ranks", *map(str, (os.getpid(), *ends))),
                env={**_environment(), **environment, "PYTHONUNBUFFERED": "1", _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(*ends, *inherited),
                start_new_session=True,
            )
        for descriptor in ends:
            os.close(descriptor)
        self._listener = listener
        commands = Connection(command_out, readable=False)
        answers, batches = Connection(answer_in, writable=False), Connection(batch_in, writable=False)
        self._threads = [
            threading.Thread(target=self._receive, args=(batches, self._take_batch), daemon=True),
            threading.Thread(target=self._receive, args=(answers, self._take_answer), daemon=True),
            threading.Thread(target=self._send, args=(commands,), daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def send(self, command: bytes) -> None:
        """Send a pickled command; this does not wait for the process."""
        # Processes that the host killed earlier do not explain a failure of this command.
        self._kills_before = oom.host_kills()
        self._outbox.put(command)

    def close(self) -> None:
        """Let the process end by itself; kill it after a time limit."""
        self._outbox.put(None)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._join()

    def kill(self) -> None:
        """End the process at once and wait for it."""
        self._end_group()
        # A process that waits in a driver ends once the driver returns.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._outbox.put(None)
        self._join()

    def stacks(self) -> str:
        """Make the process write the stack of each of its threads, and return the end of its log.

        This works while the process is in native code: faulthandler writes from the handler of SIGUSR1 itself. Before
        a process serves it has no handler, and the signal would end it.
        """
        size = before = self._log.stat().st_size
        if processes.catches(self._process.pid, signal.SIGUSR1):
            self._process.send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + _STACKS_S
            # Until it has paused: the stacks are written line by line.
            while (size == before or size != self._log.stat().st_size) and time.monotonic() < deadline and self.alive:
                size = self._log.stat().st_size
                time.sleep(_PAUSE_S)
        return self.log_tail()

    def take_output(self) -> str:
        """Return what the process wrote to stdout and stderr since the last call; of long output the end."""
        taken_bytes, self._taken_bytes = self._taken_bytes, self._log.stat().st_size
        return log_tail(self._log, taken_bytes, most_lines=_OUTPUT_LINES)

    def log_tail(self) -> str:
        """Return the last lines of the log of the process."""
        return log_tail(self._log)

    def _send(self, commands: Connection) -> None:
        """Send the commands in turn: a process that is stopped does not read, and sending waits without a limit."""
        # If the process has died, `_watch` fails the future with the exit status.
        with contextlib.suppress(BrokenPipeError), commands:
            while (command := self._outbox.get()) is not None:
                commands.send_bytes(command)

    def _receive(self, messages: Connection, take: Callable[[bytes], None]) -> None:
        """Pass each message of a pipe to `take`. If one is unreadable, end the process: no later one can be found."""
        try:
            while True:
                take(messages.recv_bytes(_MOST_BYTES))
        except EOFError:
            pass
        except Exception as error:  # noqa: BLE001 - unpickling other data than ours may raise anything
            # The process may have died while it wrote. The length of a message is refused by closing the pipe.
            if messages.closed or not isinstance(error, OSError):
                self._unreadable = f"{type(error).__name__}: {error}"
                self._end_group()
        messages.close()

    def _take_answer(self, payload: bytes) -> None:
        sent, done, content = pickle.loads(payload)  # noqa: S301 - written by our own child
        self._wait_for_batches(sent)
        self._listener(Answer(done=done, content=content, log_tail=None if done else self.log_tail()))

    def _watch(self) -> None:
        """Report the end of the process; its pipes stay open if a child of it holds them."""
        self._process.wait()
        self._end_group()
        for reader in self._threads[:2]:
            reader.join(_DRAIN_S)
        self._listener(self._death())

    def _end_group(self) -> None:
        """End the process and its children; it leads a session, so most of them are its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        processes.end_marked(f"{_MARK}={self._mark}")

    def _take_batch(self, payload: bytes) -> None:
        self._listener(FinishedBatch(*pickle.loads(payload)))  # noqa: S301 - written by our own child
        with self._batch_received:
            self._batches_received += 1
            self._batch_received.notify_all()

    def _wait_for_batches(self, sent: int) -> None:
        """Wait for the batches that the rank sent before an answer: the two pipes keep no common order."""
        with self._batch_received:
            self._batch_received.wait_for(lambda: self._batches_received >= sent, _DRAIN_S)

    def _death(self) -> End:
        code, log = self._process.wait(), self.log_tail()
        shortage = oom.decide_out_of_memory(
            Death(return_code=code, log=log, kills_before=self._kills_before, kills_after=oom.host_kills())
        )
        end = f"signal {_signal_name(-code)}" if code < 0 else f"exit status {code}"
        message = f"rank {self.rank} ended with {end}"
        if self._unreadable is not None:
            message = f"rank {self.rank} was ended: it sent data that is no answer ({self._unreadable})"
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._log.parent).free < _FULL_BYTES:
                message += ", and the disk of its log is full (TMPDIR)"
        failure = Failure(
            phase="forward",
            rank=self.rank,
            message=message,
            evidence=shortage.rule if shortage else end,
            log_tail=log,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
        )
        return End(outcome="oom" if shortage else "crashed", failure=failure)

    def _join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * _DRAIN_S)


def _environment() -> dict[str, str]:
    """Return the variables of this process without its own rank in a job; the launcher numbers the ranks."""
    return {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Most real-time signals have no name.
        return str(number)
