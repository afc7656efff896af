"""Measure if a replayed forward without a running kernel waits for the host or is between two kernels; prints JSON.

On a GPU:

    python benchmarks/overhead/graph_gaps.py

For LLaMA-7B's shape, rows of 88 tokens, milliseconds a forward: `waited_ms`: input, replay and result, the host waiting
for each; `row_ms`: replays in a row, by events of the GPU; `launch_ms`: what a launch takes on the host. Under torch's
profiler: `profile_busy_ms` in kernels, `small_gaps_ms` in gaps below 20 us, and the largest gaps.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

_TOKENS, _REPLAYS, _REPEATS, _PROFILED, _SMALL_NS = 88, 400, 3, 4, 20_000


def main() -> int:
    """Measure batch sizes 1 and 8."""
    torch.set_default_dtype(torch.float16)
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    with torch.inference_mode():
        print(json.dumps({rows: _measured(model, rows) for rows in (1, 8)}))
    return 0


def _measured(model: LlamaForCausalLM, rows: int) -> dict[str, Any]:
    host = torch.randint(5, 30_000, (rows, _TOKENS))
    ids, replays = host.cuda(), _REPLAYS // rows

    def forward() -> torch.Tensor:
        return model(ids, use_cache=False).logits.float().log_softmax(-1).sum((1, 2))

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward()

    def whole() -> None:
        ids.copy_(host)
        graph.replay()
        found.cpu()

    for _ in range(20):
        graph.replay()
    return {
        "waited_ms": [statistics.mean(_times_ms(whole, replays)) for _ in range(_REPEATS)],
        "row_ms": [_row_ms(graph, replays) for _ in range(_REPEATS)],
        "launch_ms": statistics.median(_times_ms(graph.replay, replays, wait=False)),
        **_gaps(whole),
    }


def _times_ms(run: Callable[[], object], number: int, *, wait: bool = True) -> list[float]:
    """Return the milliseconds of each run, which begins on an idle GPU, with or without the wait for its end."""
    times_ms = []
    for _ in range(number):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        run()
        if wait:
            torch.cuda.synchronize()
        times_ms.append(1000 * (time.perf_counter() - began_s))
    torch.cuda.synchronize()
    return times_ms


def _row_ms(graph: torch.cuda.CUDAGraph, number: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(number):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / number


def _gaps(run: Callable[[], object]) -> dict[str, Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_PROFILED):
            run()
        torch.cuda.synchronize()
    results: Any = profile.profiler
    events = [one for one in results.kineto_results.events() if one.device_type() == torch.autograd.DeviceType.CUDA]
    spans = sorted((one.start_ns(), one.start_ns() + one.duration_ns()) for one in events)
    gaps_ns = sorted(max(0, after[0] - before[1]) for before, after in itertools.pairwise(spans))
    return {
        "profile_busy_ms": sum(end - begin for begin, end in spans) / _PROFILED / 1e6,
        "kernels": len(spans) / _PROFILED,
        "small_gaps_ms": sum(one for one in gaps_ns if one < _SMALL_NS) / _PROFILED / 1e6,
        "large_gaps_us": [one / 1000 for one in gaps_ns[-12:]],
        "median_gap_ns": statistics.median(gaps_ns),
    }


if __name__ == "__main__":
    raise SystemExit(main())
