"""What one rank does: load a model through its strategy, then score case after case until it is told to stop.

`python -m pytest_llmgpu.rank REPORT CASE_ID` runs one case of a report by hand, under a debugger if need be; a case of
several processes is started with `torchrun --nproc-per-node=N -m pytest_llmgpu.rank`, and the first of them prints. A
report names a strategy of your own by its name, a dataset or model outside the rootdir by its last component only: say
where they are with `--strategy`, `--dataset` and `--model`.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu import by_hand, execution, memory, models, oom, scoring, strategies
from pytest_llmgpu.batching import Plan
from pytest_llmgpu.case import Case
from pytest_llmgpu.launchers.protocol import FinishedBatch
from pytest_llmgpu.memory import DeviceUse
from pytest_llmgpu.models import ModelSource
from pytest_llmgpu.result import Accuracy, Batches, Failure, Outcome, Phase
from pytest_llmgpu.strategies.protocol import Workspace
from pytest_llmgpu.tasks.hellaswag import Item

if TYPE_CHECKING:
    import torch

    from pytest_llmgpu.strategies.protocol import Loaded, Strategy

__all__ = ["RankState", "ScoreReply", "call", "give", "load", "main", "reset", "score"]

_PR_SET_PDEATHSIG = 1


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

    def use(self) -> list[DeviceUse]:
        """Return what the devices held at most since the case began; nothing before they are known."""
        if not self.devices:
            return []
        return memory.usage(self.devices, self.weights_bytes, self.loading_peak_bytes, self.held_bytes)


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
    state.held_bytes = memory.hold(devices, case.gpu_memory_bytes)
    state.devices, state.weights_bytes, state.loading_peak_bytes = devices, [None] * len(devices), [None] * len(devices)
    state.loaded = strategy.load(case, source)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.loaded.world_size != started:
        raise ValueError(
            f"strategy {case.strategy} loaded for {state.loaded.world_size} ranks (Loaded.world_size), {started} run"
        )
    state.weights_bytes, state.loading_peak_bytes = memory.allocated(devices), memory.peaks(devices)
    return state.use()


def reset(state: RankState) -> None:
    """Empty caches and forget peaks: what is seen of the devices from now on is the next case's."""
    memory.reset(state.devices)


def give(state: RankState, sha256: str, items: Sequence[Item]) -> None:
    """Hand over a dataset, once; later cases name it by its hash."""
    state.items[sha256] = items


def score(state: RankState, sha256: str, batch_size: int) -> ScoreReply:
    """Score a dataset at one batch size."""
    assert state.case is not None
    assert state.source is not None
    assert state.strategy is not None
    assert state.loaded is not None
    state.phase = "forward"
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
    with execution.chosen(
        loaded, requests, batch_size, asked=case.cuda_graphs, dtype=case.dtype, prepare=prepare
    ) as choice:
        plan = choice.plan
        scoring.warm_up(model, plan, on_batch=alive, input_device=home, devices=devices)
        started = time.monotonic()
        scores = scoring.score(model, plan, on_batch=finished, input_device=home, devices=devices)
        ended = time.monotonic()
    return ScoreReply(
        started_s=started,
        ended_s=ended,
        warmup_s=started - began,
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


def failure_of(error: BaseException, phase: Phase) -> tuple[Outcome, Failure]:
    """Return an exception as plain records: a pickled exception may not unpickle, and needs its library to."""
    evidence = oom.evidence_of(error)
    lines = str(error).strip().splitlines() or [""]
    failure = Failure(
        phase=phase,
        message=f"{type(error).__name__}: {lines[0]}".rstrip(": "),
        evidence=evidence.rule if evidence else f"{type(error).__name__} was raised",
        requested_bytes=evidence.requested_bytes if evidence else None,
        free_bytes=evidence.free_bytes if evidence else None,
        allocated_bytes=evidence.allocated_bytes if evidence else None,
        tokens_requested=evidence.tokens_requested if evidence else None,
        tokens_granted=evidence.tokens_granted if evidence else None,
    )
    return ("oom" if evidence else "error"), failure


def serve(commands: Connection, answers: Connection, batches: Connection) -> None:
    """Answer commands in turn until the parent closes its end.

    An answer says how many batches were streamed before it, so that the parent can hear them out first.
    """
    streamed = 0

    def stream(batch: FinishedBatch) -> None:
        nonlocal streamed
        batches.send_bytes(pickle.dumps(tuple(batch)))
        streamed += 1

    state = RankState(on_batch=stream)
    while True:
        try:
            command = commands.recv_bytes()
        except EOFError:
            return
        try:
            fn, args = pickle.loads(command)  # noqa: S301 - written by our own parent
            answer = fn(state, *args)
            payload = pickle.dumps((streamed, True, answer))
        except BaseException as error:  # noqa: BLE001 - the rank's door: everything becomes a plain record
            traceback.print_exc()
            payload = pickle.dumps((streamed, False, (*failure_of(error, state.phase), state.use())))
            # The traceback's frames keep the tensors of the failed forward alive.
            traceback.clear_frames(error.__traceback__)
            del error
        answers.send_bytes(payload)


def run_by_hand(ordered: by_hand.Ordered) -> ScoreReply:
    """Measure one case of a report in this process, which is one rank of it."""
    first = os.environ.get("RANK", "0") == "0"
    state = RankState(on_batch=lambda batch: print(*batch, file=sys.stderr) if first else None)
    load(state, ordered.case, ordered.source, ordered.strategy)
    give(state, ordered.dataset.sha256, ordered.dataset.items)
    return score(state, ordered.dataset.sha256, ordered.case.batch_size)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux: prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this rank is gone")


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a launcher, or run one case of a report by hand."""
    parser = argparse.ArgumentParser(prog="python -m pytest_llmgpu.rank", description=__doc__)
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
        serve(
            Connection(commands, writable=False),
            Connection(answers, readable=False),
            Connection(batches, readable=False),
        )
        return
    if arguments.case_id is None:
        parser.error("a report and the id of one of its cases are needed")
    ordered = by_hand.find(
        arguments.report,
        arguments.case_id,
        strategy=arguments.strategy,
        dataset=arguments.dataset,
        model=arguments.model,
    )
    reply = run_by_hand(ordered)
    if os.environ.get("RANK", "0") == "0":
        print(msgspec.json.encode(reply).decode())


if __name__ == "__main__":
    # Commands name functions of this module: they must meet the one that is imported, not a second copy of it.
    from pytest_llmgpu.rank import main as imported_main

    imported_main()
