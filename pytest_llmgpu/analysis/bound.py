"""The shortest time in which a machine could run a case: by the model's formula and the ceilings of the session.

FLOPs that were counted play no part: a program that computes too much would raise its own bound.
"""

from __future__ import annotations

import statistics
from typing import Literal

from pytest_llmgpu.report.case import PLAIN_INPUTS
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.work import Bound, Ceilings, ModelSize, Work

_NO_CEILING = ("peer_copy", "send", "recv")
"""Traffic that is no collective over all ranks: nothing measured bounds its time, so it counts as 0."""


def bound(result: CaseResult, work: Work | None, ceilings: Ceilings | None) -> Bound | str:
    """Return the shortest time of all batches of a completed case, or the reason why it cannot be computed.

    The devices of one rank run one after the other (a forward passes through their layers in turn), ranks run at the
    same time and have equal parts of the model. The slowest GPU counts.
    """
    if work is None or work.model is None:
        missing = "there were no work passes" if work is None else work.why.get("model", "it was not recorded")
        return f"the size of the model is not known: {missing}"
    if not result.launches or not result.inference_s:
        return "the case has no finished batches"
    uuids = {uuid for rank in work.ranks for uuid in rank.uuids}
    if not uuids:
        return "the case ran on a CPU"
    devices = [] if ceilings is None else [device for device in ceilings.devices if device.uuid in uuids]
    products = [rate for device in devices if (rate := device.gemm_flops_per_s.get(result.case.dtype))]
    copies = [rate for device in devices if (rate := device.copy_bytes_per_s)]
    if min(len(products), len(copies)) < len(uuids):
        return f"the ceilings for {result.case.dtype} were not measured on every GPU of the case"
    # Of all ranks together.
    flops_per_s, bytes_per_s = len(work.ranks) * min(products), len(work.ranks) * min(copies)
    if result.case.quantization not in PLAIN_INPUTS:
        flops_per_s *= 2  # the rate of products in 8 bits on every GPU that has them
    wire_s = _wire_s(result, ceilings)
    if isinstance(wire_s, str):
        return wire_s
    model, launch = work.model, result.launches[-1]
    prefills = [
        (1, forward_flops(model, tokens, sequences), weights_read(model, tokens, _touched(launch.prefill_work or work)))
        for tokens, sequences in zip(launch.batches.tokens, launch.batches.sequences, strict=True)
    ]
    steps = _steps(model, launch, _touched(work))
    compute_s = sum(number * flops for number, flops, _ in prefills + steps) / flops_per_s
    memory_s = sum(number * read_bytes for number, _, read_bytes in prefills + steps) / bytes_per_s
    prefills_s, steps_s = (
        sum(number * max(flops / flops_per_s, size / bytes_per_s) for number, flops, size in forwards)
        for forwards in (prefills, steps)
    )
    routing = work.ranks[0].routing
    read = None if routing is None else statistics.fmean(routing.touched)
    expected = None if routing is None else routing.experts * (1 - (1 - model.active_experts) ** routing.tokens)
    times: dict[Literal["compute", "memory", "wire"], float]
    times = {"compute": compute_s, "memory": memory_s, "wire": wire_s}
    bound_s, step_count = prefills_s + steps_s + wire_s, sum(number for number, *_ in steps)
    return Bound(
        compute_s=compute_s,
        memory_s=memory_s,
        wire_s=wire_s,
        bound_s=bound_s,
        limited_by=max(times, key=lambda name: times[name]),
        share=bound_s / result.inference_s,
        prefill_s=prefills_s / len(prefills) if result.case.generates else None,
        step_s=steps_s / step_count if step_count else None,
        experts_read=read,
        experts_expected=expected,
    )


def _steps(model: ModelSize, launch: Launch, touched: float) -> list[tuple[int, float, float]]:
    """Return the number of decode steps of each batch, and FLOPs and bytes of its mean step; none for scoring."""
    texts = launch.generation
    if texts is None or not texts.kv_cache_formula_bytes:
        return []
    batches, new_tokens = launch.batches, max(texts.new_tokens, default=1)
    rows = max(batches.sequences)
    token_bytes = texts.kv_cache_formula_bytes / (rows * (max(texts.prompt_tokens, default=0) + new_tokens))
    found = []
    for tokens, sequences in zip(batches.tokens, batches.sequences, strict=True):
        read = tokens + sequences * new_tokens / 2  # tokens of all rows before the mean step
        flops = 2 * model.parameters * sequences + 4 * model.layers * model.attention_width * read
        found.append((new_tokens - 1, flops, weights_read(model, sequences, touched) + token_bytes * read))
    return found


def _touched(work: Work) -> float:
    """Return the share of the experts that a work pass read, 1.0 where none were counted."""
    routing = work.ranks[0].routing
    return 1.0 if routing is None else statistics.fmean(routing.touched) / routing.experts


def weights_read(model: ModelSize, tokens: int, touched: float = 1.0) -> float:
    """Return the bytes of the weights that a forward of so many tokens reads.

    Experts are those that were counted, or the expected number for uniform routing where that is less: each token
    misses an expert with the probability 1 - active experts / experts.
    """
    return model.weights_bytes - model.experts_bytes * max((1 - model.active_experts) ** tokens, 1 - touched)


def forward_flops(model: ModelSize, tokens: int, sequences: int) -> float:
    """Return the least floating-point operations of a causal forward: 2 x parameters x tokens, plus attention.

    Attention is two products of queries with the keys and values before them, 2 x layers x width x length² for a
    sequence. The square of the mean length is no more than the mean of the squares, so the lengths themselves are not
    needed. `tokens` are those of all sequences, without padding.
    """
    attention = 2 * model.layers * model.attention_width * tokens**2 / sequences if sequences else 0.0
    return 2 * model.parameters * tokens + attention


def _wire_s(result: CaseResult, ceilings: Ceilings | None) -> float | str:
    """Return the time of the collectives of the rank that sends most, or the reason why it cannot be computed."""
    if result.traffic is None:
        return f"traffic is not known: {result.why.get('traffic', 'it was not counted')}"
    sent = [sum(one.sent_bytes for one in rank if one.collective not in _NO_CEILING) for rank in result.traffic.ranks]
    largest = max(sent, default=0)
    if not largest:
        return 0.0
    if ceilings is None or not ceilings.all_reduce_bytes_per_s:
        return "no all-reduce was measured"
    return largest / ceilings.all_reduce_bytes_per_s
