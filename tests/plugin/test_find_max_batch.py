"""--llmgpu-find-max-batch as its users meet it: with an emulated GPU, and with real processes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import tiny_model
from support.report_factory import GIB

# pytester forgets what a run inside this process has imported; a module that is here already keeps its identity.
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.profiling import machine as environment
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.profiling.nvml import Inventory
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Gpu, Report
from pytest_llmgpu.report.result import Batches, CaseResult, Failure, Launch, Outcome, Phase
from pytest_llmgpu.session.runner import Request, Runner

Run = Callable[..., pytest.RunResult]

_BENCHMARK = """
    def test_hellaswag(llm, hellaswag, batch_size, measure):
        measure(llm, hellaswag, batch_size)
"""
_FACTS = TorchFacts(version="2.13.0", why="torch is built without CUDA")
_GPU = Gpu(index=0, uuid="GPU-0", name="H", memory_bytes=32 * GIB)


class _EmulatedRunner:
    """A stub of `Runner.run`: batch sizes up to `fits` complete."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.phase: Phase = "forward"
        self.endings: dict[int, Outcome] = {}
        """Maps a batch size to another outcome."""
        self._out_of_memory: dict[str, int] = {}

    def __call__(self, request: Request, record: Callable[[CaseResult], None]) -> CaseResult:
        case = request.case
        size = case.batch_size
        result = CaseResult(id=case.id, key=case.key, case=case, outcome=self.endings.get(size, "completed"))
        if self._out_of_memory.get(case.series, size + 1) <= size:
            result.outcome = "skipped_after_oom"
        elif size > self.fits:
            result.outcome = "oom"
            result.failure = Failure(phase=self.phase, message="CUDA out of memory")
            self._out_of_memory[case.series] = size
        else:
            batches = Batches(latency_s=[0.1], sequences=[size], tokens=[10 * size], padded_tokens=[10 * size])
            result.launches.append(Launch(batches=batches))
        record(result)
        return result


@pytest.fixture
def gpus() -> list[Gpu]:
    """Return the GPUs that NVML lists: none, unless a GPU is emulated."""
    return []


@pytest.fixture
def run(pytester: pytest.Pytester, model: Path, gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs pytest on the tiny model on a CPU."""
    monkeypatch.setattr(environment, "probe", lambda: _FACTS)
    monkeypatch.setattr(nvml, "inventory", lambda: Inventory(gpus=gpus, why={"nvml": "no NVML in this test"}))
    tiny_model.write_dataset(pytester.path / "items.jsonl")
    pytester.makepyfile(test_it=_BENCHMARK)

    def run_pytest(*arguments: str, sizes: str) -> pytest.RunResult:
        flags = [f"--llmgpu-model={model}", "--llmgpu-dataset=items.jsonl", f"--llmgpu-batch-sizes={sizes}"]
        return pytester.runpytest_inprocess("-v", "-p", "no:cacheprovider", *flags, *arguments)

    return run_pytest


@pytest.fixture
def emulated(gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> _EmulatedRunner:
    """Emulate a machine with one GPU on which batch sizes up to 13 fit."""
    gpus.append(_GPU)
    machine = Machine(device="cuda", devices=1, gpus=[_GPU], facts=_FACTS)
    monkeypatch.setattr(environment, "machine", lambda *_: machine)
    runner = _EmulatedRunner(fits=13)
    monkeypatch.setattr(Runner, "run", lambda _self, request, record: runner(request, record))
    return runner


def _report(pytester: pytest.Pytester) -> Report:
    return file.load(pytester.path / ".llmgpu" / "last.json")


def _outcomes(pytester: pytest.Pytester) -> dict[str, str]:
    return {case.id: case.outcome for case in _report(pytester).cases}


@pytest.mark.usefixtures("emulated")
def test_the_largest_that_fits_is_measured(pytester: pytest.Pytester, run: Run) -> None:
    """After the first out of memory the interval is halved, before larger sizes are skipped."""
    result = run("--llmgpu-find-max-batch", sizes="1,2,4,8,16,24")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*mp-bs16? OOM*", "*mp-bs24? OOM*", "*4 passed, 2 oom*"])
    assert list(_outcomes(pytester).items())[4:] == [
        ("mp-bs16", "oom"),
        ("mp-bs12", "completed"),
        ("mp-bs14", "oom"),
        ("mp-bs13", "completed"),
        ("mp-bs24", "skipped_after_oom"),
    ]


@pytest.mark.usefixtures("emulated")
def test_probes_belong_to_the_test_that_was_out_of_memory(pytester: pytest.Pytester, run: Run) -> None:
    """The searched cases have the id of the test, and the run is complete."""
    run("--llmgpu-find-max-batch", sizes="1,2,4,8,16")
    written = _report(pytester)
    probes = [case for case in written.cases if case.case.batch_size in (12, 13, 14)]
    assert [case.nodeid for case in probes] == ["test_it.py::test_hellaswag[mp-bs16]"] * 3
    assert probes[0].sequences_per_s is not None, "derived as of any case"
    assert (written.session.complete, written.session.collected) == (True, 5)
    assert written.options["--llmgpu-find-max-batch"] is True
    (found,) = written.capacity
    assert (found.largest_fit, found.smallest_oom) == (13, 14)


@pytest.mark.usefixtures("emulated")
def test_no_search_without_the_option(pytester: pytest.Pytester, run: Run) -> None:
    """Without the option only the listed batch sizes are measured."""
    run(sizes="8,16")
    assert _outcomes(pytester) == {"mp-bs8": "completed", "mp-bs16": "oom"}


@pytest.mark.usefixtures("emulated")
def test_a_marker_asks_for_one_test(pytester: pytest.Pytester, run: Run) -> None:
    """A marker can set the option for one test."""
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.llmgpu(find_max_batch=True)
        def test_hellaswag(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)
        """
    )
    run(sizes="12,16")
    assert _outcomes(pytester) == {"mp-bs12": "completed", "mp-bs16": "oom", "mp-bs14": "oom", "mp-bs13": "completed"}


