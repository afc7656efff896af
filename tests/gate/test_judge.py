from __future__ import annotations

import datetime
import gc
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.quiet_noise import noise
from support.report_factory import make_answers, make_failed, make_memory, make_report, make_work
from support.verdict_factory import make_invalid, make_traffic, with_launches

from pytest_llmgpu.gate.judge import RowClass, classify, exit_status, fails, judge, with_unseen
from pytest_llmgpu.gate.policy import Allowed, Policy, TimeRule, dump_policy, sha256_of
from pytest_llmgpu.gate.times import DAY_SD
from pytest_llmgpu.report.case import GENERATE
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.report import Commit, Report, Resumption, Session
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Failure
from pytest_llmgpu.report.verdicts import SEVERITY, Baseline, Row, Verdict, Verdicts, worst_first

TODAY = datetime.date(2026, 6, 1)


def _full(
    slower: float = 1.0, *, wrong: Sequence[int] = (), calls: int = 64, peak: float = 2**34, **fields: Any
) -> CaseResult:
    """Return a completed result that has every metric."""
    answers = make_answers([number not in wrong for number in range(100)])
    result = with_launches([slower], accuracy=answers, memory=make_memory(peak=peak), **fields)
    result.launches[0].work = make_work()
    result.traffic = make_traffic(calls, link="nvlink")
    result.nodeid = f"benchmarks/test_a.py::test_b[{result.id}]"
    return result


def _judge(
    base: Sequence[CaseResult] | None, head: Sequence[CaseResult], policy: Policy | None = None, *, s0: float = 0.001
) -> Verdicts:
    return _judge_reports(None if base is None else make_report(base), make_report(head), policy, s0=s0)


def _judge_reports(base: Report | None, head: Report, policy: Policy | None = None, *, s0: float = 0.001) -> Verdicts:
    with noise(s0):
        return judge(base, head, policy or Policy(), today=TODAY)


def _compared(verdicts: Verdicts) -> tuple[int, int]:
    """Return the numbers of rows that were compared, and of those that are gated."""
    compared = [row for row in verdicts.rows if row.compared]
    return len(compared), sum(row.gated for row in compared)


def _said(verdicts: Verdicts) -> dict[str, str]:
    """Return each metric's verdict, where one case was judged."""
    return {str(row.metric): str(row.result) for row in verdicts.rows}


def _failure(message: str) -> Failure:
    return Failure(phase="forward", rank=1, message=message)


def _allowed(case: str, metric: MetricName) -> Allowed:
    return Allowed(case=case, metric=metric, reason="bug 7", expires=TODAY)


def test_equal_reports_are_ok_in_every_metric() -> None:
    """Each metric was compared, and the exit status is 0."""
    found = _judge([_full()], [_full()])
    metrics = ("device_time", "time", "accuracy", "predictions", "flops", "host_syncs", "traffic", "path", "memory")
    assert _said(found) == dict.fromkeys(metrics, "OK")
    assert (_compared(found), found.not_compared) == ((9, 8), {})
    assert exit_status(found, Policy()) == 0


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        ({"slower": 1.05}, "time"),
        ({"wrong": range(20)}, "accuracy"),
        ({"calls": 65}, "traffic"),
        ({"peak": 2**34 + 2**30}, "memory"),
    ],
)
def test_each_loss_alone_fails_the_gate(change: dict[str, Any], metric: str) -> None:
    """5 % time, 20 items, one more collective, 1 GiB: REGRESSED in that metric only, exit 1; the way back improves."""
    found = _judge([_full()], [_full(**change)])
    gated = [row for row in found.rows if row.gated]
    assert {row.metric for row in gated if row.result == "REGRESSED"} == {metric}
    assert [row.metric for row in gated if fails(row, Policy())] == [metric]
    assert exit_status(found, Policy()) == 1
    back = _judge([_full(**change)], [_full()])
    assert _said(back)[metric] == "IMPROVED"
    assert exit_status(back, Policy()) == 0


