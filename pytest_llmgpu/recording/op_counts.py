"""The ops and FLOPs of a forward, by module, and its calls of functions: exact numbers of this rank (torch, in a rank).

They are counted on local tensors. Where weights are DTensors an op runs twice through torch's dispatcher: on DTensors
of the whole model, which torch's `FlopCounterMode` counts, and on the local parts, this rank's work.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from pytest_llmgpu.recording.layer_kinds import LayerKinds
from pytest_llmgpu.report.work import OTHER_MODULE, HostCalls, RankWork

if TYPE_CHECKING:
    import torch

_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_ATTENTION = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Ops of attention. Torch's table lacks some, and its formula refuses fewer heads of keys than of queries in 2.11."""
_GROUPED = "::_grouped_mm", "::grouped_mm_fallback"
"""Products of the rows of each group with a matrix of its own, in torch and in transformers. Neither has a formula."""
_OTHER_THREADS = "the program computes in threads of its own, whose calls are not counted"


def folded(module: str, prefix: str = "") -> str:
    """Return the name of a module with layer numbers folded: `model.layers.3.mlp` is `layers.*.mlp`.

    The prefix is the attribute that holds the decoder; it is left out. The model itself has an empty name.
    """
    if module in ("", prefix):
        return "model"
    return _LAYER_NUMBER.sub(".*", module.removeprefix(f"{prefix}."))


def count_ops(forward: Callable[[], object], model: torch.nn.Module | None, work: RankWork) -> RankWork:
    """Run `forward` once and add its ops and FLOPs to the work; ranks with collectives must run it at the same time.

    Ops are counted after torch has decomposed composite ones: those of the calling thread and, without a model, those
    of modules that other threads call. Kernels that a library launches past torch's dispatcher are not seen.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    attention = [getattr(aten, name) for name in _ATTENTION if hasattr(aten, name)]
    formulas: dict[Any, Callable[..., Any]] = dict(flop_registry) | dict.fromkeys(attention, _attention)
    ops: dict[str, Counter[str]] = defaultdict(Counter)
    flops: Counter[str] = Counter()
    kinds = LayerKinds(model)
    entered: dict[int, list[str]] = defaultdict(lambda: [OTHER_MODULE])  # by thread, the outermost module first
    caller, others = threading.get_ident(), set()

    @contextmanager
    def inside(module: str) -> Iterator[None]:
        thread = threading.get_ident()
        outermost = len(entered[thread]) == 1
        others.update({thread} - {caller})
        entered[thread].append(module)
        with Counting() if outermost and thread != caller else nullcontext():  # type: ignore[no-untyped-call]
            yield
        entered[thread].pop()

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
            module = entered[threading.get_ident()][-1]
            name = func._schema.name if hasattr(func, "_schema") else str(func)  # noqa: SLF001 - as torch's own modes do
            ops[module][name] += 1
            kinds.add(name)
            grouped = _grouped if name.endswith(_GROUPED) else None
            formula: Callable[..., Any] | None = formulas.get(getattr(func, "_overloadpacket", func), grouped)
            if formula is not None:
                flops[module] += int(formula(*args, **named, out_val=answer))
            return answer

    # torch leaves the constructor of its modes untyped.
    with module_hooks(model, inside), kinds.noted(), Counting():  # type: ignore[no-untyped-call]
        forward()
    return msgspec.structs.replace(
        work,
        ops=dict(sorted(sum(ops.values(), Counter()).items())),
        ops_by_module={module: dict(sorted(calls.items())) for module, calls in sorted(ops.items())},
        flops=flops.total(),
        flops_by_module=dict(flops.most_common()),
        implementations=kinds.implementations(),
        routing=kinds.routing(),
        why={**work.why, "host_calls": _OTHER_THREADS} if others else work.why,
    )


def _attention(query_BHSD: torch.Tensor, key_BGTD: torch.Tensor, value_BGTE: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of two products for each head of the queries; torch counts a causal mask as none, too."""
    return 2 * query_BHSD[..., 0].numel() * key_BGTD.shape[-2] * (query_BHSD.shape[-1] + value_BGTE.shape[-1])


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of [rows, K] by [groups, K, N]; rows behind the last offset belong to no group."""
    return 2 * int(offs[-1]) * rows.shape[-1] * matrices.shape[-1]


@contextmanager
def module_hooks(model: torch.nn.Module | None, inside: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """While entered, each forward of a module runs in `inside(its folded name)`, which is left even if it raises.

    None is for the modules of a program that is not known: every module that is called, by the name that it has in the
    outermost one.
    """
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    opened: dict[int, list[AbstractContextManager[object]]] = defaultdict(list)  # by thread
    of_root: WeakKeyDictionary[torch.nn.Module, dict[int, str]] = WeakKeyDictionary()
    root: dict[int, torch.nn.Module] = {}

    def enter(label: str) -> None:
        of_thread = opened[threading.get_ident()]
        of_thread.append(inside(label))
        of_thread[-1].__enter__()

    def leave(*_: object) -> None:
        opened[threading.get_ident()].pop().__exit__(None, None, None)

    def enter_any(module: torch.nn.Module, _: object) -> None:
        thread = threading.get_ident()
        if not opened[thread]:
            root[thread] = module
            if module not in of_root:
                of_root[module] = {id(one): label for label, one in _labels(module)}
        enter(of_root[root[thread]].get(id(module), type(module).__name__))

    if model is None:
        handles = [register_module_forward_pre_hook(enter_any), register_module_forward_hook(leave, always_call=True)]
    else:
        handles = []
        for label, module in _labels(model):
            # Outside of all other hooks: those of a strategy compute and launch kernels, too.
            handles.append(module.register_forward_pre_hook(lambda *_, label=label: enter(label), prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _labels(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the folded name of each module of a model, and the module."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    return ((folded(name, prefix), module) for name, module in model.named_modules())


def count_calls(run: Callable[[], object]) -> HostCalls:
    """Run a function and return its calls of Python and C functions: exact where the time of the host is not.

    The bundled model's forward calls 429 Python and 279 C functions in every process, whatever the batch size, while
    its time differs by 30 %. The calls of one thread are counted, that of the forward. `sys.setprofile` sees both kinds
    in every version of Python; its numbers differ between versions, which inline other functions. Comparisons by
    `__eq__` are left out, with all that they call: a lookup compares where hashes collide, and those of DTensor depend
    on addresses.

    The garbage collector is off: it would call destructors at any time. A profiler of the thread is suspended.
    """
    python: Counter[str] = Counter()
    c_calls = comparing = 0

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        nonlocal c_calls, comparing
        if event == "call" and (comparing or frame.f_code.co_name == "__eq__"):
            comparing += 1
        elif event == "return" and comparing:
            comparing -= 1
        elif event == "call":
            python[frame.f_code.co_filename] += 1
        elif event == "c_call" and not comparing:
            c_calls += 1

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()
    by_file: Counter[str] = Counter()
    for path, calls in python.items():
        # Below the folder that it was imported from: `torch/nn/modules/module.py`.
        roots = [root for root in map(os.path.abspath, filter(None, sys.path)) if path.startswith(f"{root}{os.sep}")]
        name = os.path.relpath(path, max(roots, key=len)) if roots else path if path[:1] == "<" else Path(path).name
        by_file[name] += calls
    return HostCalls(
        python=python.total(),
        c=c_calls - 1,  # The call that ends the counting is one of C.
        by_file=dict(sorted(by_file.items())),
        python_version=".".join(platform.python_version_tuple()[:2]),
    )
