"""Ranks on several nodes: the places for them, and the devices of these places. Shared by all launchers of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.ranks.protocol import Launcher
from pytest_llmgpu.report.text import plural


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
        """The places in the order of the ranks; the first one is this process."""
        ...

    def wait(self, limit_s: float) -> None:
        """Wait until all places are there.

        Raises:
            ValueError: Some are missing after the time limit, or one may not take part.
        """
        ...

    def machine(self, device: str, devices: int | None) -> Machine:
        """Choose the devices of a run, as `profiling.machine.machine` does on one machine.

        Raises:
            ValueError: There are fewer devices or places, or a node cannot use its devices.
        """
        ...

    def launcher(self, log_directory: Path) -> Launcher:
        """Return the launcher of ranks at these places; the logs of ranks of this node go to a folder."""
        ...


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
            f"--llmgpu-devices={wanted}, but WORLD_SIZE={len(places)}: start {wanted} processes, or pass at most "
            f"{len(places)}"
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
