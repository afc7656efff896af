from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import (
    known,
    make_answers,
    make_check,
    make_failed,
    make_generation,
    make_memory,
    make_report,
    make_result,
    make_traffic,
    make_work,
)
from support.verdict_factory import make_invalid, make_row, noise, with_launches

from pytest_llmgpu.gate.headline import headline
from pytest_llmgpu.gate.judge import Level, exit_status, fails, judge, level, with_unseen
from pytest_llmgpu.gate.policy import Allowed, ExactRule, Policy, TextsRule, TimeRule, dump_policy
from pytest_llmgpu.report.case import GENERATE
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.report import Commit, Report, Session
from pytest_llmgpu.report.result import Batches, CaseResult, Failure, Generation
from pytest_llmgpu.report.verdicts import Baseline, Row, Verdict, Verdicts, worst_first
from pytest_llmgpu.report.work import HostCalls

TODAY = datetime.date(2026, 6, 1)
_FAILED_CHECK = make_check("60 points below")


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


def _change_work(result: CaseResult, **fields: Any) -> None:
    """Replace fields of each rank of the work of the only launch."""
    work = make_work()
    work.ranks[:] = [msgspec.structs.replace(rank, **fields) for rank in work.ranks]
    result.launches[0].work = work


def _judge(
    base: Sequence[CaseResult] | None, head: Sequence[CaseResult], policy: Policy | None = None, *, s0: float = 0.001
) -> Verdicts:
    return _judge_reports(None if base is None else make_report(base), make_report(head), policy, s0=s0)


def _judge_reports(base: Report | None, head: Report, policy: Policy | None = None, *, s0: float = 0.001) -> Verdicts:
    with noise(s0):
        return judge(base, head, policy or Policy(), today=TODAY)


def _said(verdicts: Verdicts) -> dict[str, str]:
    """Return each metric's verdict, where one case was judged."""
    return {str(row.metric): str(row.result) for row in verdicts.rows}


def _allowed(case: str, metric: MetricName) -> Allowed:
    return Allowed(case=case, metric=metric, reason="bug 7", expires=TODAY)


def test_equal_reports_are_ok_in_every_metric() -> None:
    """Each metric was compared, and the exit status is 0."""
    found = _judge([_full()], [_full()])
    metrics = ("device_time", "time", "program", "accuracy", "predictions", "traffic", "path", "memory")
    assert _said(found) == dict.fromkeys(metrics, "OK")
    assert found.not_compared == {}
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


@pytest.mark.parametrize(("calls", "verdict"), [(429, "OK"), (430, "REGRESSED"), (None, "MISSING")])
def test_calls_of_the_host_have_a_row_where_the_policy_gates_them(calls: int | None, verdict: str) -> None:
    """Without it they are in the row on the program."""
    base, head = _full(), _full()
    for result, number in ((base, 429), (head, calls)):
        found = HostCalls(python=number or 0, c=9, by_file={"a.py": number or 0}, python_version="3.12")
        _change_work(result, host_calls=None if number is None else found)
    gating = msgspec.structs.replace(Policy(), host_calls=ExactRule())
    assert [_said(_judge([base], [head], one)).get("host_calls") for one in (Policy(), gating)] == [None, verdict]


