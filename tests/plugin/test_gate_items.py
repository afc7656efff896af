"""--llmgpu-compare as its users meet it: pytest runs, cases are measured at once by a stand-in for the runner."""

from __future__ import annotations

import datetime
import hashlib
import re
from pathlib import Path

import msgspec
import pytest
from support.faked_runs import FakedRuns
from support.report_factory import known

from pytest_llmgpu.cli import main
from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.result import Outcome
from pytest_llmgpu.report.verdicts import Candidate, Verdict
from pytest_llmgpu.store import store

_COMPARE = "--llmgpu-compare=base.json"


@pytest.fixture
def runs(runs: FakedRuns) -> FakedRuns:
    """Return a function that runs a benchmark with base.json as its baseline: a batch takes one second per sequence."""
    assert runs("--llmgpu-json=base.json").ret == 0
    return runs


def _slower(size: int) -> float:
    return size * (4.0 if size == 4 else 1.0)


def test_a_regression_is_a_failing_item_with_a_reason(runs: FakedRuns) -> None:
    """The test passes, and only its item of the gate fails, in one line with the change; JUnit's XML has it."""
    runs.seconds = _slower
    result = runs("-v", _COMPARE, "--junitxml=out.xml")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*test_it.py::test_hellaswag?mp-bs4? PASSED*",
            "*llmgpu gate::test_it.py::test_hellaswag?mp-bs1? UNDECIDED*",
            "*llmgpu gate::test_it.py::test_hellaswag?mp-bs4? REGRESSED*",
            "*llmgpu gate::the whole run OK*100%*",
            "*_ llmgpu gate: test_it.py::test_hellaswag?mp-bs4? _*",
            "REGRESSED: mp-bs4 wall time +300.0 % (160 s, was 40 s)",
            "REGRESSED: mp-bs4 wall time +300.0 % (160 s, was 40 s)*",
            "*mp-bs4*time*REGRESSED*",
            "policy: built-in",
            "REGRESSED llmgpu gate::test_it.py::test_hellaswag?mp-bs4?*",
            "*1 failed, 4 passed, 2 undecided*",
        ]
    )
    (item,) = re.findall(r"(?m)^REGRESSED: mp-bs4 wall time .*\n(.*)$", result.stdout.str())[:1]
    assert not item.startswith("Time "), "the headline has the change already"
    assert "Traceback" not in result.stdout.str()
    assert "gate_items.py" not in result.stdout.str(), "no frame of ours"
    junit = (runs.pytester.path / "out.xml").read_text()
    assert junit.count("<testcase ") == 7
    assert "REGRESSED: mp-bs4 wall time +" in junit
    assert '<property name="llmgpu.verdict.time" value="REGRESSED: Time +' in junit
    assert '<property name="llmgpu.verdict.accuracy" value="OK: ' in junit


def test_junit_is_valid_for_jenkins(runs: FakedRuns) -> None:
    """Properties of a test are not in the schema of its xunit plugin, which is MIT: pytest writes them so."""
    etree = pytest.importorskip("lxml.etree")
    runs.seconds, runs.outcome = _slower, lambda size: "crashed" if size == 8 else "completed"
    runs("-rA", _COMPARE, "--junitxml=out.xml", "-o", "junit_logging=all")
    found = etree.parse(runs.pytester.path / "out.xml")
    assert {one.tag for one in found.iter()} >= {"failure", "properties", "system-out"}
    for one in found.findall(".//testcase/properties"):
        one.getparent().remove(one)
    schema = etree.XMLSchema(etree.parse(Path(__file__).parents[1] / "data" / "junit-10.xsd"))
    assert schema.validate(found), schema.error_log


def test_the_verdicts_are_those_of_the_written_report(runs: FakedRuns) -> None:
    """`llmgpu gate` gives equal verdicts for the two files. The run may overwrite its baseline."""
    runs.seconds = _slower
    runs.outcome = lambda size: "oom" if size == 8 else "completed"
    base = runs.report("base.json")
    assert runs(_COMPARE, "--llmgpu-json=base.json").ret == 1
    head = runs.report("base.json")
    verdicts = known(head.verdicts)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    again = judge.judge(base, head, Policy(), today=today, baseline=verdicts.baseline)
    assert msgspec.structs.replace(again, head=verdicts.head) == verdicts
    head_command = "pytest test_it.py --llmgpu-dataset=items.jsonl --llmgpu-batch-sizes=1,4,8"
    assert verdicts.head == Candidate(created=head.created, commit=head.commit.sha, command=head_command)
    assert known(verdicts.baseline).name == "base.json"
    assert (head.session.exit_status, head.session.complete) == (1, True)
    assert main(["gate", "--verdicts", str(runs.pytester.path / "base.json")]) == 1


def test_a_run_that_is_as_good_as_its_baseline_is_green(runs: FakedRuns) -> None:
    """A run as fast as its baseline passes; too little data is counted separately, and the policy can make it fail."""
    result = runs(_COMPARE)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*4 passed, 3 undecided*"])
    assert "no case can be compared" not in result.stdout.str()
    strict = runs(_COMPARE, "--llmgpu-strict")
    assert strict.ret == 1
    strict.stdout.fnmatch_lines(["UNDECIDED: mp-bs1 wall time *", "*3 failed, 4 passed*"])


def test_a_baseline_of_another_dtype_is_noted_before_anything_is_measured(runs: FakedRuns) -> None:
    """Hours of measurements would be compared with nothing."""
    result = runs(_COMPARE, "--llmgpu-dtype=bfloat16", sizes="1")
    assert result.ret == 1
    note = "llmgpu: note: no case can be compared with the baseline: dtype float32 -> bfloat16"
    result.stdout.fnmatch_lines([note, "test_it.py *", "NOT COMPARABLE: mp-bs1*"])


