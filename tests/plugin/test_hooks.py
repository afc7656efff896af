"""The plugin as its users meet it: real processes and a real model on a CPU, or a stand-in for the runner."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from support import tiny_model
from support.faked_runs import BENCHMARK, FakedRuns
from support.report_factory import known, make_report
from support.worlds import hurry

from pytest_llmgpu.profiling import machine
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import command

_MISBEHAVING = """
    import os, signal
    import torch

    def process_id(loaded):
        return os.getpid()

    def misbehave(loaded, what):
        def hook(module, args, kwargs):
            if what == "oom":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            os.kill(os.getpid(), signal.SIGSEGV)
        loaded.model.register_forward_pre_hook(hook, with_kwargs=True)

    def test_hellaswag(llm, hellaswag, batch_size, measure):
        if what := {1: "die", 8: "oom"}.get(batch_size):
            llm.run(misbehave, what)
        if batch_size == 6 and os.path.exists("stopped"):
            os.remove("stopped")
        measure(llm, hellaswag, batch_size)
        if batch_size == 3:
            os.kill(llm.run(process_id)[0], signal.SIGSTOP)
            open("stopped", "w").close()
"""


@pytest.fixture
def real(pytester: pytest.Pytester) -> FakedRuns:
    """Return a function that runs a benchmark with real measurements, which nothing replaces."""
    tiny_model.write_dataset(pytester.path / "items.jsonl")
    return FakedRuns(pytester)


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_a_sweep_of_two_launches_is_measured(pytester: pytest.Pytester, real: FakedRuns) -> None:
    """The model is loaded once a launch; tests run functions on ranks, profile, and score without recording."""
    pytester.makepyfile(
        test_it="""
        import os

        def process(loaded):
            print("this is the layer")
            return os.getpid()

        def test_hellaswag(llm, hellaswag, batch_size, measure):
            with open("log", "a") as log:
                log.write(f"{llm.run(process)[0]} ")
            measure(llm, hellaswag, batch_size)

        def test_own(llm, hellaswag, nvml_profiler, measure):
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
        """
    )
    result = real("-v", "--llmgpu-device=cpu", "--llmgpu-launches=2", sizes="8,1")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "llmgpu: CPU, * cores (*; strategy mp; batch sizes 1, 8",
            "*test_own?mp? PASSED*",
            "*test_hellaswag?mp-bs1? PASSED*",
            "*test_hellaswag?mp-bs8? PASSED*",
            "*LLM inference*",
            "strategy *batch *time *acc_norm*",
            "report: .llmgpu/last.json",
            "next: llmgpu html latest *",
        ]
    )
    assert "\x1b7" not in result.stdout.str(), "a pipe sees no live line"
    assert "this is the layer" not in result.stdout.str(), "the output of a passed test is its own"
    first, second, third, fourth = (pytester.path / "log").read_text().split()
    assert first == second != third == fourth
    written = real.report()
    assert [case.id for case in written.cases] == ["mp-bs4", "mp-bs4#2", "mp-bs1", "mp-bs8"]
    assert (written.session.complete, written.session.exit_status, written.session.collected) == (True, 0, 3)
    for case in written.cases[2:]:
        launch, again = case.launches
        assert (again.plan_sha256, again.accuracy) == (launch.plan_sha256, launch.accuracy)
        assert sum(launch.batches.sequences) == tiny_model.SEQUENCES
        assert all(latency > 0 for latency in launch.batches.latency_s)
        assert known(launch.accuracy).items == tiny_model.ITEMS
        assert "profile" in known(launch.profile).why
        host, traffic = known(launch.host), known(case.traffic)
        assert (len(host.threads), host.cpu_s[0] > 0) == (1, True)
        assert (traffic.ranks, traffic.wire_bytes_per_sequence) == ([[]], 0.0), "one process sends nothing"
        assert "traffic" not in case.why
    assert written.cases[2].launches[0].load_s == written.cases[3].launches[0].load_s, "the model is loaded once"
    assert str(pytester.path) not in (pytester.path / ".llmgpu" / "last.json").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_a_failed_case_fails_and_the_next_has_new_processes(real: FakedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash or a timeout fails its own case only; out of memory is expected and ends the larger sizes."""
    hurry(monkeypatch, while_exists=real.pytester.path / "stopped")
    real.pytester.makepyfile(test_it=_MISBEHAVING)
    flags = ["--llmgpu-device=cpu", "--llmgpu-timeout=300", "--llmgpu-load-timeout=1e9", "--llmgpu-work=off"]
    result = real("-v", *flags, sizes="1,3,4,6,8,12")
    assert result.ret == 1
    cases = real.report().cases
    assert real.outcomes() == {
        "mp-bs1": "crashed",
        "mp-bs3": "completed",
        "mp-bs4": "timeout",
        "mp-bs6": "completed",
        "mp-bs8": "oom",
        "mp-bs12": "skipped_after_oom",
    }
    result.stdout.fnmatch_lines(["*mp-bs8? OOM*", "*mp-bs12? OOM*", "*2 failed, 2 passed, 2 oom*"])
    result.stdout.fnmatch_lines_random(["*signal SIGSEGV*", "*no finished batch for 300 s*"])
    # The test, and the table of the run.
    command = "*`llmgpu show latest --log mp-bs1` prints the traceback.*"
    result.stdout.fnmatch_lines([command, command])
    # The tracebacks of the ranks, and none of this process.
    sections = result.stdout.get_lines_after("*= FAILURES =*")
    starts = [place for place, line in enumerate(sections) if line.strip("- ") == "Captured rank 0 call"]
    assert not any("Traceback (most recent" in line for line in sections[: starts[0]])
    assert any(f'File "{real.pytester.path / "test_it.py"}", line' in line for line in sections)
    assert "hook" in (known(cases[0].failure).log_tail or ""), "the log shows where"
    failure = known(cases[4].failure)
    assert (failure.phase, failure.evidence, failure.requested_bytes) == ("forward", "torch's allocator", 2 * 2**30)
    assert cases[5].launches == []


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_was_measured(pytester: pytest.Pytester, real: FakedRuns) -> None:
    """The report has the finished cases, and the finished batches of the last one; a terminal sees a live line."""
    pytester.makepyfile(
        test_it="""
        import os, signal, threading

        def slow(loaded, rows):
            def wait(module, args, kwargs):
                threading.Event().wait(0.1)
                if kwargs["input_ids"].shape[0] == rows:
                    os.kill(os.getppid(), signal.SIGTERM)
                    threading.Event().wait()
            loaded.model.register_forward_pre_hook(wait, with_kwargs=True)

        def test_hellaswag(llm, hellaswag, batch_size, measure):
            llm.run(slow, 4)
            measure(llm, hellaswag, batch_size)
        """
    )
    ours, theirs = pty.openpty()
    flags = ["--llmgpu-dataset=items.jsonl", "--llmgpu-batch-sizes=1,4", "--llmgpu-device=cpu", "--llmgpu-work=off"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *flags]
    environ = {**os.environ, "COLUMNS": "120"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        screen = _read_all(ours)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "\x1b7\x1b[Kmp-bs1  " in screen
    assert f"/{tiny_model.SEQUENCES} batches" in screen
    assert "mp-bs1] \x1b7" in screen, "it stands behind what pytest has written"
    assert "LLM inference" in screen
    written = real.report()
    assert real.outcomes() == {"mp-bs1": "completed", "mp-bs4": "interrupted"}
    assert (written.session.complete, written.session.interrupted) == (False, True)
    assert written.cases[1].failure is not None


def _read_all(descriptor: int) -> str:
    """Return what is written to a terminal until its other end is closed, which Linux reports as EIO."""
    chunks = []
    with contextlib.suppress(OSError), os.fdopen(descriptor, "rb", buffering=0) as screen:
        while select.select([screen], [], [], 120)[0] and (chunk := screen.read(4096)):
            chunks.append(chunk)
    return b"".join(chunks).decode(errors="replace")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_that_ends_a_run_loses_no_report(runs: FakedRuns, number: signal.Signals) -> None:
    """Termination and a closed terminal end a run as Ctrl-C does."""

    def seconds(size: int) -> float:
        if size == 4:
            os.kill(os.getpid(), number)
        return float(size)

    runs.seconds = seconds
    with pytest.raises(KeyboardInterrupt):
        runs()
    assert runs.outcomes() == {"mp-bs1": "completed"}
    session = runs.report().session
    assert (session.complete, session.interrupted) == (False, True)


def test_the_runner_knows_what_will_be_loaded(runs: FakedRuns) -> None:
    """Ranks of the next model are started ahead."""
    runs("--llmgpu-dtype=float32", sizes="1,4")
    assert runs.expected == [request.case.loading for request in runs.requests]
    assert len(runs.expected) == 2


def test_a_forked_process_measures_nothing(runs: FakedRuns) -> None:
    """It has no threads that could talk to the ranks, and its report would replace that of the run."""
    runs.pytester.makepyfile(
        test_it="""
        import os

        def test_hellaswag(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)
            if not (child := os.fork()):
                try:
                    measure(llm, hellaswag, batch_size)
                except BaseException as error:
                    os._exit("only the first process of pytest measures" in str(error))
                os._exit(9)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        """
    )
    runs().assert_outcomes(passed=3)
    assert list(runs.outcomes()) == ["mp-bs1", "mp-bs4", "mp-bs8"]


_EXPECTING = f"import pytest\n\n@pytest.mark.llmgpu(expect_oom=True)\n{textwrap.dedent(BENCHMARK)}"
_SKIPPING = """
import pytest

def test_hellaswag(llm, hellaswag, batch_size, measure):
    if batch_size == 8:
        pytest.skip("not today")
    measure(llm, hellaswag, batch_size)
"""


@pytest.mark.parametrize(
    ("fits", "test", "status", "lines"),
    [
        (1, BENCHMARK, 0, ["*1 passed, 2 oom*"]),
        (0, BENCHMARK, 1, ["*no batch size of this model and strategy completed*", "*1 failed, 2 oom*"]),
        (0, _EXPECTING, 0, ["*3 oom*"]),
        (0, _SKIPPING, 1, ["*1 skipped, 2 oom*", "FAILED mp, *: out of memory, and nothing completed"]),
    ],
    ids=["smaller fits", "nothing fits", "expected", "the last one skips itself"],
)
def test_out_of_memory_is_no_failure(runs: FakedRuns, fits: int, test: str, status: int, lines: list[str]) -> None:
    """A series of which nothing fits fails, except with `expect_oom`; also if its last test skips itself."""
    runs.fits = fits
    runs.pytester.makepyfile(test_it=test)
    result = runs()
    assert result.ret == status
    result.stdout.fnmatch_lines_random(lines)


def test_wrong_answers_fail(runs: FakedRuns) -> None:
    """An accuracy below the baseline fails the test, which the report counts."""
    runs.right = lambda _: 0
    result = runs("--llmgpu-accuracy-baseline=0.95", sizes="1")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*below the baseline of 95.0 %*", "*1 failed*"])
    written = runs.report()
    (case,) = written.cases
    assert (case.outcome, known(case.accuracy_check).ok, written.session.failed_tests) == ("completed", False, 1)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--strategy=pp"],
            "--strategy: 'pp' is no strategy: allowed are compile, iok, mp, openai, tp, *",
        ),
        (["--llmgpu-dataset=broken.jsonl"], "--llmgpu-dataset=broken.jsonl: *broken.jsonl:2: *"),
        (["--llmgpu-device=cuda"], "*torch is built without CUDA*"),
        (["--llmgpu-json=items.jsonl/report.json"], "*items.jsonl/report.json*"),
        (["--llmgpu-compare=no.json"], "--llmgpu-compare: report no.json: cannot be read: *"),
        (["--llmgpu-compare=no.json", "--llmgpu-policy=items.jsonl"], "policy *items.jsonl: is not valid TOML: *"),
        (["--llmgpu-policy=strict.toml"], "--llmgpu-policy: strict.toml has no bounds *--llmgpu-compare=REF is needed"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    runs: FakedRuns, refused: Callable[..., str], flags: list[str], complaint: str
) -> None:
    """A wrong value is a usage error in one line, without a report."""
    text = (runs.pytester.path / "items.jsonl").read_text()
    (runs.pytester.path / "broken.jsonl").write_text(text.replace('"1"}', '"9"}'))
    (runs.pytester.path / "strict.toml").write_text("strict = true")
    line = refused("--llmgpu-dataset=items.jsonl", "--llmgpu-batch-sizes=1,4,8", *flags)
    assert fnmatch.fnmatch(line, f"ERROR: {complaint}")


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("measure(llm, hellaswag, '4')", "batch_size: '4' is not allowed: *"),
        ("llm.score([], 4)", "items: nothing is not allowed: *"),
        ("llm.score([{'context': 'a'}], 4)", "items[[]0]: dict is not allowed: *"),
        ("llm.score(iter(hellaswag.items), 4)", "items: tuple_iterator is not allowed: *"),
        ("measure(llm, hellaswag, 25)", "batch size 25 is more than the 24 sequences of items.jsonl"),
    ],
)
def test_a_wrong_argument_fails_before_a_model_loads(runs: FakedRuns, call: str, complaint: str) -> None:
    """A wrong argument fails the test in one line."""
    runs.pytester.makepyfile(test_it=f"def test_wrong(llm, hellaswag, measure):\n    {call}\n")
    result = runs()
    assert (result.ret, runs.measured) == (1, [])
    result.stdout.fnmatch_lines([complaint, "*1 failed*"])
    assert not any(word in result.stdout.str() for word in ("fixtures.py", "ValueError"))


