"""The traffic of a program: calls and bytes per kind of communication, exact on any backend (torch, in a rank).

A dispatch mode counts the ops of forwards that are run for this only: it takes tens of microseconds per op, and a
replayed CUDA graph runs no op.

Wire bytes are the bytes that one rank sends in the ring algorithm, in a group of n ranks, for a payload of S bytes, the
argument of the op (nccl-tests, `doc/PERFORMANCE.md`):

    all_reduce              2 (n-1)/n x S
    all_gather              (n-1) x S           S is the part of this rank: (n-1)/n of the whole
    reduce_scatter          (n-1)/n x S
    all_to_all              S without the part that the rank keeps; (n-1)/n x S for an even split
    broadcast               S                   sent along a chain from the root; the last rank sends nothing
    send, recv, peer_copy   S                   for recv the received bytes, which the sender counts as well

The bytes between nodes are the part that a rank sends to a rank of another node. In a ring each rank sends to the next
one of the group, and the last to the first.

NCCL may use another algorithm, such as trees or the sums of NVLink, and adds flags of its protocol. The counters of a
link have the bytes that the link carried. With gloo, DTensor gathers where it uses an all-to-all with NCCL.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, get_args

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.inference.batching import Batch, Plan
from pytest_llmgpu.ranks import graph_choice
from pytest_llmgpu.report.result import Collective, CollectiveKind
from pytest_llmgpu.report.text import plural

if TYPE_CHECKING:
    import torch

    from pytest_llmgpu.strategies.protocol import Loaded

NODES = "LLMGPU_NODES"
"""This variable of a rank has the number of the node of each rank, such as `0,0,1,1`; unset on one node."""
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "deepspeed")
"""Namespaces of ops that communicate. An op of them that is not in the tables below is an error."""
_WITHOUT_PAYLOAD = {
    "c10d::barrier",
    "c10d::check_for_nan",
    "c10d::monitored_barrier_",
    "_c10d_functional::_wrap_tensor_autograd",
    "_c10d_functional::wait_tensor",
}
"""Ops that send no data of the program."""
_OPS: tuple[tuple[str, CollectiveKind, str], ...] = (
    ("c10d", "all_reduce", "allreduce_ allreduce_coalesced_"),
    ("c10d", "all_gather", "_allgather_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_"),
    ("c10d", "reduce_scatter", "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_"),
    ("c10d", "broadcast", "broadcast_"),
    ("c10d", "send", "send"),
    ("c10d", "recv", "recv_ recv_any_source_"),
    ("c10d", "all_to_all", "alltoall_ alltoall_base_"),
    ("_c10d_functional", "all_reduce", "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_"),
    ("_c10d_functional", "all_gather", "all_gather_into_tensor all_gather_into_tensor_out"),
    ("_c10d_functional", "all_gather", "all_gather_into_tensor_coalesced"),
    ("_c10d_functional", "reduce_scatter", "reduce_scatter_tensor reduce_scatter_tensor_out"),
    ("_c10d_functional", "reduce_scatter", "reduce_scatter_tensor_coalesced"),
    ("_c10d_functional", "broadcast", "broadcast broadcast_"),
    ("_c10d_functional", "all_to_all", "all_to_all_single"),
    ("_c10d_functional", "send", "isend"),
    ("_c10d_functional", "recv", "irecv"),
    ("_dtensor", "all_to_all", "shard_dim_alltoall"),
    # vLLM, on GPUs and on a CPU.
    ("vllm", "all_reduce", "all_reduce"),
    ("vllm", "all_gather", "all_gather"),
    ("vllm", "reduce_scatter", "reduce_scatter"),
    ("_C", "all_reduce", "shm_allreduce"),
    ("_C", "all_gather", "shm_all_gather"),
    # On a CPU this op uses shared memory. It counts by the ring formula, so that both forms of AutoTP count the same.
    ("deepspeed", "all_reduce", "inference_all_reduce inference_all_reduce_"),
)
"""Namespace, kind and the ops."""
KINDS = {f"{namespace}::{op}": kind for namespace, kind, ops in _OPS for op in ops.split()}
"""Op to its kind."""
PAYLOADS = ("input_tensor", "input_tensors", "input_list", "inputs", "input", "tensors", "tensor", "self", "data")
"""An op has its payload in the argument with one of these names."""
_COPIES = {"aten::_to_copy": "self", "aten::to": "self", "aten::copy_": "src", "aten::copy": "src"}
"""Op that may copy between devices to its source argument. In inference mode, `to` is dispatched as itself."""
_COUNTED = {*KINDS, *_COPIES}
_SHAPES = ((2, 4, 2), (3, 4, 2), (2, 5, 2), (3, 5, 2), (2, 4, 3))
"""Rows, tokens per row and predicted tokens of the counted forwards. None is 1, which may be a special case."""
MOST_ROWS = max(rows for rows, _, _ in _SHAPES)
"""A workspace must have room for this many rows, even if the batches of the plan have fewer."""
_Tally = dict[CollectiveKind, tuple[Fraction, ...]]
"""Kind to calls, payload bytes, wire bytes and bytes between nodes; the part of a ring need not be a whole number."""
Counted = dict[str, Sequence[_Tally]]
"""Way of scoring to the traffic counted at `_SHAPES`."""
_COUNTING: list[tuple[Any, _Tally]] = []
"""What `begin` entered in this process, with its tally."""
_NOTHING = (Fraction(), Fraction(), Fraction(), Fraction())


def count(forward: Callable[[], object], *, world_size: int) -> list[Collective]:
    """Run `forward` once and return the traffic of this rank by kind; all ranks must run it at the same time.

    Only ops of the calling thread are counted. The number of ranks is for the op of DeepSpeed; others name their group.
    ValueError for an op that communicates and is not in the tables of this module.
    """
    return _records(_tally(forward, world_size))


def begin(device: torch.device, world_size: int) -> None:  # noqa: ARG001 - as every function for a worker
    """Count, in a worker of an engine, what its main thread sends until `end`."""
    tally: _Tally = {}
    _COUNTING.append((_counting(tally, world_size), tally))
    _COUNTING[-1][0].__enter__()


def end(device: torch.device) -> list[Collective]:  # noqa: ARG001 - as every function for a worker
    """Return the traffic of this worker by kind since `begin`."""
    counting, tally = _COUNTING.pop()
    counting.__exit__(None, None, None)
    return _records(tally)


def of_plan(
    loaded: Loaded,
    plan: Plan,
    *,
    logits: str = scoring.LEAN,
    of_tokens: scoring.OnBatch | None = None,
    counted: Counted | None = None,
) -> list[Collective]:
    """Return the traffic of this rank by kind when all batches of a plan are scored once.

    Where it depends on the tokens themselves all batches are run and counted, and `of_tokens` gets each of them.

    Five small forwards give the traffic per padded token, per row, per token of row length and per predicted token:
    hidden states are sent per padded token, logits per predicted token, rotary tables per token of row length. The
    traffic of the plan is computed from them: once for a model, whose other plans find them in `counted`. The last
    batch of the plan, its smallest, is run as well and must agree exactly. The decoder must not replay CUDA graphs.
    With full logits nothing depends on predicted tokens. ValueError if an op is unknown, or the traffic depends on
    other numbers.
    """
    if of_tokens is not None:
        options: Any = {"on_batch": of_tokens, "logits": logits, **loaded.placed}
        return count(lambda: scoring.score(loaded.model, plan, **options), world_size=loaded.world_size)
    return _records(_of_prefills(loaded, plan, logits, counted))


def of_generation(
    loaded: Loaded, plan: Plan, *, of_tokens: scoring.OnBatch | None = None, counted: Counted | None = None
) -> tuple[list[Collective], list[Collective]]:
    """Return the traffic of this rank by kind when texts are generated for all batches of a plan, and in one step.

    The step is a decode step of the largest batch. The traffic of a prefill is that of a forward without a KV cache,
    and `of_plan` counts it. A decode step of each number of rows is run and counted: every step of a batch sends the
    same. With `of_tokens` all texts are generated again, and `counted` is used, as in `of_plan`.
    """
    if of_tokens is not None:
        largest_batch = max(plan.batches, key=lambda batch: batch.rows)
        with graph_choice.generator(loaded, plan) as generator:
            every = count(lambda: generator.generate(of_tokens), world_size=loaded.world_size)
            return every, count(lambda: generator.step(largest_batch), world_size=loaded.world_size)
    total = _of_prefills(loaded, plan, scoring.LEAN, counted)
    largest: _Tally = {}
    with graph_choice.generator(loaded, plan) as generator:
        counts = Counter(batch.rows for batch in plan.batches)
        for batch in sorted({batch.rows: batch for batch in plan.batches}.values(), key=lambda batch: batch.rows):
            largest = _tally(functools.partial(generator.step, batch), loaded.world_size)
            _add(total, largest, times=counts[batch.rows] * (plan.requests.new_tokens - 1))
    return _records(total), _records(largest)


def _of_prefills(loaded: Loaded, plan: Plan, logits: str, counted: Counted | None) -> _Tally:
    known = {} if counted is None else counted
    # On every rank or on none, whatever it counted: the others would wait in a collective.
    if logits not in known:
        known[logits] = [_of_forward(loaded, *shape, logits) for shape in _SHAPES]
    smallest = plan.batches[-1]
    seen = _records(_of_forward(loaded, *smallest.shape, smallest.predicted, logits))
    expected = _records(_combined(known[logits], [smallest]))
    if seen != expected:
        size = f"{plural(smallest.shape[0], 'row')} of {plural(smallest.shape[1], 'token')}"
        forward = f"the traffic of {size} with {smallest.predicted} predicted tokens is {_describe(seen)}"
        smaller = f"smaller forwards predict {_describe(expected)}: it depends on more than these three numbers"
        raise ValueError(f"{forward}, but {smaller}")
    return _combined(known[logits], plan.batches)


def check(ranks: Sequence[Iterable[Collective]]) -> None:
    """Refuse a rank without traffic if there are several ranks (ValueError with its number)."""
    silent = [number for number, counts in enumerate(ranks) if not any(one.payload_bytes for one in counts)]
    if len(ranks) > 1 and silent:
        silence = f"no collective was counted in a forward of rank {silent[0]} of {len(ranks)}"
        reasons = "each rank may compute the whole model, or communicate without torch"
        raise ValueError(f"{silence}: check that the strategy splits the model; {reasons}")


def _of_forward(loaded: Loaded, rows: int, width: int, predicted: int, logits: str) -> _Tally:
    """Return the traffic of a forward as `scoring` runs it; it does not depend on the tokens."""
    import torch

    ids_BS = torch.zeros(rows, width, dtype=torch.int64, device=loaded.input_device)
    rows_N = torch.zeros(predicted, dtype=torch.int64, device=loaded.input_device)
    with scoring.way(loaded.model, logits) as chosen, torch.inference_mode():
        return _tally(lambda: chosen.forward(ids_BS, rows_N), loaded.world_size)


def _combined(counted: Sequence[_Tally], batches: Iterable[Batch]) -> _Tally:
    """Return the traffic of batches as a weighted sum of the traffic counted at `_SHAPES`.

    The traffic is linear in rows, in tokens per row, in their product and in predicted tokens. The shapes differ by
    one, so that the weights are whole numbers.
    """
    rows, width, predicted = _SHAPES[0]
    weights = [0] * len(counted)
    for batch in batches:
        b, s, n = batch.shape[0] - rows, batch.shape[1] - width, batch.predicted - predicted
        for number, weight in enumerate((1 - b - s + b * s - n, b - b * s, s - b * s, b * s, n)):
            weights[number] += weight
    total: _Tally = {}
    for weight, tally in zip(weights, counted, strict=True):
        _add(total, tally, times=weight)
    return total


def _tally(forward: Callable[[], object], world_size: int) -> _Tally:
    tally: _Tally = {}
    with _counting(tally, world_size):
        forward()
    return tally


def _counting(tally: _Tally, world_size: int) -> Any:
    """Return a context manager that adds the traffic of the calling thread to a tally."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if any(issubclass(one, DTensor) for one in types):
                return NotImplemented  # The op is dispatched again, as ops on local tensors with their collectives.
            named = kwargs or {}
            schema = func._schema  # noqa: SLF001 - as the modes of torch do
            namespace = schema.name.partition("::")[0]
            if namespace in _NAMESPACES and schema.name not in _COUNTED and schema.name not in _WITHOUT_PAYLOAD:
                known = ", ".join(name for name in KINDS if name.startswith(f"{namespace}::")) or "none"
                raise ValueError(f"{schema.name}: the traffic of this op is unknown; known ops of {namespace}: {known}")
            answer = func(*args, **named)
            if schema.name not in _COUNTED:
                return answer
            given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | named
            for kind, payload, wire, between in _moved(schema.name, given, answer, world_size):
                _add(tally, {kind: (Fraction(1), Fraction(payload), Fraction(wire), Fraction(between))})
            return answer

    return Counting()  # type: ignore[no-untyped-call]  # the constructor has no types


