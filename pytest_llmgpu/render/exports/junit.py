"""A case as properties of its test in JUnit's XML: append them to `item.user_properties`."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmgpu.render.exports.escaping import one_line
from pytest_llmgpu.render.exports.figures import figures
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row

__all__ = ["properties", "verdict_properties"]


def properties(result: CaseResult) -> list[tuple[str, str]]:
    """Return name and value of what is known of a case once it has run: `("llmgpu.time_s", "60.0")`.

    A figure's property ends in its unit; names do not depend on anything that users write.
    """
    pairs = [
        ("llmgpu.id", one_line(result.id)),
        ("llmgpu.outcome", result.outcome),
        ("llmgpu.strategy", one_line(result.case.strategy)),
        ("llmgpu.batch_size", str(result.case.batch_size)),
        ("llmgpu.model", one_line(result.case.model)),
        ("llmgpu.launches", str(len(result.launches))),
    ]
    for metric, figure in figures(result).items():
        unit = figure.unit.replace("/", "_per_")
        # A rate's unit says it all: `sequences_per_s`.
        name = unit if unit.startswith(metric) or metric == "accuracy" else f"{metric}_{unit}"
        pairs.append((f"llmgpu.{name}", repr(figure.value)))
    if result.failure is not None:
        pairs.append(("llmgpu.failure", one_line(result.failure.message)))
    pairs += [
        (f"llmgpu.finding.{one_line(one.code)}", one_line(one.text))
        for one in result.findings
        if one.severity != "info"
    ]
    return pairs


def verdict_properties(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return name and value of what a gate said of a test: `("llmgpu.verdict.time", "REGRESSED: ...")`.

    Where the rows are of several cases the value begins with the case's id.
    """
    several = len({row.id for row in rows}) > 1
    return [
        (f"llmgpu.verdict.{row.metric}", one_line(f"{f'{row.id}: ' * several}{row.verdict}: {row.reason}"))
        for row in rows
    ]
