"""Print, as JSON, how well the sampler keeps its pace and what it costs, on the compiled NVML stub.

    python benchmarks/overhead/sampler.py --seconds 30 --gpus 8 --pcie-us 20000

No GPU is needed; a C compiler named cc is. Held against: no missed tick, no drift.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["main", "stub_environment"]

_ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the sampler on the stub and print what was seen; 1 where a tick was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to sample (30)")
    parser.add_argument("--period", type=float, default=1 / 6, help="seconds between readings (1/6)")
    parser.add_argument("--gpus", type=int, default=8, help="devices of the stub (8)")
    parser.add_argument("--pcie-us", type=int, default=20_000, help="microseconds the PCIe call blocks (20,000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = stub_environment(Path(folder), options.gpus, options.pcie_us)
        header, ticks, cpu_s = _sample(environment, options.period, options.seconds)
    print(json.dumps({**vars(options), **_figures(header, ticks, cpu_s)}, indent=2))
    return 1 if ticks[-1]["k"] + 1 > len(ticks) else 0


def stub_environment(folder: Path, gpus: int = 8, pcie_us: int = 20_000) -> dict[str, str]:
    """Compile the NVML stub into a folder and return the environment of a process that sees it."""
    compiler = shutil.which("cc")
    if compiler is None:
        sys.exit("the NVML stub needs a C compiler named cc")
    library, source = folder / "libnvidia-ml.so.1", _ROOT / "tests" / "nvml_stub.c"
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source], check=True)
    stub = {"NVML_STUB_GPUS": str(gpus), "NVML_STUB_PCIE_US": str(pcie_us)}
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), **stub}


def _sample(
    environment: dict[str, str], period_s: float, seconds: float
) -> tuple[dict[str, Any], list[dict[str, Any]], float]:
    """Return the header, the ticks of so many seconds, and the child's CPU seconds between the first and the last."""
    command = [sys.executable, "-m", "pytest_llmgpu.profiling.sampler", "--period", repr(period_s)]
    with subprocess.Popen(
        command, env=environment, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        header = json.loads(process.stdout.readline())
        ticks = [json.loads(process.stdout.readline())]
        cpu_before_s = _cpu_s(process.pid)
        while ticks[-1]["t_s"] - header["t0_s"] < seconds:
            ticks.append(json.loads(process.stdout.readline()))
        cpu_s = _cpu_s(process.pid) - cpu_before_s
        process.stdin.close()
    return header, ticks, cpu_s


def _cpu_s(pid: int) -> float:
    """Return the user and system time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _figures(header: dict[str, Any], ticks: list[dict[str, Any]], cpu_s: float) -> dict[str, Any]:
    late_s = [tick["t_s"] - (header["t0_s"] + tick["k"] * header["period_s"]) for tick in ticks]
    times_s = [tick["t_s"] for tick in ticks]
    hundredths = statistics.quantiles(late_s, n=100, method="inclusive")
    return {
        "ticks": len(ticks),
        "missed": ticks[-1]["k"] + 1 - len(ticks),
        "null_values": sum(value is None for tick in ticks for values in tick["values"] for value in values),
        "last_deadline_error_s": late_s[-1],
        "drift_s_per_s": statistics.linear_regression(times_s, late_s).slope,
        "lateness_p50_s": hundredths[49],
        "lateness_p99_s": hundredths[98],
        "lateness_max_s": max(late_s),
        "child_cpu_s_per_s": cpu_s / (times_s[-1] - times_s[0]),
    }


if __name__ == "__main__":
    sys.exit(main())
