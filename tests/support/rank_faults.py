"""Faults of one rank of a group while the others are in a collective: functions that ranks import by name."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies import process_group

if TYPE_CHECKING:
    import torch

_WAITING_COLLECTIVES = 100
"""So many collectives wait when the fault happens: one of them is under way, and the others have not begun."""
_NUMBERS = {"cpu": 2**22, "cuda": 2**26}
"""One collective of so many numbers takes about a millisecond or more."""
_TIME_LIMIT = datetime.timedelta(seconds=2)


def join(_state: RankState, case: Case) -> float:
    """Join the group and return the sum of ones over its ranks."""
    import torch
    from torch import distributed

    ones = torch.ones(1, device=process_group.join(case)[0])
    distributed.all_reduce(ones)
    return float(ones.item())


def signal_in_a_collective(_state: RankState, case: Case, victim: int, number: int) -> NoReturn:
    """Run collectives for ever; one rank sends a signal to itself while some of them wait."""
    from torch import distributed

    tensor, rank = _joined(case)
    for _ in range(_WAITING_COLLECTIVES):
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, async_op=True)
    if rank == victim:
        os.kill(os.getpid(), number)
    _reduce_for_ever(tensor)


def run_out_of_memory(_state: RankState, case: Case, victim: int, piece_bytes: int) -> NoReturn:
    """Fill the memory of one rank; the others run collectives for ever."""
    import torch

    tensor, rank = _joined(case)
    pieces = []
    while rank == victim:
        pieces.append(torch.empty(piece_bytes, dtype=torch.uint8, device=tensor.device))
    _reduce_for_ever(tensor)


def fail_an_assertion(_state: RankState, case: Case, victim: int) -> NoReturn:
    """Read past the end of a tensor on one rank: on a GPU no later call of the process succeeds."""
    import torch

    tensor, rank = _joined(case)
    if rank == victim:
        torch.zeros(1, device=tensor.device)[torch.tensor([5], device=tensor.device)].item()
    _reduce_for_ever(tensor)


def exceed_the_time_limit(_state: RankState, case: Case, victim: int) -> NoReturn:
    """Run a collective with a time limit in which one rank does not take part."""
    from torch import distributed

    tensor, rank = _joined(case)
    group = distributed.new_group(timeout=_TIME_LIMIT)
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=group)
    if rank == victim:
        threading.Event().wait()
    _reduce_for_ever(tensor, group)


def listening(_state: RankState, case: Case) -> list[str]:
    """Run collectives and return the addresses that this process listens on, as the kernel writes them."""
    from torch import distributed

    tensor, rank = _joined(case)
    parts = [tensor.clone() for _ in range(case.devices)]
    distributed.all_gather(parts, tensor)
    if rank == 0:
        distributed.send(tensor, 1)
    else:
        distributed.recv(tensor, 0)
    tensor.sum().item()
    ours = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            ours.add(str(descriptor.readlink()))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                addresses.append(fields[1].partition(":")[0])
    return addresses


def take_cupti() -> int:
    """Subscribe to CUPTI as another profiler does, and return its status, 0 for success. It has one subscriber."""
    mapped = Path("/proc/self/maps").read_text().split()
    library = ctypes.CDLL(next(path for path in mapped if "/libcupti.so" in path))
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)(lambda *_: None)
    _KEPT.append(callback)
    subscriber = ctypes.c_void_p()
    status: int = library.cuptiSubscribe(ctypes.byref(subscriber), callback, None)
    return status


_KEPT: list[object] = []
"""The callback of CUPTI, which must outlive its subscription."""


def _joined(case: Case) -> tuple[torch.Tensor, int]:
    """Join the group and run one collective; return the tensor and the number of this rank."""
    import torch
    from torch import distributed

    device, rank, _ = process_group.join(case)
    tensor = torch.ones(_NUMBERS[case.device], device=device)
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
    tensor.sum().item()
    return tensor, rank


def _reduce_for_ever(tensor: torch.Tensor, group: object = None) -> NoReturn:
    from torch import distributed

    while True:
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=group)
        tensor.sum().item()
