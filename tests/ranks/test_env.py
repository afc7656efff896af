from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import signal
import socket
import subprocess
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import rank_functions as ranks
from support import worlds

from pytest_llmgpu.ranks import env, wire
from pytest_llmgpu.ranks.env import EnvLauncher, Peers
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.protocol import RankFailedError
from pytest_llmgpu.ranks.wire import Connection

_LIMIT_S = 300


class _Started(NamedTuple):
    peers: Peers
    processes: dict[int, subprocess.Popen[str]]
    launcher: EnvLauncher
    group: Callable[[int], RankGroup]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops for some seconds loses no process."""
    for limit in ("_REPLY_S", "_KILL_S", "_CLOSE_S", "_GOODBYE_S"):
        monkeypatch.setattr(env, limit, _LIMIT_S)
    monkeypatch.setattr(env, "_LATE_S", 0.0)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Started]:
    """Three processes that srun started on three nodes; no test ends one of them."""
    with _start(tmp_path_factory.mktemp("slurm"), worlds.srun, per_node=1) as made:
        yield made


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[_Started]:
    """Three processes that torchrun started on three nodes."""
    with _start(tmp_path, worlds.torchrun, per_node=1) as made:
        yield made


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[_Started]:
    """Three processes that torchrun started on one machine."""
    with _start(tmp_path, worlds.torchrun, per_node=3) as made:
        yield made


@contextlib.contextmanager
def _start(folder: Path, starter: Callable[..., dict[str, str]], *, per_node: int) -> Iterator[_Started]:
    port = {"LLMGPU_PORT": str(worlds.free_port())}
    variables = {rank: {**starter(rank, 3, per_node=per_node), **port} for rank in range(3)}
    peers = Peers(worlds.world_of(variables.pop(0)))
    with worlds.served(folder, variables) as processes:
        peers.wait(_LIMIT_S)
        logs = folder / "rank0"
        logs.mkdir()
        launcher = peers.launcher(logs)
        groups: list[RankGroup] = []

        def group(count: int) -> RankGroup:
            numbers = [{"RANK": str(rank)} for rank in range(count)]
            groups.append(RankGroup(launcher, numbers))
            return groups[-1]

        try:
            yield _Started(peers, processes, launcher, group)
        finally:
            for made in groups:
                made.kill()
            peers.close()


@pytest.mark.slow
def test_each_process_runs_its_rank(machine: _Started) -> None:
    """Every rank is a child of its process, has its own variables, and no secret; the end is exit status 0."""
    group = machine.group(3)
    assert group.ask(ranks.variable, "RANK", phase="forward", timeout_s=_LIMIT_S) == ["0", "1", "2"]
    assert group.ask(ranks.variable, "LLMGPU_KEY", phase="forward", timeout_s=_LIMIT_S) == [None] * 3
    parents = group.ask(ranks.parent, phase="forward", timeout_s=_LIMIT_S)
    assert parents == [os.getpid(), machine.processes[1].pid, machine.processes[2].pid]
    group.ask(ranks.finish_batches, 7, phase="forward", timeout_s=_LIMIT_S)
    assert len(group.batches().latency_s) == 7, "batches arrive before the answer"
    group.close()
    machine.peers.close()
    printed = [process.communicate(timeout=_LIMIT_S)[0] for process in machine.processes.values()]
    assert (printed, [process.returncode for process in machine.processes.values()]) == (["", ""], [0, 0])


def test_a_smaller_group_uses_the_first_processes(shared: _Started) -> None:
    """The others wait."""
    group = shared.group(2)
    parents = group.ask(ranks.parent, phase="forward", timeout_s=_LIMIT_S)
    assert parents == [os.getpid(), shared.processes[1].pid]


def test_failures_of_a_rank_elsewhere_are_those_of_a_rank_here(shared: _Started) -> None:
    """An exception, its traceback, an answer that does not unpickle; its output is taken once."""
    group = shared.group(2)
    launcher = shared.launcher
    launcher.take_output()
    with pytest.raises(RankFailedError) as caught:
        group.ask(ranks.fail_on_rank_1, phase="forward", timeout_s=_LIMIT_S)
    assert (caught.value.outcome, caught.value.failure.rank) == ("error", 1)
    assert "in fail_on_rank_1" in (caught.value.failure.log_tail or "")
    assert list(launcher.take_output()) == [1]
    assert launcher.take_output() == {}
    with pytest.raises(RankFailedError, match="does not unpickle"):
        group.ask(ranks.unreadable, phase="forward", timeout_s=_LIMIT_S)
    assert group.ask(ranks.add, 1, 1, phase="forward", timeout_s=_LIMIT_S) == [2, 2]


def test_a_killed_rank_is_a_crash_of_its_node_and_starts_again(shared: _Started) -> None:
    """The failure has the signal and the node; the process that started the rank stays."""
    group = shared.group(3)
    with pytest.raises(RankFailedError) as caught:
        group.ask(ranks.die_on_rank, 2, phase="forward", timeout_s=_LIMIT_S)
    failure = caught.value.failure
    assert (caught.value.outcome, failure.rank, failure.signal) == ("crashed", 2, signal.SIGKILL)
    assert failure.message == "rank 2 ended with signal SIGKILL (node 2)"
    assert not group.alive
    group.kill()
    again = shared.group(3)
    assert again.ask(ranks.add, 1, 1, phase="forward", timeout_s=_LIMIT_S) == [2, 2, 2]


@pytest.mark.slow
def test_a_killed_process_is_a_crash_of_its_node(nodes: _Started) -> None:
    """Its rank ends with it; groups that do not need it run on, and those that need it are refused."""
    group = nodes.group(3)
    pids = [pid for pid, _ in group.ask(ranks.identity, phase="forward", timeout_s=_LIMIT_S)]
    nodes.processes[2].kill()
    with pytest.raises(RankFailedError) as caught:
        group.ask(ranks.hang_on_rank_1, phase="forward", timeout_s=_LIMIT_S)
    assert (caught.value.outcome, caught.value.failure.rank) == ("crashed", 2)
    assert "(node 2)" in caught.value.failure.message
    group.kill()
    assert all(map(worlds.ends, pids))
    with pytest.raises(ConnectionError):
        nodes.peers.places[2].call(os.getpid).result(_LIMIT_S)
    with pytest.raises(RankFailedError, match=r"process of rank 2 was lost.*\(node 2\)"):
        nodes.group(3)
    assert nodes.group(2).ask(ranks.add, 1, 1, phase="forward", timeout_s=_LIMIT_S) == [2, 2]


@pytest.mark.slow
def test_a_stopped_process_is_a_crash_at_the_time_limit(nodes: _Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not reply is lost; when it runs again, it ends its rank and itself."""
    group = nodes.group(2)
    pid = group.ask(ranks.identity, phase="forward", timeout_s=_LIMIT_S)[1][0]
    monkeypatch.setattr(env, "_REPLY_S", 0.5)
    nodes.processes[1].send_signal(signal.SIGSTOP)
    with pytest.raises(RankFailedError) as caught:
        group.ask(ranks.hang_on_rank_1, phase="forward", timeout_s=0.5)
    assert (caught.value.outcome, caught.value.failure.phase) == ("crashed", "forward")
    assert "no reply within 0.5 s (node 1)" in caught.value.failure.message
    group.kill()
    nodes.processes[1].send_signal(signal.SIGCONT)
    assert worlds.ends(pid)
    assert nodes.processes[1].wait(_LIMIT_S) == 1


