"""What one rank does: load a model through its strategy, then score case after case until it is told to stop.

`python -m pytest_llmgpu.rank REPORT CASE_ID` runs one case of a report by hand, under a debugger if need be; with more
than one rank, start it with torchrun.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu import memory, models, oom, scoring, strategies
from pytest_llmgpu.case import Case
from pytest_llmgpu.launchers.protocol import FinishedBatch
from pytest_llmgpu.memory import DeviceUse
from pytest_llmgpu.models import ModelSource
from pytest_llmgpu.result import Accuracy, Batches, Failure, Outcome, Phase
from pytest_llmgpu.tasks import hellaswag
from pytest_llmgpu.tasks.hellaswag import Item

if TYPE_CHECKING:
    from pytest_llmgpu.strategies.protocol import Loaded

__all__ = ["RankState", "ScoreReply", "call", "give", "load", "main", "score"]

_PR_SET_PDEATHSIG = 1


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured of one case."""

    started_s: float
    """CLOCK_MONOTONIC when the first batch began."""
    ended_s: float
    """CLOCK_MONOTONIC when the last batch was done."""
    warmup_s: float
    plan_sha256: str
    batches: Batches
    accuracy: Accuracy
    memory: list[DeviceUse]


class RankState:
    """What a rank keeps between commands."""

    def __init__(self, on_batch: Callable[[FinishedBatch], None]) -> None:
        self.on_batch = on_batch
        self.phase: Phase = "load"
        self.case: Case | None = None
        self.source: ModelSource | None = None
        self.loaded: Loaded | None = None
        self.weights_bytes: list[int | None] = []
        self.held_bytes: list[int] = []
        self.items: dict[str, Sequence[Item]] = {}
        self.requests: dict[str, scoring.Requests] = {}

    def use(self) -> list[DeviceUse]:
        """Return what the devices hold at most since the case began; nothing before a model is loaded."""
        if self.loaded is None:
            return []
        return memory.usage(self.loaded.devices, self.weights_bytes, self.held_bytes)


def load(state: RankState, case: Case, source: ModelSource) -> None:
    """Enforce the cap, then load the model of a case."""
    import torch

    state.phase, state.case, state.source = "load", case, source
    strategy = strategies.find(case.strategy)
    if case.device == "cuda":
        here = range(case.devices) if strategy.ranks(case.devices) == 1 else [int(os.environ["LOCAL_RANK"])]
        capped = [torch.device("cuda", index) for index in here]
        state.held_bytes = memory.hold(capped, case.gpu_memory_bytes)
    else:
        state.held_bytes = [0]
    state.loaded = strategy.load(case, source)
    state.weights_bytes = memory.allocated(state.loaded.devices)


def give(state: RankState, sha256: str, items: Sequence[Item]) -> None:
    """Hand over a dataset, once; later cases name it by its hash."""
    state.items[sha256] = items


def score(state: RankState, sha256: str, batch_size: int) -> ScoreReply:
    """Score a dataset at one batch size."""
    assert state.case is not None
    assert state.source is not None
    assert state.loaded is not None
    state.phase = "forward"
    loaded, items = state.loaded, state.items[sha256]
    if sha256 not in state.requests:
        longest = models.max_length(loaded.config)
        state.requests[sha256] = scoring.encode(items, models.load_tokenizer(state.source), longest)
    plan = scoring.plan(state.requests[sha256], batch_size)
    memory.reset(loaded.devices)
    strategies.find(state.case.strategy).prepare(loaded, batch_size)
    began = time.monotonic()
    scoring.warm_up(loaded.model, plan, input_device=loaded.input_device, devices=loaded.devices)
    started = time.monotonic()

    def finished(latency_s: float, sequences: int, tokens: int, padded_tokens: int) -> None:
        state.on_batch(FinishedBatch(latency_s, sequences, tokens, padded_tokens, planned=len(plan.batches)))

    scores = scoring.score(
        loaded.model,
        plan,
        on_batch=finished,
        input_device=loaded.input_device,
        devices=loaded.devices,
    )
    return ScoreReply(
        started_s=started,
        ended_s=time.monotonic(),
        warmup_s=started - began,
        plan_sha256=plan.sha256,
        batches=scores.batches,
        accuracy=scoring.accuracy(items, scores.loglikelihoods),
        memory=state.use(),
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


def run_by_hand(report_path: str, case_id: str) -> ScoreReply:
    """Measure one case of a report in this process; its files are looked for from the working directory.

    Raises:
        SystemExit: There is no such case, or its model or dataset is not what the report names.
    """
    report = json.loads(Path(report_path).read_bytes())
    cases = {row["id"]: row["case"] for row in report["cases"]}
    if case_id not in cases:
        sys.exit(f"{case_id!r} is no case of {report_path}: it has {', '.join(cases)}")
    case = msgspec.convert(cases[case_id], Case)
    dataset = hellaswag.load(case.dataset, rootdir=Path.cwd(), limit=case.limit)
    source = models.resolve(
        case.model,
        revision=case.revision,
        tokenizer=None,
        load_format=case.load_format,
        texts=dataset.texts(),
        rootdir=Path.cwd(),
    )
    if (dataset.sha256, source.tokenizer_sha256) != (case.dataset_sha256, case.tokenizer_sha256):
        sys.exit(f"{case_id}: the dataset or the tokenizer is not the one of {report_path}")
    state = RankState(on_batch=lambda batch: print(*batch, file=sys.stderr))
    load(state, case, source)
    give(state, dataset.sha256, dataset.items)
    return score(state, dataset.sha256, case.batch_size)


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
    print(msgspec.json.encode(run_by_hand(arguments.report, arguments.case_id)).decode())


if __name__ == "__main__":
    # Commands name functions of this module: they must meet the one that is imported, not a second copy of it.
    from pytest_llmgpu.rank import main as imported_main

    imported_main()
