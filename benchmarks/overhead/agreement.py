"""Known traffic against what NVLink's and PCIe's counters say of it; prints JSON, a line per step.

    python benchmarks/overhead/agreement.py

One process per GPU runs all-reduces and all-gathers, and copies between page-locked memory and its GPU. Every step is
a window of our own profiler, with all GPUs idle at both of its ends. Held against: over NVLink each GPU sends and
receives what the ring formulas say, to 0.1 % and the few KiB that the protocol adds to each message, for messages over
1 MiB; over PCIe at least the payload and at most that with its protocol. Without NVLink, PCIe has to show at least what
the collectives send. With one GPU only the copies run. Takes about 45 s on 4 GPUs. The status is 1 where a step is not
ok.

On a machine without a GPU the ranks are on the CPU and the counters those of the tests' stub: nothing is judged.
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

__all__ = ["judged", "main"]

MIB = 1 << 20
NVLINK_BOUND = (0.999, 1.001)
NVLINK_OVER_BYTES = MIB
"""No bound is set for messages up to this size: of them the protocol's own bytes are more than half a percent."""
RING_STEP_BYTES = 2048
"""What a step of a ring may add to the payload on each link, whatever the size of the message: flags that say how far
the sender and the receiver are. On 4 H200 with NCCL 2.28.9 and whole chunks it was 1,600 bytes for each of the 6 steps
of an all-reduce and 1,664 for each of the 3 of an all-gather, from 4 MiB to 64 MiB alike: 0.15 % of 4 MiB, 0.01 % of
64 MiB. Other numbers of GPUs were not measured."""

PCIE_BOUND = (0.99, 1.15)
"""A packet of up to 256 bytes brings 20 to 28 of framing, header and checksum: 1.08 to 1.11 times the payload.
Requests, acknowledgements and credits go beside it. The averages that the bytes are summed up from are good to 1 %."""

PERIOD_S = 0.125
"""GPM's samples are to be 0.1 s apart."""
IDLE_S = 0.25
"""Before and after both ends of a copy's window: a reading of PCIe reaches over an end, and then has no bytes to share
out. It speaks for a period, or for two where GPM was asked too soon."""
COPY_S = 2.0
"""How long a copy is repeated. GPM tells an average over a time of its own, near the one between our two readings but
not the same: where sending begins and ends, what it is multiplied by is off. Bursts of 0.35 s came to 0.95 to 1.23 of
the payload, those of 0.5 s to 1.05 to 1.10; the same error is a few percent of 2 s."""
SHORT_IDLE_S = 0.05
"""The same of a collective, whose counters are read at the ends."""
COPIED = {"host_to_device": ("pcie_rx_bytes",), "device_to_host": ("pcie_tx_bytes",)}
NVLINK = ("nvlink_tx_bytes", "nvlink_rx_bytes")
PCIE = ("pcie_tx_bytes", "pcie_rx_bytes")
PCIE_LEAST = (PCIE_BOUND[0], math.inf)
"""Of collectives without NVLink: how much more than the payload there is depends on the way, and was not measured."""
_COUNTED = ("nvlink", "pcie")
_WAYS = ("tx", "rx")
_TELLING_S = 0.05
"""How long repetitions take that tell how long more of them will."""