@pytest.mark.parametrize(
    ("grown", "device", "verdict", "status"),
    [
        ({}, "cpu", "OK", 0),
        ({"flops": 10**12 + 10**8}, "cpu", "CHANGED", 0),
        ({"flops": 10**12 + 2 * 10**9}, "cpu", "REGRESSED", 1),
        ({"host_syncs": 5}, "cpu", "REGRESSED", 1),
        ({"ops_by_module": {"layers.*.mlp": {"aten::mm": 400, "aten::clone": 1}}}, "cpu", "CHANGED", 0),
        (None, "cpu", "MISSING", 1),
        ({}, "cuda", "OK", 3),
    ],
)
def test_a_case_on_a_cpu_is_judged_by_its_program(
    grown: dict[str, Any] | None, device: str, verdict: str, status: int
) -> None:
    """Its wall time is too noisy to show a slowdown, which fails the gate on a GPU alone."""
    base, head = _full(device=device), _full(device=device)
    for result, fields in ((base, {}), (head, grown)):
        _change_work(result, device_time_s=None, copy_s=None, rows=None, **fields or {})
    head.launches[0].work = None if grown is None else head.launches[0].work
    rows = _said(found := _judge([base], [head], s0=1.0))
    assert (rows["time"], rows["program"], exit_status(found, Policy())) == ("UNDECIDED", verdict, status)


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
def test_outcome_before_numbers(base: Any, head: Any, verdict: str, status: int, prose: Prose) -> None:
    """A case that changed its outcome has a verdict on that, whatever its numbers are, and none on them."""
    failure = Failure(phase="forward", rank=1, message="gone\nwrong")
    then, now = ([_full() if one == "completed" else make_failed(one, failure)] for one in (base, head))
    found = _judge(then, now)
    row = found.rows[0]
    assert (row.metric, row.result) == ("outcome", verdict)
    assert {row.metric for row in found.rows} == {"outcome"}
    assert prose == row.reason
    assert exit_status(found, Policy()) == status


@pytest.mark.parametrize(
    ("size", "nodeid", "fails", "probed"),
    [
        (40, "a.py::t[64]", (64, 50), True),
        (56, "a.py::t[64]", (64, 50), True),
        (49, "a.py::t[64]", (64, 50), False),
        (40, "a.py::t[40]", (64, 50), False),
        (40, "a.py::t[64]", (), False),
    ],
    ids=["fits", "fails", "between", "other test", "no limit"],
)
def test_a_probe_for_the_largest_batch_size_needs_no_second_one(
    size: int, nodeid: str, fails: tuple[int, ...], probed: bool
) -> None:
    """A size that this run has a result for in the same test: another run probes other sizes."""
    head = [_full(batch_size=one) for one in (32, 48)] + [make_failed(batch_size=one) for one in fails]
    base = [_full(batch_size=one) for one in (32, size)]
    for result in (*head, *base):
        result.nodeid = "a.py::t[64]"
    base[1].nodeid = nodeid
    found = _judge(base, head)
    assert [row.id for row in found.rows if row.verdict == "MISSING"] == ([] if probed else [f"mp-bs{size}"])
    assert found.not_compared.get("a probe for the largest batch size") == (1 if probed else None)


_LAST_FAILED = "--lf: tests that passed last time"
_OTHER_TESTS, _OTHER_PARAMETERS = (f"{what} not named on the command line" for what in ("tests", "parameters"))


@pytest.mark.parametrize(
    ("nodeid", "deselected", "left_out"),
    [
        ("a.py::t[2]", [], None),
        ("a.py::t[2]", ["a.py::t[3]"], None),
        ("a.py::t[2]", ["a.py::t[2]"], "deselected in this run"),
        ("a.py::t[2]", [_LAST_FAILED], f"left out: {_LAST_FAILED}"),
        ("a.py::t[1]", [_LAST_FAILED], None),
        (None, [_LAST_FAILED], None),
        ("a.py::other[2]", [_OTHER_TESTS], f"left out: {_OTHER_TESTS}"),
        ("a.py::t[2]", [_OTHER_TESTS], None),
        ("a.py::t[2]", [_OTHER_TESTS, _OTHER_PARAMETERS], f"left out: {_OTHER_PARAMETERS}"),
    ],
)
def test_a_case_that_is_gone_is_missing_unless_the_user_left_it_out(
    nodeid: str | None, deselected: list[str], left_out: str | None
) -> None:
    """Its test was deselected by name, or the run narrowed; not where the test ran, or its other parameters did."""
    stays, gone, again = _full(), _full(strategy="tp"), _full()
    stays.nodeid, gone.nodeid, again.nodeid = "a.py::t[1]", nodeid, "a.py::t[1]"
    head = make_report([again])
    head.session = Session(deselected=deselected, interrupted=True)
    found = _judge_reports(make_report([stays, gone]), head)
    assert found.not_compared == {left_out or "outcome: MISSING": 1}
    missing = [row for row in found.rows if row.id == "tp-bs1"]
    assert [row.verdict for row in missing] == ([] if left_out else ["MISSING"])
    assert all("the run was interrupted" in row.reason for row in missing)
    assert exit_status(found, Policy()) == (0 if left_out else 1)


