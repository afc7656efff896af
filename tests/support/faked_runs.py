"""Runs of pytest with stubbed measurements: a test sets the results, and no process starts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

# pytester forgets what a run inside this process has imported; a module that is here already keeps its identity.
import pytest_llmgpu.plugin.gate_items
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.profiling import machine, nvml
from pytest_llmgpu.profiling.machine import TorchFacts
from pytest_llmgpu.profiling.nvml import Inventory
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import Batches, CaseResult, Failure, Launch, Outcome
from pytest_llmgpu.session.runner import Request, Runner
from support import tiny_model
from support.report_factory import make_answers

with contextlib.suppress(ImportError):
    import vl_convert  # noqa: F401 - it can be imported once in a process, and pytester would forget that it was

BENCHMARK = """
    def test_hellaswag(llm, hellaswag, batch_size, measure):
        measure(llm, hellaswag, batch_size)
"""

_BATCHES = 10


@dataclasses.dataclass
class FakedRuns:
    """Runs of pytest and their stubbed measurements."""

    pytester: pytest.Pytester
    seconds: Callable[[int], float] = float
    """The seconds per batch by batch size."""
    outcome: Callable[[int], Outcome] = lambda _: "completed"
    """The outcome by batch size."""
    right: Callable[[int], int] = lambda _: tiny_model.ITEMS
    """The items with a right answer by batch size."""
    did: list[str] = dataclasses.field(default_factory=list)
    """The ids of measured cases and the ends of all processes, in order."""

    def __call__(self, *arguments: str, sizes: str = "1,4,8", cached: bool = False) -> pytest.RunResult:
        """Run pytest. By default a comparison passes one launch on a CPU, which shows no slowdown of 50 %."""
        flags = ["--llmgpu-dataset=items.jsonl", f"--llmgpu-batch-sizes={sizes}"]
        given = {argument.partition("=")[0] for argument in arguments}
        chosen = "--llmgpu-policy" in given or (self.pytester.path / "pyproject.toml").exists()
        if "--llmgpu-compare" in given and not chosen:
            flags.append("--llmgpu-policy=lenient.toml")
        return self.pytester.runpytest_inprocess(*([] if cached else ["-p", "no:cacheprovider"]), *flags, *arguments)

    def report(self, path: str = ".llmgpu/last.json") -> Report:
        """Read the report of a run."""
        return file.load(self.pytester.path / path)

    def start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the runner, torch's probe and NVML."""
        monkeypatch.setattr(machine, "probe", lambda: TorchFacts(version="2", why="torch is built without CUDA"))
        monkeypatch.setattr(nvml, "inventory", lambda: Inventory(why={"nvml": "no NVML in this test"}))
        monkeypatch.setattr(Runner, "run", lambda _, request, record: self._measure(request, record))
        monkeypatch.setattr(Runner, "close", lambda _: self.did.append("end"))
        tiny_model.write_dataset(Path(self.pytester.path) / "items.jsonl")
        self.pytester.makefile(".toml", lenient="largest_unseen_slowdown = 99")

    def _measure(self, request: Request, record: Callable[[CaseResult], None]) -> CaseResult:
        case = request.case
        size = case.batch_size
        self.did.append(case.id)
        # No two launches took equal times.
        launch = Launch(plan_sha256=f"{size}", load_s=10.0 + len(self.did) * 1e-9)
        result = CaseResult(id=case.id, key=case.key, case=case, outcome=self.outcome(size), launches=[launch])
        result.why["traffic"] = "it is faked"
        if result.outcome == "completed":
            right = self.right(size)
            launch.batches = Batches(
                latency_s=[self.seconds(size)] * _BATCHES,
                sequences=[size] * _BATCHES,
                tokens=[10 * size] * _BATCHES,
                padded_tokens=[10 * size] * _BATCHES,
            )
            launch.accuracy = make_answers([True] * right + [False] * (tiny_model.ITEMS - right))
        else:
            result.failure = Failure(phase="forward", message=f"it is {result.outcome}")
        record(result)
        return result
