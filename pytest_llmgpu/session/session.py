"""The objects that live as long as one pytest run: planner, processes, profiler, recorder and gate."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from pytest_llmgpu.analysis import reference
from pytest_llmgpu.engines.function import Function
from pytest_llmgpu.inference import tasks
from pytest_llmgpu.profiling import machine as environment
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.profiling.profiler import NodeProfilers, Profiler, ask_here
from pytest_llmgpu.ranks.env_launcher import Devices, EnvLauncher, Peers
from pytest_llmgpu.ranks.local import LocalLauncher
from pytest_llmgpu.ranks.worker import ReferenceTexts
from pytest_llmgpu.render.terminal import report as terminal
from pytest_llmgpu.render.terminal.report import LiveLine
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import generated
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult
from pytest_llmgpu.report.text import named
from pytest_llmgpu.session.gate import RunGate
from pytest_llmgpu.session.planner import Planner
from pytest_llmgpu.session.recorder import Recorder
from pytest_llmgpu.session.runner import CaseRequest, Runner
from pytest_llmgpu.store.imports import Project

Group = tuple[str, Options]
"""A strategy, empty for an engine of the test, and the options in force. The tests of a group share a loaded model."""

_INTERRUPTED = 2
"""pytest's exit status of a run that was interrupted."""
_TERMINATION = (signal.SIGTERM, signal.SIGHUP)
"""CI systems and Slurm end a job by the first; a terminal that is closed sends the second."""

_HASTE_S = 1.0
"""A Ctrl-C within this time after another one is the same request."""


