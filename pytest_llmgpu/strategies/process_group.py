"""The torch process group that connects the ranks of a loaded model (torch, in a rank)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.text import plural

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


def join(case: Case) -> tuple[torch.device, int, int]:
    """Join the other ranks, by NCCL on GPUs, by gloo on a CPU; return the device of this rank, its number, and theirs.

    The ranks find each other through the file or the address in LLMGPU_RENDEZVOUS, which the launcher sets; without it,
    as under torchrun, through MASTER_ADDR and MASTER_PORT. A single rank joins no group. ValueError if the number of
    started ranks is not the number of devices of the case.
    """
    import torch
    from torch import distributed

    # torch.distributed does not export them to type checkers.
    from torch._C._distributed_c10d import FileStore, TCPStore

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != case.devices:
        started = f"{world_size} {'was' if world_size == 1 else 'were'} started"
        remedy = f"use torchrun --nproc-per-node={case.devices}"
        raise ValueError(f"{case.id} needs {plural(case.devices, 'rank')}, but {started}: {remedy}")
    if case.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        # gloo looks up the name of the host, which fails in many containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world_size > 1 and not distributed.is_initialized():
        store: Store | None = None
        rendezvous = os.environ.get("LLMGPU_RENDEZVOUS", "")
        if rendezvous.startswith("tcp://"):
            host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
            listener = os.environ.get("LLMGPU_RENDEZVOUS_SOCKET")  # of rank 0, which listens on this port already
            descriptor = None if listener is None else int(listener)
            store = TCPStore(host, int(port), world_size, is_master=rank == 0, master_listen_fd=descriptor)
        elif rendezvous:
            store = FileStore(rendezvous, world_size)
        distributed.init_process_group(
            backend="nccl" if case.device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            # NCCL connects now, so that its buffers count as memory of loading and not of the first batch.
            device_id=device if case.device == "cuda" else None,
        )
    return device, rank, world_size