def test_a_case_is_missing_only_where_others_were_measured() -> None:
    """Reports that share no case have nothing to compare."""
    on_cpu, on_gpu = _full(device="cpu"), _full(strategy="tp")
    found = _judge([on_cpu], [on_gpu])
    assert {row.id: row.result for row in found.rows} == {on_gpu.id: "NEW"}
    assert exit_status(found, Policy()) == 3
    mixed = _judge([on_cpu, _full(strategy="tp")], [on_gpu])
    assert [row.result for row in mixed.rows if row.id == on_cpu.id] == ["MISSING"]


def test_new_cases_pass_and_their_answers_are_checked() -> None:
    """A new case has nothing to lose, but may be wrong by itself."""
    new = _full(strategy="tp")
    found = _judge([_full()], [_full(), new])
    assert [row.result for row in found.rows if row.id == "tp-bs1"] == ["NEW"]
    assert exit_status(found, Policy()) == 0
    new.accuracy_check = _FAILED_CHECK
    assert exit_status(_judge([_full()], [_full(), new]), Policy()) == 1
    before = _full(strategy="tp")
    before.launches[0].accuracy = None
    wrong = _judge([before], [new])
    assert [row.reason for row in wrong.rows if row.metric == "accuracy"] == ["60 points below."]
    assert wrong.not_compared == {"accuracy: only the candidate has it": 1}


def test_without_a_baseline_nothing_is_green() -> None:
    """Exit status 3, unless the policy allows that; a crash still fails."""
    found = _judge(None, [_full()])
    assert [(row.result, row.reason) for row in found.rows] == [("NEW", "There is no baseline.")]
    assert found.baseline is None
    assert exit_status(found, Policy()) == 3
    assert exit_status(found, Policy(allow_no_baseline=True)) == 0
    assert exit_status(_judge(None, [make_failed("crashed")]), Policy(allow_no_baseline=True)) == 1


def test_nothing_compared_is_not_green() -> None:
    """No cases, or metrics that are all reported only."""
    assert exit_status(_judge([], []), Policy()) == 3
    policy = msgspec.structs.replace(Policy(), time=TimeRule(gate=False))
    found = _judge([with_launches([1.0])], [with_launches([1.5])], policy)
    assert _said(found) == {"time": "CHANGED"}
    lacking = ("accuracy", "device_time", "program", "memory", "traffic")
    assert found.not_compared == {f"{metric}: neither report has it": 1 for metric in lacking}
    assert exit_status(found, policy) == 3


def test_another_case_or_machine_is_not_comparable(prose: Prose) -> None:
    """Exit status 3, and the reason names the difference; a regression beside it wins."""
    found = _judge([_full()], [_full(dtype="bfloat16")])
    assert _said(found) == {"outcome": "NOT_COMPARABLE"}
    assert prose == found.rows[0].reason
    assert exit_status(found, Policy()) == 3
    items = _judge([_full()], [_full(dataset_sha256="a" * 64)]).rows[0].reason
    assert items.endswith("-> aaaaaaaaaaaa."), "one dot"
    base = make_report([_full()], gpus=4)
    for head in (_full(slower=2.0), make_failed()):
        moved = _judge_reports(base, make_report([head], gpus=8))
        assert _said(moved) == {"outcome": "NOT_COMPARABLE"}
        assert "GPUs 4 -> 8" in moved.rows[0].reason
        assert exit_status(moved, Policy()) == 3
    alone = _judge_reports(make_report([_full(devices=1)], gpus=4), make_report([_full(devices=1)], gpus=8))
    assert "NOT_COMPARABLE" not in _said(alone).values(), "how many others a machine has makes no difference"
    other = make_report([_full(slower=2.0)])
    elsewhere = {"engine": "~/e.py", "other": "/o.py"}
    other.commit = msgspec.structs.replace(other.commit, sha="b" * 40, imported_from=elsewhere)
    moved = _judge_reports(make_report([_full()]), other)
    assert _said(moved) == {"outcome": "NOT_COMPARABLE"}
    assert "commit bbbbbbbb, but module engine and 1 more was imported from ~/e.py" in moved.rows[0].reason
    beside = [_full(dtype="bfloat16"), make_failed("crashed", strategy="tp")]
    assert exit_status(_judge([_full()], beside), Policy()) == 1


