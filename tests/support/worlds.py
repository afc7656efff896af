"""Processes of a job: what torchrun or srun sets for them, processes that serve a rank, their ends and time limits."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_llmgpu.ranks import group

KEY = "a secret of more than 16 bytes"

_SERVE = """
import os, sys
from pathlib import Path
from pytest_llmgpu.ranks import env_launcher, link
try:
    sys.exit(env_launcher.serve(link.of_environment(os.environ), Path(sys.argv[1])))
except ValueError as error:
    sys.exit(str(error))
"""
_JOB = re.compile(r"RANK|WORLD_SIZE|(LOCAL|GROUP)_.*|MASTER_.*|SLURM_.*|LLMGPU_(KEY|PORT)")


def torchrun(rank: int, size: int, *, per_node: int, port: int | None = None) -> dict[str, str]:
    """Return what torchrun sets for a process, and the secret where there are several nodes."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29_500 if port is None else port - 1),
    }
    return variables if per_node == size else {**variables, "LLMGPU_KEY": KEY}


def srun(rank: int, size: int, *, per_node: int) -> dict[str, str]:
    """Return what srun sets for a process of a job step."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(size // per_node),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_STEP_NODELIST": "localhost",
        "LLMGPU_KEY": KEY,
    }


_ports = iter(range(10_000 + os.getpid() * 101 % 10_000, 30_000))
"""Linux gives none of them to programs that ask for any port. Each process of the test run begins elsewhere."""


def free_port() -> int:
    """Return a port that no program has, and that this process has not returned before."""
    for port in _ports:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process, as if it had been started as a part of no other job."""
    ours = {name: value for name, value in os.environ.items() if not _JOB.fullmatch(name)}
    return {**ours, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}


@contextmanager
def served(folder: Path, worlds: Mapping[int, Mapping[str, str]]) -> Iterator[dict[int, subprocess.Popen[str]]]:
    """Start processes that serve a rank, each with its variables; logs are in the folder, and all are ended."""
    started = {}
    try:
        for rank, variables in worlds.items():
            logs = folder / f"node-of-rank{rank}"
            logs.mkdir()
            started[rank] = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(logs)],
                env=environment(variables),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def ends(pid: int, limit_s: float = 300) -> bool:
    """Wait for the end of a process that is no child of this one."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        ended, _, _ = select.select([descriptor], [], [], limit_s)
        os.close(descriptor)
        return bool(ended)
    return True


def hurry(monkeypatch: pytest.MonkeyPatch, *, while_exists: Path) -> None:
    """Let the clock of time limits be a thousand times as fast while a file exists, which a rank that hangs makes."""
    monotonic = time.monotonic

    def hurried() -> float:
        return monotonic() * (1000 if while_exists.exists() else 1)

    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=hurried))
