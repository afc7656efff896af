"""The verdicts of a comparison by cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.prose import Prose
from support.verdict_factory import make_row, make_verdicts

from pytest_llmgpu.gate.headline import row_in_words
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.render.summary import Group, by_cause, by_reason
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.verdicts import DIFFERS, Cause, Row, SlowerKernel, Verdict


def _row(
    name: str, verdict: Verdict = "REGRESSED", metric: MetricName = "time", ratio: float | None = 1.1, **fields: Any
) -> Row:
    numbers = {} if ratio is None else {"base": 1.0, "head": ratio, "ratio": ratio, "low": ratio - 0.01}
    return make_row(verdict, metric, name, **{"reason": f"{metric} is another.", **numbers, **fields})


def _cause(module: str) -> Cause:
    kernel = SlowerKernel(name="nvjet", family="GEMM", module=module, growth=0.2, excess=0.1, error=0.001)
    return Cause(place="kernel", kernel=kernel)


def _groups(*rows: Row, differences: Sequence[str] = ()) -> list[Group]:
    warnings = [f"{DIFFERS}{text}" for text in differences]
    return by_cause(make_verdicts(*rows, warnings=warnings), Policy())


_DOWN, _NORM = _cause("mlp.down_proj"), _cause("norm")
_IOK = [f"iok-bs{size}" for size in (1, 8)]


@pytest.mark.parametrize(
    ("rows", "differences", "groups"),
    [
        (
            [
                _row("tp-bs1", metric="device_time", cause=_DOWN),
                _row("tp-bs8", cause=_DOWN, ratio=1.2),
                _row("mp-bs1", cause=_NORM),
            ],
            ["torch 2.10 -> 2.11"],
            [{"tp-bs1 device_time", "tp-bs8 time"}, {"mp-bs1 time"}],
        ),
        (
            [
                _row("tp-bs2", ratio=1.6),
                *(_row(name, "NEW", "outcome", ratio=None) for name in _IOK),
                *(_row(name, metric="accuracy", ratio=None, reason=f"{name} differs") for name in _IOK),
            ],
            ["deepspeed 1 -> 2"],
            [{"tp-bs2 time"}, {"iok-bs1 accuracy", "iok-bs8 accuracy"}],
        ),
        (
            [_row("tp-bs1"), _row("tp-bs8"), _row("tp-bs8", metric="traffic"), _row("mp-bs1", "MISSING", "outcome")],
            [],
            [{"tp-bs1 time", "tp-bs8 time", "tp-bs8 traffic"}, {"mp-bs1 outcome"}],
        ),
        ([_row("tp-bs1", "OK", ratio=0.9), _row("tp-bs2", "NEW", "outcome")], [], []),
    ],
    ids=["modules", "no baseline", "same cases", "unchanged"],
)
def test_rows_of_one_cause_are_a_group(rows: list[Row], differences: list[str], groups: list[set[str]]) -> None:
    """A module over cases and metrics, other software except for a case without a baseline, or the same cases."""
    found = _groups(*rows, differences=differences)
    assert [{f"{row.id} {row.metric}" for row in one.rows} for one in found] == groups


def test_a_difference_of_the_environment_is_the_cause_of_what_became_worse(prose: Prose) -> None:
    """A row that cannot be compared for that reason belongs to it; one that is not decided does not."""
    rows = [
        _row("tp-bs2", ratio=1.6),
        _row("mp-bs1", "UNDECIDED", ratio=1.01, low=0.6),
        _row("tp-bs4", metric="execution", ratio=None),
        _row("tp-bs4", "NOT_COMPARABLE", ratio=None),
    ]
    found = _groups(*rows, differences=["NCCL_P2P_DISABLE unset -> 1"])
    assert [{row.id for row in one.rows} for one in found] == [{"tp-bs2", "tp-bs4"}, {"mp-bs1"}]
    assert [one.fails for one in found] == [True, False]
    assert prose == "\n".join([row_in_words(found[0].rows[0]), *found[0].lines, found[0].next_step])


def test_the_calls_of_one_case_name_it_in_the_reason_of_several() -> None:
    """Rows whose reasons differ in numbers have one reason, with the calls of the worst: it has the id of its case."""
    rows = [_row(name, reason=f"x.\nCalls of {name}: aten::mm 2 -> 4.") for name in ("mp-bs1", "tp-bs8", "iok-bs1")]
    (found,) = by_reason(rows)
    assert found == rows


def test_the_next_step_counts_all_undecided_rows_of_a_cause() -> None:
    """The largest number of launches decides all of them."""
    (found,) = _groups(*(_row(f"mp-bs{size}", "UNDECIDED", launches_needed=size + 3) for size in (1, 4)))
    assert found.next_step == "--llmgpu-launches=7 in both reports decides 2 of 2 undecided rows."


def test_a_known_regression_is_no_part_of_another_cause() -> None:
    """Its reason is one of its lines, and it does not fail."""
    found = _groups(_row("tp-bs1"), _row("tp-bs1", metric="memory", allowed="bug 7"))
    assert [(one.fails, one.rows[0].allowed) for one in found] == [(True, None), (False, "bug 7")]
    assert "Allowed: bug 7" in found[1].lines


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    """The largest change comes first; numbers within names are part of the reason."""
    rows = [
        _row("a", reason="It takes 1.0 s."),
        _row("b", ratio=1.3, reason="It takes 1.3 s."),
        _row("c", reason="float16"),
    ]
    assert [[row.id for row in found] for found in by_reason(rows)] == [["b", "a"], ["c"]]
