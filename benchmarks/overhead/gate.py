"""Measure the time and memory of `llmgpu gate` on two reports of 21 cases of 8 ranks; prints JSON.

The reports are synthetic: 1 % of noise in each batch, a few flipped items, log-likelihoods that differ by rounding, and
work passes with `--rows` rows of kernels. The whole command is measured, with Python's start and the tables, in three
processes, and the limit holds for the least CPU time, because other programs take time, too.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 1.0
LIMIT_MB = 200.0
RUNS = 3
UNREADABLE = 2

# A small process starts the command, because the memory of the starting process counts as the command's.
GATE = """
import json, os, subprocess, sys, time
command = [sys.executable, "-m", "pytest_llmgpu.cli", "gate", *sys.argv[1:]]
began = time.perf_counter()
running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
_, status, used = os.wait4(running.pid, 0)
print(json.dumps({
    "wall_s": round(time.perf_counter() - began, 3),
    "cpu_s": round(used.ru_utime + used.ru_stime, 3),
    "peak_mb": round(used.ru_maxrss / 1024, 1),
    "exit_status": os.waitstatus_to_exitcode(status),
}))
"""


def main() -> int:
    """Make the reports, judge them and print; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=21)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--items", type=int, default=480)
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--devices", type=int, default=8, help="devices of a case, each with memory and traffic (8)")
    parser.add_argument("--rows", type=int, default=100, help="rows of the work passes of a rank (100)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks with work passes in a launch (8)")
    asked = parser.parse_args()
    sizes = {"cases": asked.cases, "batches": asked.batches, "items": asked.items, "launches": asked.launches}
    sizes |= {"devices": asked.devices, "rows_of_work": asked.rows, "ranks_of_work": asked.ranks}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("base.json", "head.json")]
        for seed, path in enumerate(paths):
            write(path, seed, **sizes)
        sizes["file_mb"] = round(paths[0].stat().st_size / 1e6)
        runs = [measured(paths) for _ in range(RUNS)]
    found = min(runs, key=lambda run: run["cpu_s"])
    sizes["cpu_s_of_each"] = [run["cpu_s"] for run in runs]
    ok = found["cpu_s"] < LIMIT_S and found["peak_mb"] < LIMIT_MB
    json.dump({**sizes, **found, "limit_s": LIMIT_S, "limit_mb": LIMIT_MB, "ok": ok}, sys.stdout, indent=2)
    print()
    return 0 if ok else 1


