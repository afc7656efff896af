"""The plugin as its users meet it: real processes and a real model on a CPU, or a stand-in for the runner."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support import tiny_model
from support.faked_runs import BENCHMARK, FakedRuns
from support.hurried_clock import hurry

from pytest_llmgpu.profiling import machine, nvml
from pytest_llmgpu.profiling.nvml import Inventory
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Gpu, Report
from pytest_llmgpu.session.runner import Runner

Run = Callable[..., pytest.RunResult]

_MISBEHAVING = """
    import os, signal, threading
    import pytest
    import torch

    def misbehave(loaded, what, rows):
        def hook(module, args, kwargs):
            if kwargs["input_ids"].shape[0] < rows:
                return
            if what == "oom":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if what == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            if what == "hang":
                open(HUNG, "w").close()
                threading.Event().wait()
            if what.startswith("SIG"):
                os.kill(os.getppid(), getattr(signal, what))
            raise ValueError("the layer is broken")
        loaded.model.register_forward_pre_hook(hook, with_kwargs=True)

    HUNG = os.path.abspath("hung")

    def test_hellaswag(llm, hellaswag, batch_size, measure):
        if os.path.exists(HUNG):
            os.remove(HUNG)
        if what := {what}.get(batch_size):
            llm.run(misbehave, what, {rows})
        measure(llm, hellaswag, batch_size)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, model: Path, no_gpu: None) -> Run:  # noqa: ARG001 - nothing is probed
    """Return a function that runs pytest on the tiny model without probing torch."""
    tiny_model.write_dataset(pytester.path / "items.jsonl")

    def run_pytest(*arguments: str, sizes: str = "1,4,8", in_process: bool = True) -> pytest.RunResult:
        flags = [f"--llmgpu-model={model}", "--llmgpu-dataset=items.jsonl", f"--llmgpu-batch-sizes={sizes}"]
        start = pytester.runpytest_inprocess if in_process else pytester.runpytest_subprocess
        return start("-p", "no:cacheprovider", *flags, *arguments)

    return run_pytest


@pytest.fixture
def faked(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> FakedRuns:
    """Return a function that runs pytest with measurements of no process: nothing but pytest's part is tested."""
    runs = FakedRuns(pytester)
    runs.start(monkeypatch)
    return runs


def _report(pytester: pytest.Pytester) -> Report:
    return file.load(pytester.path / ".llmgpu" / "last.json")


def _outcomes(pytester: pytest.Pytester) -> dict[str, str]:
    return {case.id: case.outcome for case in _report(pytester).cases}


def _misbehave(what: Mapping[int, str], rows: int = 1) -> str:
    """Return a test whose model misbehaves from a batch size on, at batches of that many rows or more."""
    return _MISBEHAVING.format(what=dict(what), rows=rows)


@pytest.mark.slow
def test_a_sweep_measures_each_batch_size_in_ascending_order(pytester: pytest.Pytester, run: Run, model: Path) -> None:
    """One command measures, prints and writes, in ascending order; a case runs again by hand, for a debugger."""
    pytester.makepyfile(test_it=BENCHMARK)
    result = run("-v", "test_it.py::test_hellaswag[mp-bs8]", "test_it.py::test_hellaswag[mp-bs1]")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "llmgpu: CPU, * cores (*; strategy mp; batch sizes 1, 8",
            "*test_hellaswag?mp-bs1? PASSED*",
            "*test_hellaswag?mp-bs8? PASSED*",
            "*LLM inference*",
            "strategy *batch *time *acc_norm*",
            "report: .llmgpu/last.json",
            "next: llmgpu html latest *",
        ]
    )
    assert "\x1b7" not in result.stdout.str(), "a pipe sees no live line"
    written = _report(pytester)
    assert [case.id for case in written.cases] == ["mp-bs1", "mp-bs8"]
    assert (written.session.complete, written.session.exit_status, written.session.collected) == (True, 0, 2)
    for case in written.cases:
        (launch,) = case.launches
        assert sum(launch.batches.sequences) == tiny_model.SEQUENCES
        assert all(latency > 0 for latency in launch.batches.latency_s)
        assert launch.accuracy is not None
        assert launch.accuracy.items == tiny_model.ITEMS
        assert launch.profile is not None
        assert "profile" in launch.profile.why
        assert launch.host is not None
        assert (len(launch.host.threads), launch.host.cpu_s[0] > 0) == (1, True)
        assert case.traffic is not None
        assert (case.traffic.ranks, case.traffic.wire_bytes_per_sequence) == ([[]], 0.0), "one process sends nothing"
        assert "traffic" not in case.why
    assert written.cases[0].launches[0].load_s == written.cases[1].launches[0].load_s, "the model is loaded once"
    assert str(pytester.path) not in (pytester.path / ".llmgpu" / "last.json").read_text()
    by_hand = [sys.executable, "-m", "pytest_llmgpu.ranks", ".llmgpu/last.json", "mp-bs8", f"--model={model}"]
    answer = json.loads(subprocess.run(by_hand, stdout=subprocess.PIPE, check=True).stdout)
    measured = written.cases[1].launches[0]
    assert measured.accuracy is not None
    assert answer["accuracy"]["predictions"] == measured.accuracy.predictions
    assert answer["plan_sha256"] == measured.plan_sha256


