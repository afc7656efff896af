"""Cases that are measured in several launches of their processes."""

from __future__ import annotations

import itertools

import pytest
from support.faked_runs import FakedRuns

import pytest_llmgpu.plugin.launch_loop  # noqa: F401 - as in faked_runs


def test_all_cases_run_once_a_launch_in_ascending_order(runs: FakedRuns) -> None:
    """Processes end between launches and not between cases; each test is reported once, with the median of its case."""
    seconds = iter([3.0, 30.0, 1.0, 10.0, 2.0, 20.0])
    runs.seconds = lambda _: next(seconds)
    result = runs("-v", "--llmgpu-launches=3", "--strategy=mp", sizes="8,1")
    assert result.ret == 0
    launch = ["mp-bs1", "mp-bs8", "end"]
    assert [name for name, _ in itertools.groupby(runs.did)] == ["end", *launch * 3]
    result.stdout.fnmatch_lines(["*launch 1 of 3*", "*launch 3 of 3*", "*mp-bs1? PASSED*50%*", "*mp-bs8? PASSED*100%*"])
    result.assert_outcomes(passed=2)
    assert result.stdout.str().count("PASSED") == 2
    written = runs.report()
    first, _ = written.cases
    assert [launch.batches.latency_s[0] for launch in first.launches] == [3.0, 1.0, 2.0]
    assert first.inference_s == pytest.approx(20.0)
    assert (written.session.complete, written.session.collected) == (True, 2)
    assert written.options["--llmgpu-launches"] == 3


def test_out_of_memory_in_any_launch_is_out_of_memory(runs: FakedRuns) -> None:
    """A test that runs out of memory is not measured again, and the others continue."""
    runs.outcome = lambda size: "oom" if size == 8 and runs.measured.count("mp-bs8") == 2 else "completed"
    result = runs("-v", "--llmgpu-launches=4", sizes="1,8")
    assert result.ret == 0
    assert (runs.measured.count("mp-bs1"), runs.measured.count("mp-bs8")) == (4, 2)
    result.stdout.fnmatch_lines(["*mp-bs8? OOM*", "*mp-bs1? PASSED*", "*1 passed, 1 oom*"])
    first, second = runs.report().cases
    assert (first.outcome, len(first.launches)) == ("completed", 4)
    assert (second.outcome, len(second.launches), second.inference_s) == ("oom", 2, None)
    assert second.launches[0].batches.latency_s, "what was measured before is kept"


@pytest.mark.parametrize(("flags", "measured"), [([], 5), (["-x"], 3)])
def test_a_failure_in_an_early_launch_is_reported_once(runs: FakedRuns, flags: list[str], measured: int) -> None:
    """A failed test is reported with its reason and not repeated; -x ends the run."""
    runs.outcome = lambda _: "error" if len(runs.measured) == 3 else "completed"
    result = runs("--llmgpu-launches=3", *flags, sizes="1,8")
    assert result.ret == 1
    assert len(runs.measured) == measured
    result.stdout.fnmatch_lines(["*it is error*"])
    result.assert_outcomes(failed=1, passed=0 if flags else 1)
    assert runs.report().session.complete is not bool(flags)


def test_a_test_that_does_not_measure_runs_once(runs: FakedRuns) -> None:
    """Other tests run once, and fixtures are set up again for each launch."""
    runs.pytester.makepyfile(
        test_it="""
        import pytest

        def note(word):
            with open("log", "a") as log:
                log.write(f"{word} ")

        @pytest.fixture(scope="session")
        def opened():
            note("open")
            yield
            note("close")

        def test_hellaswag(llm, hellaswag, batch_size, measure, opened):
            note("measure")
            measure(llm, hellaswag, batch_size)

        def test_other():
            note("other")
        """
    )
    runs("--llmgpu-launches=2", sizes="1").assert_outcomes(passed=2)
    assert (runs.pytester.path / "log").read_text() == "open measure close open measure other close "


def test_a_test_judges_all_launches_so_far(runs: FakedRuns) -> None:
    """`measure` returns the case with its launches; a second measurement is another case, and an xfail ends none."""
    runs.pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.xfail(strict=False)
        def test_hellaswag(llm, hellaswag, measure):
            first = measure(llm, hellaswag, 4)
            second = measure(llm, hellaswag, 4)
            with open("log", "a") as log:
                log.write(f"{first.id} {len(first.launches)} {second.id} {len(second.launches)}, ")
            assert False
        """
    )
    runs("--llmgpu-launches=3").assert_outcomes(xfailed=1)
    log = "mp-bs4 1 mp-bs4#2 1, mp-bs4 2 mp-bs4#2 2, mp-bs4 3 mp-bs4#2 3, "
    assert (runs.pytester.path / "log").read_text() == log
    assert [(case.id, len(case.launches)) for case in runs.report().cases] == [("mp-bs4", 3), ("mp-bs4#2", 3)]


def test_a_collection_that_failed_is_not_run(runs: FakedRuns) -> None:
    """A failed collection stops the launches too."""
    runs.pytester.makepyfile(test_broken="import nothing_of_that_name")
    assert runs("--llmgpu-launches=2").ret == pytest.ExitCode.INTERRUPTED
    assert runs.measured == []