def test_not_enough_data_fails_where_the_policy_says_so() -> None:
    """Exit status 3. A case whose time was disturbed shows no slowdown and fails under every policy."""
    disturbed = _full()
    make_invalid(disturbed.launches[0], "a stranger's process")
    for head, status in ((_full(slower=1.02), 0), (disturbed, 3)):
        found = _judge([_full()], [head], s0=0.02)
        assert (_said(found)["time"], _said(found)["accuracy"]) == ("UNDECIDED", "OK")
        assert (exit_status(found, Policy()), exit_status(found, Policy(strict=True))) == (status, 3)


def test_an_allowed_regression_passes(prose: Prose) -> None:
    """Also one that noise hides from a strict gate; a name that no case of these reports has is misspelt."""
    policy = Policy(strict=True, allow=[_allowed("mp-bs1", "time"), _allowed("mp-bs1", "device_time")])
    for slower, s0, result in ((1.5, 0.001, "REGRESSED"), (1.02, 0.02, "UNDECIDED")):
        found = _judge([_full()], [_full(slower=slower)], policy, s0=s0)
        assert [(row.result, row.allowed) for row in found.rows if row.metric == "time"] == [(result, "bug 7")]
        assert exit_status(found, policy) == 0
    head = make_report([_full()])
    head.session = Session(deselected=["benchmarks/test_a.py::test_b[mp-bs2]"])
    policy = Policy(allow=[_allowed("mp-bs2", "time"), _allowed("mp-bs3", "time"), _allowed("mp-bs1", "outcome")])
    found = _judge_reports(make_report([_full(), _full(batch_size=2)]), head, policy)
    assert prose == "\n".join(found.warnings)


def _empty(*, launches: bool = True, **fields: Any) -> CaseResult:
    """Return a completed result without the time of a batch, or without any launch."""
    found = _full(**fields)
    found.launches = [msgspec.structs.replace(found.launches[0], batches=Batches())] if launches else []
    return found


_RUN = [_full(), _full(batch_size=2), make_failed("crashed", batch_size=4), make_failed("oom", batch_size=8)]
_OUT_OF_MEMORY = make_failed("oom")
_OUT_OF_MEMORY.launches[0].load_s = 3.21
_COPY = msgspec.json.decode(msgspec.json.encode(_RUN), type=list[CaseResult])


