"""Measure the lateness and the cost of the sampler, on the GPUs or the compiled NVML stub; prints JSON.

    python benchmarks/overhead/sampler.py

It measures the sampler by number of GPUs and its NVML calls alone (bare_calls.py), its lateness with all cores loaded,
and nvitop's collector and zeus's power monitor with the same period (peers.py), if they are installed. It takes about
55 s. Without a GPU, the stub needs a C compiler named cc; its calls cost almost nothing, so that the cost of Python
remains. Limits: no missed tick, 10 % of a core, lateness p99 under 5 ms on a loaded machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_llmgpu.profiling import nvml

CPU_LIMIT_S_PER_S = 0.10
LATENESS_LIMIT_S = 0.005
"""At normal priority, which the sampler has: 3.5 ms on two cores with a load of 8 (stub, 2 GPUs, 106 ticks)."""
LOADED_PERIOD_S = 0.1
"""The shortest period that GPM allows. With fewer than 100 ticks the 99th percentile would be the maximum."""
PEERS = ("nvitop", "zeus")
_ROOT = Path(__file__).resolve().parents[2]
_OLDER = {"GPM": "0", "FIELDS": "138,139,74,75", "RING": "absent"}
_HOPPER = {"GPM": "1", "FIELDS": "138,139,74,75,185,186,197,198", "RING": "50"}
"""Settings of the stub: byte rates by blocking calls, or all metrics of a Hopper GPU (185, 186: power, for zeus)."""


def main() -> int:
    """Measure and print; return 1 if a limit is exceeded."""
    options = _parse()
    load = os.getloadavg()[0]  # if others load all cores, the lateness is not the sampler's
    period, seconds = ["--period", repr(options.period)], ["--seconds", repr(options.seconds)]
    with tempfile.TemporaryDirectory() as folder:
        uuids: list[str] | None = [gpu.uuid for gpu in nvml.inventory().gpus]
        stub = None if uuids else Path(folder)
        most = min(options.gpus, len(uuids)) if uuids else options.gpus

        def environment(gpus: int) -> dict[str, str]:
            if stub is None:
                return dict(os.environ)
            return stub_environment(stub, gpus, options.pcie_us, older=options.older)

        def chosen(gpus: int) -> list[str]:
            return [*period, "--uuids", ",".join(uuids[:gpus])] if uuids else period

        by_gpus = []
        for gpus in [count for count in (1, 2, 4, 8) if count < most] + [most]:
            run = _sample(environment(gpus), chosen(gpus), options.seconds)
            bare = _script("bare_calls.py", environment(gpus), [*chosen(gpus), *seconds])
            by_gpus.append({"gpus": gpus, **figures(*run), **_against(run, bare)})
            if gpus == most:
                calls = {"methods": _methods(run[0]), **{name: bare.get(name) for name in ("calls_per_s", "costs")}}
        with _loaded() as busy:
            often = ["--period", repr(LOADED_PERIOD_S), *chosen(most)[2:]]
            run = _sample(environment(most), often, options.loaded_seconds)
        loaded = {"gpus": most, "period_s": LOADED_PERIOD_S, "busy_processes": busy, **figures(*run)}
        others = {name: _script("peers.py", environment(most), [name, *period, *seconds]) for name in PEERS}
    ok = {
        "missed": not by_gpus[-1]["missed"],
        "cpu": by_gpus[-1]["cpu_s_per_s"] < CPU_LIMIT_S_PER_S,
        "lateness": loaded["lateness_p99_s"] < LATENESS_LIMIT_S,
    }
    settings = {
        **vars(options),
        "nvml": "stub" if stub else "real",
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
    }
    limits = {"cpu_s_per_s": CPU_LIMIT_S_PER_S, "loaded_lateness_p99_s": LATENESS_LIMIT_S}
    result = {"settings": settings, "by_gpus": by_gpus, **calls, "loaded": loaded, "others": others}
    print(json.dumps({**result, "limits": limits, "ok": ok}, indent=2))
    return 0 if all(ok.values()) else 1


def stub_environment(folder: Path, gpus: int = 8, pcie_us: int = 20_000, *, older: bool = True) -> dict[str, str]:
    """Compile the NVML stub into a folder, once, and return the environment of a process that uses it."""
    library, source = folder / "libnvidia-ml.so.1", _ROOT / "tests" / "support" / "nvml_stub.c"
    if not library.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            sys.exit("the NVML stub needs a C compiler named cc")
        subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source], check=True)
    answers = {"GPUS": str(gpus), "PCIE_US": str(pcie_us), **(_OLDER if older else _HOPPER)}
    stub = {f"NVML_STUB_{name}": value for name, value in answers.items()}
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), **stub}


def figures(header: dict[str, Any], ticks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the lateness of the ticks and their cost."""
    late_s = [tick["t_s"] - (header["t0_s"] + tick["k"] * header["period_s"]) for tick in ticks]
    times_s = [tick["t_s"] for tick in ticks]
    in_order = sorted(late_s)
    return {
        "ticks": len(ticks),
        "missed": ticks[-1]["k"] - ticks[0]["k"] + 1 - len(ticks),
        "last_deadline_error_s": late_s[-1],
        "drift_s_per_s": statistics.linear_regression(times_s, late_s).slope,
        "lateness_p50_s": statistics.median(late_s),
        "lateness_p99_s": in_order[math.ceil(0.99 * len(in_order)) - 1],
        "lateness_max_s": in_order[-1],
        "cpu_s_per_s": (ticks[-1]["cpu_s"] - ticks[0]["cpu_s"]) / (times_s[-1] - times_s[0]),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.5, help="how long to measure each (2.5)")
    parser.add_argument(
        "--loaded-seconds", type=float, default=10.5, help="how long to measure on a loaded machine (10.5)"
    )
    parser.add_argument("--period", type=float, default=1 / 6, help="seconds between readings (1/6)")
    parser.add_argument("--gpus", type=int, default=8, help="the most GPUs to read; the number of GPUs of the stub (8)")
    parser.add_argument("--older", action="store_true", help="the stub has GPUs without GPM, which need blocking calls")
    parser.add_argument("--pcie-us", type=int, default=20_000, help="microseconds that such a call blocks (20,000)")
    return parser.parse_args()


