"""Cases that share a table differ in strategy and batch size only; the caption states what they have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from pytest_llmgpu.report.case import DEFAULT_TASK, Case
from pytest_llmgpu.report.report import Environment, Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import gib, plural

_DEFAULT_WORDS = {
    "gpu_memory_bytes": "no memory limit",
    "workload": "logits of the endings only",
    "attention": "attention chosen by transformers",
}
"""A caption leaves these defaults out. They are written where another block has another value."""

_COLUMN_FIELDS = ("strategy", "backend", "strategy_options", "execution")
"""Fields of a case that may differ within a table. `execution` is one of them: each batch size may run differently."""


def blocks(cases: Sequence[CaseResult]) -> list[list[CaseResult]]:
    """Return the cases of each table, in the order in which they ran."""
    found: dict[str, list[CaseResult]] = {}
    for result in cases:
        fields = msgspec.to_builtins(result.case)
        for name in (*_COLUMN_FIELDS, "batch_size"):
            del fields[name]
        if result.case.device == "cpu":
            # On a CPU devices are processes, and strategies use different numbers of them.
            del fields["devices"], fields["nodes"]
        found.setdefault(json.dumps(fields, sort_keys=True), []).append(result)
    return list(found.values())


def caption(case: Case, environment: Environment) -> str:
    """Return the caption of a case and of all cases in its block."""
    return ", ".join(filter(None, _caption_parts(case, environment).values()))


def captions(tables: Sequence[Sequence[CaseResult]], report: Report) -> list[tuple[str, str]]:
    """Return the caption of each block, and those of its parts that differ between blocks ("" if there is one block).

    Blocks with equal captions also get the fields in which they differ.
    """
    cases = [block[0].case for block in tables]
    parts = [_caption_parts(case, report.environment) for case in cases]
    plain = [", ".join(filter(None, one.values())) for one in parts]
    fields = [msgspec.to_builtins(case) for case in cases]
    differing = [name for name in parts[0] if len({one[name] for one in parts}) > 1] if parts else []
    found = []
    for text, own, of_case in zip(plain, fields, parts, strict=True):
        alike = [other for other, others in zip(fields, plain, strict=True) if others == text]
        more = [
            f"{name} {value[:12] if isinstance(value, str) else value}"
            for name, value in own.items()
            if name not in (*_COLUMN_FIELDS, "batch_size") and any(other[name] != value for other in alike)
        ]
        short = [of_case[name] or _DEFAULT_WORDS[name] for name in differing]
        found.append((", ".join([text, *more]), ", ".join([*short, *more])))
    return found


def model(case: Case) -> str:
    """Return the name of the model, with a note if its weights are random."""
    return f"{case.model} (random weights)" if case.load_format == "dummy" else case.model


def dataset(case: Case) -> str:
    """Return the task unless it is the default, the dataset, and the number of items if the run was limited."""
    task = "" if case.task == DEFAULT_TASK else f"task {case.task}, "
    return f"{task}{case.dataset} dataset" + ("" if case.limit is None else f" (first {case.limit:,} items)")


def _caption_parts(case: Case, environment: Environment) -> dict[str, str]:
    """Return the parts of a caption by field; the text of a default value is empty."""
    names = list(dict.fromkeys(gpu.name for gpu in environment.gpus))
    devices = f"{case.devices} x {names[0] if len(names) == 1 else 'GPU'}" if case.device == "cuda" else "CPU"
    # On a CPU strategies of one table use different numbers of nodes.
    nodes = case.nodes if case.device == "cuda" else len(environment.nodes)
    devices += f" on {nodes} nodes" * (nodes > 1)
    limit_bytes = case.gpu_memory_bytes
    workload = "every logit and a KV cache" if case.scoring == "harness" else ""
    if case.generates:
        workload = f"{plural(case.new_tokens or 0, 'new token')} after prompts of at most {case.prompt_tokens}"
    return {
        "model": model(case),
        "dtype": case.dtype,
        "devices": devices,
        "dataset": dataset(case),
        "gpu_memory_bytes": "" if limit_bytes is None else f"memory limit {gib(limit_bytes, 1)} per GPU",
        "workload": workload,
        "attention": "" if case.attention is None else f"{case.attention} attention",
    }
