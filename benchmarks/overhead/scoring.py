"""Compare speed and memory of four ways of scoring; prints JSON.

They are interleaved, so that a busy machine slows all of them:
- bare: decoder and output head on the rows of the endings over the same batches, with the inputs on the device in
  advance, without waiting for the end of a batch;
- lm_eval: lm-evaluation-harness's HFLM.loglikelihood as a user calls it, with its default settings;
- lm_eval_tokenised: the same without tokenising; this is the reference for `ours`;
- ours: pytest_llmgpu.inference.scoring.score on a plan, as the plugin calls it: without tokenising and planning.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from pytest_llmgpu.inference import batching, models, scoring, weights
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.inference.tasks.protocol import Item

RANDOM = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
RANDOM["num_key_value_heads"] = RANDOM["num_attention_heads"]


def main() -> None:
    """Measure and print."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    dataset = HellaSwag().load(arguments.dataset, rootdir=Path.cwd(), limit=arguments.limit)
    preset = "llama-7b" if arguments.model == "random" else arguments.model
    source = models.resolve(preset, load_format="dummy", texts=dataset.texts(), rootdir=Path.cwd())
    if arguments.model == "random":
        source = msgspec.structs.replace(source, name="random", config={**source.config, **RANDOM})
    model = weights.skeleton(source, dtype)
    weights.materialise(model, lambda _: device, seed=0)
    tokenizer = models.load_tokenizer(source)
    requests = batching.encode(HellaSwag(), dataset.items, tokenizer, models.max_length(model.config))
    rows = {}
    for batch_size in arguments.batch_sizes:
        plan = batching.plan(requests, batch_size)
        theirs, theirs_tokenised = lm_eval(model, tokenizer, dataset.items, batch_size)
        arms: dict[str, Callable[[], Any]] = {
            "bare": bare(model, plan, device),
            "lm_eval": theirs,
            "lm_eval_tokenised": theirs_tokenised,
            "ours": functools.partial(scoring.score, model, plan, input_device=device, devices=[device]),
        }
        rows[batch_size] = measure(arms, len(requests.requests), arguments.repeats, device)
        print(f"batch size {batch_size} done", file=sys.stderr)
    facts = vars(arguments) | {"dataset": dataset.name, "sequences": len(requests.requests), "torch": torch.__version__}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    json.dump({"settings": facts, "batch_sizes": rows}, sys.stdout, indent=2)
    print()


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random", help="random (4 layers, hidden 256, 32,000 tokens) or a preset")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--dataset", default="bundled", help="bundled, hellaswag or a JSON Lines file")
    parser.add_argument("--limit", type=int, default=250, help="items")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def bare(model: Any, plan: batching.Plan, device: torch.device) -> Callable[[], None]:
    """Return the bare loop."""
    inputs = []
    for batch in plan.batches:
        ids, hidden, _, _ = batch.packed.to(device).split(batch.sizes)
        inputs.append((ids.view(batch.rows, batch.width), hidden))
    decoder, head = model.get_decoder(), model.get_output_embeddings()

    def loop() -> None:
        with torch.inference_mode():
            for ids, hidden in inputs:
                states = decoder(input_ids=ids, use_cache=False).last_hidden_state
                head(states.flatten(0, 1)[hidden])

    return loop


def lm_eval(
    model: Any, tokenizer: Any, items: Sequence[Item], batch_size: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return lm-evaluation-harness's scoring, with and without its tokenising."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=(item.context, f" {ending}"), idx=number)
        for item in items
        for number, ending in enumerate(item.endings)
    ]
    tokenised = [((pair := request.args), *lm._encode_pair(*pair)) for request in requests]  # noqa: SLF001 - its own tokenising

    def with_tokenising() -> None:
        lm.loglikelihood(requests, disable_tqdm=True)

    def without() -> None:
        lm._loglikelihood_tokens(tokenised, disable_tqdm=True)  # noqa: SLF001 - its scoring alone

    return with_tokenising, without


def measure(
    arms: dict[str, Callable[[], Any]], sequences: int, repeats: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Run the arms in turn, starting with a different one each time, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    peaks: dict[str, int] = {}
    names = list(arms)
    for repeat in range(repeats + 1):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            arms[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                peaks[name] = torch.cuda.max_memory_allocated(device)
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    result: dict[str, dict[str, Any]] = {
        "sequences_per_s": {name: sequences / statistics.median(values) for name, values in seconds.items()},
        # The median of the ratios within a round: a slow round does not change it.
        "ours_over": {
            name: statistics.median(other / own for other, own in zip(seconds[name], seconds["ours"], strict=True))
            for name in names[:-1]
        },
        "ours_over_of_fastest": {name: min(seconds[name]) / min(seconds["ours"]) for name in names[:-1]},
    }
    if peaks:
        result["peak_allocated_bytes"] = peaks
    return result


if __name__ == "__main__":
    main()
