"""Find a cap on a GPU's memory under which DeepSpeed grants too few tokens, and keep the report of that run.

This reproduces the accuracy collapse of Shin et al. 2024: a workspace that is short of memory silently holds fewer
tokens than the sequences have. The script runs the bundled model and bisects over the cap. At a batch size of about
1,000 a token takes 24 MiB of workspace, and DeepSpeed leaves 500 MiB of the free memory, in which the forward fits;
with less than 1 GiB free it leaves only 100 MiB, and the forward is out of memory.

    python benchmarks/reports/clamp.py iok-bundled-clamped.json.gz --batch-size 1024 --tokens 20,26
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_STEPS = 10


def main() -> None:
    """Bisect over the cap and print each step as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", help="file for the report of the run that was found")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--tokens", default="20,26", metavar="LEAST,MOST", help="the range of granted tokens to find")
    parser.add_argument("--caps", default="1300,2300", metavar="MIB,MIB", help="the range of caps to search")
    arguments = parser.parse_args()
    least, most = map(int, arguments.tokens.split(","))
    low, high = map(int, arguments.caps.split(","))
    for _ in range(_STEPS):
        cap = (low + high) // 2
        found = _run(cap, arguments.batch_size, arguments.report)
        print(json.dumps({"cap_mib": cap, **found}), flush=True)
        granted = found["tokens_granted"]
        if found["outcome"] == "completed" and granted is not None and least <= granted <= most:
            return
        if found["outcome"] != "completed" or (granted or 0) < least:
            low = cap
        else:
            high = cap
    raise SystemExit(f"no cap of {arguments.caps} MiB grants {arguments.tokens} tokens")


def _run(cap_mib: int, batch_size: int, report: str) -> dict[str, Any]:
    options = [
        "--strategy=mp,iok",
        "--llmgpu-devices=1",
        "--llmgpu-iok-min-tokens=1",
        "--llmgpu-cuda-graphs=off",
        f"--llmgpu-gpu-memory={cap_mib}MiB",
        f"--llmgpu-batch-sizes={batch_size}",
        f"--llmgpu-json={report}",
    ]
    benchmarks = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", str(benchmarks), "-q", "-p", "no:cacheprovider", *options]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    data = Path(report).read_bytes()
    cases = json.loads(gzip.decompress(data) if report.endswith(".gz") else data)["cases"]
    case = next(case for case in cases if case["case"]["strategy"] == "iok")
    found = case["launches"][0] if case["outcome"] == "completed" else case["failure"] or {}
    return {
        "outcome": case["outcome"],
        "tokens_granted": found.get("tokens_granted"),
        "tokens_requested": found.get("tokens_requested"),
        "acc_norm": case["acc_norm"],
        "message": (case["failure"] or {}).get("message"),
    }


if __name__ == "__main__":
    main()
