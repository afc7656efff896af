"""What the tests on GPUs share: ranks without the plugin, and runs of pytest with a model that loads in a second."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_llmgpu.engines.protocol import Engine
from pytest_llmgpu.inference import tasks
from pytest_llmgpu.inference.bundled import PRESETS, save_tokenizer
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import registered, worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import LocalLauncher
from pytest_llmgpu.report import file
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import DeviceMemory
from pytest_llmgpu.strategies.deepspeed import kernels

WAIT_S = 300.0
LAYERS = 4
"""The layers of the narrow model; they are as wide as those of LLaMA-7B."""
ONE_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here"),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def write_narrow_model(folder: Path, texts: list[str], *, layers: int = LAYERS, vocabulary: int = 32_000) -> None:
    """Write the config of a model of 7B's width and few layers, whose weights are random, and its tokenizer."""
    folder.mkdir(parents=True)
    save_tokenizer(texts, vocabulary, folder)
    fields = {**PRESETS["llama-7b"], "num_hidden_layers": layers, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**fields, "architectures": ["LlamaForCausalLM"]}))


class Ranks:
    """The processes of a strategy with a loaded model."""

    def __init__(self, group: RankGroup, case: Case, memory: list[DeviceMemory]) -> None:
        self._group = group
        self.case = case
        self.memory = memory
        """The memory of each device after loading."""

    def ask(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the answer of each rank."""
        return self._group.ask(fn, *arguments, phase="forward", timeout_s=WAIT_S)


@contextmanager
def started(folder: Path, case: Case, source: ModelSource, dataset: Dataset) -> Iterator[Ranks]:
    """While entered, the ranks of a case have loaded its model and have its dataset."""
    if case.backend == "deepspeed":
        need_deepspeed()
    place = registered.find(case.strategy)
    strategy = registered.make(place)
    assert not isinstance(strategy, Engine)
    if case.strategy == "iok":
        try:
            kernels.check()
        except ValueError as error:
            pytest.skip(str(error))
    strategy.build(case, print)
    count = strategy.ranks(case.devices)
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    numbers = [{**common, "RANK": str(number), "LOCAL_RANK": str(number)} for number in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    group = RankGroup(LocalLauncher(folder), numbers if count > 1 else [{}])
    try:
        replies = group.ask(worker.load, case, source, place, phase="load", timeout_s=WAIT_S)
        task = tasks.BUILT_IN[dataset.task]
        group.ask(worker.give, dataset.sha256, dataset.items, task, phase="load", timeout_s=WAIT_S)
        yield Ranks(group, case, [device for reply in replies for device in reply])
    finally:
        group.kill()


def need_deepspeed() -> None:
    """Skip a test where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs the extra deepspeed")


def run_pytest(folder: Path, test: str, *flags: str, strategies: str = "") -> tuple[int, Report]:
    """Run a test in a new folder, where `strategies` is the module `own`; return the exit status and the report."""
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(textwrap.dedent(test))
    (folder / "own.py").write_text(textwrap.dedent(strategies))
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "test_it.py", *flags]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    print(done.stdout[-8000:], done.stderr[-2000:])
    return done.returncode, file.load(folder / ".llmgpu" / "last.json")
