"""`llmgpu ray`: start pytest once for each GPU that Ray reserves, as torchrun does.

This process is Ray's driver. It starts rank 0 as its own child, with the terminal, while an actor holds the resources
of that rank. Each other rank is a child of its actor. From there on the launcher `env` works as under torchrun: the run
goes on when Ray loses this process or an actor, and all processes end with rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import FrameType
from typing import Any

from pytest_llmgpu.cli.output import complain
from pytest_llmgpu.report.text import plural

_RESERVED_S = 300.0
"""Resources that are in use become free within this time."""
_END_S, _LOOK_S = 10.0, 0.5
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    text = "number of processes, each with one GPU, or one CPU if the cluster has no GPU (default: all GPUs; 1 on CPUs)"
    parser.add_argument("-n", dest="ranks", type=int, metavar="RANKS", help=text)
    text = "the command of pytest; the cluster is that of RAY_ADDRESS or of this machine, or one that ends with the run"
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=text)


class Starter:
    """The actor that holds the resources of one rank, and starts its process unless it is rank 0."""

    def visible(self) -> str | None:
        """Return the GPU that Ray gave it."""
        return os.environ.get(_VISIBLE)

    def start(self, command: Sequence[str], folder: str, variables: Mapping[str, str]) -> str:
        """Run the command until it ends, and return its exit status with its last line."""
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])  # noqa: PTH120
        ours = {**os.environ, **variables, "PATH": path}
        done = subprocess.run(
            command, cwd=folder, env=ours, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return f"exit status {done.returncode}: {(done.stdout.strip() or 'no message').splitlines()[-1]}"


def run_ray(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status of rank 0."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ValueError("a command is needed, such as: llmgpu ray -n 16 -- pytest benchmarks --strategy=tp")
    if find_spec("ray") is None:
        raise ValueError("llmgpu ray needs ray: pip install 'pytest-llmgpu[ray]'")
    import ray

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster answers: {error}") from None
    try:
        return _run(command, arguments.ranks)
    finally:
        ray.shutdown()


def _run(command: Sequence[str], ranks: int | None) -> int:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, gpu, nodes, bundles = _reserve(ranks)
    starter = ray.remote(Starter)  # Ray pickles the class of an actor by its module
    actors = []
    for bundle in bundles:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor = starter.options(num_cpus=1, num_gpus=int(gpu), max_restarts=0, scheduling_strategy=place)
        actors.append(actor.remote())
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as probe:
        port = probe.getsockname()[1]
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --llmgpu-launcher=env".strip()
    shared = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": address, "MASTER_PORT": str(port - 1)}
    shared |= {"LLMGPU_KEY": secrets.token_hex(32), "PYTEST_ADDOPTS": options}
    variables = [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank - nodes.index(node)), "GROUP_RANK": str(node)}
        for rank, node in enumerate(nodes)
    ]
    visible = {_VISIBLE: ray.get(actors[0].visible.remote()) or ""} if gpu else {}
    pytest = subprocess.Popen(command, env={**os.environ, **variables[0], **visible})

    def pass_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:  # Ctrl-C reaches pytest by itself
            pytest.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    rank_of = {
        actor.start.remote(command, os.getcwd(), own): rank  # noqa: PTH109
        for rank, (actor, own) in enumerate(zip(actors, variables, strict=True))
        if rank
    }
    running = list(rank_of)
    while pytest.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.wait(_LOOK_S)
        ended, running = ray.wait(running, num_returns=len(running), timeout=0) if running else ([], [])
        for one in ended if pytest.poll() is None else []:
            try:
                complain(f"rank {rank_of[one]} ended: {ray.get(one)}")
            except ray.exceptions.RayError as error:
                complain(f"the actor of rank {rank_of[one]} failed: {str(error).strip().splitlines()[-1]}")
    if running:
        ray.wait(running, num_returns=len(running), timeout=_END_S)
    return pytest.returncode


def _reserve(ranks: int | None) -> tuple[Any, bool, list[int], list[int]]:
    """Reserve one GPU, or one CPU, for each rank; the first is on this node.

    Return the placement group, true for GPUs, and per rank the number of its node and its bundle. ValueError in one
    line: the cluster has too few devices, or they are in use.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    alive = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    kind = "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"
    devices = {node["NodeID"]: int(node["Resources"].get(kind, 0)) for node in alive}
    total = sum(devices.values())
    count = (total if kind == "GPU" else 1) if ranks is None else ranks
    cluster = f"the Ray cluster has {plural(total, kind)} on {plural(len(alive), 'node')}"
    if not 1 <= count <= total:
        raise ValueError(f"-n {count}: {cluster}")
    if not devices[here]:
        raise ValueError(f"this node has no {kind}, and rank 0 runs here: {cluster}")
    group = placement_group(
        [{"CPU": 1, **({"GPU": 1} if kind == "GPU" else {})}] * count,
        strategy="STRICT_PACK" if count <= devices[here] else "PACK",
        bundle_label_selector=[{"ray.io/node-id": here}, *({} for _ in range(count - 1))],
    )
    if not group.wait(_RESERVED_S):
        free = int(ray.available_resources().get(kind, 0))
        raise ValueError(f"-n {count}: {cluster}, and {free} of them free after {_RESERVED_S:g} s")
    of_bundles: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    numbers = {here: 0}
    for bundle in sorted(of_bundles):
        numbers.setdefault(of_bundles[bundle], len(numbers))
    bundles = sorted(of_bundles, key=lambda bundle: (numbers[of_bundles[bundle]], bundle))
    return group, kind == "GPU", [numbers[of_bundles[bundle]] for bundle in bundles], bundles
