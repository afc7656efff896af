"""How the ranks of a strategy meet: one torch process group per loaded model (torch, in a rank)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pytest_llmgpu.report.case import Case

if TYPE_CHECKING:
    import torch

__all__ = ["Seat", "join"]

Seat = tuple["torch.device", int, int]
"""Device of this rank, its number, and how many there are."""


def join(case: Case) -> Seat:
    """Join the other ranks, over NCCL on GPUs and over gloo on a CPU.

    They meet in the file that the launcher names in LLMGPU_RENDEZVOUS; without it, as under torchrun, where MASTER_ADDR
    and MASTER_PORT say. A rank without siblings joins nobody.

    Raises:
        ValueError: The case needs another number of ranks.
    """
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import FileStore  # torch.distributed does not export it to type checkers

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != case.devices:
        raise ValueError(
            f"{case.id} needs {case.devices} ranks, and {world_size} were started: "
            f"torchrun --nproc-per-node={case.devices} starts as many"
        )
    if case.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        # Looking for the interface by the host's name fails where it does not resolve, as in many containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world_size > 1 and not distributed.is_initialized():
        meeting = os.environ.get("LLMGPU_RENDEZVOUS")
        distributed.init_process_group(
            backend="nccl" if case.device == "cuda" else "gloo",
            store=FileStore(meeting, world_size) if meeting else None,
            rank=rank,
            world_size=world_size,
            # Makes NCCL connect now: its buffers are part of what loading takes, not of the first batch.
            device_id=device if case.device == "cuda" else None,
        )
    return device, rank, world_size
