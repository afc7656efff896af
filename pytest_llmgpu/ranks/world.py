"""The processes that torchrun or srun started together: which of them this one is, and where rank 0 listens."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

KEY = "LLMGPU_KEY"
"""This variable has the secret that the processes of several nodes share."""
JOIN_S = 300.0
"""The processes of a world start within this time: the first import from a network disk takes minutes."""
_PORT = "LLMGPU_PORT"
_LEAST_KEY_BYTES = 16
_SLURM_PORTS = range(20_000, 32_000)
"""A job of Slurm takes one of these ports by its number; programs that connect get higher ones."""


class World(msgspec.Struct, frozen=True, kw_only=True):
    """This process among those that were started together."""

    rank: int
    """The number of this process."""
    size: int
    """This many processes were started."""
    local_rank: int
    """The number of this process among those of its node."""
    node: int
    """The number of the node of this process."""
    address: str
    """Name or address of the node of rank 0."""
    port: int
    """Rank 0 listens here."""
    key: bytes | None
    """The secret of all processes; None if they run on one machine as one user, which the kernel checks."""


def of_environment(environ: Mapping[str, str]) -> World:
    """Return what torchrun or Slurm set for this process.

    Raises:
        ValueError: A variable is missing or has no possible value.
    """
    if "RANK" in environ:
        return _of_torchrun(environ)
    if "SLURM_PROCID" in environ:
        return _of_slurm(environ)
    raise ValueError(
        "neither RANK and WORLD_SIZE nor SLURM_PROCID are set: start pytest by torchrun or srun, "
        "such as `torchrun --nproc-per-node=2 -m pytest`"
    )


def _of_torchrun(environ: Mapping[str, str]) -> World:
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", least=1)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1)
    return _world(
        environ,
        rank=rank,
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        node=_number(environ, "GROUP_RANK", rank // max(local_size, 1)),
        address=environ.get("MASTER_ADDR"),
        # torch listens on MASTER_PORT itself.
        port=_number(environ, "MASTER_PORT", -2) + 1,
        one_machine=local_size == size,
    )


def _of_slurm(environ: Mapping[str, str]) -> World:
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    step = _number(environ, "SLURM_JOB_ID", 0) * 31 + _number(environ, "SLURM_STEP_ID", 0)
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    return _world(
        environ,
        rank=_number(environ, "SLURM_PROCID"),
        size=_number(environ, size, least=1),
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        node=_number(environ, "SLURM_NODEID", 0),
        address=environ.get("MASTER_ADDR") or (first_host(hosts) if hosts else None),
        port=_SLURM_PORTS[step % len(_SLURM_PORTS)],
        one_machine=_number(environ, nodes, 1) == 1,
    )


def _world(
    environ: Mapping[str, str],
    *,
    rank: int,
    size: int,
    local_rank: int,
    node: int,
    address: str | None,
    port: int,
    one_machine: bool,
) -> World:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size} processes: allowed are 0 to {size - 1}")
    port = _number(environ, _PORT, port)
    if size > 1 and not 1 <= port < 2**16:
        source = f"{_PORT}={port}" if _PORT in environ else f"MASTER_PORT + 1 = {port}"
        raise ValueError(
            f"{source if port >= 0 else 'MASTER_PORT is not set'}: set {_PORT} to a free port of the node of rank 0, "
            f"1 to 65535, the same for all processes"
        )
    if size > 1 and not one_machine and not address:
        raise ValueError("MASTER_ADDR is not set: it names the node of rank 0")
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        node=node,
        address=address or "localhost",
        port=port,
        key=None if one_machine else _key(environ),
    )


def _key(environ: Mapping[str, str]) -> bytes:
    key = environ.get(KEY, "").encode("utf-8", "surrogateescape")
    if len(key) < _LEAST_KEY_BYTES:
        found = f"has {len(key)} bytes" if key else "is not set"
        raise ValueError(
            f"{KEY} {found}, and the processes of several nodes need a common secret of at least {_LEAST_KEY_BYTES} "
            f"bytes: set it to the same value on each node, such as one line of `openssl rand -hex 32`"
        )
    return key


def _number(environ: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ValueError(f"{name} is not set")
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ValueError(f"{name}={text!r}: a whole number of at least {least} is needed")
    return int(text)


def first_host(nodelist: str) -> str:
    """Return the first host of a list in Slurm's notation, such as `node[01-03,07],login`."""
    # A comma outside of brackets ends the first part. Each pair of brackets begins with its first number.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodelist)
