"""The execution of the forwards: recorded CUDA graphs or eager. It decides what else can be compared."""

from __future__ import annotations

from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row

_EAGER = "eager"

_NAMES = {"cuda_graphs": "as CUDA graphs", _EAGER: "eagerly", "compile": "compiled"}


def execution_row(base: CaseResult, head: CaseResult, *, gated: bool) -> Row | None:
    """Judge the execution: eager forwards are slower than recorded ones.

    Returns:
        REGRESSED where only the candidate ran eagerly, IMPROVED where only the baseline did; None where the execution
        did not change to or from eager, or where the users asked for different executions.
    """
    was, now = base.case.execution, head.case.execution
    if was == now or _EAGER not in {was, now} or base.case.cuda_graphs != head.case.cuda_graphs:
        return None
    reason = f"The forwards ran {_NAMES.get(now, now)}, the baseline's {_NAMES.get(was, was)}."
    choice = next((launch.execution_choice for launch in head.launches if launch.execution_choice), None)
    return Row.of(
        head,
        "execution",
        "REGRESSED" if now == _EAGER else "IMPROVED",
        reason + (f"\n{choice}" if choice is not None else ""),
        gated=gated,
    )


def other_execution(base: CaseResult, head: CaseResult) -> str | None:
    """Return a sentence if one result ran its forwards as CUDA graphs and the other eagerly; else None."""
    was, now = base.case.execution, head.case.execution
    if was == now:
        return None
    return (
        f"The forwards ran {_NAMES.get(now, now)}, the baseline's {_NAMES.get(was, was)}: measure both with "
        "--llmgpu-cuda-graphs=on or off."
    )