def test_a_time_limit_has_the_stacks_of_all_ranks(shared: _Started) -> None:
    """A rank that hangs elsewhere is a time-out as here."""
    group = shared.group(2)
    with pytest.raises(RankFailedError) as caught:
        group.ask(ranks.hang_on_rank_1, phase="forward", timeout_s=0.5)
    assert caught.value.outcome == "timeout"
    group.kill()
    _, rank = shared.launcher.start([{"RANK": "0"}, {"RANK": "1"}], lambda *_: None)
    assert rank.submit(ranks.add, 1, 1).result(_LIMIT_S) == 2
    rank.submit(ranks.hang_on_rank_1)
    for _ in range(300):  # the rank may not have come so far
        if "in hang_on_rank_1" in rank.stacks():
            break
    assert "in hang_on_rank_1" in rank.stacks()
    rank.kill()


@pytest.mark.slow
def test_a_process_ends_with_rank_0_and_by_sigterm(nodes: _Started) -> None:
    """Without a goodbye its exit status is not 0. SIGTERM is how Slurm and torchrun end a job. Its rank ends, too."""
    pids = nodes.group(3).ask(ranks.identity, phase="forward", timeout_s=_LIMIT_S)
    nodes.peers.places[1]._connection.close()  # type: ignore[attr-defined]  # as the kernel does for a killed process
    nodes.processes[2].terminate()
    assert [nodes.processes[rank].wait(_LIMIT_S) for rank in (1, 2)] == [1, 128 + signal.SIGTERM]
    assert all(worlds.ends(pid) for pid, _ in pids[1:])


