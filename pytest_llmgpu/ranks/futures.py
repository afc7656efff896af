"""A rank as the runner sees it: a future for each command, over a process on this machine or on another node.

A launcher decides where the process of a rank runs, and returns a `Channel` to it; `local.LocalProcess` is the process
itself. Answers are unpickled here and nowhere else: a channel passes them on as bytes.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from pytest_llmgpu.ranks.protocol import BatchListener, FinishedBatch, Process, RankFailedError
from pytest_llmgpu.report.result import Failure, Outcome
from pytest_llmgpu.report.text import beginning


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer of a process to one command."""

    done: bool
    """True if the command returned, False if it raised an exception."""
    content: bytes
    """What it returned, or the records of the failure, pickled by the process."""
    log_tail: str | None = None
    """The end of the log of the process if the command failed."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a process ended."""

    outcome: Outcome
    """`crashed`, or `oom` where the host killed the process."""
    failure: Failure
    """The signal or the exit status, with the end of the log."""


Event = FinishedBatch | Answer | End
"""A process sends finished batches, the answer to its oldest command without one, and its end, which nothing follows.

The batches that it finished before an answer are sent before that answer.
"""

Listener = Callable[[Event], None]
"""Receives what a process sends, from any thread."""


class Channel(Process, Protocol):
    """The process of a rank, wherever it runs. It passes what the process sends to the listener it was made with."""

    def send(self, command: bytes) -> None:
        """Send a pickled command; this does not wait for the process."""
        ...


class ProcessRank:
    """One rank: a future for each command. It implements `protocol.Rank` for every launcher."""

    def __init__(
        self, rank: int, on_batch: BatchListener, start: Callable[[Listener], Channel], node: int | None = None
    ) -> None:
        """Start the process; `node` is the number of its node, for messages, and None if there is only one."""
        self.rank = rank
        self._node = node
        self._on_batch = on_batch
        self._pending: deque[Future[Any]] = deque()
        self._lock = threading.Lock()
        self._ended: RankFailedError | None = None
        self._channel = start(self._take)

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self._channel.alive

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run `fn(state, *args)` on the rank; see `protocol.Rank`."""
        future: Future[Any] = Future()
        command = pickle.dumps((fn, args))
        with self._lock:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            self._pending.append(future)
            self._channel.send(command)
        return future

    def stacks(self) -> str:
        """Return the stack of each thread of the process; see `protocol.Rank`."""
        return self._channel.stacks()

    def close(self) -> None:
        """Let the process end by itself; kill it after a time limit."""
        self._channel.close()

    def kill(self) -> None:
        """End the process at once and wait for it."""
        self._channel.kill()

    def _take(self, event: Event) -> None:
        if isinstance(event, FinishedBatch):
            self._on_batch(self.rank, event)
        elif isinstance(event, Answer):
            self._complete(event)
        else:
            self._end(event)

    def _complete(self, answer: Answer) -> None:
        """Complete the future of the oldest command without an answer."""
        with self._lock:
            future = self._pending.popleft()
        done = answer.done
        try:
            content = pickle.loads(answer.content)  # noqa: S301 - written by our own rank
        except Exception as error:  # noqa: BLE001 - a user's object may raise anything while it is unpickled
            message = f"the answer does not unpickle: {beginning(str(error))}"
            done, content = False, ("error", Failure(phase="forward", message=message), [], None)
        if done:
            future.set_result(content)
        else:
            outcome, failure, use, raised = content
            failure = msgspec.structs.replace(failure, rank=self.rank, log_tail=answer.log_tail)
            future.set_exception(RankFailedError(outcome, failure, use, raised))

    def _end(self, end: End) -> None:
        """Fail all commands without an answer, and those that follow."""
        failure = end.failure
        if self._node is not None:
            failure = msgspec.structs.replace(failure, message=f"{failure.message} (node {self._node})")
        error = RankFailedError(end.outcome, failure)
        with self._lock:
            self._ended = error
            pending, self._pending = self._pending, deque()
        for future in pending:
            future.set_exception(error)
