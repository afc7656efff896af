"""The ranks of agreement.py: one process per GPU that sends messages of known size and returns the time (torch).

Collectives run over NCCL with the algorithm Ring and the protocol Simple (`KNOWN`), because only then the bytes on each
link are known: trees send the same sum over other paths, and the protocols for small messages add flags. On a machine
without a GPU the ranks run on the CPU with gloo.
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

KNOWN = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Environment variables of the ranks, unless they are set already."""

COLLECTIVES = ("all_reduce", "all_gather")
COPIES = ("host_to_device", "device_to_host")
_END_S = 10.0
"""The time limit for all ranks to end."""
_LIMIT_S = 90.0
"""The time limit for an answer of a rank. The first one comes after importing torch and joining the group."""


def formula(kind: str, message_bytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends: by the ring algorithms (an all-gather has that total size), or the copy."""
    if kind in COPIES:
        return message_bytes
    return ring_steps(kind, ranks) * message_bytes // ranks


def ring_steps(kind: str, ranks: int) -> int:
    """Return how many times each rank of a ring sends a part of the message."""
    return {"all_reduce": 2, "all_gather": 1}[kind] * (ranks - 1)


class Ranks:
    """All ranks. They are idle between calls."""

    def __init__(self, count: int, device: str, meeting: Path) -> None:
        """Start them.

        Args:
            count: The number of ranks.
            device: cuda or cpu.
            meeting: A file that does not exist yet, for the rendezvous.
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
        """The versions of the libraries of rank 0."""

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
        """Return for each rank the wire bytes of one message, as the package counts them."""
        return self._request("count", kind, message_bytes, 1)

    def run(self, kind: str, message_bytes: int, repetitions: int) -> list[float]:
        """Send the message repeatedly; return for each rank the seconds until its device was idle again."""
        return self._request("run", kind, message_bytes, repetitions)

    def _request(self, *request: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(request)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[Connection, Any] = {}
        limit_s = time.monotonic() + _LIMIT_S
        while pending := [pipe for pipe in self._pipes if pipe not in answers]:
            # All pipes at once: if one rank fails, the others wait for it in their collective.
            ready = wait(pending, limit_s - time.monotonic())
            if not ready:
                late = ", ".join(str(self._pipes.index(pipe)) for pipe in pending)
                sys.exit(f"no answer within {_LIMIT_S:g} s of rank {late}")
            answers.update((pipe, self._receive(pipe)) for pipe in self._pipes if pipe in ready)
        return [answers[pipe] for pipe in self._pipes]

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            sys.exit(f"rank {self._pipes.index(pipe)} ended; its error is printed above")


def _serve(pipe: Connection, rank: int, ranks: int, device: str, meeting: str) -> None:
    """Answer requests until the pipe closes."""
    place, facts = _join(rank, ranks, device, meeting)
    pipe.send(facts)
    prepared: dict[tuple[str, int], Callable[[], object]] = {}
    while True:
        try:
            action, kind, message_bytes, repetitions = pipe.recv()
        except EOFError:
            break
        if (kind, message_bytes) not in prepared:
            prepared = {
                (kind, message_bytes): _prepare(kind, message_bytes, ranks, place)
            }  # holds the memory of one message at a time
        send = prepared[kind, message_bytes]
        pipe.send(_count(kind, message_bytes, send, ranks) if action == "count" else _time(send, repetitions, place))
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
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of the host may not resolve
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
    """Return a function that sends the message once, asynchronously."""
    import torch
    from torch import distributed

    values = torch.randn(message_bytes // 4)
    if kind in COPIES:
        host, there = (values.pin_memory() if place.type == "cuda" else values), torch.empty_like(values, device=place)
        target, source = (there, host) if kind == "host_to_device" else (host, there)
        return lambda: target.copy_(source, non_blocking=True)
    message = values.to(place)
    if kind == "all_reduce":
        # The maximum, because repeated sums would become infinite.
        return lambda: distributed.all_reduce(message, op=distributed.ReduceOp.MAX)
    part = message.chunk(ranks)[distributed.get_rank()].clone()
    return lambda: distributed.all_gather_into_tensor(message, part)


def _count(kind: str, message_bytes: int, send: Callable[[], object], ranks: int) -> int:
    from pytest_llmgpu.ranks import traffic

    counted: Sequence[Any] = traffic.count(send, world_size=ranks)
    # A copy to or from the host is no traffic between ranks, and must not be counted as such.
    return (message_bytes if kind in COPIES else 0) + sum(one.wire_bytes for one in counted)


def _time(send: Callable[[], object], repetitions: int, place: torch.device) -> float:
    import torch

    began_s = time.perf_counter()
    for _ in range(repetitions):
        send()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter() - began_s
