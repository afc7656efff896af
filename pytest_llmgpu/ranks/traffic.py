"""What a program itself sends: calls and bytes by collective, exactly and on any backend (torch, in a rank).

A dispatch mode sees the collectives of forwards that are run for nothing else, outside of what is measured: it costs
tens of microseconds an op. Replayed CUDA graphs run no op, so these forwards are eager ones.

Wire bytes are what one rank sends by the ring algorithms, in a group of n ranks, payload S being what the op is given
(nccl-tests, `doc/PERFORMANCE.md`):

    all_reduce              2 (n-1)/n x S
    all_gather              (n-1) x S           S is this rank's part: (n-1)/n of the whole
    reduce_scatter          (n-1)/n x S
    all_to_all              S less what the rank keeps, (n-1)/n x S where it is split evenly
    broadcast               S                   passed on along a chain from the root; the last rank sends nothing
    send, recv, peer_copy   S                   for recv what is received, which the sender counts too

NCCL may choose another algorithm, such as trees or NVLink's own sums, and adds its protocol's flags: what really went
over a link is for its counters to say. On gloo, DTensor gathers where NCCL has an all-to-all: other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, get_args

from pytest_llmgpu.inference import logits
from pytest_llmgpu.inference.batching import Batch, Plan
from pytest_llmgpu.report.result import Collective, CollectiveKind

if TYPE_CHECKING:
    import torch

    from pytest_llmgpu.strategies.protocol import Loaded

__all__ = ["MOST_ROWS", "check", "count", "of_plan", "wire_bytes_per_sequence"]

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "deepspeed")
"""Where ops live that communicate. One that is not in the tables below is an error: it may move anything."""

_STILL = {
    "c10d::barrier",
    "c10d::check_for_nan",
    "c10d::monitored_barrier_",
    "_c10d_functional::_wrap_tensor_autograd",
    "_c10d_functional::wait_tensor",
}
"""Ops that move nothing of the program's."""

_OPS: tuple[tuple[str, CollectiveKind, str, str], ...] = (
    ("c10d", "all_reduce", "tensors", "allreduce_ allreduce_coalesced_"),
    ("c10d", "all_gather", "input_tensor", "_allgather_base_"),
    ("c10d", "all_gather", "input_tensors", "allgather_"),
    ("c10d", "all_gather", "input_list", "allgather_coalesced_"),
    ("c10d", "all_gather", "inputs", "allgather_into_tensor_coalesced_"),
    ("c10d", "reduce_scatter", "input_tensor", "_reduce_scatter_base_"),
    ("c10d", "reduce_scatter", "input_tensors", "reduce_scatter_"),
    ("c10d", "reduce_scatter", "inputs", "reduce_scatter_tensor_coalesced_"),
    ("c10d", "broadcast", "tensors", "broadcast_"),
    ("c10d", "send", "tensors", "send"),
    ("c10d", "recv", "tensors", "recv_ recv_any_source_"),
    ("c10d", "all_to_all", "input_tensors", "alltoall_"),
    ("c10d", "all_to_all", "input", "alltoall_base_"),
    ("_c10d_functional", "all_reduce", "input", "all_reduce all_reduce_"),
    ("_c10d_functional", "all_reduce", "inputs", "all_reduce_coalesced all_reduce_coalesced_"),
    ("_c10d_functional", "all_gather", "input", "all_gather_into_tensor all_gather_into_tensor_out"),
    ("_c10d_functional", "all_gather", "inputs", "all_gather_into_tensor_coalesced"),
    ("_c10d_functional", "reduce_scatter", "input", "reduce_scatter_tensor reduce_scatter_tensor_out"),
    ("_c10d_functional", "reduce_scatter", "inputs", "reduce_scatter_tensor_coalesced"),
    ("_c10d_functional", "broadcast", "input", "broadcast broadcast_"),
    ("_c10d_functional", "all_to_all", "input", "all_to_all_single"),
    ("_c10d_functional", "send", "tensor", "isend"),
    ("_c10d_functional", "recv", "tensor", "irecv"),
    ("_dtensor", "all_to_all", "input", "shard_dim_alltoall"),
    # Through shared memory, on a CPU. By the ring formula as any other, so that both ways of AutoTP count the same.
    ("deepspeed", "all_reduce", "self", "inference_all_reduce inference_all_reduce_"),
)
"""Namespace, kind, the argument that is the payload, and ops."""

_MOVING = {f"{namespace}::{op}": (kind, payload) for namespace, kind, payload, ops in _OPS for op in ops.split()}

_SEVERAL = "_c10d_functional::batch_p2p_ops"
"""Sends and receives in one op."""

_COPIES = {"aten::_to_copy": "self", "aten::to": "self", "aten::copy_": "src", "aten::copy": "src"}
"""Op that may copy between devices to the argument that it copies. `to` is seen as itself in inference mode."""

