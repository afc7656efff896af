"""What the sampler's NVML calls cost by themselves; prints JSON.

The sampler's own choice of calls is recorded over about a second, then exactly these calls are made again, at the same
times and from as many threads, by a loop that does nothing else: no decisions, no units, no stream. `costs` are
those of each call as it was recorded, marks left out: what to look at first where the sum is too much.

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
from pytest_llmgpu.profiling.sampler.deadlines import ticks
from pytest_llmgpu.profiling.sampler.devices import choose, open_devices
from pytest_llmgpu.profiling.sampler.sampling import Sampler

NEAR_S = 0.001
"""A call this close to its time is made at once, as in a round where one follows the other."""


class Made(NamedTuple):
    """One call that the sampler made."""

    after_s: float
    """Since its tick began."""
    call: Callable[[], object]
    name: str
    threaded: bool
    cpu_s: float
    """CPU seconds it took when the sampler made it; pynvml's own share is in it."""
    wall_s: float


class Listening:
    """pynvml, which writes down each call that is made of it."""

    def __init__(self, nvml: Any) -> None:
        self.made: list[Made] = []
        self.tick_s = 0.0
        self._nvml = nvml

    def __getattr__(self, name: str) -> Any:
        """Return pynvml's own, or a call that is written down."""
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
        listening = Listening(nvml)
        devices, _ = open_devices(listening, options.uuids)
        choose(devices, options.period)
        # Even, since GPM's two samples take turns; a second or more, since some calls are made once in one.
        rounds = record(Sampler(devices), listening, options.period, 2 * math.ceil(0.5 / options.period))
        cpu_s_per_s, calls = repeat(rounds, nvml, options.period, options.seconds)
    found = costs(rounds, len(devices), options.period)
    print(json.dumps({"gpus": len(devices), "cpu_s_per_s": cpu_s_per_s, "calls_per_s": calls, "costs": found}))


def record(sampler: Sampler, listening: Listening, period_s: float, rounds: int) -> list[list[Made]]:
    """Return the calls of so many rounds, those between one tick and the next included."""
    found: list[list[Made]] = []

    def wait(seconds: float) -> bool:
        due_s = sampler.poll()
        if due_s is not None:
            seconds = min(seconds, max(0.0, due_s - time.monotonic()))
        time.sleep(seconds)
        return False

    # Counted by the ticks that came: a deadline that was missed asked nothing.
    for number, tick in enumerate(ticks(time.monotonic(), period_s, time.monotonic, wait)):
        listening.tick_s = tick.start_s
        if number > 1:  # GPM has nothing to say at the first: it asks for a tenth of a second between its samples
            found.append(listening.made)
        listening.made = []
        if len(found) == rounds:
            break
        sampler.round(tick.start_s)
    return found


def repeat(rounds: list[list[Made]], nvml: Any, period_s: float, seconds: float) -> tuple[float, dict[str, float]]:
    """Make the calls again; return CPU seconds per second, and how often each is made per second."""

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
    """Return what each call cost by itself, and what it comes to for one GPU in a second; the dearest first."""
    seconds = len(rounds) * period_s
    by_name: dict[str, list[Made]] = {}
    for made in (made for each in rounds for made in each):
        by_name.setdefault(made.name, []).append(made)
    found = {
        name: {
            "us": round(1e6 * sum(made.wall_s for made in all_of_it) / len(all_of_it), 1),
            "cpu_us": round(1e6 * sum(made.cpu_s for made in all_of_it) / len(all_of_it), 1),
            "per_gpu_per_s": round(len(all_of_it) / gpus / seconds, 2),
            "cpu_ms_per_gpu_per_s": round(1e3 * sum(made.cpu_s for made in all_of_it) / gpus / seconds, 3),
        }
        for name, all_of_it in by_name.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]["cpu_ms_per_gpu_per_s"]))


def _again(function: Callable[..., object], arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[[], object]:
    """Return what makes the call once more, with the samples of GPM that it was made with."""
    if function.__name__ != "nvmlGpmMetricsGet":
        return lambda: function(*arguments, **named)
    (question,) = arguments
    first, second = question.sample1, question.sample2

    def call() -> object:
        question.sample1, question.sample2 = first, second
        return function(question)

    return call


if __name__ == "__main__":
    main()
