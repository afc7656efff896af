"""A case as properties of its test in JUnit XML, to append to `item.user_properties`."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmgpu.render.exports.escaping import one_line
from pytest_llmgpu.render.exports.figures import figures
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row


def properties(result: CaseResult) -> list[tuple[str, str]]:
    """Return names and values of a case's outcome and figures: `("llmgpu.time_s", "60.0")`.

    The name of a figure ends in its unit. No name contains text that users write.
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
        # The unit of a rate is its name: `sequences_per_s`.
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
    """Return names and values of the verdicts on a test: `("llmgpu.verdict.time", "REGRESSED: ...")`.

    If the rows belong to several cases, the value begins with the id of the case.
    """
    several = len({row.id for row in rows}) > 1
    return [
        (f"llmgpu.verdict.{row.metric}", one_line(f"{f'{row.id}: ' if several else ''}{row.verdict}: {row.reason}"))
        for row in rows
    ]
