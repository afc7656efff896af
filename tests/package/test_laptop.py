from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support.verdict_factory import on_h200, timed

import pytest_llmgpu
from pytest_llmgpu.report.file import dump

_NEEDED = ("msgspec", "tabulate")
"""The only packages that a machine needs to judge reports."""


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that has only this package, msgspec and tabulate.

    It is like one made with `pip install --no-deps`. Files are copied, so that neither pip nor a network is needed.
    """
    folder = tmp_path_factory.mktemp("laptop")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for name in _NEEDED:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            if ".." not in file.parts:  # a script outside the package
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(str(distribution.locate_file(file))), packages / file)
    # From where it is imported: under tox these are the files of the wheel.
    source = Path(pytest_llmgpu.__file__).parent
    shutil.copytree(source, packages / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "bin" / "python"


def _run(laptop: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [laptop, *arguments], check=False, capture_output=True, text=True, cwd=folder, env=clean, timeout=300
    )


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Return a folder with a baseline and two candidates: an equal one and a slower one."""
    # One launch in each report shows no slowdown of 50 %; the tests here are about other things.
    text = "[[allow]]\ncase = '*'\nmetric = 'time'\nreason = 'one launch'\nup_to = 1.0\n"
    (tmp_path / "lenient.toml").write_text(text)
    dump(on_h200(), tmp_path / "base.json.gz")
    dump(on_h200(sha="b" * 40), tmp_path / "good.json")
    dump(on_h200([timed(40.0)]), tmp_path / "slow.json")
    return tmp_path


def test_the_environment_has_no_package_for_measuring(laptop: Path, tmp_path: Path) -> None:
    """The other tests in this file depend on it; the modules of pages and findings are imported in it all the same."""
    code = "import importlib.metadata as m; print(*sorted(one.metadata['Name'] for one in m.distributions()))"
    assert _run(laptop, tmp_path, "-c", code).stdout.split() == list(_NEEDED)
    for name in ("torch", "transformers", "pytest", "numpy", "scipy"):
        assert "ModuleNotFoundError" in _run(laptop, tmp_path, "-c", f"import {name}").stderr
    judging = "import pytest_llmgpu.render.html, pytest_llmgpu.analysis.findings, pytest_llmgpu.gate.judge"
    assert _run(laptop, tmp_path, "-c", judging).returncode == 0


@pytest.mark.parametrize(("head", "status", "state"), [("good.json", 0, "PASSED"), ("slow.json", 1, "REGRESSED")])
def test_the_gate_gives_the_same_verdicts_as_on_the_measuring_machine(
    head: str, status: int, state: str, laptop: Path, reports: Path
) -> None:
    """Exit status and verdicts are equal, and nothing is written to stderr."""
    gate = ["gate", "base.json.gz", head, "--policy", "lenient.toml"]
    done = _run(laptop, reports, "-m", "pytest_llmgpu.cli", *gate, "--json", "laptop.json")
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.startswith(state)
    command = [sys.executable, "-m", "pytest_llmgpu.cli", *gate, "--json", "here.json"]
    here = subprocess.run(command, check=False, capture_output=True, cwd=reports)
    assert here.returncode == status
    assert (reports / "here.json").read_bytes() == (reports / "laptop.json").read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "base.json.gz", "slow.json", "good.json"],
        ["gate", "--dump-policy"],
        ["promote", "good.json", "--to", "baseline.json.gz"],
        ["promote", "good.json"],
        ["show", "slow.json"],
        ["list"],
        ["schema"],
    ],
)
def test_every_command_for_reports_runs(arguments: list[str], laptop: Path, reports: Path) -> None:
    """All commands that need no GPU work."""
    done = _run(laptop, reports, "-m", "pytest_llmgpu.cli", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
