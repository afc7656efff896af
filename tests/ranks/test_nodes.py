from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pytest_llmgpu.profiling import machine as local
from pytest_llmgpu.profiling.machine import Machine, NodeFacts, TorchFacts
from pytest_llmgpu.ranks.nodes import Devices, Place, spread
from pytest_llmgpu.ranks.protocol import Launcher
from pytest_llmgpu.report.report import Gpu, Node


@dataclasses.dataclass
class _Place:
    node: int
    local_rank: int
    answers: dict[Callable[..., Any], Any]

    def call(self, fn: Callable[..., Any], /, *_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        answer = self.answers.get(fn)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future

    __hash__ = object.__hash__


@dataclasses.dataclass
class _Nodes:
    places: Sequence[Place]

    def wait(self, limit_s: float) -> None:
        """All places are there."""

    def launcher(self, _: Path) -> Launcher:
        raise AssertionError("nothing starts")


def _machine(node: int, gpus: int = 2) -> Machine:
    found = [Gpu(index=index, uuid=f"GPU-{node}-{index}", name="H") for index in range(gpus)]
    return Machine(device="cuda" if gpus else "cpu", devices=gpus or 1, gpus=found, facts=TorchFacts(version="2"))


def _facts(node: int, **changed: Any) -> NodeFacts:
    torch = changed.get("versions", {}).get("torch", "2.10")
    fields = {"python": "3.12", "platform": "Linux", "gpus": _machine(node).gpus, "versions": {"torch": torch}}
    return NodeFacts(torch=TorchFacts(version=torch), node=Node(**{**fields, **changed}))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is node 0 with two GPUs, and its torch is not probed."""
    monkeypatch.setattr(local, "machine", _own_machine)
    monkeypatch.setattr(local, "gather", _own_facts)


def _own_machine(_device: str, _devices: int | None) -> Machine:
    return _machine(0)


def _own_facts(_torch: TorchFacts | None = None) -> NodeFacts:
    return _facts(0)


def _places(nodes: Sequence[int]) -> list[_Place]:
    return [
        _Place(node, nodes[:rank].count(node), {_own_machine: _machine(node), _own_facts: _facts(node)})
        for rank, node in enumerate(nodes)
    ]


def _uuids(machine: Machine) -> list[str]:
    return [gpu.uuid for gpu in machine.gpus]


def test_each_place_has_the_gpu_of_its_number_on_the_node() -> None:
    """GPUs are in the order of the ranks, and their indices are those among the GPUs of all nodes."""
    machine = Devices(_Nodes(_places([0, 0, 1, 1]))).machine("auto", None)
    assert _uuids(machine) == ["GPU-0-0", "GPU-0-1", "GPU-1-0", "GPU-1-1"]
    assert [gpu.index for gpu in machine.gpus] == [0, 1, 2, 3]
    assert [[gpu.uuid for gpu in gpus] for gpus in machine.gpus_of_nodes] == [
        ["GPU-0-0", "GPU-0-1"],
        ["GPU-1-0", "GPU-1-1"],
    ]
    assert (machine.devices, len(machine.node_facts), machine.one_gpu_each) == (4, 2, False)
    assert machine.describe() == "4 x H (cuda) on 2 nodes"


def test_fewer_devices_are_those_of_the_first_places() -> None:
    """A run on node 0 alone is a run on one node."""
    machine = Devices(_Nodes(_places([0, 0, 1, 1]))).machine("auto", 2)
    assert (_uuids(machine), machine.node_facts, machine.gpus_here) == (["GPU-0-0", "GPU-0-1"], [], machine.gpus)


def test_processes_may_see_their_own_gpu_only() -> None:
    """Slurm's --gpus-per-task shows each process one GPU with index 0."""
    places = _places([0, 0])
    machines = [
        Machine(device="cuda", devices=1, gpus=[gpu], facts=TorchFacts(version="2")) for gpu in _machine(0).gpus
    ]
    machine = spread(None, places, machines)
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


def test_nodes_of_different_versions_are_refused() -> None:
    """The message names what differs; other differences are notes."""
    places = _places([0, 1])
    places[1].answers[_own_facts] = _facts(1, driver="570.1")
    devices = Devices(_Nodes(places))
    devices.machine("auto", None)
    assert len(devices.notes) == 1
    places[1].answers[_own_facts] = _facts(1, versions={"torch": "2.9"})
    with pytest.raises(ValueError, match=r"the nodes differ: torch 2\.10 on node 0, 2\.9 on node 1"):
        Devices(_Nodes(places)).machine("auto", None)


def test_a_place_that_fails_is_named() -> None:
    """The reason of the node is in the message, whether it answers or is lost."""
    places = _places([0, 1])
    places[1].answers[_own_machine] = ValueError("no GPU found")
    with pytest.raises(ValueError, match=r"^node 1: no GPU found$"):
        Devices(_Nodes(places)).machine("auto", None)
    places[1].answers[_own_facts] = ConnectionError("it ended")
    with pytest.raises(ValueError, match=r"^node 1: it ended$"):
        Devices(_Nodes(places)).machine("auto", None)


def test_a_call_on_a_node_fails_as_one_to_a_machine_that_is_gone() -> None:
    """A profiler of another node continues without it."""
    places = _places([0, 1])
    call = Devices(_Nodes(places)).call_on(1)
    assert call(_own_machine) == _machine(1)
    places[1].answers[_own_machine] = ValueError("the sampler broke")
    with pytest.raises(OSError, match="the sampler broke"):
        call(_own_machine)