def measured(paths: Sequence[Path]) -> dict[str, Any]:
    """Run `llmgpu gate` on two reports; return its time and memory.

    Raises:
        ValueError: it could not read them.
    """
    command = [sys.executable, "-c", GATE, *map(str, paths)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    if found["exit_status"] == UNREADABLE:
        raise ValueError(f"llmgpu gate could not read {' or '.join(map(str, paths))}")
    return found


def write(
    path: Path,
    seed: int,
    *,
    cases: int,
    batches: int,
    items: int,
    launches: int,
    devices: int,
    rows_of_work: int,
    ranks_of_work: int,
) -> None:
    """Write a report whose noise depends on the seed."""
    from pytest_llmgpu.report.case import Case
    from pytest_llmgpu.report.derived import derive, encode
    from pytest_llmgpu.report.file import dump
    from pytest_llmgpu.report.report import Environment, Report
    from pytest_llmgpu.report.result import Accuracy, Batches, CaseResult, Collective, DeviceMemory, Launch, Traffic

    chance = random.Random(seed)  # noqa: S311 - noise, no secret
    results = []
    for number in range(cases):
        case = Case(
            strategy=("mp", "tp", "iok")[number % 3],
            batch_size=1 + number % 64,
            model=f"model-{number // 64}",
            dtype="float16",
            device="cuda",
            devices=devices,
            dataset="bundled",
            dataset_sha256="d" * 64,
            tokenizer_sha256="e" * 64,
        )
        labels = [item % 4 for item in range(items)]
        chosen = [label if chance.random() < 0.99 else 3 - label for label in labels]
        right = sum(map(int.__eq__, chosen, labels)) / items
        accuracy = Accuracy(
            acc=right,
            acc_norm=right,
            items=items,
            predictions=chosen,
            predictions_norm=chosen,
            loglikelihoods=encode(-1.0 - 1e-4 * chance.random() for _ in range(4 * items)),
            stderr=None,
            labels=labels,
        )
        measured = [
            Launch(
                plan_sha256="f" * 64,
                batches=Batches(
                    latency_s=[(0.1 + 0.01 * batch) * chance.gauss(1, 0.01) for batch in range(batches)],
                    sequences=[case.batch_size] * batches,
                    tokens=[100 * case.batch_size + batch for batch in range(batches)],
                    padded_tokens=[110 * case.batch_size + batch for batch in range(batches)],
                ),
                accuracy=accuracy,
                memory=[DeviceMemory(index=index, peak_allocated_bytes=2**34) for index in range(devices)],
                work=work(rows_of_work, ranks_of_work, chance),
            )
            for _ in range(launches)
        ]
        sent = [Collective(collective="all_reduce", calls=64, payload_bytes=2**20, wire_bytes=2**21)]
        result = CaseResult(
            id=f"{case.id}#{number}",
            nodeid=f"benchmarks/test_inference.py::test_hellaswag[{number}]",
            key=case.key,
            case=case,
            outcome="completed",
            launches=measured,
            traffic=Traffic(ranks=[sent] * devices, wire_bytes_per_sequence=1.0),
        )
        derive(result)
        results.append(result)
    names = [f"nvjet_{number}" for number in range(rows_of_work)]
    machine = Environment(python="3.12", platform="Linux", kernel_names=names)
    dump(Report(created="2026-01-02T03:04:05Z", plugin_version=None, environment=machine, cases=results), path)


def work(rows: int, ranks: int, chance: random.Random) -> Any:
    """Return the work passes of a launch with one GPU a rank."""
    from pytest_llmgpu.report.work import Work

    of_ranks = [rank_work(rows, rank, chance) for rank in range(ranks)]
    return Work(batches=[0, 1, 2], eager_batches=[1], passes=4, collectives=[], ranks=of_ranks)


def rank_work(rows: int, number: int, chance: random.Random) -> Any:
    """Return four work passes of a rank, with noise of 0.1 %; half of the rows are those of modules.

    Each kernel takes 0.87 times as long as the one before, about as those of LLaMA-7B.
    """
    from pytest_llmgpu.report.work import RankWork, WorkRow

    found = []
    for row in range(rows):
        of_all, passes_s = row < rows / 2, [0.01 * 0.87**row * chance.gauss(1, 0.001) for _ in range(4)]
        module = None if of_all else f"layers.*.mlp.module_{row}"
        timed = {"time_s": passes_s[0], "passes_s": passes_s if of_all else None}
        found.append(WorkRow(module=module, kernel=row, family="GEMM", calls=64 + row, **timed))
    return RankWork(
        uuids=[f"GPU-{number}"],
        device_time_s=list(map(sum, zip(*(row.passes_s for row in found if row.passes_s), strict=True))) or [0.0] * 4,
        copy_s=[1e-4] * 4,
        idle_s=[1e-3] * 4,
        clock_ghz=[[1.7 * chance.gauss(1, 0.01) for _ in range(4)]],
        busy=0.9,
        kernels=64 * rows,
        ops={f"aten::op_{number}": 64 for number in range(30)},
        ops_by_module={f"layers.*.{module}": {f"aten::op_{number}": 4 for number in range(8)} for module in range(16)},
        flops=10**12,
        runtime_calls={"cudaLaunchKernel": 1000, "cudaMemcpyAsync": 4, "cudaStreamSynchronize": 4},
        host_syncs=8,
        rows=found,
    )


if __name__ == "__main__":
    sys.exit(main())
