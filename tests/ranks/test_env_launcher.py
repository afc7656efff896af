from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from support import rank_functions as ranks
from support import worlds

from pytest_llmgpu.profiling import machine as local
from pytest_llmgpu.profiling.machine import Machine, NodeFacts, TorchFacts
from pytest_llmgpu.ranks import env_launcher, link
from pytest_llmgpu.ranks.env_launcher import Devices, EnvLauncher, JobProcess, Peers, spread
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.job_variables import of_environment
from pytest_llmgpu.ranks.link import Link
from pytest_llmgpu.ranks.local import RankFailedError
from pytest_llmgpu.report.report import Gpu, Node

_LIMIT_S = 300


class _Started(NamedTuple):
    peers: Peers
    processes: dict[int, subprocess.Popen[str]]
    launcher: EnvLauncher
    group: Callable[[int], RankGroup]

    def ask(self, size: int, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.group(size).ask(fn, *arguments, phase="forward", timeout_s=_LIMIT_S)


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


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[_Started]:
    """Three processes that torchrun started on three nodes."""
    with _start(tmp_path, worlds.torchrun, per_node=1) as made:
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
        ask = functools.partial(group.ask, phase="forward", timeout_s=_LIMIT_S)
        assert ask(ranks.variable, "RANK") == ["0", "1", "2"]
        assert ask(ranks.variable, "LLMGPU_KEY") == [None] * 3
        parents = [parent for _, parent, _ in ask(ranks.identity)]
        assert parents == [os.getpid(), machine.processes[1].pid, machine.processes[2].pid]
        ask(ranks.finish_batches, 7)
        assert len(group.batches().latency_s) == 7, "batches arrive before the answer"
        group.close()
        machine.peers.close()
        printed = [process.communicate(timeout=_LIMIT_S)[0] for process in machine.processes.values()]
        assert (printed, [process.returncode for process in machine.processes.values()]) == (["", ""], [0, 0])


def test_failures_of_a_rank_elsewhere_are_those_of_a_rank_here(shared: _Started) -> None:
    """An exception, its traceback, an answer that does not unpickle; its output is taken once. Others wait."""
    group, launcher = shared.group(2), shared.launcher
    ask = functools.partial(group.ask, phase="forward", timeout_s=_LIMIT_S)
    assert [parent for _, parent, _ in ask(ranks.identity)] == [os.getpid(), shared.processes[1].pid]
    launcher.take_output()
    with pytest.raises(RankFailedError) as caught:
        ask(ranks.on_rank, 1, ranks.break_down)
    assert (caught.value.outcome, caught.value.failure.rank) == ("error", 1)
    assert "in break_down" in (caught.value.failure.log_tail or "")
    assert list(launcher.take_output()) == [1]
    assert launcher.take_output() == {}
    with pytest.raises(RankFailedError, match="does not unpickle"):
        ask(ranks.unreadable)
    assert ask(ranks.add, 1, 1) == [2, 2]


def test_a_killed_rank_is_a_crash_of_its_node_and_starts_again(shared: _Started) -> None:
    """The failure has the signal and the node; the process that started the rank stays."""
    group = shared.group(3)
    with pytest.raises(RankFailedError) as caught:
        group.ask(ranks.on_rank, 2, ranks.receive, signal.SIGKILL, phase="forward", timeout_s=_LIMIT_S)
    failure = caught.value.failure
    assert (caught.value.outcome, failure.rank, failure.signal) == ("crashed", 2, signal.SIGKILL)
    assert failure.message == "rank 2 ended with signal SIGKILL (node 2)"
    assert not group.alive
    assert shared.ask(3, ranks.add, 1, 1) == [2, 2, 2]


@pytest.mark.slow
def test_a_killed_process_is_a_crash_of_its_node(nodes: _Started) -> None:
    """Its rank ends with it; groups that do not need it run on, and those that need it are refused."""
    group = nodes.group(3)
    pids = [pid for pid, *_ in group.ask(ranks.identity, phase="forward", timeout_s=_LIMIT_S)]
    nodes.processes[2].kill()
    with pytest.raises(RankFailedError) as caught:
        group.ask(ranks.on_rank, 1, ranks.hang, phase="forward", timeout_s=_LIMIT_S)
    assert (caught.value.outcome, caught.value.failure.rank) == ("crashed", 2)
    assert "(node 2)" in caught.value.failure.message
    group.kill()
    assert all(map(worlds.ends, pids))
    with pytest.raises(ConnectionError):
        nodes.peers.processes[2].call(os.getpid).result(_LIMIT_S)
    with pytest.raises(RankFailedError, match=r"process of rank 2 was lost.*\(node 2\)"):
        nodes.launcher.start([{}, {}, {}], lambda *_: None)
    assert nodes.ask(2, ranks.add, 1, 1) == [2, 2]


@pytest.mark.slow
def test_a_process_ends_with_rank_0_or_by_sigterm_and_a_stopped_one_is_a_crash(
    nodes: _Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a goodbye the exit status is not 0. SIGTERM is how Slurm and torchrun end a job. Ranks end, too."""
    group = nodes.group(3)
    pids = [pid for pid, *_ in group.ask(ranks.identity, phase="forward", timeout_s=_LIMIT_S)]
    monkeypatch.setattr(env_launcher, "_REPLY_S", 0.5)
    nodes.processes[1].send_signal(signal.SIGSTOP)
    with pytest.raises(RankFailedError) as caught:
        group.ask(ranks.on_rank, 1, ranks.hang, phase="forward", timeout_s=0.5)
    assert (caught.value.outcome, caught.value.failure.phase) == ("crashed", "forward")
    assert "no reply within 0.5 s (node 1)" in caught.value.failure.message
    nodes.processes[2].terminate()
    nodes.processes[1].send_signal(signal.SIGCONT)
    assert [nodes.processes[rank].wait(_LIMIT_S) for rank in (1, 2)] == [1, 128 + signal.SIGTERM]
    assert all(map(worlds.ends, pids[1:]))


def test_a_time_limit_has_the_stacks_of_all_ranks(shared: _Started) -> None:
    """A rank that hangs elsewhere is a time-out as here."""
    group = shared.group(2)
    with pytest.raises(RankFailedError) as caught:
        group.ask(ranks.on_rank, 1, ranks.hang, phase="forward", timeout_s=0.5)
    assert caught.value.outcome == "timeout"
    group.kill()
    _, rank = shared.launcher.start([{"RANK": "0"}, {"RANK": "1"}], lambda *_: None)
    assert rank.submit(ranks.add, 1, 1).result(_LIMIT_S) == 2
    rank.submit(ranks.hang)
    for _ in range(300):  # the rank may not have come so far
        if "in hang" in rank.stacks():
            break
    assert "in hang" in rank.stacks()
    rank.close(0)


def test_a_process_of_the_job_runs_functions(shared: _Started) -> None:
    """Results come back, and exceptions as their message."""
    processes = shared.peers.processes
    assert [process.node for process in processes] == [0, 1, 2]
    found = [process.call(os.getpid).result(_LIMIT_S) for process in processes[1:]]
    assert found == [shared.processes[1].pid, shared.processes[2].pid]
    with pytest.raises(ValueError, match="invalid literal"):
        processes[1].call(int, "x").result(_LIMIT_S)


def _peers(port: int, size: int = 2, *, per_node: int = 1) -> Peers:
    return Peers(of_environment(worlds.torchrun(0, size, per_node=per_node, port=port)))


@pytest.mark.slow
def test_missing_processes_are_named(tmp_path: Path) -> None:
    """The message has WORLD_SIZE and the ranks that did not join."""
    port = worlds.free_port()
    peers = _peers(port, 4)
    with worlds.served(tmp_path, {2: worlds.torchrun(2, 4, per_node=1, port=port)}) as processes:
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
        ({"LLMGPU_KEY": "another secret of 16 bytes"}, "a process tried to join, but the other end has another LLMGPU"),
        ({"WORLD_SIZE": "3"}, "rank 1 has WORLD_SIZE=3, rank 0 has WORLD_SIZE=2"),
        ({"RANK": "0"}, "two processes are rank 0"),
    ],
)
def test_a_process_that_does_not_belong_here_is_refused(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    """Rank 0 names the difference, and the other process ends with an error at once."""
    port = worlds.free_port()
    peers = _peers(port)
    other = {**worlds.torchrun(1, 2, per_node=1, port=port), **changed}
    with worlds.served(tmp_path, {1: other}) as processes:
        assert processes[1].wait(_LIMIT_S) == 1
        with pytest.raises(ValueError, match=message):
            peers.wait(0.0 if "LLMGPU_KEY" in changed else _LIMIT_S)
    peers.close()


@pytest.mark.slow
def test_a_run_that_ends_at_once_says_goodbye(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that join late end with it, and do not look for it until their time limit."""
    monkeypatch.setattr(env_launcher, "_LATE_S", _LIMIT_S)
    port = worlds.free_port()
    peers = _peers(port, per_node=2)
    with worlds.served(tmp_path, {1: worlds.torchrun(1, 2, per_node=2, port=port)}) as processes:
        peers.close()
        assert processes[1].wait(_LIMIT_S) == 0


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
def test_nobody_joins_or_ends_a_run_without_the_secret(sent: bytes) -> None:
    """What a stranger sends is closed unread, it learns no proof, and a process with the secret joins after it."""
    port = worlds.free_port()
    peers = _peers(port)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        with contextlib.suppress(ConnectionError):  # it may be closed before everything is sent
            stranger.sendall(sent)
        received = b"".join(iter(lambda: _received(stranger), b""))
    assert received[4:].startswith(_GREETING)
    assert len(received) == 4 + _NUMBER, "the number to prove with, and nothing after it"
    world = of_environment(worlds.torchrun(1, 2, per_node=1, port=port))
    joined = link.connect(world, _LIMIT_S)
    joined.send(env_launcher.hello(world))
    peers.wait(_LIMIT_S)
    assert [process.local_rank for process in peers.processes] == [0, 0]
    peers.close()
    joined.close()


def _received(stranger: socket.socket) -> bytes:
    """Return what comes next; a connection that was closed with unread data is reset."""
    with contextlib.suppress(ConnectionError):
        return stranger.recv(4096)
    return b""


def test_strangers_that_take_all_files_do_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process joins after them."""
    monkeypatch.setattr(env_launcher, "_ACCEPT_AGAIN_S", 0.0)

    class Flooded(socket.socket):
        refusals = 3

        def accept(self) -> tuple[socket.socket, object]:
            self.refusals -= 1
            if self.refusals >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    bound = link.bound
    monkeypatch.setattr(link, "bound", lambda *address: Flooded(fileno=bound(*address).detach()))
    port = worlds.free_port()
    peers, world = _peers(port), of_environment(worlds.torchrun(1, 2, per_node=1, port=port))
    joined = link.connect(world, _LIMIT_S)
    joined.send(env_launcher.hello(world))
    peers.wait(_LIMIT_S)
    peers.close()
    joined.close()


def test_a_stranger_that_is_too_slow_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is of the whole proof, however its bytes arrive; a process that is only late tries again."""
    monkeypatch.setattr(link, "_HANDSHAKE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        here, _ = listener.accept()
        other.sendall(b"\0")
        with pytest.raises(TimeoutError, match="in time"):
            Link(here, b"secret", listens=True)
    port = worlds.free_port()
    with socket.create_server(("127.0.0.1", port)):
        world = of_environment(worlds.torchrun(1, 2, per_node=1, port=port))
        with pytest.raises(ValueError, match=r"rank 0 was not found .* did not answer in time"):
            link.connect(world, 0.01)


def test_a_process_does_not_connect_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP connects a socket to its own port if the system gives it that port and nobody listens there."""
    port = worlds.free_port()
    create = functools.partial(socket.create_connection, source_address=("127.0.0.1", port))
    monkeypatch.setattr(socket, "create_connection", create)
    world = of_environment(worlds.torchrun(1, 2, per_node=1, port=port))
    with pytest.raises(ValueError, match=r"rank 0 was not found .*Connection refused"):
        link.connect(world, 0)


def test_an_address_that_cannot_be_used_is_refused() -> None:
    """The message has the port and the variable that changes it; 192.0.2.1 is reserved for documentation (RFC 5737)."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} \(MASTER_PORT \+ 1\) of .* is in use: set LLMGPU_PORT"):
            _peers(port)
    variables = {**worlds.torchrun(0, 2, per_node=1), "MASTER_ADDR": "192.0.2.1"}
    with pytest.raises(ValueError, match=r"192\.0\.2\.1 \(MASTER_ADDR\): it is no address of the machine of rank 0"):
        Peers(of_environment(variables))


def test_rank_0_listens_on_its_address_only_and_until_all_have_joined(shared: _Started) -> None:
    """Other interfaces of the machine never have the port, and later nobody can connect."""
    with link.bound("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", shared.peers.world.port))


def test_rank_0_that_never_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process waits for a limited time."""
    world = of_environment(worlds.torchrun(1, 2, per_node=1, port=worlds.free_port()))
    where = rf"rank 0 was not found at port {world.port} .* of 127.0.0.1 \(MASTER_ADDR\) within 0 s"
    with pytest.raises(ValueError, match=where):
        link.connect(world, 0)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 1)
    alone = of_environment(worlds.torchrun(1, 2, per_node=2, port=worlds.free_port()))
    with pytest.raises(ValueError, match=r"rank 0 was not found at .* of localhost"):
        link.connect(alone, 0)


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


class _Process(JobProcess):
    def __init__(self, node: int, local_rank: int) -> None:
        super().__init__(node, local_rank)
        self.answers: dict[Callable[..., Any], Any] = {_own_machine: _machine(node), _own_facts: _facts(node)}

    def call(self, fn: Callable[..., Any], /, *_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        answer = self.answers.get(fn)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future


def _machine(node: int, gpus: int = 2) -> Machine:
    found = [Gpu(index=index, uuid=f"GPU-{node}-{index}", name="H") for index in range(gpus)]
    return Machine(device="cuda" if gpus else "cpu", devices=gpus or 1, gpus=found, facts=TorchFacts(version="2"))


def _facts(node: int, **changed: Any) -> NodeFacts:
    torch = changed.get("versions", {}).get("torch", "2.10")
    fields = {"python": "3.12", "platform": "Linux", "gpus": _machine(node).gpus, "versions": {"torch": torch}}
    return NodeFacts(torch=TorchFacts(version=torch), node=Node(**{**fields, **changed}))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is node 0 with two GPUs, and its torch is not probed."""
    monkeypatch.setattr(local, "machine", _own_machine)
    monkeypatch.setattr(local, "gather", _own_facts)


def _own_machine(_device: str, _devices: int | None) -> Machine:
    return _machine(0)


def _own_facts(_torch: TorchFacts | None = None) -> NodeFacts:
    return _facts(0)


def _processes(nodes: Sequence[int]) -> list[_Process]:
    return [_Process(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)]


def _uuids(machine: Machine) -> list[str]:
    return [gpu.uuid for gpu in machine.gpus]


@pytest.mark.usefixtures("here")
def test_each_process_has_the_gpu_of_its_number_on_the_node() -> None:
    """GPUs are in the order of the ranks, with indices among those of all nodes; fewer are those of the first."""
    devices = Devices(lambda: _processes([0, 0, 1, 1]))
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
    machine = spread(None, _processes([0, 0]), machines)
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
        spread(devices, _processes(nodes), machines)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("asked", "answer", "message"),
    [
        (_own_facts, _facts(1, driver="570.1"), None),
        (_own_facts, _facts(1, versions={"torch": "2.9"}), r"the nodes differ: torch 2\.10 on node 0, 2\.9 on node 1"),
        (_own_machine, ValueError("no GPU found"), "^node 1: no GPU found$"),
        (_own_facts, ConnectionError("it ended"), "^node 1: it ended$"),
    ],
)
def test_nodes_that_cannot_measure_together_are_refused(
    asked: Callable[..., Any], answer: object, message: str | None
) -> None:
    """The message has the node and what differs; other differences are notes."""
    processes = _processes([0, 1])
    processes[1].answers[asked] = answer
    devices = Devices(lambda: processes)
    if message is None:
        devices.machine("auto", None)
        assert len(devices.notes) == 1
        return
    with pytest.raises(ValueError, match=message):
        devices.machine("auto", None)


def test_a_call_on_a_node_fails_as_one_to_a_machine_that_is_gone() -> None:
    """A profiler of another node continues without it."""
    processes = _processes([0, 1])
    call = Devices(lambda: processes).call_on(1)
    assert call(_own_machine) == _machine(1)
    processes[1].answers[_own_machine] = ValueError("the sampler broke")
    with pytest.raises(OSError, match="the sampler broke"):
        call(_own_machine)
