"""Measure the time to list the numbered store; prints JSON.

It runs `llmgpu list` on 1,000 copies of a report of the main job, compressed and not, and on reports of the whole
HellaSwag. The fastest of five processes counts, because other programs may slow down the rest.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.store import store

MEASURED = Path(__file__).parents[1] / "reports" / "mp-bundled-1xH200.json.gz"
ITEMS = 10_042
ENDINGS = 4
LIMIT_S = 1.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=1000)
    parser.add_argument("--large-reports", type=int, default=100)
    arguments = parser.parse_args()
    of = file.load(MEASURED)
    result = {
        "json": measure(of, arguments.reports, compressed=False),
        "json_gz": measure(of, arguments.reports, compressed=True),
        "limit_s": LIMIT_S,
        "hellaswag_json": measure(hellaswag(of), arguments.large_reports, compressed=False),
        "hellaswag_json_gz": measure(hellaswag(of), arguments.large_reports, compressed=True),
    }
    json.dump(result, sys.stdout, indent=2)
    print()


def measure(of: Report, count: int, *, compressed: bool) -> dict[str, float | int]:
    """Return the size of a report and the time of `llmgpu list` on `count` of them."""
    with tempfile.TemporaryDirectory() as folder:
        first = store.save(of, Path(folder), compressed=compressed)
        for number in range(2, count + 1):
            shutil.copyfile(first, first.with_name(f"{number:04}{first.name[4:]}"))
        command = [sys.executable, "-m", "pytest_llmgpu.cli", "list", "--storage", folder]
        times_s = []
        for _ in range(5):
            began_s = time.perf_counter()
            listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            times_s.append(time.perf_counter() - began_s)
        assert len(listed.splitlines()) == count + 2
        return {"reports": count, "report_bytes": first.stat().st_size, "list_s": round(min(times_s), 3)}


def hellaswag(of: Report) -> Report:
    """Return a report with the answers to the whole HellaSwag in every case, which compress as badly as real ones."""
    chance = base64.b64encode(b"".join(number.to_bytes(4, "big") for number in _noise(ENDINGS * ITEMS))).decode()
    chosen = [number % ENDINGS for number in _noise(ITEMS)]
    large = json.loads(file.encode(of, compressed=False))
    for case in large["cases"]:
        for launch in case["launches"]:
            names = ("predictions", "predictions_norm", "labels")
            launch["accuracy"] |= {"items": ITEMS, "loglikelihoods": chance} | dict.fromkeys(names, chosen)
    return file.parse(json.dumps(large).encode(), "hellaswag")


def _noise(count: int) -> list[int]:
    """Return numbers below 2**32 that do not compress, the same ones in every run."""
    state, numbers = 1, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        numbers.append(state >> 32)
    return numbers


if __name__ == "__main__":
    main()
