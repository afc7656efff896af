"""Let `llmgpu bisect` find the commit that made a model slower, in a repository made for it; prints JSON.

The repository has a test of a model of four layers (LLaMA-7B's width on a GPU, a small width on a CPU) and a line of
commits. One of them, drawn by the seed, adds an adapter to the MLP of each layer: about 3 % of device time in a GPU's
case of batch size 8, and FLOPs on a CPU. `right`: that commit is named. Every launch is real.

    python benchmarks/gate/real_bisection.py --commits=63 > bisection.json
    python benchmarks/gate/real_bisection.py --device=cpu --commits=15
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import faults

_WORK = """
import faults


def change(loaded):
    faults.inject(loaded, {fault!r})
"""

_TEST = """
import work


def test_speed(llm, hellaswag, batch_size, measure):
    llm.run(work.change)
    measure(llm, hellaswag, batch_size)
"""


def main() -> int:
    """Make the repository, bisect it and print the result; return 0 if the commit was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of the forwards (cuda)")
    parser.add_argument("--commits", type=int, default=63, help="commits after the good one (63)")
    parser.add_argument("--seed", type=int, default=0, help="draws the bad commit (0)")
    asked = parser.parse_args()
    bad = random.Random(asked.seed).randint(1, asked.commits)  # noqa: S311 - not cryptography
    with tempfile.TemporaryDirectory() as folder:
        shas = repository(Path(folder), asked.commits, bad, asked.device)
        command = [sys.executable, "-m", "pytest_llmgpu.cli", "bisect", shas[0], shas[-1], "--case=mp-bs8"]
        command += ["--metric=program", "--", sys.executable]
        command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_speed.py"]
        search = os.pathsep.join(filter(None, [str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH")]))
        began_s = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": search},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        took_s = time.perf_counter() - began_s
    answer = summary(done.returncode, done.stdout, shas, bad)
    json.dump({"commits": asked.commits, "device": asked.device, "seconds": round(took_s, 1), **answer}, sys.stdout)
    print()
    return 0 if answer["right"] else 1


def repository(folder: Path, commits: int, bad: int, device: str) -> list[str]:
    """Make the repository; return the hashes of its commits, the good one first.

    Args:
        folder: An empty folder.
        commits: Commits after the first.
        bad: Number of the commit that adds the matrix product.
        device: `cuda` or `cpu`.
    """
    model = folder / "llama-4-layers"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(faults.SIZES[device]))
    options = [f"--llmgpu-device={device}", "--strategy=mp", "--llmgpu-devices=1", f"--llmgpu-model={model.name}"]
    options += [
        *faults.ARGUMENTS,
        f"--llmgpu-tokenizer={faults.TOKENIZER}",
        f"--llmgpu-limit={faults.ITEMS[device]['score']}",
    ]
    (folder / "pytest.ini").write_text("[pytest]\naddopts = " + " ".join(options) + "\n")
    (folder / "test_speed.py").write_text(_TEST)

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    git("init", "-q")
    shas = []
    for number in range(commits + 1):
        (folder / "work.py").write_text(_WORK.format(fault="adapters" if number >= bad else "none"))
        (folder / "number.txt").write_text(f"{number}\n")
        git("add", "-A")
        git("commit", "-qm", f"Commit {number}")
        shas.append(git("rev-parse", "HEAD"))
    return shas


def summary(status: int, output: str, shas: list[str], bad: int) -> dict[str, Any]:
    """Return what a bisection found.

    Args:
        status: Its exit status.
        output: What it printed.
        shas: Hashes of the commits.
        bad: Number of the bad one.
    """
    named = re.search(r"^FOUND: (\w+) is the first bad commit", output, re.MULTILINE)
    found = shas.index(named[1]) if named and named[1] in shas else None
    launches = re.search(r"^(\d+) launches", output, re.MULTILINE)
    return {
        "exit_status": status,
        "launches": int(launches[1]) if launches else None,
        "bad": bad,
        "found": found,
        "right": status == 0 and found == bad,
        "output": output.splitlines(),
    }


if __name__ == "__main__":
    sys.exit(main())