@pytest.mark.parametrize(
    ("base", "head", "verdict", "status"),
    [
        ("completed", "oom", "REGRESSED", 1),
        ("completed", "skipped_after_oom", "REGRESSED", 1),
        ("oom", "completed", "IMPROVED", 0),
        ("skipped_after_oom", "completed", "IMPROVED", 0),
        ("oom", "skipped_after_oom", "OK", 0),
        ("completed", "crashed", "REGRESSED", 1),
        ("completed", "timeout", "REGRESSED", 1),
        ("oom", "error", "REGRESSED", 1),
        ("crashed", "crashed", "REGRESSED", 1),
        ("crashed", "completed", "NEW", 3),
        ("crashed", "oom", "NEW", 3),
        ("completed", "interrupted", "UNDECIDED", 3),
    ],
)
def test_outcome_before_numbers(base: Any, head: Any, verdict: str, status: int) -> None:
    """A case that changed its outcome has a verdict on that, whatever its numbers are, and none on them."""
    sides = [
        _full() if outcome == "completed" else make_failed(outcome, _failure("gone\nwrong")) for outcome in (base, head)
    ]
    found = _judge(sides[:1], sides[1:])
    row = found.rows[0]
    assert (row.metric, row.result) == ("outcome", verdict)
    assert {row.metric for row in found.rows} <= {"outcome", "largest_batch"}
    assert len(row.reason.splitlines()) <= 2
    assert exit_status(found, Policy()) == status


def test_a_lost_batch_size_shows_in_its_series(prose: Prose) -> None:
    """The case by itself, and how far the series goes now."""
    sizes = [_full(batch_size=size) for size in (1, 2)]
    found = _judge(sizes, [sizes[0], make_failed(batch_size=2)])
    series = found.rows[-1]
    assert (series.metric, series.verdict) == ("largest_batch", "REGRESSED")
    assert prose == series.reason


def test_a_case_that_is_gone_is_missing() -> None:
    """Unless somebody deselected it, or the policy allows it; also if the run was interrupted."""
    base, again = [_full(), _full(strategy="tp")], [_full()]
    found = _judge(base, again)
    assert (found.rows[-1].id, found.rows[-1].verdict) == ("tp-bs1", "MISSING")
    assert exit_status(found, Policy()) == 1
    removed = Policy(allow=[Allowed(case="tp-*", metric="outcome", reason="tp was removed")])
    assert exit_status(_judge(base, again, removed), removed) == 0
    head = make_report(again)
    head.session = Session(interrupted=True)
    assert "interrupted" in judge(make_report(base), head, Policy(), today=TODAY).rows[-1].reason
    head.session = Session(deselected=["benchmarks/test_a.py::test_other[mp-bs1]"])
    assert judge(make_report(base), head, Policy(), today=TODAY).rows[-1].verdict == "MISSING"
    head.session = Session(deselected=[base[1].nodeid or ""])
    left_out = _judge_reports(make_report(base), head)
    assert {row.id for row in left_out.rows} == {"mp-bs1", "mp"}
    assert left_out.not_compared == {"deselected in this run": 1}
    assert exit_status(left_out, Policy()) == 0


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        pytest.param({"device": "cpu"}, {"device": "cuda", "strategy": "tp"}, id="device"),
        pytest.param({}, {"workload": GENERATE, "new_tokens": 8, "strategy": "tp"}, id="workload"),
    ],
)
def test_reports_of_another_device_or_workload_are_not_comparable(
    was: dict[str, Any], is_now: dict[str, Any], prose: Prose
) -> None:
    """Cases that only the baseline has are not missing then; the reason is what to do."""
    base, head = [_full(**was)], [_full(**is_now)]
    found = _judge(base, head)
    assert {row.id: row.result for row in found.rows} == {base[0].id: "NOT_COMPARABLE", head[0].id: "NEW"}
    assert exit_status(found, Policy()) == 3
    assert prose == found.rows[-1].reason
    mixed = _judge([*base, *head], head)
    assert [row.result for row in mixed.rows if row.id == base[0].id] == ["MISSING"]


