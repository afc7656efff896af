"""Compare known traffic with the counters of NVLink and PCIe; prints JSON, a line per step.

    python benchmarks/overhead/agreement.py

One process per GPU runs all-reduces and all-gathers, and copies between page-locked memory and its GPU. Every step is a
window of the package's profiler, with all GPUs idle at both of its ends. Over NVLink each GPU must send and receive the
bytes of the ring formulas, within 0.1 % and the few KiB that the protocol adds to each message; this is judged for
messages over 1 MiB. Over PCIe a copy must show at least its payload and at most its payload with the protocol. Without
NVLink, PCIe must show at least the bytes of the collectives. With one GPU only the copies run. It takes about 45 s on 4
GPUs. The exit status is 1 if a step is not ok.

On a machine without a GPU the ranks run on the CPU, the counters are those of the tests' stub, and nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from known_traffic import COLLECTIVES, COPIES, KNOWN, Ranks, formula, ring_steps
from sampler import stub_environment

from pytest_llmgpu.analysis.traffic_path import pcie_bytes
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.machine import machine
from pytest_llmgpu.profiling.profiler import Profiler
from pytest_llmgpu.report.result import Profile

MIB = 1 << 20
NVLINK_BOUND = (0.999, 1.001)
NVLINK_OVER_BYTES = MIB
"""No bound is set for messages up to this size: the protocol adds more than half a percent to them."""
RING_STEP_BYTES = 2048
"""The bytes that a step of a ring may add to the payload on each link, for any size of the message: flags for the
progress of sender and receiver. On 4 H200 with NCCL 2.28.9 and the protocol Simple, an all-reduce added 1,600 bytes in
each of its 6 steps and an all-gather 1,664 in each of its 3, from 4 MiB to 64 MiB: 0.15 % of 4 MiB, 0.01 % of 64 MiB.
Other numbers of GPUs were not measured."""

PCIE_BOUND = (0.99, 1.15)
"""A packet of up to 256 bytes has 20 to 28 bytes of framing, header and checksum: 1.08 to 1.11 times the payload.
Requests, acknowledgements and credits come on top. The averages that the bytes are summed from are exact to 1 %."""

PERIOD_S = 0.125
"""GPM's samples must be 0.1 s apart."""
IDLE_S = 0.25
"""The idle time before and after both ends of a copy's window. A PCIe reading that extends over an end then has no
bytes to split. It covers one period, or two if GPM was read too early."""
COPY_S = 2.0
"""How long a copy is repeated. GPM averages over a period of its own, which is near the time between two readings but
not equal to it: the bytes are wrong where sending begins and ends. Bursts of 0.35 s gave 0.95 to 1.23 of the payload,
bursts of 0.5 s 1.05 to 1.10; the same error is a few percent of 2 s."""
SHORT_IDLE_S = 0.05
"""The idle time around a collective, whose counters are read at the ends of its window."""
COPIED = {"host_to_device": ("pcie_rx_bytes",), "device_to_host": ("pcie_tx_bytes",)}
NVLINK = ("nvlink_tx_bytes", "nvlink_rx_bytes")
PCIE = ("pcie_tx_bytes", "pcie_rx_bytes")
PCIE_LEAST = (PCIE_BOUND[0], math.inf)
"""The bound of collectives without NVLink: the bytes beyond the payload depend on the path, and were not measured."""
_COUNTED = ("nvlink", "pcie")
_WAYS = ("tx", "rx")
_TRIAL_S = 0.05
"""The minimum time of trial repetitions, from which the time of more of them is computed."""


def main() -> int:
    """Measure and print; return 1 if a step is not ok, or if none could be judged."""
    options = _parse()
    began_s = time.monotonic()
    inventory = nvml.inventory()
    gpus = machine("auto", None).gpus
    count = min(options.gpus or len(gpus) or 2, len(gpus) or 8)
    nvlink = any(gpu.nvlinks for gpu in gpus[:count]) or not gpus
    with tempfile.TemporaryDirectory() as folder:
        environment = None if gpus else stub_environment(Path(folder), count, older=False)
        os.environ.update(environment or {})  # of the sampler
        profiler = Profiler(PERIOD_S, [gpu.uuid for gpu in gpus[:count]] or None)
        profiler.start()
        try:
            with Ranks(count, "cuda" if gpus else "cpu", Path(folder, "meeting")) as ranks:
                if profiler.why is not None:
                    sys.exit(f"the sampler does not run: {profiler.why}")
                settings = _settings(options, count, inventory, ranks.facts)
                steps = [_step(profiler, ranks, *one, options, nvlink=nvlink) for one in _plan(options, count)]
        finally:
            profiler.close()
    for step in steps:
        step.update(judged(step) if gpus else {"ok": None, "why": "the counters are a stub's"})
    settings["methods"] = sorted({method for step in steps for method in step.pop("methods")})
    verdicts = [step["ok"] for step in steps]
    ok = None if all(one is None for one in verdicts) else False not in verdicts
    print(_lines(settings, steps, {"ok": ok, "seconds": round(time.monotonic() - began_s, 1)}))
    return 0 if ok or not gpus else 1


