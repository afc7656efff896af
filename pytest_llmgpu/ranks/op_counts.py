"""The ops and FLOPs of a forward, by module: exact numbers of what this rank computes (torch, in a rank).

They are counted on local tensors. Where weights are DTensors an op runs twice through torch's dispatcher: on DTensors,
with the shapes of the whole model, and on the local parts. Only the second is this rank's work;
`torch.utils.flop_counter.FlopCounterMode` counts the first. The formulas are those of torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.report.work import OTHER_MODULE, RankWork

if TYPE_CHECKING:
    import torch

_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_LIKE_FLASH_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Ops of attention without an entry in torch's table, which take the same shapes as the flash attention of GPUs. Remove
an entry once `torch.utils.flop_counter` of every supported release has it."""


def folded(module: str, prefix: str = "") -> str:
    """Return the name of a module with layer numbers folded: `model.layers.3.mlp` is `layers.*.mlp`.

    The prefix is the attribute that holds the decoder; it is left out. The model itself has an empty name.
    """
    if module in ("", prefix):
        return "model"
    return _LAYER_NUMBER.sub(".*", module.removeprefix(f"{prefix}."))


def count_ops(forward: Callable[[], object], model: torch.nn.Module, work: RankWork) -> RankWork:
    """Run `forward` once and add its ops and FLOPs to the work; ranks with collectives must run it at the same time.

    Ops are counted after torch has decomposed composite ones, and only those of the calling thread. Kernels that a
    library launches past torch's dispatcher are not seen.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    attention = flop_registry[aten._scaled_dot_product_flash_attention]  # noqa: SLF001 - the key of torch's table
    alike = [getattr(aten, name) for name in _LIKE_FLASH_ATTENTION if hasattr(aten, name)]
    formulas: dict[Any, Callable[..., Any]] = dict.fromkeys(alike, attention) | dict(flop_registry)
    ops: dict[str, Counter[str]] = defaultdict(Counter)
    flops: Counter[str] = Counter()
    entered = [OTHER_MODULE]

    @contextmanager
    def inside(module: str) -> Iterator[None]:
        entered.append(module)
        yield
        entered.pop()

    class Counting(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
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
            ops[entered[-1]][name] += 1
            formula = formulas.get(getattr(func, "_overloadpacket", func))
            if formula is not None:
                flops[entered[-1]] += int(formula(*args, **named, out_val=answer))
            return answer

    # torch leaves the constructor of its modes untyped.
    with module_hooks(model, inside), Counting():  # type: ignore[no-untyped-call]
        forward()
    return msgspec.structs.replace(
        work,
        ops=dict(sorted(sum(ops.values(), Counter()).items())),
        ops_by_module={module: dict(sorted(calls.items())) for module, calls in sorted(ops.items())},
        flops=flops.total(),
        flops_by_module=dict(flops.most_common()),
    )


@contextmanager
def module_hooks(model: torch.nn.Module, inside: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """While entered, each forward of a module runs in `inside(its folded name)`, which is left even if it raises."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    opened: list[AbstractContextManager[object]] = []

    def enter(label: str) -> None:
        opened.append(inside(label))
        opened[-1].__enter__()

    def leave(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        label = folded(name, prefix)
        # Outside of all other hooks: those of a strategy compute and launch kernels, too.
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: enter(label), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
