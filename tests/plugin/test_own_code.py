"""The examples of docs/own-code.md run from end to end, in real processes on a CPU, and their faults are named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.report_factory import known
from support.repository import first_commit

# pytester forgets what a run inside this process has imported; a module that is here already keeps its identity.
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report

pytestmark = pytest.mark.usefixtures("no_gpu")

_PAGE = Path(__file__).parents[2] / "docs" / "own-code.md"
_FLAGS = ("-p", "no:cacheprovider", "--llmgpu-device=cpu", "--llmgpu-limit=4", "--llmgpu-batch-sizes=4")


def _write(section: str, folder: Path) -> None:
    """Write the files that a section of the page shows."""
    _, _, rest = _PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    for name, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", rest.partition("\n## ")[0], flags=re.DOTALL):
        (folder / name).write_text(text)


def _run(pytester: pytest.Pytester, *flags: str) -> tuple[pytest.RunResult, Report]:
    return pytester.runpytest_inprocess(*_FLAGS, *flags), file.load(pytester.path / ".llmgpu" / "last.json")


def _run_apart(pytester: pytest.Pytester, *flags: str) -> tuple[pytest.RunResult, Report]:
    """Run in a process of its own: an engine in the process of pytest imports torch there, which is possible once."""
    return pytester.runpytest_subprocess(*_FLAGS, *flags), file.load(pytester.path / ".llmgpu" / "last.json")


@pytest.mark.slow
def test_a_patched_model_is_measured_and_a_slower_patch_is_regressed(pytester: pytest.Pytester) -> None:
    """Ops have the module of the patch, the answers hold, and one more product in it is found and named."""
    _write("Patch a model", pytester.path)
    base, report = _run(pytester, "--llmgpu-save=base")
    base.assert_outcomes(passed=1)
    for case in report.cases:
        modules = known(case.launches[0].work).ranks[0].ops_by_module or {}
        assert modules["layers.*.input_layernorm"] != modules["layers.*.post_attention_layernorm"]
    patch = pytester.path / "fused_norm.py"
    forward = "        return torch"
    slower = f"        hidden @ torch.eye(hidden.shape[-1])\n{forward}"
    patch.write_text(patch.read_text().replace(forward, slower))
    result, _ = _run(pytester, "--llmgpu-compare=base")
    result.stdout.fnmatch_lines(["REGRESSED: mp-bs4 FLOPs +*: 1 more aten::mm in each layers.[*].input_layernorm"])


@pytest.mark.slow
def test_a_module_without_transformers_is_scored(pytester: pytest.Pytester) -> None:
    """Its logits suffice; there is no model of transformers that its bound could be computed for."""
    _write("A module of your own", pytester.path)
    result, report = _run(pytester, "--strategy=own_model:Own", "--llmgpu-load-format=dummy")
    result.assert_outcomes(passed=1)
    (case,) = report.cases
    work = known(case.launches[0].work)
    assert work.model is None
    assert work.why["model"] == "the strategy's model has no config of transformers"


@pytest.mark.slow
def test_an_engine_is_measured_and_a_slower_one_is_regressed(pytester: pytest.Pytester) -> None:
    """It is no bundled model, its ops have its modules, and one more product is found and named."""
    _write("An engine of your own", pytester.path)
    base, report = _run(pytester, "--llmgpu-save=base")
    base.assert_outcomes(passed=2)
    assert [case.case.model for case in report.cases] == ["engine MyEngine"] * 2
    assert [case.id for case in report.cases] == ["MyEngine-generate-bs4", "MyEngine-bs4"]
    engine = pytester.path / "my_engine.py"
    line = "            hidden = hidden + layer"
    engine.write_text(engine.read_text().replace(line, f"            layer(hidden)\n{line}"))
    result, _ = _run(pytester, "--llmgpu-compare=base")
    result.stdout.fnmatch_lines(["REGRESSED: MyEngine-*bs4 FLOPs +*: 64 more aten::addmm in layers.[*]*"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (
            "    return torch.relu",
            "    x @ up\n    return torch.relu",
            "FLOPs +50.00 %: 1 more aten::mm outside modules",
        ),
        ("relu", "sigmoid", "accuracy*"),
    ],
)
def test_a_function_alone_is_gated(pytester: pytest.Pytester, before: str, after: str, found: str) -> None:
    """One more product in it is named, and other answers fail."""
    _write("A function or a kernel alone", pytester.path)
    base, _ = _run(pytester, "--llmgpu-save=base")
    base.assert_outcomes(passed=1)
    kernel = pytester.path / "my_kernel.py"
    kernel.write_text(kernel.read_text().replace(before, after))
    result, _ = _run(pytester, "--llmgpu-compare=base")
    result.stdout.fnmatch_lines([f"REGRESSED: Mlp-bs4 {found}"])


@pytest.mark.slow
def test_continuous_batching_generates_the_texts_of_mp(pytester: pytest.Pytester) -> None:
    """Also as an object in this process, whose row says so, an engine without log-likelihoods is compared by tokens."""
    _write("Continuous batching of transformers", pytester.path)
    (pytester.path / "test_object.py").write_text(
        "class Wrong:\n"
        "    def generate(self, token_ids, new_tokens):\n"
        "        return [[7] * new_tokens for _ in token_ids]\n\n"
        "def test_wrong(measure, prompts, batch_size):\n"
        "    measure(Wrong(), prompts, batch_size)\n"
    )
    flags = ("--strategy=mp,transformers-cb", "--llmgpu-new-tokens=8", "--llmgpu-prompt-tokens=16")
    result, report = _run_apart(pytester, *flags)
    result.assert_outcomes(passed=3)
    batching, wrong = (
        next(one for one in report.cases if one.case.strategy == name) for name in ("transformers-cb", "Wrong")
    )
    comparison = known(batching.comparison)
    assert (comparison.flipped, known(batching.accuracy_check).ok) == ([], True)
    assert len(known(batching.launches[0].generation).step_s) == 7
    assert known(batching.launches[0].work).ranks[0].ops_by_module
    assert wrong.case.strategy_options["process"] == "pytest"
    assert wrong.comparison is None, "its model is not that of mp"


@pytest.mark.slow
def test_an_object_is_used_in_every_launch_and_one_that_cannot_stop_harms_nobody(pytester: pytest.Pytester) -> None:
    """A place may have the name `engine`; what an engine raises in this process has its traceback."""
    pytester.makepyfile(
        own="class Own:\n"
        "    def generate(self, token_ids, new_tokens):\n"
        "        assert not vars(self)\n"
        "        return [[7] * new_tokens for _ in token_ids]\n\n"
        "    def stop(self):\n"
        "        self.stopped = True\n"
        "        raise RuntimeError('stop failed')\n\n"
        "def engine(token_ids, new_tokens):\n    raise LookupError('no block is left')\n",
        test_it="import own\n"
        "here = own.Own()\n"
        "def test_here(measure, prompts, batch_size):\n    measure(here, prompts, batch_size)\n\n"
        "def test_raises(measure, prompts, batch_size):\n    measure(own.engine, prompts, batch_size)\n",
    )
    flags = ("--llmgpu-launches=2", "--llmgpu-work=off", "--llmgpu-new-tokens=4")
    result, report = _run_apart(pytester, *flags)
    result.assert_outcomes(passed=1, failed=1)
    assert [case.outcome for case in report.cases] == ["completed", "error"]
    assert len(report.cases[0].launches) == 2
    result.stdout.fnmatch_lines(["*own.py*line *in engine*", "*LookupError: no block is left*"])


@pytest.mark.slow
def test_a_wrong_engine_of_the_model_of_mp_fails(pytester: pytest.Pytester) -> None:
    """A server that answers by arithmetic runs no bundled model: most texts begin with another token."""
    _write("Continuous batching of transformers", pytester.path)
    stub = Path(__file__).parents[1] / "support" / "openai_stub.py"
    command = f"--llmgpu-server-command={sys.executable} {stub} {{port}} {{fault}} {{model}}"
    flags = ("--strategy=mp,openai", "--llmgpu-new-tokens=8")
    result, report = _run(pytester, *flags, command.replace("{fault}", "none"))
    result.assert_outcomes(passed=1, failed=1)
    server = report.cases[1]
    assert known(server.accuracy_check).ok is False
    assert len(known(server.launches[0].generation).step_s) == 7
    assert server.launches[0].why["work"].startswith("work cannot be recorded: the server computes")
    assert server.why["traffic"].startswith("the server computes")
    assert not [one for one in server.findings if one.code == "passes-failed"]
    assert server.launches[0].figures == {"prefix_cache_hits": 2.0 * 4}, "one batch of four, seen by two engines"
    result, report = _run(
        pytester, *flags[1:], "--strategy=openai", command.replace("{fault}", "never"), "--llmgpu-load-timeout=8"
    )
    result.assert_outcomes(failed=1)
    assert report.cases[0].outcome == "timeout"


@pytest.mark.slow
def test_a_figure_of_ones_own_is_gated(pytester: pytest.Pytester) -> None:
    """A cache that is too small is a regression."""
    _write("A figure of your own", pytester.path)
    base, report = _run(pytester, "--llmgpu-work=off", "--llmgpu-save=base")
    base.assert_outcomes(passed=1)
    assert report.cases[0].launches[0].figures == {"cache_hit_rate": 0.75}
    test = pytester.path / "test_cache.py"
    test.write_text(test.read_text().replace("maxsize=1", "maxsize=0"))
    result, _ = _run(pytester, "--llmgpu-work=off", "--llmgpu-compare=base")
    result.stdout.fnmatch_lines(["REGRESSED: mp-bs4 cache hit rate -100.0 % (0, was 0.75)*"])


@pytest.mark.slow
def test_each_folder_has_its_own_patches(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A patch that fails is an error of its case; other folders have other processes, whatever pytest calls them.

    A module that a patch imported from another tree than that of the commit is named.
    """
    test = "def test_it(llm, hellaswag, batch_size, measure):\n    measure(llm, hellaswag, batch_size)\n"
    lines = {"broken": "loaded.model.no_such_part", "patched": "import engine; print('patched', case.batch_size)"}
    for folder, line in lines.items():
        pytester.mkdir(folder)
        (pytester.path / folder / f"test_{folder}.py").write_text(test)
        (pytester.path / folder / "conftest.py").write_text(f"def pytest_llmgpu_model(loaded, case):\n    {line}\n")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for tree in (pytester.path, elsewhere):
        (tree / "engine.py").write_text("")
    first_commit(pytester.path)
    monkeypatch.syspath_prepend(elsewhere)
    result, report = _run(pytester, "--import-mode=importlib", "--llmgpu-work=off", "-rP")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["patched 4", "note: the report names commit *, but module engine was imported from *"])
    assert list(report.commit.imported_from) == ["engine"]
    broken, _ = report.cases
    assert "has no attribute 'no_such_part'" in known(broken.failure).message