def test_a_selection_without_a_case_is_not_green(runs: FakedRuns) -> None:
    """A run with --llmgpu-compare that measures nothing fails with the reason; a baseline of the ini file allows it."""
    runs.pytester.makepyfile(test_two="def test_other(): pass")
    for name in ("nothing", "other"):
        result = runs(_COMPARE, "-k", name)
        assert result.ret == 1
        result.stdout.fnmatch_lines(["no case was measured: nothing was compared."])
    runs.pytester.makeini("[pytest]\nllmgpu_compare = base.json\n")
    runs("test_two.py").assert_outcomes(passed=1)
    runs.seconds = _slower
    assert runs("test_it.py").ret == 1


def test_the_last_failed_run_again_are_those_that_regressed(runs: FakedRuns) -> None:
    """--lf runs and judges a regressed test again, until it is as fast as its baseline."""
    runs.seconds = _slower
    assert runs(_COMPARE, cached=True).ret == 1
    for _ in range(2):
        runs.did.clear()
        again = runs(_COMPARE, "--lf", cached=True)
        assert again.ret == 1
        again.stdout.fnmatch_lines(["*rerun previous 1 failure*", "*1 failed, 2 passed*"])
        assert runs.measured == ["mp-bs4"]
    runs.seconds = float
    assert runs(_COMPARE, "--lf", cached=True).ret == 0
    runs(_COMPARE, "--lf", cached=True).stdout.fnmatch_lines(["*no previously failed tests*"])
    # No test belongs to a missing case: all tests run again.
    assert runs(_COMPARE, cached=True, sizes="1,4").ret == 1
    again = runs(_COMPARE, "--lf", cached=True, sizes="1,4")
    assert again.ret == 1
    again.stdout.fnmatch_lines(["*no previously failed tests*", "*MISSING*"])


@pytest.mark.parametrize(
    ("outcome", "metric", "last"), [("completed", "time", "UNDECIDED"), ("error", "outcome", "MISSING")]
)
def test_a_run_that_stops_early_is_judged(runs: FakedRuns, outcome: Outcome, metric: MetricName, last: Verdict) -> None:
    """With -x the report has all verdicts and the run fails. It is whole after a failed item, not after a test."""
    runs.seconds = _slower
    runs.outcome = lambda size: outcome if size == 4 else "completed"
    assert runs("-x", _COMPARE).ret == 1
    session, verdicts = runs.report().session, known(runs.report().verdicts)
    assert (session.complete, session.interrupted) == ((True, False) if outcome == "completed" else (False, True))
    assert ("interrupted" in known(verdicts.head).states) is session.interrupted
    found = {(row.id, row.metric): row.verdict for row in verdicts.rows}
    assert (found["mp-bs4", metric], found["mp-bs8", metric]) == ("REGRESSED", last)


def test_a_gate_without_its_items_fails_the_run(runs: FakedRuns) -> None:
    """The run fails even if another plugin removes the gate's items."""
    runs.pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_collection_finish(session):
            session.items[:] = [item for item in session.items if "gate" not in item.nodeid]
        """
    )
    runs.seconds = _slower
    result = runs(_COMPARE)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED llmgpu gate: REGRESSED: mp-bs4 wall time +300.0 % (160 s, *)", "*3 passed*"])
    assert runs.report().session.exit_status == 1


def test_no_item_is_run_again(runs: FakedRuns) -> None:
    """A stand-in for pytest-rerunfailures with --reruns=2, which reads the number at the closest marker."""
    runs.pytester.makeconftest(
        """
        def pytest_configure(config):
            config.addinivalue_line("markers", "flaky(reruns)")
            config.pluginmanager.register(object(), "rerunfailures")

        def pytest_runtest_protocol(item):
            marker = item.get_closest_marker("flaky")
            print("reruns", 2 if marker is None else marker.kwargs["reruns"], item.nodeid)
        """
    )
    result = runs("-s", "--strict-markers", _COMPARE, sizes="1")
    reruns = re.findall(r"reruns (\d) (.*)", result.stdout.str())
    test = "test_it.py::test_hellaswag[mp-bs1]"
    assert reruns == [("2", test), ("0", f"llmgpu gate::{test}"), ("0", "llmgpu gate::the whole run")]


def test_a_first_run_may_do_without_a_baseline(runs: FakedRuns) -> None:
    """A run without a baseline passes where that is allowed, names the reason, and what makes it the baseline."""
    result = runs("--llmgpu-compare=nowhere.json", "--llmgpu-allow-no-baseline")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["no baseline: report nowhere.json*", "PASSED: there is no baseline*", "* no baseline*"]
    )
    result.stdout.fnmatch_lines(["*`llmgpu promote latest --to nowhere.json`*"])


def test_a_run_of_the_store_is_a_baseline_by_its_name(runs: FakedRuns) -> None:
    """A run is compared with a saved report; `latest` is the newest report before the run."""
    assert runs("--llmgpu-save=good").ret == 0
    runs.seconds = _slower
    assert runs("--llmgpu-compare=latest", "--llmgpu-save=bad").ret == 1
    session, baseline = runs.report().session, known(known(runs.report().verdicts).baseline)
    assert (session.exit_status, session.failed_tests) == (1, 0), "items of the gate are no tests of a model"
    assert baseline.name == "latest"
    (good, bad) = store.stored(runs.pytester.path / ".llmgpu")
    assert (good.name, bad.name) == ("good", "bad")
    assert baseline.sha256 == hashlib.sha256(good.path.read_bytes()).hexdigest()
    assert runs("--llmgpu-compare=good").ret == 1
