from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from support import rank_functions as ranks
from support import worlds

from pytest_llmgpu.profiling import machine as local
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.ranks import env_launcher, link
from pytest_llmgpu.ranks.env_launcher import Devices, EnvLauncher, Peers, spread
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.link import Link, World, of_environment
from pytest_llmgpu.ranks.local import RankFailedError
from pytest_llmgpu.report.report import Gpu, Node

_LIMIT_S = 300


class _Started(NamedTuple):
    peers: Peers
    processes: dict[int, subprocess.Popen[str]]
    launcher: EnvLauncher
    group: Callable[[int], RankGroup]


def _ask(group: RankGroup, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    return group.ask(fn, *arguments, phase="forward", timeout_s=_LIMIT_S)


def _error(group: RankGroup, fn: Callable[..., Any], *arguments: Any, timeout_s: float = _LIMIT_S) -> RankFailedError:
    with pytest.raises(RankFailedError) as caught:
        group.ask(fn, *arguments, phase="forward", timeout_s=timeout_s)
    return caught.value


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops for some seconds loses no process."""
    for limit in ("_REPLY_S", "_END_S", "_GOODBYE_S"):
        monkeypatch.setattr(env_launcher, limit, _LIMIT_S)
    monkeypatch.setattr(env_launcher, "_LATE_S", 0.0)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Started]:
    """Three processes that srun started on three nodes; no test ends one of them."""
    with _start(tmp_path_factory.mktemp("slurm"), worlds.srun, per_node=1) as made:
        yield made


@contextlib.contextmanager
def _start(folder: Path, starter: Callable[..., dict[str, str]], *, per_node: int) -> Iterator[_Started]:
    port = {"LLMGPU_PORT": str(worlds.free_port())}
    variables = {rank: {**starter(rank, 3, per_node=per_node), **port} for rank in range(3)}
    peers = Peers(of_environment(variables.pop(0)))
    with worlds.served(folder, variables) as processes:
        peers.wait(_LIMIT_S)
        logs = folder / "rank0"
        logs.mkdir()
        launcher = EnvLauncher(peers, logs)
        groups: list[RankGroup] = []

        def group(count: int) -> RankGroup:
            if groups:
                groups[-1].kill()
            groups.append(RankGroup(launcher, [{"RANK": str(rank)} for rank in range(count)]))
            return groups[-1]

        try:
            yield _Started(peers, processes, launcher, group)
        finally:
            for made in groups[-1:]:
                made.kill()
            peers.close()


@pytest.mark.slow
def test_each_process_of_a_machine_runs_its_rank(tmp_path: Path) -> None:
    """Every rank is a child of its process, has its own variables, and no secret; the end is exit status 0."""
    with _start(tmp_path, worlds.torchrun, per_node=3) as machine:
        group = machine.group(3)
        assert _ask(group, ranks.variable, "RANK") == ["0", "1", "2"]
        assert _ask(group, ranks.variable, "LLMGPU_KEY") == [None] * 3
        parents = [parent for _, parent, _ in _ask(group, ranks.identity)]
        assert parents == [os.getpid(), machine.processes[1].pid, machine.processes[2].pid]
        _ask(group, ranks.finish_batches, 7)
        assert len(group.batches().latency_s) == 7, "batches arrive before the answer"
        group.close()
        machine.peers.close()
        printed = [process.communicate(timeout=_LIMIT_S)[0] for process in machine.processes.values()]
        assert (printed, [process.returncode for process in machine.processes.values()]) == (["", ""], [0, 0])


def test_failures_of_a_rank_elsewhere_are_those_of_a_rank_here(shared: _Started) -> None:
    """An exception, its traceback, an answer that does not unpickle; its output is taken once. Others wait."""
    group, launcher = shared.group(2), shared.launcher
    assert [parent for _, parent, _ in _ask(group, ranks.identity)] == [os.getpid(), shared.processes[1].pid]
    launcher.take_output()
    error = _error(group, ranks.on_rank, 1, ranks.break_down)
    assert (error.outcome, error.failure.rank) == ("error", 1)
    assert "in break_down" in (error.failure.log_tail or "")
    assert list(launcher.take_output()) == [1]
    assert launcher.take_output() == {}
    assert "does not unpickle" in _error(group, ranks.unreadable).failure.message
    assert _ask(group, ranks.add, 1, 1) == [2, 2]


def test_a_killed_rank_is_a_crash_of_its_node_and_starts_again(shared: _Started) -> None:
    """The failure has the signal and the node; the process that started the rank stays."""
    group = shared.group(3)
    error = _error(group, ranks.on_rank, 2, ranks.receive, signal.SIGKILL)
    assert (error.outcome, error.failure.rank, error.failure.signal) == ("crashed", 2, signal.SIGKILL)
    assert error.failure.message == "rank 2 ended with signal SIGKILL (node 2)"
    assert not group.alive
    assert _ask(shared.group(3), ranks.add, 1, 1) == [2, 2, 2]


@pytest.mark.slow
def test_a_lost_process_is_a_crash_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was ended by SIGTERM and one is stopped: their ranks end, and only groups that need them are refused."""
    with _start(tmp_path, worlds.torchrun, per_node=1) as nodes:
        group = nodes.group(3)
        pids = [pid for pid, *_ in _ask(group, ranks.identity)]
        nodes.processes[2].terminate()
        error = _error(group, ranks.on_rank, 1, ranks.hang)
        assert (error.outcome, error.failure.rank, error.failure.message[-8:]) == ("crashed", 2, "(node 2)")
        assert error.failure.signal is None, "the kernel's out-of-memory killer is not suspected"
        with pytest.raises(ConnectionError):
            nodes.peers.peers[1].call(os.getpid)
        with pytest.raises(RankFailedError, match=r"process of rank 2 was lost.*\(node 2\)"):
            nodes.launcher.start([{}, {}, {}], lambda *_: None)
        group = nodes.group(2)
        pids += [pid for pid, *_ in _ask(group, ranks.identity)]
        monkeypatch.setattr(env_launcher, "_REPLY_S", 0.5)
        nodes.processes[1].send_signal(signal.SIGSTOP)
        error = _error(group, ranks.on_rank, 1, ranks.hang, timeout_s=0.5)
        assert (error.outcome, error.failure.phase) == ("crashed", "forward")
        assert "no reply within 0.5 s (node 1)" in error.failure.message
        nodes.processes[1].send_signal(signal.SIGCONT)
        assert [nodes.processes[rank].wait(_LIMIT_S) for rank in (1, 2)] == [1, 128 + signal.SIGTERM]
    assert all(map(worlds.ends, pids))


def test_a_rank_elsewhere_shows_its_stacks(shared: _Started) -> None:
    """They are in the end of its log, as those of a rank here."""
    _, rank = shared.launcher.start([{"RANK": "0"}, {"RANK": "1"}], lambda *_: None)
    assert rank.submit(ranks.add, 1, 1).result(_LIMIT_S) == 2
    rank.submit(ranks.hang)
    assert any("in hang" in rank.stacks() for _ in range(300)), "the rank may come so far only after some time"
    rank.close(0)


def test_a_process_of_the_job_runs_functions(shared: _Started) -> None:
    """Results come back, and exceptions as an OSError with their message: a profiler of a node continues without it."""
    assert [peer.node for peer in shared.peers.peers] == [1, 2]
    calls = [Devices(shared.peers).call_on(node) for node in (1, 2)]
    assert [call(os.getpid) for call in calls] == [shared.processes[1].pid, shared.processes[2].pid]
    with pytest.raises(OSError, match="invalid literal"):
        calls[0](int, "x")


def _world(rank: int = 1, size: int = 2, *, per_node: int = 1) -> World:
    """Return a process of a job of its own: no other process has its port."""
    return of_environment(worlds.torchrun(rank, size, per_node=per_node, port=worlds.free_port()))


@pytest.fixture
def peers() -> Iterator[Peers]:
    """Two nodes with one process each, as rank 0's sees them; the other one has not joined."""
    with contextlib.closing(Peers(_world(0))) as made:
        yield made


@contextlib.contextmanager
def _joined(peers: Peers, hello: tuple[object, ...] | None = None, *, rank: int = 1) -> Iterator[Link]:
    """Join rank 0's process as that of another rank does."""
    world = msgspec.structs.replace(peers.world, rank=rank, node=rank)
    with contextlib.closing(link.connect(world, _LIMIT_S)) as connected:
        connected.send(hello or env_launcher.hello(world))
        yield connected


def test_missing_processes_are_named() -> None:
    """The message has WORLD_SIZE and the ranks that did not join; those that joined are sent home."""
    peers = Peers(_world(0, 4))
    with _joined(peers, rank=2) as joined:
        with peers._changed:
            assert peers._changed.wait_for(lambda: 2 in peers._joined, _LIMIT_S)
        with pytest.raises(ValueError, match=r"^WORLD_SIZE=4, but 2 processes joined within 0.1 s: rank 1, 3 "):
            peers.wait(0.1)
        peers.close()
        assert joined.receive() is None


_OWN, *_ = env_launcher.hello(_world())


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        ((_OWN, 1, 3, 0, 1), "rank 1 has WORLD_SIZE=3, rank 0 has WORLD_SIZE=2"),
        ((_OWN, 0, 2, 0, 0), "two processes are rank 0"),
        ((_OWN, 2, 2, 0, 0), "a process is rank 2: allowed are 0 to 1"),
        (("0.0", 1, "another field"), f"rank 1 has pytest-llmgpu 0.0, rank 0 has {_OWN}: install the same version"),
    ],
)
def test_a_process_that_does_not_belong_here_is_refused(peers: Peers, hello: tuple[object, ...], message: str) -> None:
    """Rank 0 names the difference, and closes the connection."""
    with _joined(peers, hello) as joined:
        with pytest.raises(ValueError, match=f"^{message}$"):
            peers.wait(_LIMIT_S)
        with pytest.raises((EOFError, OSError)):
            joined.receive()


