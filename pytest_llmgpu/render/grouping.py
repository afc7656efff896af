"""Which cases share a table: those that differ in strategy and batch size only, under what they have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import msgspec

from pytest_llmgpu.analysis import capacity
from pytest_llmgpu.report.capacity import Capacity
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.machine import Environment
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult

__all__ = ["apart", "blocks", "capacities", "caption", "captions", "dataset", "listed", "model"]

_GIB = 2**30

_UNSAID = {"gpu_memory_bytes": "all of the memory", "workload": "logits of the endings only"}
"""What a caption leaves out, by field, where it has to be told from another."""

_HARNESS = "loglikelihood_full_logits"

_COLUMN_FIELDS = ("strategy", "backend", "strategy_options", "execution")
"""Fields of a case that may differ within a table; how the forwards ran is an answer that each batch size may get."""


def blocks(cases: Sequence[CaseResult]) -> list[list[CaseResult]]:
    """Return the cases table by table, in the order in which they ran."""
    found: dict[str, list[CaseResult]] = {}
    for result in cases:
        fields = msgspec.to_builtins(result.case)
        for name in (*_COLUMN_FIELDS, "batch_size"):
            del fields[name]
        if result.case.device == "cpu":
            del fields["devices"]  # processes, of which each strategy has as many as it needs
        found.setdefault(json.dumps(fields, sort_keys=True), []).append(result)
    return list(found.values())


def capacities(report: Report) -> list[Capacity]:
    """Return the largest batch size of each series of a report, predicted as this version does, whatever made it."""
    return capacity.capacities(report.cases, report.environment.gpus)


def caption(case: Case, environment: Environment) -> str:
    """Return what a case and those of its block measured."""
    return ", ".join(filter(None, _told(case, environment).values()))


def captions(tables: Sequence[Sequence[CaseResult]], report: Report) -> list[str]:
    """Return what each block measured; blocks that read the same also get the fields in which they differ."""
    plain = [caption(block[0].case, report.environment) for block in tables]
    more = _unread(tables, plain)
    return [", ".join([text, *fields]) for text, fields in zip(plain, more, strict=True)]


def apart(tables: Sequence[Sequence[CaseResult]], report: Report) -> list[str]:
    """Return of each block what tells it from the others; nothing of a single one."""
    told = [_told(block[0].case, report.environment) for block in tables]
    differing = [name for name in told[0] if len({one[name] for one in told}) > 1] if told else []
    more = _unread(tables, [caption(block[0].case, report.environment) for block in tables])
    return [
        ", ".join([*(one[name] or _UNSAID[name] for name in differing), *fields])
        for one, fields in zip(told, more, strict=True)
    ]


def _unread(tables: Sequence[Sequence[CaseResult]], plain: Sequence[str]) -> list[list[str]]:
    """Return the fields in which a block differs from those of the same caption."""
    cases = [block[0].case for block in tables]
    fields = [msgspec.to_builtins(case) for case in cases]
    found = []
    for text, own in zip(plain, fields, strict=True):
        alike = [other for other, others in zip(fields, plain, strict=True) if others == text]
        found.append(
            [
                f"{name} {value[:12] if isinstance(value, str) else value}"
                for name, value in own.items()
                if name not in (*_COLUMN_FIELDS, "batch_size") and any(other[name] != value for other in alike)
            ]
        )
    return found


def model(case: Case) -> str:
    """Return the model's name, and that its weights are random."""
    return f"{case.model} (random weights)" if case.load_format == "dummy" else case.model


def dataset(case: Case) -> str:
    """Return the dataset's name and how much of it was scored."""
    return f"{case.dataset} dataset" + ("" if case.limit is None else f" (first {case.limit:,} items)")


def listed(values: Iterable[str]) -> list[str]:
    """Return each value once, in order."""
    return list(dict.fromkeys(values))


def _told(case: Case, environment: Environment) -> dict[str, str]:
    """Return what a caption says, by field; an empty text of what goes without saying."""
    names = listed(gpu.name for gpu in environment.gpus)
    where = f"{case.devices} x {names[0] if len(names) == 1 else 'GPU'}" if case.device == "cuda" else "CPU"
    cap = case.gpu_memory_bytes
    return {
        "model": model(case),
        "dtype": case.dtype,
        "devices": where,
        "dataset": dataset(case),
        "gpu_memory_bytes": "" if cap is None else f"{cap / _GIB:.1f} GiB allowed of each",
        "workload": "every logit and a KV cache" if case.workload == _HARNESS else "",
    }
