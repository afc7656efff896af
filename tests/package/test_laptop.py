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
from support.judged_reports import on_h200, timed

import pytest_llmgpu
from pytest_llmgpu.report.file import dump

_NEEDED = ("msgspec", "tabulate")
"""All that a machine needs on which reports are judged."""


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that has this package, msgspec and tabulate, and nothing else.

    As `pip install --no-deps` leaves it: without what measuring needs, and without pip, so that no network is needed.
    """
    folder = tmp_path_factory.mktemp("laptop")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for name in _NEEDED:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            if ".." not in file.parts:  # a command of its own, and no part of the library
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(str(distribution.locate_file(file))), packages / file)
    # From where it is imported: where the tests run on a wheel, as under tox, the wheel's own files.
    source = Path(pytest_llmgpu.__file__).parent
    shutil.copytree(source, packages / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "bin" / "python"


def _run(laptop: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [laptop, *arguments], check=False, capture_output=True, text=True, cwd=folder, env=clean, timeout=60
    )


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Return a folder with a baseline and three candidates: one as good, one slower, one with launches."""
    dump(on_h200(), tmp_path / "base.json.gz")
    dump(on_h200(sha="b" * 40), tmp_path / "good.json")
    dump(on_h200([timed(4.0)]), tmp_path / "slow.json")
    dump(on_h200([timed(1.0, 1.001, 0.999)]), tmp_path / "launches.json")
    return tmp_path


def test_the_environment_has_nothing_that_measuring_needs(laptop: Path, tmp_path: Path) -> None:
    """Else the other tests here would show nothing."""
    code = "import importlib.metadata as m; print(*sorted(one.metadata['Name'] for one in m.distributions()))"
    assert _run(laptop, tmp_path, "-c", code).stdout.split() == list(_NEEDED)
    for name in ("torch", "transformers", "pytest", "numpy", "scipy"):
        assert "ModuleNotFoundError" in _run(laptop, tmp_path, "-c", f"import {name}").stderr


@pytest.mark.parametrize(("head", "status", "said"), [("good.json", 0, "PASSED"), ("slow.json", 1, "REGRESSED")])
def test_the_gate_judges(head: str, status: int, said: str, laptop: Path, reports: Path) -> None:
    """With its exit status, its table and nothing on stderr; the same bytes as on the machine that measures."""
    done = _run(laptop, reports, "-m", "pytest_llmgpu.cli", "gate", "base.json.gz", head, "--json", "laptop.json")
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.splitlines()[-1].startswith(said)
    command = [sys.executable, "-m", "pytest_llmgpu.cli", "gate", "base.json.gz", head, "--json", "here.json"]
    here = subprocess.run(command, check=False, capture_output=True, cwd=reports)
    assert here.returncode == status
    assert (reports / "here.json").read_bytes() == (reports / "laptop.json").read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "base.json.gz", "slow.json"],
        ["gate", "--dump-policy"],
        ["calibrate", "launches.json"],
        ["promote", "good.json", "--to", "baseline.json.gz"],
        ["promote", "good.json"],
        ["show", "slow.json"],
        ["list"],
        ["schema"],
    ],
)
def test_every_command_for_reports_runs(arguments: list[str], laptop: Path, reports: Path) -> None:
    """A laptop does all that needs no GPU."""
    done = _run(laptop, reports, "-m", "pytest_llmgpu.cli", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads TOML by the package tomli")
def test_a_policy_is_read(laptop: Path, reports: Path) -> None:
    """TOML needs no package of its own."""
    (reports / "pyproject.toml").write_text("[tool.llmgpu.gate]\ntime.margin = 0.9\n")
    done = _run(laptop, reports, "-m", "pytest_llmgpu.cli", "gate", "base.json.gz", "slow.json")
    assert (done.returncode, done.stderr) == (0, "")
