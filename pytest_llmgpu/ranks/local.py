"""A rank as the runner drives it, and the process of a rank on this machine, which is driven through pipes.

concurrent.futures' ProcessPoolExecutor cannot replace it: it hides exit codes and signals, it breaks on an exception
that does not unpickle, and its workers outlive a killed parent.
"""

from __future__ import annotations

import contextlib
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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pytest_llmgpu import processes
from pytest_llmgpu.ranks import link, memory
from pytest_llmgpu.report.result import DeviceMemory, Failure, Outcome
from pytest_llmgpu.report.text import beginning, log_tail

if TYPE_CHECKING:
    from pytest_llmgpu.ranks.serving import Raised

_NOT_INHERITED = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|(PMI|PMIX|OMPI_COMM_WORLD|MV2_COMM_WORLD|TORCHELASTIC)_.*"
    rf"|{link.KEY}"
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
"""A message is at most this long. Text that a library writes to the pipe by mistake would be a longer one."""
_FULL_BYTES = 2**16
_OUTPUT_LINES = 1_000
"""Most lines of the output of a rank that belong to one test."""
_DRAIN_S = 2.0
"""Time limit for the data that is still in a pipe when the process has ended."""


class FinishedBatch(NamedTuple):
    """One batch, sent by a rank as soon as the batch is finished."""

    latency_s: float
    sequences: int
    tokens: int
    padded_tokens: int
    planned: int
    """The case has this many batches; 0 marks a batch of the warm-up."""


class Answer(NamedTuple):
    """The answer of a rank to its oldest command without one, after the batches that it finished before."""

    done: bool
    """True if the command returned, False if it raised an exception."""
    content: bytes
    """What it returned, or the records of the failure, pickled apart: an object of a user may not unpickle."""
    number: int
    """The number of the command, from 0: a process that a forward forked gives a second answer to it."""
    log_tail: str | None = None
    """The end of the log of the process if the command failed."""


class End(NamedTuple):
    """The end of a process, which nothing follows."""

    outcome: Outcome
    """`crashed`, or `oom` where the host killed the process."""
    failure: Failure
    """The signal or the exit status, with the end of the log."""


Event = FinishedBatch | Answer | End
Listener = Callable[[Event], None]
"""Receives what a process sends, from any thread."""
BatchListener = Callable[[int, FinishedBatch], None]
"""Called with the number of the rank and each finished batch, from any thread."""


class RankFailedError(Exception):
    """A command failed on a rank; the error holds plain records, never the exception of the rank."""

    def __init__(
        self, outcome: Outcome, failure: Failure, memory: Sequence[DeviceMemory] = (), raised: Raised | None = None
    ) -> None:
        super().__init__(failure.message)
        self.outcome: Outcome = outcome
        self.failure = failure
        self.memory = memory
        """The memory of the devices of the rank; empty if it did not report it."""
        self.raised = raised
        """The exception of the rank; None if the rank itself ended."""


