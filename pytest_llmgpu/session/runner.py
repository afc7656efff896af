"""Run one case: processes, profile window, outcome.

Processes are started once per model and strategy and kept from case to case; after anything but a completed case they
are ended, so that the next one finds clean devices.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pytest_llmgpu import strategies
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.hellaswag import Item
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.profiling.profiler import Profiler
from pytest_llmgpu.ranks import traffic, worker
from pytest_llmgpu.ranks.device_memory import DeviceUse
from pytest_llmgpu.ranks.group import RankGroup, slowest
from pytest_llmgpu.ranks.protocol import Launcher, RankFailedError
from pytest_llmgpu.report import derived, disturbances, profile_figures
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.result import CaseResult, DeviceMemory, Failure, Launch, Phase, Profile, Traffic
from pytest_llmgpu.strategies.protocol import Strategy, Workspace

__all__ = ["Progress", "Request", "Runner"]

Progress = Callable[[Case, int, int, float], None]
"""Called while a case runs: the case, finished batches, planned batches, seconds since it was asked for."""

_NO_TRAFFIC = "traffic is counted of completed cases only"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A case with all that is needed to measure it."""

    case: Case
    machine: Machine
    source: ModelSource
    strategy: str
    """Where the case's strategy is: `module:attribute`."""
    items: Sequence[Item]
    timeout_s: float
    """Seconds without a finished batch."""
    load_timeout_s: float


