"""Reports and their parts with small defaults, so that a test names only the fields it depends on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import derive, encode, proportion_stderr
from pytest_llmgpu.report.file import encode as encode_report
from pytest_llmgpu.report.report import Commit, Environment, Gpu, Node, Report, Session
from pytest_llmgpu.report.result import (
    Accuracy,
    AccuracyCheck,
    Batches,
    CaseResult,
    Collective,
    Comparison,
    DeviceMemory,
    DeviceProfile,
    Failure,
    Finding,
    Generation,
    Launch,
    Metric,
    Outcome,
    Path,
    Profile,
    Series,
    Traffic,
)
from pytest_llmgpu.report.work import (
    Bound,
    Ceilings,
    CollectiveWork,
    DeviceCeilings,
    ModelSize,
    RankWork,
    Work,
    WorkRow,
)

GIB = 2**30

_Part = TypeVar("_Part")
_LAUNCHES = itertools.count()

PAPER_S = {
    "mp": {1: 10258, 2: 6159, 4: 4622, 8: 4043, 16: 3807, 32: 3705, 64: 3800},
    "tp": {1: 6548, 2: 5084, 4: 4538, 8: 4280, 16: 4164, 32: 4087, 64: 4079},
    "iok": {1: 4959, 2: 4171, 4: 4250, 8: 4152, 16: 4027, 32: 4201},
}
"""Table 2 of Shin et al. 2024: strategy and batch size to seconds for HellaSwag. iok ran out of memory at 64."""


def known(part: _Part | None) -> _Part:
    """Return a part of a record that is not None."""
    assert part is not None
    return part


def make_case(**fields: Any) -> Case:
    """Return a case: mp, batch size 1, llama-30b in float16 on 4 GPUs."""
    defaults: dict[str, Any] = {
        "strategy": "mp",
        "batch_size": 1,
        "model": "huggyllama/llama-30b",
        "dtype": "float16",
        "device": "cuda",
        "devices": 4,
        "dataset": "hellaswag",
        "dataset_sha256": "d" * 64,
        "tokenizer_sha256": "e" * 64,
    }
    return Case(**{**defaults, **fields})


def make_accuracy(
    value: float = 0.828,
    items: int = 10_042,
    predictions: Sequence[int] | None = None,
    loglikelihoods: Sequence[float] | None = None,
) -> Accuracy:
    """Return an accuracy record: every item has 4 endings."""
    chosen = list(predictions) if predictions is not None else [0] * items
    return Accuracy(
        acc=value,
        acc_norm=value,
        items=items,
        predictions=chosen,
        predictions_norm=chosen,
        loglikelihoods=encode(loglikelihoods if loglikelihoods is not None else [-1.0] * 4 * items),
        stderr=proportion_stderr(value, items),
    )


def make_answers(right: Sequence[bool], loglikelihoods: Sequence[float] | None = None) -> Accuracy:
    """Return an accuracy record with labels; an item that is not right has the next ending as its answer."""
    labels = [number % 4 for number in range(len(right))]
    chosen = [label if hit else (label + 1) % 4 for label, hit in zip(labels, right, strict=True)]
    plain = make_accuracy(sum(right) / len(right), len(right), chosen, loglikelihoods)
    return msgspec.structs.replace(plain, labels=labels)


def make_check(text: str = "26 % is not 82 %", *, ok: bool | None = False) -> AccuracyCheck:
    """Return the check of an accuracy, which failed by default."""
    return AccuracyCheck(metric="acc_norm", value=0.26, baseline=0.82, source="x", tolerance=0.01, ok=ok, text=text)


def make_finding(
    severity: Literal["info", "warning", "failure"] = "failure",
    code: str = "slow",
    text: str = "It is slow.",
    next_step: str = "Look.",
) -> Finding:
    """Return a finding about a case."""
    return Finding(code=code, severity=severity, text=text, next_step=next_step)


def make_generation(
    texts: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
    again: Sequence[Sequence[float]],
    *,
    reference: str | None = None,
    reference_values: Sequence[Sequence[float]] | None = None,
    **fields: Any,
) -> Generation:
    """Return texts with their log-likelihoods in decode steps and in a forward without a KV cache."""

    def encoded(rows: Sequence[Sequence[float]]) -> str:
        return encode(value for row in rows for value in row)

    defaults: dict[str, Any] = {
        "prompt_tokens": [10] * len(texts),
        "new_tokens": list(map(len, texts)),
        "first_token_s": [0.02],
        "step_s": [0.01] * (len(texts[0]) - 1),
        "kv_cache_bytes": 1 << 20,
        "kv_cache_formula_bytes": 1 << 20,
        "tokens": encode((token for text in texts for token in text), "i"),
        "loglikelihoods": encoded(values),
        "prefill_loglikelihoods": encoded(again),
        "reference": reference,
        "reference_loglikelihoods": None if reference_values is None else encoded(reference_values),
    }
    return Generation(**{**defaults, **fields})


def make_profile(
    count: int = 4, *, tx: float = 0.085e9, rx: float = 0.084e9, busy: float = 25.0, nvlink: float = 0.0, **fields: Any
) -> Profile:
    """Return a profile in which the last device is 10 % above the others."""
    means = {
        "utilization_pct": busy,
        "pcie_tx_bytes_per_s": tx,
        "pcie_rx_bytes_per_s": rx,
        "memory_used_bytes": 18.0 * GIB,
        "nvlink_tx_bytes_per_s": nvlink,
    }
    seen = []
    for index in range(count):
        factor = 1.1 if count > 1 and index == count - 1 else 1.0
        metrics = {
            name: Metric(mean=factor * value, max=2 * value, method="nvml", coverage=None)
            for name, value in means.items()
        }
        seen.append(DeviceProfile(index=index, uuid=f"GPU-{index}", metrics=metrics))
    defaults: dict[str, Any] = {
        "period_s": 1 / 6,
        "duration_s": 60.0,
        "samples": 360,
        "missed": 0,
        "lateness_p99_s": 0.001,
        "devices": seen,
    }
    return Profile(**{**defaults, **fields})


def make_series(points: int, devices: int = 4) -> Series:
    """Return samples of every column of the profile; the last device is 10 above the others."""
    links = [f"{link}_{way}_bytes_per_s" for link in ("pcie", "nvlink") for way in ("tx", "rx")]
    names: list[Any] = ["utilization_pct", "memory_used_bytes", "power_w", "sm_clock_mhz", *links]
    samples = [50.123456 + number % 7 for number in range(points)]
    columns = [[sample + 10 * (index == devices - 1) for sample in samples] for index in range(devices)]
    return Series(
        t_s=[number / 6 for number in range(points)],
        devices=[{name: list(column) for name in names} for column in columns],
    )


def make_traffic(
    calls: int = 64,
    ranks: int = 2,
    *,
    wire_bytes_per_sequence: float | None = None,
    link: Any = None,
    kind: Any = "all_reduce",
) -> Traffic:
    """Return traffic of one kind, with 1 KiB per call and rank; without calls it is empty."""
    sent = Collective(collective=kind, calls=calls, payload_bytes=1024 * calls, wire_bytes=1024 * calls)
    return Traffic(
        ranks=[[sent] if calls else []] * ranks,
        wire_bytes_per_sequence=16.0 * calls * ranks if wire_bytes_per_sequence is None else wire_bytes_per_sequence,
        path=None if link is None else Path(link=link, expected_bytes=1024 * calls * ranks, text="as counted"),
    )


def make_work(ranks: int = 2, **fields: Any) -> Work:
    """Return what ranks that all-reduce compute, each the same, on a GPU of its own."""
    defaults: dict[str, Any] = {
        "batches": [0, 2],
        "eager_batches": [0, 2],
        "passes": 3,
        "collectives": [
            CollectiveWork(
                collective="all_reduce", calls=8, transfer_s=[0.002, 0.002, 0.003], wait_s=[0.01, 0.02, 0.015]
            )
        ],
        "ranks": [
            RankWork(
                uuids=[f"GPU-{index}"],
                device_time_s=[0.5, 0.51, 0.5],
                copy_s=[0.001, 0.001, 0.001],
                idle_s=[0.25, 0.26, 0.24],
                busy=0.67,
                kernels=1000,
                ops={"aten::mm": 400},
                ops_by_module={"layers.*.mlp": {"aten::mm": 400}},
                flops=10**12,
                runtime_calls={"cudaLaunchKernel": 990, "cudaStreamSynchronize": 2},
                host_syncs=4,
                rows=[
                    WorkRow(module=None, kernel=0, family="GEMM", calls=400, time_s=0.4),
                    WorkRow(module=None, kernel=1, family="elementwise", calls=600, time_s=0.1),
                    WorkRow(module="layers.*.mlp.down_proj", kernel=0, family="GEMM", calls=100, time_s=0.1),
                    WorkRow(module="other", kernel=None, family="other", calls=900, time_s=0.4),
                ],
            )
            for index in range(ranks)
        ],
        "model": ModelSize(parameters=6_500_000, weights_bytes=13_000_000, layers=2, attention_width=256),
    }
    return Work(**{**defaults, **fields})


def make_ceilings() -> Ceilings:
    """Return the rates of two GPUs of one kind."""
    return Ceilings(
        devices=[
            DeviceCeilings(uuid=f"GPU-{index}", gemm_flops_per_s={"float16": 7.6e14}, copy_bytes_per_s=3.9e12)
            for index in range(2)
        ],
        all_reduce_bytes_per_s=3.5e11,
        all_reduce_latency_s=1.2e-5,
    )


def make_memory(devices: int = 4, *, peak: float = 16 * GIB, used: float = 18 * GIB) -> list[DeviceMemory]:
    """Return the memory of each device; the last one uses 1 GiB more."""
    extra = [GIB if devices > 1 and index == devices - 1 else 0 for index in range(devices)]
    return [
        DeviceMemory(
            index=index,
            weights_bytes=15 * GIB,
            peak_allocated_bytes=int(peak + more),
            peak_reserved_bytes=int(peak + more),
            nvml_used_max_bytes=int(used + more),
            nvml_used_mean_bytes=int(used),
        )
        for index, more in enumerate(extra)
    ]


def make_result(
    seconds: float = 60.0,
    accuracy: Accuracy | None = None,
    profile: Profile | None = None,
    memory: Sequence[DeviceMemory] = (),
    sequences: int = 64,
    traffic: Traffic | None = None,
    **fields: Any,
) -> CaseResult:
    """Return a completed result whose batches took `seconds` in all; the batch size divides the sequences."""
    case = make_case(**fields)
    batches = sequences // case.batch_size
    launch = Launch(
        load_s=10.0 + next(_LAUNCHES) * 1e-9,  # no two launches have equal times
        warmup_s=1.0,
        wall_s=seconds + 2,
        plan_sha256="f" * 64,
        batches=Batches(
            latency_s=[seconds / batches] * batches,
            sequences=[case.batch_size] * batches,
            tokens=[100 * case.batch_size] * batches,
            padded_tokens=[110 * case.batch_size] * batches,
        ),
        accuracy=accuracy,
        memory=list(memory),
        profile=profile,
    )
    result = CaseResult(id=case.id, key=case.key, case=case, outcome="completed", launches=[launch], traffic=traffic)
    derive(result)
    return result


def make_failed(outcome: Outcome = "oom", failure: Failure | None = None, **fields: Any) -> CaseResult:
    """Return a result that did not complete."""
    case = make_case(**fields)
    launches = [] if outcome == "skipped_after_oom" else [Launch()]
    return CaseResult(id=case.id, key=case.key, case=case, outcome=outcome, failure=failure, launches=launches)


def make_report(cases: Sequence[CaseResult] = (), gpus: int = 4, **fields: Any) -> Report:
    """Return a report of these cases."""
    seen = [Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA H200") for index in range(gpus)]
    return Report(
        created="2026-01-02T03:04:05Z",
        plugin_version="0.1.0",
        environment=Environment(python="3.11.7", platform="Linux", gpus=seen),
        cases=list(cases),
        **fields,
    )


def make_full_report() -> Report:
    """Return a report in which every part of the JSON object occurs, except verdicts and capacity."""
    series = Series(t_s=[0.0, 0.5, 1.0], devices=[{"power_w": [300.0, None, 310.5]}] * 2)
    report = make_report(
        [
            make_result(3.0, make_accuracy(items=5), make_profile(2, series=series), make_memory(2), sequences=4),
            make_failed("oom", Failure(phase="load", message="too large"), batch_size=2),
            make_failed("skipped_after_oom", batch_size=4),
        ]
    )
    report.cases[0].launches[0].load_s = 10.0  # equal in every call
    sent = Collective(collective="all_reduce", calls=1, payload_bytes=8, wire_bytes=8)
    report.cases[0].traffic = Traffic(ranks=[[], [sent]], wire_bytes_per_sequence=8.0)
    report.cases[0].launches[0].work = report.cases[0].launches[0].prefill_work = make_work()
    report.cases[0].bound = Bound(
        compute_s=1.0, memory_s=0.5, wire_s=0.25, bound_s=1.5, limited_by="compute", share=0.5
    )
    report.environment.nodes = [Node(python="3.11.7", platform="Linux")] * 2
    report.environment.ceilings, report.environment.kernel_names = make_ceilings(), ["nvjet_hsh", "add_kernel"]
    report.cases[0].comparison = Comparison(
        reference="mp-bs1#2",
        items=5,
        flipped=[1, 3],
        lost=2,
        won=0,
        mcnemar_p=0.5,
        largest_difference=1e-3,
        typical_difference=1e-4,
    )
    report.options = {"--llmgpu-batch-sizes": [1, 2, 4], "--llmgpu-limit": None, "--llmgpu-timeout": 600.0}
    report.session = Session(complete=True, exit_status=0, collected=3, deselected=["a.py::test[mp-bs8]"])
    report.commit = Commit(sha="a" * 40, branch="main", dirty=False, source="git")
    return report


def make_document(report: Report) -> Any:
    """Return a report as the JSON object of its file."""
    return json.loads(encode_report(report, compressed=False))


def paper_results() -> list[CaseResult]:
    """Return Table 2 of Shin et al. 2024 as results, with figures of communication and memory."""
    results = []
    for strategy, seconds_by_size in PAPER_S.items():
        traffic = {"mp": 0.085e9, "tp": 6.7e9, "iok": 6.5e9}[strategy]
        for size, seconds in seconds_by_size.items():
            lost = strategy == "iok" and size == 32
            results.append(
                make_result(
                    seconds,
                    make_accuracy(0.26 if lost else 0.828),
                    make_profile(tx=traffic, rx=0.9 * traffic, busy=25.0 if strategy == "mp" else 80.0),
                    make_memory(peak=(15 + size / 8) * GIB, used=(17 + size / 8) * GIB),
                    traffic=make_traffic(wire_bytes_per_sequence=traffic / 200),
                    strategy=strategy,
                    batch_size=size,
                )
            )
    failure = Failure(
        phase="forward", rank=2, message="CUDA out of memory", requested_bytes=5 * GIB // 2, free_bytes=GIB // 2
    )
    results.append(make_failed("oom", failure, strategy="iok", batch_size=64))
    return results