_COUNTED = {*_MOVING, *_COPIES, _SEVERAL}

_SHAPES = ((2, 4, 2), (3, 4, 2), (2, 5, 2), (3, 5, 2), (2, 4, 3))
"""Rows, tokens of a row, and predicted tokens of the forwards that are counted; no 1, which code may treat apart."""

MOST_ROWS = max(rows for rows, _, _ in _SHAPES)
"""Rows that a workspace must have room for, however few the plan's batches have."""

_Tally = dict[CollectiveKind, tuple[Fraction, Fraction, Fraction]]
"""Calls, payload and wire bytes by kind, exactly: a ring's part of a payload need not be whole bytes."""

_NOTHING = (Fraction(), Fraction(), Fraction())


def count(forward: Callable[[], object], *, world_size: int) -> list[Collective]:
    """Run `forward` once and return what this rank sent, by kind; every rank must run it at the same time.

    Args:
        forward: What to run. Only the ops of the calling thread are seen.
        world_size: Ranks of the strategy, for DeepSpeed's own op. Every other op says what group it is for.

    Raises:
        ValueError: An op that communicates in a way not known here.
    """
    return _records(_tally(forward, world_size))


def of_plan(loaded: Loaded, plan: Plan, *, workload: str = logits.LEAN) -> list[Collective]:
    """Return what this rank sends when all batches of a plan are scored once, by kind.

    Not every batch is run for that: five small forwards say how much each token of a row, each row, each token of the
    longest row and each predicted token adds. The plan's last batch, which is its smallest, must then come to exactly
    what they say. Hidden states are sent per padded token, logits per predicted one, rotary tables by length; padded
    tokens alone would be wrong wherever a batch predicts more of its tokens than another.

    Args:
        loaded: The model, whose decoder must not be replayed from CUDA graphs meanwhile.
        plan: What is scored.
        workload: One of `logits.WORKLOADS`: with full logits it is padded tokens that add theirs.

    Raises:
        ValueError: An op that is not known; bytes that depend on something else.
    """
    counted = [_of_forward(loaded, *shape, workload) for shape in _SHAPES]
    smallest = plan.batches[-1]
    seen = _records(_of_forward(loaded, smallest.rows, smallest.width, smallest.predicted, workload))
    expected = _records(_combined(counted, [smallest]))
    if seen != expected:
        raise ValueError(
            f"traffic of {smallest.rows} rows of {smallest.width} tokens, {smallest.predicted} of them predicted, is "
            f"{_words(seen)}; smaller forwards say {_words(expected)}: it depends on more than these numbers"
        )
    return _records(_combined(counted, plan.batches))


def check(ranks: Sequence[Iterable[Collective]]) -> None:
    """Refuse to believe that ranks which share a model sent each other nothing.

    Raises:
        ValueError: There is more than one rank, and one of them sent no byte.
    """
    silent = [number for number, counts in enumerate(ranks) if not any(one.payload_bytes for one in counts)]
    if len(ranks) > 1 and silent:
        raise ValueError(
            f"no collective was seen in a forward of rank {silent[0]} of {len(ranks)}: the ranks compute the same, "
            "each for itself, or communicate in a way that torch does not see"
        )


def wire_bytes_per_sequence(ranks: Iterable[Iterable[Collective]], sequences: int) -> float:
    """Return what all ranks together put on the wire for one sequence: what is received was sent by another of them."""
    return sum(one.sent_bytes for rank in ranks for one in rank) / sequences


def _of_forward(loaded: Loaded, rows: int, width: int, predicted: int, workload: str = logits.LEAN) -> _Tally:
    """Return what a forward as `scoring` runs it sends; which tokens it is of makes no difference."""
    import torch

    ids_BS = torch.zeros(rows, width, dtype=torch.int64, device=loaded.input_device)
    rows_N = torch.zeros(predicted, dtype=torch.int64, device=loaded.input_device)
    with logits.way(loaded.model, workload) as chosen, torch.inference_mode():
        return _tally(lambda: chosen.forward(ids_BS, rows_N), loaded.world_size)


def _combined(counted: Sequence[_Tally], batches: Iterable[Batch]) -> _Tally:
    """Return the sum over batches, each a combination of what was counted at `_SHAPES`.

    Linear in the predicted tokens, and in rows and tokens of a row with their product: with the shapes one apart, the
    weights of the five forwards are whole numbers.
    """
    rows, width, predicted = _SHAPES[0]
    weights = [0] * len(counted)
    for batch in batches:
        b, s, n = batch.rows - rows, batch.width - width, batch.predicted - predicted
        for place, weight in enumerate((1 - b - s + b * s - n, b - b * s, s - b * s, b * s, n)):
            weights[place] += weight
    total: _Tally = {}
    for weight, tally in zip(weights, counted, strict=True):
        for kind, amounts in tally.items():
            _add(total, kind, *(weight * amount for amount in amounts))
    return total