def _moved(
    op: str, given: Mapping[str, Any], answer: Any, world_size: int
) -> Iterator[tuple[CollectiveKind, int, int | Fraction, int | Fraction]]:
    """Yield kind, payload bytes, wire bytes and the bytes of them to other nodes of each transfer of an op."""
    if op in _COPIES:
        source = given[_COPIES[op]]
        if between_gpus(source.device, answer.device):
            size = _bytes(source)
            yield "peer_copy", size, size, 0
        return
    ranks, rank = _group_of(given, world_size)
    nodes = os.environ.get(NODES, "").split(",")
    away = [len(nodes) > 1 and nodes[other] != nodes[ranks[rank]] for other in ranks]
    kind, payload = KINDS[op], next(given[name] for name in PAYLOADS if name in given)
    size = _bytes(payload)
    if kind == "all_to_all":
        splits = given.get("input_split_sizes")
        splits = splits or ([_bytes(part) for part in payload] if isinstance(payload, Sequence) else [1] * len(ranks))
        parts = [Fraction(part, sum(splits) or 1) for part in splits]
        to_others = sum((part for part, other in zip(parts, away, strict=True) if other), Fraction())
        yield kind, size, size * (1 - parts[rank]), size * to_others
    elif kind in ("send", "recv"):
        yield kind, size, size, size * away[given["dst"]] if kind == "send" else 0
    else:
        others = Fraction(len(ranks) - 1, len(ranks))
        of_kind = {"all_reduce": 2 * others, "all_gather": Fraction(len(ranks) - 1), "reduce_scatter": others}
        wire = size * of_kind.get(kind, Fraction(len(ranks) > 1))
        if kind == "broadcast" and rank == (given.get("root_rank", given.get("src")) - 1) % len(ranks):
            wire = Fraction()  # In a ring, the last rank of the chain that starts at the root is the one before it.
        yield kind, size, wire, wire * away[(rank + 1) % len(ranks)]


