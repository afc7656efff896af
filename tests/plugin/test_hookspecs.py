"""Strategies of somebody's own, as their users register and choose them: real processes on a CPU."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from pathlib import Path

import pytest

# pytester forgets what a run inside this process has imported; a module that is here already keeps its identity.
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.plugin import hookspecs
from pytest_llmgpu.profiling import machine, nvml
from pytest_llmgpu.profiling.machine import TorchFacts
from pytest_llmgpu.profiling.nvml import Inventory
from pytest_llmgpu.report import file

_FLAGS = ("-p", "no:cacheprovider", "--llmgpu-device=cpu", "--llmgpu-limit=4", "--llmgpu-batch-sizes=16")

_BENCHMARK = """
    def hooks(loaded):
        return len(loaded.model._forward_pre_hooks)

    def test_hellaswag(llm, hellaswag, batch_size, measure):
        result = measure(llm, hellaswag, batch_size)
        print(result.id, "has", *llm.run(hooks))
"""

_OWN = """
    import pytest
    from pytest_llmgpu.strategies.mp import LayerParallel

    class {name}(LayerParallel):
        name = "{lower}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_llmgpu_strategies():
        return {{"{lower}": "{module}:{name}"}}
"""


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch nor NVML is asked anew."""
    facts = TorchFacts(version="2.13.0", why="torch is built without CUDA")
    monkeypatch.setattr(machine, "probe", lambda: facts)
    monkeypatch.setattr(nvml, "inventory", lambda: Inventory(why={"nvml": "no NVML in this test"}))


def _cases(pytester: pytest.Pytester) -> list[tuple[str, str | None, str]]:
    cases = file.load(pytester.path / ".llmgpu" / "last.json").cases
    return [(case.id, case.nodeid, case.outcome) for case in cases]


def _own(module: str, name: str) -> str:
    return textwrap.dedent(_OWN.format(module=module, name=name, lower=name.lower()))


def _write_the_example(folder: Path) -> None:
    """Write the files that the hook's docstring shows."""
    shown = inspect.getdoc(hookspecs.pytest_llmgpu_strategies) or ""
    example = textwrap.dedent(re.findall(r"::\n\n((?: {4}.*\n|\n)+)", shown)[0])
    _, *files = re.split(r"^# (\w+\.py).*\n", example, flags=re.MULTILINE)
    assert files[::2] == ["slow_strategy.py", "conftest.py"]
    for name, text in zip(files[::2], files[1::2], strict=True):
        (folder / name).write_text(text)


@pytest.mark.usefixtures("no_gpu")
def test_a_strategy_beside_the_benchmarks_is_measured_by_name_and_by_place(pytester: pytest.Pytester) -> None:
    """The example of the hook's documentation runs; a place needs no hook; names are the strategies' own."""
    _write_the_example(pytester.path)
    pytester.makepyfile(near=_own("near", "Near"), test_it=_BENCHMARK)
    result = pytester.runpytest_inprocess("-s", "-v", "--strategy=slow,near:Near", *_FLAGS)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["llmgpu: *; strategies slow, near; *", "*slow-bs16 has 1*", "*near-bs16 has 0*"])
    assert _cases(pytester) == [
        ("slow-bs16", "test_it.py::test_hellaswag[slow-bs16]", "completed"),
        # As it was written: to know its name is to import it, which a run that selects others need not.
        ("near-bs16", "test_it.py::test_hellaswag[near:Near-bs16]", "completed"),
    ]


def test_a_strategy_of_an_installed_package_is_measured(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package brings one by its entry point, and its users choose it by name."""
    site = pytester.mkdir("site")
    (site / "far_strategies.py").write_text(_own("far_strategies", "Far"))
    metadata = site / "far_strategies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: far-strategies\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nfar = far_strategies\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    pytester.makepyfile(test_it=_BENCHMARK)
    result = pytester.runpytest_subprocess("--strategy=far", *_FLAGS)
    assert result.ret == 0
    assert _cases(pytester) == [("far-bs16", "test_it.py::test_hellaswag[far-bs16]", "completed")]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("registered", "flags", "complaint"),
    [
        (
            {5: "near:Near"},
            ["--strategy=pm"],
            "pytest_llmgpu_strategies: 5, the name of the strategy at near:Near, is not allowed: letters, digits, _, *",
        ),
        ({"a,b": "near:Near"}, [], "pytest_llmgpu_strategies: 'a,b', the name of the strategy at near:Near, is not *"),
        (
            {"mp": "near:Near"},
            [],
            "pytest_llmgpu_strategies: strategy 'mp' is at two places, near:Near and *LayerParallel",
        ),
        ({"near": "near.Near"}, [], "pytest_llmgpu_strategies: 'near.Near', the place of strategy 'near', is not *"),
        ({"close": "near:Near"}, ["--strategy=close"], "--strategy: near:Near is registered as 'close' and names *"),
        (
            {"near": "near:Nix"},
            ["--strategy=near"],
            "--strategy: strategy near:Nix cannot be imported: AttributeError: *",
        ),
        ({"near": "near:Near"}, ["--strategy=nera"], "--strategy: 'nera' is no strategy: allowed are iok, mp, near, *"),
    ],
)
def test_a_bad_registration_is_refused_before_anything_starts(
    pytester: pytest.Pytester, registered: dict[object, str], flags: list[str], complaint: str
) -> None:
    """One line names what is wrong, exit 4, also from a conftest that pytest finds only while it collects."""
    folder = pytester.mkdir("benchmarks")
    (folder / "conftest.py").write_text(f"def pytest_llmgpu_strategies():\n    return {registered}\n")
    (folder / "near.py").write_text(_own("near", "Near"))
    (folder / "test_it.py").write_text(textwrap.dedent(_BENCHMARK))
    result = pytester.runpytest_inprocess(*flags, *_FLAGS)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {complaint}"])
    assert not (pytester.path / ".llmgpu").exists()