def test_a_failing_function_shows_why_without_frames_of_ours(pytester: pytest.Pytester, runs: FakedRuns) -> None:
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
    result = runs("-v", sizes="1,4")
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
    assert not any(word in result.stdout.str() for word in ("RankFailedError", "plugin/fixtures.py"))


def test_a_model_of_the_suite_cannot_be_measured(pytester: pytest.Pytester, runs: FakedRuns) -> None:
    """The message names the object and the fixture that hides ours."""
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.fixture
        def llm():
            return {}

        def test_theirs(llm, hellaswag, measure):
            measure(llm, hellaswag, 4)
        """,
        test_other="def test_lambda(llm): llm.run(lambda loaded: 1)",
    )
    result = runs()
    result.stdout.fnmatch_lines_random(
        [
            "measure: dict is not allowed: the fixture llm is needed*A fixture llm of the test suite hides*",
            "*llm.run needs a function at the top level of a module*",
        ]
    )
    result.assert_outcomes(failed=2)


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
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
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
    runs: FakedRuns, monkeypatch: pytest.MonkeyPatch, flags: list[str], shown: list[str]
) -> None:
    """Listing tests or fixtures probes no GPU, launches nothing, lists no item of the gate and writes no report."""
    monkeypatch.setattr(machine, "probe", lambda: pytest.fail("torch was probed"))
    result = runs("--llmgpu-launches=2", "--llmgpu-compare=no.json", *flags)
    assert (result.ret, runs.did) == (0, [])
    result.stdout.fnmatch_lines_random(shown)
    result.stdout.no_fnmatch_line("*launch * of *")
    result.stdout.no_fnmatch_line("*llmgpu gate*")
    assert not (runs.pytester.path / ".llmgpu").exists()


def test_a_run_of_chosen_tests_is_told_from_a_whole_one(runs: FakedRuns) -> None:
    """The report has the deselected tests, or the option that took out tests which pytest does not collect."""
    assert runs("-k", "bs4", "-p", "no:terminal").ret == 0, "the report is its only output"
    session = runs.report().session
    assert session.complete
    assert session.deselected == ["test_it.py::test_hellaswag[mp-bs1]", "test_it.py::test_hellaswag[mp-bs8]"]
    runs.outcome = lambda size: "error" if size == 4 else "completed"
    named = ["tests not named on the command line", "parameters not named on the command line"]
    for arguments, failed, deselected in (
        (["test_it.py::test_hellaswag[mp-bs1]"], 0, named),
        (["test_it.py::test_hellaswag"], 1, named[:1]),
        ([], 1, []),
    ):
        assert runs(*arguments, cached=True).ret == failed
        assert runs.report().session.deselected == deselected
    runs("--lf", cached=True).assert_outcomes(failed=1)
    assert "--lf: tests that passed last time" in runs.report().session.deselected


@pytest.mark.slow
def test_workers_of_xdist_measure_nothing(pytester: pytest.Pytester) -> None:
    """Tests that need the GPUs are skipped with the reason; a run that is compared is refused: it must not pass."""
    pytester.makepyfile(test_it=BENCHMARK, test_others="def test_other(): pass")
    flags = ["-p", "no:cacheprovider", "-n", "1", "-rs", "--llmgpu-batch-sizes=1,2"]
    result = pytester.runpytest_subprocess(*flags)
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["llmgpu: 2 measurements skipped: *-n 0", "SKIPPED *xdist*-n 0*"])
    assert pytester.runpytest_subprocess(*flags, "test_it.py").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result = pytester.runpytest_subprocess(*flags, "--llmgpu-compare=latest")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --llmgpu-compare: *xdist*-n 0*"])
    result = pytester.runpytest_subprocess(*flags, "-o", "llmgpu_compare=latest")
    result.assert_outcomes(passed=1, errors=2)


def test_a_suggested_command_measures_where_pytest_starts_workers(runs: FakedRuns) -> None:
    """A report that was measured with -n 0 is measured again with it."""
    for flags, begin in ((["-n", "0"], "pytest -n 0 test_it.py"), ([], "pytest test_it.py")):
        runs(*flags)
        assert command(runs.report()).startswith(begin)


@pytest.mark.parametrize("declared", ['choices=["a", "b"]', 'action="store_true"', None])
def test_a_repository_can_have_an_option_strategy(pytester: pytest.Pytester, declared: str | None) -> None:
    """Ours then has its long name only; else both names are one option."""
    if declared is not None:
        pytester.makeconftest(f"def pytest_addoption(parser):\n    parser.addoption('--strategy', {declared})\n")
    pytester.makepyfile(test_it=BENCHMARK)
    flag = {None: "--strategy=tp", 'action="store_true"': "--strategy"}.get(declared, "--strategy=b")
    flags = ["--collect-only", "-q", "--llmgpu-batch-sizes=1", "--llmgpu-strategy=mp", flag]
    result = pytester.runpytest_inprocess(*flags)
    result.assert_outcomes()
    assert [line for line in result.outlines if "[" in line] == [
        f"test_it.py::test_hellaswag[{name}-bs1]" for name in (["mp"] if declared else ["mp", "tp"])
    ]
    assert "--llmgpu-strategy=tp" in command(make_report(options={"--strategy": ["tp"]})), "it always works"
    assert "default of --strategy" not in pytester.runpytest_inprocess("--help").stdout.str()


def test_an_unwritable_report_is_kept(runs: FakedRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It fails the run and loses no table; the report is in the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def seconds(size: int) -> float:
        (runs.pytester.path / ".llmgpu" / "last.json").mkdir(parents=True)
        return float(size)

    runs.seconds = seconds
    result = runs(sizes="8")
    assert result.ret == 1
    (kept,) = tmp_path.glob("llmgpu-*/last.json")
    assert [case.case.batch_size for case in file.load(kept).cases] == [8]
    complaint = f"FAILED .llmgpu/last.json could not be written: Is a directory; the report is {kept}"
    result.stdout.fnmatch_lines([complaint, "strategy *batch *", "*1 passed*"])


def test_a_test_that_runs_again_is_a_further_attempt_of_its_cases(runs: FakedRuns, pytester: pytest.Pytester) -> None:
    """The last attempt counts, as with pytest-rerunfailures; two measurements of one test stay two cases."""
    pytester.makeconftest(
        """
        from _pytest.runner import runtestprotocol

        def pytest_runtest_protocol(item, nextitem):
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            first = runtestprotocol(item, nextitem=nextitem, log=False)
            again = any(report.failed for report in first)
            for report in runtestprotocol(item, nextitem=nextitem, log=False) if again else first:
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            return True
        """
    )
    pytester.makepyfile(
        test_it="""
        TIMES = []

        def test_it(llm, hellaswag, batch_size, measure):
            TIMES.append([measure(llm, hellaswag, batch_size).inference_s for _ in range(2)])
            assert batch_size == 1 or len(TIMES) > 2
        """
    )
    seconds = iter(range(1, 7))
    runs.seconds = lambda _: float(next(seconds))
    result = runs("--strategy=mp", sizes="1,4")
    result.assert_outcomes(passed=2)
    report = runs.report()
    found = [(case.id, case.attempts, case.inference_s) for case in report.cases]
    assert found == [("mp-bs1", 1, 10.0), ("mp-bs1#2", 1, 20.0), ("mp-bs4", 2, 50.0), ("mp-bs4#2", 2, 60.0)]
    assert (report.session.complete, report.session.failed_tests) == (True, 0)