def between_gpus(source: torch.device, target: torch.device) -> bool:
    """Return whether a copy goes from one GPU to another."""
    return source.type == target.type == "cuda" and source != target


def _group_of(given: Mapping[str, Any], world_size: int) -> tuple[Sequence[int], int]:
    """Return the ranks of the group of an op, and the index of this rank among them."""
    from torch import distributed
    from torch._C._distributed_c10d import _resolve_process_group  # as in torch.distributed

    group = given.get("process_group", given.get("group_name"))
    if group is None:
        return range(world_size), distributed.get_rank() if distributed.is_initialized() else 0
    of_vllm = getattr(sys.modules.get("vllm.distributed.parallel_state"), "_groups", {})
    if isinstance(group, str) and group in of_vllm:
        group = of_vllm[group]().device_group  # as its ops do
    elif isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]  # it is a str at run time
    elif not isinstance(group, distributed.ProcessGroup):
        group = distributed.ProcessGroup.unbox(group)
    return distributed.get_process_group_ranks(group), group.rank()


def _bytes(tensors: torch.Tensor | Sequence[Any]) -> int:
    if isinstance(tensors, Sequence):
        return sum(map(_bytes, tensors))
    return tensors.numel() * tensors.element_size()


def _add(total: _Tally, more: _Tally, times: int = 1) -> None:
    for kind, amounts in more.items():
        before = total.get(kind, _NOTHING)
        total[kind] = tuple(known + times * amount for known, amount in zip(before, amounts, strict=True))


def _records(tally: _Tally) -> list[Collective]:
    several = "," in os.environ.get(NODES, "")
    return [
        Collective(
            collective=kind,
            calls=int(calls),
            payload_bytes=int(payload),
            wire_bytes=round(wire),
            between_nodes_bytes=round(between) if several else None,
        )
        for kind in get_args(CollectiveKind)
        for calls, payload, wire, between in [tally.get(kind, _NOTHING)]
        if calls
    ]


def _describe(counts: Sequence[Collective]) -> str:
    return ", ".join(f"{one.calls} {one.collective} of {one.payload_bytes} bytes" for one in counts) or "0 bytes"
