"""Figures of a test suite's own: declared in a conftest.py, recorded by tests, judged without it."""

from __future__ import annotations

import os

import pytest
from support.faked_runs import FakedRuns
from support.repository import first_commit

from pytest_llmgpu.cli import main

_DECLARED = """
    def pytest_llmgpu_metrics():
        return {"hit_rate": {"better": "larger", "threshold": 0.01}, "waiting": {"unit": "ms", "better": "smaller"}}
"""
_TEST = """
    import os

    def test_hellaswag(llm, hellaswag, batch_size, measure):
        result = measure(llm, hellaswag, batch_size, figures={"waiting": 2})
        result.record("hit_rate", float(os.environ["RATE"]))
        result.record("seen", 7)
"""


@pytest.fixture
def runs(runs: FakedRuns, monkeypatch: pytest.MonkeyPatch) -> FakedRuns:
    """Return a function that runs a benchmark of one batch size, whose figure is in a variable."""
    monkeypatch.setenv("RATE", "0.93")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.chdir(runs.pytester.path)
    runs.pytester.makeconftest(_DECLARED)
    runs.pytester.makepyfile(test_it=_TEST)
    return runs


def test_a_report_is_judged_without_the_conftest(
    runs: FakedRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures of each launch are kept; table, JUnit and verdicts have them, and `llmgpu gate` judges the files."""
    base = runs("--llmgpu-launches=2", "--llmgpu-save=base", sizes="8")
    base.stdout.fnmatch_lines(["*  waiting    hit rate    seen", "*2       0.930       7"])
    assert [one.figures["hit_rate"] for one in runs.report().cases[0].launches] == [0.93, 0.93]
    monkeypatch.setenv("RATE", "0.88")
    head = runs("--llmgpu-compare=base", "--llmgpu-json=head.json", "--junitxml=out.xml", sizes="8")
    head.stdout.fnmatch_lines(["REGRESSED: mp-bs8 hit rate -5.4 % (0.88, was 0.93)"])
    assert '<property name="llmgpu.hit_rate" value="0.88"' in (runs.pytester.path / "out.xml").read_text()
    (runs.pytester.path / "conftest.py").unlink()
    capsys.readouterr()
    assert main(["gate", "base", "head.json"]) == 1
    assert "hit_rate REGRESSED 0.93 0.88 -5.4 %" in " ".join(capsys.readouterr().out.split())


def test_a_resumed_run_keeps_the_figures_of_its_cases(runs: FakedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of a kept case runs again, and measures and records nothing."""
    first_commit(runs.pytester.path, "test_it.py", "conftest.py")
    runs(sizes="1")
    monkeypatch.setenv("RATE", "0.5")
    runs("--llmgpu-resume=.llmgpu/last.json", sizes="1").assert_outcomes(passed=1)
    assert [one.figures["hit_rate"] for one in runs.report().cases[0].launches] == [0.93]


@pytest.mark.parametrize(("bound", "regressed"), [(0.94, True), (0.93, False)])
@pytest.mark.parametrize("flag", ["--llmgpu-compare=git:HEAD:base.json", "--llmgpu-save=first"])
def test_a_bound_fails_a_first_run_without_a_baseline(
    runs: FakedRuns, bound: float, regressed: bool, flag: str
) -> None:
    """The policy lets a first run pass, and its bound holds all the same, also in a run that is not compared."""
    first_commit(runs.pytester.path, "test_it.py", "conftest.py")
    policy = f"[tool.llmgpu.gate]\nallow_no_baseline = true\n[tool.llmgpu.gate.hit_rate]\nat_least = {bound}\n"
    (runs.pytester.path / "pyproject.toml").write_text(policy)
    result = runs(flag, sizes="1")
    assert result.ret == int(regressed)
    compared = "compare" in flag
    if regressed:
        line = f"REGRESSED: mp-bs1 hit rate: 0.93 is below at_least = {bound} of the policy"
        result.stdout.fnmatch_lines([line, "Next: Read `figures` of its launches in the report, and the bound *"])
    else:
        result.stdout.fnmatch_lines(["PASSED: there is no baseline*" if compared else "next: llmgpu promote first *"])
    assert (runs.report().verdicts is not None) == (compared or regressed)


@pytest.mark.parametrize(
    ("conftest", "policy", "message"),
    [
        ("", "hit_rate]\nthreshold = 0.1", "*policy: hit_rate: threshold = 0.1 is above the declared 0.01: a policy *"),
        ("", "hit_rat]\nat_least = 0.9", "*policy: hit_rat: no metric, and no figure that pytest_llmgpu_metrics *"),
        ("smaller", "time]", "*pytest_llmgpu_metrics: 'hit_rate' is declared twice: *"),
    ],
)
def test_a_wrong_declaration_or_policy_ends_the_run_before_it_measures(
    runs: FakedRuns, conftest: str, policy: str, message: str
) -> None:
    """Two declarations that differ, a looser policy and an unknown name are usage errors."""
    runs("--llmgpu-save=base", sizes="1")
    runs.did.clear()
    if conftest:
        runs.pytester.mkdir("below").joinpath("conftest.py").write_text(
            f"def pytest_llmgpu_metrics():\n    return {{'hit_rate': {{'better': {conftest!r}}}}}\n"
        )
        (runs.pytester.path / "below" / "test_below.py").write_text("def test_below():\n    pass\n")
    (runs.pytester.path / "pyproject.toml").write_text(f"[tool.llmgpu.gate.{policy}\n")
    result = runs("--llmgpu-compare=base", sizes="1")
    result.stderr.fnmatch_lines([message])
    assert (result.ret, runs.measured) == (pytest.ExitCode.USAGE_ERROR, [])


def test_an_undeclared_figure_of_the_policy_is_noted_in_a_run_without_a_baseline(runs: FakedRuns) -> None:
    """Its bound holds for nothing; a run that is compared refuses it."""
    (runs.pytester.path / "pyproject.toml").write_text("[tool.llmgpu.gate.hit_rat]\nat_least = 0.9\n")
    result = runs(sizes="1")
    result.stdout.fnmatch_lines(["llmgpu: note: policy: hit_rat: no metric, and no figure that *"])
    assert result.ret == 0


def test_a_test_that_fails_by_its_figure_in_the_first_launch_is_reported(
    runs: FakedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that is no number is named; no test is left for the second launch."""
    monkeypatch.setenv("RATE", "nan")
    result = runs("--llmgpu-launches=2", sizes="1")
    result.stdout.no_fnmatch_line("*def record*")
    result.stdout.fnmatch_lines(["E*ValueError: figure 'hit_rate': nan is not allowed: a finite number is needed"])
    result.assert_outcomes(failed=1)
