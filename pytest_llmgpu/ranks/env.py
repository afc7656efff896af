"""The launcher `env`: each rank is a child of a process that torchrun or srun started (`join` is the other end).

This process is rank 0's. It starts the first rank itself, and each other one through a connection to its process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pytest_llmgpu.profiling import machine as environment
from pytest_llmgpu.ranks import nodes, wire
from pytest_llmgpu.ranks.futures import End, Listener, ProcessRank
from pytest_llmgpu.ranks.local import LocalLauncher, LocalProcess
from pytest_llmgpu.ranks.protocol import BatchListener, RankFailedError
from pytest_llmgpu.ranks.wire import Command, Connection, Goodbye, Hello, Reply, Request, Sent, Start
from pytest_llmgpu.ranks.world import JOIN_S, World
from pytest_llmgpu.report.result import Failure
from pytest_llmgpu.report.text import plural

_REPLY_S = 20.0
"""A process that needs longer to reply is lost: it is stopped, or its node is gone."""
_KILL_S, _CLOSE_S = 30.0, 50.0
"""The same while it ends its rank."""
_GOODBYE_S = 5.0
_ACCEPT_AGAIN_S = 0.1
_LATE_S = 5.0
"""A run that ends at once waits for processes that are about to join: without a goodbye they would look for it."""


class OwnPlace:
    """This process as a place of a rank; it implements `nodes.Place`."""

    def __init__(self, world: World) -> None:
        self.node, self.local_rank = world.node, world.local_rank

    def call(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """See `nodes.Place`."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args))
        except Exception as error:  # noqa: BLE001 - as from another process
            future.set_exception(ValueError(str(error)))
        return future