def test_a_run_that_was_narrowed_without_names_explains_what_is_gone() -> None:
    """As `--lf` and tests named on the command line do; not what is gone from a test that did run."""
    base = [_full(), _full(strategy="tp")]
    head = make_report([_full()])
    head.session = Session(deselected=["--lf: tests that passed last time"])
    found = _judge_reports(make_report(base), head)
    assert found.not_compared == {"left out: --lf: tests that passed last time": 1}
    assert exit_status(found, Policy()) == 0
    base[1].nodeid = base[0].nodeid
    found = _judge_reports(make_report(base), head)
    assert [row.result for row in found.rows if row.id == "tp-bs1"] == ["MISSING"]


def test_new_cases_pass_and_their_answers_are_checked() -> None:
    """A new case has nothing to lose, but may be wrong by itself."""
    new = _full(strategy="tp")
    found = _judge([_full()], [_full(), new])
    assert [row.result for row in found.rows if row.id == "tp-bs1"] == ["NEW"]
    assert exit_status(found, Policy()) == 0
    new.accuracy_check = AccuracyCheck(
        metric="acc_norm", value=0.2, baseline=0.8, source="x", tolerance=0.01, ok=False, text="60 points below"
    )
    assert exit_status(_judge([_full()], [_full(), new]), Policy()) == 1
    before = _full(strategy="tp")
    before.launches[0].accuracy = None
    wrong = _judge([before], [new])
    assert [row.reason for row in wrong.rows if row.metric == "accuracy"] == ["60 points below."]
    assert wrong.not_compared == {"accuracy: only the candidate has it": 1}


def test_without_a_baseline_nothing_is_green() -> None:
    """Exit status 3, unless the policy allows that; a crash still fails."""
    found = _judge(None, [_full()])
    assert _said(found) == {"outcome": "NEW"}
    assert (found.baseline, _compared(found)) == (None, (0, 0))
    assert exit_status(found, Policy()) == 3
    assert exit_status(found, Policy(allow_no_baseline=True)) == 0
    assert exit_status(_judge(None, [make_failed("crashed")]), Policy(allow_no_baseline=True)) == 1


def test_nothing_compared_is_not_green() -> None:
    """No cases, or metrics that are all reported only."""
    assert exit_status(_judge([], []), Policy()) == 3
    policy = msgspec.structs.replace(Policy(), time=TimeRule(gate=False))
    found = _judge([with_launches([1.0])], [with_launches([1.5])], policy)
    assert _said(found) == {"time": "CHANGED"}
    assert _compared(found) == (1, 0)
    assert found.not_compared == {
        "accuracy: no items were scored": 1,
        "device_time: neither report has it": 1,
        "flops: neither report has it": 1,
        "host_syncs: neither report has it": 1,
        "memory: neither report has it": 1,
        "traffic: neither report has it": 1,
    }
    assert exit_status(found, policy) == 3


def test_another_case_or_machine_is_not_comparable(prose: Prose) -> None:
    """Exit status 3, and the reason names the difference; a regression beside it wins."""
    found = _judge([_full()], [_full(dtype="bfloat16")])
    assert _said(found) == {"outcome": "NOT_COMPARABLE"}
    assert prose == found.rows[0].reason
    assert exit_status(found, Policy()) == 3
    base = make_report([_full()], gpus=4)
    moved = judge(base, make_report([_full(slower=2.0)], gpus=8), Policy(), today=TODAY)
    assert "GPUs 4 -> 8" in moved.rows[0].reason
    assert exit_status(moved, Policy()) == 3
    smaller = judge(base, make_report([make_failed()], gpus=8), Policy(), today=TODAY)
    assert _said(smaller) == {"outcome": "NOT_COMPARABLE"}
    assert (
        exit_status(_judge([_full()], [_full(dtype="bfloat16"), make_failed("crashed", strategy="tp")]), Policy()) == 1
    )


def test_not_enough_data_fails_where_the_policy_says_so() -> None:
    """Exit status 3. A case whose time was disturbed shows no slowdown and fails under every policy."""
    strict = Policy(strict=True)
    close = _judge([_full()], [_full(slower=1.02)], s0=0.02)
    assert _said(close)["time"] == "UNDECIDED"
    spoilt = _full()
    make_invalid(spoilt.launches[0], "a stranger's process")
    invalid = _judge([_full()], [spoilt])
    assert _said(invalid)["time"] == "UNDECIDED"
    assert _said(invalid)["accuracy"] == "OK"
    for found, status in ((close, 0), (invalid, 3)):
        assert (exit_status(found, Policy()), exit_status(found, strict)) == (status, 3)


