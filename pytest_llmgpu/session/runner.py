"""Run one case: its processes, its profile window, its outcome.

The processes are started once per model and strategy and kept for the cases that follow. If a case does not complete,
they are ended, and the next case starts on clean devices.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from pytest_llmgpu import processes
from pytest_llmgpu.engines.function import Function
from pytest_llmgpu.engines.protocol import Engine
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.protocol import Item
from pytest_llmgpu.profiling import machine, nvml
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.profiling.profiler import NodeProfilers, Profiler
from pytest_llmgpu.ranks import ceilings, engine_worker, registered, serving, traffic, worker
from pytest_llmgpu.ranks import host as hosts
from pytest_llmgpu.ranks.group import InProcess, RankGroup, slowest
from pytest_llmgpu.ranks.local import LocalLauncher, RankFailedError
from pytest_llmgpu.ranks.registered import ModelHook
from pytest_llmgpu.recording import work
from pytest_llmgpu.report import derived, disturbances
from pytest_llmgpu.report.case import Case, next_id
from pytest_llmgpu.report.report import Gpu, Report
from pytest_llmgpu.report.result import (
    CaseResult,
    Collective,
    DeviceMemory,
    Failure,
    Generation,
    Launch,
    Metric,
    Phase,
    Profile,
    Traffic,
)
from pytest_llmgpu.report.text import listed, percent
from pytest_llmgpu.report.work import (
    NO_WORK,
    TRAFFIC_FAILED,
    TRAFFIC_STOPPED,
    WORK_OFF,
    WORK_STOPPED,
    WORK_UNSEEN,
    Ceilings,
)
from pytest_llmgpu.store.imports import Project
from pytest_llmgpu.strategies.protocol import Strategy

Progress = Callable[[Case, str, int, int, float], None]
"""Called while a case runs, with the case, its step, the finished and planned batches of it, and its seconds."""

Loading = tuple[str, tuple[ModelHook, ...], int]
"""`Case.loading`, the functions that change the loaded model, and the id of an engine in this process."""

_BUILD_S = 1_800.0
"""Time limit of another node for the work before loading, which has limits of its own."""
_IMPORT_S = 60.0
"""Ranks of the next model that import for longer after a loading are ended, and started when they are needed."""
_NAMED = 3
"""A message names at most this many files that differ."""
_REMOTE = "the server is remote: its GPUs are not watched"
_WORK_FAILED = "the work passes failed"
_NO_TRAFFIC = "traffic is counted for completed cases only"


class CaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A case with everything that its measurement needs."""

    case: Case
    machine: Machine
    """The devices to run on; no GPU is watched for a server of another machine."""
    source: ModelSource
    """The model and its tokenizer."""
    strategy: str
    """The place of the case's strategy: `module:attribute`."""
    task: str
    """The place of the case's task: `module:attribute`."""
    items: Sequence[Item]
    """The items to score."""
    timeout_s: float
    """The case times out after this many seconds without a finished batch."""
    load_timeout_s: float
    """The case times out after this many seconds without a loaded model."""
    work: bool = False
    """True if work passes follow the measured forwards."""
    reference: worker.ReferenceTexts | None = None
    """Texts of the reference strategy that the case scores, too; None if there are none, or if the case scores."""
    engine: bool = False
    """True if an engine runs the model, not a strategy."""
    elsewhere: bool = False
    """True if it computes in processes of its own."""
    server_port: int | None = None
    """The port of a server of this machine that other programs have started; its processes are no disturbance."""
    given: Function | None = None
    """The engine that runs in this process; None for one of a rank."""
    model_hooks: tuple[ModelHook, ...] = ()
    """Functions of the test suite that change the loaded model, in the order of their calls."""

    @property
    def commands(self) -> ModuleType:
        """The commands of its ranks."""
        return engine_worker if self.engine else worker

    @property
    def loading(self) -> Loading:
        """What loading depends on: requests with an equal value share their processes."""
        return self.case.loading, self.model_hooks, id(None if self.given is None else self.given.given)


