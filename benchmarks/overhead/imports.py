"""Measure the cost of the plugin for a test run that does not use it; prints JSON.

It runs `pytest --collect-only` on one empty test, alternately with the plugin and with `-p no:llmgpu`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy", "pynvml", "msgspec")
LIMIT_MS = 30.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_empty.py").write_text("def test_empty(): pass\n", encoding="utf-8")
        collect_s(folder, "-p", "no:llmgpu")
        collect_s(folder)
        without, with_plugin = [], []
        for _ in range(pairs):
            without.append(collect_s(folder, "-p", "no:llmgpu"))
            with_plugin.append(collect_s(folder))
    added_ms = [1e3 * (more - less) for less, more in zip(without, with_plugin, strict=True)]
    result = {
        "pairs": pairs,
        "collect_without_ms": round(1e3 * statistics.median(without), 1),
        "collect_with_ms": round(1e3 * statistics.median(with_plugin), 1),
        "added_ms": round(statistics.median(added_ms), 1),
        "limit_ms": LIMIT_MS,
        "imported": imported(),
    }
    json.dump(result, sys.stdout, indent=2)
    print()


def collect_s(folder: str, *arguments: str) -> float:
    """Return the seconds one collection takes."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments, folder]
    began_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return time.perf_counter() - began_s


def imported() -> list[str]:
    """Return the heavy libraries that loading the plugin imports; there should be none."""
    code = f"import sys, pytest_llmgpu.plugin.hooks; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


if __name__ == "__main__":
    main()