def test_an_allowed_regression_passes_until_its_day(prose: Prose) -> None:
    """On the last day it still does; then it counts again. An entry that nothing needs is named."""
    sides = [_full()], [_full(slower=1.5)]
    allowed = Allowed(case="mp-bs1", metric="time", reason="bug 7", expires=TODAY)
    policy = Policy(allow=[allowed])
    found = _judge(*sides, policy)
    assert [row.allowed for row in found.rows if row.metric == "time"] == ["bug 7"]
    assert (exit_status(found, policy), found.warnings) == (0, [])
    expired = Policy(allow=[msgspec.structs.replace(allowed, expires=TODAY - datetime.timedelta(days=1))])
    found = _judge(*sides, expired)
    assert prose == "\n".join(found.warnings)
    assert exit_status(found, expired) == 1
    assert prose == "\n".join(_judge(sides[0], [_full()], policy).warnings)


def test_an_allowed_regression_that_noise_hides_is_allowed() -> None:
    """It does not fail a strict gate, and no warning asks to remove the entry."""
    policy = Policy(strict=True, allow=[_allowed("mp-bs1", "time"), _allowed("mp-bs1", "device_time")])
    found = _judge([_full()], [_full(slower=1.02)], policy, s0=0.02)
    assert [(row.result, row.allowed) for row in found.rows if row.metric == "time"] == [("UNDECIDED", "bug 7")]
    assert (exit_status(found, policy), found.warnings) == (0, [])


def test_an_allowed_regression_is_gone_only_where_it_was_looked_for(prose: Prose) -> None:
    """Not where its case was left out; a case that nobody has is a name that is misspelt."""
    base = [_full(), _full(batch_size=2)]
    again = _full()
    for result in (*base, again):
        result.nodeid = f"test_a.py::test_b[{result.id}]"
    head = make_report([again])
    head.session = Session(deselected=["test_a.py::test_b[mp-bs2]"])
    policy = Policy(allow=[_allowed("mp-bs2", "time"), _allowed("mp-bs3", "time"), _allowed("mp-bs1", "outcome")])
    assert prose == "\n".join(judge(make_report(base), head, policy, today=TODAY).warnings)


def test_the_run_of_the_baseline_is_no_candidate() -> None:
    """It has the launches of the baseline, so that every figure is equal: nothing was judged."""
    base = [_full(), _full(batch_size=2)]
    found = _judge(base, base)
    assert {(row.metric, row.verdict) for row in found.rows} == {("outcome", "UNDECIDED")}
    assert exit_status(found, Policy()) == 3
    assert exit_status(_judge(base, [base[0], _full(batch_size=2)]), Policy()) == 0


@pytest.mark.parametrize(
    ("named", "exit_code"), [(["mp"], 0), (["mp-bs1", "mp-bs2"], 0), (["mp-bs1"], 1), (["mp-bs4"], 1)]
)
def test_an_allowed_loss_of_accuracy_names_the_series_or_every_case_with_it(named: list[str], exit_code: int) -> None:
    """Batch sizes 1 and 2 lose items, and 4 does not. One row is about both."""
    sizes = (1, 2, 4)
    base = [_full(batch_size=size) for size in sizes]
    head = [_full(batch_size=size, wrong=range(30 if size < 4 else 0)) for size in sizes]
    policy = Policy(allow=[_allowed(case, "accuracy") for case in named])
    found = _judge(base, head, policy)
    (row,) = (row for row in found.rows if row.metric == "accuracy")
    assert (row.id, row.result, row.cases) == ("mp", "REGRESSED", ["mp-bs1", "mp-bs2"])
    assert (row.allowed, exit_status(found, policy)) == (None if exit_code else "bug 7", exit_code)


