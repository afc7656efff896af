"""The layers of a decoder, compiled by torch: once per shape for all layers, which are alike.

A layer is compiled as one graph. What cannot be compiled is an error: a part of a model that ran eagerly would be
measured as if it were compiled.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference import weights
from pytest_llmgpu.inference.generation import StaticCache
from pytest_llmgpu.report.text import first_line

if TYPE_CHECKING:
    import torch

MOST_GRAPHS = 64
"""Most graphs of one kind of layer in a case. A case has one for each shape of its batches, and of its decode steps."""

_REMEDIES = {
    "InvalidCxxCompiler": "install a C++ compiler such as g++, or name one in the environment variable CXX",
    "TritonMissing": "install triton, which comes with torch for CUDA",
    "FailOnRecompileLimitHit": f"a case may have at most {MOST_GRAPHS} graphs: choose fewer or other batch sizes",
}
"""Name of an error of torch to what helps against it."""

_LEAST_QUERIES = 512
"""Rows x heads of a decode step from which its attention is replaced: fewer have too few programs for a GPU."""

_MOST_KEYS, _MOST_NUMBERS = 512, 128
"""Most keys of a row and numbers of a head up to which it is replaced: it was measured with 160, 213 and 128."""

_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
"""Operators that change their first argument, as methods whose names end with an underscore do."""

_SUSPENDED = ContextVar("_SUSPENDED", default=False)
"""True while `suspended` is entered: a layer runs once there, since its ops and collectives are counted."""


class CompileError(RuntimeError):
    """The layers could not be compiled; the message is one line."""


class CompiledLayers:
    """Replaces the forwards of a decoder's layers by compiled ones; the first forward of each shape compiles."""

    def __init__(self, model: Any, compiler: str | Callable[..., Any] = "inductor") -> None:
        """Prepare to compile the layers of a model, in eval mode, by a backend of torch.compile (see `reset`)."""
        import torch

        self._model = model
        self.compile_s = 0.0
        """The time that compiling took since the latest `reset`, on the host clock."""
        self.graphs = 0
        """The number of graphs that were compiled since then."""
        self._warmed_up = False
        # With the default of torch, 8, further shapes could not be compiled.
        torch._dynamo.config.recompile_limit = MOST_GRAPHS  # noqa: SLF001 - the place of the setting
        torch._dynamo.config.accumulated_recompile_limit = 4 * MOST_GRAPHS  # noqa: SLF001
        self._compiler = compiler
        self._forwards: list[Callable[..., Any]] = []
        """The forwards that replace those of layers."""
        self.reset()

    def reset(self) -> None:
        """Forget all graphs: a case has the same time, memory and number of graphs alone and in a sweep.

        The layers are those that the model has now: functions of the test suite may have replaced some. ValueError if
        the decoder has no list of layers, or the forward of one layer was replaced, which would run in none of them.
        """
        import torch

        torch.compiler.reset()
        for module in self._model.modules():  # layers that moved, or were copied or wrapped, among them
            if vars(module).get("forward") in self._forwards:
                del module.forward
        self._forwards.clear()
        compiled: dict[type, Callable[..., Any]] = {}
        uses = Counter(weight for _, weight in self._model.named_parameters(remove_duplicate=False))
        stacks = [tuple(stack.children()) for _, stack in weights.layer_stacks(self._model.get_decoder())]
        if not stacks:
            raise ValueError(f"{type(self._model).__name__} has no list of layers, which strategy compile needs")
        longest: tuple[Any, ...] = max(stacks, key=len)
        for index, layer in enumerate(longest):
            _join_weights(layer, uses)
            kind = type(layer)
            if "forward" in vars(layer):
                remedy = "replace the layer by a module of another class, or modules in it, in place of "
                remedy = f"compiled layers run that of their class: {remedy}{kind.__name__}.forward"
                raise ValueError(f"the forward of layer {index} was replaced: {remedy}")
            if kind not in compiled:
                compiled[kind] = torch.compile(kind.forward, backend=self._compile, dynamic=False, fullgraph=True)
            layer.forward = _forward(self, layer, index, compiled[kind])
            self._forwards.append(layer.forward)
        self.compile_s, self.graphs, self._warmed_up = 0.0, 0, False

    def check(self) -> None:
        """Refuse a warm-up that compiled nothing (CompileError); until the next `reset`, compiling is an error."""
        if not self.graphs:
            remedy = "unset TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE and similar variables"
            raise CompileError(f"torch.compile compiled nothing: {remedy}")
        self._warmed_up = True

    def run(self, compiled: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a compiled function; if the call compiles, count its time.

        CompileError if the function cannot be compiled, or was compiled after the warm-up.
        """
        import torch
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        before, began_s = self.graphs, time.perf_counter()
        try:
            result = compiled(*arguments, **named)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            cause = getattr(error, "inner_exception", None) or error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from error
            name = type(cause).__name__
            remedy = _REMEDIES.get(name, "measure another strategy")
            raise CompileError(f"torch.compile failed: {name}: {first_line(cause)}: {remedy}") from error
        if self.graphs > before and self._warmed_up:
            when = "after the warm-up, in a measured forward: measure another strategy"
            raise CompileError(f"torch.compile compiled {type(arguments[0]).__name__} again {when}")
        if self.graphs > before:
            # With the first launch, in which triton chooses the configuration of its kernels.
            self.compile_s += time.perf_counter() - began_s
        return result

    def _compile(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph, in which products of one input are joined, and decode steps have kernels of their own.

        LLaMA-7B in float16 takes 3.90 ms a token on an H200 at batch size 1, and 5.54 at 64. With the kernels of torch
        it takes 4.41 and 6.35: cuBLAS reads the weights 13 % more slowly, and cuDNN computes a tile for one query.
        """
        import torch
        from torch._dynamo import lookup_backend

        self.graphs += 1
        _join_products(graph.graph)
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.linear:
                _replace_product(node)
            elif node.target is torch.nn.functional.scaled_dot_product_attention:
                _replace_attention(node)
        graph.recompile()
        return lookup_backend(self._compiler)(graph, inputs)


def kernels_of(device: torch.device) -> Any:
    """Return the module of kernels of decode steps on this device; None for those of torch."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("pytest_llmgpu.inference.decode_kernels")


def _replace_product(node: Any) -> None:
    """Replace a product of one row of a plain weight. A bias would be added after the product is rounded."""
    operands = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    given, weight, result = (one.meta["example_value"] for one in (operands["input"], operands["weight"], node))
    fits = operands.get("bias") is None and weight.dim() == 2 and weight.stride(1) == 1  # noqa: PLR2004
    fits = fits and result.numel() == result.shape[-1] and _are_plain(given, weight, result)
    if fits and (kernels := kernels_of(weight.device)):
        node.target, node.args, node.kwargs = kernels.linear, (operands["input"], operands["weight"]), {}


def _replace_attention(node: Any) -> None:
    """Replace an attention of one query in each row and head, with a mask of keys for each row."""
    import torch

    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    operands: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    if (mask := operands.get("attn_mask")) is None or operands.get("dropout_p") or operands.get("is_causal"):
        return
    with node.graph.inserting_before(node):
        shared = [_of_groups(operands[name]) for name in ("key", "value")]
    if None in shared:
        shared = [operands["key"], operands["value"]]
    query, key, value, hidden = (one.meta["example_value"] for one in (operands["query"], *shared, mask))
    fits = query.dim() == key.dim() == 4 and query.shape[2] == 1 and math.prod(query.shape[:2]) >= _LEAST_QUERIES  # noqa: PLR2004
    fits = fits and key.shape == value.shape and (key.shape[0], key.shape[3]) == (query.shape[0], query.shape[3])
    fits = fits and key.shape[2] <= _MOST_KEYS and key.shape[3] <= _MOST_NUMBERS
    fits = fits and query.shape[1] % key.shape[1] == 0 and all(one.stride(3) == 1 for one in (query, key, value))
    fits = fits and hidden.dtype == torch.bool and hidden.shape == (len(query), 1, 1, key.shape[2])
    if fits and _are_plain(query, key, value, node.meta["example_value"]) and (kernels := kernels_of(query.device)):
        scale = operands.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        node.target, node.args, node.kwargs = kernels.attention, (operands["query"], *shared, mask, scale), {}


def _are_plain(*tensors: torch.Tensor) -> bool:
    """Return whether tensors have one dtype, also under autocast, and none is quantised or distributed."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return len({one.dtype for one in tensors}) == 1 and not any(map(is_traceable_wrapper_subclass, tensors))


def _of_groups(node: Any) -> Any:
    """Return the keys or values [B, G, T, D] that transformers repeated for query heads; None where it did not."""
    expanded: Any = node.args[0] if node.target == "reshape" and len(node.users) == 1 else None
    if getattr(expanded, "target", None) != "expand":
        return None
    source = expanded.args[0]
    whole, repeated, one = (each.meta["example_value"] for each in (node, expanded, source))
    fits = repeated.dim() == one.dim() == 5 and repeated.flatten(1, 2).shape == whole.shape  # noqa: PLR2004
    if not fits or (*one.shape[:2], 1, *one.shape[3:]) != (*repeated.shape[:2], 1, *repeated.shape[3:]):
        return None
    shared = node.graph.call_method("squeeze", (source, 2))
    shared.meta["example_value"] = one.squeeze(2)
    return shared


@functools.cache
def _joined_linear() -> Any:
    """Return the class of a linear layer whose weight is a part of a larger tensor."""
    import torch

    class JoinedLinear(torch.nn.Linear):
        joint: torch.Tensor
        rows: slice
        bias: Any

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
            if self.bias is not None or not torch.compiler.is_compiling():
                return super().forward(input)
            return torch.nn.functional.linear(input, self.joint[self.rows])

    return JoinedLinear


def _join_weights(layer: torch.nn.Module, uses: Counter[Any]) -> None:
    """Put the weights of neighbouring linear layers of one width into one tensor, for `_join_products`."""
    import torch

    joined = _joined_linear()
    for parent in layer.modules():
        groups: dict[Any, list[Any]] = {}
        child: Any
        for child in parent.children():
            if type(child) is joined and child.weight.data_ptr() != child.joint[child.rows].data_ptr():
                child.__class__ = torch.nn.Linear  # it got another weight
                del child.joint
            # Neither modules that a strategy or a test suite replaced, nor those with a bias, which is added before the
            # product is rounded, nor quantised weights, nor those of several layers, which would be stored for each.
            if (
                type(child) in (torch.nn.Linear, joined)
                and child.bias is None
                and type(child.weight) is torch.nn.Parameter
                and uses[child.weight] <= 1
            ):
                groups.setdefault((child.weight.shape[1], child.weight.dtype, child.weight.device), []).append(child)
        for children in groups.values():
            if len(children) == 1 or all(type(child) is joined for child in children):
                continue
            with torch.no_grad():
                joint = torch.cat([child.weight for child in children])
            start = 0
            for child in children:
                rows = slice(start, start := start + len(child.weight))
                child.weight.data = joint[rows]
                child.__class__, child.joint, child.rows = joined, joint, rows


def _join_products(graph: Any) -> None:
    """Replace the products by neighbouring parts of one tensor by one product.

    Those for queries, keys and values of LLaMA-7B at batch size 64 take 29 us as one and 35 us as three on an H200.
    """
    import torch

    linear = torch.nn.functional.linear
    changed: Counter[Any] = Counter()  # an input that is changed in place between two products is another one
    found: dict[Any, dict[int, Any]] = {}
    for node in graph.nodes:
        if node.target in _IN_PLACE or (node.op == "call_method" and node.target.endswith("_")):
            changed[node.args[0]] += 1
        if (rows := _rows_of_joint(node)) is not None:
            given, joint = node.args[0], node.args[1].args[0]
            found.setdefault((given, changed[given], joint), {})[rows.start] = node
    for (given, _, joint), nodes in found.items():
        parts = [nodes[start] for start in sorted(nodes)]
        rows_of_parts = [part.args[1].args[1] for part in parts]
        first, last = rows_of_parts[0].start, rows_of_parts[-1].stop
        whole = torch.cat([part.meta["example_value"] for part in parts], dim=-1)
        places = [(..., slice(rows.start - first, rows.stop - first)) for rows in rows_of_parts]
        apart = any(before.stop != after.start for before, after in pairwise(rows_of_parts))
        fit = all(_can_be(whole[place], part) for place, part in zip(places, parts, strict=True))
        if len(parts) == 1 or apart or not fit:
            continue
        with graph.inserting_before(next(node for node in graph.nodes if node in parts)):
            weight = graph.call_function(operator.getitem, (joint, slice(first, last)))
            weight.meta["example_value"] = joint.meta["example_value"][first:last]
            product = graph.call_function(linear, (given, weight))
            product.meta["example_value"] = whole
            for part, place in zip(parts, places, strict=True):
                piece = graph.call_function(operator.getitem, (product, place))
                piece.meta = {**part.meta, "example_value": whole[place]}
                part.replace_all_uses_with(piece)
        for part in parts:
            graph.erase_node(part)


def _rows_of_joint(node: Any) -> slice | None:
    """Return which rows of a matrix are the weight of a product without a bias; None for any other node."""
    import torch

    if node.target is not torch.nn.functional.linear or len(node.args) != 2 or node.kwargs:  # noqa: PLR2004 - input, weight
        return None
    weight = node.args[1]
    if weight.target is not operator.getitem or not isinstance(rows := weight.args[1], slice) or rows.step is not None:
        return None
    joint = weight.args[0].meta["example_value"]
    known = isinstance(rows.start, int) and isinstance(rows.stop, int)
    return rows if known and joint.dim() == 2 and 0 <= rows.start < rows.stop <= len(joint) else None  # noqa: PLR2004


def _can_be(piece: torch.Tensor, part: Any) -> bool:
    """Return whether a piece of a wider product, whose rows are apart in memory, can be viewed as the product is."""
    for user in part.users:
        if user.op == "call_method" and user.target == "view":
            try:
                piece.view(user.meta["example_value"].shape)
            except (RuntimeError, ValueError):  # a ValueError while torch traces
                return False
    return True


def _forward(layers: CompiledLayers, layer: torch.nn.Module, index: int, compiled: Callable[..., Any]) -> Any:
    """Return the forward of one layer, with arguments that look alike for all layers."""
    import torch

    unmasked = False
    parameters = [*inspect.signature(type(layer).forward).parameters.values()][1:]
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    unnamed = sum(one.kind is one.POSITIONAL_ONLY for one in parameters)

    def forward(*arguments: Any, **named: Any) -> Any:
        nonlocal unmasked
        rest = (*arguments[:unnamed], *arguments[unnamed + len(names) :])  # of a layer that takes any number
        # Some models give the cache and the mask without their names.
        named |= zip(names, arguments[unnamed:], strict=False)
        name, cache = next((pair for pair in named.items() if isinstance(pair[1], StaticCache)), ("", None))
        if cache is not None:  # `past_key_values`, or `layer_past` of older models
            if index not in cache.layers and not _SUSPENDED.get():
                with suspended():
                    compiled(layer, *rest, **named)  # allocates the part of this layer
            named[name] = cache.layers.get(index, cache)
        if "attention_mask" in named:
            # transformers makes a mask while a CUDA graph is recorded, where it makes none before: the layer would be
            # compiled again, which a recording does not allow.
            if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
                unmasked = named["attention_mask"] is None
            elif unmasked:
                named["attention_mask"] = None
        return layers.run(compiled, layer, *rest, **named)

    return forward


@contextmanager
def suspended() -> Iterator[None]:
    """Return a context manager in which nothing is compiled and compiled functions run eagerly."""
    import torch

    before = _SUSPENDED.set(True)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _SUSPENDED.reset(before)
