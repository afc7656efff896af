"""What profiling costs what is profiled; prints JSON.

    python benchmarks/overhead/profiler.py

A fixed number of passes over the same batches, of a second and a half, is scored in a window of the profiler and
without it, in turn, in one process. What counts is the ratio within a pair: a clock or a neighbour that drifts slows
both. On a GPU the model is a 7B shape, as CUDA graphs at batch size 4: forwards that wait for the CPU move by 10 %
with its neighbours, and those that meet the GPU's power limit by 2 % with its heat. Else it is the bundled one,
eagerly. On a machine without NVML the sampler reads the stub of the tests. `ok`: the median lies within the limit;
`sure`: its whole interval does. The status is 1 unless it is ok; on a CPU, which other programs share, only where the
whole interval lies above the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from sampler import stub_environment

from pytest_llmgpu.inference import cuda_graphs, models, scoring
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.profiler import Profiler

__all__ = ["interval", "main"]

LIMIT_PCT = 0.2


def main() -> int:
    """Measure and print; 1 where profiling costs more than the limit: see `status`."""
    arguments = parse()
    with workload(arguments) as run, tempfile.TemporaryDirectory() as folder:
        passes = max(1, round(arguments.seconds / min(_time(run, 1) for _ in range(2))))
        environment = None if nvml.inventory().gpus else stub_environment(Path(folder), older=False)
        pairs = [measure_pair(run, passes, environment, turn) for turn in range(arguments.pairs)]
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
        print(f"not sure: at {confidence:.1%} the median is {least:+.3f} to {most:+.3f} %", file=sys.stderr)
    return status(median, least, arguments.device)


def judged(median: float, least: float, most: float) -> dict[str, bool]:
    """Return whether the median lies within the limit, and whether its interval does, all in percent."""
    return {"ok": abs(median) < LIMIT_PCT, "sure": least > -LIMIT_PCT and most < LIMIT_PCT}


def status(median: float, least: float, device: str) -> int:
    """Return the exit status: on a GPU 1 unless the median lies within the limit, else 1 where surely it does not."""
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
    parser.add_argument("--seconds", type=float, default=1.5, help="how long one of a pair takes, about (1.5)")
    arguments = parser.parse_args()
    arguments.eager |= arguments.device != "cuda"
    return arguments


@contextmanager
def workload(arguments: argparse.Namespace) -> Iterator[Callable[[], object]]:
    """Load the model and lay out the batches; while entered, the yielded function scores them all once."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    dataset = HellaSwag().load(arguments.dataset, rootdir=Path.cwd(), limit=arguments.limit)
    load_format = "auto" if arguments.model == "bundled" else "dummy"
    source = models.resolve(arguments.model, load_format=load_format, texts=dataset.texts(), rootdir=Path.cwd())
    if load_format == "dummy":
        model = models.skeleton(source, dtype)
        models.materialise(model, lambda _: device, seed=0, dtype=dtype)
    else:
        model = models.checkpoint(source, dtype, device_map={"": arguments.device})
    requests = scoring.encode(
        HellaSwag(), dataset.items, models.load_tokenizer(source), models.max_length(model.config)
    )
    plan = scoring.plan(requests, arguments.batch_size, multiple=1 if arguments.eager else cuda_graphs.MULTIPLE)
    with nullcontext() if arguments.eager else cuda_graphs.GraphedDecoder(model, device):
        scoring.warm_up(model, plan, input_device=device, devices=[device])
        yield lambda: scoring.score(model, plan, input_device=device, devices=[device])


def measure_pair(
    run: Callable[[], object], passes: int, environment: dict[str, str] | None, turn: int
) -> tuple[float, float]:
    """Return the seconds with the profiler and without it; which comes first changes from pair to pair.

    Without it no sampler runs; with it, as in a run, it has been started before, and marks both ends of the window.
    """
    seconds = {}
    for profiled in (True, False) if turn % 2 else (False, True):
        profiler = Profiler(1 / 6, environment=environment)
        if profiled:
            profiler.start()
            if profiler.why is not None:
                sys.exit(f"the sampler does not run: {profiler.why}")
        with profiler.window() if profiled else nullcontext():
            seconds[profiled] = _time(run, passes)
        profiler.close()
    return seconds[True], seconds[False]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return an interval of the median and its confidence, whatever the values' distribution: of 95 % or just above.

    The number of values below the true median is binomial, so that the i-th smallest and i-th largest hold it between
    them with a probability that is known exactly. Fewer than six values do not come to 95 %; then it is all of them.
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
