from __future__ import annotations

import pytest
from support.faked_runs import FakedRuns

from pytest_llmgpu.inference import models


def test_batch_sizes_ascend_within_a_group_and_the_reference_runs_first(runs: FakedRuns) -> None:
    """Each model is loaded once, and large batches run last; tests of one batch size keep their order."""
    runs.pytester.makepyfile(
        test_it="""
        def test_b(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)

        def test_other():
            pass

        def test_a(llm, hellaswag, measure, batch_size):
            measure(llm, hellaswag, batch_size)

        def test_own(llm, hellaswag, measure):
            measure(llm, hellaswag, 2)
        """
    )
    assert runs("--strategy=compile,mp", sizes="8,1").ret == 0
    ran = [str(case.nodeid).partition("::test_")[2] for case in runs.report().cases]
    each = ["own[{}]", "b[{}-bs1]", "a[{}-bs1]", "b[{}-bs8]", "a[{}-bs8]"]
    assert ran == [name.format(strategy) for strategy in ("mp", "compile") for name in each]


def test_each_quantisation_is_a_group_of_tests_plain_weights_first(
    runs: FakedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id of a test and of its case have it; a marker chooses for its own test, that of a parameter cannot."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(models, "check_choices", lambda *_: None)
    runs.pytester.makepyfile(
        test_it="""
        import pytest

        def test_a(llm, hellaswag, batch_size, measure):
            result = measure(llm, hellaswag, batch_size)
            assert (result.case.quantization or "none",) == llm.options.quantization

        @pytest.mark.llmgpu(quantization="fp8-weight")
        def test_own(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)

        @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.llmgpu(quantization=["int8"]))])
        def test_parameters(llm, hellaswag, batch_size, measure, x):
            measure(llm, hellaswag, batch_size)
        """
    )
    runs.pytester.makeini("[pytest]\nllmgpu_quantization = int8,none\n")
    result = runs("--strategy=compile,mp", sizes="1")
    cases = runs.report().cases
    groups = ["mp-bs1", "mp-int8-bs1", "compile-bs1", "compile-int8-bs1"]
    assert [case.id for case in cases if "test_a[" in str(case.nodeid)] == groups
    assert [str(case.nodeid).partition("::")[2] for case in cases if "test_a[" in str(case.nodeid)] == [
        f"test_a[{name}]" for name in groups
    ]
    assert [case.id for case in cases if "test_own[" in str(case.nodeid)] == [
        "mp-fp8-weight-bs1",
        "compile-fp8-weight-bs1",
    ]
    assert "marker llmgpu(quantization=...): a marker of a pytest.param cannot choose it" in result.stdout.str()


def test_a_marker_chooses_for_its_own_test_alone(runs: FakedRuns) -> None:
    """A case that cannot be measured fails with its marker and the reason in one line; the others are measured."""
    runs.pytester.makeini("[pytest]\nllmgpu_batch_sizes = 8\n")
    runs.pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.llmgpu(limit=1)
        def test_few(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)

        @pytest.mark.llmgpu(new_tokens=5)
        def test_score(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)

        @pytest.mark.llmgpu(batch_sizes=[2, 3], limit=2)
        def test_own(llm, hellaswag, batch_size, measure):
            result = measure(llm, hellaswag, batch_size)
            assert (len(hellaswag.items), result.case.limit) == (2, 2)

        @pytest.mark.llmgpu(modle="x")
        def test_unknown(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)

        @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.llmgpu(batch_sizes=[3])), 2])
        def test_parameters(llm, hellaswag, batch_size, measure, x):
            measure(llm, hellaswag, batch_size)
        """
    )
    result = runs.pytester.runpytest_inprocess("--llmgpu-dataset=items.jsonl", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=4)
    few, score, unknown, parameters = (line for line in result.stdout.lines if line.startswith("test_it.py::"))
    assert few.startswith("test_it.py::test_few[mp-bs8]: marker llmgpu(limit=1): batch size 8 is more than")
    assert "marker llmgpu(new_tokens=...): this is an option of workload generate, and the test has workload" in score
    assert unknown.startswith("test_it.py::test_unknown[mp-bs8]: @pytest.mark.llmgpu: modle is not allowed: ")
    assert "marker llmgpu(batch_sizes=...)" in parameters
    assert "on the test function" in parameters
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    ran = [case.nodeid for case in runs.report().cases]
    assert ran == [f"test_it.py::test_{name}]" for name in ("own[mp-bs2", "own[mp-bs3", "parameters[mp-bs8-2")]


def test_a_marker_of_a_class_may_have_options_of_both_workloads(runs: FakedRuns) -> None:
    """Each test takes those of its own workload."""
    runs.pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.llmgpu(new_tokens=5, accuracy_baseline=0.02)
        class TestBoth:
            def test_score(self, llm, hellaswag, batch_size, measure): ...
            def test_generate(self, llm, prompts, batch_size, measure): ...
            def test_own(self, llm, batch_size, measure): ...
        """
    )
    result = runs(sizes="1")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["llmgpu: *; workloads score, generate; strategy mp; *"])