@pytest.mark.parametrize(
    ("base", "head", "verdicts", "text"),
    [
        # The candidate is the baseline's own file, a copy of it, or has all of its launches.
        (_RUN, _RUN, {"UNDECIDED"}, "Baseline and candidate are of the same run"),
        (_RUN, _COPY, {"UNDECIDED"}, "Baseline and candidate are of the same run"),
        (_RUN, [*_RUN, _full(strategy="tp")], {"UNDECIDED", "NEW"}, "Baseline and candidate are of the same run"),
        ([_OUT_OF_MEMORY], [_OUT_OF_MEMORY], {"UNDECIDED"}, "Baseline and candidate are of the same run"),
        # There is no case that both have.
        ([_full()], [], set(), "NOTHING COMPARED: 1 x the candidate has no case"),
        ([], [_full()], {"NEW"}, "NOTHING COMPARED: 1 x outcome: NEW"),
        ([], [], set(), "NOTHING COMPARED: the reports share no case"),
        (None, [], set(), "NOTHING COMPARED: there is no baseline"),
        (
            [_full()],
            [_full(batch_size=2)],
            {"NEW"},
            "NOTHING COMPARED: no case in common: mp-bs1 in the baseline, mp-bs2 in the candidate",
        ),
        # A case that both have, without a time.
        ([_full()], [_empty()], {"UNDECIDED"}, "The candidate measured no batch"),
        ([_full()], [_empty(launches=False)], {"UNDECIDED"}, "The candidate measured no batch"),
        ([_empty()], [_full()], {"UNDECIDED"}, "The baseline measured no batch"),
        ([_empty(launches=False)], [_full()], {"UNDECIDED"}, "The baseline measured no batch"),
        ([_empty()], [_empty(launches=False)], {"UNDECIDED"}, "The candidate measured no batch"),
        (None, [_empty()], {"UNDECIDED"}, "The candidate measured no batch"),
        (_RUN[:2], [_full(), _empty(batch_size=2)], {"OK", "UNDECIDED"}, "The candidate measured no batch"),
    ],
)
def test_what_cannot_be_judged_neither_passes_nor_regresses(
    base: Sequence[CaseResult] | None, head: Sequence[CaseResult], verdicts: set[Verdict], text: str
) -> None:
    """Exit status 3 under every policy; no metric of such a case has a row."""
    found = _judge(base, head)
    assert {row.verdict for row in found.rows} == verdicts
    assert {row.metric for row in found.rows if row.verdict == "UNDECIDED"} <= {"outcome"}
    for policy in (Policy(), Policy(strict=True, allow_no_baseline=True)):
        assert exit_status(found, policy) == 3
    assert text in headline(found, Policy()).text


def test_other_software_is_named_where_something_changed(prose: Prose) -> None:
    """In the warnings and the headline."""
    base, head = make_report([_full()]), make_report([_full(1.5)])
    base.environment = msgspec.structs.replace(base.environment, driver="570")
    found = _judge_reports(base, head)
    assert prose == "\n".join(found.warnings)
    assert "differs from the baseline: driver 570 -> none" in headline(found, Policy()).text


def test_the_verdicts_have_the_policy_and_the_baseline() -> None:
    """The policy in force, and the baseline: as it was named, else its commit."""
    base = make_report([_full()])
    base.commit = Commit(sha="abc")
    named = Baseline(name="0001", sha256="f" * 64, commit="abc")
    for given, baseline in ((None, Baseline(commit="abc")), (named, named)):
        found = judge(base, base, Policy(), today=TODAY, baseline=given)
        assert found.policy == dump_policy(Policy())
        assert found.baseline == baseline


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
    assert (known(found.head).commit, known(found.head).states) == ("abc", states)
    make_invalid(head.cases[0].launches[0], "CPU cores too busy: rank 0")
    found = judge(make_report([_full()]), head, Policy(), today=TODAY)
    assert known(found.head).states == [*states, "disturbed"]


def test_the_same_reports_give_the_same_bytes() -> None:
    """However often they are judged; reading them back changes nothing, and nor does judging."""
    sizes = (1, 2, 4)
    base = make_report([*(_full(batch_size=size) for size in sizes), make_failed(batch_size=8)])
    head = make_report([_full(1.0 + 0.02 * size, wrong=range(size), batch_size=size) for size in sizes])
    before = msgspec.json.encode((base, head))
    first = msgspec.json.encode(judge(base, head, Policy(), today=TODAY))
    again, other = msgspec.json.decode(before, type=tuple[Report, Report])
    assert msgspec.json.encode(judge(again, other, Policy(), today=TODAY)) == first
    assert msgspec.json.encode((base, head)) == before
    assert msgspec.json.decode(first, type=Verdicts).rows


def test_wall_times_of_other_gpus_are_compared_as_such() -> None:
    """The GPUs of the machines count where no launch has a profile."""
    same, other = make_report([_full()]), make_report([_full()])
    other.environment.gpus = [msgspec.structs.replace(gpu, uuid=f"other {gpu.uuid}") for gpu in other.environment.gpus]
    for head, words in ((same, False), (other, True)):
        (row,) = (row for row in _judge_reports(make_report([_full()]), head).rows if row.metric == "time")
        assert ("baseline is from other GPUs" in row.reason) is words