@pytest.mark.slow
def test_out_of_memory_is_expected_and_ends_the_larger_sizes(pytester: pytest.Pytester, run: Run) -> None:
    """Batch sizes that fit pass, the others are shown as OOM with the reason, and nothing fails."""
    pytester.makepyfile(test_it=_misbehave({1: "oom"}, rows=4))
    result = run("-v", sizes="1,2,4,8")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*mp-bs2? PASSED*", "*mp-bs4? OOM*", "*mp-bs8? OOM*", "*2 passed, 2 oom*"])
    assert _outcomes(pytester) == {
        "mp-bs1": "completed",
        "mp-bs2": "completed",
        "mp-bs4": "oom",
        "mp-bs8": "skipped_after_oom",
    }
    failure = _report(pytester).cases[2].failure
    assert failure is not None
    assert (failure.phase, failure.evidence, failure.requested_bytes) == ("forward", "torch's allocator", 2 * 2**30)
    assert _report(pytester).cases[3].launches == []


def test_a_series_of_which_nothing_fits_fails(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """A run in which every batch size is out of memory fails."""
    pytester.makepyfile(test_it=BENCHMARK)
    faked.outcome = lambda _: "oom"
    result = faked()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no batch size of this model and strategy completed*", "*1 failed, 2 oom*"])
    assert _report(pytester).session.failed_tests == 1


def test_a_series_may_be_expected_not_to_fit(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """With `expect_oom` no batch size needs to complete."""
    marker = "@pytest.mark.llmgpu(expect_oom=True)"
    pytester.makepyfile(test_it=f"import pytest\n\n{marker}\n{textwrap.dedent(BENCHMARK)}")
    faked.outcome = lambda _: "oom"
    result = faked()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*3 oom*"])


@pytest.mark.slow
def test_a_failed_case_fails_and_the_next_runs_on_new_processes(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash, a timeout or an error fails its own case only, with what its rank wrote."""
    hurry(monkeypatch, while_exists=pytester.path / "hung")
    pytester.makepyfile(test_it=_misbehave({1: "die", 2: "hang", 4: "error"}))
    result = run("--llmgpu-timeout=300", sizes="1,2,4,8")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*3 failed, 1 passed*"])
    complaints = ["*signal SIGSEGV*", "*no finished batch for 300 s*", "*ValueError: the layer is broken*"]
    result.stdout.fnmatch_lines_random(complaints)
    # The tracebacks of the ranks, and none of this process.
    sections = result.stdout.get_lines_after("*= FAILURES =*")
    starts = [place for place, line in enumerate(sections) if line.strip("- ") == "Captured rank 0 call"]
    assert len(starts) == 3
    assert not any("Traceback (most recent" in line for line in sections[: starts[0]])
    assert any(f'File "{pytester.path / "test_it.py"}", line' in line for line in sections[starts[-1] :])
    assert _outcomes(pytester) == {"mp-bs1": "crashed", "mp-bs2": "timeout", "mp-bs4": "error", "mp-bs8": "completed"}
    for case in _report(pytester).cases[:3]:
        assert case.failure is not None
        assert "hook" in (case.failure.log_tail or ""), "the log shows where"


def test_wrong_answers_fail(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """An accuracy below the baseline fails the test."""
    pytester.makepyfile(test_it=BENCHMARK)
    faked.right = lambda _: 0
    result = faked("--llmgpu-accuracy-baseline=0.95", sizes="1")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*below the baseline of 95.0 %*", "*1 failed*"])
    (case,) = _report(pytester).cases
    assert case.outcome == "completed"
    assert case.accuracy_check is not None
    assert case.accuracy_check.ok is False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ctrl_c_and_termination_keep_what_was_measured(pytester: pytest.Pytester, run: Run, name: str) -> None:
    """The report of an interrupted run has the finished cases, and the finished batches of the last one."""
    pytester.makepyfile(test_it=_misbehave({1: name}, rows=4))
    result = run(sizes="1,4,8", in_process=False)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert _outcomes(pytester) == {"mp-bs1": "completed", "mp-bs4": "interrupted"}
    written = _report(pytester)
    assert (written.session.complete, written.session.interrupted) == (False, True)
    assert written.cases[1].failure is not None
    result.stdout.fnmatch_lines(["*LLM inference*"])


def test_a_terminal_that_is_closed_loses_no_report(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """SIGHUP ends a run as Ctrl-C does."""
    pytester.makepyfile(test_it=BENCHMARK)

    def seconds(size: int) -> float:
        if size == 4:
            os.kill(os.getpid(), signal.SIGHUP)
        return float(size)

    faked.seconds = seconds
    with pytest.raises(KeyboardInterrupt):
        faked()
    assert _outcomes(pytester) == {"mp-bs1": "completed"}
    assert (_report(pytester).session.complete, _report(pytester).session.interrupted) == (False, True)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--strategy=pp"], "--strategy: 'pp' is no strategy: allowed are compile, iok, mp, tp*"),
        (["--llmgpu-model=lama-7b"], "--llmgpu-model=lama-7b: model 'lama-7b' is unknown (did you mean llama-7b?)*"),
        (["--llmgpu-dataset=nowhere.jsonl"], "--llmgpu-dataset=nowhere.jsonl: dataset * is unknown*"),
        (["--llmgpu-dataset=broken.jsonl"], "--llmgpu-dataset=broken.jsonl: *broken.jsonl:2: *"),
        (
            ["--llmgpu-batch-sizes=1,25"],
            "batch size 25 is more than the 24 sequences*pass --llmgpu-batch-sizes with at most 24",
        ),
        (["--llmgpu-limit=2", "--llmgpu-batch-sizes=9"], "batch size 9 is more than the 8 sequences*--llmgpu-limit=2*"),
        (["--llmgpu-device=cuda"], "*torch is built without CUDA*"),
        (["--llmgpu-devices=2"], "*--llmgpu-devices=2: on a CPU devices are processes, *allowed: 1*"),
        (["--llmgpu-gpu-memory=8GiB"], "*--llmgpu-gpu-memory=8.00 GiB: a cap needs a GPU*"),
        (["--llmgpu-cuda-graphs=on"], "--llmgpu-cuda-graphs=on: CUDA graphs need a GPU, *"),
        (["--llmgpu-json=items.jsonl/report.json"], "*items.jsonl/report.json*"),
        (["--llmgpu-model=llama-7b", "--llmgpu-load-format=dummy"], "*preset needs a GPU*--llmgpu-device=cpu*"),
        (["--llmgpu-model=llama-7b"], "*load format dummy*"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    pytester: pytest.Pytester, run: Run, flags: list[str], complaint: str
) -> None:
    """A wrong value is a usage error in one line, without a report."""
    (pytester.path / "broken.jsonl").write_text((pytester.path / "items.jsonl").read_text().replace('"1"}', '"9"}'))
    pytester.makepyfile(test_it=BENCHMARK)
    result = run(*flags)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {complaint}"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert not (pytester.path / ".llmgpu").exists()


def test_a_gpu_that_torch_cannot_use_is_refused(
    pytester: pytest.Pytester, faked: FakedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch without CUDA on a machine with GPUs is refused."""
    gpu = Gpu(index=0, uuid="GPU-0", name="NVIDIA H200", memory_bytes=1)
    monkeypatch.setattr(nvml, "inventory", lambda: Inventory(gpus=[gpu]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pytester.makepyfile(test_it=BENCHMARK)
    result = faked()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *1 x NVIDIA H200*cannot use CUDA*--llmgpu-device=cpu*"])
    assert faked("--llmgpu-device=cpu", sizes="8").ret == 0


def test_a_marker_chooses_for_one_test(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """A marker gives a test its own batch sizes and dataset."""
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.llmgpu(batch_sizes=[2, 3], limit=2)
        def test_marked(llm, hellaswag, batch_size, measure):
            result = measure(llm, hellaswag, batch_size)
            assert len(hellaswag.items) == 2
            assert result.case.limit == 2
        """
    )
    pytester.makeini("[pytest]\nllmgpu_batch_sizes = 8\n")
    result = pytester.runpytest_inprocess("--collect-only", "-q")
    result.stdout.fnmatch_lines(["*test_marked?mp-bs2?", "*test_marked?mp-bs3?"])
    faked(sizes="2,3").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("marker", "complaint"),
    [
        ("batch_sizes=[0]", "*(batch_sizes=...): '0' is not allowed: *"),
        ("batch_sizes=[]", "*(batch_sizes=...): '' is not allowed: *"),
        ("batch_sizes=[1], modle='x'", "*@pytest.mark.llmgpu: modle is not allowed: *"),
        ("limit=0", "*(limit=...): '0' is not allowed: *"),
    ],
)
def test_a_bad_marker_fails_its_test_in_one_line(pytester: pytest.Pytester, marker: str, complaint: str) -> None:
    """A wrong marker fails its test with one line that names it; tests beside it run."""
    benchmark = textwrap.dedent(BENCHMARK)
    pytester.makepyfile(
        test_it=f"import pytest\n\n@pytest.mark.llmgpu({marker})\n{benchmark}\ndef test_other():\n    pass\n"
    )
    result = pytester.runpytest_inprocess("-rE", "-p", "no:cacheprovider", "--maxfail=1")  # no flags, which would win
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"test_it.py::test_hellaswag[[]mp-bs1]: {complaint}"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert not (pytester.path / ".llmgpu").exists()
    pytester.runpytest_inprocess("-k", "other").assert_outcomes(passed=1, deselected=7)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("measure(llm, hellaswag, '4')", "batch_size: '4' is not allowed: *"),
        ("measure(llm, hellaswag, True)", "batch_size: True is not allowed: *"),
        ("llm.score(hellaswag, 0)", "batch_size: 0 is not allowed: *"),
        ("llm.score([], 4)", "items: nothing is not allowed: *"),
        ("llm.score([{'context': 'a'}], 4)", "items[[]0]: dict is not allowed: *"),
        ("llm.score(iter(hellaswag.items), 4)", "items: tuple_iterator is not allowed: *"),
        ("measure(llm, hellaswag, 25)", "batch size 25 is more than the 24 sequences of items.jsonl"),
    ],
)
def test_a_wrong_argument_fails_before_a_model_loads(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch, call: str, complaint: str
) -> None:
    """A wrong argument fails the test in one line."""
    monkeypatch.setattr(Runner, "_load", lambda *_: pytest.fail("a model was loaded"))
    pytester.makepyfile(test_it=f"def test_wrong(llm, hellaswag, measure):\n    {call}\n")
    result = run()
    assert result.ret == 1
    result.stdout.fnmatch_lines([complaint, "*1 failed*"])
    assert "fixtures.py" not in result.stdout.str()
    assert "ValueError" not in result.stdout.str()


@pytest.mark.slow
def test_a_failing_function_shows_why_without_frames_of_ours(pytester: pytest.Pytester, run: Run) -> None:
    """An error on a rank fails the test, and out of memory is shown as OOM; if nothing completed, the run fails."""
    pytester.makepyfile(
        test_it="""
        import pytest
        import torch

        class BrokenLayerError(ValueError):
            def __init__(self, layer, why):
                super().__init__(f"layer {layer} is {why}")

        def error(loaded):
            print("this is the layer")
            raise BrokenLayerError(3, why="broken")

        def leave(loaded):
            raise SystemExit("no more")

        def oom(loaded):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        def test_error(llm):
            llm.run(error)

        def test_expected(llm):
            with pytest.raises(BrokenLayerError, match="layer 3 is broken"):
                llm.run(error)

        def test_exit(llm):
            llm.run(leave)

        def test_oom(llm, batch_size):
            if batch_size == 4:
                pytest.skip("not today")
            llm.run(oom)
        """
    )
    result = run("-v", sizes="1,4")
    result.stdout.fnmatch_lines(
        [
            "*test_oom?mp-bs1? OOM*",
            ">       llm.run(error)",
            "E       test_it.BrokenLayerError: layer 3 is broken",
            "*- Captured rank 0 call -*",
            "this is the layer",
            f'  File "{pytester.path}/test_it.py", line * in error',
            "error: SystemExit: no more",
        ]
    )
    result.stdout.fnmatch_lines(["*2 failed, 1 passed, 1 skipped, 1 oom*"])
    assert result.stdout.str().count("this is the layer") == 1, "the output of a passed test is its own"
    result.stdout.fnmatch_lines(["FAILED mp, *: out of memory, and nothing completed"])
    text = result.stdout.str()
    assert "RankFailedError" not in text
    assert "plugin/fixtures.py" not in text


@pytest.mark.slow
def test_a_test_may_ask_the_model_itself(pytester: pytest.Pytester, run: Run) -> None:
    """Tests can score without recording, run functions on ranks, profile, and score their own items."""
    pytester.makepyfile(
        test_it="""
        import torch

        def parameters(loaded, kind):
            return sum(p.numel() for p in loaded.model.parameters()), kind, torch.get_num_threads() > 0

        def test_llm(llm, hellaswag, nvml_profiler, measure):
            one, = llm.run(parameters, "all")
            assert one[0] > 0 and one[1:] == ("all", True)
            with nvml_profiler.window() as window:
                reply = llm.score(hellaswag, 8)
            assert window.profile.why["profile"]
            assert len(reply.accuracy.predictions) == 6
            own = measure(llm, hellaswag.items[:3], 4)
            assert (own.case.dataset, own.case.limit) == ("items.jsonl", 3)
            assert own.launches[0].accuracy.predictions == reply.accuracy.predictions[:3]
            again = measure(llm, hellaswag.items[:3], 4)
            assert (own.id, again.id) == ("mp-bs4", "mp-bs4#2")
            assert own.key == again.key

        def test_lambda(llm):
            llm.run(lambda loaded: 1)
        """
    )
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*llm.run needs a function at the top level of a module*"])


def test_a_model_of_the_suite_cannot_be_measured(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """The message names the object and the fixture that hides ours."""
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.fixture
        def llm():
            return {}

        def test_theirs(llm, hellaswag, measure):
            measure(llm, hellaswag, 4)
        """
    )
    result = faked()
    result.stdout.fnmatch_lines(["measure: llm: dict is not allowed: *fixture of that name in the test suite*"])
    result.assert_outcomes(failed=1)


def test_a_suites_own_fixtures_are_left_alone(pytester: pytest.Pytester) -> None:
    """A suite's own fixture `llm` or `batch_size` wins, and this plugin does nothing."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def llm():
            return "mine"

        @pytest.fixture
        def batch_size():
            return 3

        def test_mine(llm, batch_size):
            assert (llm, batch_size) == ("mine", 3)
        """
    )
    result = pytester.runpytest_inprocess("-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*::test_mine PASSED*"])
    result.stdout.no_fnmatch_line("*llmgpu:*")
    assert not (pytester.path / ".llmgpu").exists()


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--collect-only", "-q"], ["test_it.py::test_hellaswag?mp-bs1?", "test_it.py::test_hellaswag?mp-bs8?"]),
        (["--fixtures"], ["llm -- *", "measure -- *", "hellaswag -- *", "*--llmgpu-dataset*"]),
        (["--setup-plan"], ["*llm?*mp*"]),
    ],
)
def test_listing_starts_nothing(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch, flags: list[str], shown: list[str]
) -> None:
    """Listing tests or fixtures probes no GPU and writes no report."""
    monkeypatch.setattr(machine, "probe", lambda: pytest.fail("torch was probed"))
    pytester.makepyfile(test_it=BENCHMARK)
    result = run(*flags)
    assert result.ret == 0
    result.stdout.fnmatch_lines_random(shown)
    assert not (pytester.path / ".llmgpu").exists()


def test_deselected_cases_are_told_from_missing_ones(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """The report has the tests that -k deselected."""
    pytester.makepyfile(test_it=BENCHMARK)
    assert faked("-k", "bs4").ret == 0
    session = _report(pytester).session
    assert session.complete
    assert session.deselected == ["test_it.py::test_hellaswag[mp-bs1]", "test_it.py::test_hellaswag[mp-bs8]"]


def test_a_run_of_chosen_tests_is_told_from_a_whole_one(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """The report names the option that took out tests which pytest does not collect."""
    pytester.makepyfile(test_it=BENCHMARK)
    faked.outcome = lambda size: "error" if size == 4 else "completed"
    assert faked("test_it.py::test_hellaswag[mp-bs1]").ret == 0
    assert _report(pytester).session.deselected == [
        "tests not named on the command line",
        "parameters not named on the command line",
    ]
    assert faked("test_it.py::test_hellaswag", sizes="1").ret == 0
    assert _report(pytester).session.deselected == ["tests not named on the command line"]
    assert faked(sizes="1,4", cached=True).ret == 1
    assert _report(pytester).session.deselected == []
    faked("--lf", sizes="1,4", cached=True).assert_outcomes(failed=1)
    assert "--lf: tests that passed last time" in _report(pytester).session.deselected


@pytest.mark.slow
def test_xdist_skips_tests_of_models_with_the_reason(pytester: pytest.Pytester, run: Run) -> None:
    """With -n the tests that need the GPUs are skipped, and the others run."""
    pytester.makepyfile(test_it=BENCHMARK, test_others="def test_other(): pass")
    result = run("-n", "1", "-rs", in_process=False, sizes="1,2")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED *xdist*-n 0*"])


@pytest.mark.slow
def test_xdist_cannot_compare(pytester: pytest.Pytester, run: Run) -> None:
    """A run that is compared with a baseline must not pass without a measurement."""
    pytester.makepyfile(test_it=BENCHMARK)
    result = run("-n", "1", "--llmgpu-compare=latest", in_process=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: -n: *"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_a_terminal_sees_a_live_line(pytester: pytest.Pytester, model: Path) -> None:
    """Finished batches and the remaining time are shown while a case runs, also with pytest's capture."""
    pytester.makepyfile(
        test_it="""
        import threading

        def wait(module, args):
            threading.Event().wait(0.1)

        def slow(loaded):
            loaded.model.register_forward_pre_hook(wait)

        def test_hellaswag(llm, hellaswag, batch_size, measure):
            llm.run(slow)
            measure(llm, hellaswag, batch_size)
        """
    )
    flags = [f"--llmgpu-model={model}", "--llmgpu-dataset=items.jsonl", "--llmgpu-batch-sizes=1"]
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *flags]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "120"}):
        os.close(theirs)
        screen = _read_all(ours)
    assert "\x1b7\x1b[Kmp-bs1  " in screen
    assert f"/{tiny_model.SEQUENCES} batches" in screen
    assert "mp-bs1] \x1b7" in screen, "it stands behind what pytest has written"


def _read_all(descriptor: int) -> str:
    chunks: list[bytes] = []
    while select.select([descriptor], [], [], 120)[0]:
        try:
            chunk = os.read(descriptor, 4096)
        except OSError:  # Linux says EIO when the other end of a terminal is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(descriptor)
    return b"".join(chunks).decode(errors="replace")


def test_a_series_whose_last_test_does_not_measure_is_still_judged(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """Out of memory everywhere fails the run, also if the last test skips itself."""
    pytester.makepyfile(
        test_it="""
        import pytest

        def test_hellaswag(llm, hellaswag, batch_size, measure):
            if batch_size == 4:
                pytest.skip("not today")
            measure(llm, hellaswag, batch_size)
        """
    )
    faked.outcome = lambda _: "oom"
    result = faked(sizes="1,4")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*1 skipped, 1 oom*"])
    result.stdout.fnmatch_lines(["FAILED mp, *: out of memory, and nothing completed"])


def test_a_report_that_cannot_be_written_fails_the_run_and_loses_no_table(
    pytester: pytest.Pytester, faked: FakedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends neither the run nor the summary."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "dump", full)
    pytester.makepyfile(test_it=BENCHMARK)
    result = faked(sizes="8")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED .llmgpu/last.json could not be written: No space left on device"])
    result.stdout.fnmatch_lines(["strategy *batch *", "*1 passed*"])


def test_a_report_that_cannot_be_written_where_it_should_be_is_kept_elsewhere(
    pytester: pytest.Pytester, faked: FakedRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A report that cannot be written is kept in the temporary folder."""
    dump = file.dump

    def full(report: Report, path: Path, *_: object) -> None:
        if tmp_path not in path.parents:
            raise OSError(28, "No space left on device")
        dump(report, path)

    monkeypatch.setattr(file, "dump", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pytester.makepyfile(test_it=BENCHMARK)
    result = faked(sizes="8")
    assert result.ret == 1
    (kept,) = tmp_path.glob("llmgpu-*/last.json")
    assert [case.case.batch_size for case in file.load(kept).cases] == [8]
    result.stdout.fnmatch_lines([f"FAILED *: No space left on device; the report is {kept}"])


def test_a_rank_that_stops_between_cases_is_a_time_out(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens between cases has the time limit of a case, not that of loading a model."""
    hurry(monkeypatch, while_exists=pytester.path / "stopped")
    pytester.makepyfile(
        test_it="""
        import os, signal

        def process_id(loaded):
            return os.getpid()

        def test_hellaswag(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)
            if batch_size == 1:
                os.kill(llm.run(process_id)[0], signal.SIGSTOP)
                open("stopped", "w").close()
        """
    )
    assert run("--llmgpu-timeout=300", "--llmgpu-load-timeout=1e9", sizes="1,4").ret == 1
    assert _outcomes(pytester) == {"mp-bs1": "completed", "mp-bs4": "timeout"}


def test_a_folder_whose_name_is_not_utf8_loses_no_report(
    pytester: pytest.Pytester, faked: FakedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node ids, arguments and variables of other bytes are shown by their codes."""
    folder = pytester.path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    pytester.makepyfile(test_it=BENCHMARK).rename(folder / "test_it.py")
    monkeypatch.setenv("NCCL_DEBUG_FILE", os.fsdecode(b"/tmp/\xe9"))
    result = faked(f"{folder.name}/", "--llmgpu-html=page.html", sizes="8")
    assert result.ret == 0
    report = _report(pytester)
    assert str(report.cases[0].nodeid).startswith(r"caf\udce9/test_it.py::test_hellaswag")
    assert report.session.complete
    assert (pytester.path / "page.html").exists()


def test_a_run_without_a_terminal_reporter_measures_all_the_same(pytester: pytest.Pytester, faked: FakedRuns) -> None:
    """With `-p no:terminal` the report is the only output."""
    pytester.makepyfile(test_it=BENCHMARK)
    assert faked("-p", "no:terminal", sizes="8").ret == 0
    assert _outcomes(pytester) == {"mp-bs8": "completed"}
