"""Measure the cost of the plugin for a test run that does not use it; prints JSON.

It runs `pytest --collect-only` on one empty test, in turn with the plugin, with `-p no:llmgpu`, and without another
plugin to compare with. The bytecode is in a folder of its own, because `PYTHONDONTWRITEBYTECODE` would add the time of
compiling to each run: pip compiles an installed package, and pytest keeps the rewritten modules of a plugin.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy", "pynvml", "msgspec")
PEERS = ("benchmark",)
LIMIT_MS = 30.0


def main() -> int:
    """Measure and print; return 1 if the limit is exceeded or a heavy library is imported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    installed = {entry.name for entry in importlib.metadata.entry_points(group="pytest11")}
    plugins = ["llmgpu", *(name for name in PEERS if name in installed)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_empty.py").write_text("def test_empty(): pass\n", encoding="utf-8")
        collect_ms(folder)  # compiles the modules
        runs = [[collect_ms(folder), *(collect_ms(folder, f"no:{name}") for name in plugins)] for _ in range(rounds)]
    # The fastest run of each kind: other programs only add to the time.
    with_all, *without = map(min, zip(*runs, strict=True))
    added_ms = {name: round(with_all - one, 1) for name, one in zip(plugins, without, strict=True)}
    heavy = imported()
    result = {
        "rounds": rounds,
        "collect_without_ms": round(without[0], 1),
        "collect_with_ms": round(with_all, 1),
        "added_ms": added_ms.pop("llmgpu"),
        "added_by_peers_ms": added_ms,
        "limit_ms": LIMIT_MS,
        "imported": heavy,
    }
    json.dump(result, sys.stdout, indent=2)
    print()
    return int(result["added_ms"] > LIMIT_MS or bool(heavy))


def collect_ms(folder: str, *plugins: str) -> float:
    """Return the CPU milliseconds of one collection, with plugins that `-p` names.

    A collection waits for nothing, and CPU time depends less than wall time on the other programs of the machine.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", folder]
    command += [argument for name in plugins for argument in ("-p", name)]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(folder, "bytecode")), "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def imported() -> list[str]:
    """Return the heavy libraries that loading the plugin imports; there should be none."""
    code = f"import sys, pytest_llmgpu.plugin.hooks; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


if __name__ == "__main__":
    sys.exit(main())