@pytest.mark.slow
def test_a_process_with_another_secret_is_left_out(peers: Peers, tmp_path: Path) -> None:
    """It ends with an error at once; rank 0 waits for its rank, and names the reason where it is missing."""
    other = {**worlds.torchrun(1, 2, per_node=1, port=peers.world.port), "LLMGPU_KEY": "another secret of 16 bytes"}
    with worlds.served(tmp_path, {1: other}) as processes:
        assert processes[1].wait(_LIMIT_S) == 1
        with pytest.raises(ValueError, match="; a process tried to join, but the other end has another LLMGPU_KEY"):
            peers.wait(0.0)


def test_a_run_that_ends_at_once_says_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a machine that join late end with it, and do not look for it until their time limit."""
    monkeypatch.setattr(env_launcher, "_LATE_S", _LIMIT_S)
    peers = Peers(_world(0, per_node=2))

    def join() -> object:
        with _joined(peers) as joined:
            return joined.receive()

    with ThreadPoolExecutor() as pool:
        goodbye = pool.submit(join)
        peers.close()
        assert goodbye.result() is None


_GREETING = b"pytest-llmgpu\n"
_NUMBER = len(_GREETING) + 32


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(256),
        _NUMBER.to_bytes(4, "big") + bytes(_NUMBER),
        _NUMBER.to_bytes(4, "big") + _GREETING + bytes(32) + (32).to_bytes(4, "big") + bytes(32),
        _NUMBER.to_bytes(4, "big") + _GREETING + bytes(32) + (10**6).to_bytes(4, "big") + bytes(300),
    ],
    ids=["scan", "message", "proof", "long"],
)
def test_nobody_joins_or_ends_a_run_without_the_secret(peers: Peers, sent: bytes) -> None:
    """A stranger learns no proof, a process with the secret joins after it, and then nobody can connect."""
    received = b""
    with socket.create_connection(("127.0.0.1", peers.world.port)) as stranger:
        with contextlib.suppress(ConnectionError):  # it may be closed before everything is sent
            stranger.sendall(sent)
        with contextlib.suppress(ConnectionError):  # it is reset if it was closed with unread data
            while part := stranger.recv(4096):
                received += part
    assert received[4:].startswith(_GREETING)
    assert len(received) == 4 + _NUMBER, "the number to prove with, and nothing after it"
    with _joined(peers):
        peers.wait(_LIMIT_S)
        assert peers.places == [(0, 0), (1, 0)]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", peers.world.port))


def test_a_program_that_talks_to_the_socket_of_a_machine_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread ends with a traceback, and the run goes on."""
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with contextlib.closing(Peers(_world(0, per_node=2))) as peers:
        for number in range(16):
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(_LIMIT_S)
                other.connect(link._unix_name(peers.world))
                other.sendall((60).to_bytes(4, "big") + bytes([number]) * 60)
                with contextlib.suppress(ConnectionError):
                    assert other.recv(1) == b""
        with _joined(peers):
            peers.wait(_LIMIT_S)
    assert not raised


