"""Compare strategy mp over all GPUs with a bare loop of forwards on the same dispatched model; prints JSON.

The bare loop has its inputs on the device in advance, runs decoder and output head on the rows of the endings, and
waits for no batch; `ours` is `scoring.score` as a case runs it. The two are interleaved, so that a busy machine slows
both.

    python benchmarks/overhead/mp_forward.py --dataset hellaswag_val.jsonl --batch-sizes 64
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pytest_llmgpu.inference import batching, models, scoring
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import Loaded


def main() -> None:
    """Measure and print."""
    arguments = _parse()
    dataset = HellaSwag().load(arguments.dataset, rootdir=Path.cwd(), limit=arguments.limit)
    source = models.resolve(arguments.model, load_format="dummy", texts=dataset.texts(), rootdir=Path.cwd())
    case = Case(
        strategy="mp",
        batch_size=1,
        model=source.name,
        load_format="dummy",
        dtype=arguments.dtype,
        device="cuda",
        devices=torch.cuda.device_count(),
        dataset=dataset.name,
        dataset_sha256=dataset.sha256,
        tokenizer_sha256=source.tokenizer_sha256,
    )
    loaded = LayerParallel().load(case, source)
    requests = batching.encode(
        HellaSwag(), dataset.items, models.load_tokenizer(source), models.max_length(loaded.config)
    )
    rows = {size: _compare(loaded, requests, size, arguments.repeats) for size in arguments.batch_sizes}
    facts = {**vars(arguments), "dataset": dataset.name, "devices": case.devices, "torch": torch.__version__}
    print(json.dumps({"facts": facts, "rows": rows}))


def _compare(loaded: Loaded, requests: batching.Requests, batch_size: int, repeats: int) -> dict[str, Any]:
    plan = batching.plan(requests, batch_size)
    placed: dict[str, Any] = {"input_device": loaded.input_device, "devices": loaded.devices}
    scoring.warm_up(loaded.model, plan, **placed)
    arms: dict[str, Callable[[], Any]] = {
        "bare": _bare(loaded, plan),
        "ours": lambda: scoring.score(loaded.model, plan, **placed),
    }
    taken_s: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats):
        for name, arm in list(arms.items())[:: 1 if turn % 2 else -1]:
            taken_s[name].append(_time(arm, loaded))
    ratios = [bare / ours for bare, ours in zip(taken_s["bare"], taken_s["ours"], strict=True)]
    ms = {name: round(1e3 * statistics.median(values) / len(plan.batches), 3) for name, values in taken_s.items()}
    return {"batches": len(plan.batches), "ms_a_batch": ms, "over_bare": round(statistics.median(ratios), 4)}


def _bare(loaded: Loaded, plan: batching.Plan) -> Callable[[], None]:
    model: Any = loaded.model
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inputs = []
    for batch in plan.batches:
        ids, rows, *_ = batch.packed.to(loaded.input_device).split(batch.sizes)
        inputs.append((ids.view(batch.rows, batch.width), rows))

    def run() -> None:
        with torch.inference_mode():
            for ids_BS, rows_N in inputs:
                hidden_BSH = decoder(input_ids=ids_BS, use_cache=False).last_hidden_state
                head(hidden_BSH.flatten(0, 1)[rows_N.to(hidden_BSH.device)])

    return run


def _time(arm: Callable[[], Any], loaded: Loaded) -> float:
    for device in loaded.devices:
        torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    arm()
    for device in loaded.devices:
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-30b", help="a preset")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--dataset", default="bundled")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--batch-sizes", type=lambda text: [int(size) for size in text.split(",")], default=[64])
    parser.add_argument("--repeats", type=int, default=6)
    return parser.parse_args()


if __name__ == "__main__":
    main()
