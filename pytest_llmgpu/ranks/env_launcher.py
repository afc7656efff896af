"""The launcher `env`: each rank is a child of a process that torchrun, srun or `llmgpu ray` started.

Rank 0's process runs pytest. It starts the first rank itself, and each other one through the `Supervisor` in that
rank's process, to which it has a `Link`: a `Peer` is one of these processes as rank 0's sees it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.profiling import machine as here
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.profiling.profiler import close_here
from pytest_llmgpu.ranks import link
from pytest_llmgpu.ranks.link import JOIN_S, Link, World
from pytest_llmgpu.ranks.local import BatchListener, End, Event, LocalLauncher, LocalRank, Rank, RankFailedError
from pytest_llmgpu.report.report import Node
from pytest_llmgpu.report.result import Failure
from pytest_llmgpu.report.text import plural

_REPLY_S = 20.0
"""A process that needs longer to reply is lost: it is stopped, or its node is gone."""
_END_S = 30.0
"""The same while it kills its rank."""
_PROBE_S = 300.0
"""Time limit of the first import of torch on a node."""
_GOODBYE_S = 5.0
_ACCEPT_AGAIN_S = 0.1
_LATE_S = 5.0
"""A run that ends at once waits for processes that are about to join: without a goodbye they would look for it."""

_Request = tuple[int, str, tuple[Any, ...]]
"""A message of rank 0's process: its number, a method of `Supervisor`, arguments. None instead of it ends the run."""
_Reply = tuple[int, bool, Any]
"""The number of a request, False if it raised an exception, and its result, the message of the exception, or an `Event`
of the rank that it has started."""


def hello(world: World) -> tuple[str, int, int, int, int]:
    """Return the first message of a process: its version, rank, size, local rank and node, plain for any version."""
    return str(here.installed_version("pytest-llmgpu")), world.rank, world.size, world.local_rank, world.node


