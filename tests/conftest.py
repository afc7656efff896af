"""Fixtures that more than one test file needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.prose import PackageProse
from syrupy.assertion import SnapshotAssertion

from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import LocalLauncher

StubEnvironment = Callable[..., dict[str, str]]
"""`nvml_stub(gpus=4, pcie_us=2000)`: the environment of a process that sees the stub instead of NVML."""


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> StubEnvironment:
    """Compile the NVML stub once; return what makes an environment with it. Its settings: tests/support/nvml_stub.c."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the NVML stub needs a C compiler named cc")
    folder = tmp_path_factory.mktemp("nvml_stub")
    source, library = Path(__file__).parent / "support" / "nvml_stub.c", folder / "libnvidia-ml.so.1"
    flags = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}")
    subprocess.run([compiler, *flags, "-o", library, source], check=True)

    def environment(**settings: object) -> dict[str, str]:
        stub = {f"NVML_STUB_{name.upper()}": str(value) for name, value in settings.items()}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NVML_STUB_")}
        return {**clean, "LD_LIBRARY_PATH": str(folder), **stub}

    return environment


@pytest.fixture(scope="session")
def bundled() -> ModelSource:
    """The model that comes with the package."""
    return models.resolve("bundled", texts=[], rootdir=Path.cwd())


@pytest.fixture(scope="module")
def gloo_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    """Two ranks on the CPU, for one model after another: it is their start that takes time."""
    environments = [
        {
            "CUDA_VISIBLE_DEVICES": "",
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        for number in range(2)
    ]
    made = RankGroup(LocalLauncher(tmp_path_factory.mktemp("ranks")), environments)
    yield made
    made.kill()


@pytest.fixture
def prose(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """What a test compares texts with: `assert text == prose`; `pytest --snapshot-update` rewrites the texts."""
    return snapshot.use_extension(PackageProse)