def _sample(
    environment: dict[str, str], arguments: Sequence[str], seconds: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the ticks of the given time."""
    command = [sys.executable, "-m", "pytest_llmgpu.profiling.sampler", *arguments]
    with subprocess.Popen(
        command,
        env=environment,
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a run starts it: the scheduler splits cores by session first
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        header = json.loads(process.stdout.readline())
        if "error" in header:
            sys.exit(f"the sampler does not run: {header['error']}")
        ticks = [json.loads(process.stdout.readline())]
        while ticks[-1]["t_s"] - header["t0_s"] < seconds:
            ticks.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        process.stdout.close()
    return header, ticks


def _script(name: str, environment: dict[str, str], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the last line that another script of this folder prints; its status and last error line if it fails."""
    path = os.pathsep.join(filter(None, (str(_ROOT), environment.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *arguments],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [""]
        return {"why": f"{name} ended with {process.returncode}: {lines[-1]}"}
    answer: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return answer


def _against(run: tuple[dict[str, Any], list[dict[str, Any]]], bare: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of the calls alone, and the cost of the sampler as a multiple of it."""
    alone = bare.get("cpu_s_per_s")
    if alone is None:
        return {"bare_cpu_s_per_s": None, "over_bare": None, "why": bare["why"]}
    return {"bare_cpu_s_per_s": alone, "over_bare": figures(*run)["cpu_s_per_s"] / alone}


def _methods(header: dict[str, Any]) -> dict[str, str]:
    """Return the method of each metric of the first GPU."""
    return dict(zip(header["metrics"], header["devices"][0]["methods"], strict=True))


@contextmanager
def _loaded() -> Iterator[int]:
    """Keep every core busy; yield the number of processes."""
    # They end by themselves, in case this process is killed.
    code = "import time; end_s = time.monotonic() + 60\nwhile time.monotonic() < end_s: pass"
    busy = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in os.sched_getaffinity(0)]
    try:
        yield len(busy)
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
