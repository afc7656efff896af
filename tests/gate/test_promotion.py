from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import GIB, make_memory, make_traffic, make_work
from support.verdict_factory import make_invalid, noise, on_h200, timed

from pytest_llmgpu.gate import promotion
from pytest_llmgpu.gate.judge import ExitStatus, exit_status, judge
from pytest_llmgpu.gate.policy import Allowed, AmountRule, ExactRule, Policy
from pytest_llmgpu.report.file import encode, parse
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import MIB
from pytest_llmgpu.report.verdicts import Row, Verdicts

_POLICY = msgspec.structs.replace(Policy(), device_time=AmountRule(threshold=0.01), traffic=AmountRule(threshold=0.001))


def _report(
    number: int = 0,
    *,
    mib: float = 0.0,
    slower: float = 0.0,
    wire: float = 0.0,
    ghz: float | None = 1.7,
    gpu: str = "GPU-",
    batches: Sequence[int] = (0, 2),
    execution: str = "eager",
    ahead: bool = False,
) -> Report:
    """Return the report of a day: its one case needs so many MiB more, and other amounts more by these fractions."""
    result = timed(execution=execution)
    work = make_work(batches=list(batches))
    ranks = [
        msgspec.structs.replace(
            rank,
            uuids=[f"{gpu}{index}"],
            device_time_s=[0.5 * (1 + slower)] * 3,
            clock_ghz=None if ghz is None else [[ghz] * 3],
            launched_ahead=ahead,
        )
        for index, rank in enumerate(work.ranks)
    ]
    result.launches[0].work = msgspec.structs.replace(work, ranks=ranks)
    result.launches[0].memory = make_memory(1, peak=10 * GIB + mib * MIB)
    result.traffic = make_traffic(wire_bytes_per_sequence=1e6 * (1 + wire))
    return on_h200([result], f"{number:08x}" * 5, created=f"2026-10-{1 + number % 28:02}T03:04:05Z")


def _judged(base: Report, head: Report, policy: Policy = _POLICY) -> Verdicts:
    with noise():
        return judge(base, head, policy, today=datetime.date(2026, 11, 1))


def _chain(reports: Sequence[Report], policy: Policy = _POLICY) -> Report:
    """Return the last report with the baselines before it, as if each was promoted without force."""
    base, *later = reports
    for head in later:
        promotions = promotion.promotions(base, head, _judged(base, head, policy), policy)
        base = msgspec.structs.replace(head, promotions=promotions)
    return base


def _row(base: Report, head: Report, policy: Policy = _POLICY) -> Row | None:
    return next((row for row in _judged(base, head, policy).rows if row.metric == "creep"), None)


def _steps(promotions: int, **step: float) -> list[Report]:
    """Return a report, and then one for each promotion, that need so much more each time; times multiply."""
    totals: list[dict[str, Any]] = [
        {name: (1 + by) ** number - 1 if name == "slower" else by * number for name, by in step.items()}
        for number in range(promotions + 1)
    ]
    return [_report(number, **total) for number, total in enumerate(totals)]


