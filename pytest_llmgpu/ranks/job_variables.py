"""The variables that torchrun or srun set: which of the processes this one is, and where rank 0 listens."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

KEY = "LLMGPU_KEY"
"""This variable has the secret that the processes of several nodes share."""
PORT = "LLMGPU_PORT"
"""This variable has the port of rank 0 if another one than the default is needed."""
JOIN_S = 300.0
"""The processes of a world start within this time: the first import from a network disk takes minutes."""
_LEAST_KEY_BYTES = 16
_SLURM_PORTS = range(20_000, 32_000)
"""A job of Slurm takes one of these ports by its number; programs that connect get higher ones."""
_COUNTS, _SIZES, _PORTS = range(10**9), range(1, 10**9), range(1, 2**16)
_HOST = r"(?:[^,\[\]]|\[[0-9]+[0-9,-]*\])+"


class World(msgspec.Struct, frozen=True, kw_only=True):
    """This process among those that were started together."""

    rank: int
    """The number of this process."""
    size: int
    """This many processes were started."""
    size_name: str
    """The variable or the option that has this number."""
    local_rank: int
    """The number of this process among those of its node."""
    node: int
    """The number of the node of this process."""
    address: str
    """Name or address of the node of rank 0."""
    port: int
    """Rank 0 listens here."""
    where: str
    """Port and address in words, with the variables that they are from."""
    key: bytes | None
    """The secret of all processes; None if they run on one machine as one user, which the kernel checks."""


def of_environment(environ: Mapping[str, str]) -> World:
    """Return what torchrun or Slurm set for this process.

    Raises:
        ValueError: A variable is missing or has no possible value.
    """
    if "RANK" in environ:
        size_name = "WORLD_SIZE"
        size = _number(environ, size_name, allowed=_SIZES)
        rank = _number(environ, "RANK", allowed=range(size))
        local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, allowed=range(1, size + 1))
        local_ranks = range(local_size) if "LOCAL_WORLD_SIZE" in environ else _COUNTS
        local_rank = _number(environ, "LOCAL_RANK", 0, allowed=local_ranks)
        node = _number(environ, "GROUP_RANK", rank // local_size)
        one_machine = local_size == size
    elif "SLURM_PROCID" in environ:
        size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        nodes = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
        size = _number(environ, size_name, allowed=_SIZES)
        rank = _number(environ, "SLURM_PROCID", allowed=range(size))
        local_rank = _number(environ, "SLURM_LOCALID", 0, allowed=range(size))
        node = _number(environ, "SLURM_NODEID", 0)
        one_machine = _number(environ, nodes, 1) == 1
    else:
        raise ValueError(
            "neither RANK and WORLD_SIZE nor SLURM_PROCID are set: start pytest by torchrun or srun, "
            "such as `torchrun --nproc-per-node=2 -m pytest`"
        )
    port, port_source = (0, "") if size == 1 else _port(environ)
    address, address_source = ("localhost", "this machine") if one_machine else _address(environ)
    key = None if one_machine else environ.get(KEY, "").encode("utf-8", "surrogateescape")
    if key is not None and len(key) < _LEAST_KEY_BYTES:
        found = f"has {len(key)} bytes" if key else "is not set"
        raise ValueError(
            f"{KEY} {found}, and the processes of several nodes need a common secret of at least {_LEAST_KEY_BYTES} "
            f"bytes: set it to the same value on each node, such as one line of `openssl rand -hex 32`"
        )
    return World(
        rank=rank,
        size=size,
        size_name=size_name,
        local_rank=local_rank,
        node=node,
        address=address,
        port=port,
        where=f"port {port} ({port_source}) of {address} ({address_source})",
        key=key,
    )


def _port(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the port of rank 0 and its source."""
    if PORT in environ:
        return _number(environ, PORT, allowed=_PORTS), PORT
    if "RANK" in environ:
        # torch listens on MASTER_PORT itself.
        return _number(environ, "MASTER_PORT", allowed=range(_PORTS.stop - 1)) + 1, "MASTER_PORT + 1"
    step = _number(environ, "SLURM_JOB_ID", 0) * 31 + _number(environ, "SLURM_STEP_ID", 0)
    return _SLURM_PORTS[step % len(_SLURM_PORTS)], "by SLURM_JOB_ID"


def _address(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the name or address of the node of rank 0 and its source."""
    if address := environ.get("MASTER_ADDR"):
        return address, "MASTER_ADDR"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if "RANK" not in environ and (hosts := environ.get(name)):
            # A comma outside of brackets ends the first host. Each pair of brackets begins with its first number.
            found = re.fullmatch(rf"({_HOST})(,{_HOST})*", hosts)
            if found is None:
                raise ValueError(f"{name}={hosts!r}: a list of hosts is needed, such as node[01-03,07],login")
            return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[1]), f"first of {name}"
    raise ValueError("MASTER_ADDR is not set: it names the node of rank 0")


def _number(environ: Mapping[str, str], name: str, default: int | None = None, *, allowed: range = _COUNTS) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ValueError(f"{name} is not set")
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) not in allowed:
        bounded = f"from {allowed.start} to {allowed.stop - 1}"
        bounds = f"of at least {allowed.start}" if allowed.stop == _COUNTS.stop else bounded
        raise ValueError(f"{name}={text!r}: a whole number {bounds} is needed")
    return int(text)
