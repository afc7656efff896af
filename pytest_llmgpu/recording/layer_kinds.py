"""What ran in each kind of layer in an eager pass: its implementation, its kernels, and the experts of each token.

The config of transformers has the names of implementations. The kernels behind a name depend on shapes, masks and
versions: they are the ops that torch dispatches in the modules of a kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference import models
from pytest_llmgpu.report.work import Routing

if TYPE_CHECKING:
    import torch

_EXPERTS, _TORCH = "experts", "torch"
_ATTENTION_OP = re.compile(r"_scaled_dot_product_([a-z]+)_attention")
_PRODUCT = re.compile(r"::(\w*mm\w*)$")
_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages with kernels of layers that do not attend, which transformers uses where they are installed."""
_MATRIX = 2


class LayerKinds:
    """Notes the kind of layer that runs, and the experts of its tokens, by hooks that compute nothing."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        config = getattr(model, "config", None)
        self._model, self._config = model, config if hasattr(config, "get_text_config") else None
        self._experts = models.experts_of(self._config)
        self._ops: dict[str, set[str]] = defaultdict(set)
        self._entered: list[str] = []
        self._routes: list[torch.Tensor] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While entered, the layers of the model have hooks."""
        types = dict(enumerate(getattr(self._config and self._config.get_text_config(), "layer_types", None) or ()))
        alike = len({kind for kind in types.values() if _is_attention(kind)}) <= 1
        with ExitStack() as hooks:
            for module in self._model.modules() if self._model is not None and self._config is not None else ():
                number, kind = getattr(module, "layer_idx", None), None
                if isinstance(number, int):
                    kind = types.get(number, "attention").replace("_", " ")
                    kind = "attention" if alike and _is_attention(kind) else kind
                if kind is not None or (self._experts and hasattr(module, "num_experts")):
                    before, after = partial(self._enter, kind), lambda *_: self._leave()
                    hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(after, always_call=True))
            yield

    def _enter(self, kind: str | None, module: torch.nn.Module, arguments: tuple[Any, ...], named: Any) -> None:
        # Experts are called with the hidden states, and the numbers of the experts of each token [T, K].
        given: list[Any] = [*arguments, *named.values(), None, None]
        are_experts = kind is None and _is_matrix(given[0], of_numbers=False) and _is_matrix(given[1], of_numbers=True)
        # In transformers 5.17 whole experts of tp are called with their numbers on this rank.
        of_model = hasattr(module, "_is_expert_parallel") or getattr(module, "num_experts", None) == self._experts
        self._routes += given[1:2] * (are_experts and of_model)
        outer = self._entered[-1] if self._entered else ""
        self._entered.append(_EXPERTS if are_experts else kind or outer)  # a router has experts, too

    def _leave(self) -> None:
        self._entered.pop()

    def add(self, op: str) -> None:
        """Note an op of the layer that runs."""
        if self._entered and self._entered[-1]:
            self._ops[self._entered[-1]].add(op)

    def implementations(self) -> dict[str, str]:
        """Return the implementation of each kind of layer with the kernels that ran: `sdpa (flash)`."""
        chosen, found = models.implementations(self._config), {}
        for kind, ops in sorted(self._ops.items()):
            name, pattern = chosen.get("attention", ""), _ATTENTION_OP
            if kind == _EXPERTS:
                name, pattern = chosen.get(_EXPERTS, ""), _PRODUCT
            elif not _is_attention(kind):
                found[kind] = _TORCH
                continue
            kernels = sorted({match[1] for op in ops if (match := pattern.search(op))})
            kernels = kernels or ["math"] * (name == "sdpa")
            found[kind] = f"{name} ({', '.join(kernels)})" if kernels else name
        return found

    def routing(self) -> Routing | None:
        """Return how tokens were routed to experts; None for a model without experts that can be counted."""
        counts = [route.flatten().bincount() for route in self._routes]
        if not counts:
            return None
        return Routing(
            experts=self._experts,
            tokens=len(self._routes[0]),
            touched=[int(count.count_nonzero()) for count in counts],
            busiest=[int(count.max()) for count in counts],
        )


def _is_matrix(given: Any, *, of_numbers: bool) -> bool:
    return getattr(given, "ndim", 0) == _MATRIX and given.dtype.is_floating_point is not of_numbers


def _is_attention(kind: str) -> bool:
    return kind.endswith("attention") and not kind.startswith("linear")


def with_packages(implementations: Mapping[str, str], files: Iterable[str]) -> dict[str, str]:
    """Return implementations in which layers that do not attend have the packages whose files ran, else torch."""
    packages = ", ".join(sorted({file.partition("/")[0] for file in files} & {*_PACKAGES}))
    return {kind: packages or name if name == _TORCH else name for kind, name in implementations.items()}
