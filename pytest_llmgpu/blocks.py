"""Which cases share a table: those that differ in strategy and batch size only, under what they have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import msgspec

from pytest_llmgpu.case import Case
from pytest_llmgpu.report import Report
from pytest_llmgpu.result import CaseResult

__all__ = ["blocks", "captions", "dataset", "listed", "model"]

_GIB = 2**30

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


def captions(tables: Sequence[Sequence[CaseResult]], report: Report) -> list[str]:
    """Return what each block measured; blocks that read the same also get the fields in which they differ."""
    cases = [block[0].case for block in tables]
    plain = [_caption(case, report) for case in cases]
    fields = [msgspec.to_builtins(case) for case in cases]
    found = []
    for caption, own in zip(plain, fields, strict=True):
        alike = [other for other, others in zip(fields, plain, strict=True) if others == caption]
        differing = [
            f"{name} {value[:12] if isinstance(value, str) else value}"
            for name, value in own.items()
            if name not in (*_COLUMN_FIELDS, "batch_size") and any(other[name] != value for other in alike)
        ]
        found.append(", ".join([caption, *differing]))
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


def _caption(case: Case, report: Report) -> str:
    names = listed(gpu.name for gpu in report.environment.gpus)
    where = f"{case.devices} x {names[0] if len(names) == 1 else 'GPU'}" if case.device == "cuda" else "CPU"
    parts = [model(case), case.dtype, where, dataset(case)]
    if case.gpu_memory_bytes is not None:
        parts.append(f"{case.gpu_memory_bytes / _GIB:.1f} GiB allowed of each")
    return ", ".join(parts)