@pytest.mark.parametrize(
    ("step", "steps", "metric"),
    [
        ({"mib": 60}, 3, "Memory"),
        ({"slower": 0.004}, 5, "Device time"),
        ({"wire": 0.0009}, 3, "Traffic"),
        ({"mib": 60, "slower": 0.009}, 3, "Memory"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_small_steps_are_one_regression(step: dict[str, float], steps: int, metric: str, prose: Prose) -> None:
    """No step exceeds its threshold; their sum exceeds twice the threshold at the last one, and not before."""
    reports = _steps(steps, **step)
    for number in range(1, steps + 1):
        base = _chain(reports[:number])
        verdicts = _judged(base, reports[number])
        worse = [row for row in verdicts.rows if row.worse]
        assert [row.metric for row in worse] == ["creep"] * (number == steps)
        assert exit_status(verdicts, _POLICY) == (ExitStatus.REGRESSED if worse else ExitStatus.PASSED)
    assert worse[0].verdict == "REGRESSED"
    assert worse[0].reason.startswith(metric)
    assert (worse[0].ratio or 0) - 1 > (worse[0].threshold or 1)
    assert prose == worse[0].reason


@pytest.mark.parametrize(
    ("first", "last", "stated"),
    [
        ({}, {}, True),
        ({"ghz": 1.705}, {}, True),
        ({"ghz": 1.72}, {}, False),
        ({"ghz": 1.68}, {}, False),
        ({"ghz": None}, {}, False),
        ({}, {"ghz": None}, False),
        ({"gpu": "GPU-other-"}, {}, False),
        ({"batches": [0, 1]}, {}, False),
        ({"ahead": True}, {}, False),
        ({"execution": "cuda_graphs"}, {}, False),
    ],
)
def test_times_are_compared_under_equal_conditions(first: dict[str, Any], last: dict[str, Any], stated: bool) -> None:
    """Those are the GPUs, their clock within 0.5 %, the batches and the execution; the report between has others."""
    base = _chain([_report(0, **first), _report(1, slower=0.015, gpu="GPU-between-")])
    assert (_row(base, _report(2, slower=0.024, **last)) is not None) == stated


@pytest.mark.parametrize(
    ("first", "stated"),
    [({"ghz": None, "gpu": "GPU-other-", "batches": [0, 1]}, True), ({"execution": "cuda_graphs"}, False)],
)
def test_memory_depends_on_the_execution_alone(first: dict[str, Any], stated: bool) -> None:
    """Recorded graphs need memory of their own."""
    base = _chain([_report(0, **first), _report(1, mib=60), _report(2, mib=120)])
    assert (_row(base, _report(3, mib=130)) is not None) == stated


def test_a_metric_that_regressed_has_one_row() -> None:
    """The growth since the baseline is stated, and not the one since the baseline before."""
    base = _chain([_report(0), _report(1, mib=60)])
    verdicts = _judged(base, _report(2, mib=600, wire=0.0001))
    assert [row.metric for row in verdicts.rows if row.worse] == ["memory"]


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        ({"creep": ExactRule(gate=False)}, "CHANGED"),
        ({"memory": msgspec.structs.replace(_POLICY.memory, gate=False)}, None),
        ({"memory": msgspec.structs.replace(_POLICY.memory, absolute_bytes=100 * MIB)}, None),
    ],
)
def test_the_policy_decides(policy: dict[str, Any], verdict: str | None) -> None:
    """A growth is shown only, or has another threshold; a metric that is not gated is not followed."""
    *before, last = _steps(3, mib=60)
    changed = msgspec.structs.replace(_POLICY, **policy)
    row = _row(_chain(before, changed), last, changed)
    assert (None if row is None else row.verdict) == verdict


@pytest.mark.parametrize(
    ("metric", "reports"),
    [
        ("creep", _steps(3, mib=60, wire=0.0005)),
        ("memory", [_report(0), _report(1, mib=120, wire=0.001)]),
        (None, [_report(0, mib=600), _report(1, wire=0.001)]),
    ],
    ids=["creep allowed", "memory allowed", "memory improved"],
)
def test_a_growth_is_measured_from_the_last_one_that_was_accepted(metric: str | None, reports: list[Report]) -> None:
    """It blocks once. Figures of the case that did not grow then are kept: their growth goes on."""
    allow = [] if metric is None else [Allowed(case="mp-*", metric=metric, reason="wanted")]
    base = _chain(reports, msgspec.structs.replace(_POLICY, allow=allow))
    (case,) = base.promotions[0].cases.values()
    assert ("memory" in case.figures, "traffic" in case.figures) == (False, True)
    now = (base.cases[0].launches[0].memory[0].peak_bytes or 0) / MIB - 10 * 1024
    later = [_report(number, mib=now + 60 * (number - 20), wire=0.0016) for number in (21, 22, 23)]
    assert _row(_chain([base, *later[:1]]), later[1]) is None
    assert _row(_chain([base, *later[:2]]), later[2]) is not None


@pytest.mark.parametrize(
    ("disturbance", "ahead", "kept"),
    [("CPU cores too busy: rank 0", True, True), ("CPU cores too busy: rank 0", False, False), ("Xid", True, False)],
)
def test_a_device_time_that_is_not_judged_is_no_reference(disturbance: str, ahead: bool, kept: bool) -> None:
    """It is not what creeps; the memory of a launch on a busy host is."""
    reports = [_report(number, ahead=ahead) for number in range(2)]
    make_invalid(reports[0].cases[0].launches[0], disturbance)
    (promoted,) = _chain(reports).promotions
    (case,) = promoted.cases.values()
    assert ("device_time" in case.figures, "memory" in case.figures) == (kept, True)


def test_a_launch_without_a_clock_is_no_reference_where_others_have_one() -> None:
    """Else no baseline after it would have a clock at which times can be compared."""
    reports = [_report(number) for number in range(2)]
    late = _report(ghz=None, slower=0.5).cases[0].launches[0]
    reports[0].cases[0].launches.append(late)
    (promoted,) = _chain(reports).promotions
    (case,) = promoted.cases.values()
    assert case.clock_ghz == pytest.approx(1.7)
    assert case.figures["device_time"] == pytest.approx(0.5, rel=0.01)


def test_the_last_fifty_baselines_are_kept() -> None:
    """A growth since an earlier one is no longer stated."""
    base = _chain([_report(number, mib=200 if number < 2 else 100) for number in range(2)])
    base = _chain([base, *(_report(number, mib=200) for number in range(2, 53))])
    assert [one.commit for one in base.promotions] == [f"{number:08x}" * 5 for number in range(2, 52)]


def test_a_report_without_the_field_is_read() -> None:
    """It has no earlier baselines, and nothing crept. A report with them is the same after a round trip."""
    base = _chain(_steps(2, mib=60))
    data = encode(base, compressed=False)
    assert parse(data, "x.json") == base
    fields = msgspec.json.decode(data)
    del fields["promotions"]
    old = parse(msgspec.json.encode(fields), "x.json")
    assert old.promotions == []
    assert _row(old, _report(3, mib=180)) is None