class Rank(ABC):
    """One process of a strategy: a future for each command, wherever the process runs."""

    def __init__(self, rank: int, on_batch: BatchListener, node: int | None = None) -> None:
        """Prepare for commands; `node` is the number of the node, for messages, and None if there is only one."""
        self.rank = rank
        self._on_batch = on_batch
        self._node = node
        self._pending: deque[Future[Any]] = deque()
        self._answered = 0
        self._lock = threading.Lock()
        self._ended: RankFailedError | None = None
        self.alive = True
        """True if the process runs."""

    @abstractmethod
    def send(self, command: bytes) -> None:
        """Send a pickled command; this does not wait for the process."""

    @abstractmethod
    def stacks(self) -> str:
        """Return the stack of each thread of the process, as the end of its log shows them.

        RankFailedError if the node of the process does not answer.
        """

    @abstractmethod
    def close(self, limit_s: float) -> None:
        """Let the process end by itself, and kill it after a time limit, in whatever state it is.

        Its devices are free when this returns.
        """

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run `fn(state, *args)` on the rank, after all commands that were submitted before.

        The rank imports `fn` by its name; arguments and result are pickled. The future raises RankFailedError.
        """
        future: Future[Any] = Future()
        command = pickle.dumps((fn, args))
        with self._lock:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            self._pending.append(future)
            self.send(command)
        return future

    def take(self, event: Event) -> None:
        """Take what the process sent."""
        if isinstance(event, FinishedBatch):
            self._on_batch(self.rank, event)
        elif isinstance(event, Answer):
            with self._lock:
                if event.number != self._answered or not self._pending:
                    raise ValueError(f"command {event.number} was answered a second time")
                self._answered += 1
                future = self._pending.popleft()
            done = event.done
            try:
                content = pickle.loads(event.content)  # noqa: S301 - written by our own rank
            except Exception as error:  # noqa: BLE001 - a user's object may raise anything while it is unpickled
                message = f"the answer does not unpickle: {beginning(str(error))}"
                done, content = False, ("error", Failure(phase="forward", message=message), [], None)
            if done:
                future.set_result(content)
            else:
                outcome, failure, devices, raised = content
                failure = msgspec.structs.replace(failure, rank=self.rank, log_tail=event.log_tail)
                future.set_exception(RankFailedError(outcome, failure, devices, raised))
        else:  # all commands without an answer fail, and those that follow
            failure = event.failure
            if self._node is not None:
                failure = msgspec.structs.replace(failure, message=f"{failure.message} (node {self._node})")
            with self._lock:
                if self._ended is not None:
                    return  # its node was lost afterwards
                self.alive, self._ended = False, RankFailedError(event.outcome, failure)
                pending, self._pending = self._pending, deque()
            for future in pending:
                future.set_exception(self._ended)


class LocalRank(Rank):
    """A rank on this machine. Commands are pickled; answers and finished batches arrive on one pipe, in their order."""

    def __init__(
        self,
        rank: int,
        environment: Mapping[str, str],
        log: Path,
        *,
        on_batch: BatchListener = lambda *_: None,
        listener: Listener | None = None,
        inherited: Sequence[int] = (),
        node: int | None = None,
    ) -> None:
        """Start the process, with the variables of this one and of `environment`; its output goes to the file `log`.

        `listener` receives everything that the process sends in place of `on_batch`, and its end. `inherited` are
        further file descriptors that the process gets, under the same numbers.
        """
        super().__init__(rank, on_batch, node)
        self.log = log
        self.taken_bytes = 0
        """The bytes of the log that `LocalLauncher.take_output` has returned."""
        self._listener = listener or self.take
        self._mark = secrets.token_hex(16)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Commands for the process; None ends the pipe."""
        self._unreadable: str | None = None
        """The reason why the process was ended: it sent something else than answers and batches."""
        self._kills_before = memory.host_kills()
        command_in, command_out = os.pipe()
        event_in, event_out = os.pipe()
        inherited_variables = {name: text for name, text in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                processes.command("pytest_llmgpu.ranks", *map(str, (os.getpid(), command_in, event_out))),
                env={**inherited_variables, **environment, "PYTHONUNBUFFERED": "1", _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(command_in, event_out, *inherited),
                start_new_session=True,
            )
        os.close(command_in)
        os.close(event_out)
        commands, events = Connection(command_out, readable=False), Connection(event_in, writable=False)
        self._receiver = threading.Thread(target=self._receive, args=(events,), daemon=True)
        sender = threading.Thread(target=self._send, args=(commands,), daemon=True)
        self._threads = [self._receiver, sender, threading.Thread(target=self._watch, daemon=True)]
        for thread in self._threads:
            thread.start()

    def send(self, command: bytes) -> None:
        """Send a pickled command; this does not wait for the process."""
        # Processes that the host killed earlier do not explain a failure of this command.
        self._kills_before = memory.host_kills()
        self._outbox.put(command)

    def close(self, limit_s: float) -> None:
        """Let the process end by itself; kill it after a time limit."""
        self._outbox.put(None)
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._end_group()
            # A process that waits in a driver ends once the driver returns.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        for thread in self._threads:
            thread.join(2 * _DRAIN_S)

    def stacks(self) -> str:
        """Make the process write the stack of each of its threads, and return the end of its log.

        This works while the process is in native code: faulthandler writes from the handler of SIGUSR1 itself. Before
        a process serves it has no handler, and the signal would end it.
        """
        if self.log.exists() and processes.catches(self._process.pid, signal.SIGUSR1):
            size = before = self.log.stat().st_size
            self._process.send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + _STACKS_S
            # Until it has paused: the stacks are written line by line.
            while (size == before or size != self.log.stat().st_size) and time.monotonic() < deadline and self.alive:
                size = self.log.stat().st_size
                time.sleep(_PAUSE_S)
        return log_tail(self.log)

    def _send(self, commands: Connection) -> None:
        """Send the commands in turn: a process that is stopped does not read, and sending waits without a limit."""
        # If the process has died, `_watch` fails the future with the exit status.
        with contextlib.suppress(BrokenPipeError), commands:
            while (command := self._outbox.get()) is not None:
                commands.send_bytes(command)

    def _receive(self, events: Connection) -> None:
        """Pass on what the process sends. If it is unreadable, end the process: no later message can be found."""
        try:
            while True:
                event = pickle.loads(events.recv_bytes(_MOST_BYTES))  # noqa: S301 - written by our own child
                if isinstance(event, Answer) and not event.done:
                    event = event._replace(log_tail=log_tail(self.log))
                if not isinstance(event, FinishedBatch | Answer):
                    raise TypeError(type(event).__name__)  # noqa: TRY301 - as another one below
                self._listener(event)
        except EOFError:
            pass
        except Exception as error:  # noqa: BLE001 - unpickling other data than ours may raise anything
            # The process may have died while it wrote. The length of a message is refused by closing the pipe.
            if events.closed or not isinstance(error, OSError):
                self._unreadable = f"{type(error).__name__}: {error}"
                self._end_group()
        events.close()

    def _watch(self) -> None:
        """Report the end of the process; its pipe stays open if a child of it holds it."""
        code = self._process.wait()
        self.alive = False
        self._end_group()
        self._receiver.join(_DRAIN_S)
        log, kills = log_tail(self.log), memory.host_kills()
        shortage = memory.decide_killed(code, log, self._kills_before, kills) if code else None
        end = processes.describe_end(code)
        message = f"rank {self.rank} ended with {end}"
        if self._unreadable is not None:
            message = f"rank {self.rank} was ended: it sent data that is no answer ({self._unreadable})"
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.log.parent).free < _FULL_BYTES:
                message += ", and the disk of its log is full (TMPDIR)"
        failure = Failure(
            phase="forward",
            rank=self.rank,
            message=message,
            evidence=shortage or end,
            log_tail=log,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
        )
        self._listener(End("oom" if shortage else "crashed", failure))

    def _end_group(self) -> None:
        """End the process and its children; it leads a session, so most of them are its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        processes.end_marked(f"{_MARK}={self._mark}")


class LocalLauncher:
    """Starts ranks with the interpreter and the import path of this process."""

    starts_ahead = True
    """True if ranks can be started while others run."""

    def __init__(self, log_directory: Path) -> None:
        self._log_directory = log_directory
        self._started = 0
        self._ranks: list[LocalRank] = []

    def start(self, environments: Sequence[Mapping[str, str]], on_batch: BatchListener) -> Sequence[Rank]:
        """Start one process per environment."""
        ours = self.meeting()
        return [
            self.start_rank(number, {**ours, **environment}, on_batch=on_batch)
            for number, environment in enumerate(environments)
        ]

    def meeting(self) -> dict[str, str]:
        """Return the variables with which ranks of this machine find each other, and nobody else finds them."""
        # By a file: another program may take a port first.
        return {**_LOOPBACK, "LLMGPU_RENDEZVOUS": str(self._log_directory / f"rendezvous{self._started}")}

    def start_rank(self, rank: int, environment: Mapping[str, str], **options: Any) -> LocalRank:
        """Start one rank; its output is kept. The options are those of `LocalRank`."""
        with contextlib.suppress(FileExistsError):  # else a program that cleans up has removed it
            self._log_directory.mkdir(mode=0o700, parents=True)
        log = self._log_directory / f"process{self._started}-rank{rank}.log"
        self._started += 1
        self._ranks.append(LocalRank(rank, environment, log, **options))
        return self._ranks[-1]

    def take_output(self, but_for: Collection[Rank] = ()) -> dict[int, str]:
        """Return what the processes of each rank wrote since the last call; of long output the end.

        The output of some ranks can be left for a later call.
        """
        output: dict[int, str] = {}
        taken = [rank for rank in self._ranks if rank not in but_for]
        self._ranks = [rank for rank in self._ranks if rank.alive or rank in but_for]
        for one in taken:
            size_bytes = one.log.stat().st_size if one.log.exists() else 0
            if text := log_tail(one.log, one.taken_bytes, most_lines=_OUTPUT_LINES):
                output[one.rank] = "\n".join(filter(None, (output.get(one.rank), text)))
            one.taken_bytes = size_bytes
        return output