def serve(world: World, log_directory: Path, limit_s: float = JOIN_S) -> int:
    """Join rank 0's process, and start a rank when it asks for it, until the run is over.

    Nothing is printed. Ctrl-C reaches all processes of a terminal: rank 0's decides when the others end. Return the
    exit status: 0 after the goodbye, 1 if the connection was lost. ValueError if rank 0's process was not found, or
    refused this one.
    """
    connection = link.connect(world, limit_s)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    supervisor = Supervisor(connection, log_directory)
    try:
        connection.send(hello(world))
        while (request := connection.receive()) is not None:
            number, method, arguments = request
            done, content = True, None
            try:
                content = getattr(supervisor, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - rank 0's process gets every error as text
                done, content = False, str(error) or type(error).__name__
            connection.send((number, done, content))
    except (EOFError, OSError):
        return 1
    finally:
        connection.close()  # first: the end of the rank would read as a kill from outside
        supervisor.rank("close", 0.0)
        close_here()
    return 0


class Supervisor:
    """A process that starts one rank, and again after a failure, as rank 0's process asks it to."""

    def __init__(self, connection: Link, log_directory: Path) -> None:
        self._link = connection
        self._launcher = LocalLauncher(log_directory)
        self._rank: LocalRank | None = None

    def start(self, number: int, rank: int, environment: Mapping[str, str], path: Sequence[str]) -> None:
        """Start the rank; what its process sends is passed on with a number. `path` is rank 0's import path."""

        def send(event: Event) -> None:
            with contextlib.suppress(OSError):  # the main thread notices it, too, and ends the rank
                self._link.send((number, True, event))

        # Tests that pytest collected there may be imported by the rank.
        sys.path += [folder for folder in path if folder not in sys.path]
        ours = {}
        if "GLOO_SOCKET_IFNAME" not in {*os.environ, *environment}:
            ours = link.interface_of(str(self._link.socket.getsockname()[0]))
        try:
            self._rank = self._launcher.start_rank(rank, {**ours, **environment}, listener=send)
        except OSError as error:
            text = f"rank {rank} could not be started: {error}"
            send(End("crashed", Failure(phase="load", rank=rank, message=text)))

    def rank(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rank, which unpickles commands itself: `send`, `stacks` or `close`."""
        return "" if self._rank is None else getattr(self._rank, method)(*arguments)

    def take_output(self) -> str:
        """Return what the rank wrote since the last call."""
        return "\n".join(self._launcher.take_output().values())

    def call(self, fn: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of this package in this process; its arguments and its result pickle."""
        return fn(*arguments)


class Peer:
    """Another process of the job, which starts one rank, as rank 0's process sees it."""

    def __init__(self, connection: Link, rank: int, local_rank: int, node: int) -> None:
        self.number = rank
        """The number of its rank."""
        self.local_rank = local_rank
        """The number of this process among those of its node, and of its GPU."""
        self.node = node
        """The number of its node; that of rank 0 is 0."""
        self.lost: str | None = None
        """The reason why the process is lost; None while it is not."""
        self._link = connection
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        """Messages for the process, which may be stopped; None is the last one."""
        self._numbers = itertools.count()
        self._requests: dict[int, Future[Any]] = {}
        self._started: tuple[int, RemoteRank] | None = None
        """The rank that was started last, with the number of its request."""
        self.sender = threading.Thread(target=self._send, daemon=True)
        """It ends when everything is sent."""
        self.sender.start()
        threading.Thread(target=self._receive, daemon=True).start()

    def start(self, environment: Mapping[str, str], on_batch: BatchListener) -> RemoteRank:
        """Start the rank; the one before has ended."""
        with self._lock:
            number, rank = next(self._numbers), RemoteRank(self, on_batch)
            self._started = number, rank
        self.request("start", number, self.number, dict(environment), list(sys.path))
        if self.lost is not None:
            rank.lose(self.lost)
        return rank

    def request(self, method: str, *arguments: Any) -> Future[Any]:
        """Let the process call a method of `Supervisor`.

        The future raises ValueError if it fails there, or ConnectionError.
        """
        future: Future[Any] = Future()
        with self._lock:
            number, lost = next(self._numbers), self.lost
            if lost is None:
                self._requests[number] = future
        if lost is None:
            self._outbox.put((number, method, arguments))
        else:
            future.set_exception(ConnectionError(lost))
        return future

    def wait(self, future: Future[Any], limit_s: float) -> Any:
        """Wait for the reply to a request; without one the process is lost (ConnectionError)."""
        if not concurrent.futures.wait([future], limit_s).done:
            self.lose(f"no reply within {limit_s:g} s")
        return future.result()

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of this package returns in the process.

        OSError if it failed, there is no answer in time, or the process is lost.
        """
        try:
            return self.wait(self.request("call", fn, *args), _REPLY_S)
        except ValueError as error:
            raise OSError(str(error)) from None

    def lose(self, reason: str) -> None:
        """End the connection: the process ends its rank when it notices."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = f"the process of rank {self.number} was lost: {reason}"
            requests, self._requests = self._requests, {}
        self._link.close()  # first: None would be a goodbye
        self._outbox.put(None)
        for future in requests.values():
            future.set_exception(ConnectionError(self.lost))
        if self._started is not None:
            self._started[1].lose(self.lost)

    def close(self) -> None:
        """Let the process end."""
        self._outbox.put(None)

    def _send(self) -> None:
        try:
            for request in iter(self._outbox.get, None):
                self._link.send(request)
            self._link.send(None)
        except Exception as error:  # noqa: BLE001 - whatever ends this thread ends the connection
            self.lose(str(error))

    def _receive(self) -> None:
        try:
            while True:
                reply: _Reply = self._link.receive()
                number, done, content = reply
                if self._started is not None and self._started[0] == number:
                    self._started[1].take(content)
                    continue
                with self._lock:
                    future = self._requests.pop(number, None)  # None: of a rank that was started before
                if future is not None and done:
                    future.set_result(content)
                elif future is not None:
                    future.set_exception(ValueError(content))
        except Exception as error:  # noqa: BLE001 - whatever ends this thread ends the connection
            self.lose("it ended" if isinstance(error, EOFError) else str(error))


class RemoteRank(Rank):
    """A rank whose process another one started; the methods are those of `Rank`."""

    def __init__(self, peer: Peer, on_batch: BatchListener) -> None:
        super().__init__(peer.number, on_batch, peer.node)
        self._peer = peer

    def send(self, command: bytes) -> None:
        """Send a pickled command."""
        self._peer.request("rank", "send", command)

    def lose(self, reason: str) -> None:
        """End the rank because its process was lost."""
        self.take(End("crashed", Failure(phase="forward", rank=self.rank, message=reason, evidence=reason)))

    def stacks(self) -> str:
        """Return the stacks of the process."""
        try:
            return str(self._peer.wait(self._peer.request("rank", "stacks"), _REPLY_S))
        except (ConnectionError, ValueError) as error:
            failure = Failure(phase="forward", rank=self.rank, message=f"{error} (node {self._node})")
            raise RankFailedError("crashed", failure) from None

    def close(self, limit_s: float) -> None:
        """Let the process end; kill it after a time limit."""
        with contextlib.suppress(ConnectionError, ValueError):  # it kills its rank when the connection ends
            self._peer.wait(self._peer.request("rank", "close", limit_s), limit_s + _END_S)


class Peers:
    """All processes that were started together, as rank 0's process sees them."""

    def __init__(self, world: World) -> None:
        """Listen for the other processes; ValueError if the port is in use, or the address is not of this machine."""
        self.world = world
        self._joined: dict[int, Peer] = {}
        self._refused: str | None = None
        self._stranger: str | None = None
        """The reason why a process without the secret was left out. It cannot end the run."""
        self._changed = threading.Condition()
        self._waited = False
        self._listener = link.listen(world) if world.size > 1 else None
        if self._listener is not None:
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def wait(self, limit_s: float) -> None:
        """Wait until all processes are there; the limit is at most that of the processes which join.

        ValueError if some are missing after the time limit, or one may not take part.
        """
        limit_s = min(limit_s, JOIN_S)
        self._waited = True
        with self._changed:
            self._changed.wait_for(lambda: self._refused or len(self._joined) == self.world.size - 1, limit_s)
            missing = sorted(set(range(1, self.world.size)) - set(self._joined))
        if self._refused is not None:
            raise ValueError(self._refused)
        if missing:
            # The name of the address means loopback on some systems.
            address = "" if self._listener is None or self.world.key is None else self._listener.getsockname()[0]
            resolved = f" ({address})" if address not in {"", self.world.address} else ""
            stranger = "" if self._stranger is None else f"; a process tried to join, but {self._stranger}"
            joined = f"{plural(self.world.size - len(missing), 'process')} joined within {limit_s:g} s"
            lacking = f"rank {', '.join(map(str, missing))} is missing"
            listens = f"Rank 0 listens on {self.world.where}{resolved}{stranger}"
            raise ValueError(f"{self.world.size_name}={self.world.size}, but {joined}: {lacking}. {listens}")
        self._stop_listening()
        numbers = {self.world.node: 0}
        for peer in self.peers:
            peer.node = numbers.setdefault(peer.node, len(numbers))

    @property
    def peers(self) -> list[Peer]:
        """The other processes in the order of their ranks."""
        return [self._joined[rank] for rank in sorted(self._joined)]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The node of each process and its number there, in the order of the ranks: this process is the first."""
        return [(0, self.world.local_rank), *((peer.node, peer.local_rank) for peer in self.peers)]

    def close(self) -> None:
        """Let all processes end."""
        with self._changed:
            if self._listener is not None and not self._waited:
                self._changed.wait_for(lambda: self._refused or len(self._joined) == self.world.size - 1, _LATE_S)
        self._stop_listening()
        with self._changed:
            joined = self.peers
            self._refused = "the run is over"
        for peer in joined:
            peer.close()
        deadline_s = time.monotonic() + _GOODBYE_S
        for peer in joined:
            peer.sender.join(max(0.0, deadline_s - time.monotonic()))

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
                threading.Thread(target=self._admit, args=(connected,), daemon=True).start()
            except (OSError, RuntimeError):
                time.sleep(_ACCEPT_AGAIN_S)

    def _admit(self, connected: socket.socket) -> None:
        """Let a process join if it proves itself and belongs here."""
        connection = None
        try:
            connection = Link(connected, self.world.key, listens=True)
            version, number, *rest = connection.receive()
        except Exception as error:  # noqa: BLE001 - unpickling other data than a hello may raise anything
            if isinstance(error, PermissionError):  # others are scans of ports, for example
                self._stranger = error.strerror
            if connection is not None:
                connection.close()
            return
        name = self.world.size_name
        with self._changed:
            reason = self._refused
            if version != (own := hello(self.world)[0]):
                reason = f"rank {number} has pytest-llmgpu {version}, rank 0 has {own}: install the same version"
            else:
                size, local_rank, node = rest  # another version may send other fields
                if size != self.world.size:
                    reason = f"rank {number} has {name}={size}, rank 0 has {name}={self.world.size}"
                elif not 0 <= number < size:
                    reason = f"a process is rank {number}: allowed are 0 to {size - 1}"
                elif number == 0 or number in self._joined:
                    reason = f"two processes are rank {number}"
                if reason is None:
                    self._joined[number] = Peer(connection, number, local_rank, node)
            self._refused = self._refused or reason
            self._changed.notify_all()
        if reason is not None:
            connection.close()


class EnvLauncher(LocalLauncher):
    """Starts rank 0 here, and each other rank through its process."""

    starts_ahead = False

    def __init__(self, peers: Peers, log_directory: Path) -> None:
        super().__init__(log_directory)
        self._world, self._peers = peers.world, peers.peers

    def start(self, environments: Sequence[Mapping[str, str]], on_batch: BatchListener) -> Sequence[Rank]:
        """Start one rank per environment, each by its process; RankFailedError if one of these was lost."""
        peers = self._peers[: len(environments) - 1]
        for peer in peers:
            if peer.lost is not None:
                failure = Failure(phase="load", rank=peer.number, message=f"{peer.lost} (node {peer.node})")
                raise RankFailedError("crashed", failure)
        ours = first = self.meeting()
        with contextlib.ExitStack() as started:
            inherited = []
            if self._world.key is not None and peers:
                # Rank 0 gets the socket: no other program can take its port, and each start has another one.
                meeting = started.enter_context(link.bound(self._world.address, 0))
                host, port = meeting.getsockname()[:2]
                inherited = [meeting.fileno()]
                ours = {"LLMGPU_RENDEZVOUS": f"tcp://{host}:{port}", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
                first = {**ours, **link.interface_of(host), "LLMGPU_RENDEZVOUS_SOCKET": str(meeting.fileno())}
            own = {**first, **environments[0]}
            rank = self.start_rank(0, own, on_batch=on_batch, inherited=inherited, node=0)
        others = zip(peers, environments[1:], strict=True)
        return [rank, *(peer.start({**ours, **added}, on_batch) for peer, added in others)]

    def take_output(self, but_for: Collection[Rank] = ()) -> dict[int, str]:
        """Return what the processes of each rank wrote since the last call."""
        asked = [(peer, peer.request("take_output")) for peer in self._peers if peer.lost is None]
        output = super().take_output(but_for)
        for peer, future in asked:
            with contextlib.suppress(ConnectionError, ValueError):
                if text := peer.wait(future, _REPLY_S):
                    output[peer.number] = text
        return output


class Devices:
    """The devices of all processes of the job; each of them is asked once."""

    def __init__(self, peers: Peers) -> None:
        """Ask nothing yet; the processes are there when the first machine is chosen."""
        self._peers = peers
        self._machines: dict[str, list[Machine]] = {}
        """Maps `--llmgpu-device` to the devices that each process can use."""
        self._nodes: list[Node] = []
        """The facts of each node, once they were compared."""
        self.notes: list[str] = []
        """Each difference between the nodes that is allowed, in words."""

    def machine(self, device: str, devices: int | None) -> Machine:
        """Choose the devices of a run, as `profiling.machine.machine` does on one machine.

        ValueError if there are fewer devices or processes, a node cannot use its devices, or nodes must not measure
        together.
        """
        peers = self._peers.peers
        if not peers:
            return msgspec.structs.replace(here.machine(device, devices), nodes=[0])
        if device not in self._machines:
            own = here.machine(device, None)
            if not self._nodes:
                firsts = {peer.node: peer for peer in reversed(peers) if peer.node}
                asked = [peer for _, peer in sorted(firsts.items())]
                found = [here.fingerprint(own.facts), *_answers(asked, here.fingerprint)]
                self.notes = here.check(found)
                self._nodes = found
            others = [own] * len(peers) if own.device == "cpu" else _answers(peers, here.machine, device, None)
            self._machines[device] = [own, *others]
        chosen = spread(devices, self._peers.places, self._machines[device])
        count = len(chosen.gpus_of_nodes)
        if count == 1:
            return chosen
        chosen = msgspec.structs.replace(chosen, node_facts=self._nodes[:count])
        indices = {gpu.uuid: gpu.index for gpu in here.environment(chosen).gpus}
        gpus = [msgspec.structs.replace(gpu, index=indices.get(gpu.uuid, gpu.index)) for gpu in chosen.gpus]
        return msgspec.structs.replace(chosen, gpus=gpus)

    def call_on(self, node: int) -> Callable[..., Any]:
        """Return what runs a function on a node, and raises OSError if it cannot."""
        return next(peer for peer in self._peers.peers if peer.node == node).call


def _answers(peers: Sequence[Peer], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of each process, asked at the same time; ValueError if one has another answer."""
    found = []
    for peer, future in [(one, one.request("call", fn, *args)) for one in peers]:
        try:
            found.append(peer.wait(future, _PROBE_S))
        except (ValueError, ConnectionError) as error:
            raise ValueError(f"node {peer.node}: {error}") from None
    return found


def spread(devices: int | None, places: Sequence[tuple[int, int]], machines: Sequence[Machine]) -> Machine:
    """Return the devices of the first processes, one for each; `machines` has those that each of them can use.

    `places` has the node of each process and its number among those of the node. ValueError if there are fewer
    processes, or their devices are not distinct devices of one kind.
    """
    wanted, processes = devices or len(places), len(places)
    if wanted > processes:
        remedy = f"start {wanted}, or pass at most {processes}"
        raise ValueError(f"--llmgpu-devices={wanted}, but the run has {plural(processes, 'process')}: {remedy}")
    first, nodes = machines[0], [node for node, _ in places]
    gpus = []
    for (node, local_rank), machine in list(zip(places, machines, strict=True))[:wanted]:
        if machine.device != first.device:
            raise ValueError(f"node {node} has device {machine.device}, node {nodes[0]} {first.device}")
        if machine.gpus:
            # Slurm may show each process its own GPU only.
            gpus.append(machine.gpus[local_rank % len(machine.gpus)])
            if [gpu.uuid for gpu in gpus].count(gpus[-1].uuid) > 1:
                remedy = "start one process for each GPU"
                raise ValueError(f"node {node} has {plural(len(machine.gpus), 'GPU')} for more ranks: {remedy}")
    alone = len(first.gpus) == 1 and nodes.count(nodes[0]) > 1
    return msgspec.structs.replace(first, devices=wanted, gpus=gpus, nodes=nodes, one_gpu_each=alone)
