"""The launcher `ray`: Ray starts the processes that torchrun or srun start for the launcher `env`.

pytest is the supervisor of rank 0, as there; an actor on its node holds the resources of that rank. Each other rank has
an actor that serves it (`join`). Ray itself runs in a child process, `python -m pytest_llmgpu.ranks.ray_places`: Ray
ends a process whose cluster is lost, and pytest has to write its report.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from pytest_llmgpu import processes
from pytest_llmgpu.ranks import join, nodes, wire
from pytest_llmgpu.ranks.env import Peers
from pytest_llmgpu.ranks.protocol import Launcher
from pytest_llmgpu.ranks.world import JOIN_S, World
from pytest_llmgpu.report.text import plural

_CONNECT_S = 10.0
_END_S = 10.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What Ray reserved, or the reason why it could not."""

    error: str | None = None
    """The reason why the run is refused; None if it is not."""
    address: str = ""
    """Address of the node of pytest."""
    nodes: list[int] = []
    """Number of the node of each rank; 0 is the node of pytest."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES of rank 0; None on a CPU."""


class RayPlaces:
    """The places that Ray provides for ranks; it implements `nodes.Nodes`."""

    def __init__(self, address: str, device: str, devices: int | None) -> None:
        """Ask nothing; Ray is used from `wait` on."""
        self._address, self._device, self._devices = address, device, devices
        self._peers: Peers | None = None
        """The processes, once all of them are there."""
        self._started = contextlib.ExitStack()
        """What ends with the run."""

    @property
    def places(self) -> Sequence[nodes.Place]:
        """See `nodes.Nodes`."""
        assert self._peers is not None
        return self._peers.places

    def wait(self, limit_s: float) -> None:
        """See `nodes.Nodes`."""
        limit_s = min(limit_s, JOIN_S)
        wanted = self._address, self._device, self._devices or 0, limit_s
        child = subprocess.Popen(
            processes.command("pytest_llmgpu.ranks.ray_places", *map(str, (os.getpid(), *wanted))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for pytest
        )
        assert child.stdin is not None
        assert child.stdout is not None
        self._started.callback(child.stdout.close)
        watched = self._started.enter_context(contextlib.ExitStack())
        self._started.callback(_end, child)
        plan = self._plan(child, limit_s)
        if plan.error is not None:
            raise ValueError(plan.error)
        if plan.visible is not None:
            self._started.callback(_set_visible, os.environ.get(_VISIBLE))
            _set_visible(plan.visible)  # Ray may have given the other GPUs of this node to others
        try:
            listener = wire.bound(plan.address, 0)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"pytest cannot listen on {plan.address}, the address of its node in Ray: {reason}"
            ) from None
        port: int = listener.getsockname()[1]
        world = World(
            rank=0,
            size=len(plan.nodes),
            size_name="--llmgpu-devices",
            local_rank=0,
            node=0,
            address=plan.address,
            port=port,
            where=f"port {port} of {plan.address}",
            key=secrets.token_hex(32).encode(),
        )
        peers = Peers(world, listener)
        self._started.callback(peers.close)
        with contextlib.suppress(OSError):  # it has ended, which the watcher notices
            child.stdin.write(msgspec.json.encode(world) + b"\n")
            child.stdin.flush()
        watcher = threading.Thread(target=_watch, args=(child, peers), daemon=True)
        watcher.start()
        watched.callback(watcher.join, _END_S)
        peers.wait(limit_s)
        self._peers = peers

    def launcher(self, log_directory: Path) -> Launcher:
        """See `nodes.Nodes`."""
        assert self._peers is not None
        return self._peers.launcher(log_directory)

    def close(self) -> None:
        """End the actors and return the resources."""
        self._started.close()

    def _plan(self, child: subprocess.Popen[bytes], limit_s: float) -> Plan:
        where = f"the Ray cluster at {self._address}"
        line = _line(child.stdout, limit_s + _CONNECT_S)
        if line is None:
            raise ValueError(f"{where} did not answer within {limit_s + _CONNECT_S:g} s")
        if not line:
            raise ValueError(f"{where} cannot be used: Ray ended with exit status {child.wait()}")
        return msgspec.json.decode(line, type=Plan)


def _watch(child: subprocess.Popen[bytes], peers: Peers) -> None:
    """Report an actor that cannot serve while its process is awaited; later its connection is lost."""
    line = _line(child.stdout, None)
    peers.fail(msgspec.json.decode(line, type=Plan).error or "" if line else "the connection to Ray was lost")


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _set_visible(gpus: str | None) -> None:
    if gpus is None:
        os.environ.pop(_VISIBLE, None)
    else:
        os.environ[_VISIBLE] = gpus


def _line(stream: IO[bytes] | None, limit_s: float | None) -> bytes | None:
    """Return the next line with a record; None after the time limit, and nothing at the end."""
    assert stream is not None
    while select.select([stream], [], [], limit_s)[0]:
        line = stream.readline()
        if not line or line.startswith(b"{"):
            return line
    return None


