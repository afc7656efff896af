"""A process that torchrun or srun started with a rank above 0: it starts its rank when rank 0's process asks for it.

It passes commands, answers and batches on as bytes, prints nothing, and ends with rank 0's process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pytest_llmgpu.profiling import node_profilers
from pytest_llmgpu.ranks import wire
from pytest_llmgpu.ranks.env import version
from pytest_llmgpu.ranks.futures import End, Event
from pytest_llmgpu.ranks.local import LocalLauncher, LocalProcess
from pytest_llmgpu.ranks.wire import Command, Connection, FromRankZero, Goodbye, Hello, Reply, Request, Sent, Start
from pytest_llmgpu.ranks.world import JOIN_S, World
from pytest_llmgpu.report.result import Failure


def serve(world: World, log_directory: Path, limit_s: float = JOIN_S) -> int:
    """Join rank 0's process, and serve it until it says goodbye.

    Returns:
        The exit status: 0 after the goodbye, 1 if the connection was lost.

    Raises:
        ValueError: Rank 0's process was not found, or refused this one.
    """
    connection = wire.connect(world, limit_s)
    # Ctrl-C reaches all processes of a terminal: rank 0's decides when the others end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    served = _Served(connection, log_directory)
    try:
        connection.send(Hello(version(), world.rank, world.size, world.local_rank, world.node))
        while not isinstance(message := connection.receive(FromRankZero), Goodbye):
            served.take(message)
    except (EOFError, OSError, ValueError):
        return 1
    finally:
        served.end()
        node_profilers.close_here()
        connection.close()
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - as signal calls it
    sys.exit(128 + number)


class _Served:
    """The rank of this process, as rank 0's process drives it."""

    def __init__(self, connection: Connection, log_directory: Path) -> None:
        self._connection = connection
        self._launcher = LocalLauncher(log_directory)
        self._process: LocalProcess | None = None

    def take(self, message: Start | Command | Request) -> None:
        """Do what a message asks for."""
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Request):
            try:
                reply = Reply(message.number, done=True, content=pickle.dumps(self._reply(message)))
            except Exception as error:  # noqa: BLE001 - rank 0's process gets every error as text
                text = str(error) or type(error).__name__
                reply = Reply(message.number, done=False, content=pickle.dumps(text))
            self._connection.send(reply)
        elif self._process is not None:
            self._process.send(message.content)

    def end(self) -> None:
        """End the rank."""
        if self._process is not None:
            self._process.kill()

    def _start(self, message: Start) -> None:
        def send(event: Event) -> None:
            with contextlib.suppress(OSError):  # the main thread notices it, too, and ends the rank
                self._connection.send(Sent(message.number, event))

        # Tests that pytest collected there may be imported by the rank.
        sys.path += [folder for folder in message.path if folder not in sys.path]
        ours = {}
        if "GLOO_SOCKET_IFNAME" not in {*os.environ, *message.environment}:
            ours = wire.interface_of(self._connection.local_address)
        try:
            self._process = self._launcher.start_process(message.rank, {**ours, **message.environment}, send)
        except OSError as error:
            text = f"rank {message.rank} could not be started: {error}"
            send(End(outcome="crashed", failure=Failure(phase="load", rank=message.rank, message=text)))

    def _reply(self, request: Request) -> Any:
        if request.what == "take_output":
            return "\n".join(self._launcher.take_output().values())
        if request.what == "call":
            fn, args = pickle.loads(request.content)  # noqa: S301 - written by rank 0's process, which has the secret
            return fn(*args)
        return getattr(self._process, request.what)() if self._process is not None else ""