class Peer:
    """Another process as a place of a rank; it implements `nodes.Place`."""

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.rank, self.node, self.local_rank = hello.rank, hello.node, hello.local_rank
        self.lost: str | None = None
        """The reason why the process is lost; None while it is not."""
        self._connection = connection
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[wire.FromRankZero | None] = queue.SimpleQueue()
        """Messages for the process, which may be stopped; None ends the connection."""
        self._numbers = itertools.count()
        self._requests: dict[int, Future[Any]] = {}
        self._process: PeerProcess | None = None
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()
        threading.Thread(target=self._receive, daemon=True).start()

    def start(self, rank: int, environment: Mapping[str, str], listener: Listener) -> PeerProcess:
        """Start the process of a rank; the one before has ended."""
        with self._lock:
            process = PeerProcess(self, next(self._numbers), listener)
            self._process = process
        self.post(Start(process.number, rank, dict(environment), list(sys.path)))
        if self.lost is not None:
            process.end(self._loss(self.lost))
        return process

    def post(self, message: wire.FromRankZero) -> None:
        """Send a message; this does not wait for the process."""
        self._outbox.put(message)

    def request(self, what: wire.Asked, content: bytes = b"") -> Future[Any]:
        """Send a request; the future raises ValueError if it fails there, and ConnectionError if the peer is lost."""
        future: Future[Any] = Future()
        with self._lock:
            number, lost = next(self._numbers), self.lost
            if lost is None:
                self._requests[number] = future
        if lost is None:
            self.post(Request(number, what, content))
        else:
            future.set_exception(ConnectionError(lost))
        return future

    def wait(self, future: Future[Any], limit_s: float) -> Any:
        """Wait for the reply to a request; without one the peer is lost.

        Raises:
            ConnectionError: The peer is lost.
        """
        if not concurrent.futures.wait([future], limit_s).done:
            self.lose(f"no reply within {limit_s:g} s")
        return future.result()

    def call(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """See `nodes.Place`."""
        return self.request("call", pickle.dumps((fn, args)))

    def lose(self, reason: str) -> None:
        """End the connection: the process ends its rank when it notices."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = f"the process of rank {self.rank} was lost: {reason}"
            requests, self._requests = self._requests, {}
            process = self._process
        self._outbox.put(None)
        self._connection.close()
        for future in requests.values():
            future.set_exception(ConnectionError(self.lost))
        if process is not None:
            process.end(self._loss(self.lost))

    def close(self) -> None:
        """Let the process end."""
        self.post(Goodbye())
        self._outbox.put(None)

    def join(self, limit_s: float) -> None:
        """Wait until everything is sent."""
        self._sender.join(limit_s)

    def _loss(self, reason: str) -> End:
        return End(outcome="crashed", failure=Failure(phase="forward", rank=self.rank, message=reason, evidence=reason))

    def _send(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)
        except Exception as error:  # noqa: BLE001 - whatever ends this thread ends the connection
            self.lose(str(error))

    def _receive(self) -> None:
        try:
            while True:
                self._take(self._connection.receive(wire.ToRankZero))
        except EOFError:
            self.lose("it ended")
        except Exception as error:  # noqa: BLE001 - whatever ends this thread ends the connection
            self.lose(str(error))

    def _take(self, message: wire.ToRankZero) -> None:
        process = self._process
        if isinstance(message, Reply):
            with self._lock:
                future = self._requests.pop(message.number, None)
            if future is not None:
                _complete(future, message)
        elif isinstance(message, Sent) and process is not None and process.number == message.number:
            if isinstance(message.event, End):
                process.end(message.event)
            else:
                process.listener(message.event)


class PeerProcess:
    """The process of a rank as a child of another process; it implements `futures.Channel`."""

    def __init__(self, peer: Peer, number: int, listener: Listener) -> None:
        self.number = number
        self.listener = listener
        self.alive = True
        self._peer = peer
        self._lock = threading.Lock()

    def send(self, command: bytes) -> None:
        """Send a pickled command."""
        self._peer.post(Command(command))

    def stacks(self) -> str:
        """Return the stacks of the process.

        Raises:
            RankFailedError: The process that started it does not answer.
        """
        try:
            stacks: str = self._peer.wait(self._peer.request("stacks"), _REPLY_S)
        except (ConnectionError, ValueError) as error:
            failure = Failure(phase="forward", rank=self._peer.rank, message=f"{error} (node {self._peer.node})")
            raise RankFailedError("crashed", failure) from None
        return stacks

    def close(self) -> None:
        """Let the process end by itself; kill it after a time limit."""
        self._end("close", _CLOSE_S)

    def kill(self) -> None:
        """End the process at once and wait for it."""
        self._end("kill", _KILL_S)

    def end(self, end: End) -> None:
        """Report the end of the process, once."""
        with self._lock:
            ended, self.alive = not self.alive, False
        if not ended:
            self.listener(end)

    def _end(self, what: wire.Asked, limit_s: float) -> None:
        with contextlib.suppress(ConnectionError, ValueError):  # it kills its rank when the connection ends
            self._peer.wait(self._peer.request(what), limit_s)


class Peers:
    """All processes that were started together, as rank 0's process sees them."""

    def __init__(self, world: World, listener: socket.socket | None = None) -> None:
        """Listen for the other processes, on a socket that is open or at the address of the world.

        Raises:
            ValueError: The port is in use, or the address is not of this machine.
        """
        self.world = world
        self._own = OwnPlace(world)
        self._joined: dict[int, Peer] = {}
        self._refused: str | None = None
        self._changed = threading.Condition()
        self._waited = False
        self._listener = wire.listen(world) if listener is None and world.size > 1 else listener
        if self._listener is not None:
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def wait(self, limit_s: float) -> None:
        """See `nodes.Nodes`; the limit is at most that of the processes which join."""
        limit_s = min(limit_s, JOIN_S)
        self._waited = True
        with self._changed:
            everybody = self.world.size - 1
            self._changed.wait_for(lambda: self._refused or len(self._joined) == everybody, limit_s)
            missing = sorted(set(range(1, self.world.size)) - set(self._joined))
            refused = self._refused
        if refused is not None:
            raise ValueError(refused)
        if missing:
            numbers = ", ".join(map(str, missing))
            raise ValueError(
                f"{self.world.size_name}={self.world.size}, but {plural(self.world.size - len(missing), 'process')} "
                f"joined within {limit_s:g} s: rank {numbers} is missing. Rank 0 listens on "
                f"{self.world.where}{self._resolved()}"
            )
        self._stop_listening()
        numbers_of_nodes: dict[int, int] = {}
        for place in self.places:
            place.node = numbers_of_nodes.setdefault(place.node, len(numbers_of_nodes))

    def fail(self, reason: str) -> None:
        """Stop waiting for the others: the run is refused."""
        with self._changed:
            self._refused = self._refused or reason
            self._changed.notify_all()

    def _resolved(self) -> str:
        """Return what the name of the address means here, which is loopback on some systems; empty if it is no name."""
        address = "" if self._listener is None or self.world.key is None else self._listener.getsockname()[0]
        return f" ({address})" if address not in {"", self.world.address} else ""

    @property
    def places(self) -> list[nodes.Place]:
        """The places for ranks, in their order."""
        return [self._own, *(self._joined[rank] for rank in sorted(self._joined))]

    def launcher(self, log_directory: Path) -> EnvLauncher:
        """Return the launcher that starts ranks at these places."""
        return EnvLauncher(self.world, [self._joined[rank] for rank in sorted(self._joined)], log_directory)

    def close(self) -> None:
        """Let all processes end."""
        with self._changed:
            if self._listener is not None and not self._waited:
                self._changed.wait_for(lambda: self._refused or len(self._joined) == self.world.size - 1, _LATE_S)
        self._stop_listening()
        with self._changed:
            joined = list(self._joined.values())
            self._refused = "the run is over"
        for peer in joined:
            peer.close()
        deadline_s = time.monotonic() + _GOODBYE_S
        for peer in joined:
            peer.join(max(0.0, deadline_s - time.monotonic()))

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is not None:
            try:
                connected, _ = listener.accept()
                threading.Thread(target=self._admit, args=(Connection(connected),), daemon=True).start()
            except (OSError, RuntimeError):
                time.sleep(_ACCEPT_AGAIN_S)

    def _admit(self, connection: Connection) -> None:
        """Let a process join if it proves itself and belongs here."""
        try:
            connection.authenticate(self.world.key, listens=True)
            hello: Hello = connection.receive(Hello)
        except PermissionError as error:
            connection.close()
            self.fail(f"a process tried to join, but {error.strerror}")
            return
        except (OSError, EOFError, ValueError):
            connection.close()  # a scan of ports, for example
            return
        connection.wait_without_limit()
        with self._changed:
            reason = self._refused or self._reason_against(hello)
            if reason is None:
                self._joined[hello.rank] = Peer(connection, hello)
                self._changed.notify_all()
                return
        connection.close()
        self.fail(reason)

    def _reason_against(self, hello: Hello) -> str | None:
        if hello.version != (own := version()):
            return f"rank {hello.rank} has pytest-llmgpu {hello.version}, rank 0 has {own}: install the same version"
        if hello.size != self.world.size:
            name = self.world.size_name
            return f"rank {hello.rank} has {name}={hello.size}, rank 0 has {name}={self.world.size}"
        if hello.rank in self._joined or not 0 < hello.rank < self.world.size:
            return f"two processes are rank {hello.rank}"
        return None


class EnvLauncher:
    """Starts rank 0 here, and each other rank through its process."""

    name = "env"

    def __init__(self, world: World, peers: Sequence[Peer], log_directory: Path) -> None:
        self._world = world
        self._peers = peers
        self._local = LocalLauncher(log_directory)

    def start(self, environments: Sequence[Mapping[str, str]], on_batch: BatchListener) -> Sequence[ProcessRank]:
        """Start one process per environment, each at its place.

        Raises:
            RankFailedError: The process at one of the places was lost.
        """
        peers = self._peers[: len(environments) - 1]
        for peer in peers:
            if peer.lost is not None:
                failure = Failure(phase="load", rank=peer.rank, message=f"{peer.lost} (node {peer.node})")
                raise RankFailedError("crashed", failure)
        if self._world.key is None or not peers:
            ours, meeting = self._local.meeting(), None
        else:
            # Rank 0 gets the socket: no other program can take its port, and each start has another one.
            meeting = wire.bound(self._world.address, 0)
            host, port = meeting.getsockname()[:2]
            ours = {"LLMGPU_RENDEZVOUS": f"tcp://{host}:{port}", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        first, inherited = {**ours, **environments[0]}, []
        if meeting is not None:
            inherited = [meeting.fileno()]
            first |= {**wire.interface_of(host), "LLMGPU_RENDEZVOUS_SOCKET": str(meeting.fileno())}

        def start_here(listener: Listener) -> LocalProcess:
            return self._local.start_process(0, first, listener, inherited)

        ranks = [ProcessRank(0, on_batch, start_here, 0)]
        if meeting is not None:
            meeting.close()
        for peer, added in zip(peers, environments[1:], strict=True):
            start = functools.partial(peer.start, peer.rank, {**ours, **added})
            ranks.append(ProcessRank(peer.rank, on_batch, start, peer.node))
        return ranks

    def take_output(self) -> Mapping[int, str]:
        """Return what the processes of each rank wrote since the last call."""
        asked = [(peer, peer.request("take_output")) for peer in self._peers if peer.lost is None]
        output = self._local.take_output()
        for peer, future in asked:
            with contextlib.suppress(ConnectionError, ValueError):
                if text := peer.wait(future, _REPLY_S):
                    output[peer.rank] = text
        return output


def _complete(future: Future[Any], reply: Reply) -> None:
    try:
        content = pickle.loads(reply.content)  # noqa: S301 - written by our own process
    except Exception as error:  # noqa: BLE001 - unpickling may raise anything
        future.set_exception(ValueError(f"the answer does not unpickle: {error}"))
    else:
        if reply.done:
            future.set_result(content)
        else:
            future.set_exception(ValueError(content))


def version() -> str:
    """Return the version of this package: other versions may have other messages."""
    return str(environment.installed_version("pytest-llmgpu"))
