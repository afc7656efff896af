"""The examples of docs/own-code.md run from end to end, in real processes on a CPU, and their faults are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# pytester forgets what a run inside this process has imported; a module that is here already keeps its identity.
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report

pytestmark = pytest.mark.usefixtures("no_gpu")

_PAGE = Path(__file__).parents[2] / "docs" / "own-code.md"
_FLAGS = ("-p", "no:cacheprovider", "--llmgpu-device=cpu", "--llmgpu-limit=4", "--llmgpu-batch-sizes=8")


def _write(section: str, folder: Path) -> None:
    """Write the files that a section of the page shows."""
    _, _, rest = _PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    for name, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", rest.partition("\n## ")[0], flags=re.DOTALL):
        (folder / name).write_text(text)


def _run(pytester: pytest.Pytester, *flags: str) -> tuple[pytest.RunResult, Report]:
    return pytester.runpytest_inprocess(*_FLAGS, *flags), file.load(pytester.path / ".llmgpu" / "last.json")


@pytest.mark.slow
def test_a_patched_model_is_measured_and_a_slower_patch_is_regressed(pytester: pytest.Pytester) -> None:
    """Ops have the module of the patch, the answers hold, and one more product in it is found and named."""
    _write("Patch a model", pytester.path)
    base, report = _run(pytester, "--llmgpu-save=base")
    base.assert_outcomes(passed=1)
    for case in report.cases:
        assert case.launches[0].work is not None
        modules = case.launches[0].work.ranks[0].ops_by_module or {}
        assert modules["layers.*.input_layernorm"] != modules["layers.*.post_attention_layernorm"]
    patch = pytester.path / "fused_norm.py"
    forward = "        return torch"
    slower = f"        hidden @ torch.eye(hidden.shape[-1])\n{forward}"
    patch.write_text(patch.read_text().replace(forward, slower))
    result, _ = _run(pytester, "--llmgpu-compare=base")
    result.stdout.fnmatch_lines(["REGRESSED: mp-bs8 FLOPs +*: 1 more aten::mm in each layers.[*].input_layernorm"])


@pytest.mark.slow
def test_a_module_without_transformers_is_scored_and_generates_no_text(pytester: pytest.Pytester) -> None:
    """Its logits suffice; what text needs besides is named before anything is measured."""
    _write("A module of your own", pytester.path)
    flags = ("--strategy=own_model:Own", "--llmgpu-load-format=dummy")
    result, report = _run(pytester, *flags)
    result.assert_outcomes(passed=1)
    (case,) = report.cases
    assert case.launches[0].work is not None
    assert case.launches[0].work.model is None
    assert case.launches[0].work.why["model"] == "the strategy's model has no config of transformers"
    result, report = _run(
        pytester, *flags, "--llmgpu-workload=generate", "--llmgpu-batch-sizes=4", "--llmgpu-new-tokens=2"
    )
    result.assert_outcomes(failed=1)
    assert report.cases[0].failure is not None
    assert report.cases[0].failure.message == (
        "ValueError: Network cannot generate text, it has no arguments past_key_values, position_ids, attention_mask "
        "of forward, no get_output_embeddings(), no Loaded.config: score it (--llmgpu-workload=score), or use a causal "
        "language model of transformers"
    )


@pytest.mark.slow
def test_each_folder_has_its_own_patches_and_a_patch_that_fails_is_an_error_of_its_case(
    pytester: pytest.Pytester,
) -> None:
    """Tests without a patch measure the plain model in other processes, whatever pytest names the modules."""
    test = "def test_it(llm, hellaswag, batch_size, measure):\n    measure(llm, hellaswag, batch_size)\n"
    conftest = "def pytest_llmgpu_model(loaded, case):\n    {}\n"
    for folder, line in {
        "broken": "loaded.model.no_such_part",
        "other": "return loaded.model",
        "patched": "loaded.model.patched = case.batch_size\n    print('patched', case.strategy)",
        "plain": "",
    }.items():
        pytester.mkdir(folder)
        (pytester.path / folder / "test_it.py").write_text(test)
        if line:
            (pytester.path / folder / "conftest.py").write_text(conftest.format(line))
    check = "    (found,) = llm.run(is_patched)\n    assert found == {}\n"
    function = "def is_patched(loaded):\n    return getattr(loaded.model, 'patched', None)\n\n\n"
    for folder, expected in {"patched": "8", "plain": "None"}.items():
        path = pytester.path / folder / f"test_{folder}.py"
        (pytester.path / folder / "test_it.py").rename(path)
        path.write_text(function + test + check.format(expected))
    _, report = _run(pytester, "--import-mode=importlib", "--llmgpu-work=off")
    assert {case.nodeid: case.outcome for case in report.cases} == {
        "broken/test_it.py::test_it[mp-bs8]": "error",
        "other/test_it.py::test_it[mp-bs8]": "error",
        "patched/test_patched.py::test_it[mp-bs8]": "completed",
        "plain/test_plain.py::test_it[mp-bs8]": "completed",
    }
    messages = [case.failure.message for case in report.cases if case.failure is not None]
    assert "has no attribute 'no_such_part'" in messages[0]
    assert messages[1].endswith(
        "other/conftest.py: pytest_llmgpu_model returned LlamaForCausalLM: change loaded.model in place and return "
        "None; a strategy of your own can return another model"
    )
