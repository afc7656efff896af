"""One process per GPU that sends what it is told to, and says how long that took: the ranks of agreement.py (torch).

Collectives run over NCCL, by rings and in whole chunks (`KNOWN`), since only then is known what goes over the links:
trees send the same sum by other ways, and the protocols for small messages send flags beside the data. On a machine
without a GPU the ranks are on the CPU and meet over gloo.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["COLLECTIVES", "COPIES", "KNOWN", "Ranks", "formula", "ring_steps"]

KNOWN = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Set for the ranks, unless they are set already."""

COLLECTIVES = ("all_reduce", "all_gather")
COPIES = ("host_to_device", "device_to_host")
_END_S = 10.0
"""How long all of them may take to leave."""
_LIMIT_S = 90.0
"""How long a rank may take to answer; its first answer comes after importing torch and meeting the others."""


def formula(kind: str, message_bytes: int, ranks: int) -> int:
    """Return what one rank sends: by the ring algorithms, for an all-gather of so many bytes in all; or the copy."""
    if kind in COPIES:
        return message_bytes
    return ring_steps(kind, ranks) * message_bytes // ranks


def ring_steps(kind: str, ranks: int) -> int:
    """Return how many times each rank of a ring sends a part of the message on."""
    return {"all_reduce": 2, "all_gather": 1}[kind] * (ranks - 1)


class Ranks:
    """All ranks, idle but within a call."""

    def __init__(self, count: int, device: str, meeting: Path) -> None:
        """Start them.

        Args:
            count: How many.
            device: cuda or cpu.
            meeting: A file that is not there yet, in which they find each other.
        """
        for name, value in KNOWN.items():
            os.environ.setdefault(name, value)
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, rank, count, device, str(meeting)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.facts: dict[str, str] = self._answers()[0]
        """What rank 0 says of its libraries."""

    def __enter__(self) -> Ranks:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        limit_s = time.monotonic() + (_END_S if kind is None else 0)
        for process in self._processes:
            process.join(max(0, limit_s - time.monotonic()))
            if process.is_alive():
                process.kill()

    def count(self, kind: str, message_bytes: int) -> list[int]:
        """Return per rank the wire bytes of one message, as the package counts them."""
        return self._ask("count", kind, message_bytes, 1)

    def run(self, kind: str, message_bytes: int, repetitions: int) -> list[float]:
        """Send the message so many times; return per rank the seconds until its device was idle again."""
        return self._ask("run", kind, message_bytes, repetitions)

    def _ask(self, *question: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(question)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[Connection, Any] = {}
        limit_s = time.monotonic() + _LIMIT_S
        while silent := [pipe for pipe in self._pipes if pipe not in answers]:
            # Of them all at once: the others of one that failed wait for it in their collective.
            ready = wait(silent, limit_s - time.monotonic())
            if not ready:
                late = ", ".join(str(self._pipes.index(pipe)) for pipe in silent)
                sys.exit(f"no answer within {_LIMIT_S:g} s of rank {late}")
            answers.update((pipe, self._receive(pipe)) for pipe in self._pipes if pipe in ready)
        return [answers[pipe] for pipe in self._pipes]

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            sys.exit(f"rank {self._pipes.index(pipe)} ended; its error stands above")


def _serve(pipe: Connection, rank: int, ranks: int, device: str, meeting: str) -> None:
    """Answer questions until the pipe closes."""
    place, facts = _join(rank, ranks, device, meeting)
    pipe.send(facts)
    prepared: dict[tuple[str, int], Callable[[], object]] = {}
    while True:
        try:
            what, kind, message_bytes, repetitions = pipe.recv()
        except EOFError:
            break
        if (kind, message_bytes) not in prepared:
            prepared = {(kind, message_bytes): _prepare(kind, message_bytes, ranks, place)}  # memory of one at a time
        send = prepared[kind, message_bytes]
        pipe.send(_count(kind, message_bytes, send, ranks) if what == "count" else _time(send, repetitions, place))
    if ranks > 1:
        from torch import distributed

        distributed.destroy_process_group()


def _join(rank: int, ranks: int, device: str, meeting: str) -> tuple[torch.device, dict[str, str]]:
    import torch
    from torch import distributed

    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    facts = {"torch": torch.__version__}
    if device == "cuda":
        torch.cuda.set_device(place)
        torch.zeros(1, device=place)
        facts["gpu"] = torch.cuda.get_device_name(place)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not resolve
        torch.set_num_threads(1)
    if ranks > 1:
        distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=distributed.FileStore(meeting, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_LIMIT_S),
            device_id=place if device == "cuda" else None,
        )
    return place, facts


def _prepare(kind: str, message_bytes: int, ranks: int, place: torch.device) -> Callable[[], object]:
    """Return what sends the message once; it need not have arrived when that returns."""
    import torch
    from torch import distributed

    values = torch.randn(message_bytes // 4)
    if kind in COPIES:
        host, there = (values.pin_memory() if place.type == "cuda" else values), torch.empty_like(values, device=place)
        target, source = (there, host) if kind == "host_to_device" else (host, there)
        return lambda: target.copy_(source, non_blocking=True)
    message = values.to(place)
    if kind == "all_reduce":
        # The largest: a sum of sums would soon be infinite.
        return lambda: distributed.all_reduce(message, op=distributed.ReduceOp.MAX)
    part = message.chunk(ranks)[distributed.get_rank()].clone()
    return lambda: distributed.all_gather_into_tensor(message, part)


def _count(kind: str, message_bytes: int, send: Callable[[], object], ranks: int) -> int:
    from pytest_llmgpu.ranks import traffic

    counted: Sequence[Any] = traffic.count(send, world_size=ranks)
    # A copy to or from the host is no traffic between ranks, and is not to be counted as such.
    return (message_bytes if kind in COPIES else 0) + sum(one.wire_bytes for one in counted)


def _time(send: Callable[[], object], repetitions: int, place: torch.device) -> float:
    import torch

    began_s = time.perf_counter()
    for _ in range(repetitions):
        send()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter() - began_s
