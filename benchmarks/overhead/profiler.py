"""What profiling costs what is profiled; prints JSON.

The same batches are scored with the sampler running and without it, in turn, in one process. On a machine without NVML
the sampler reads the stub of the tests: 8 GPUs whose PCIe calls take 20 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sampler import stub_environment

from pytest_llmgpu import models, scoring
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.window import Profiler
from pytest_llmgpu.tasks import hellaswag

LIMIT_PCT = 0.5


def main() -> None:
    """Measure and print."""
    arguments = parse()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    dataset = hellaswag.load(arguments.dataset, rootdir=Path.cwd(), limit=arguments.limit)
    load_format = "auto" if arguments.model == "bundled" else "dummy"
    source = models.resolve(arguments.model, load_format=load_format, texts=dataset.texts(), rootdir=Path.cwd())
    if load_format == "dummy":
        model = models.skeleton(source, dtype)
        models.materialise(model, lambda _: device, seed=0, dtype=dtype)
    else:
        model = models.checkpoint(source, dtype, {"": arguments.device})
    requests = scoring.encode(dataset.items, models.load_tokenizer(source), models.max_length(model.config))
    plan = scoring.plan(requests, arguments.batch_size)
    scoring.warm_up(model, plan, input_device=device, devices=[device])
    with tempfile.TemporaryDirectory() as folder:
        environment = None if nvml.inventory().gpus else stub_environment(Path(folder))
        pairs = [measure_pair(model, plan, device, environment, turn) for turn in range(arguments.pairs)]
    ratios = [on / off for on, off in pairs]
    result = {
        "settings": vars(arguments) | {"nvml": "stub" if environment else "real"},
        "seconds_off": round(statistics.median(off for _, off in pairs), 4),
        "seconds_on": round(statistics.median(on for on, _ in pairs), 4),
        "added_pct": round(100 * (statistics.median(ratios) - 1), 3),
        "added_pct_of_each_pair": [round(100 * (ratio - 1), 3) for ratio in ratios],
        "limit_pct": LIMIT_PCT,
    }
    json.dump(result, sys.stdout, indent=2)
    print()


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="bundled or a preset")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--dataset", default="bundled", help="bundled, hellaswag or a JSON Lines file")
    parser.add_argument("--limit", type=int, default=100, help="items")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=10)
    return parser.parse_args()


def measure_pair(
    model: Any, plan: scoring.Plan, device: torch.device, environment: dict[str, str] | None, turn: int
) -> tuple[float, float]:
    """Return the seconds with the sampler and without it; which comes first changes from pair to pair."""
    seconds = {}
    for profiled in (True, False) if turn % 2 else (False, True):
        profiler = Profiler(1 / 6, environment=environment)
        if profiled:
            profiler.start()
            if profiler.why is not None:
                sys.exit(f"the sampler does not run: {profiler.why}")
        began_s = time.perf_counter()
        scoring.score(model, plan, input_device=device, devices=[device])
        seconds[profiled] = time.perf_counter() - began_s
        profiler.close()
    return seconds[True], seconds[False]


if __name__ == "__main__":
    main()