def test_series_of_one_strategy_have_different_names() -> None:
    """Two sets of items are two rows; an entry for the strategy concerns both, one with the name that one."""
    limits = (40, 80)
    base = [_full(limit=limit) for limit in limits]
    head = [_full(limit=limit, wrong=range(30)) for limit in limits]
    for case, accepted in (("mp", [True, True]), ("mp (limit=80)", [False, True])):
        found = _judge(base, head, Policy(allow=[_allowed(case, "accuracy")]))
        rows = [row for row in found.rows if row.metric == "accuracy"]
        assert [(row.id, row.result) for row in rows] == [(f"mp (limit={limit})", "REGRESSED") for limit in limits]
        assert [row.allowed is not None for row in rows] == accepted
        assert not any("no case of these reports" in warning for warning in found.warnings)


def test_an_allowed_regression_that_grew_counts(prose: Prose) -> None:
    """`up_to` bounds what is accepted; without it any growth is."""
    sides = [_full()], [_full(slower=1.3)]
    for up_to, accepted in ((0.5, "bug 7"), (None, "bug 7"), (0.1, None)):
        entry = Allowed(case="mp-bs1", metric="time", reason="bug 7", expires=TODAY, up_to=up_to)
        found = _judge(*sides, Policy(allow=[entry]))
        assert [row.allowed for row in found.rows if row.metric == "time"] == [accepted]
    assert prose == "\n".join(found.warnings)


def test_a_strategy_may_have_a_threshold_of_its_own() -> None:
    """10 % slower is fine for tp here and for nobody else; 30 % is not."""
    policy = Policy(allow=[Allowed(case="tp-*", metric="time", reason="noisy", up_to=0.2)])
    base = [_full(), _full(strategy="tp"), _full(strategy="tp", batch_size=2)]
    head = [_full(1.1), _full(1.1, strategy="tp"), _full(1.3, strategy="tp", batch_size=2)]
    found = _judge(base, head, policy)
    assert {row.id: fails(row, policy) for row in found.rows if row.metric == "time"} == {
        "mp-bs1": True,
        "tp-bs1": False,
        "tp-bs2": True,
    }


def test_other_software_is_named_where_something_changed(prose: Prose) -> None:
    """In the warnings once, and as the second line of what it may explain."""
    base, head = make_report([_full()]), make_report([_full(1.5)])
    base.environment = msgspec.structs.replace(base.environment, driver="570")
    found = _judge_reports(base, head)
    assert prose == "\n".join(found.warnings)
    time = next(row for row in found.rows if row.metric == "time")
    assert time.reason.splitlines()[-1:] == ["Also changed: driver 570 -> none."]
    assert len(next(row for row in found.rows if row.metric == "memory").reason.splitlines()) == 1


def test_the_verdicts_say_what_they_rest_on() -> None:
    """The policy in force with its digest, and the baseline: as it was named, else its commit."""
    base = make_report([_full()])
    base.commit = Commit(sha="abc")
    found = judge(base, base, Policy(), today=TODAY)
    assert (found.policy, found.policy_sha256) == (dump_policy(Policy()), sha256_of(Policy()))
    assert found.baseline == Baseline(commit="abc")
    named = Baseline(name="0001", sha256="f" * 64, commit="abc")
    assert judge(base, base, Policy(), today=TODAY, baseline=named).baseline == named


@pytest.mark.parametrize(
    ("session", "dirty", "states"),
    [
        (Session(complete=True, exit_status=0), False, []),
        (Session(complete=True, exit_status=0), None, []),
        (Session(complete=True, exit_status=0), True, ["dirty"]),
        (Session(complete=True, exit_status=1), False, ["failed"]),
        (Session(complete=True), False, []),
        (Session(), False, ["incomplete"]),
        (Session(interrupted=True, exit_status=2), True, ["interrupted", "dirty"]),
    ],
)
def test_the_verdicts_have_the_state_of_the_candidate(session: Session, dirty: bool | None, states: list[str]) -> None:
    """A session that runs still has no exit status. The state of the baseline does not count."""
    head = make_report([_full()])
    head.session, head.commit = session, Commit(sha="abc", dirty=dirty)
    found = judge(make_report([_full()]), head, Policy(), today=TODAY)
    assert found.head is not None
    assert (found.head.commit, found.head.states) == ("abc", states)