@pytest.mark.usefixtures("emulated")
def test_where_all_fit_there_is_nothing_to_find(pytester: pytest.Pytester, run: Run) -> None:
    """No batch size above the list is measured."""
    assert run("--llmgpu-find-max-batch", sizes="1,8").ret == 0
    assert _outcomes(pytester) == {"mp-bs1": "completed", "mp-bs8": "completed"}


@pytest.mark.usefixtures("emulated")
def test_probes_do_not_excuse_a_list_of_which_nothing_fits(pytester: pytest.Pytester, run: Run) -> None:
    """The test fails as it does without the search, and the report has the size that fits."""
    result = run("--llmgpu-find-max-batch", sizes="16")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no batch size of this model and strategy completed*", "*1 failed*"])
    assert _outcomes(pytester)["mp-bs13"] == "completed"


def test_a_model_that_does_not_load_is_not_searched(
    pytester: pytest.Pytester, run: Run, emulated: _EmulatedRunner
) -> None:
    """Out of memory while the model is loaded starts no search."""
    emulated.fits, emulated.phase = 0, "load"
    run("--llmgpu-find-max-batch", sizes="4,8")
    assert _outcomes(pytester) == {"mp-bs4": "oom", "mp-bs8": "skipped_after_oom"}


def test_a_probe_that_crashes_ends_the_search_and_not_the_test(
    pytester: pytest.Pytester, run: Run, emulated: _EmulatedRunner
) -> None:
    """A failed search case is in the report, and the test keeps the outcome of its own case."""
    emulated.endings[12] = "crashed"
    result = run("--llmgpu-find-max-batch", sizes="4,8,16")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*2 passed, 1 oom*"])
    assert _outcomes(pytester)["mp-bs12"] == "crashed"
    assert "mp-bs14" not in _outcomes(pytester)


@pytest.mark.usefixtures("emulated")
def test_a_size_that_the_strategy_refuses_ends_the_search(pytester: pytest.Pytester, run: Run) -> None:
    """A strategy may refuse batch sizes of the search, and no test fails."""
    pytester.makepyfile(
        even="""
        from pytest_llmgpu.strategies.mp import LayerParallel

        class Even(LayerParallel):
            name = "even"

            def check(self, case, source):
                if case.batch_size % 2:
                    raise ValueError(f"batch size {case.batch_size} is odd")
        """
    )
    assert run("--strategy=even:Even", "--llmgpu-find-max-batch", sizes="12,16").ret == 0
    assert _outcomes(pytester) == {"even-bs12": "completed", "even-bs16": "oom", "even-bs14": "oom"}


def test_each_strategy_is_searched_by_itself(pytester: pytest.Pytester, run: Run, emulated: _EmulatedRunner) -> None:
    """Each series has its own search."""
    emulated.fits = 3
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.llmgpu(dtype="float16")
        def test_half(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)

        @pytest.mark.llmgpu(dtype="float32")
        def test_single(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)
        """
    )
    run("--llmgpu-find-max-batch", sizes="1,4")
    ran = [(case.case.dtype, case.case.batch_size, case.outcome) for case in _report(pytester).cases]
    each = [(1, "completed"), (4, "oom"), (2, "completed"), (3, "completed")]
    assert ran == [(dtype, *case) for dtype in ("float16", "float32") for case in each]


@pytest.mark.slow
def test_real_processes_start_again_for_each_probe(pytester: pytest.Pytester, run: Run) -> None:
    """Each probe that is out of memory ends the ranks."""
    pytester.makepyfile(
        small="""
        import torch
        from pytest_llmgpu.strategies.mp import LayerParallel

        def limit(module, args, kwargs):
            if kwargs["input_ids"].shape[0] > 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        class Small(LayerParallel):
            name = "small"

            def load(self, case, source):
                loaded = super().load(case, source)
                loaded.model.register_forward_pre_hook(limit, with_kwargs=True)
                return loaded
        """
    )
    result = run("--strategy=small:Small", "--llmgpu-find-max-batch", sizes="4,7,9")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*1 passed, 2 oom*"])
    assert list(_outcomes(pytester).items()) == [
        ("small-bs4", "completed"),
        ("small-bs7", "oom"),
        ("small-bs5", "completed"),
        ("small-bs6", "oom"),
        ("small-bs9", "skipped_after_oom"),
    ]
    work = {case.id: case.launches[0].work for case in _report(pytester).cases if case.outcome == "completed"}
    assert work["small-bs4"] is not None
    assert work["small-bs5"] is None, "a probe runs no work passes"