def judged(step: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios of counted to sent bytes, the bound, and whether all ratios lie within it.

    Args:
        step: `kind`, `message_bytes`, `ranks`; `nvlink`: whether the GPUs have NVLink; `wire_bytes_of_one` by the
            package's count; `expected_bytes` of each device; `devices` with the counts, [device] each, or None.

    Returns:
        `ratios` by count; for collectives `beyond_bytes_of_one`: the most bytes of a message beyond its payload;
        `bound`, which includes them (`RING_STEP_BYTES`); `ok`: None if no bound is set; `why`: the reason of None or
        False.
    """
    kind, expected = step["kind"], step["expected_bytes"]
    over_pcie = kind in COLLECTIVES and not step["nvlink"]
    if kind == "nothing":
        return {"bound": None, "ok": None, "why": "background traffic"}
    names = COPIED[kind] if kind in COPIES else PCIE if over_pcie else NVLINK
    ratios = {
        name: [None if count is None else round(count / expected, 6) for count in step["devices"][name]]
        for name in names
    }
    answer: dict[str, Any] = {"ratios": ratios}
    counts = [count for name in names for count in step["devices"][name] if count is not None]
    if kind in COLLECTIVES and counts and not over_pcie:
        beyond = (max(counts) - expected) * step["wire_bytes_of_one"] / expected
        answer["beyond_bytes_of_one"] = round(beyond, 1)
    if step["wire_bytes_of_one"] != formula(kind, step["message_bytes"], step["ranks"]):
        return {**answer, "bound": None, "ok": False, "why": "the package and the formula count different bytes"}
    if kind in COLLECTIVES and step["message_bytes"] <= NVLINK_OVER_BYTES:
        return {**answer, "bound": None, "ok": None, "why": "no bound is set for messages of 1 MiB and less"}
    least, most = PCIE_LEAST if over_pcie else PCIE_BOUND
    if kind in COLLECTIVES and not over_pcie:
        protocol_bytes = RING_STEP_BYTES * ring_steps(kind, step["ranks"])
        least, most = NVLINK_BOUND[0], round(NVLINK_BOUND[1] + protocol_bytes / step["wire_bytes_of_one"], 6)
    bound = (least, None if over_pcie else most)
    values = [ratio for row in ratios.values() for ratio in row]
    if None in values and over_pcie:
        reason = "; ".join(step["why_not_counted"]) or "its readings do not cover the window"
        return {**answer, "bound": bound, "ok": None, "why": f"there is no NVLink, and PCIe was not counted: {reason}"}
    if None in values:
        return {**answer, "bound": bound, "ok": False, "why": "; ".join(step["why_not_counted"]) or "not counted"}
    ok = all(least <= ratio <= most for ratio in values)
    why = [
        *(["there is no NVLink: compared with PCIe"] * over_pcie),
        *(["a ratio lies outside the bound"] * (not ok)),
    ]
    return {**answer, "bound": bound, "ok": ok, **({"why": "; ".join(why)} if why else {})}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="the most GPUs to use (all); without a GPU, ranks on the CPU (2)")
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long a collective is repeated (0.5)")
    parser.add_argument(
        "--copy-seconds", type=float, default=COPY_S, help=f"about how long a copy is repeated ({COPY_S:g})"
    )
    parser.add_argument(
        "--messages-mib",
        type=int,
        nargs="+",
        default=[1, 4, 16, 64],
        help="message sizes of collectives, over all ranks",
    )
    parser.add_argument("--copies-mib", type=int, nargs="+", default=[16, 64], help="message sizes of copies")
    return parser.parse_args()


def _plan(options: argparse.Namespace, count: int) -> list[tuple[str, int]]:
    """Return kind and message bytes of every step."""
    collectives = COLLECTIVES if count > 1 else ()
    part = 4 * count  # whole numbers of four bytes for every rank
    steps = [(kind, size * MIB // part * part) for kind in collectives for size in options.messages_mib]
    return [("nothing", 0), *steps, *((kind, size * MIB) for kind in COPIES for size in options.copies_mib)]


def _settings(
    options: argparse.Namespace, count: int, inventory: nvml.Inventory, facts: dict[str, str]
) -> dict[str, Any]:
    real = bool(inventory.gpus)
    return {
        "ranks": count,
        "device": "cuda" if real else "cpu",
        "backend": "nccl" if real else "gloo",
        "nvml": "real" if real else "stub",
        "nccl_set_for_the_ranks": {name: os.environ.get(name) for name in KNOWN},
        "nccl_found_set": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_") and name not in KNOWN
        },
        "nvlinks": [gpu.nvlinks for gpu in inventory.gpus[:count]],
        "driver": inventory.driver,
        **facts,
        "seconds_of_a_step": {"collectives": options.seconds, "copies": options.copy_seconds},
        "period_s": PERIOD_S,
        "idle_s": {"collectives": SHORT_IDLE_S, "copies": IDLE_S},
        "nvlink_bound": NVLINK_BOUND,
        "nvlink_bytes_of_a_ring_step": RING_STEP_BYTES,
        "pcie_bound": PCIE_BOUND,
    }


def _step(
    profiler: Profiler, ranks: Ranks, kind: str, message_bytes: int, options: argparse.Namespace, *, nvlink: bool
) -> dict[str, Any]:
    """Send for some time inside a window; return the sent and the counted bytes."""
    # Traffic over PCIe, a collective's too, needs the time and the idle ends of PCIe's readings.
    counted = kind in COLLECTIVES and nvlink
    seconds, idle_s = (options.seconds, SHORT_IDLE_S) if counted else (options.copy_seconds, IDLE_S)
    wire_bytes = repetitions = 0
    if kind != "nothing":
        wire_bytes = max(ranks.count(kind, message_bytes))
        ranks.run(kind, message_bytes, 5)
        repetitions, took_s = 10, max(ranks.run(kind, message_bytes, 10))
        if took_s < _TRIAL_S:  # the first and the last repetition have too much weight
            repetitions = round(repetitions * 2 * _TRIAL_S / took_s)
            took_s = max(ranks.run(kind, message_bytes, repetitions))
        repetitions = max(1, round(repetitions * seconds / took_s))
    time.sleep(idle_s)
    start_s = _mark(profiler)
    time.sleep(idle_s)
    took_s = max(ranks.run(kind, message_bytes, repetitions)) if repetitions else 0.0
    time.sleep(idle_s)
    profile = profiler.slice([start_s], [_mark(profiler)])
    return {
        "kind": kind,
        "message_bytes": message_bytes,
        "ranks": len(profile.devices),
        "nvlink": nvlink,
        "repetitions": repetitions,
        "seconds": round(took_s, 4),
        "wire_bytes_of_one": wire_bytes,
        "expected_bytes": wire_bytes * repetitions,
        "devices": {
            **{name: [_whole(one.counters.get(name)) for one in profile.devices] for name in NVLINK},
            **{
                f"pcie_{way}_bytes": [_whole(pcie_bytes(profile, one, way)) for one in profile.devices] for way in _WAYS
            },
        },
        "methods": _methods(profile),
        "why_not_counted": sorted({*_reasons(profile), *profile.why.values()}),
    }


def _mark(profiler: Profiler) -> float:
    """Read the counters; return the middle of the reading, because each GPU is read at a different time."""
    before_s = time.monotonic()
    profiler.mark(wait=True)
    return (before_s + time.monotonic()) / 2


def _methods(profile: Profile) -> list[str]:
    """Return the NVML calls that the counts come from."""
    metrics = [item for device in profile.devices for item in device.metrics.items()]
    return sorted({metric.method for name, metric in metrics if name.startswith(_COUNTED) and metric.method})


def _reasons(profile: Profile) -> list[str]:
    items = [item for device in profile.devices for item in device.why.items()]
    return [f"{name}: {why}" for name, why in items if name.startswith(_COUNTED)]


def _whole(size: float | None) -> int | None:
    return None if size is None else round(size)


def _lines(settings: dict[str, Any], steps: Sequence[dict[str, Any]], end: dict[str, Any]) -> str:
    """Return the JSON with one line per step."""
    rows = ",\n".join(f"    {json.dumps(step)}" for step in steps)
    head = json.dumps(settings, indent=2).replace("\n", "\n  ")
    return f'{{\n  "settings": {head},\n  "steps": [\n{rows}\n  ],\n  {json.dumps(end)[1:-1]}\n}}'


if __name__ == "__main__":
    sys.exit(main())