def _generating(*, first_s: float = 0.02, step_s: float = 0.01, **factors: tuple[float, float]) -> CaseResult:
    """Return a case of texts of three tokens with four launches; the factors are of its decode steps and prefills."""
    result = make_result(workload=GENERATE, prompt_tokens=96, new_tokens=3)
    (plain,) = result.launches
    works = []
    for flops, device_s in zip(*(factors.get(name, (1, 1)) for name in ("program", "device_time")), strict=True):
        (rank,) = make_work(1).ranks
        rank = msgspec.structs.replace(
            rank, flops=round(1e6 * flops), device_time_s=[device_s] * 3, copy_s=None, rows=None
        )
        works.append(msgspec.structs.replace(make_work(1), ranks=[rank]))
    result.launches = []
    for wobble in (0.999, 1.0, 1.001, 1.0):
        first_tokens_s, steps_s = [first_s * wobble] * 64, [step_s * wobble] * 128
        texts = make_generation([[1, 2, 3]], [[-1.0] * 3], [[-1.0] * 3], first_token_s=first_tokens_s, step_s=steps_s)
        launch = msgspec.structs.replace(plain, generation=texts, work=works[0], prefill_work=works[1])
        result.launches.append(launch)
    return result


@pytest.mark.parametrize(
    ("slower", "metric"), [({}, None), ({"first_s": 0.026}, "first_token"), ({"step_s": 0.013}, "token_time")]
)
def test_the_time_to_first_token_and_the_time_per_token_are_judged(slower: dict[str, Any], metric: str | None) -> None:
    """Each has a row of its own by the rule of wall time, so that a trade of one for the other is seen."""
    found = _judge([_generating()], [_generating(**slower)])
    worse = {row.metric: row.ratio for row in found.rows if row.result == "REGRESSED" and row.gated}
    assert worse == ({} if metric is None else {metric: pytest.approx(1.3)})
    assert {"time", "first_token", "token_time"} <= {row.metric for row in found.rows}


def test_wrong_texts_are_a_regression_and_right_ones_need_no_accuracy() -> None:
    """A case that generates has no accuracy, which is no gap of the comparison."""
    right, wrong = _generating(), _generating()
    wrong.accuracy_check = _FAILED_CHECK
    assert _said(_judge([_generating()], [wrong]))["accuracy"] == "REGRESSED"
    found = _judge([_generating()], [right])
    assert (_said(found)["texts"], "accuracy" in _said(found)) == ("OK", False)
    assert not [why for why in found.not_compared if why.startswith("accuracy")]


@pytest.mark.parametrize(
    ("texts", "verdict", "status"),
    [
        (make_generation([[1, 2, 4]], [[-1.0] * 3], [[-1.0] * 3]), "CHANGED", 0),
        (make_generation([[4, 5, 6]], [[-1.2] * 3], [[-1.2] * 3]), "REGRESSED", 1),
        (None, "MISSING", 1),
    ],
)
def test_texts_that_diverge_pass_and_other_numbers_of_their_tokens_fail(
    texts: Generation | None, verdict: str, status: int
) -> None:
    """The check of the run itself passes: its prefill and its decode steps may be wrong alike."""
    head = _generating()
    for launch in head.launches:
        columns = {name: getattr(launch.generation, name) for name in ("first_token_s", "step_s")}
        launch.generation = None if texts is None else msgspec.structs.replace(texts, **columns)
    found = _judge([_generating()], [head])
    assert (_said(found)["texts"], exit_status(found, Policy())) == (verdict, status)
    without = msgspec.structs.replace(Policy(), texts=TextsRule(gate=False))
    assert exit_status(_judge([_generating()], [head], without), without) == 0


