"""The host of a rank: the variables that its process gets, and the use of CPU cores by it and by its machine.

A rank that waits for a core is slower than its GPU or CPU. A further figure of each rank is measured here as a list of
one value in `HostUse`, with the reason in `why` of the launch where there is none: the runner joins those of all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.ranks import traffic
from pytest_llmgpu.report.result import HostUse, Launch

_TASKS = Path("/proc/self/task")
_PRESSURE = Path("/proc/pressure/cpu")
_SPINS = "3000"
"""How often a thread of a rank on a CPU looks for the end of an operation before it sleeps. libgomp does not see other
programs: with two of them on two cores its default of 300,000 made forwards of the bundled model 21 times slower, this
value 2.3 times; alone it takes 15 to 20 % more (`benchmarks/first-hour.md`)."""


def watch() -> Callable[[Launch], None]:
    """Begin a window; the function that is returned ends it and adds the use of CPU cores by this rank to a launch."""
    import torch

    wall_s, cpu_s, waits_s, pressure_s = time.monotonic(), time.process_time(), _waits_s(), _pressure_s()

    def end(launch: Launch) -> None:
        took_s, used_s = time.monotonic() - wall_s, time.process_time() - cpu_s
        later_s, later_pressure_s = _waits_s(), _pressure_s()
        waited_s = None
        if later_s is not None and waits_s is not None:
            waited_s = max((wait_s - waits_s.get(thread, 0.0) for thread, wait_s in later_s.items()), default=0.0)
        pressed_s = None
        if later_pressure_s is not None and pressure_s is not None:
            pressed_s = later_pressure_s - pressure_s
        launch.host = HostUse(
            wall_s=took_s, threads=[torch.get_num_threads()], cpu_s=[used_s], waited_s=[waited_s], pressure_s=pressed_s
        )

    return end


def _waits_s() -> dict[str, float] | None:
    """Return for each thread the time in which it could run and waited for a core; None where it is not counted."""
    found = {}
    try:
        for thread in _TASKS.iterdir():
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # no such file, or a thread that has just ended
        return None
    return found


def _pressure_s() -> float | None:
    """Return the time since the start of the machine in which a process waited for a core; None if not counted."""
    try:
        line = _PRESSURE.read_text().splitlines()[0]  # some avg10=0.00 avg60=0.00 avg300=0.00 total=12345
        return int(line.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


def environments(machine: Machine, device: str, world_size: int) -> Sequence[Mapping[str, str]]:
    """Return the variables of each rank: its devices and, for several ranks, those that torchrun would set."""
    on_gpus = device == "cuda"
    uuids = [gpu.uuid for gpu in machine.gpus] if on_gpus else []
    keeps = on_gpus or not os.environ.keys().isdisjoint({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
    waiting = {} if keeps else {"GOMP_SPINCOUNT": _SPINS}
    if world_size == 1:
        return [{"CUDA_VISIBLE_DEVICES": ",".join(uuids), **waiting}]
    environments = []
    nodes = [machine.node_of(rank) for rank in range(world_size)]
    for number, its_node in enumerate(nodes):
        on_node = [rank for rank, node in enumerate(nodes) if node == its_node]
        seen = [number] if machine.one_gpu_each else on_node
        environments.append(
            {
                "CUDA_VISIBLE_DEVICES": ",".join(uuids[rank] for rank in seen) if uuids else "",
                "RANK": str(number),
                "LOCAL_RANK": str(seen.index(number)),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(len(on_node)),
                **({} if len(on_node) == world_size else {traffic.NODES: ",".join(map(str, nodes))}),
                **waiting,
                # The cores of this process, split between the ranks.
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")
                or str(max(1, len(os.sched_getaffinity(0)) // len(on_node))),
            }
        )
    return environments