class Runner:
    """Runs cases one after another; one loaded model at a time."""

    def __init__(
        self,
        launcher: Launcher,
        profiler_of: Callable[[Machine], Profiler],
        progress: Progress,
        say: Callable[[str], None],
    ) -> None:
        """Prepare to run.

        Args:
            launcher: Starts processes.
            profiler_of: Returns the profiler of a choice of devices.
            progress: Called while a case runs.
            say: Shows a line while something is built.
        """
        self._launcher = launcher
        self._profiler_of = profiler_of
        self._progress = progress
        self._say = say
        self._group: RankGroup | None = None
        self._loading: str | None = None
        self._load_s: float | None = None
        self._phase: Phase = "load"
        self._began_s = 0.0
        self._used_before: Mapping[str, int] = {}
        """UUID to the bytes in use before the ranks were started."""
        self._profiles: list[Profile] = []
        """Of the cases that completed: the first of the same devices is a yardstick for their clocks."""
        self._out_of_memory: dict[str, int] = {}
        self._built: dict[str, str | None] = {}
        """Place of each strategy that was built to the reason why it could not be, None where it could."""

    def run(self, request: Request, record: Callable[[CaseResult], None]) -> CaseResult:
        """Measure a case and hand the result to `record`, whatever happens, an interrupt included."""
        case = request.case
        result = CaseResult(id=case.id, key=case.key, case=case, outcome="completed", why={"traffic": _NO_TRAFFIC})
        if self._out_of_memory.get(case.series, case.batch_size + 1) <= case.batch_size:
            result.outcome = "skipped_after_oom"
            record(result)
            return result
        launch = Launch()
        result.launches.append(launch)
        self._phase, self._began_s = "load", time.monotonic()
        try:
            execution = self._measure(request, launch)
            result.case = msgspec.structs.replace(case, execution=execution)
            self._account(request, result)
        except RankFailedError as error:
            result.outcome, result.failure = error.outcome, error.failure
            if error.outcome == "oom":
                self._out_of_memory[case.series] = case.batch_size
            self._keep_what_finished(request, launch, error.use)
        except BaseException as error:
            bug = isinstance(error, Exception)
            result.outcome = "error" if bug else "interrupted"
            said = f"{type(error).__name__}: {error}" if bug else f"interrupted by {type(error).__name__}"
            result.failure = Failure(phase=self._phase, message=said)
            self._keep_what_finished(request, launch, ())
            raise
        finally:
            record(result)
        return result

    def ask(self, request: Request, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Load the model of a case, if it is not, and run `fn(state, *args)` on every rank of it."""
        try:
            group = self._load(request)
            self._give(group, request)
            return group.ask(fn, *args, phase="forward", timeout_s=request.timeout_s)
        except BaseException:
            self._abandon()
            raise

    def close(self) -> None:
        """End all processes."""
        if self._group is not None:
            self._group.close()
        self._group = self._loading = None

    def _measure(self, request: Request, launch: Launch) -> str:
        """Fill a launch, and return how its forwards were run."""
        case = request.case
        profiler = self._profiler_of(request.machine)
        profiler.start()
        self._begin("load", profiler)
        group = self._load(request)
        launch.load_s = self._load_s
        self._give(group, request)
        # Before the window begins: what the case before left in caches is not this one's.
        group.ask(worker.reset, phase="load", timeout_s=request.load_timeout_s)
        self._begin("forward", profiler)
        began = self._began_s
        group.ask(worker.warm_up, case.dataset_sha256, case.batch_size, phase="forward", timeout_s=request.timeout_s)
        # Now and after the last batch the devices are idle: counters that are read then say what the batches sent.
        profiler.mark(wait=True)
        replies: list[worker.ScoreReply] = group.ask(
            worker.measure,
            phase="forward",
            timeout_s=request.timeout_s,
            tick=lambda done, planned: self._progress(case, done, planned, time.monotonic() - began),
        )
        # Before answers are compared, which takes longer than a mark may wait: the devices are idle now.
        profiler.mark()
        launch.wall_s = time.monotonic() - began
        assert len({(reply.plan_sha256, reply.execution) for reply in replies}) == 1, "ranks run the same batches alike"
        _compare_ranks(replies, case)
        launch.warmup_s = max(reply.warmup_s for reply in replies)
        launch.plan_sha256 = replies[0].plan_sha256
        launch.batches = slowest([reply.batches for reply in replies])
        launch.accuracy = replies[0].accuracy
        launch.execution_choice = replies[0].execution_choice
        if (workspace := replies[0].workspace) is not None:
            launch.tokens_requested = workspace.tokens_requested
            launch.tokens_granted = min(reply.workspace.tokens_granted for reply in replies if reply.workspace)
        started, ended = min(reply.started_s for reply in replies), max(reply.ended_s for reply in replies)
        launch.profile = self._judged(profiler.slice(started, ended), request)
        self._profiles.append(launch.profile)
        launch.memory = [
            _device_memory(use, request.machine, launch.profile, reply.workspace)
            for reply in replies
            for use in reply.memory
        ]
        return replies[0].execution

    def _begin(self, phase: Phase, profiler: Profiler) -> None:
        """Begin a part of a case: where it fails, its profile begins here, and so does what the devices counted."""
        profiler.mark()
        self._phase, self._began_s = phase, time.monotonic()

    def _account(self, request: Request, result: CaseResult) -> None:
        """Add what the program itself sent; what was measured stays, whatever comes of this."""
        assert self._group is not None
        try:
            replies: list[worker.TrafficReply] = self._group.ask(
                worker.account, phase="forward", timeout_s=request.timeout_s
            )
        except RankFailedError as error:
            self._abandon()
            result.why["traffic"] = f"the forwards in which it is counted failed: {error}"
            return
        ranks = [reply.collectives for reply in replies if reply.collectives is not None]
        if len(ranks) < len(replies):
            result.why["traffic"] = next(reply.why for reply in replies if reply.why) or "it could not be counted"
            return
        try:
            traffic.check(ranks)
        except ValueError as error:
            self._abandon()
            result.outcome, result.failure = "error", Failure(phase="forward", message=str(error))
        sequences = sum(result.launches[-1].batches.sequences)
        result.traffic = Traffic(ranks=ranks, wire_bytes_per_sequence=traffic.wire_bytes_per_sequence(ranks, sequences))
        del result.why["traffic"]

    def _load(self, request: Request) -> RankGroup:
        case = request.case
        if self._group is not None and self._loading == case.loading and self._group.alive:
            return self._group
        self.close()
        strategy = strategies.make(request.strategy)
        self._build(strategy, request)
        self._used_before = nvml.used_bytes([gpu.uuid for gpu in request.machine.gpus])
        began = time.monotonic()
        self._group = RankGroup(self._launcher, _environments(request, strategy.ranks(case.devices)))
        replies: list[list[DeviceUse]] = self._group.ask(
            worker.load, case, request.source, request.strategy, phase="load", timeout_s=request.load_timeout_s
        )
        held = {use.uuid: use.held_bytes for reply in replies for use in reply if use.uuid is not None}
        self._profiler_of(request.machine).held_bytes = held
        self._loading, self._load_s = case.loading, time.monotonic() - began
        return self._group

    def _build(self, strategy: Strategy, request: Request) -> None:
        if request.strategy not in self._built:
            try:
                strategy.build(request.case, self._say)
                self._built[request.strategy] = None
            except RuntimeError as error:
                self._built[request.strategy] = str(error)
        # What could not be compiled for one case is not tried again for the next, which takes as long.
        if message := self._built[request.strategy]:
            raise RankFailedError("error", Failure(phase="load", message=message, evidence="the build failed"))

    def _give(self, group: RankGroup, request: Request) -> None:
        sha256 = request.case.dataset_sha256
        if sha256 not in group.given:
            group.ask(worker.give, sha256, request.items, phase="load", timeout_s=request.load_timeout_s)
            group.given.add(sha256)

    def _keep_what_finished(self, request: Request, launch: Launch, use: Sequence[DeviceUse]) -> None:
        profiler = self._profiler_of(request.machine)
        ended_s = time.monotonic()
        profiler.mark()  # before the ranks are ended, which takes longer than a mark may wait
        group = self._group
        self._abandon()
        if group is not None and self._phase == "forward":
            # While it loads, a group may hold the batches of the case before.
            # Only of ranks that are ended is it known that all they streamed has been heard.
            launch.batches = group.batches()
        held = {device.uuid: device.held_bytes for device in use if device.uuid is not None}
        # A rank that did not load has told what it holds with its failure; one that is gone told it when it loaded.
        launch.profile = self._judged(profiler.slice(self._began_s, ended_s, held or None), request)
        launch.memory = [_device_memory(device, request.machine, launch.profile) for device in use]
        profiler.held_bytes = {}

    def _judged(self, profile: Profile, request: Request) -> Profile:
        """Return a profile with what speaks against it."""
        ours = dict.fromkeys((gpu.uuid for gpu in request.machine.gpus), 1)  # a process a GPU, or one for all of them
        first = disturbances.first_alike(self._profiles, profile)
        return msgspec.structs.replace(profile, invalid=disturbances.invalid(profile, first, ours, self._used_before))

    def _abandon(self) -> None:
        if self._group is not None:
            self._group.kill()
        self._group = self._loading = None


def _environments(request: Request, world_size: int) -> list[Mapping[str, str]]:
    case = request.case
    visible = ",".join(gpu.uuid for gpu in request.machine.gpus) if case.device == "cuda" else ""
    if world_size == 1:
        return [{"CUDA_VISIBLE_DEVICES": visible}]
    return [
        {
            "CUDA_VISIBLE_DEVICES": visible,
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or _share(world_size),
        }
        for number in range(world_size)
    ]


def _compare_ranks(replies: Sequence[worker.ScoreReply], case: Case) -> None:
    """Refuse answers that depend on whom one asks: every rank computes all of them.

    Raises:
        RankFailedError: A rank's log-likelihoods are not the first one's, rounding aside.
    """
    first = derived.decode(replies[0].accuracy.loglikelihoods)
    for number, reply in enumerate(replies[1:], start=1):
        differ = derived.typical_difference(derived.decode(reply.accuracy.loglikelihoods), first)
        if differ > derived.LOGLIKELIHOOD_TOLERANCES[case.dtype]:
            message = f"rank {number} answers otherwise than rank 0: log-likelihoods typically differ by {differ:.1%}"
            raise RankFailedError("error", Failure(phase="forward", rank=number, message=message))


def _share(world_size: int) -> str:
    """Return how many of this process's cores each rank gets."""
    return str(max(1, len(os.sched_getaffinity(0)) // world_size))


def _device_memory(
    use: DeviceUse, machine: Machine, profile: Profile, workspace: Workspace | None = None
) -> DeviceMemory:
    index = next((gpu.index for gpu in machine.gpus if gpu.uuid == use.uuid), 0)
    seen = next((device for device in profile.devices if device.uuid == use.uuid), None)
    used = (
        profile_figures.of_window(profile, seen, "memory_used_bytes")
        if seen
        else profile.why.get("profile", "no sample")
    )
    why = dict(use.why)
    if workspace is None:
        why["workspace_bytes"] = "no workspace outside torch's allocator was told of"
    if isinstance(used, str):
        why |= dict.fromkeys(("nvml_used_max_bytes", "nvml_used_mean_bytes"), used)
    return DeviceMemory(
        index=index,
        weights_bytes=use.weights_bytes,
        loading_peak_bytes=use.loading_peak_bytes,
        peak_allocated_bytes=use.peak_allocated_bytes,
        peak_reserved_bytes=use.peak_reserved_bytes,
        workspace_bytes=None if workspace is None else workspace.workspace_bytes,
        held_bytes=use.held_bytes,
        nvml_used_max_bytes=None if isinstance(used, str) or used.max is None else round(used.max),
        nvml_used_mean_bytes=None if isinstance(used, str) or used.mean is None else round(used.mean),
        why=why,
    )