class BenchmarkSession:
    """Owns the objects of a run and closes them; keeps track of which tests of a group completed."""

    def __init__(
        self,
        *,
        rootdir: Path,
        paths: Mapping[str, Path],
        options: Options,
        known: Mapping[str, str],
        known_tasks: Mapping[str, str] = tasks.BUILT_IN,
        live: LiveLine,
        peers: Peers | None = None,
    ) -> None:
        """Make the session of a pytest run; no process starts.

        `paths` has the path of `storage` and, of `json`, `policy`, `html` and `trace`, of those that are chosen.
        `peers` is None if ranks run on this machine only. ValueError if a path or the policy is wrong.
        """
        self._devices = None if peers is None else Devices(peers)
        find_machine = environment.machine if self._devices is None else self._devices.machine
        self.planner = Planner(rootdir, find_machine, known, known_tasks)
        self.recorder = Recorder(paths, rootdir, options)
        self.gate: RunGate | None = RunGate(
            options, rootdir=rootdir, policy_path=paths.get("policy"), storage_path=paths["storage"]
        )
        """Judges the run; None if it is not compared, and its policy has no bounds of figures."""
        if options.compare is None and not self.gate.policy.figures:
            self.gate = None
        else:
            self.recorder.judge = self.gate.judge
        self._sample_period_s, self._profile_method = options.sample_period, options.profile_method
        self._live = live
        self._process = os.getpid()
        # No TemporaryDirectory: a process that a test forks would remove it at its end.
        self._folder = folder = Path(tempfile.mkdtemp(prefix="llmgpu-run-"))
        self._profilers: tuple[tuple[tuple[str, ...], ...], Profiler | NodeProfilers] | None = None
        launcher = LocalLauncher(folder) if peers is None else EnvLauncher(peers, folder)
        self._project = Project.at(rootdir)
        note = partial(live.show, at_once=True)
        self.runner = Runner(launcher, self.profilers_of, self._show, note, paths.get("trace"), self._project)
        self._last: dict[Group, str] = {}
        """The last test of each group that measures."""
        self._cases: list[tuple[Machine, Case, int | None]] = []
        """Machine and case of each test, and its batch size if the test does not choose it."""
        self._completed: set[Group] = set()
        self._out_of_memory: set[Group] = set()
        self._required: set[Group] = set()
        """The groups of which something should fit into memory."""
        self._launch = ""
        self._interrupted_s = -math.inf
        """The time of the latest Ctrl-C."""
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], object] | int] = {}
        """The handlers before this session: the signals that end a job are handled like Ctrl-C."""
        # Outside the main thread nothing changes; a signal that is ignored stays so, as under nohup.
        if threading.current_thread() is threading.main_thread():
            for number in _TERMINATION:
                if (before := signal.getsignal(number)) != signal.SIG_IGN:
                    signal.signal(number, _interrupt)
                    self._handlers[number] = signal.SIG_DFL if before is None else before
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._interrupt_again)
                self._handlers[signal.SIGINT] = signal.default_int_handler

    def expect(
        self, group: Group, nodeid: str | None, batch_size: int | None, *, scored: Sequence[str], may_fit_nowhere: bool
    ) -> None:
        """Check a test that will run; called in the order of the run.

        The node id is None for a test that measures nothing, and the batch size where the test chooses it. `scored` are
        the tasks whose items, chosen by the options, the test scores; none where the test has its own items. Some of
        a group should fit unless `may_fit_nowhere` is true for all. ValueError if the test cannot be measured.
        """
        strategy, options = group
        # A test that names no strategy measures an engine of its own, which is known when it runs.
        ask = partial(self.planner.request, options, strategy, function=Function() if not strategy else None)
        requests = [ask(batch_size or 1, task=task) for task in scored] or [ask(1)]
        if not may_fit_nowhere:
            self._required.add(group)
        if nodeid is not None:
            self._last[group] = nodeid
            self.recorder.expected.append(nodeid)
        self.runner.expected.append(requests[0])
        self._cases += [(request.machine, request.case, batch_size) for request in requests]

    def resume(self, options: Options) -> None:
        """Continue the session of a report (see `Recorder.resume`), which changes it: once no test is refused."""
        assert options.resume is not None, "the run continues a report"
        self.runner.resume(self.recorder.resume(options.resume, self.planner.machine(options)))

    def headlines(self) -> list[str]:
        """Return the lines that name devices, model, data and batch sizes, the report that is continued, and notes."""
        by_machine: dict[str, list[tuple[Machine, Case, int | None]]] = {}
        for entry in self._cases:
            by_machine.setdefault(entry[0].describe(), []).append(entry)
        lines = [
            terminal.headline(found[0][0], [case for _, case, _ in found], [size for *_, size in found if size])
            for found in by_machine.values()
        ]
        if self.recorder.report is not None:
            lines += [f"llmgpu: {line}" for line in terminal.resumptions(self.recorder.report)]
        lines += self.planner.notes
        if self._devices is not None:
            lines += [f"note: the nodes differ: {text}" for text in self._devices.notes]
        if self.gate is not None:
            lines += self.gate.notes([case for _, case, _ in self._cases])
        return lines

    def start_launch(self, number: int, of: int) -> None:
        """Begin the next launch of the same cases, with new processes."""
        self.runner.close()
        self.recorder.start_launch(number)
        self._launch = f"launch {number} of {of}"
        self._live.show(f"llmgpu: {self._launch}", at_once=True)

    def with_reference(self, request: CaseRequest) -> CaseRequest:
        """Return a request with the texts of the reference strategy, where the run has generated them before."""
        report = self.recorder.report
        mp = reference.find(request.case, report.cases) if report is not None and request.case.generates else None
        if mp is None or (texts := generated(mp)) is None or texts.tokens is None:
            return request
        return msgspec.structs.replace(request, reference=ReferenceTexts(key=mp.key, tokens=texts.tokens))

    def record(self, result: CaseResult, options: Options, nodeid: str) -> CaseResult:
        """Add a result of any outcome to the report; return its case with all launches so far."""
        self._live.clear()
        with _deferred_interrupt() as requested:
            imported_here = {} if self._project is None else self._project.imported_from_elsewhere()
            whole = self.recorder.add(
                result,
                options,
                nodeid,
                self.planner.machine(options),
                kernel_names=list(self.runner.kernel_names),
                ceilings=self.runner.ceilings,
                imported_from=imported_here | self.runner.imported_from,
            )
        if requested:
            raise KeyboardInterrupt
        return whole

    def note(self, group: Group, outcome: str) -> None:
        """Keep the outcome of a case or a call of a group."""
        if outcome == "completed":
            self._completed.add(group)
        elif outcome in OUT_OF_MEMORY:
            self._out_of_memory.add(group)

    def nothing_fits(self, group: Group, nodeid: str) -> bool:
        """Return whether this is the last test of a group in which no test completed although one should."""
        found = self._last.get(group, nodeid) == nodeid and group in self._required - self._completed
        if found:
            self._out_of_memory.discard(group)  # the test itself fails
        return found

    @property
    def forked(self) -> bool:
        """True in a process that a test or a plugin forked: files and ranks are those of the first process."""
        return os.getpid() != self._process

    def problems(self) -> list[str]:
        """Return why a run fails although no test failed: files, regressions without an item, groups that never fit."""
        unreported = self.gate.unreported() if self.gate is not None else []
        nothing_fitted = [
            f"{strategy}, {options.model}: out of memory, and nothing completed"
            for strategy, options in sorted(self._out_of_memory & self._required - self._completed, key=repr)
        ]
        return [*self.recorder.problems.values(), *unreported, *nothing_fitted]

    def profilers_of(self, machine: Machine) -> Profiler | NodeProfilers:
        """Return the profilers of the devices of a machine; the samplers of other devices are ended first."""
        wanted = tuple(tuple(gpu.uuid for gpu in gpus) for gpus in machine.gpus_of_nodes)
        if self._profilers is None or self._profilers[0] != wanted:
            if self._profilers is not None:
                self._profilers[1].close()
            settings = [(self._sample_period_s, uuids, self._profile_method) for uuids in wanted]
            here = Profiler(*settings[0])
            self._profilers = wanted, here
            if self._devices is not None and len(wanted) > 1:
                nodes = enumerate(settings[1:], 1)
                others = [partial(self._devices.call_on(node), ask_here, theirs) for node, theirs in nodes]
                self._profilers = wanted, NodeProfilers(here, others, {gpu.uuid: gpu.index for gpu in machine.gpus})
        return self._profilers[1]

    def end(self, exit_status: int, *, interrupted: bool, deselected: Sequence[str]) -> int:
        """Judge the run, end every process and complete the report. Ctrl-C meanwhile loses nothing.

        `deselected` are the node ids of deselected tests and, where pytest cannot name them, the options that
        deselected them: `complete` in the report covers the other tests. Return the exit status of the run: that of
        pytest, 1 if it is 0 and the run has problems, or that of an interrupted run after Ctrl-C.
        """
        if self.gate is not None:
            # The verdicts decide the status, and no item of the gate may have run.
            self.recorder.conclude(exit_status, interrupted=interrupted, deselected=deselected)
        exit_status = exit_status or int(bool(self.problems()))
        try:
            self._end_processes()
        except KeyboardInterrupt:
            # A late or a second Ctrl-C: the measured cases are still written and shown.
            exit_status, interrupted = _INTERRUPTED, True
            self._end_processes()
        with _deferred_interrupt() as requested:
            self.recorder.conclude(exit_status, interrupted=interrupted, deselected=deselected)
            self.recorder.finish(None if self.gate is None else self.gate.base)
        # Checked again, because the last writing of the report may have failed.
        return _INTERRUPTED if requested else exit_status or int(bool(self.problems()))

    def summary(self, *, verbose: bool = False) -> str:
        """Return the tables, the findings and the path of the report; empty where nothing was measured."""
        report = self.recorder.report
        if report is None:
            return ""
        verdicts = [] if self.gate is None else [self.gate.summary()]
        tables = terminal.tables(report, verbose=verbose)
        text = "\n\n".join([tables, *verdicts, "\n".join(self.recorder.whereabouts())])
        return named(text, self.recorder.name, report.options.get("--llmgpu-compare"))

    def close(self) -> None:
        """End every process, delete their logs and restore the handlers of signals; nothing in a forked process."""
        if self.forked:
            return
        self._end_processes()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _end_processes(self) -> None:
        self.runner.close()
        if self._profilers is not None:
            self._profilers[1].close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _interrupt_again(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as signal calls it
        """Take several Ctrl-C in haste for one: the second one would end the writing of what was measured."""
        before_s, self._interrupted_s = self._interrupted_s, time.monotonic()
        if self._interrupted_s - before_s > _HASTE_S:
            raise KeyboardInterrupt

    def _show(self, case: Case, step: str, done: int, planned: int, elapsed_s: float) -> None:
        name = f"{case.id} ({self._launch})" if self._launch else case.id
        self._live.show(terminal.progress(name, step, done, planned, elapsed_s, batch_size=case.batch_size))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - as signal calls it
    # Only once: `timeout` of coreutils sends it twice, and the second one would stop the writing of the report.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def _deferred_interrupt() -> Iterator[list[float]]:
    """Let a block run to its end although Ctrl-C is pressed, also in haste; the list then has the times of it."""
    received: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as signal calls it
        received.append(time.monotonic())
        if received[-1] - received[0] > _HASTE_S:
            raise KeyboardInterrupt  # the user does not want to wait for the block

    before = signal.signal(signal.SIGINT, receive)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
