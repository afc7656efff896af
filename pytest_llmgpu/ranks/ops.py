"""The ops and FLOPs of one rank, counted on its local tensors (torch, in a rank).

Where weights are DTensors an op runs twice through torch's dispatcher: on DTensors, with the shapes of the whole model,
and on the local parts. Only the second is this rank's work; `torch.utils.flop_counter.FlopCounterMode` counts the
first. The formulas are those of torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_LIKE_FLASH_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Ops of attention without an entry in torch's table, which take the same shapes as the flash attention of GPUs. Remove
an entry once `torch.utils.flop_counter` of every supported release has it."""


class OpCounts(NamedTuple):
    """The ops of one rank."""

    ops: dict[str, int]
    """Name of an op (`aten::mm`) to its number of calls on local tensors, after torch has decomposed composite ops."""
    flops: int
    """The sum over ops that torch has a formula for: matrix products, convolutions, attention."""


def count(forward: Callable[[], object]) -> OpCounts:
    """Run `forward` once and return what this rank computed; ranks with collectives must run it at the same time.

    Only the ops of the calling thread are seen. Kernels that a library launches past torch's dispatcher are not.
    """
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    formulas = _formulas()
    ops: Counter[str] = Counter()
    flops = 0

    class Counting(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            nonlocal flops
            named = kwargs or {}
            if any(issubclass(one, DTensor) for one in types):
                return NotImplemented  # it comes again, as ops on the local parts
            if hasattr(func, "decompose"):
                # Composite ops arrive whole in inference mode.
                with self:
                    answer = func.decompose(*args, **named)
                if answer is not NotImplemented:
                    return answer
            answer = func(*args, **named)
            name = func._schema.name if hasattr(func, "_schema") else str(func)  # noqa: SLF001 - as torch's own modes do
            ops[name] += 1
            formula = formulas.get(getattr(func, "_overloadpacket", func))
            if formula is not None:
                flops += int(formula(*args, **named, out_val=answer))
            return answer

    with Counting():  # type: ignore[no-untyped-call]  # torch leaves its constructor untyped
        forward()
    return OpCounts(ops=dict(sorted(ops.items())), flops=flops)


def _formulas() -> dict[Any, Callable[..., Any]]:
    """Return torch's formula of each op that has one."""
    import torch
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    attention = flop_registry[aten._scaled_dot_product_flash_attention]  # noqa: SLF001 - the key of torch's table
    alike = [getattr(aten, name) for name in _LIKE_FLASH_ATTENTION if hasattr(aten, name)]
    return dict.fromkeys(alike, attention) | dict(flop_registry)
