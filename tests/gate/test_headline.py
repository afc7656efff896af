"""The result of the gate in one sentence, and the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import pytest
from support.prose import Prose
from support.verdict_factory import make_row, make_verdicts

from pytest_llmgpu.gate.headline import headline, next_steps, row_in_words, step_of
from pytest_llmgpu.gate.judge import ExitStatus
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.times import MEASURE_HERE
from pytest_llmgpu.report.metrics import MetricName, spec_of
from pytest_llmgpu.report.verdicts import (
    DIFFERS,
    NEITHER,
    ONLY_CANDIDATE,
    Baseline,
    CallsChange,
    Candidate,
    Cause,
    Row,
    SessionState,
    Verdicts,
)

_CLONE = CallsChange(name="aten::clone", module="layers.*.mlp", per_layer=1, before=0, after=32)
_COPY = CallsChange(name="Memcpy DtoD (Device -> Device)", module="layers.*.mlp", before=0, after=32)
_CAUSE = Cause(place="program", ops=[_CLONE], kernels=[_COPY], price=0.005)
_SYNCS = Cause(place="program", runtime_calls=[CallsChange(name="host synchronizations", before=4, after=6)])


def _row(verdict: Any, metric: MetricName = "time", name: str = "tp-bs8", **fields: Any) -> Row:
    return make_row(verdict, metric, name, **{"base": 0.0646, "head": 0.0646, "ratio": 1.0, "n": 1, **fields})


def _slower(name: str = "tp-bs8", ratio: float = 1.041, **fields: Any) -> Row:
    return _row("REGRESSED", "time", name, ratio=ratio, head=0.0646 * ratio, **fields)


def _verdicts(*rows: Row, states: Sequence[SessionState] = (), **fields: Any) -> Verdicts:
    head = Candidate(created="2026-01-02T03:04:05Z", commit="b" * 40, command="pytest b.py", states=list(states))
    not_compared = {} if any(row.compared for row in rows) else {"time: why": 2}
    plain = {"head": head, "baseline": Baseline(name="base.json", commit="a" * 40), "not_compared": not_compared}
    return make_verdicts(*rows, **{**plain, **fields})


def _headline(*rows: Row, policy: Policy | None = None, **fields: Any) -> str:
    return headline(_verdicts(*rows, **fields), policy or Policy()).text


@pytest.mark.parametrize(
    ("rows", "status", "word"),
    [
        ([_row("OK", smallest_seen=0.02)], ExitStatus.PASSED, "PASSED: 1 case"),
        ([_slower()], ExitStatus.REGRESSED, "REGRESSED: tp-bs8 wall time +4.1 %"),
        ([_row("REGRESSED", "outcome", ratio=None)], ExitStatus.REGRESSED, "REGRESSED: tp-bs8: "),
        ([_slower(), _row("REGRESSED", "outcome", "mp-bs1", base=None)], ExitStatus.REGRESSED, "REGRESSED: mp-bs1: "),
        ([_slower(), _row("REGRESSED", "accuracy", ratio=None)], ExitStatus.REGRESSED, "REGRESSED: tp-bs8 accuracy"),
        ([_row("MISSING", "outcome")], ExitStatus.REGRESSED, "MISSING: tp-bs8: "),
        ([_row("UNDECIDED", unseen=True, smallest_seen=1.3)], ExitStatus.NOT_JUDGED, "UNDECIDED: tp"),
        ([_row("UNDECIDED", "outcome")], ExitStatus.NOT_JUDGED, "UNDECIDED: tp-bs8"),
        ([_row("NOT_COMPARABLE", "outcome")], ExitStatus.NOT_JUDGED, "NOT COMPARABLE: tp-bs8: "),
        (
            [_row("MISSING", "outcome", "mp"), _row("NOT_COMPARABLE", "outcome")],
            ExitStatus.NOT_JUDGED,
            "NOT COMPARABLE",
        ),
        ([_row("MISSING", "outcome", "mp"), _row("NOT_COMPARABLE"), _row("OK")], ExitStatus.REGRESSED, "MISSING: mp: "),
        ([_row("NEW", "outcome")], ExitStatus.NOT_JUDGED, "NOTHING COMPARED: 2 x time: why"),
    ],
)
def test_the_first_word_is_that_of_the_exit_status(
    rows: list[Row], status: ExitStatus, word: str, prose: Prose
) -> None:
    """Failed and missing cases are named as such."""
    found = headline(_verdicts(*rows), Policy())
    assert found.status is status
    assert found.text.startswith(word)
    assert prose == found.text


def test_the_worst_change_comes_first_with_its_cause(prose: Prose) -> None:
    """The other cases are counted; another row of the same case is not another case."""
    rows = [_slower("tp-bs1", 1.02), _slower(cause=_CAUSE), _row("REGRESSED", "memory", ratio=1.03)]
    assert prose == _headline(*rows)


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        ([_slower("mp-bs1", 1.2), _slower("mp-bs1", 1.1)], "wall time +20.0 % (0.07752 s, was 0.0646 s)"),
        (
            [
                _slower("mp-bs1", 1.2),
                *(_row("REGRESSED", "accuracy", f"mp-bs{size}", base=0.8, head=0.7) for size in (1, 2, 4)),
            ],
            "; 2 more cases REGRESSED",
        ),
    ],
)
def test_rows_of_several_cases_are_counted_as_cases(rows: list[Row], more: str) -> None:
    """Another row of the worst case is no other case."""
    assert _headline(*rows).endswith(more)


def test_a_gate_that_passes_states_what_it_would_have_seen(prose: Prose) -> None:
    """The worst promise is named with its case; undecided rows are a number, and a changed program comes first."""
    rows = [
        _row("OK", "time", "a", smallest_seen=0.09),
        _row("OK", "time", "c", smallest_seen=0.02),
        _row("UNDECIDED", "time", "b", smallest_seen=1.3),
    ]
    for clock in (None, 0.96, 1.005):
        rows.append(_row("OK", "device_time", "a", smallest_seen=0.018, clock_ratio=clock))
        assert prose == _headline(*rows)
    assert prose == _headline(*rows, _row("CHANGED", "program", "a", cause=_CAUSE))
    first = _headline(_row("NEW", "outcome"), policy=Policy(allow_no_baseline=True), baseline=None)
    assert first == "PASSED: there is no baseline to compare with"


def test_a_changed_program_is_named_with_its_price() -> None:
    """Where that is below the threshold the reason has what grew, unless the cause is the same number."""
    figures: dict[str, Any] = {"threshold": 0.002, "reason": "2 waits more, threshold 0."}
    for cause, ratio, text in ((_CAUSE, 1.005, "+0.5 % device time: 1"), (_CAUSE, 1.001, "2 waits more: 1")):
        found = _headline(_row("REGRESSED", "program", cause=cause, ratio=ratio, **figures))
        assert found.startswith(f"REGRESSED: tp-bs8 {text} more aten::clone")
    found = _headline(_row("REGRESSED", "program", cause=_SYNCS, ratio=None, **figures))
    assert found == "REGRESSED: tp-bs8 program: 2 more host synchronizations"


@pytest.mark.parametrize(
    ("smallest_seen", "words"),
    [(121.97, "not even a slowdown by a factor of 10 would"), (9.99, "only slowdowns from 999 % would")],
)
def test_a_slowdown_that_would_have_been_seen_is_no_absurd_number(smallest_seen: float, words: str) -> None:
    """From 1,000 % on, the headline states what would not have been seen."""
    text = _headline(_row("UNDECIDED", unseen=True, smallest_seen=smallest_seen))
    assert text == f"UNDECIDED: tp-bs8 wall time: {words} have been seen, allowed is 50 %"


@pytest.mark.parametrize("state", get_args(SessionState))
def test_a_doubtful_candidate_is_named(state: SessionState, prose: Prose) -> None:
    """Failed tests are named only where the gate passes: its own items fail as tests."""
    text = _headline(_row("OK", smallest_seen=0.02), states=(state,))
    assert "; the candidate " in text
    assert prose == text
    assert ("; the candidate " in _headline(_slower(), states=(state,))) is (state != "failed")


def test_points_and_reasons_are_in_words() -> None:
    """Accuracy changes by points; a row without figures has its reason."""
    accuracy = _row("REGRESSED", "accuracy", base=0.75, head=0.73, ratio=None)
    assert row_in_words(accuracy) == "tp-bs8 accuracy -2.00 pt (73.00 %, was 75.00 %)"
    path = _row("REGRESSED", "path", base=None, head=None, ratio=None, reason="Now PCIe, was NVLink.\nAlso: x")
    assert row_in_words(path) == "tp-bs8 path: Now PCIe, was NVLink"


@pytest.mark.parametrize(
    ("rows", "fields", "words"),
    [
        ([_row("OK")], {}, ""),
        ([_slower()], {}, "llmgpu bisect aaaaaaaa bbbbbbbb --metric time --case tp-bs8 -- pytest b.py"),
        ([_slower(trace="traces/tp-bs8.json.gz")], {}, " Its trace opens in ui.perfetto.dev: traces/tp-bs8.json.gz"),
        ([_slower()], {"states": ["dirty"]}, spec_of("time").next_step),
        ([_slower()], {"warnings": [f"{DIFFERS}torch 2.10.0 -> 2.11.0"]}, "in the environment of the baseline"),
        ([_slower(next_step="Look for a mask.")], {}, "Look for a mask."),
        ([_row("UNDECIDED", name=f"mp-bs{n}", launches_needed=n) for n in (3, 5, None)], {}, "--llmgpu-launches=5 "),
        ([_row("UNDECIDED")], {}, "`llmgpu ab aaaaaaaa bbbbbbbb -- pytest b.py` "),
        ([_row("UNDECIDED")], {"in_turn": True}, "quieter machine"),
        ([_row("UNDECIDED", "outcome", base=None)], {}, "Measure again."),
        ([_row("UNDECIDED", next_step="Cool the GPUs.")], {}, "Cool the GPUs."),
    ],
    ids=[
        "none",
        "worse",
        "traced",
        "dirty",
        "environment",
        "own step",
        "launches",
        "too many",
        "in turn",
        "interrupted",
        "disturbed",
    ],
)
def test_the_next_step_is_one_line(rows: list[Row], fields: dict[str, Any], words: str, prose: Prose) -> None:
    """The commit of a regression is looked for where that helps; undecided rows get the launches that decide most."""
    step = next_steps(_verdicts(*rows, **fields), Policy())
    assert words in step
    assert prose == step


def test_answers_that_changed_with_the_program_have_its_cause() -> None:
    """Of the same case; where no item was lost, the next step is no list of items."""
    relu, gelu = (
        CallsChange(name=f"aten::{name}", module="layers.*.mlp", per_layer=1, before=before, after=32 - before)
        for name, before in (("relu", 0), ("gelu", 32))
    )
    wrong = _row("REGRESSED", "accuracy", reason="Log-likelihoods differ.", lost=[], won=[])
    changed = _row("CHANGED", "program", cause=Cause(place="program", ops=[relu, gelu]))
    cause = "; program changed: 1 more aten::relu in place of aten::gelu in each layers.*.mlp"
    assert cause in _headline(wrong, changed)
    assert "program" not in _headline(wrong, _row("CHANGED", "program", "mp-bs1", cause=_CAUSE))
    assert "program" not in _headline(wrong, _row("OK", "program"))
    assert "`lost`" not in step_of(wrong)
    assert "`lost`" in step_of(_row("REGRESSED", "accuracy", lost=[3], won=[]))


def test_nothing_compared_has_a_next_step() -> None:
    """A first report becomes the baseline; one that has no case of the present baseline does not replace it."""
    step = next_steps(_verdicts(_row("NEW"), baseline=None), Policy())
    assert "`llmgpu promote REPORT --to FILE`" in step
    assert next_steps(_verdicts(_row("NEW")), Policy()) == "Next: Measure a case that the baseline has."


@pytest.mark.parametrize("strict", [False, True])
def test_an_undecided_slowdown_is_named_once(strict: bool) -> None:
    """It is the worst row where the policy fails on it, and an addition where the gate passes."""
    row = _row("UNDECIDED", ratio=1.3, low=1.1, head=0.084)
    assert _headline(row, policy=Policy(strict=strict)).count("tp-bs8 wall time +30.0 %") == 1


@pytest.mark.parametrize(("reason", "lacking"), [(NEITHER, "both reports"), (ONLY_CANDIDATE, "the baseline")])
def test_device_time_is_measured_where_a_report_lacks_it(reason: str, lacking: str) -> None:
    """It needs one launch where wall time needs many; a row that is decided needs none."""
    not_compared = {f"device_time: {reason}": 1}
    for row, given, is_advised in (
        (_row("UNDECIDED"), {}, False),
        (_row("UNDECIDED"), not_compared, True),
        (_row("UNDECIDED", "memory"), not_compared, False),
    ):
        steps = next_steps(_verdicts(row, not_compared=given), Policy())
        assert (f"Measure {lacking} with --llmgpu-work=on: " in steps) is is_advised


@pytest.mark.parametrize(
    ("smallest_seen", "clock_ratio", "is_promised"), [(0.011, 1.0, True), (0.038, 1.0, False), (0.011, None, False)]
)
def test_a_slower_kernel_is_promised_where_it_would_be_found(
    smallest_seen: float, clock_ratio: float | None, is_promised: bool
) -> None:
    """Not of other GPUs, of a GPU that idled for another part of the passes, or without a clock."""
    row = _row("OK", "device_time", smallest_seen=smallest_seen, clock_ratio=clock_ratio)
    assert ("(tp-bs8, from 0.5 % in one kernel)" in _headline(row)) is is_promised


def test_a_gate_that_compared_no_gated_time_states_it() -> None:
    """It would have seen no slowdown at all; a time that is not gated does not count."""
    silent = "no gated time was compared"
    assert silent in _headline(_row("OK", "memory"), _row("OK", smallest_seen=0.02, gated=False))
    assert silent not in _headline(_row("OK", smallest_seen=0.02))
    loud = _headline(_row("OK", smallest_seen=3.0))
    assert "slowdowns from 300 % of wall time (tp-bs8) would have been seen" in loud
    assert silent not in _headline(_row("UNDECIDED", smallest_seen=0.6))


def test_a_pass_on_a_busy_host_has_the_reason_of_its_undecided_rows() -> None:
    """Wall time was not compared."""
    device, busy = (
        _row("OK", "device_time", smallest_seen=0.01),
        "The launches were disturbed: CPU cores too busy: rank 0.",
    )
    assert _headline(device, _row("UNDECIDED", reason=busy)).endswith("1 row undecided (CPU cores too busy)")
    assert _headline(device, _row("UNDECIDED")).endswith("1 row undecided")


def test_what_would_have_been_seen_against_other_gpus_has_its_reason() -> None:
    """GPUs of one kind differ, so that a pass promises less there."""
    reason = "; against other GPUs slowdowns from 99 % of wall time"
    assert reason in _headline(_row("OK", smallest_seen=0.99, next_step=MEASURE_HERE))
    assert reason not in _headline(_row("OK", smallest_seen=0.02))