class Supervisor:
    """The actor that holds the resources of a rank, and serves it unless pytest does."""

    def visible(self) -> str | None:
        """Return CUDA_VISIBLE_DEVICES, which Ray sets."""
        return os.environ.get(_VISIBLE)

    def serve(self, world: World) -> None:
        """Serve a rank until pytest ends the run, and end this process: no head needs to be there for that."""
        import ray

        folder = tempfile.mkdtemp(prefix="llmgpu-ray-")
        try:
            join.serve(world, Path(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        ray.actor.exit_actor()


def main(parent: str, address: str, device: str, devices: str, limit_s: str) -> None:
    """Reserve what pytest wants, start the actors, and hold them until pytest closes stdin."""
    processes.die_with_parent(int(parent))
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints to stdout

    def answer(plan: Plan) -> None:
        os.write(answers, msgspec.json.encode(plan) + b"\n")

    try:
        _connect(address)
        group, plan, bundles = _reserve(address, device, int(devices), float(limit_s))
        actors = _actors(group, bundles, gpu=plan.visible is not None)
        if plan.visible is not None:
            import ray

            plan = msgspec.structs.replace(plan, visible=ray.get(actors[0].visible.remote()))
    except Exception as error:  # noqa: BLE001 - Ray has many
        answer(Plan(error=str(error).strip().partition("\n")[0] or type(error).__name__))
        return
    answer(plan)
    if line := sys.stdin.readline():
        _serve(plan, msgspec.json.decode(line, type=World), actors, answer)
    import ray

    ray.util.remove_placement_group(group)
    ray.shutdown()


def _connect(address: str) -> None:
    import ray

    option = f"--llmgpu-ray-address={address}"
    host, colon, port = address.rpartition(":")
    if colon:
        # Ray itself tries for minutes.
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise ValueError(f"{option}: no Ray cluster answers: {error.strerror or error}") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except ConnectionError:
        raise ValueError(
            f"{option}: no Ray cluster was found: start one with `ray start --head`, or pass its host and port"
        ) from None


def _reserve(address: str, device: str, devices: int, limit_s: float) -> tuple[Any, Plan, list[int]]:
    """Reserve resources for each rank; return the placement group, the plan, and the bundle of each rank.

    Raises:
        ValueError: The cluster has too few devices, or they are in use.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    alive = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    gpu = device == "cuda" or (device == "auto" and any(_has(node, "GPU") for node in alive))
    kind = "GPU" if gpu else "CPU"
    total = sum(_has(node, kind) for node in alive)
    count = devices or (total if gpu else 1)
    option = f"--llmgpu-devices={devices}" if devices else f"--llmgpu-device={device}"
    cluster = f"the Ray cluster at {address} has {plural(total, kind)} on {plural(len(alive), 'node')}"
    if not 1 <= count <= total:
        raise ValueError(f"{option}: {cluster}")
    own = next(_has(node, kind) for node in alive if node["NodeID"] == here)
    if not own:
        raise ValueError(f"the node of pytest has no {kind}, and rank 0 runs there: {cluster}")
    group = placement_group(
        [{"CPU": 1, **({"GPU": 1} if gpu else {})}] * count,
        strategy="STRICT_PACK" if count <= own else "PACK",
        bundle_label_selector=[{"ray.io/node-id": here}, *({} for _ in range(count - 1))],
    )
    if not group.wait(limit_s):
        free = int(ray.available_resources().get(kind, 0))
        raise ValueError(f"{option}: {cluster}, and {free} of them free after {limit_s:g} s")
    of_bundles: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    numbers = {here: 0}
    for bundle in sorted(of_bundles):
        numbers.setdefault(of_bundles[bundle], len(numbers))
    bundles = sorted(of_bundles, key=lambda bundle: (numbers[of_bundles[bundle]], bundle))
    plan = Plan(
        address=ray.util.get_node_ip_address(),
        nodes=[numbers[of_bundles[bundle]] for bundle in bundles],
        visible="" if gpu else None,
    )
    return group, plan, bundles


def _has(node: Mapping[str, Any], kind: str) -> int:
    return int(node["Resources"].get(kind, 0))


def _actors(group: Any, bundles: Sequence[int], *, gpu: bool) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return [
        ray.remote(Supervisor)
        .options(
            num_cpus=1,
            num_gpus=int(gpu),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        .remote()
        for bundle in bundles
    ]


def _serve(plan: Plan, first: World, actors: Sequence[Any], answer: Callable[[Plan], None]) -> None:
    """Let the actors serve until pytest closes stdin; report the first that fails."""
    import ray

    worlds = [
        msgspec.structs.replace(first, rank=rank, local_rank=rank - plan.nodes.index(node), node=node)
        for rank, node in enumerate(plan.nodes)
    ]
    served = [actor.serve.remote(world) for actor, world in zip(actors[1:], worlds[1:], strict=True)]

    def watch() -> None:
        try:
            ray.get(served)
        except Exception as error:  # noqa: BLE001 - Ray has many
            answer(Plan(error=f"an actor of Ray failed: {str(error).strip().splitlines()[-1]}"))

    threading.Thread(target=watch, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    # Ray pickles the class of an actor by its module, which must have its own name.
    importlib.import_module("pytest_llmgpu.ranks.ray_places").main(*sys.argv[1:])