def _tally(forward: Callable[[], object], world_size: int) -> _Tally:
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    tally: _Tally = {}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if any(issubclass(one, DTensor) for one in types):
                return NotImplemented  # it comes again, as ops on the local parts with their collectives
            named = kwargs or {}
            schema = func._schema  # noqa: SLF001 - what torch's own modes read
            _check_known(schema.name)
            answer = func(*args, **named)
            if schema.name not in _COUNTED:
                return answer
            given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | named
            for kind, payload, wire in _moved(schema.name, given, answer, world_size):
                _add(tally, kind, Fraction(1), Fraction(payload), Fraction(wire))
            return answer

    with Counting():  # type: ignore[no-untyped-call]  # torch leaves its constructor untyped
        forward()
    return tally


def _check_known(op: str) -> None:
    namespace = op.partition("::")[0]
    if namespace in _NAMESPACES and op not in _MOVING and op not in _STILL and op != _SEVERAL:
        known = ", ".join(name for name in _MOVING if name.startswith(f"{namespace}::"))
        raise ValueError(f"{op}: what this op sends is not known; known of {namespace} are {known or 'none'}")


def _moved(
    op: str, given: Mapping[str, Any], answer: Any, world_size: int
) -> Iterator[tuple[CollectiveKind, int, int | Fraction]]:
    """Yield kind, payload and wire bytes of what an op has moved."""
    if op in _COPIES:
        source = given[_COPIES[op]]
        if _between_gpus(source.device, answer.device):
            size = _bytes(source)
            yield "peer_copy", size, size
    elif op == _SEVERAL:
        for way, tensor in zip(given["op_list"], given["tensors"], strict=True):
            size = _bytes(tensor)
            yield ("send" if way == "isend" else "recv"), size, size
    elif op in _MOVING:
        kind, argument = _MOVING[op]
        payload = given[argument]
        size = _bytes(payload)
        ranks, rank = _seat(given, world_size)
        if kind == "all_to_all":
            yield kind, size, size * (1 - _kept(given.get("input_split_sizes"), payload, ranks, rank))
        elif kind == "broadcast":
            root = given.get("root_rank", given.get("src"))
            # Before the root comes, in a ring, the last of the chain that begins with it.
            yield kind, size, 0 if rank == (root - 1) % ranks else size
        else:
            yield kind, size, size * _sent(kind, ranks)


def _between_gpus(source: torch.device, target: torch.device) -> bool:
    return source.type == target.type == "cuda" and source != target


def _sent(kind: CollectiveKind, ranks: int) -> Fraction:
    """Return wire bytes per byte of payload."""
    others = Fraction(ranks - 1, ranks)
    of_kind = {"all_reduce": 2 * others, "all_gather": Fraction(ranks - 1), "reduce_scatter": others}
    return of_kind.get(kind, Fraction(ranks > 1))


def _kept(splits: Sequence[int] | None, payload: Any, ranks: int, rank: int) -> Fraction:
    """Return the fraction of an all-to-all's payload that stays on this rank."""
    parts = splits or ([_bytes(part) for part in payload] if isinstance(payload, Sequence) else [1] * ranks)
    return Fraction(parts[rank], sum(parts) or 1)


def _seat(given: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    """Return the size of an op's group and this rank's number in it."""
    from torch import distributed
    from torch._C._distributed_c10d import _resolve_process_group  # as torch.distributed itself does

    group = given.get("process_group", given.get("group_name"))
    if group is None:
        return world_size, distributed.get_rank() if distributed.is_initialized() else 0
    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]  # a str at run time
    elif not isinstance(group, distributed.ProcessGroup):
        group = distributed.ProcessGroup.unbox(group)
    return group.size(), group.rank()


def _bytes(tensors: torch.Tensor | Sequence[Any]) -> int:
    if isinstance(tensors, Sequence):
        return sum(map(_bytes, tensors))
    return tensors.numel() * tensors.element_size()


def _add(tally: _Tally, kind: CollectiveKind, *amounts: Fraction) -> None:
    calls, payload, wire = (before + more for before, more in zip(tally.get(kind, _NOTHING), amounts, strict=True))
    tally[kind] = calls, payload, wire


def _records(tally: _Tally) -> list[Collective]:
    return [
        Collective(collective=kind, calls=int(calls), payload_bytes=int(payload), wire_bytes=round(wire))
        for kind in get_args(CollectiveKind)
        for calls, payload, wire in [tally.get(kind, _NOTHING)]
        if calls
    ]


def _words(counts: Sequence[Collective]) -> str:
    return ", ".join(f"{one.calls} {one.collective} of {one.payload_bytes} bytes" for one in counts) or "nothing"
