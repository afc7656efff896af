"""Compare sessions with and without work passes: what they cost, and if they slow the cases that follow; prints JSON.

    python benchmarks/overhead/work_passes.py --sessions 2 -- --strategy=tp --llmgpu-batch-sizes=1,8,32 ...

What follows `--` are flags of pytest for the main job. Sessions with `--llmgpu-work=on` and `off` take turns, in an
order that changes from pair to pair; a session before them, which is not counted, fills the caches of the file system.
`added` is the share of a session that the passes add; at most 25 % is allowed.
For each case, `inference_on_s` has the time of every launch; cases that ran as CUDA graphs may differ by at most 0.5 %.
With `--off-only` there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import inference_s
from pytest_llmgpu.report.report import Report


def main() -> None:
    """Run the sessions and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=2, help="sessions with and without work passes, each (2)")
    parser.add_argument("--off-only", action="store_true", help="no session with work passes")
    parser.add_argument("flags", nargs="+", help="flags of pytest")
    arguments = parser.parse_args()
    switches = ["off"] if arguments.off_only else ["on", "off"]
    seconds: dict[str, list[float]] = {switch: [] for switch in switches}
    reports: dict[str, list[Report]] = {switch: [] for switch in switches}
    with tempfile.TemporaryDirectory() as folder:
        _session(Path(folder) / "first.json", "off", arguments.flags)
        for pair in range(arguments.sessions):
            for switch in switches if pair % 2 == 0 else reversed(switches):
                took_s, report = _session(Path(folder) / f"{switch}-{pair}.json", switch, arguments.flags)
                seconds[switch].append(took_s)
                reports[switch].append(report)
    print(json.dumps(summary(arguments.flags, seconds, reports), indent=1))


def _session(path: Path, switch: str, flags: Sequence[str]) -> tuple[float, Report]:
    """Run the main job once; return its seconds from the start of pytest to its end, and its report."""
    command = [sys.executable, "-m", "pytest", "benchmarks/test_inference.py", "-q", "-p", "no:cacheprovider"]
    began_s = time.perf_counter()
    done = subprocess.run(
        [*command, *flags, f"--llmgpu-work={switch}", f"--llmgpu-json={path}"],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    took_s = time.perf_counter() - began_s
    if done.returncode:
        sys.exit(done.stdout)
    return took_s, file.load(path)


def summary(flags: Sequence[str], seconds: dict[str, list[float]], reports: dict[str, list[Report]]) -> dict[str, Any]:
    """Return the figures of all sessions.

    Args:
        flags: Flags of pytest.
        seconds: `on` and `off` to the duration of each session.
        reports: `on` and `off` to the report of each session.
    """
    first = next(iter(reports.values()))[0]
    found: dict[str, Any] = {
        "flags": list(flags),
        "gpus": [gpu.name for gpu in first.environment.gpus],
        **{f"session_{switch}_s": [round(one, 1) for one in took] for switch, took in seconds.items()},
    }
    if "on" in seconds:
        on_s, off_s = (statistics.median(seconds[switch]) for switch in ("on", "off"))
        found["added"] = round(on_s / off_s - 1, 3)
    found["cases"] = [_case(reports, place) for place in range(len(first.cases))]
    return found


def _case(reports: dict[str, list[Report]], place: int) -> dict[str, Any]:
    results = {switch: [report.cases[place] for report in several] for switch, several in reports.items()}
    first = next(iter(results.values()))[0]
    launch = first.launches[0]
    batches = launch.batches
    times_s = {
        switch: [inference_s(launch) for result in several for launch in result.launches]
        for switch, several in results.items()
    }
    found: dict[str, Any] = {
        "id": first.id,
        "execution": first.case.execution,
        "execution_choice": launch.execution_choice,
        "load_s": round(launch.load_s or 0.0, 1),
        "warmup_s": [
            round(launch.warmup_s or 0.0, 2)
            for several in results.values()
            for result in several
            for launch in result.launches
        ],
        "batches": len(batches.latency_s),
        "shapes": len({*zip(batches.sequences, batches.padded_tokens, strict=True)}),
        "padded_tokens": sum(batches.padded_tokens),
        **{f"inference_{switch}_s": [round(one, 5) for one in times] for switch, times in times_s.items()},
    }
    if "on" in times_s:
        on_s, off_s = (statistics.mean(times_s[switch]) for switch in ("on", "off"))
        found["on_over_off"] = round(on_s / off_s, 4)
    return found


if __name__ == "__main__":
    main()
