"""Measure the cost of the sampler's NVML calls alone; prints JSON.

The calls of the sampler are recorded for about a second. A loop that does nothing else then makes exactly these calls
again, at the same times and from as many threads. `costs` has the recorded cost of each call, without marks: read it
first if the total is too high.

    python benchmarks/overhead/bare_calls.py --period 0.1667 --seconds 3
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from pytest_llmgpu.profiling.nvml import session
from pytest_llmgpu.profiling.sampler.__main__ import Sampler, ticks
from pytest_llmgpu.profiling.sampler.devices import open_devices

NEAR_S = 0.001
"""A call that is due within this time is made at once, as in a round."""


class Made(NamedTuple):
    """One call that the sampler made."""

    after_s: float
    """The seconds since its tick began."""
    call: Callable[[], object]
    """Makes the call again."""
    name: str
    """The name of the NVML function."""
    threaded: bool
    """Whether it was made outside the main thread."""
    cpu_s: float
    """The CPU seconds it took in the sampler, those of pynvml included."""
    wall_s: float
    """The seconds it took in the sampler."""


class Recorder:
    """pynvml with a record of every call."""

    def __init__(self, nvml: Any) -> None:
        self.made: list[Made] = []
        self.tick_s = 0.0
        self._nvml = nvml

    def __getattr__(self, name: str) -> Any:
        """Return pynvml's attribute, or a function that records its call."""
        found = getattr(self._nvml, name)
        if not name.startswith(("nvmlDevice", "nvmlGpm")):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            threaded = threading.current_thread() is not threading.main_thread()
            again = _again(found, arguments, named)
            start_s, cpu_s = time.monotonic(), time.thread_time()
            try:
                return found(*arguments, **named)
            finally:
                cpu_s, wall_s = time.thread_time() - cpu_s, time.monotonic() - start_s
                self.made.append(Made(start_s - self.tick_s, again, name, threaded, cpu_s, wall_s))

        return call


def main() -> None:
    """Record, repeat and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--period", type=float, default=1 / 6, help="seconds between readings (1/6)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to repeat the calls (3)")
    parser.add_argument("--uuids", type=lambda text: text.split(","), help="GPUs to read (all)")
    options = parser.parse_args()
    with session() as nvml:
        recorder = Recorder(nvml)
        devices, _ = open_devices(recorder, options.uuids)
        # An even number, because GPM alternates between two samples. At least a second: some calls are made once in it.
        rounds = record(Sampler(devices), recorder, options.period, 2 * math.ceil(0.5 / options.period))
        cpu_s_per_s, calls = repeat(rounds, nvml, options.period, options.seconds)
    found = costs(rounds, len(devices), options.period)
    print(json.dumps({"gpus": len(devices), "cpu_s_per_s": cpu_s_per_s, "calls_per_s": calls, "costs": found}))


def record(sampler: Sampler, recorder: Recorder, period_s: float, rounds: int) -> list[list[Made]]:
    """Return the calls of the given number of rounds, with those between two ticks."""
    found: list[list[Made]] = []

    def wait(seconds: float) -> bool:
        due_s = sampler.poll()
        if due_s is not None:
            seconds = min(seconds, max(0.0, due_s - time.monotonic()))
        time.sleep(seconds)
        return False

    # Ticks are counted, not deadlines: a missed deadline makes no calls.
    for number, (_, start_s) in enumerate(ticks(time.monotonic(), period_s, time.monotonic, wait)):
        recorder.tick_s = start_s
        if number > 1:  # GPM has no average at the first tick: its samples must be 0.1 s apart
            found.append(recorder.made)
        recorder.made = []
        if len(found) == rounds:
            break
        sampler.round(start_s)
    return found


def repeat(rounds: list[list[Made]], nvml: Any, period_s: float, seconds: float) -> tuple[float, dict[str, float]]:
    """Make the calls again; return CPU seconds per second, and the calls per second by name."""

    def make(call: Callable[[], object]) -> None:
        with suppress(nvml.NVMLError):
            call()

    threads = max(1, *(sum(made.threaded for made in each) for each in rounds))
    count = max(1, round(seconds / period_s / len(rounds))) * len(rounds)
    with ThreadPoolExecutor(threads) as pool:
        t0_s, cpu_s = time.monotonic(), time.process_time()
        for k in range(count):
            start_s = t0_s + k * period_s
            for made in rounds[k % len(rounds)]:
                wait_s = start_s + made.after_s - time.monotonic()
                if wait_s > NEAR_S:
                    time.sleep(wait_s)
                if made.threaded:
                    pool.submit(make, made.call)
                else:
                    make(made.call)
        time.sleep(max(0.0, t0_s + count * period_s - time.monotonic()))
        taken_s = time.monotonic() - t0_s
        cpu_s = time.process_time() - cpu_s
    often = Counter(made.name for each in rounds for made in each)
    per_s = {name: round(number / (len(rounds) * period_s), 2) for name, number in sorted(often.items())}
    return cpu_s / taken_s, per_s


def costs(rounds: list[list[Made]], gpus: int, period_s: float) -> dict[str, dict[str, float]]:
    """Return the cost of each call, and its cost per GPU and second; the most expensive call first."""
    seconds = len(rounds) * period_s
    by_name: dict[str, list[Made]] = {}
    for made in (made for each in rounds for made in each):
        by_name.setdefault(made.name, []).append(made)
    found = {
        name: {
            "us": round(1e6 * sum(made.wall_s for made in calls_of_it) / len(calls_of_it), 1),
            "cpu_us": round(1e6 * sum(made.cpu_s for made in calls_of_it) / len(calls_of_it), 1),
            "per_gpu_per_s": round(len(calls_of_it) / gpus / seconds, 2),
            "cpu_ms_per_gpu_per_s": round(1e3 * sum(made.cpu_s for made in calls_of_it) / gpus / seconds, 3),
        }
        for name, calls_of_it in by_name.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]["cpu_ms_per_gpu_per_s"]))


def _again(function: Callable[..., object], arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[[], object]:
    """Return a function that makes the call again, with the same samples of GPM."""
    if function.__name__ != "nvmlGpmMetricsGet":
        return lambda: function(*arguments, **named)
    (request,) = arguments
    first, second = request.sample1, request.sample2

    def call() -> object:
        request.sample1, request.sample2 = first, second
        return function(request)

    return call


if __name__ == "__main__":
    main()
