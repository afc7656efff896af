"""--llmgpu-find-max-batch as its users meet it."""

from __future__ import annotations

import pytest
from support.faked_runs import FakedRuns


@pytest.fixture
def runs(runs: FakedRuns) -> FakedRuns:
    """Return a function that runs a benchmark of which batch sizes up to 13 fit."""
    runs.fits = 13
    return runs


def test_the_largest_that_fits_is_measured(runs: FakedRuns) -> None:
    """After the first out of memory the interval is halved; these cases have the id of the test, without work."""
    result = runs("-v", "--llmgpu-find-max-batch", sizes="1,2,4,8,16,24")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*mp-bs16? OOM*", "*mp-bs24? OOM*", "*4 passed, 2 oom*"])
    assert list(runs.outcomes().items())[4:] == [
        ("mp-bs16", "oom"),
        ("mp-bs12", "completed"),
        ("mp-bs14", "oom"),
        ("mp-bs13", "completed"),
        ("mp-bs24", "skipped_after_oom"),
    ]
    written = runs.report()
    probes = [case for case in written.cases if case.case.batch_size in (12, 13, 14)]
    assert [case.nodeid for case in probes] == ["test_it.py::test_hellaswag[mp-bs16]"] * 3
    assert probes[0].sequences_per_s is not None, "derived as of any case"
    assert {request.case.batch_size for request in runs.requests if not request.work} == {12, 13, 14}
    assert (written.session.complete, written.session.collected) == (True, 6)
    assert written.options["--llmgpu-find-max-batch"] is True
    (found,) = written.capacity
    assert (found.largest_fit, found.smallest_oom) == (13, 14)


def test_probes_do_not_excuse_a_list_of_which_nothing_fits(runs: FakedRuns) -> None:
    """The test fails as it does without the search, and the report has the size that fits."""
    result = runs("--llmgpu-find-max-batch", sizes="16")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no batch size of this model and strategy completed*", "*1 failed*"])
    assert runs.outcomes()["mp-bs13"] == "completed"


def test_a_search_ends_with_a_model_that_does_not_load_and_with_a_crash(runs: FakedRuns) -> None:
    """A failed search case is in the report, and the test keeps the outcome of its own case."""
    runs.outcome = lambda size: "crashed" if size == 12 else "completed"
    runs("--llmgpu-find-max-batch", sizes="4,8,16").stdout.fnmatch_lines(["*2 passed, 1 oom*"])
    assert list(runs.outcomes().items())[2:] == [("mp-bs16", "oom"), ("mp-bs12", "crashed")]
    runs.fits, runs.phase = 0, "load"
    runs("--llmgpu-find-max-batch", sizes="4,8")
    assert runs.outcomes() == {"mp-bs4": "oom", "mp-bs8": "skipped_after_oom"}


def test_a_size_that_the_strategy_refuses_ends_the_search(runs: FakedRuns) -> None:
    """A strategy may refuse batch sizes of the search, and no test fails."""
    runs.pytester.makepyfile(
        even="""
        from pytest_llmgpu.strategies.mp import LayerParallel

        class Even(LayerParallel):
            name = "even"

            def check(self, case, source):
                if case.batch_size % 2:
                    raise ValueError(f"batch size {case.batch_size} is odd")
        """
    )
    assert runs("--strategy=even:Even", "--llmgpu-find-max-batch", sizes="12,16").ret == 0
    assert runs.outcomes() == {"even-bs12": "completed", "even-bs16": "oom", "even-bs14": "oom"}