def test_a_place_runs_functions(shared: _Started) -> None:
    """Results come back, and exceptions as their message."""
    places = shared.peers.places
    assert [place.node for place in places] == [0, 1, 2]
    found = [place.call(os.getpid).result(_LIMIT_S) for place in places]
    assert found == [os.getpid(), shared.processes[1].pid, shared.processes[2].pid]
    for place in places[:2]:
        with pytest.raises(ValueError, match="invalid literal"):
            place.call(int, "x").result(_LIMIT_S)


@pytest.mark.slow
def test_missing_processes_are_named(tmp_path: Path) -> None:
    """The message has WORLD_SIZE and the ranks that did not join."""
    port = worlds.free_port()
    world = [worlds.torchrun(rank, 4, per_node=1, port=port) for rank in range(4)]
    peers = Peers(worlds.world_of(world[0]))
    with worlds.served(tmp_path, {2: world[2]}) as processes:
        with peers._changed:
            assert peers._changed.wait_for(lambda: 2 in peers._joined, _LIMIT_S)
        with pytest.raises(ValueError, match=r"^WORLD_SIZE=4, but 2 processes joined within 0.1 s: rank 1, 3 "):
            peers.wait(0.1)
        peers.close()
        assert processes[2].wait(_LIMIT_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"LLMGPU_KEY": "another secret of 16 bytes"}, "another LLMGPU_KEY"),
        ({"WORLD_SIZE": "3"}, "rank 1 has WORLD_SIZE=3, rank 0 has WORLD_SIZE=2"),
        ({"RANK": "0"}, "two processes are rank 0"),
    ],
)
def test_a_process_that_does_not_belong_here_is_refused_at_once(
    tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    """Rank 0 names the difference, and the other process ends with an error."""
    port = worlds.free_port()
    peers = Peers(worlds.world_of(worlds.torchrun(0, 2, per_node=1, port=port)))
    other = {**worlds.torchrun(1, 2, per_node=1, port=port), **changed}
    with worlds.served(tmp_path, {1: other}) as processes:
        with pytest.raises(ValueError, match=message):
            peers.wait(_LIMIT_S)
        assert processes[1].wait(_LIMIT_S) == 1
    peers.close()


@pytest.mark.slow
def test_a_run_that_ends_at_once_says_goodbye(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that join late end with it, and do not look for it until their time limit."""
    monkeypatch.setattr(env, "_LATE_S", _LIMIT_S)
    port = worlds.free_port()
    peers = Peers(worlds.world_of(worlds.torchrun(0, 2, per_node=2, port=port)))
    with worlds.served(tmp_path, {1: worlds.torchrun(1, 2, per_node=2, port=port)}) as processes:
        peers.close()
        assert processes[1].wait(_LIMIT_S) == 0


@pytest.mark.parametrize(
    ("first", "limit_s", "message"),
    [
        (b"", 0.1, "1 process joined within"),
        (b"GET / HTTP/1.1\r\n", 0.1, "1 process joined within"),
        (b"pytest-llmgpu\n", _LIMIT_S, "another LLMGPU_KEY"),
    ],
    ids=["message", "scan", "greeting"],
)
def test_nobody_joins_without_the_secret(first: bytes, limit_s: float, message: str) -> None:
    """What a stranger sends is closed unread, and it learns no proof; the run waits on where it is another program."""
    port = worlds.free_port()
    peers = Peers(worlds.world_of(worlds.torchrun(0, 2, per_node=1, port=port)))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        with contextlib.suppress(ConnectionError):  # it may be closed before everything is sent
            stranger.sendall(first)
            Connection(stranger).send(wire.Hello(env.version(), 1, 2, 0, 1))
            stranger.sendall(bytes(256))
        received = b"".join(iter(lambda: stranger.recv(4096) if _open(stranger) else b"", b""))
    assert len(received) == len(b"pytest-llmgpu\n") + 32, "the number to prove with, and nothing after it"
    assert peers._joined == {}
    with pytest.raises(ValueError, match=message):
        peers.wait(limit_s)
    peers.close()


def test_strangers_that_take_all_files_do_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process joins after them."""
    monkeypatch.setattr(env, "_ACCEPT_AGAIN_S", 0.0)
    port = worlds.free_port()

    class Flooded(socket.socket):
        refusals = 3

        def accept(self) -> tuple[socket.socket, object]:
            self.refusals -= 1
            if self.refusals >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listener = Flooded(fileno=wire.bound("127.0.0.1", port).detach())
    peers = Peers(worlds.world_of(worlds.torchrun(0, 2, per_node=1, port=port)), listener)
    joined = wire.connect(worlds.world_of(worlds.torchrun(1, 2, per_node=1, port=port)), _LIMIT_S)
    joined.send(wire.Hello(env.version(), 1, 2, 0, 1))
    peers.wait(_LIMIT_S)
    assert [place.local_rank for place in peers.places] == [0, 0]
    peers.close()
    joined.close()


def test_a_stranger_that_sends_byte_by_byte_is_left_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is of the whole proof: each byte alone arrives in time."""
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(wire, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as stranger:
        here, _ = listener.accept()
        monkeypatch.setattr(Connection, "exactly", _byte_by_byte(Connection.exactly))
        stranger.sendall(b"pytest-llmgpu\n" + bytes(64))
        with here, pytest.raises(TimeoutError, match="in time"):
            Connection(here).authenticate(b"secret", listens=True)


def _byte_by_byte(exactly: Callable[[Connection, int], bytearray]) -> Callable[[Connection, int], bytearray]:
    return lambda connection, size_bytes: bytearray(b"").join(exactly(connection, 1) for _ in range(size_bytes))


def test_a_process_tries_again_where_rank_0_is_too_busy_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of one proof is shorter than the time that rank 0's process may take."""
    port, authenticate = worlds.free_port(), Connection.authenticate
    tried: list[Connection] = []

    def first_in_vain(connection: Connection, key: bytes | None, *, listens: bool) -> None:
        if not listens and not tried:
            tried.append(connection)
            raise TimeoutError("timed out")
        authenticate(connection, key, listens=listens)

    monkeypatch.setattr(Connection, "authenticate", first_in_vain)
    peers = Peers(worlds.world_of(worlds.torchrun(0, 2, per_node=1, port=port)))
    wire.connect(worlds.world_of(worlds.torchrun(1, 2, per_node=1, port=port)), _LIMIT_S).close()
    peers.close()


def test_a_process_does_not_connect_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP connects a socket to its own port if the system gives it that port and nobody listens there."""
    port = worlds.free_port()
    create = functools.partial(socket.create_connection, source_address=("127.0.0.1", port))
    monkeypatch.setattr(socket, "create_connection", create)
    world = worlds.world_of(worlds.torchrun(1, 2, per_node=1, port=port))
    with pytest.raises(ValueError, match=r"rank 0 was not found .*Connection refused"):
        wire.connect(world, 0)


def _open(stranger: socket.socket) -> bool:
    """Return whether data may follow; a connection that was closed with unread data is reset."""
    with contextlib.suppress(ConnectionError):
        return bool(stranger.recv(1, socket.MSG_PEEK))
    return False


def test_a_port_in_use_is_refused() -> None:
    """The message has the port and the variable that changes it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} \(MASTER_PORT \+ 1\) of .* is in use: set LLMGPU_PORT"):
            Peers(worlds.world_of(worlds.torchrun(0, 2, per_node=1, port=port)))


def test_an_address_of_another_machine_is_refused() -> None:
    """192.0.2.1 is reserved for documentation (RFC 5737)."""
    variables = {**worlds.torchrun(0, 2, per_node=1), "MASTER_ADDR": "192.0.2.1"}
    with pytest.raises(ValueError, match=r"192\.0\.2\.1 \(MASTER_ADDR\): it is no address of the machine of rank 0"):
        Peers(worlds.world_of(variables))


def test_rank_0_listens_on_its_address_only_and_until_all_have_joined(shared: _Started) -> None:
    """Other interfaces of the machine never have the port, and later nobody can connect."""
    listener = wire.bound("127.0.0.1", 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", shared.peers.world.port))


def test_rank_0_that_never_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process waits for a limited time."""
    world = worlds.world_of(worlds.torchrun(1, 2, per_node=1, port=worlds.free_port()))
    with pytest.raises(
        ValueError, match=rf"rank 0 was not found at port {world.port} .* of 127.0.0.1 \(MASTER_ADDR\) within 0 s"
    ):
        wire.connect(world, 0)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 1)
    alone = worlds.world_of(worlds.torchrun(1, 2, per_node=2, port=worlds.free_port()))
    with pytest.raises(ValueError, match=r"rank 0 was not found at .* of localhost"):
        wire.connect(alone, 0)


def test_a_process_of_another_user_may_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel names the user at the other end of a Unix socket."""
    here, there = socket.socketpair()
    with here, there:
        Connection(here).authenticate(None, listens=True)
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 1)
        with pytest.raises(PermissionError, match="another user"):
            Connection(here).authenticate(None, listens=True)


def test_gloo_gets_the_interface_of_an_address() -> None:
    """The loopback interface has 127.0.0.1, and no interface has an address of the documentation."""
    assert wire.interface_of("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert wire.interface_of("192.0.2.1") == {}
