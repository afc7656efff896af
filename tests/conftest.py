"""Fixtures that more than one test file needs."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support import tiny_model
from support.prose import Prose, ProseFiles

from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.profiling import machine, nvml, profiler, recording
from pytest_llmgpu.profiling.machine import TorchFacts
from pytest_llmgpu.profiling.nvml import Inventory
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import LocalLauncher

# The same examples in every run, however slow the machine is. The import also stays in this process: Hypothesis is
# imported by the summary of every run of pytest, and pytester would drop it after each.
settings.register_profile("package", deadline=None, derandomize=True)
settings.load_profile("package")

# One thread here and in the ranks, before torch is imported: tests run side by side, and threads of one operation wait
# for each other in a loop, which takes up to ten times the work where cores are fewer than threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

StubEnvironment = Callable[..., dict[str, str]]
"""`nvml_stub(gpus=4, pcie_us=2000)`: the environment of a process that sees the stub instead of NVML."""


@pytest.fixture(autouse=True)
def _keep_torch(request: pytest.FixtureRequest) -> None:
    """Import what registers ops of torch before pytester does: it drops the modules of its run, and ops stay."""
    if "pytester" in request.fixturenames:
        importlib.import_module("transformers.models.llama.modeling_llama")


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the tiny model."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.write_model(folder)
    return folder


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


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whose torch is not probed in a process of its own."""
    facts = TorchFacts(version="2.13.0", why="torch is built without CUDA")
    monkeypatch.setattr(machine, "probe", lambda: facts)
    monkeypatch.setattr(nvml, "inventory", lambda: Inventory(why={"nvml": "no NVML in this test"}))


@pytest.fixture
def patient_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy or stops for seconds may start, read, mark and end a sampler slowly."""
    for limit in ("_HEADER_S", "_STREAM_S", "_END_S", "_FRESH_S"):
        monkeypatch.setattr(profiler, limit, 300.0)
    monkeypatch.setattr(recording, "_MARK_NEAR_S", 300.0)


@pytest.fixture(scope="session")
def bundled() -> ModelSource:
    """The model that comes with the package."""
    return models.resolve("bundled", texts=[], rootdir=Path.cwd())


@pytest.fixture(scope="session")
def gloo_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    """Two ranks on the CPU, for one model after another: their start takes seconds, so a test with them is slow."""
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


_PROSE = pytest.StashKey[ProseFiles]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what rewrites the kept texts."""
    parser.addoption("--update-prose", action="store_true", help="rewrite tests/*/prose.json by what the tests compare")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the files for the run, and handle the signals that a background job ignores: tests send them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if config.getoption("--update-prose") and hasattr(config, "workerinput"):
        raise pytest.UsageError("--update-prose: run it without -n, since one process has to write the files")
    config.stash[_PROSE] = ProseFiles(update=config.getoption("--update-prose"))


@pytest.hookimpl(tryfirst=True)  # before -k and -m leave tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start ranks as slow; keep which tests compare texts, if their files were collected whole."""
    for item in items:
        if "gloo_pair" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    if not (config.getoption("lf", default=False) or any("::" in argument for argument in config.args)):
        config.stash[_PROSE].collected(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test that no longer compares each of its texts."""
    yield
    texts = getattr(item, "funcargs", {}).get("prose")
    if texts is not None:
        texts.finish()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write what changed."""
    files = config.stash.get(_PROSE, None)
    if files is not None and files.update:
        files.write()


@pytest.fixture
def prose(request: pytest.FixtureRequest) -> Prose:
    """Return what texts are compared with: `assert prose == text`."""
    return request.config.stash[_PROSE].of(request.node)


@pytest.fixture
def prose_files(request: pytest.FixtureRequest) -> ProseFiles:
    """Return the files of kept texts."""
    return request.config.stash[_PROSE]
