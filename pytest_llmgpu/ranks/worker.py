"""What one rank does: load a model through its strategy, then score case after case until it is told to stop.

`python -m pytest_llmgpu.ranks REPORT CASE_ID` runs one case of a report by hand, under a debugger if need be; a
case of several processes is started with `torchrun --nproc-per-node=N -m pytest_llmgpu.ranks`, and the first of
them prints. A
report names a strategy of your own by its name, a dataset or model outside the rootdir by its last component only: say
where they are with `--strategy`, `--dataset` and `--model`.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu import strategies
from pytest_llmgpu.inference import models, scoring
from pytest_llmgpu.inference.batching import Plan
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.hellaswag import Item
from pytest_llmgpu.processes import die_with_parent
from pytest_llmgpu.ranks import device_memory, graph_trial, rerun, serving, traffic
from pytest_llmgpu.ranks.device_memory import DeviceUse
from pytest_llmgpu.ranks.protocol import FinishedBatch
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.result import Accuracy, Batches, Collective, Phase
from pytest_llmgpu.strategies.protocol import Workspace

if TYPE_CHECKING:
    import torch

    from pytest_llmgpu.strategies.protocol import Loaded, Strategy

__all__ = [
    "RankState",
    "ScoreReply",
    "TrafficReply",
    "account",
    "call",
    "give",
    "load",
    "main",
    "measure",
    "reset",
    "score",
    "warm_up",
]


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured of one case."""

    started_s: float
    """CLOCK_MONOTONIC when the first batch began."""
    ended_s: float
    """CLOCK_MONOTONIC when the last batch was done."""
    warmup_s: float
    plan_sha256: str
    execution: str
    """`eager` or `cuda_graphs`."""
    execution_choice: str
    """Why, in a sentence."""
    batches: Batches
    accuracy: Accuracy
    memory: list[DeviceUse]
    workspace: Workspace | None


class TrafficReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sends when a case is scored once."""

    collectives: list[Collective] | None
    """None where it could not be counted."""
    why: str | None = None


class RankState:
    """What a rank keeps between commands."""

    def __init__(self, on_batch: Callable[[FinishedBatch], None]) -> None:
        self.on_batch = on_batch
        self.phase: Phase = "load"
        self.case: Case | None = None
        self.source: ModelSource | None = None
        self.strategy: Strategy | None = None
        self.loaded: Loaded | None = None
        self.devices: Sequence[torch.device] = ()
        self.weights_bytes: Sequence[int | None] = ()
        self.loading_peak_bytes: Sequence[int | None] = ()
        self.held_bytes: Sequence[int] = ()
        self.items: dict[str, Sequence[Item]] = {}
        self.requests: dict[str, scoring.Requests] = {}
        self.steps: Generator[None, None, ScoreReply] | None = None
        """The case that is warmed up and not measured yet."""
        self.plan: Plan | None = None
        """What the latest case scored."""

    def use(self) -> list[DeviceUse]:
        """Return what the devices held at most since the case began; nothing before they are known."""
        if not self.devices:
            return []
        return device_memory.usage(self.devices, self.weights_bytes, self.loading_peak_bytes, self.held_bytes)


def load(state: RankState, case: Case, source: ModelSource, place: str) -> list[DeviceUse]:
    """Enforce the cap, load the model of a case by the strategy at `place`, and return what the devices hold then."""
    import torch

    state.phase, state.case, state.source = "load", case, source
    state.strategy = strategy = strategies.make(place)
    if case.device == "cuda":
        here = range(case.devices) if strategy.ranks(case.devices) == 1 else [int(os.environ["LOCAL_RANK"])]
        devices = [torch.device("cuda", index) for index in here]
    else:
        devices = [torch.device("cpu")]
    state.held_bytes = device_memory.hold(devices, case.gpu_memory_bytes)
    state.devices, state.weights_bytes, state.loading_peak_bytes = devices, [None] * len(devices), [None] * len(devices)
    state.loaded = strategy.load(case, source)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.loaded.world_size != started:
        raise ValueError(
            f"strategy {case.strategy} loaded for {state.loaded.world_size} ranks (Loaded.world_size), {started} run"
        )
    state.weights_bytes, state.loading_peak_bytes = device_memory.allocated(devices), device_memory.peaks(devices)
    return state.use()


def reset(state: RankState) -> None:
    """Empty caches and forget peaks: what is seen of the devices from now on is the next case's."""
    device_memory.reset(state.devices)


def give(state: RankState, sha256: str, items: Sequence[Item]) -> None:
    """Hand over a dataset, once; later cases name it by its hash."""
    state.items[sha256] = items


def score(state: RankState, sha256: str, batch_size: int) -> ScoreReply:
    """Score a dataset at one batch size."""
    warm_up(state, sha256, batch_size)
    return measure(state)


def warm_up(state: RankState, sha256: str, batch_size: int) -> None:
    """Get everything ready for `measure`; the devices are idle when this returns, so that counters can be read."""
    if state.steps is not None:
        state.steps.close()
    state.phase = "forward"
    state.steps = _steps(state, sha256, batch_size)
    next(state.steps)


def measure(state: RankState) -> ScoreReply:
    """Score what was warmed up."""
    assert state.steps is not None
    steps, state.steps = state.steps, None
    try:
        next(steps)
    except StopIteration as stop:
        reply: ScoreReply = stop.value
        return reply
    raise AssertionError("a case has one measured step")


