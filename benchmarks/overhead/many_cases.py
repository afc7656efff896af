"""Measure one pytest session of many cases: memory of pytest's process, time of a case and of a report; prints JSON.

The ranks are simulated and answer at once with profiles and work passes of common size, so that everything else that a
session does is measured. This file is the plugin of that session, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 5.0
LIMIT_MB = 500.0
LIMIT_MS = 100.0
"""For one of the last cases, without the writing of the report: each case is compared with those before it."""

TEST = """
import pytest

@pytest.mark.llmgpu(limit={limit})
def test_{limit}(llm, hellaswag, batch_size, measure):
    measure(llm, hellaswag, batch_size)
"""
SIZES, LEAST = 50, 20
"""Batch sizes of a series, and the fewest items of a series: each has another number of them."""
RANKS, BATCHES, ITEMS, PASSES, ROWS, POINTS, GROUP = 2, 20, 80, 3, 100, 60, 100
RESULT, CASES_S, WRITES_S = "MANY_CASES_RESULT", list[float](), list[float]()


def main() -> int:
    """Run the session and print; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    cases = parser.parse_args().cases
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(TEST.format(limit=limit) for limit in range(LEAST, LEAST + max(1, cases // SIZES)))
        Path(folder, "test_many.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider", folder]
        command += ["--strategy=tp", "--llmgpu-load-format=dummy", "--llmgpu-device=cpu", f"--llmgpu-devices={RANKS}"]
        command += ["--llmgpu-json=report.json", f"--llmgpu-batch-sizes={','.join(map(str, range(1, SIZES + 1)))}"]
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, RESULT: str(Path(folder, "result.json"))}
        began_s = time.perf_counter()
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
        wall_s = time.perf_counter() - began_s
        if done.returncode:
            sys.exit(done.stdout[-2000:])
        found = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
        report_mb = Path(folder, "report.json").stat().st_size / 1e6
    ok = found["peak_mb"] < LIMIT_MB and found["last_write_s"] < LIMIT_S and found["last_cases_ms"] < LIMIT_MS
    limits = {"limit_mb": LIMIT_MB, "limit_write_s": LIMIT_S, "limit_ms": LIMIT_MS, "ok": ok}
    sizes = {"cases": cases, "wall_s": round(wall_s, 1), "report_mb": round(report_mb, 1)}
    json.dump({**sizes, **found, **limits}, sys.stdout, indent=2)
    print()
    return 0 if ok else 1


class Rank:
    """A rank that answers at once, in this process."""

    alive = True

    def __init__(self, number: int) -> None:
        self.rank = number

    def submit(self, fn: Callable[..., Any], /, *_: Any) -> Future[Any]:
        """Return the answer."""
        future: Future[Any] = Future()
        future.set_result(answer(fn.__name__, self.rank))
        return future

    def stacks(self) -> str:
        """Return no stack."""
        return ""

    def close(self) -> None:
        """End."""

    def kill(self) -> None:
        """End."""


def pytest_configure() -> None:
    """Replace the ranks and the profiler, and time each case and each report."""
    from pytest_llmgpu.profiling.profiler import Profiler
    from pytest_llmgpu.ranks.local import LocalLauncher
    from pytest_llmgpu.report import file

    patch = pytest.MonkeyPatch()
    patch.setattr(LocalLauncher, "start", lambda _, environments, __: [Rank(one) for one in range(len(environments))])
    patch.setattr(Profiler, "start", lambda _: None)
    patch.setattr(Profiler, "mark", lambda _, **__: None)
    patch.setattr(Profiler, "slice", profile)
    dump = file.dump

    def timed(*arguments: Any) -> None:
        began_s = time.perf_counter()
        dump(*arguments)
        WRITES_S.append(time.perf_counter() - began_s)

    patch.setattr(file, "dump", timed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Any:
    """Time a case without the writing of its report."""
    began_s, written_s = time.perf_counter(), sum(WRITES_S)
    try:
        return (yield)
    finally:
        CASES_S.append(time.perf_counter() - began_s - (sum(WRITES_S) - written_s))


def pytest_unconfigure() -> None:
    """Write the figures."""
    first_ms, last_ms = (1e3 * sum(part) / len(part) for part in (CASES_S[:GROUP], CASES_S[-GROUP:]))
    found = {
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "first_cases_ms": round(first_ms, 2),
        "last_cases_ms": round(last_ms, 2),
        "last_write_s": round(WRITES_S[-1], 3),
        "all_writes_s": round(sum(WRITES_S), 1),
    }
    Path(os.environ[RESULT]).write_text(json.dumps(found), encoding="utf-8")


def answer(name: str, rank: int) -> Any:
    """Return what a rank answers to a command."""
    from pytest_llmgpu.ranks.device_memory import DeviceUse
    from pytest_llmgpu.ranks.host_use import RankHostUse
    from pytest_llmgpu.ranks.worker import ScoreReply, TrafficReply
    from pytest_llmgpu.report.result import Batches, Collective
    from pytest_llmgpu.report.work import ModelSize

    use = [DeviceUse(uuid=None, weights_bytes=2**30, peak_allocated_bytes=2**31)]
    if name == "load":
        return use
    if name == "account":
        sent = Collective(collective="all_reduce", calls=64, payload_bytes=2**20, wire_bytes=2**21)
        return TrafficReply(collectives=[sent])
    if name == "run_eager_passes":
        return [_work(rank)]
    if name == "model_size":
        return ModelSize(parameters=1, weights_bytes=2, layers=3, attention_width=4)
    if name != "measure":
        return None
    return ScoreReply(
        started_s=0.0,
        ended_s=10.0,
        warmup_s=0.5,
        plan_sha256="f" * 64,
        execution="eager",
        execution_choice="the ranks are simulated",
        batches=Batches(
            latency_s=[random.uniform(0.1, 0.11) for _ in range(BATCHES)],  # noqa: S311 - noise, no secret
            sequences=[4] * BATCHES,
            tokens=[400] * BATCHES,
            padded_tokens=[440] * BATCHES,
        ),
        accuracy=_accuracy(),
        memory=use,
        workspace=None,
        host=RankHostUse(),
        threads=1,
    )


def _accuracy() -> Any:
    from pytest_llmgpu.report.derived import encode
    from pytest_llmgpu.report.result import Accuracy

    labels = [number % 4 for number in range(ITEMS)]
    return Accuracy(
        acc=1.0,
        acc_norm=1.0,
        items=len(labels),
        predictions=list(labels),
        predictions_norm=list(labels),
        loglikelihoods=encode([-1.0] * 4 * len(labels)),
        stderr=0.0,
        labels=labels,
    )


def _work(rank: int) -> Any:
    from pytest_llmgpu.ranks import work
    from pytest_llmgpu.ranks.kernel_records import NamedRow
    from pytest_llmgpu.report.work import RankWork

    of_rank = RankWork(
        uuids=[f"GPU-{rank}"],
        device_time_s=[random.uniform(1.0, 1.01)] * PASSES,  # noqa: S311 - noise, no secret
        copy_s=[1e-4] * PASSES,
        idle_s=[1e-3] * PASSES,
        busy=0.9,
        kernels=64 * ROWS,
        kernels_sha256="f" * 64,
        ops={f"aten::op_{number}": 64 for number in range(30)},
        flops=10**12,
        runtime_calls={"cudaLaunchKernel": 1000, "cudaMemcpyAsync": 4, "cudaStreamSynchronize": 4},
        host_syncs=8,
    )
    rows = [
        NamedRow(
            None if number % 2 else f"layers.*.mlp.module_{number}",
            f"kernel_{number}",
            "GEMM",
            64,
            random.uniform(0.01, 0.011),  # noqa: S311 - noise, no secret
        )
        for number in range(ROWS)
    ]
    return work.WorkReply(batches=[0, 1, 2], eager_batches=[1], work=of_rank, rows=rows, collective_s=[{}] * PASSES)


def profile(_: object, start_s: float, end_s: float, held_bytes: Mapping[str, int] | None = None) -> Any:
    """Return the profile of a node."""
    from pytest_llmgpu.report.result import DeviceProfile, Metric, Profile, Series

    del held_bytes
    names: Sequence[str] = [f"metric_{number}" for number in range(9)]
    metric = Metric(mean=50.0, max=60.0, method="nvml", coverage=None)
    devices = [
        DeviceProfile(index=index, uuid=f"GPU-{index}", metrics=dict.fromkeys(names, metric)) for index in range(RANKS)
    ]
    columns = [
        {name: [random.uniform(49.0, 51.0) for _ in range(POINTS)] for name in names}  # noqa: S311 - noise, no secret
        for _ in range(RANKS)
    ]
    return Profile(
        period_s=1 / 6,
        duration_s=end_s - start_s,
        samples=POINTS,
        missed=0,
        lateness_p99_s=0.001,
        devices=devices,
        series=Series(t_s=[number / 6 for number in range(POINTS)], devices=columns),
    )


if __name__ == "__main__":
    sys.exit(main())
