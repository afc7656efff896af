from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.repository import git

from pytest_llmgpu.cli import main
from pytest_llmgpu.gate.policy import Policy, load_policy

_PYPROJECT, _TEST, _WORKFLOW = "pyproject.toml", "benchmarks/test_inference.py", ".github/workflows/llm-inference.yml"
_PYTEST = '[project]\nname = "x"\n[tool.pytest.ini_options]\nminversion = "8"\n[tool.other]\na = 1'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository, in whose subfolder the command runs."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    return tmp_path


@pytest.mark.parametrize(("device", "times"), [("cpu", False), ("cuda", True)])
def test_a_new_repository_gets_four_parts(root: Path, llmgpu: Callable[..., str], device: str, times: bool) -> None:
    """With --yes their names are shown; on a CPU times are not gated. A second run changes nothing."""
    out = llmgpu("init", "--yes", "--device", device)
    written = {name: (root / name).read_text() for name in (_PYPROJECT, _TEST, _WORKFLOW)}
    assert f"\nwrite {_WORKFLOW}, {_TEST}, {_PYPROJECT}\n" in out
    assert len(out.splitlines()) < 15
    policy = load_policy(root / _PYPROJECT)
    assert [policy.time.gate, policy.first_token.gate, policy.token_time.gate] == [times] * 3
    assert policy.program == Policy().program
    assert ("runs-on: [self-hosted, gpu]" in written[_WORKFLOW]) is times
    assert "llmgpu_batch_sizes" in written[_PYPROJECT]
    assert "next:" not in llmgpu("init", "--yes", "--device", device)
    assert {name: (root / name).read_text() for name in written} == written


@pytest.mark.parametrize(
    ("name", "text", "options_in"),
    [
        (_PYPROJECT, _PYTEST, _PYPROJECT),
        (_PYPROJECT, '[tool.pytest.ini_options]\nllmgpu_model = "m"\n', None),
        (_PYPROJECT, '[tool.pytest]\nminversion = "8"\n', _PYPROJECT),
        (_PYPROJECT, '[tool]\npytest.minversion = "8"\n', "the table [tool.pytest] of pyproject.toml"),
        ("tox.ini", "[pytest]\n", "tox.ini"),
        ("tox.ini", "[tox]\n", _PYPROJECT),
        (_TEST, "mine", _PYPROJECT),
        (_WORKFLOW, "mine", _PYPROJECT),
    ],
)
def test_what_exists_is_kept(
    root: Path, llmgpu: Callable[..., str], name: str, text: str, options_in: str | None
) -> None:
    """Options are added to the table that pytest reads, and shown where another file or form has it."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    out = llmgpu("init", "--yes")
    project = (root / _PYPROJECT).read_text()
    assert set(text.splitlines()) <= set(path.read_text().splitlines())
    pytests = msgspec.toml.decode(project)["tool"].get("pytest", {})
    options = pytests.get("ini_options", pytests)
    assert ("llmgpu_batch_sizes" in options) is (options_in == _PYPROJECT)
    assert (f"add these options to {options_in}:" in out) is (options_in not in {None, _PYPROJECT})
    assert load_policy(root / _PYPROJECT) != Policy()
    assert ("-e . #" in (root / _WORKFLOW).read_text()) is ("[project]" in text)


@pytest.mark.parametrize(
    ("name", "text", "alone", "addopts"),
    [
        (_PYPROJECT, '[tool.pytest.ini_options]\naddopts = "-n 2 --reruns 1"\n', True, "-n 2 --reruns 1"),
        (_PYPROJECT, '[tool.pytest.ini_options]\naddopts = ["--numprocesses=2",\n"-q"]\n', True, "--numprocesses=2 -q"),
        (_PYPROJECT, '[tool.pytest.ini_options]\naddopts = "--no-header -ra"\n', False, "--no-header -ra"),
        (_PYPROJECT, _PYTEST, False, None),
        ("tox.ini", "[pytest]\naddopts = -n auto\n  --reruns=1\nminversion = 8\n", True, "-n auto --reruns=1"),
    ],
)
def test_commands_work_as_printed(
    root: Path, llmgpu: Callable[..., str], name: str, text: str, alone: bool, addopts: str | None
) -> None:
    """They are of the root of the repository, and without workers of xdist, in which nothing is measured.

    The workflow does not install the plugins that addopts need, which is stated, as is where own code is measured.
    """
    (root / name).write_text(text)
    before, _, steps = llmgpu("init", "--yes").partition("next:\n")
    assert before.endswith("see docs/own-code.md.\n")
    assert steps.splitlines()[0].strip() == f"cd {root}"
    assert ("pytest benchmarks -n 0 --llmgpu-save=base" in steps) is alone
    assert f"what addopts ({addopts}) and" in steps or addopts is None
    assert ("addopts" in steps) is (addopts is not None)
    assert ("pytest benchmarks -n 0 " in (root / _WORKFLOW).read_text()) is alone


@pytest.mark.parametrize(("answer", "status"), [("", 2), ("n\n", 2), ("y\n", 0)])
def test_files_are_shown_and_written_after_a_yes(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, status: int
) -> None:
    """Without a terminal there is no answer; with --yes no file is shown."""
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["init"]) == status
    assert (root / _PYPROJECT).exists() is (status == 0)
    shown = capsys.readouterr().out
    assert all(f"new file {name}\n" in shown for name in (_TEST, _WORKFLOW))
    assert "added to pyproject.toml\n\n[tool.pytest.ini_options]\nllmgpu_model" in shown


def test_a_file_that_is_no_toml_is_refused(root: Path, refused: Callable[..., str]) -> None:
    """Nothing is shown then."""
    (root / _PYPROJECT).write_text("a = ")
    assert "pyproject.toml: cannot be read" in refused("init", "--yes")