def _random_report(seed: int) -> Report:
    chance = random.Random(seed)
    cases = [
        _full(chance.gauss(1, 0.03), wrong=chance.sample(range(100), 3), batch_size=size, strategy=strategy)
        for strategy in ("mp", "tp")
        for size in (1, 2, 4)
    ]
    return make_report([*cases, make_failed(batch_size=8)])


def test_the_same_reports_give_the_same_bytes() -> None:
    """However often they are judged; reading them back changes nothing, and nor does judging."""
    base, head = _random_report(1), _random_report(2)
    before = msgspec.json.encode((base, head))
    first = msgspec.json.encode(judge(base, head, Policy(), today=TODAY))
    again, other = msgspec.json.decode(before, type=tuple[Report, Report])
    assert msgspec.json.encode(judge(again, other, Policy(), today=TODAY)) == first
    assert msgspec.json.encode((base, head)) == before
    assert msgspec.json.decode(first, type=Verdicts).rows
    assert gc.isenabled()


def test_the_worst_comes_first() -> None:
    """By severity, then by metric; what cannot fail the gate last, be it allowed or only reported."""
    rows = _judge_reports(_random_report(1), _random_report(2)).rows
    gated = [row for row in rows if row.gated]
    allowed = msgspec.structs.replace(gated[0], verdict="REGRESSED", improved=False, allowed="bug 7")
    shown = msgspec.structs.replace(gated[0], verdict="REGRESSED", improved=False, gated=False)
    ordered = worst_first([shown, allowed, *gated])
    assert ordered[-2:] == [allowed, shown]
    severities = [SEVERITY.index(row.verdict) for row in ordered[:-2]]
    assert severities == sorted(severities)
    assert len(set(severities)) > 1


def test_judging_needs_no_heavy_library() -> None:
    """Neither torch nor scipy nor numpy nor pytest: a report is judged on a laptop."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers', 'scipy', 'numpy', 'pytest')))\n"
        "import pytest_llmgpu.gate.judge, pytest_llmgpu.gate.policy, pytest_llmgpu.gate.times\n"
        "from pytest_llmgpu.gate.stats import net_loss\n"
        "from pytest_llmgpu.gate.times import launches_needed, prior_of\n"
        "needed = launches_needed(prior_of('eager_device'), slowdown=0.06, threshold=0.04)\n"
        "print(needed, *net_loss(60, 50, 1000, 0.95))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert answer.startswith("2 -0.0"), answer


_HELD_DOWN = "throttled by power or heat: GPU 0 for 90.0 % of the time"


def test_full_load_at_the_power_limit_is_compared() -> None:
    """It is how these GPUs work: a slowdown of cases that met it on both sides is one."""
    base, head, again = _full(), _full(slower=1.5), _full()
    for result in (base, head, again):
        make_invalid(result.launches[0], _HELD_DOWN)
    assert _said(_judge([base], [head]))["time"] == "REGRESSED"
    assert _said(_judge([base], [again]))["time"] == "OK"


def test_a_limit_that_one_side_met_is_no_verdict() -> None:
    """A cooler day is no faster program."""
    base, head = _full(), _full(slower=1.5)
    make_invalid(base.launches[0])
    make_invalid(head.launches[0], _HELD_DOWN)
    (row,) = [row for row in _judge([base], [head]).rows if row.metric == "time"]
    assert row.result == "UNDECIDED"
    assert "only the candidate" in row.reason


def test_a_parameter_that_is_gone_from_a_named_test_is_missing() -> None:
    """Naming a test on the command line leaves other tests out, and none of its own parameters."""
    base = [_full(batch_size=1), _full(batch_size=8)]
    head = make_report(base[:1])
    head.session = Session(deselected=["tests not named on the command line"])
    assert "MISSING" in _said(judge(make_report(base), head, Policy(), today=TODAY)).values()
    head.session = Session(
        deselected=["tests not named on the command line", "parameters not named on the command line"]
    )
    assert "MISSING" not in _said(judge(make_report(base), head, Policy(), today=TODAY)).values()


def test_an_interrupted_case_is_never_green() -> None:
    """What noise may hide, the policy decides; a case that was stopped has no verdict at all."""
    base = [_full(batch_size=1), _full(batch_size=8)]
    found = _judge(base, [base[0], make_failed("interrupted", _failure("Ctrl-C"), batch_size=8)])
    assert exit_status(found, Policy()) == 3


def test_a_case_that_was_measured_after_a_resumption_has_its_day() -> None:
    """Only the launches of that start of pytest are of another day than the baseline's."""
    results = []
    for size in (1, 2):
        result = with_launches([1.0], batch_size=size)
        result.launches[0].work = make_work()
        results.append(result)
    resumption = Resumption(created="2026-01-09T00:00:00Z", source="a.json", sha256="f" * 64, kept=1)
    later = [msgspec.structs.replace(launch, resumption=1) for launch in results[1].launches]
    head = make_report([results[0], msgspec.structs.replace(results[1], launches=later)])
    head.resumed = [resumption]
    rows = judge(make_report(results), head, Policy(), today=TODAY).rows
    thresholds = {row.id: row.threshold for row in rows if row.metric == "device_time"}
    assert thresholds == {"mp-bs1": pytest.approx(0.01), "mp-bs2": pytest.approx(0.01 + DAY_SD)}


