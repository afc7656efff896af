"""Compare generation and prefill with bare replays of their CUDA graphs and with transformers; prints JSON lines.

One line as each piece finishes, of every strategy in turn, all with the same random weights:
- generate: `ours` is `Generator.generate` as a case runs it; `bare` replays the graphs of the same batches without the
  loop around them (on a CPU: runs their forwards), which gives `overhead`; `peer` is `model.generate` of transformers,
  and `static` the same with its static cache, which transformers compiles on a GPU (strategy mp);
- prefill: `ours` is `scoring.score` as a case runs it; `bare` is the decoder alone, replayed; `peer` is the decoder of
  transformers, run eagerly.

The arms of a piece are interleaved, so that a busy machine slows all of them. Milliseconds are medians.

    python benchmarks/overhead/generation.py --model llama-7b --device cuda --dtype float16
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pytest_llmgpu.inference import compiled_layers, models, scoring
from pytest_llmgpu.inference.batching import Batch, Request, Requests
from pytest_llmgpu.inference.cuda_graphs import GraphedDecoder
from pytest_llmgpu.inference.generation import Generator
from pytest_llmgpu.ranks import graph_choice, registered
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies.protocol import Loaded, Strategy

_BATCHES = 2
Arms = dict[str, Callable[[], Any]]


def main() -> None:
    """Measure and print."""
    arguments = _parse()
    facts = vars(arguments) | {"torch": torch.__version__}
    if arguments.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    _print("settings", **facts)
    for name in arguments.strategies:
        strategy: Strategy = registered.make(registered.find(name))
        began_s = time.perf_counter()
        loaded = _load(strategy, arguments)
        _print("load", strategy=name, load_s=time.perf_counter() - began_s)
        for size in arguments.batch_sizes:
            _print("generate", strategy=name, batch_size=size, **_generate(strategy, loaded, size, arguments))
        for size in arguments.prefill_batch_sizes:
            _print("prefill", strategy=name, batch_size=size, **_prefill(strategy, loaded, size, arguments))
        del loaded
        gc.collect()  # the forwards of compiled layers refer to each other
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


def _generate(strategy: Strategy, loaded: Loaded, batch_size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    new_tokens = arguments.new_tokens
    requests = _requests(loaded, _BATCHES * batch_size, arguments.prompt_tokens, new_tokens)
    decision = graph_choice.decide(loaded, requests, batch_size, requested="auto")
    plan, began_s = decision.plan, time.perf_counter()
    strategy.prepare(loaded, batch_size, plan.tokens)
    steps_ms: list[float] = []
    first_ms: list[float] = []
    with graph_choice.generator(loaded, plan, recorded_tokens=decision.recorded_tokens) as generator:
        generator.warm_up()
        warmed_s = time.perf_counter() - began_s

        def ours() -> None:
            _, texts, _ = generator.generate()
            steps_ms.extend(1e3 * step_s for step_s in texts.step_s)
            first_ms.extend(1e3 * first_s for first_s in texts.first_token_s)

        arms: Arms = {
            "ours": ours,
            "bare": lambda: [_replay(generator, batch, new_tokens) for batch in plan.batches],
            "peer": lambda: [_peer(loaded, batch, new_tokens) for batch in plan.batches],
        }
        batch_ms = _interleaved(arms, loaded, arguments.repeats)
        kv_cache_bytes = generator.generate()[1].kv_cache_bytes
    if loaded.compiled is None:  # after our graphs: transformers records some itself
        static: Arms = {"static": lambda: [_peer(loaded, batch, new_tokens, "static") for batch in plan.batches]}
        batch_ms |= _interleaved(static, loaded, arguments.repeats)
    return {
        **_started(loaded, decision, warmed_s),
        "first_token_ms": statistics.median(first_ms),
        "token_ms": statistics.median(steps_ms) if steps_ms else None,
        "kv_cache_bytes": kv_cache_bytes,
        "overhead": statistics.median(a / b for a, b in zip(batch_ms["ours"], batch_ms["bare"], strict=True)) - 1,
        **_compared(batch_ms),
        **{
            f"{name}_token_ms": statistics.median(batch_ms[name]) / _BATCHES / new_tokens
            for name in ("peer", "static")
            if name in batch_ms
        },
    }


def _prefill(strategy: Strategy, loaded: Loaded, batch_size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    requests = _requests(loaded, _BATCHES * batch_size, arguments.prefill_tokens)
    decision = graph_choice.decide(loaded, requests, batch_size, requested="auto")
    plan, began_s = decision.plan, time.perf_counter()
    strategy.prepare(loaded, batch_size, plan.tokens)
    placed: dict[str, Any] = {"input_device": loaded.input_device, "devices": loaded.devices}
    decoder: Any = loaded.model.get_decoder()  # type: ignore[operator]  # every transformers model has it
    inputs = [_ids(batch).to(loaded.input_device) for batch in plan.batches]

    def forwards() -> None:
        with torch.inference_mode():
            for ids_BS in inputs:
                decoder(input_ids=ids_BS, use_cache=False)

    recorded = decision.execution == "cuda_graphs"
    graphs = GraphedDecoder(loaded.model, loaded.devices[0]) if recorded else contextlib.nullcontext()
    with graphs:
        scoring.warm_up(loaded.model, plan, **placed)
        warmed_s = time.perf_counter() - began_s

        def eager() -> None:
            suspended = graphs.suspended() if isinstance(graphs, GraphedDecoder) else contextlib.nullcontext()
            with suspended, compiled_layers.suspended():
                forwards()

        arms: Arms = {"ours": lambda: scoring.score(loaded.model, plan, **placed), "bare": forwards, "peer": eager}
        batch_ms = _interleaved(arms, loaded, arguments.repeats)
    return {**_started(loaded, decision, warmed_s), **_compared(batch_ms)}


def _started(loaded: Loaded, decision: graph_choice.Decision, warmed_s: float) -> dict[str, Any]:
    compile_s = None if loaded.compiled is None else loaded.compiled.compile_s
    return {
        "execution": decision.execution,
        "warmup_s": warmed_s - (compile_s or 0.0),
        "compile_s": compile_s,
        "graphs_compiled": None if loaded.compiled is None else loaded.compiled.graphs,
    }


def _compared(batch_ms: dict[str, list[float]]) -> dict[str, Any]:
    medians = {f"{name}_batch_ms": statistics.median(values) / _BATCHES for name, values in batch_ms.items()}
    ratio = statistics.median(peer / ours for peer, ours in zip(batch_ms["peer"], batch_ms["ours"], strict=True))
    return {**medians, "peer_over_ours": ratio}


def _replay(generator: Generator, batch: Batch, new_tokens: int) -> None:
    """Run the forwards of a batch without the loop around them."""
    graphs = generator._graphs  # noqa: SLF001 - without the loop that would replay them
    shape = batch.rows, batch.width
    with generator._head, torch.inference_mode():  # noqa: SLF001 - see above
        if shape in graphs and (batch.rows, 0) in graphs:
            graphs[shape].replay()
            for _ in range(new_tokens - 1):
                graphs[batch.rows, 0].replay()
            return
        generator._prefill(batch)  # noqa: SLF001 - see above
        for _ in range(new_tokens - 1):
            generator._step(batch.rows)  # noqa: SLF001 - see above


def _peer(loaded: Loaded, batch: Batch, new_tokens: int, cache: str | None = None) -> None:
    """Generate as a user of transformers does; compiled layers run eagerly, since its cache grows by default."""
    model: Any = loaded.model
    ids_BS = _ids(batch).to(loaded.input_device)
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "cache_implementation": cache}
    with contextlib.nullcontext() if cache else compiled_layers.suspended(), torch.inference_mode():
        model.generate(
            ids_BS, attention_mask=torch.ones_like(ids_BS), do_sample=False, pad_token_id=0, use_cache=True, **lengths
        ).tolist()


def _interleaved(arms: Arms, loaded: Loaded, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each arm, in rounds after a first one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name in list(arms)[:: 1 if turn % 2 else -1]:
            scoring.synchronize(loaded.devices)
            began_s = time.perf_counter()
            arms[name]()
            scoring.synchronize(loaded.devices)
            if turn:
                found[name].append(1e3 * (time.perf_counter() - began_s))
    return found


def _requests(loaded: Loaded, rows: int, tokens: int, new_tokens: int = 0) -> Requests:
    """Return random rows of equal length."""
    drawn = torch.randint(0, loaded.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return Requests(
        item_ids=tuple(map(str, range(rows))),
        endings=(1,) * rows,
        requests=tuple(Request(tokens=(*row, 0), ending=1) for row in drawn.tolist()),
        max_length=tokens,
        new_tokens=new_tokens,
    )


def _ids(batch: Batch) -> torch.Tensor:
    return batch.packed[: batch.rows * batch.width].view(batch.rows, batch.width)


def _load(strategy: Strategy, arguments: argparse.Namespace) -> Loaded:
    bundled = arguments.model == "bundled"
    texts: Sequence[str] = [] if bundled else ["Someone counts."]
    load_format = "auto" if bundled else "dummy"
    source = models.resolve(arguments.model, load_format=load_format, texts=texts, rootdir=Path.cwd())
    case = Case(
        strategy=strategy.name,
        backend=strategy.backend,
        batch_size=1,
        model=source.name,
        load_format=load_format,
        dtype=arguments.dtype,
        device=arguments.device,
        devices=1,
        dataset="random",
        dataset_sha256="",
        tokenizer_sha256=source.tokenizer_sha256,
    )
    strategy.check(case, source)
    return strategy.load(case, source)


def _print(piece: str, **figures: Any) -> None:
    print(json.dumps({"piece": piece, **figures}), flush=True)


def _parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="bundled, or a preset with random weights")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=["mp", "compile"])
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 64], help="of generation")
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill-batch-sizes", type=numbers, default=[1, 32])
    parser.add_argument("--prefill-tokens", type=int, default=104)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
