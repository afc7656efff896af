"""Runs of pytest with stubbed measurements: a test sets the results, and no process starts."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - it can be imported once in a process, and pytester would forget that it was

# pytester forgets what a run inside this process has imported; a module that is here already keeps its identity.
import pytest_llmgpu.plugin.gate_items
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.gate import judge
from pytest_llmgpu.profiling import machine, nvml
from pytest_llmgpu.profiling.machine import TorchFacts
from pytest_llmgpu.profiling.nvml import Inventory
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.local import LocalLauncher, RankFailedError
from pytest_llmgpu.ranks.serving import describe, failure_of
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import Batches, CaseResult, Failure, Launch, Outcome, Phase
from pytest_llmgpu.session.runner import CaseRequest, Runner
from support import tiny_model
from support.report_factory import make_answers

with contextlib.suppress(ImportError):
    import vl_convert  # noqa: F401 - as torch above

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
    fits: float = math.inf
    """The largest batch size that fits in memory."""
    phase: Phase = "forward"
    """The phase of every failure."""
    requests: list[CaseRequest] = dataclasses.field(default_factory=list)
    """The requests of measured cases."""
    expected: list[str] = dataclasses.field(default_factory=list)
    """The loading of each case that the runner knew ahead when a case began."""
    did: list[str] = dataclasses.field(default_factory=list)
    """The ids of measured cases and the ends of all processes, in order."""

    _out_of_memory: dict[str, float] = dataclasses.field(default_factory=dict)
    """The batch size that was out of memory, by series."""
    _output: str = ""
    """The output of the functions of tests."""

    def __call__(self, *arguments: str, sizes: str = "1,4,8", cached: bool = False) -> pytest.RunResult:
        """Run pytest. By default a comparison passes one launch on a CPU, which shows no slowdown of 50 %."""
        flags = ["--llmgpu-dataset=items.jsonl", f"--llmgpu-batch-sizes={sizes}"]
        self._out_of_memory.clear()
        return self.pytester.runpytest_inprocess(*([] if cached else ["-p", "no:cacheprovider"]), *flags, *arguments)

    def report(self, path: str = ".llmgpu/last.json") -> Report:
        """Read the report of a run."""
        return file.load(self.pytester.path / path)

    def outcomes(self) -> dict[str, str]:
        """Read the outcome of each case from the report of the last run."""
        return {case.id: case.outcome for case in self.report().cases}

    @property
    def measured(self) -> list[str]:
        """The ids of measured cases, in order."""
        return [name for name in self.did if name != "end"]

    def start(self, monkeypatch: pytest.MonkeyPatch) -> FakedRuns:
        """Replace the runner, torch's probe and NVML, and write the benchmark and its dataset."""
        self.pytester.makepyfile(test_it=BENCHMARK)
        monkeypatch.setattr(machine, "probe", lambda: TorchFacts(version="2", why="torch is built without CUDA"))
        monkeypatch.setattr(nvml, "inventory", lambda: Inventory(why={"nvml": "no NVML in this test"}))
        monkeypatch.setattr(Runner, "run", lambda *asked: self._measure(*asked))  # noqa: PLW0108 - a method of the runner
        monkeypatch.setattr(Runner, "ask", lambda _runner, _request, *asked: self._ask(*asked))
        monkeypatch.setattr(LocalLauncher, "take_output", lambda *_: {0: text} if (text := self._take_output()) else {})
        monkeypatch.setattr(Runner, "close", lambda _: self.did.append("end"))
        tiny_model.write_dataset(Path(self.pytester.path) / "items.jsonl")
        monkeypatch.setattr(judge, "LARGEST_UNSEEN", 99.0)
        return self

    def _measure(self, runner: Runner, request: CaseRequest, record: Callable[[CaseResult], None]) -> CaseResult:
        case = request.case
        self.expected = [one.case.loading for one in runner.expected]
        size = case.batch_size
        self.did.append(case.id)
        self.requests.append(request)
        # No two launches took equal times.
        launch = Launch(plan_sha256=f"{size}", load_s=10.0 + len(self.did) * 1e-9)
        outcome: Outcome = self.outcome(size)
        if size > self.fits:
            outcome = "skipped_after_oom" if size >= self._out_of_memory.get(case.series, math.inf) else "oom"
            self._out_of_memory[case.series] = min(size, self._out_of_memory.get(case.series, math.inf))
        result = CaseResult(id=case.id, key=case.key, case=case, outcome=outcome, launches=[launch])
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
            result.launches = [] if outcome == "skipped_after_oom" else result.launches
            result.failure = Failure(phase=self.phase, message=f"it is {result.outcome}")
        record(result)
        return result

    def _ask(self, call: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Run the function of a test in this process; what it prints is the output of rank 0."""
        assert call is worker.call, "no other question is answered"
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                return [fn(None, *args)]
        except BaseException as error:  # noqa: BLE001 - a rank answers every error as plain records
            printed.write(traceback.format_exc())
            raise RankFailedError(*failure_of(error, self.phase), raised=describe(error)) from None
        finally:
            self._output += printed.getvalue()

    def _take_output(self) -> str:
        text, self._output = self._output, ""
        return text