def account(state: RankState) -> TrafficReply:
    """Count what the case that was measured last sends, in forwards of their own."""
    assert state.case is not None
    assert state.strategy is not None
    assert state.loaded is not None
    assert state.plan is not None
    loaded, plan = state.loaded, state.plan
    if loaded.world_size == 1 and len(loaded.devices) == 1:
        return TrafficReply(collectives=[])
    rows = max(batch.rows for batch in plan.batches)
    if rows < traffic.MOST_ROWS:
        # The forwards that count have more rows than a workspace for this case has room for.
        state.strategy.prepare(loaded, traffic.MOST_ROWS, plan.tokens)
    try:
        return TrafficReply(collectives=traffic.of_plan(loaded, plan, workload=state.case.workload))
    except ValueError as error:
        return TrafficReply(collectives=None, why=str(error))


def _steps(state: RankState, sha256: str, batch_size: int) -> Generator[None, None, ScoreReply]:
    """Warm up, stop, and score when told to go on."""
    assert state.case is not None
    assert state.source is not None
    assert state.strategy is not None
    assert state.loaded is not None
    loaded, items = state.loaded, state.items[sha256]
    if sha256 not in state.requests:
        longest = models.max_length(loaded.config)
        state.requests[sha256] = scoring.encode(items, models.load_tokenizer(state.source), longest)
    requests, case = state.requests[sha256], state.case
    strategy = state.strategy
    reset(state)
    began = time.monotonic()

    def prepare(plan: Plan) -> Workspace | None:
        return strategy.prepare(loaded, max(batch.rows for batch in plan.batches), plan.tokens)

    def alive(latency_s: float, sequences: int, tokens: int, padded_tokens: int) -> None:
        state.on_batch(FinishedBatch(latency_s, sequences, tokens, padded_tokens, planned=0))

    def finished(latency_s: float, sequences: int, tokens: int, padded_tokens: int) -> None:
        state.on_batch(FinishedBatch(latency_s, sequences, tokens, padded_tokens, planned=len(plan.batches)))

    model, home, devices = loaded.model, loaded.input_device, loaded.devices
    with graph_trial.chosen(
        loaded,
        requests,
        batch_size,
        asked=case.cuda_graphs,
        dtype=case.dtype,
        prepare=prepare,
        workload=case.workload,
    ) as choice:
        state.plan = plan = choice.plan
        scoring.warm_up(model, plan, on_batch=alive, input_device=home, devices=devices, workload=case.workload)
        warmup_s = time.monotonic() - began
        yield
        started = time.monotonic()
        scores = scoring.score(
            model, plan, on_batch=finished, input_device=home, devices=devices, workload=case.workload
        )
        ended = time.monotonic()
    return ScoreReply(
        started_s=started,
        ended_s=ended,
        warmup_s=warmup_s,
        plan_sha256=plan.sha256,
        execution=choice.execution,
        execution_choice=choice.why,
        batches=scores.batches,
        accuracy=scoring.accuracy(items, scores.loglikelihoods),
        memory=state.use(),
        workspace=choice.workspace,
    )


def call(state: RankState, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a user's function on the loaded model: `fn(loaded, *args)`."""
    assert state.loaded is not None
    state.phase = "forward"
    return fn(state.loaded, *args)


def run_by_hand(ordered: rerun.Ordered) -> ScoreReply:
    """Measure one case of a report in this process, which is one rank of it."""
    first = os.environ.get("RANK", "0") == "0"
    state = RankState(on_batch=rerun.Teller(sys.stderr) if first else lambda _: None)
    load(state, ordered.case, ordered.source, ordered.strategy)
    give(state, ordered.dataset.sha256, ordered.dataset.items)
    return score(state, ordered.dataset.sha256, ordered.case.batch_size)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a launcher, or run one case of a report by hand."""
    parser = argparse.ArgumentParser(prog="python -m pytest_llmgpu.ranks", description=__doc__)
    parser.add_argument("--serve", nargs=4, type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("report", nargs="?", help="report that holds the case")
    parser.add_argument("case_id", nargs="?", help="id of the case, such as mp-bs8")
    parser.add_argument("--strategy", metavar="MODULE:ATTRIBUTE", help="where the case's strategy is, if not built in")
    parser.add_argument("--dataset", metavar="PATH", help="where the case's dataset is, if not where the report says")
    parser.add_argument("--model", metavar="DIR", help="where the case's model is, if not where the report says")
    arguments = parser.parse_args(argv)
    if arguments.serve:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent, commands, answers, batches = arguments.serve
        die_with_parent(parent)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        serving.serve(
            RankState,
            Connection(commands, writable=False),
            Connection(answers, readable=False),
            Connection(batches, readable=False),
        )
        return
    if arguments.case_id is None:
        parser.error("a report and the id of one of its cases are needed")
    ordered = rerun.find(
        arguments.report,
        arguments.case_id,
        strategy=arguments.strategy,
        dataset=arguments.dataset,
        model=arguments.model,
    )
    reply = run_by_hand(ordered)
    if os.environ.get("RANK", "0") == "0":
        print(msgspec.json.encode(reply).decode())
