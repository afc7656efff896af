"""Measure how much profiling slows down the profiled program; prints JSON.

    python benchmarks/overhead/profiler.py

A fixed number of passes over the same batches, of about a second and a half, is scored alternately in a window of the
profiler and without it, in one process. The result is the ratio within each pair, because a drift of the machine slows
both. On a GPU the model has the 7B shape and runs as CUDA graphs at batch size 4: forwards that wait for the CPU vary
by 10 % with other load on the CPU, and those at the GPU's power limit by 2 % with its temperature. On a CPU it is the
bundled model, run eagerly. On a machine without NVML the sampler reads the tests' stub. `ok`: the median lies within
the limit; `sure`: its whole interval does. The exit status is 1 if it is not ok; on a CPU, which other programs share,
only if the whole interval lies above the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from sampler import stub_environment

from pytest_llmgpu.inference import batching, cuda_graphs, models, scoring, weights
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.profiler import Profiler

LIMIT_PCT = 0.2


def main() -> int:
    """Measure and print; return the exit status (see `status`)."""
    arguments = parse()
    with workload(arguments) as run, tempfile.TemporaryDirectory() as folder:
        passes = max(1, round(arguments.seconds / min(_time(run, 1) for _ in range(2))))
        environment = None if nvml.inventory().gpus else stub_environment(Path(folder), older=False)
        os.environ.update(environment or {})  # of the sampler
        pairs = [measure_pair(run, passes, turn) for turn in range(arguments.pairs)]
    added_pct = [100 * (on / off - 1) for on, off in pairs]
    median = statistics.median(added_pct)
    least, most, confidence = interval(added_pct)
    result = {
        "settings": vars(arguments) | {"nvml": "stub" if environment else "real", "torch": torch.__version__},
        "passes": passes,
        "seconds_off": round(statistics.median(off for _, off in pairs), 4),
        "seconds_on": round(statistics.median(on for on, _ in pairs), 4),
        "added_pct": round(median, 3),
        "interval_pct": [round(least, 3), round(most, 3)],
        "interval_confidence": round(confidence, 4),
        "added_pct_of_each_pair": [round(each, 3) for each in added_pct],
        "limit_pct": LIMIT_PCT,
        **judged(median, least, most),
    }
    if arguments.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    json.dump(result, sys.stdout, indent=2)
    print()
    if not result["sure"]:
        print(
            f"not statistically significant: {confidence:.1%} interval of the median {least:+.3f} to {most:+.3f} %",
            file=sys.stderr,
        )
    return status(median, least, arguments.device)


def judged(median: float, least: float, most: float) -> dict[str, bool]:
    """Return whether the median lies within the limit, and whether its interval does, all in percent."""
    return {"ok": abs(median) < LIMIT_PCT, "sure": least > -LIMIT_PCT and most < LIMIT_PCT}


def status(median: float, least: float, device: str) -> int:
    """Return the exit status: on a GPU 1 if the median exceeds the limit, on a CPU 1 if the whole interval does."""
    return int(least > LIMIT_PCT if device == "cpu" else abs(median) >= LIMIT_PCT)


def parse() -> argparse.Namespace:
    """Return the command line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-7b" if cuda else "bundled", help="bundled or a preset")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float16" if cuda else "float32")
    parser.add_argument("--dataset", default="bundled", help="bundled, hellaswag or a JSON Lines file")
    parser.add_argument("--limit", type=int, default=100, help="items")
    parser.add_argument("--batch-size", type=int, default=4 if cuda else 8)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, as on a CPU")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.5, help="about how long one half of a pair takes (1.5)")
    arguments = parser.parse_args()
    arguments.eager |= arguments.device != "cuda"
    return arguments


@contextmanager
def workload(arguments: argparse.Namespace) -> Iterator[Callable[[], object]]:
    """Load the model and plan the batches; the yielded function scores all of them once."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    dataset = HellaSwag().load(arguments.dataset, rootdir=Path.cwd(), limit=arguments.limit)
    load_format = "auto" if arguments.model == "bundled" else "dummy"
    source = models.resolve(arguments.model, load_format=load_format, texts=dataset.texts(), rootdir=Path.cwd())
    if load_format == "dummy":
        model = weights.skeleton(source, dtype)
        weights.materialise(model, lambda _: device, seed=0)
    else:
        model = weights.checkpoint(source, dtype, device_map={"": arguments.device})
    requests = batching.encode(
        HellaSwag(), dataset.items, models.load_tokenizer(source), models.max_length(model.config)
    )
    plan = batching.plan(requests, arguments.batch_size, few_shapes=not arguments.eager)
    with nullcontext() if arguments.eager else cuda_graphs.GraphedDecoder(model, device):
        scoring.warm_up(model, plan, input_device=device, devices=[device])
        yield lambda: scoring.score(model, plan, input_device=device, devices=[device])


def measure_pair(run: Callable[[], object], passes: int, turn: int) -> tuple[float, float]:
    """Return the seconds with the profiler and without it; the order alternates from pair to pair.

    Without the profiler no sampler runs. With it, the sampler has been started before, as in a run.
    """
    seconds = {}
    for profiled in (True, False) if turn % 2 else (False, True):
        profiler = Profiler(1 / 6)
        if profiled:
            profiler.start()
            if profiler.why is not None:
                sys.exit(f"the sampler does not run: {profiler.why}")
        with profiler.window() if profiled else nullcontext():
            seconds[profiled] = _time(run, passes)
        profiler.close()
    return seconds[True], seconds[False]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return an interval of the median and its confidence of 95 % or just above, for any distribution of the values.

    The number of values below the true median is binomial, so that the probability that the median lies between the
    i-th smallest and the i-th largest value is known exactly. Fewer than six values do not reach 95 %; the interval
    then contains all of them.
    """
    in_order, count = sorted(values), len(values)
    place, outside = 0, 2 / 2**count
    while (wider := outside + 2 * math.comb(count, place + 1) / 2**count) <= 0.05:
        place, outside = place + 1, wider
    return in_order[place], in_order[count - 1 - place], max(0.0, 1 - outside)


def _time(run: Callable[[], object], passes: int) -> float:
    began_s = time.perf_counter()
    for _ in range(passes):
        run()  # ends with the devices idle
    return time.perf_counter() - began_s


if __name__ == "__main__":
    sys.exit(main())
