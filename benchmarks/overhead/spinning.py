"""Measure how long threads of a rank on a CPU should look for work before they sleep (GOMP_SPINCOUNT); prints JSON.

The bundled model is measured with each value in turn, alone and beside programs that keep a core busy each. 300000 is
the default of libgomp, `ours` is what this package sets. A time is the sum of the batches of all batch sizes; the
fastest of the rounds counts alone, and the median beside others. `quiet_loss` is that to the best value, and
`busy_factor` the time beside others divided by the best one alone. A run beside others is ended at its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pytest_llmgpu.report import file

BENCHMARK = Path(__file__).parents[1] / "test_inference.py"
LIMIT_S = 60.0
LARGEST_LOSS, LARGEST_FACTOR = 0.03, 2.0
"""What the value of this package may lose alone, and beside two programs on two cores."""


def main() -> int:
    """Measure and print; return 1 if the value of this package loses more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", default="ours,300000,100000,30000,10000,3000,1000,0")
    parser.add_argument("--threads", default="", help="OMP_NUM_THREADS of all runs (default: all cores)")
    parser.add_argument("--others", type=int, default=2, help="programs that keep a core busy each")
    parser.add_argument("--batch-sizes", default="1,8,64")
    parser.add_argument("--limit", type=int, default=60, help="items")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    values = arguments.values.split(",")
    alone: dict[str, list[float]] = {value: [] for value in values}
    busy: dict[str, list[float]] = {value: [] for value in values}
    for number in range(arguments.rounds):
        for found, others in ((alone, 0), (busy, arguments.others)):
            for value in values:
                found[value].append(measured_s(value, others, arguments))
                print(number, others, value, found[value][-1], file=sys.stderr, flush=True)
    best_s = min(map(min, alone.values()))
    settings = {
        value: {
            "quiet_s": round(min(alone[value]), 3),
            "quiet_loss": round(min(alone[value]) / best_s - 1, 3),
            "busy_s": round(statistics.median(busy[value]), 3),
            "busy_factor": round(statistics.median(busy[value]) / best_s, 2),
        }
        for value in values
    }
    ours = settings.get("ours")
    lost = ours is not None and (ours["quiet_loss"] > LARGEST_LOSS or ours["busy_factor"] > LARGEST_FACTOR)
    about = {"cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg(), **vars(arguments)}
    json.dump({"about": about, "settings": settings, "lost": lost}, sys.stdout, indent=2)
    print()
    return int(lost)


def measured_s(value: str, others: int, arguments: argparse.Namespace) -> float:
    """Return the sum of the batches of one run with a value, beside other programs."""
    environ = {**os.environ, **({} if value == "ours" else {"GOMP_SPINCOUNT": value})}
    if arguments.threads:
        environ["OMP_NUM_THREADS"] = arguments.threads
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}"]
            command += [str(BENCHMARK), "--strategy=mp", "--llmgpu-device=cpu", "--llmgpu-work=off"]
            command += [f"--llmgpu-json={report}", f"--llmgpu-batch-sizes={arguments.batch_sizes}"]
            command += [f"--llmgpu-limit={arguments.limit}"]
            limit_s = LIMIT_S if others else None
            try:
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, env=environ, timeout=limit_s)
            except subprocess.TimeoutExpired:
                return LIMIT_S
            return sum(one.inference_s or 0.0 for one in file.load(report).cases)
    finally:
        for program in started:
            program.kill()
            program.wait()


if __name__ == "__main__":
    sys.exit(main())