def main() -> int:
    """Measure and print; 1 where a step is not ok, or none could be judged."""
    options = _parse()
    began_s = time.monotonic()
    inventory = nvml.inventory()
    gpus = machine("auto", None, inventory=inventory).gpus
    count = min(options.gpus or len(gpus) or 2, len(gpus) or 8)
    nvlink = any(gpu.nvlinks for gpu in gpus[:count]) or not gpus
    with tempfile.TemporaryDirectory() as folder:
        environment = None if gpus else stub_environment(Path(folder), count, older=False)
        profiler = Profiler(PERIOD_S, [gpu.uuid for gpu in gpus[:count]] or None, environment)
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
    """Return the ratios of what was counted to what was sent, the bound, and whether all lie within it.

    Args:
        step: `kind`, `message_bytes`, `ranks`; `nvlink`: whether the GPUs have any; `wire_bytes_of_one` as the package
            counts them; `expected_bytes` of each device; `devices` with the counts, [device] each, None where there is
            none.

    Returns:
        `ratios` by count, as they are; for collectives `beyond_bytes_of_one`: the most that a message had beside its
        payload; `bound`, which allows for that (`RING_STEP_BYTES`); `ok`: None where no bound is set; and `why` that or
        a False is so.
    """
    kind, expected = step["kind"], step["expected_bytes"]
    over_pcie = kind in COLLECTIVES and not step["nvlink"]
    if kind == "nothing":
        return {"bound": None, "ok": None, "why": "what is there without us"}
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
        return {**answer, "bound": None, "ok": False, "why": "the package counts other bytes than the formula says"}
    if kind in COLLECTIVES and step["message_bytes"] <= NVLINK_OVER_BYTES:
        return {**answer, "bound": None, "ok": None, "why": "no bound is set for messages of 1 MiB and less"}
    least, most = PCIE_LEAST if over_pcie else PCIE_BOUND
    if kind in COLLECTIVES and not over_pcie:
        protocol_bytes = RING_STEP_BYTES * ring_steps(kind, step["ranks"])
        least, most = NVLINK_BOUND[0], round(NVLINK_BOUND[1] + protocol_bytes / step["wire_bytes_of_one"], 6)
    bound = (least, None if over_pcie else most)
    values = [ratio for row in ratios.values() for ratio in row]
    if None in values and over_pcie:
        told = "; ".join(step["why_not_counted"]) or "its readings leave some of the window out"
        return {**answer, "bound": bound, "ok": None, "why": f"there is no NVLink, and PCIe was not counted: {told}"}
    if None in values:
        return {**answer, "bound": bound, "ok": False, "why": "; ".join(step["why_not_counted"]) or "not counted"}
    ok = all(least <= ratio <= most for ratio in values)
    why = [
        *(["there is no NVLink: held against PCIe"] * over_pcie),
        *(["a ratio lies outside of the bound"] * (not ok)),
    ]
    return {**answer, "bound": bound, "ok": ok, **({"why": "; ".join(why)} if why else {})}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="GPUs at most (all); without a GPU, ranks on the CPU (2)")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a collective is repeated, about (0.5)")
    parser.add_argument("--copy-seconds", type=float, default=COPY_S, help=f"the same of a copy ({COPY_S:g})")
    parser.add_argument("--messages-mib", type=int, nargs="+", default=[1, 4, 16, 64], help="of collectives, in all")
    parser.add_argument("--copies-mib", type=int, nargs="+", default=[16, 64], help="of copies")
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
    """Send for some time inside a window; return what was sent and what was counted."""
    # What PCIe is to show, be it a collective, needs time and stillness as long as its readings are.
    counted = kind in COLLECTIVES and nvlink
    seconds, idle_s = (options.seconds, SHORT_IDLE_S) if counted else (options.copy_seconds, IDLE_S)
    wire_bytes = repetitions = 0
    if kind != "nothing":
        wire_bytes = max(ranks.count(kind, message_bytes))
        ranks.run(kind, message_bytes, 5)
        repetitions, took_s = 10, max(ranks.run(kind, message_bytes, 10))
        if took_s < _TELLING_S:  # the first of them and the last weigh too much
            repetitions = round(repetitions * 2 * _TELLING_S / took_s)
            took_s = max(ranks.run(kind, message_bytes, repetitions))
        repetitions = max(1, round(repetitions * seconds / took_s))
    time.sleep(idle_s)
    start_s = _mark(profiler)
    time.sleep(idle_s)
    took_s = max(ranks.run(kind, message_bytes, repetitions)) if repetitions else 0.0
    time.sleep(idle_s)
    profile = profiler.slice(start_s, _mark(profiler))
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
    """Have the counters read; return a time in the middle of that, since each GPU's are read at another."""
    before_s = time.monotonic()
    profiler.mark(wait=True)
    return (before_s + time.monotonic()) / 2


def _methods(profile: Profile) -> list[str]:
    """Return the calls that the counts come from."""
    metrics = [item for device in profile.devices for item in device.metrics.items()]
    return sorted({metric.method for name, metric in metrics if name.startswith(_COUNTED) and metric.method})


def _reasons(profile: Profile) -> list[str]:
    items = [item for device in profile.devices for item in device.why.items()]
    return [f"{name}: {why}" for name, why in items if name.startswith(_COUNTED)]


def _whole(size: float | None) -> int | None:
    return None if size is None else round(size)


def _lines(settings: dict[str, Any], steps: Sequence[dict[str, Any]], end: dict[str, Any]) -> str:
    """Return the JSON with one line per step, as people and logs want it."""
    rows = ",\n".join(f"    {json.dumps(step)}" for step in steps)
    head = json.dumps(settings, indent=2).replace("\n", "\n  ")
    return f'{{\n  "settings": {head},\n  "steps": [\n{rows}\n  ],\n  {json.dumps(end)[1:-1]}\n}}'


if __name__ == "__main__":
    sys.exit(main())