def test_strangers_that_take_all_files_do_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process joins after them."""
    monkeypatch.setattr(env_launcher, "_ACCEPT_AGAIN_S", 0.0)

    accept, refusals = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 3

    def flooded(listener: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", flooded)
    with contextlib.closing(Peers(_world(0))) as peers, _joined(peers):
        peers.wait(_LIMIT_S)


def test_a_stranger_that_is_too_slow_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is of the whole proof, however its bytes arrive; a process that is only late tries again."""
    monkeypatch.setattr(link, "_HANDSHAKE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        here, _ = listener.accept()
        other.sendall(b"\0")
        with pytest.raises(TimeoutError, match="in time"):
            Link(here, b"secret", listens=True)
    world = _world()
    with (
        socket.create_server(("127.0.0.1", world.port)),
        pytest.raises(ValueError, match=r"rank 0 was not found .* did not answer in time"),
    ):
        link.connect(world, 0.01)


def test_rank_0_that_never_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process waits for a limited time. Another user may have the same port of the machine."""
    world = _world()
    where = rf"rank 0 was not found at port {world.port} .* of 127.0.0.1 \(MASTER_ADDR\) within 0 s"
    with pytest.raises(ValueError, match=where):
        link.connect(world, 0)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 1)
    with pytest.raises(ValueError, match=r"rank 0 was not found at .* of localhost"):
        link.connect(_world(per_node=2), 0)


def test_a_process_does_not_connect_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP connects a socket to its own port if the system gives it that port and nobody listens there."""
    world = _world()
    create = functools.partial(socket.create_connection, source_address=("127.0.0.1", world.port))
    monkeypatch.setattr(socket, "create_connection", create)
    with pytest.raises(ValueError, match=r"rank 0 was not found .*Connection refused"):
        link.connect(world, 0)


def test_an_address_that_cannot_be_used_is_refused() -> None:
    """The message has the port and the variable that changes it; 192.0.2.1 is reserved for documentation (RFC 5737)."""
    world = _world(0)
    with link.bound("127.0.0.1", world.port) as other:
        assert other.getsockname() == ("127.0.0.1", world.port), "other interfaces never have the port"
        with pytest.raises(ValueError, match=rf"port {world.port} \(MASTER_PORT \+ 1\) of .* in use: set LLMGPU_PORT"):
            Peers(world)
    elsewhere = {**worlds.torchrun(0, 2, per_node=1), "MASTER_ADDR": "192.0.2.1"}
    with pytest.raises(ValueError, match=r"192\.0\.2\.1 \(MASTER_ADDR\): it is no address of the machine of rank 0"):
        Peers(of_environment(elsewhere))


def test_a_process_of_another_user_may_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel names the user at the other end of a Unix socket."""
    one, other = socket.socketpair()
    with one, other:
        Link(one, None, listens=True)
    one, other = socket.socketpair()
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 1)
    with one, other, pytest.raises(PermissionError, match="another user"):
        Link(one, None, listens=True)


def test_gloo_gets_the_interface_of_an_address() -> None:
    """The loopback interface has 127.0.0.1, and no interface has an address of the documentation."""
    assert link.interface_of("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert link.interface_of("192.0.2.1") == {}


class _Peer:
    def __init__(self, node: int) -> None:
        self.node = node
        self.answers: dict[Callable[..., Any], Any] = {local.machine: _machine(node), local.fingerprint: _facts(node)}

    def request(self, method: str, fn: Callable[..., Any], *_: Any) -> Future[Any]:
        assert method == "call"
        future: Future[Any] = Future()
        answer = self.answers.get(fn)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future

    def wait(self, future: Future[Any], _: float) -> Any:
        return future.result(0)


def _machine(node: int, gpus: int = 2) -> Machine:
    found = [Gpu(index=index, uuid=f"GPU-{node}-{index}", name="H") for index in range(gpus)]
    return Machine(device="cuda" if gpus else "cpu", devices=gpus or 1, gpus=found, facts=TorchFacts(version="2"))


def _facts(node: int, **changed: Any) -> Node:
    fields = {"python": "3.12", "platform": "Linux", "gpus": _machine(node).gpus, "versions": {"torch": "2.10"}}
    return Node(**{**fields, **changed})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is node 0 with two GPUs, and its torch is not probed."""
    monkeypatch.setattr(local, "machine", lambda *_: _machine(0))
    monkeypatch.setattr(local, "fingerprint", lambda *_: _facts(0))


def _places(nodes: Sequence[int]) -> list[tuple[int, int]]:
    return [(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)]


def _devices(*nodes: int) -> tuple[Devices, Any]:
    """Return the devices of processes on these nodes, and the processes but the first, as rank 0's sees them."""
    peers: Any = SimpleNamespace(peers=list(map(_Peer, nodes[1:])), places=_places(nodes))
    return Devices(peers), peers.peers


def _uuids(machine: Machine) -> list[str]:
    return [gpu.uuid for gpu in machine.gpus]


@pytest.mark.usefixtures("here")
def test_each_process_has_the_gpu_of_its_number_on_the_node() -> None:
    """GPUs are in the order of the ranks, with indices among those of all nodes; fewer are those of the first."""
    devices, _ = _devices(0, 0, 1, 1)
    machine = devices.machine("auto", None)
    assert _uuids(machine) == ["GPU-0-0", "GPU-0-1", "GPU-1-0", "GPU-1-1"]
    assert [gpu.index for gpu in machine.gpus] == [0, 1, 2, 3]
    assert [len(gpus) for gpus in machine.gpus_of_nodes] == [2, 2]
    assert (machine.devices, len(machine.node_facts), machine.one_gpu_each) == (4, 2, False)
    assert machine.describe() == "4 x H (cuda) on 2 nodes"
    alone = devices.machine("auto", 2)
    assert (_uuids(alone), alone.node_facts, alone.gpus_of_nodes) == (["GPU-0-0", "GPU-0-1"], [], [alone.gpus])


def test_processes_may_see_their_own_gpu_only() -> None:
    """Slurm's --gpus-per-task shows each process one GPU with index 0."""
    machines = [msgspec.structs.replace(_machine(0), devices=1, gpus=[gpu]) for gpu in _machine(0).gpus]
    machine = spread(None, _places([0, 0]), machines)
    assert (_uuids(machine), machine.one_gpu_each) == (["GPU-0-0", "GPU-0-1"], True)


@pytest.mark.parametrize(
    ("devices", "nodes", "machines", "message"),
    [
        (8, [0, 0, 1, 1], [_machine(0), _machine(0), _machine(1), _machine(1)], "--llmgpu-devices=8, .* 4 processes"),
        (None, [0, 1], [_machine(0), _machine(1, gpus=0)], "node 1 has device cpu, node 0 cuda"),
        (None, [0, 0, 0], [_machine(0)] * 3, "node 0 has 2 GPUs for more ranks"),
    ],
)
def test_devices_that_are_not_there_are_refused(
    devices: int | None, nodes: Sequence[int], machines: Sequence[Machine], message: str
) -> None:
    """The message has the number that is there."""
    with pytest.raises(ValueError, match=message):
        spread(devices, _places(nodes), machines)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("asked", "answer", "message"),
    [
        ("fingerprint", _facts(1, driver="570.1"), None),
        (
            "fingerprint",
            _facts(1, versions={"torch": "2.9"}),
            r"the nodes differ: torch 2\.10 on node 0, 2\.9 on node 1",
        ),
        ("machine", ValueError("no GPU found"), "^node 1: no GPU found$"),
        ("fingerprint", ConnectionError("it ended"), "^node 1: it ended$"),
    ],
)
def test_nodes_that_cannot_measure_together_are_refused(asked: str, answer: object, message: str | None) -> None:
    """The message has the node and what differs; other differences are notes."""
    devices, (peer,) = _devices(0, 1)
    peer.answers[getattr(local, asked)] = answer
    if message is None:
        devices.machine("auto", None)
        assert len(devices.notes) == 1
        return
    with pytest.raises(ValueError, match=message):
        devices.machine("auto", None)
