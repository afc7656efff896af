"""Strategies and tasks of users, as they register and choose them: real processes on a CPU."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faked_runs import BENCHMARK, FakedRuns
from support.report_factory import known

# pytester forgets what a run inside this process has imported; a module that is here already keeps its identity.
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.plugin import hookspecs
from pytest_llmgpu.report import file


def _own(module: str, name: str) -> str:
    """Return a module that has and registers a strategy."""
    return f"""
import pytest
from pytest_llmgpu.strategies.mp import LayerParallel

class {name}(LayerParallel):
    name = "{name.lower()}"

@pytest.hookimpl(optionalhook=True)
def pytest_llmgpu_strategies():
    return {{"{name.lower()}": "{module}:{name}"}}
"""


def _write_the_example(hook: Callable[..., object], folder: Path) -> list[str]:
    """Write the files that the hook's docstring shows, and return their names."""
    shown = inspect.getdoc(hook) or ""
    example = textwrap.dedent(re.findall(r"::\n\n((?: {4}.*\n|\n)+)", shown)[0])
    _, *files = re.split(r"^# (\w+\.py).*\n", example, flags=re.MULTILINE)
    for name, text in zip(files[::2], files[1::2], strict=True):
        (folder / name).write_text(text)
    return files[::2]


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_a_strategy_and_a_task_beside_the_benchmarks_are_measured(pytester: pytest.Pytester) -> None:
    """The examples of the documentation run from end to end, the task from a late conftest.py."""
    assert _write_the_example(hookspecs.pytest_llmgpu_strategies, pytester.path) == ["slow_strategy.py", "conftest.py"]
    folder = pytester.mkdir("benchmarks")
    assert _write_the_example(hookspecs.pytest_llmgpu_tasks, folder) == ["right_or_wrong.py", "conftest.py"]
    (folder / "test_it.py").write_text(
        textwrap.dedent(
            """
            def hooks(loaded):
                return len(loaded.model._forward_pre_hooks)

            def test_right_or_wrong(llm, right_or_wrong, batch_size, measure):
                assert {len(item.endings) for item in right_or_wrong} == {2}
                measure(llm, right_or_wrong, batch_size)
                assert llm.run(hooks) == [1]

            def test_a_part(llm, right_or_wrong, measure):
                measure(llm, right_or_wrong[:2], 4)

            def test_hellaswag(llm, hellaswag, batch_size, measure):
                measure(llm, hellaswag, batch_size)
            """
        )
    )
    flags = ("-p", "no:cacheprovider", "--llmgpu-device=cpu", "--llmgpu-limit=8", "--llmgpu-batch-sizes=4,16")
    result = pytester.runpytest_inprocess("--strategy=slow", "--llmgpu-work=off", *flags)
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["* task right_or_wrong, bundled dataset (first 8 items)*; strategy slow; *"])
    cases = file.load(pytester.path / ".llmgpu" / "last.json").cases
    scored = {
        (one.case.task, one.case.limit, one.case.batch_size): sum(one.launches[0].batches.sequences) for one in cases
    }
    assert scored == {
        ("right_or_wrong", 2, 4): 4,
        ("right_or_wrong", 8, 4): 16,
        ("right_or_wrong", 8, 16): 16,
        ("hellaswag", 8, 4): 32,
        ("hellaswag", 8, 16): 32,
    }
    assert {(one.case.strategy, one.case.dataset, one.outcome) for one in cases} == {("slow", "bundled", "completed")}
    for one in (one for one in cases if one.case.task == "right_or_wrong"):
        assert known(one.launches[0].accuracy).labels == [1] * (one.case.limit or 0)
        assert one.acc_norm == 1.0
        assert known(one.accuracy_check).source in (None, "slow-bs4#2"), "the registered accuracy is for HellaSwag"
    assert len({one.case.series for one in cases}) == 3


@pytest.mark.parametrize("hook", ["pytest_llmgpu_strategies", "pytest_llmgpu_tasks", "pytest_llmgpu_metrics"])
def test_a_hook_that_raises_is_refused_in_one_line(runs: FakedRuns, hook: str) -> None:
    """It is no internal error of pytest."""
    runs.pytester.makeconftest(f"def {hook}(config):\n    raise RuntimeError('it is broken')\n")
    result = runs(sizes="8")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = f"{hook} raised RuntimeError: it is broken (conftest.py:2)"
    assert [line for line in (*result.outlines, *result.errlines) if text in line] == [f"ERROR: {text}"]
    assert "Traceback" not in result.stdout.str()


def test_strategies_are_chosen_by_place_and_from_packages(runs: FakedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place needs no hook; a package registers a strategy by its entry point."""
    site = runs.pytester.mkdir("site")
    (site / "far_strategies.py").write_text(_own("far_strategies", "Far"))
    metadata = site / "far_strategies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: far-strategies\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nfar = far_strategies\n")
    monkeypatch.syspath_prepend(site)
    runs.pytester.makepyfile(near=_own("near", "Near"), test_it=BENCHMARK)
    assert runs("--strategy=far,near:Near", sizes="8").ret == 0
    assert [(case.id, case.nodeid) for case in runs.report().cases] == [
        ("far-bs8", "test_it.py::test_hellaswag[far-bs8]"),
        # As it was written: to know its name is to import it, which a run that selects others need not.
        ("near-bs8", "test_it.py::test_hellaswag[near:Near-bs8]"),
    ]


_TASK = "right_or_wrong:RightOrWrong"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("hook", "registered", "reason"),
    [
        ("strategies", {"a,b": "near:Near"}, "'a,b', the name of the strategy at near:Near, is not "),
        ("strategies", {"near": "near:Nix"}, "--strategy: strategy near:Nix cannot be imported: AttributeError"),
        ("tasks", {"measure": _TASK}, "'measure' is not allowed: a fixture of pytest-llmgpu has this"),
        ("tasks", {"hellaswag": _TASK}, "task 'hellaswag' is at two places"),
        ("tasks", {"pairs": _TASK}, "registered as 'pairs', but its name is 'right_or_wrong'"),
        ("tasks", {"pairs": "right_or_wrong:No"}, "task right_or_wrong:No cannot be imported: AttributeError"),
        ("tasks", ["pairs"], "['pairs'] is not allowed: a mapping is needed"),
    ],
)
def test_a_bad_registration_is_refused_before_anything_starts(
    pytester: pytest.Pytester, refused: Callable[..., str], hook: str, registered: object, reason: str
) -> None:
    """One line names the registration that is not allowed, also of a conftest.py that pytest finds as it collects."""
    folder = pytester.mkdir("benchmarks")
    _write_the_example(hookspecs.pytest_llmgpu_tasks, folder)
    (folder / "conftest.py").write_text(f"def pytest_llmgpu_{hook}():\n    return {registered!r}\n")
    (folder / "near.py").write_text(_own("near", "Near"))
    task = "pairs" if "pairs" in str(registered) else "hellaswag"
    (folder / "test_it.py").write_text(textwrap.dedent(BENCHMARK).replace("hellaswag", task))
    flags = ["--strategy=near"] if "near:Nix" in str(registered) else []
    assert reason in refused(*flags, "--llmgpu-device=cpu", "--llmgpu-limit=4", "--llmgpu-batch-sizes=16")
