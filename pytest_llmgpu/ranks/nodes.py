"""Ranks on several nodes: the places for them, and the devices of these places. Shared by all launchers of nodes."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pytest_llmgpu.profiling import machine as local
from pytest_llmgpu.profiling.machine import Machine, NodeFacts
from pytest_llmgpu.profiling.node_profilers import Call
from pytest_llmgpu.ranks.protocol import Launcher
from pytest_llmgpu.report.text import plural

_PROBE_S = 300.0
"""Time limit of the first import of torch on a node."""
_PROFILER_S = 20.0


class Place(Protocol):
    """A process that starts one rank on its node: rank 0's process, or another one."""

    node: int
    """The number of its node; that of rank 0 is 0."""
    local_rank: int
    """The number of this place among those of its node, and of its GPU."""

    def call(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run `fn(*args)` in the process: a function of this package, whose arguments and result pickle.

        The future raises ValueError with the message of an exception, and ConnectionError if the process is lost.
        """
        ...


class Nodes(Protocol):
    """The places that another program provides, instead of this machine alone."""

    @property
    def places(self) -> Sequence[Place]:
        """The places in the order of the ranks; the first one is this process. Nodes are numbered in this order."""
        ...

    def wait(self, limit_s: float) -> None:
        """Wait until all places are there.

        Raises:
            ValueError: Some are missing after the time limit, or one may not take part.
        """
        ...

    def launcher(self, log_directory: Path) -> Launcher:
        """Return the launcher of ranks at these places; the logs of ranks of this node go to a folder."""
        ...


class Devices:
    """The devices of all places; each place is asked once."""

    def __init__(self, nodes: Nodes) -> None:
        """Ask nothing yet; the places are there when the first machine is chosen."""
        self._nodes = nodes
        self._machines: dict[str, list[Machine]] = {}
        """Maps `--llmgpu-device` to the devices that each place can use."""
        self._facts: list[NodeFacts] = []
        """The facts of each node, once they were compared."""
        self.notes: list[str] = []
        """Each difference between the nodes that is allowed, in words."""

    def machine(self, device: str, devices: int | None) -> Machine:
        """Choose the devices of a run, as `profiling.machine.machine` does on one machine.

        Raises:
            ValueError: There are fewer devices or places, a node cannot use its devices, or nodes must not measure
                together.
        """
        places = self._nodes.places
        if len(places) == 1:
            return msgspec.structs.replace(local.machine(device, devices), nodes=[0])
        if device not in self._machines:
            own = local.machine(device, None)
            if not self._facts:
                firsts = {place.node: place for place in reversed(places[1:]) if place.node}
                asked = {place: place.call(local.gather) for _, place in sorted(firsts.items())}
                self._facts = [local.gather(own.facts), *_answers(asked)]
                self.notes = local.check(self._facts)
            asked = (
                {} if own.device == "cpu" else {place: place.call(local.machine, device, None) for place in places[1:]}
            )
            self._machines[device] = [own, *_answers(asked)] if asked else [own] * len(places)
        chosen = spread(devices, places, self._machines[device])
        count = len(chosen.gpus_of_nodes)
        if count == 1:
            return chosen
        chosen = msgspec.structs.replace(chosen, node_facts=[one.node for one in self._facts[:count]])
        indices = {gpu.uuid: gpu.index for gpu in local.environment(chosen).gpus}
        gpus = [msgspec.structs.replace(gpu, index=indices.get(gpu.uuid, gpu.index)) for gpu in chosen.gpus]
        return msgspec.structs.replace(chosen, gpus=gpus)

    def call_on(self, node: int) -> Call:
        """Return what runs a function on a node, and raises OSError if it cannot."""
        place = next(place for place in self._nodes.places if place.node == node)

        def call(fn: Callable[..., Any], *args: Any) -> Any:
            future = place.call(fn, *args)
            if not concurrent.futures.wait([future], _PROFILER_S).done:
                raise TimeoutError(f"no answer for {_PROFILER_S:g} s")
            try:
                return future.result()
            except ValueError as error:
                raise OSError(str(error)) from None

        return call


def _answers(asked: Mapping[Place, Future[Any]]) -> list[Any]:
    """Return the answer of each place; they are asked at the same time.

    Raises:
        ValueError: A place has another answer than a result.
    """
    found = []
    for place, future in asked.items():
        if not concurrent.futures.wait([future], _PROBE_S).done:
            raise ValueError(f"node {place.node}: no answer for {_PROBE_S:g} s")
        try:
            found.append(future.result())
        except (ValueError, ConnectionError) as error:
            raise ValueError(f"node {place.node}: {error}") from None
    return found


def spread(devices: int | None, places: Sequence[Place], machines: Sequence[Machine]) -> Machine:
    """Return the devices of the first places, one for each.

    Args:
        devices: The number of devices; None for one at each place.
        places: Places for ranks, in the order of the ranks.
        machines: The devices that each place can use.

    Raises:
        ValueError: There are fewer places, or their devices are not distinct devices of one kind.
    """
    wanted = devices or len(places)
    if wanted > len(places):
        raise ValueError(
            f"--llmgpu-devices={wanted}, but the run has {plural(len(places), 'process')}: start {wanted}, or pass at "
            f"most {len(places)}"
        )
    first = machines[0]
    gpus = []
    for place, machine in list(zip(places, machines, strict=True))[:wanted]:
        if machine.device != first.device:
            raise ValueError(f"node {place.node} has device {machine.device}, node {places[0].node} {first.device}")
        if machine.gpus:
            # Slurm may show each process its own GPU only.
            gpus.append(machine.gpus[place.local_rank % len(machine.gpus)])
            if [gpu.uuid for gpu in gpus].count(gpus[-1].uuid) > 1:
                raise ValueError(
                    f"node {place.node} has {plural(len(machine.gpus), 'GPU')} for more ranks: start one process for "
                    "each GPU"
                )
    nodes = [place.node for place in places]
    alone = len(first.gpus) == 1 and nodes.count(nodes[0]) > 1
    return msgspec.structs.replace(first, devices=wanted, gpus=gpus, nodes=nodes, one_gpu_each=alone)