@pytest.mark.parametrize(
    ("step", "prefill", "verdict", "of_prefill"),
    [
        (1.0, 1.0, "OK", False),
        (1.0, 1.032, "REGRESSED", True),
        (1.0, 0.968, "IMPROVED", True),
        (1.02, 0.968, "REGRESSED", False),
        (1.02, 1.032, "REGRESSED", True),
        (1.032, 1.02, "REGRESSED", False),
    ],
)
@pytest.mark.parametrize("metric", ["program", "device_time"])
def test_the_worse_of_decode_step_and_prefill_stands(
    metric: str, step: float, prefill: float, verdict: str, of_prefill: bool
) -> None:
    """The step alone would state that nothing changed; of two regressions the larger one is named."""
    scaled: dict[str, Any] = {metric: (step, prefill)}
    (row,) = (row for row in _judge([_generating()], [_generating(**scaled)]).rows if row.metric == metric)
    expected = "CHANGED" if (metric, verdict) == ("program", "IMPROVED") else verdict
    assert (row.result, row.part) == (expected, "prefill" if of_prefill else None)
    assert (row.ratio or 1.0) == pytest.approx(prefill if of_prefill else step)
    assert row.reason.startswith("Prefill: ") is of_prefill


def test_the_worst_comes_first() -> None:
    """By severity, metric and change for the worse; rows that cannot fail the gate come last."""
    ordered = [
        make_row("REGRESSED", "outcome"),
        make_row("REGRESSED", ratio=1.3),
        make_row("REGRESSED", ratio=1.1),
        make_row("REGRESSED", "accuracy", base=0.8, head=0.6),
        make_row("REGRESSED", "accuracy", base=0.8, head=0.7),
        make_row("REGRESSED", "memory", ratio=2.0),
        make_row("MISSING"),
        make_row("UNDECIDED"),
        make_row("OK", "memory", improved=True),
        make_row("OK"),
        make_row("REGRESSED", allowed="bug 7"),
        make_row("CHANGED", gated=False),
    ]
    assert worst_first(ordered[::-1]) == ordered


@pytest.mark.parametrize(
    ("verdict", "gated", "shown"),
    [
        ("REGRESSED", "failure", "warning"),
        ("MISSING", "failure", "warning"),
        ("NOT_COMPARABLE", "failure", "warning"),
        ("UNDECIDED", "warning", "warning"),
        ("CHANGED", "warning", "warning"),
        ("NEW", "info", "info"),
        ("OK", "info", "info"),
    ],
)
def test_a_row_has_a_severity(verdict: Verdict, gated: Level, shown: Level) -> None:
    """A row that is not gated, or allowed, never fails, under a strict policy neither."""
    strict = Policy(strict=True)
    fails_strictly = gated == "failure" or verdict == "UNDECIDED"
    assert (level(make_row(verdict), Policy()), fails(make_row(verdict), strict)) == (gated, fails_strictly)
    for row in (make_row(verdict, gated=False), make_row(verdict, allowed="bug 7")):
        assert (level(row, strict), fails(row, strict)) == (shown, False)


@pytest.mark.parametrize(
    ("rows", "unseen"),
    [
        ([make_row("OK", smallest_seen=0.6)], [True]),
        ([make_row("OK", smallest_seen=0.4)], [False]),
        ([make_row("UNDECIDED")], [True]),
        ([make_row("OK", smallest_seen=0.6, improved=True)], [False]),
        ([make_row("REGRESSED", smallest_seen=0.6)], [False]),
        ([make_row("OK", smallest_seen=0.6, gated=False)], [False]),
        ([make_row("UNDECIDED", smallest_seen=0.6, allowed="bug 7")], [False]),
        ([make_row("OK", "device_time", smallest_seen=0.02), make_row("UNDECIDED", smallest_seen=9.0)], [False, False]),
        ([make_row("UNDECIDED", "device_time"), make_row("OK", smallest_seen=0.02)], [False, False]),
        ([make_row("UNDECIDED", smallest_seen=0.1), make_row("UNDECIDED", id="b", smallest_seen=0.6)], [False, True]),
    ],
)
def test_a_case_whose_slowdown_would_not_be_seen_fails(rows: list[Row], unseen: list[bool]) -> None:
    """Its best gated time decides, under every policy; a row that is OK by chance is undecided."""
    found = with_unseen(rows)
    assert [row.unseen for row in found] == unseen
    assert all(fails(row, Policy()) and row.verdict == "UNDECIDED" for row in found if row.unseen)