def _row(verdict: Verdict, metric: str = "time", **fields: Any) -> Row:
    return Row(**{"key": "k", "id": "mp-bs8", "metric": metric, "verdict": verdict, "reason": "none.", **fields})


@pytest.mark.parametrize(
    ("verdict", "gated", "shown"),
    [
        ("REGRESSED", RowClass.FAILS, RowClass.ALLOWED),
        ("MISSING", RowClass.FAILS, RowClass.UNCLEAR),
        ("NOT_COMPARABLE", RowClass.FAILS, RowClass.UNCLEAR),
        ("UNDECIDED", RowClass.UNCLEAR, RowClass.UNCLEAR),
        ("CHANGED", RowClass.ALLOWED, RowClass.ALLOWED),
        ("NEW", RowClass.NEW, RowClass.NEW),
        ("OK", RowClass.UNCHANGED, RowClass.UNCHANGED),
    ],
)
def test_a_row_has_a_class(verdict: Verdict, gated: RowClass, shown: RowClass) -> None:
    """A row that is not gated, or allowed, never fails, under a strict policy neither."""
    strict = Policy(strict=True)
    fails_strictly = gated is RowClass.FAILS or verdict == "UNDECIDED"
    assert (classify(_row(verdict), Policy()), fails(_row(verdict), strict)) == (gated, fails_strictly)
    for row in (_row(verdict, gated=False), _row(verdict, allowed="bug 7")):
        assert (classify(row, strict), fails(row, strict)) == (shown, False)


@pytest.mark.parametrize(
    ("rows", "unseen"),
    [
        ([_row("OK", smallest_seen=0.6)], [True]),
        ([_row("OK", smallest_seen=0.4)], [False]),
        ([_row("UNDECIDED")], [True]),
        ([_row("OK", smallest_seen=0.6, improved=True)], [False]),
        ([_row("REGRESSED", smallest_seen=0.6)], [False]),
        ([_row("OK", smallest_seen=0.6, gated=False)], [False]),
        ([_row("UNDECIDED", smallest_seen=0.6, allowed="bug 7")], [False]),
        ([_row("OK", "device_time", smallest_seen=0.02), _row("UNDECIDED", smallest_seen=9.0)], [False, False]),
        ([_row("UNDECIDED", "device_time"), _row("OK", smallest_seen=0.02)], [False, False]),
        ([_row("UNDECIDED", smallest_seen=0.1), _row("UNDECIDED", smallest_seen=0.6, key="other")], [False, True]),
    ],
)
def test_a_case_whose_slowdown_would_not_be_seen_fails(rows: list[Row], unseen: list[bool]) -> None:
    """Its best gated time decides, under every policy; a row that is OK by chance is undecided."""
    found = with_unseen(rows)
    assert [row.unseen for row in found] == unseen
    assert all(fails(row, Policy()) and row.verdict == "UNDECIDED" for row in found if row.unseen)