class _Ahead(NamedTuple):
    """Ranks that import their libraries while the model of other ranks is loaded."""

    conditions: tuple[Any, ...]
    group: RankGroup
    importing: list[Future[Any]]

    def is_for(self, conditions: tuple[Any, ...]) -> bool:
        """Return whether the ranks are like new ones."""
        return self.conditions == conditions and self.group.alive


class Runner:
    """Runs cases one after another, with one loaded model at a time."""

    def __init__(
        self,
        launcher: LocalLauncher,
        profilers_of: Callable[[Machine], Profiler | NodeProfilers],
        progress: Progress,
        show_line: Callable[[str], None],
        traces: Path | None = None,
        project: Project | None = None,
    ) -> None:
        """Prepare to run; no process is started. `traces` is the folder of trace files, `project` what is measured."""
        self.launcher = launcher
        """Starts the processes of the ranks, and has what they wrote."""
        self._profilers_of = profilers_of
        self._progress = progress
        self._show_line = show_line
        self._traces = traces
        self._project = project
        self.imported_from: dict[str, str] = {}
        """Maps modules of the project that a rank imported from outside of its working tree to their files."""
        self._traced: dict[str, str] = {}
        """Maps the key of each case to the begin of the names of its trace files. A later launch replaces them."""
        self._group: RankGroup | None = None
        self._loading: Loading | None = None
        self.expected: list[CaseRequest] = []
        """Cases that will run, in their order: ranks of the next model start while the one before is loaded."""
        self._ahead: _Ahead | None = None
        self._load_s: float | None = None
        self._phase: Phase = "load"
        self._began_on_nodes_s: Sequence[float] = ()
        """The time of each node at which the phase began."""
        self._here = False
        """True if an engine has computed on a GPU in this process."""
        self._used_before: Mapping[str, int] = {}
        """Maps the UUID of a device to the bytes in use there before the ranks were started."""
        self._out_of_memory: dict[str, int] = {}
        """Maps a series to the batch size that ran out of memory last."""
        self._built: set[tuple[str, int]] = set()
        """The place of a strategy and each node where it was built."""
        self._load_errors: dict[Loading, RankFailedError] = {}
        """Maps a loading that failed, for another reason than out of memory or a kill, to the error."""
        self._not_recorded: dict[tuple[Loading, str], str] = {}
        """Maps a loading and a workload to the operation that no CUDA graph could record."""
        self.kernel_names: dict[str, int] = {}
        """Maps the name of each kernel in the results to its number, in the order of the numbers."""
        self.ceilings: Ceilings | None = None
        """The rates of the GPUs; None before the first work passes on a GPU."""
        self._ceilings_measured: set[tuple[str, tuple[str, ...]]] = set()
        """The dtype of a matrix product, `copy` or `all_reduce`, with the UUIDs of the GPUs."""

    def resume(self, report: Report) -> None:
        """Continue a session: what its cases found holds for those that follow."""
        self.kernel_names = {name: number for number, name in enumerate(report.environment.kernel_names)}
        self.ceilings = report.environment.ceilings
        self._out_of_memory = {
            result.case.series: result.case.batch_size for result in report.cases if result.outcome == "oom"
        }

    def run(self, request: CaseRequest, record: Callable[[CaseResult], None]) -> CaseResult:
        """Measure a case and pass the result to `record`, also if the case fails or the user interrupts it.

        Returns:
            The result that `record` got. Other exceptions than a failed rank are raised after it was recorded.
        """
        case = request.case
        result = CaseResult(id=case.id, key=case.key, case=case, outcome="completed", why={"traffic": _NO_TRAFFIC})
        if self._out_of_memory.get(case.series, case.batch_size + 1) <= case.batch_size:
            result.outcome = "skipped_after_oom"
            record(result)
            return result
        launch = Launch(why={"work": NO_WORK})
        result.launches.append(launch)
        self._phase, self._began_on_nodes_s = "load", self._profilers_of(request.machine).now_s()
        measured = False
        try:
            execution = self._measure(request, launch)
            measured = True
            result.case = msgspec.structs.replace(case, execution=execution)
            self._run_further_passes(request, result)
        except RankFailedError as error:
            result.outcome, result.failure = error.outcome, error.failure
            if error.outcome == "oom":
                self._out_of_memory[case.series] = case.batch_size
            self._keep_finished_part(request, launch, error)
        except BaseException as error:
            if measured:
                # Only the passes after the measurement were stopped: the case is complete.
                self.close(kill=True)
                raise
            bug = isinstance(error, Exception)
            result.outcome = "error" if bug else "interrupted"
            name = type(error).__name__
            # The message of a KeyboardInterrupt is the name of a signal that ends the run as Ctrl-C does.
            cause = str(error) if isinstance(error, KeyboardInterrupt) and error.args else name
            message = f"{name}: {error}" if bug else f"interrupted by {cause}"
            result.failure = Failure(phase=self._phase, message=message)
            self._keep_finished_part(request, launch, None)
            raise
        finally:
            record(result)
        return result

    def ask(self, request: CaseRequest, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Load the model of a case if it is not loaded, and run `fn(state, *args)` on every rank."""
        try:
            group = self._load(request)
            self._send_items(group, request)
            return group.ask(fn, *args, phase="forward", timeout_s=request.timeout_s)
        except BaseException:
            self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """End all processes, at once with `kill`."""
        self._end_ranks(kill=kill)
        self._end_ahead()

    def take_output(self) -> dict[int, str]:
        """Return what the ranks wrote since the last call, but for those of the next model."""
        return self.launcher.take_output(() if self._ahead is None else self._ahead.group.ranks)

    def _end_ranks(self, *, kill: bool = False) -> None:
        """End the ranks of the loaded model."""
        group, self._group, self._loading = self._group, None, None
        if group is not None:
            end = group.kill if kill else group.close
            end()

    def _measure(self, request: CaseRequest, launch: Launch) -> str:
        """Measure a case and fill its launch, eagerly if its forwards cannot be recorded as CUDA graphs.

        Returns:
            How the forwards ran: `eager`, `cuda_graphs` or `compile`.
        """
        case, timeout_s = request.case, request.timeout_s
        # Load the model.
        profilers = self._profilers_of(request.machine)
        profilers.start()
        self._begin("load", profilers)
        group = self._load(request)
        launch.load_s = self._load_s
        self._send_items(group, request)
        # Warm up, without the caches that the previous case left: they are not part of this case.
        group.ask(worker.reset, phase="forward", timeout_s=timeout_s)
        self._begin("forward", profilers)
        began, recording = time.monotonic(), (request.loading, case.workload)
        try:
            # An engine may load its model again for another batch size.
            limit_s = max(timeout_s, request.load_timeout_s) if request.engine else timeout_s
            why_eager = self._not_recorded.get(recording)
            tick = self._tick(case, "warm-up")
            group.ask(request.commands.warm_up, case, why_eager, phase="forward", timeout_s=limit_s, tick=tick)
        except RankFailedError as error:
            if error.failure.evidence != serving.NOT_RECORDED or recording in self._not_recorded:
                raise
            # A failed recording leaves a rank in no defined state, and the others may wait in a collective.
            self._end_ranks(kill=True)
            self._not_recorded[recording] = error.failure.message
            return self._measure(request, launch)
        # Time the batches. The devices are idle before and after: the difference of the counters is what they sent.
        profilers.mark(wait=True)
        replies: list[worker.Measured] = group.ask(
            request.commands.measure, phase="forward", timeout_s=timeout_s, tick=self._tick(case, "first batch")
        )
        profilers.mark()  # before the answers are compared, which takes longer than a mark may wait
        launch.wall_s = time.monotonic() - began
        # Join what the ranks measured, and check the texts.
        ran = {(reply.launch.plan_sha256, reply.execution) for reply in replies}
        assert len(ran) == 1, "ranks run the same batches alike"
        ranks = [reply.launch for reply in replies]
        if len(ranks) > 1:
            _check_ranks_agree(ranks, case)
        _join(launch, ranks)
        if launch.generation is not None:
            self._check_texts(request, launch, launch.generation)
        # Take the window of the batches from the profile. The times of a rank are those of the clock of its node.
        of_nodes: dict[int, list[worker.Measured]] = {}
        for rank, reply in enumerate(replies):
            of_nodes.setdefault(request.machine.node_of(rank), []).append(reply)
        in_order = [of_nodes[node] for node in sorted(of_nodes)]
        started_s = [min(reply.started_s for reply in of_node) for of_node in in_order]
        ended_s = [max(reply.ended_s for reply in of_node) for of_node in in_order]
        devices = _by_gpu([rank.memory for rank in ranks], request.machine)
        self._add_profile(launch, profilers.slice(started_s, ended_s), devices, request)
        return replies[0].execution

    def _check_texts(self, request: CaseRequest, launch: Launch, texts: Generation) -> None:
        """Add the log-likelihoods of generated texts in a forward without a KV cache, and those of reference texts."""
        checked: list[Generation] | str = self._ask_further(request, request.commands.check_texts, request.reference)
        if isinstance(checked, str):
            launch.why["generation"] = f"the forwards that check the texts failed: {checked}"
            return
        launch.generation = msgspec.structs.replace(
            texts,
            prefill_loglikelihoods=checked[0].prefill_loglikelihoods,
            reference=checked[0].reference,
            reference_loglikelihoods=checked[0].reference_loglikelihoods,
        )

    def _ask_further(self, request: CaseRequest, command: Callable[..., Any], *args: Any) -> list[Any] | str:
        """Return what the ranks answer after the measurement, or why they do not: then they are ended."""
        if self._group is None:
            return "the ranks were ended before"
        try:
            tick = self._tick(request.case, "work passes")
            return self._group.ask(command, *args, phase="forward", timeout_s=request.timeout_s, tick=tick)
        except RankFailedError as error:
            self._end_ranks(kill=True)
            return str(error)

    def _tick(self, case: Case, step: str) -> Callable[[int, int], None]:
        """Return what shows the progress of a step that begins now."""
        began = time.monotonic()
        return lambda done, planned: self._progress(case, step, done, planned, time.monotonic() - began)

    def _begin(self, phase: Phase, profilers: Profiler | NodeProfilers) -> None:
        """Begin a phase of a case: if it fails, its profile and its counters start here."""
        profilers.mark()
        self._phase, self._began_on_nodes_s = phase, profilers.now_s()

    def _run_further_passes(self, request: CaseRequest, result: CaseResult) -> None:
        """Run each pass that follows the measured forwards and has forwards of its own.

        A pass adds to the result. If a pass fails, the measured figures stay.
        """
        launch = result.launches[-1]
        if not request.work:
            launch.why["work"] = WORK_OFF
            self._count_traffic(request, result)
            return
        launch.why["work"] = WORK_STOPPED
        traces = None
        if self._traces is not None:
            name = self._traced.setdefault(request.case.key, next_id(self._traced.values(), request.case))
            traces = str(self._traces / name.replace("/", "-"))
        # First: the CUDA graphs of the case end where the traffic is counted.
        recorded = self._ask_further(request, request.commands.record_work, traces)
        why = f"{_WORK_FAILED}: {recorded}" if isinstance(recorded, str) else None
        if not isinstance(recorded, str) and recorded[0] is not None:
            why = f"{WORK_UNSEEN}: {recorded[0]}"
        launch.why["work"] = why or WORK_STOPPED
        self._count_traffic(request, result)
        if why is not None:
            return
        if self._group is None:
            launch.why["work"] = "the ranks were ended when traffic was counted"
            return
        replies: list[list[work.WorkReply]] | str = self._ask_further(
            request, request.commands.run_eager_passes, traces
        )
        if isinstance(replies, str):
            launch.why["work"] = f"{_WORK_FAILED}: {replies}"
            return
        sizes = self._ask_further(request, request.commands.model_size)
        # Without the size of the model the bound alone is unknown.
        size = f"{_WORK_FAILED}: {sizes}" if isinstance(sizes, str) else sizes[0]
        launch.work, *prefill = (
            work.join(of_ranks, self.kernel_names, size)
            # The rank of an engine has the replies of all processes that compute.
            for of_ranks in (replies if request.engine else zip(*replies, strict=True))
        )
        launch.prefill_work = prefill[0] if prefill else None
        launch.traces = [path for of_rank in replies for reply in of_rank for path in reply.traces]
        del launch.why["work"]
        # The rates of the GPUs, unless they were measured in this session.
        uuids = tuple(gpu.uuid for gpu in request.machine.gpus)
        keys = {"product": (request.case.dtype, uuids), "copy": ("copy", uuids)}
        if len(replies) > 1:
            keys["all_reduce"] = ("all_reduce", uuids)
        wanted = [kind for kind, key in keys.items() if key not in self._ceilings_measured]
        if isinstance(sizes, str) or request.case.device != "cuda" or request.engine or not wanted:
            return
        self._ceilings_measured.update(keys.values())
        found: list[Ceilings] | str = self._ask_further(request, worker.measure_ceilings, wanted)
        if isinstance(found, str):
            found = [Ceilings(why={"devices": f"the benchmark of the GPUs failed: {found}"})]
        self.ceilings = ceilings.merged([*([] if self.ceilings is None else [self.ceilings]), *found])

    def _count_traffic(self, request: CaseRequest, result: CaseResult) -> None:
        """Add the bytes that the program itself sent, or the reason why they are unknown."""
        if self._group is None:
            result.why["traffic"] = f"the ranks were ended: {result.launches[-1].why['work']}"
            return
        result.why["traffic"] = TRAFFIC_STOPPED
        counted = self._ask_further(request, request.commands.account)
        if isinstance(counted, str):
            result.why["traffic"] = f"{TRAFFIC_FAILED}: {counted}"
            return
        if request.engine and isinstance(counted[0], list):
            (counted,) = counted
        if unknown := [reason for reason in counted if isinstance(reason, str)]:
            result.why["traffic"] = unknown[0]
            return
        ranks: list[list[Collective]] = [total for total, _ in counted]
        try:
            traffic.check(ranks)
        except ValueError as error:
            self._end_ranks(kill=True)
            result.outcome, result.failure = "error", Failure(phase="forward", message=str(error))
        sequences = sum(result.launches[-1].batches.sequences)
        steps = [step for _, step in counted if step is not None]
        result.traffic = Traffic(
            ranks=ranks,
            wire_bytes_per_sequence=sum(one.sent_bytes for rank in ranks for one in rank) / sequences,
            step=steps if len(steps) == len(ranks) else None,
        )
        del result.why["traffic"]

    def _load(self, request: CaseRequest) -> RankGroup:
        """Return the ranks with the model of a case loaded; start them if others, or none, are running."""
        case = request.case
        if self._group is not None and self._loading == request.loading and self._group.alive:
            return self._group
        self._end_ranks()
        if (failed := self._load_errors.get(request.loading)) is not None:
            # Another batch size would fail in the same way, and after the same time.
            raise RankFailedError(failed.outcome, failed.failure)
        strategy = registered.make(request.strategy)
        nodes_of_ranks = [request.machine.node_of(rank) for rank in range(strategy.ranks(case.devices))]
        try:
            self._build(strategy, request)
            self._used_before = self._profilers_of(request.machine).used_bytes()
            if request.server_port:  # what a server holds was in use before, too
                family = processes.family(processes.listeners(request.server_port))
                found = nvml.computing([gpu.uuid for gpu in request.machine.gpus])
                held = {uuid: sum(pids[pid] for pid in family & pids.keys()) for uuid, pids in found.items()}
                known = self._used_before if any(held.values()) else {}
                self._used_before = {uuid: size - held.get(uuid, 0) for uuid, size in known.items()}
            if request.given is not None:
                self._group = InProcess(request.given)
                self._here |= case.device == "cuda"
            else:
                self._group = self._start(request)
            if any(nodes_of_ranks):
                self._prepare_nodes(self._group, request, nodes_of_ranks)
            loaded = self._load_model(self._group, request)
        except RankFailedError as error:
            # Who kills a process does not kill the next one.
            if error.outcome != "oom" and error.failure.signal not in (signal.SIGKILL, signal.SIGTERM):
                failure = msgspec.structs.replace(
                    error.failure, message=f"not tried: {case.id} could not be loaded: {error}", log_tail=None
                )
                self._load_errors[request.loading] = RankFailedError(error.outcome, failure)
            raise
        if self._project is not None:
            asked = worker.imported_from_elsewhere, self._project
            for found in self._group.ask(*asked, phase="load", timeout_s=request.load_timeout_s):
                self.imported_from |= found
        devices = _by_gpu(loaded, request.machine)
        held = {gpu.uuid: device.held_bytes for gpu, device in devices if gpu}
        self._profilers_of(request.machine).here.held_bytes = held
        self._loading = request.loading
        return self._group

    def _load_model(self, group: RankGroup, request: CaseRequest) -> list[list[DeviceMemory]]:
        """Load the model in the ranks, while those of the next model import; return the memory of their devices."""
        limit_s, tick = request.load_timeout_s, self._tick(request.case, "loading")
        ask = partial(group.ask, phase="load", timeout_s=limit_s, tick=tick)
        if not request.engine:
            self._start_ahead(request)
            ask(worker.import_libraries, request.case, request.source)
        began = time.monotonic()
        loaded = ask(request.commands.load, request.case, request.source, request.strategy, request.model_hooks)
        self._load_s = time.monotonic() - began
        # No case is measured beside an import.
        if self._ahead is not None and wait(self._ahead.importing, min(limit_s, _IMPORT_S)).not_done:
            self._end_ahead()
        return loaded

    def _start(self, request: CaseRequest) -> RankGroup:
        """Return new ranks for a case, or those that were started ahead if they are like new ones."""
        if self._ahead is None or not self._ahead.is_for(_conditions(request)):
            return RankGroup(self.launcher, _environments(request))
        ahead, self._ahead = self._ahead, None
        return ahead.group

    def _start_ahead(self, request: CaseRequest) -> None:
        """Start the ranks of the next model, where the run has one and its ranks are all of this machine."""
        these = itertools.dropwhile(lambda one: one.case.loading != request.case.loading, self.expected)
        following = next((one for one in these if one.case.loading != request.case.loading), None)
        if following is None or following.engine or not self.launcher.starts_ahead:
            self._end_ahead()
            return
        conditions = _conditions(following)
        if self._ahead is not None and self._ahead.is_for(conditions):
            return  # a case before failed
        self._end_ahead()
        group = RankGroup(self.launcher, _environments(following))
        self._ahead = _Ahead(conditions, group, group.submit(worker.import_libraries, following.case, following.source))

    def _end_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.group.kill()

    def _build(self, strategy: Strategy | Engine, request: CaseRequest) -> None:
        """Do the work on this node that ranks need before they load, once."""
        if not isinstance(strategy, Engine) and (request.strategy, 0) not in self._built:
            try:
                strategy.build(request.case, self._show_line)
            except RuntimeError as error:
                raise _not_built(str(error)) from None
            self._built.add((request.strategy, 0))

    def _prepare_nodes(self, group: RankGroup, request: CaseRequest, nodes_of_ranks: Sequence[int]) -> None:
        """Refuse nodes with other files of the model, and build on each node."""
        hashes: list[Mapping[str, str] | None] = group.ask(
            worker.file_hashes, request.source, phase="load", timeout_s=request.load_timeout_s
        )
        # With one GPU in sight of each process, every rank is the first one of its node.
        by_node = {node: files for node, files in zip(nodes_of_ranks, hashes, strict=True) if files is not None}
        if found := machine.file_differences([files for _, files in sorted(by_node.items())]):
            message = f"the files of {request.case.model} differ: {listed(found, _NAMED)}"
            raise RankFailedError("error", Failure(phase="load", message=message))
        places = {(request.strategy, node) for node in nodes_of_ranks}
        if not self._built >= places:
            wanted = request.case, request.source, request.strategy
            errors: list[str | None] = group.ask(worker.build, *wanted, phase="load", timeout_s=_BUILD_S)
            for node, error in zip(nodes_of_ranks, errors, strict=True):
                if error is not None:
                    raise _not_built(f"node {node}: {error}")
            self._built |= places

    def _send_items(self, group: RankGroup, request: CaseRequest) -> None:
        """Send the items of a case to the ranks, unless they have them."""
        sha256 = request.case.dataset_sha256
        if sha256 not in group.given:
            group.ask(worker.give, sha256, request.items, request.task, phase="forward", timeout_s=request.timeout_s)
            group.given.add(sha256)

    def _keep_finished_part(self, request: CaseRequest, launch: Launch, error: RankFailedError | None) -> None:
        """Fill the launch of a case that failed with its finished batches, its profile and its memory."""
        profilers = self._profilers_of(request.machine)
        ended_s = profilers.now_s()
        profilers.mark()  # before the ranks are ended, which takes longer than a mark may wait
        group = self._group
        self._end_ranks(kill=True)
        if group is not None and self._phase == "forward":
            # Not while loading: a group may then still hold the batches of the previous case.
            # Not before the ranks are ended: only then have all batches that they streamed arrived.
            launch.batches = group.batches()
        of_ranks: list[Sequence[DeviceMemory]] = []
        if error is not None and error.memory:
            of_ranks = [()] * (error.failure.rank or 0) + [error.memory]
        # A rank that failed to load reports its held bytes with the failure; one that died reported them after loading.
        devices = _by_gpu(of_ranks, request.machine)
        held = {gpu.uuid: device.held_bytes for gpu, device in devices if gpu}
        self._add_profile(launch, profilers.slice(self._began_on_nodes_s, ended_s, held or None), devices, request)
        profilers.here.held_bytes = {}

    def _add_profile(
        self, launch: Launch, profile: Profile, devices: Sequence[tuple[Gpu | None, DeviceMemory]], request: CaseRequest
    ) -> None:
        """Fill a launch with its profile and the disturbances of its window, and with the memory of its devices.

        The memory has what NVML reports about it, and the index of its own device.
        """
        found: list[str] = []
        if profile.devices:
            # What this process holds for an engine was in use before, too.
            found = disturbances.find(profile, self._ours(request), {} if self._here else self._used_before)
        elif "server" in request.case.strategy_options:
            profile = msgspec.structs.replace(profile, why={"profile": _REMOTE})
        on_cpu = request.case.device == "cpu" and not request.elsewhere
        if launch.host is not None and (busy := disturbances.busy_cpu(launch.host, on_cpu=on_cpu)):
            found.append(busy)
        launch.profile = msgspec.structs.replace(profile, invalid=found)
        launch.memory = []
        seen = {device.uuid: device for device in profile.devices}
        for gpu, device in devices:
            used: Metric | str = profile.why.get("profile", "no sample")
            if gpu is not None and gpu.uuid in seen:
                used = derived.of_window(profile, seen[gpu.uuid], "memory_used_bytes")
            figures: dict[str, Any]
            if isinstance(used, str):
                figures = {"why": device.why | dict.fromkeys(("nvml_used_max_bytes", "nvml_used_mean_bytes"), used)}
            else:
                pairs = {"nvml_used_max_bytes": used.max, "nvml_used_mean_bytes": used.mean}
                figures = {name: None if value is None else round(value) for name, value in pairs.items()}
            launch.memory.append(msgspec.structs.replace(device, index=0 if gpu is None else gpu.index, **figures))

    def _ours(self, request: CaseRequest) -> Mapping[str, int] | None:
        """Return UUID to the number of processes of this run and of its server there; None if it is not known."""
        uuids = [gpu.uuid for gpu in request.machine.gpus]
        family = processes.family({os.getpid(), *processes.listeners(request.server_port)})
        ours = {uuid: sum(pid in family for pid in pids) for uuid, pids in nvml.computing(uuids).items()}
        if request.elsewhere or self._here:
            # In a container NVML may have ids of another namespace.
            return ours if any(ours.values()) else None
        # One process on each GPU, or one for all.
        return dict.fromkeys(uuids, 1) | {uuid: count for uuid, count in ours.items() if count}


def _environments(request: CaseRequest) -> Sequence[Mapping[str, str]]:
    """Return the variables of each rank of a case."""
    ranks = registered.make(request.strategy).ranks(request.case.devices)
    return hosts.environments(request.machine, request.case.device, ranks)


def _conditions(request: CaseRequest) -> tuple[Any, ...]:
    """Return what ranks of a case are started for, and what they inherit, but for the name of the test."""
    inherited = {name: text for name, text in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return request.case.loading, inherited, sys.path[:], Path.cwd(), os.sched_getaffinity(0)


def _not_built(message: str) -> RankFailedError:
    return RankFailedError("error", Failure(phase="load", message=message, evidence="the build failed"))


def _check_ranks_agree(ranks: Sequence[Launch], case: Case) -> None:
    """Refuse log-likelihoods that differ by more than rounding from those of rank 0: every rank computes all."""
    answers = [answer for rank in ranks if (answer := rank.generation or rank.accuracy) is not None]
    assert len(answers) == len(ranks), "a case scores or generates"
    allowed, first = derived.LOGLIKELIHOOD_TOLERANCES[case.dtype], answers[0]
    for number, answer in enumerate(answers[1:], start=1):
        numbers = derived.decode(answer.loglikelihoods or ""), derived.decode(first.loglikelihoods or "")
        if getattr(answer, "tokens", None) != getattr(first, "tokens", None):
            message = f"rank {number} chose other tokens than rank 0"
        elif (difference := derived.typical_difference(*numbers)) > allowed:
            message = (
                f"the log-likelihoods of rank {number} typically differ by {percent(difference)} from those of rank 0; "
                f"{case.dtype} allows {100 * allowed:g} %"
            )
        else:
            continue
        raise RankFailedError("error", Failure(phase="forward", rank=number, message=message))


def _join(launch: Launch, ranks: Sequence[Launch]) -> None:
    """Fill a launch with what its ranks measured: the slowest rank counts, and the smallest workspace."""
    first = ranks[0]
    launch.why |= {name: reason for rank in ranks for name, reason in rank.why.items()}
    launch.warmup_s = max(rank.warmup_s for rank in ranks if rank.warmup_s is not None)
    launch.compile_s = max((rank.compile_s for rank in ranks if rank.compile_s is not None), default=None)
    launch.plan_sha256 = first.plan_sha256
    launch.batches = slowest([rank.batches for rank in ranks])
    launch.batches.clock_ghz = _of_gpus([rank.batches.clock_ghz for rank in ranks])
    launch.batches.launch_s, launch.batches.reference_s = first.batches.launch_s, first.batches.reference_s
    launch.accuracy = first.accuracy
    launch.figures = first.figures
    texts = [rank.generation for rank in ranks if rank.generation is not None]
    if texts:
        known = [one.kv_cache_bytes for one in texts if one.kv_cache_bytes is not None]
        launch.generation = msgspec.structs.replace(
            texts[0],
            first_token_s=list(map(max, zip(*(one.first_token_s for one in texts), strict=True))),
            step_s=list(map(max, zip(*(one.step_s for one in texts), strict=True))),
            prefill_clock_ghz=_of_gpus([one.prefill_clock_ghz for one in texts]),
            step_clock_ghz=_of_gpus([one.step_clock_ghz for one in texts]),
            kv_cache_bytes=sum(known) if len(known) == len(texts) else None,
        )
    launch.execution_choice = first.execution_choice
    launch.implementations = first.implementations
    uses = [rank.host for rank in ranks if rank.host is not None]
    of_ranks = [name for name, value in msgspec.structs.asdict(uses[0]).items() if isinstance(value, list)]
    launch.host = msgspec.structs.replace(
        uses[0],
        wall_s=max(host.wall_s for host in uses),
        **{name: [value for host in uses for value in getattr(host, name)] for name in of_ranks},
    )
    launch.tokens_requested = first.tokens_requested
    launch.tokens_granted = min(
        (rank.tokens_granted for rank in ranks if rank.tokens_granted is not None), default=None
    )


def _of_gpus(ranks: Sequence[list[list[float]] | None]) -> list[list[float]] | None:
    """Return the clocks [GPUs][batches] of the GPUs of all ranks; None if a rank has none."""
    known = [gpus for gpus in ranks if gpus is not None]
    return list(itertools.chain(*known)) if len(known) == len(ranks) else None


def _by_gpu(ranks: Sequence[Sequence[DeviceMemory]], machine: Machine) -> list[tuple[Gpu | None, DeviceMemory]]:
    """Return the memory of each device with its GPU: a rank that has several devices has all of them."""
    found: list[tuple[Gpu | None, DeviceMemory]] = []
    for rank, devices in enumerate(ranks):
        gpus = machine.gpus if len(devices) > 1 else machine.gpus[rank : rank + 1]
        found += itertools.zip_longest(gpus[: len(devices)], devices)
    return found
