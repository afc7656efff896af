"""What lives as long as one pytest run: the planner, the processes, the profiler, the recorder."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pytest_llmgpu.inference import tasks
from pytest_llmgpu.profiling import machine as environment
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.profiling.profiler import Profiler
from pytest_llmgpu.ranks.local import LocalLauncher
from pytest_llmgpu.render.terminal import report as terminal
from pytest_llmgpu.render.terminal.live import LiveLine
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.session.judge import Judge
from pytest_llmgpu.session.planner import Planner
from pytest_llmgpu.session.recorder import Recorder
from pytest_llmgpu.session.runner import Runner

__all__ = ["BenchmarkSession", "Group"]

Group = tuple[str, Options]
"""A strategy and the options in force: the tests of one group share a loaded model."""


Handler = Callable[[int, FrameType | None], object] | int
"""What answers a signal."""


class BenchmarkSession:
    """Owns what must be closed, and knows which test is the last of its group."""

    def __init__(
        self,
        *,
        rootdir: Path,
        report_path: Path | None,
        storage_path: Path,
        policy_path: Path | None,
        calibration_path: Path | None,
        page_path: Path | None,
        options: Options,
        known: Mapping[str, str],
        known_tasks: Mapping[str, str] = tasks.BUILT_IN,
        arguments: Sequence[str],
        live: LiveLine,
    ) -> None:
        """Make the session of a pytest run; nothing expensive starts.

        Raises:
            ValueError: The report cannot be written there, or not be kept in the store; the policy is none.
        """
        self.planner = Planner(rootdir, environment.machine, known, known_tasks)
        self.recorder = Recorder(report_path, storage_path, rootdir, options, arguments, page_path)
        self.judge: Judge | None = None
        """What the run is judged by, if by anything."""
        if options.compare is not None:
            self.judge = Judge(
                options,
                rootdir=rootdir,
                policy_path=policy_path,
                calibration_path=calibration_path,
                storage_path=storage_path,
            )
        self._sample_period_s, self._profile_method = options.sample_period, options.profile_method
        self._live = live
        self._logs = Path(tempfile.mkdtemp(prefix="llmgpu-"))
        self._profiler: tuple[tuple[str, ...], Profiler] | None = None
        self.runner = Runner(LocalLauncher(self._logs), self.profiler_of, self._show, live.note)
        self._expected: dict[Group, list[str]] = {}
        self._cases: list[tuple[Machine, Case]] = []
        self._completed: set[Group] = set()
        self._out_of_memory: set[Group] = set()
        self._groups: set[Group] = set()
        self._excused: set[Group] = set()
        self._launch = ""
        self._sigterm = _interrupt_on_sigterm()

    def expect(
        self, group: Group, nodeid: str | None, batch_size: int, *, scored: Sequence[str], may_fit_nowhere: bool
    ) -> None:
        """Check a test that will run, in the order of the run.

        Args:
            group: Its strategy and options.
            nodeid: Of a test that measures, else None.
            batch_size: Sequences per forward, 1 where the test chooses for itself.
            scored: Tasks whose items, chosen by the options, the test takes; empty where it brings its own.
            may_fit_nowhere: Whether it is marked so; a group is excused only if all of its tests are.

        Raises:
            ValueError: It cannot be measured.
        """
        strategy, options = group
        requests = [self.planner.request(options, strategy, batch_size, task=task) for task in scored]
        requests = requests or [self.planner.request(options, strategy, 1)]
        if group not in self._groups:
            self._groups.add(group)
            self._excused.add(group)
        if not may_fit_nowhere:
            self._excused.discard(group)
        if nodeid is not None:
            self._expected.setdefault(group, []).append(nodeid)
        self._cases += [(request.machine, request.case) for request in requests]

    def find_baseline(self, options: Options) -> None:
        """Read what the run is to be compared with, if anything, before a model is looked for.

        Raises:
            ValueError: It is not there, or is no report.
        """
        if self.judge is not None:
            self.judge.find_baseline(self.planner.machine(options))

    def headlines(self) -> list[str]:
        """Return the lines that name devices, model, data and batch sizes, one per choice of devices."""
        lines: dict[str, tuple[Machine, list[Case]]] = {}
        for machine, case in self._cases:
            lines.setdefault(machine.describe(), (machine, []))[1].append(case)
        return [terminal.headline(machine, cases) for machine, cases in lines.values()]

    def start_launch(self, number: int, of: int) -> None:
        """Let the cases that follow be the next launch of those before: on processes of its own."""
        self.runner.close()
        self.recorder.start_launch()
        self._launch = f"launch {number} of {of}"
        self._live.note(f"llmgpu: {self._launch}")

    def record(self, result: CaseResult, options: Options, nodeid: str) -> CaseResult:
        """Keep a result, whatever its outcome; return the case's, with the launches before."""
        self._live.clear()
        return self.recorder.add(result, options, nodeid, self.planner.machine(options).facts)

    def note(self, group: Group, outcome: str) -> None:
        """Note how something a group asked of its model ended."""
        if outcome == "completed":
            self._completed.add(group)
        elif outcome in ("oom", "skipped_after_oom"):
            self._out_of_memory.add(group)

    def was_last_hope(self, group: Group, nodeid: str) -> bool:
        """Return whether this is the last test of a group of which nothing completed though something should have."""
        last = self._expected.get(group, [nodeid])[-1] == nodeid
        hopeless = last and group not in self._completed and group not in self._excused
        if hopeless:
            self._out_of_memory.discard(group)  # the test itself fails, which is enough said
        return hopeless

    def troubles(self) -> list[str]:
        """Return a line for each reason why a run is not green although no test failed.

        A group that ran out of memory and completed nothing, though something should have; a report that is not there;
        a regression that no item of the gate has said.
        """
        unsaid = self.judge.unsaid() if self.judge is not None else []
        nothing_fitted = [
            f"{strategy}, {options.model}: out of memory, and nothing completed"
            for strategy, options in sorted(self._out_of_memory - self._completed - self._excused, key=repr)
        ]
        return [*self.recorder.troubles, *unsaid, *nothing_fitted]

    def profiler_of(self, machine: Machine) -> Profiler:
        """Return the profiler of these devices; the sampler of other devices is ended first."""
        uuids = tuple(gpu.uuid for gpu in machine.gpus)
        if self._profiler is not None and self._profiler[0] != uuids:
            self._profiler[1].close()
            self._profiler = None
        if self._profiler is None:
            self._profiler = (uuids, Profiler(self._sample_period_s, uuids, method=self._profile_method))
        return self._profiler[1]

    def conclude(self, exit_status: int | None, *, interrupted: bool, deselected: Sequence[str]) -> None:
        """Say in the report how the run went, and judge and write it.

        Args:
            exit_status: pytest's; None as long as it runs.
            interrupted: As `finish` has it.
            deselected: As `finish` has it.
        """
        expected = [nodeid for nodeids in self._expected.values() for nodeid in nodeids]
        judge = None if self.judge is None else self.judge.judge
        self.recorder.conclude(exit_status, judge, interrupted=interrupted, expected=expected, deselected=deselected)

    def finish(self, exit_status: int, *, interrupted: bool, deselected: Sequence[str]) -> None:
        """End every process and complete the report.

        Args:
            exit_status: pytest's.
            interrupted: Whether the run was stopped before its end.
            deselected: Node ids that were taken out, and, where pytest cannot name them, what took them out: `complete`
                tells whether all that was collected ran, this whether all that could be was collected.
        """
        try:
            self._end_processes()
        except KeyboardInterrupt:
            # One Ctrl-C more, or one as late as this: what was measured is kept and shown all the same.
            interrupted = True
            self._end_processes()
        self.conclude(exit_status, interrupted=interrupted, deselected=deselected)
        self.recorder.save()
        self.recorder.write_page(None if self.judge is None else self.judge.base)

    def summary(self) -> str:
        """Return tables, findings and where the report is; empty where nothing was measured."""
        report = self.recorder.report
        if report is None:
            return ""
        said = [] if self.judge is None else [self.judge.summary()]
        return "\n\n".join([terminal.tables(report), *said, "\n".join(self.recorder.whereabouts())])

    def close(self) -> None:
        """End every process, drop their logs and give SIGTERM back."""
        self._end_processes()
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)
            self._sigterm = None

    def _end_processes(self) -> None:
        self.runner.close()
        if self._profiler is not None:
            self._profiler[1].close()
        shutil.rmtree(self._logs, ignore_errors=True)

    def _show(self, case: Case, done: int, planned: int, elapsed_s: float) -> None:
        name = f"{case.id} ({self._launch})" if self._launch else case.id
        self._live.show(terminal.progress(name, done, planned, elapsed_s, batch_size=case.batch_size))


def _interrupt_on_sigterm() -> Handler | None:
    """Make SIGTERM, by which CI and Slurm end a job, do what Ctrl-C does; return the handler it takes the place of.

    None where that cannot be, outside the main thread, or must not be, where SIGTERM is ignored.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before == signal.SIG_IGN:
        return None
    signal.signal(signal.SIGTERM, _interrupt)
    return signal.SIG_DFL if before is None else before


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - as signal calls it
    # Once: coreutils' timeout sends it twice, and the second would end the writing of the report.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt("SIGTERM")
