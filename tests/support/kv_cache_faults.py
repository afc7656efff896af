"""Faults of a KV cache, injected into the package's own: each of them must fail the check of the texts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from pytest_llmgpu.analysis.answers import Checked, check_texts, compare_texts
from pytest_llmgpu.inference.generation import KernelCache, LayerCache, StaticCache
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.result import CaseResult, Launch
from support.report_factory import make_result

_arguments, _update = StaticCache.arguments, LayerCache.update


def _stale(layer: LayerCache, key: Any, value: Any, *_: Any) -> Any:
    """Keep the prompts of the first batch for all batches."""
    if layer.prefilling and bool(getattr(layer, "filled", False)):
        return key, value
    layer.filled = True  # type: ignore[attr-defined]  # a mark of this fault
    return _update(layer, key, value)


def _of_other_rows(layer: LayerCache, key: Any, value: Any, *_: Any) -> Any:
    """Write the prompt of each row to the next row, also of prompts that share a line."""
    found = _update(layer, key, value)
    if layer.prefilling:
        rows = len(key if layer.columns is None else layer.columns[0])
        for kept in layer.tensors:
            kept[:rows].copy_(kept[:rows].roll(1, 0))
    return found


def _next_position(cache: StaticCache, *given: Any) -> dict[str, Any]:
    """Rotate the query and the key of a decode step by one position too many."""
    arguments = _arguments(cache, *given)
    return arguments | {"position_ids": arguments["position_ids"] + 1}


def _last_token_hidden(cache: StaticCache, *given: Any) -> dict[str, Any]:
    """Mask the token that a decode step reads."""
    arguments = _arguments(cache, *given)
    mask, last = arguments["attention_mask"].clone(), arguments["position_ids"][:, None, None]
    hidden = -1e4 if mask.dtype.is_floating_point else False
    return arguments | {"attention_mask": mask.scatter(-1, last, hidden)}


Fault = tuple[type, str, Any]
"""The class and the member that a fault replaces, and the replacement."""
FAULTS: dict[str, Fault] = {
    "stale": (LayerCache, "update", _stale),
    "of other rows": (LayerCache, "update", _of_other_rows),
    "position": (StaticCache, "arguments", _next_position),
    "mask": (StaticCache, "arguments", _last_token_hidden),
}


def injected(name: str, faults: Mapping[str, Fault] = FAULTS) -> AbstractContextManager[Any]:
    """Return a context in which every KV cache of this process has a fault."""
    owner, member, replacement = faults[name]
    return patch.object(owner, member, replacement, create=True)


def generate(state: RankState, case: Case, fault: str | None, reference: worker.ReferenceTexts | None) -> Launch:
    """In a rank: measure a case that generates, without a fault or with one of the cache that the strategy has."""
    if fault is None:
        worker.warm_up(state, case)
        with state.graphs:
            launch = worker.measure(state).launch
            launch.generation = worker.check_texts(state, reference)
            return launch
    with injected(fault, KERNEL_FAULTS if state.loaded.own_kv_cache else FAULTS):
        return generate(state, case, None, reference)


_prompts = KernelCache.prompts


def _prompts_of_the_first_batch(cache: KernelCache, ids_BS: Any, *given: Any, **named: Any) -> Any:
    """Give the kernels the prompts of the first batch in all batches."""
    kept_BS = vars(cache).setdefault("kept", ids_BS.clone())
    rows, width = map(min, kept_BS.shape, ids_BS.shape)
    ids_BS[:rows, -width:] = kept_BS[:rows, -width:]
    return _prompts(cache, ids_BS, *given, **named)


def _prompts_of_other_rows(cache: KernelCache, ids_BS: Any, *given: Any, **named: Any) -> Any:
    """Give the kernels the prompt of each row in the next row."""
    return _prompts(cache, ids_BS.roll(1, 0), *given, **named)


def _padding_seen(_cache: KernelCache, *_: Any) -> dict[str, Any]:
    """Mask nothing in a decode step."""
    return {}


def _last_token_hidden_from_kernels(cache: KernelCache, rows: int, device: Any) -> dict[str, Any]:
    """Mask the token that a decode step reads."""
    numbers = torch.arange(cache.length + 1, device=device)
    padding_B = vars(cache)["_padding_B"]
    first_B1 = torch.zeros(rows, 1, device=device) if padding_B is None else padding_B[:, None]
    return {"attention_mask": ((numbers >= first_B1) & (numbers < cache.length))[:, None, None]}


KERNEL_FAULTS: dict[str, Fault] = {
    "stale": (KernelCache, "prompts", _prompts_of_the_first_batch),
    "of other rows": (KernelCache, "prompts", _prompts_of_other_rows),
    "mask": (KernelCache, "arguments", _last_token_hidden_from_kernels),
    "padding": (KernelCache, "arguments", _padding_seen),
    "position": (KernelCache, "length", property(lambda _: 0, lambda *_: None)),
}
"""Faults of kernels that keep keys and values themselves, and count positions: a step begins a new text where the
length is 0."""


def result(case: Case, reply: Launch) -> CaseResult:
    """Return the result of a case that generated."""
    launch = Launch(generation=reply.generation)
    return msgspec.structs.replace(make_result(), id=case.id, key=case.key, case=case, launches=[launch])


def check(result: CaseResult, mp: CaseResult | None) -> Checked:
    """Check the texts of a result as a run does, which compares them with those of mp first."""
    if mp is not None:
        result.comparison = compare_texts(result, mp)
    return check_texts(result, mp)
