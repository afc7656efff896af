from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support import rank_functions as ranks

from pytest_llmgpu.ranks import group
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import LocalLauncher
from pytest_llmgpu.ranks.protocol import FinishedBatch, RankFailedError
from pytest_llmgpu.report.result import Failure, Outcome


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RankGroup]:
    """Two ranks that know their numbers."""
    made = RankGroup(LocalLauncher(tmp_path), [{"RANK": "0"}, {"RANK": "1"}])
    yield made
    made.kill()


def _failed(outcome: Outcome, message: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(RankFailedError(outcome, Failure(phase="forward", message=message)))
    return future


def test_every_rank_is_asked_and_answers_stand_in_their_order(pair: RankGroup) -> None:
    """`llm.run` gives one answer per rank."""
    assert pair.ask(ranks.variable, "RANK", phase="forward", timeout_s=60) == ["0", "1"]


def test_a_failed_rank_is_told_though_its_sibling_waits_for_ever(pair: RankGroup) -> None:
    """Siblings in a collective are not waited for, and the cause is the failing rank's."""
    with pytest.raises(RankFailedError) as caught:
        pair.ask(ranks.hang_on_rank_0_fail_on_rank_1, phase="load", timeout_s=60)
    assert caught.value.outcome == "error"
    assert caught.value.failure.rank == 1
    assert caught.value.failure.phase == "load"
    assert caught.value.failure.message == "ValueError: the layer is broken"


def test_a_time_limit_says_where_the_ranks_are(pair: RankGroup) -> None:
    """No batch within the limit is an outcome of its own, with the stacks of every rank."""
    assert pair.ask(ranks.add, 1, 1, phase="forward", timeout_s=60) == [2, 2]
    with pytest.raises(RankFailedError) as caught:
        pair.ask(ranks.hang_in_a_collective, phase="forward", timeout_s=0.5)
    assert caught.value.outcome == "timeout"
    assert caught.value.failure.message == "no finished batch for 0.5 s"
    assert "hang_in_a_collective" in (caught.value.failure.log_tail or "")


def test_a_batch_lasts_as_long_as_on_its_slowest_rank(pair: RankGroup) -> None:
    """Columns hold the batches that all ranks finished, with the largest latency of each."""
    pair._on_batch(0, FinishedBatch(1.0, 4, 40, 44, 3))
    pair._on_batch(1, FinishedBatch(2.0, 4, 40, 44, 3))
    pair._on_batch(0, FinishedBatch(5.0, 2, 20, 20, 3))
    batches = pair.batches()
    assert (batches.latency_s, batches.sequences, batches.padded_tokens) == ([2.0], [4], [44])
    pair._on_batch(1, FinishedBatch(3.0, 2, 20, 20, 3))
    assert pair.batches().latency_s == [2.0, 5.0]


def test_progress_is_told_in_finished_and_planned_batches(pair: RankGroup, tmp_path: Path) -> None:
    """The live line knows, while the ranks are at work, how much is done and how much is left."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    told: list[tuple[int, int]] = []

    def tick(done: int, planned: int) -> None:
        if (7, 10) not in told and (done, planned) == (7, 10):
            pipe.write_bytes(b"")
        told.append((done, planned))

    pair.ask(ranks.finish_batches_then_wait, 7, str(pipe), phase="forward", timeout_s=60, tick=tick)
    assert told == sorted(told)
    assert told[-1] == (7, 10)


def test_each_question_starts_with_no_batches(pair: RankGroup) -> None:
    """A case's columns hold none of the case before it."""
    pair.ask(ranks.finish_batches, 7, phase="forward", timeout_s=60)
    pair.ask(ranks.finish_batches, 2, phase="forward", timeout_s=60)
    pair.kill()
    assert len(pair.batches().latency_s) == 2


@pytest.mark.parametrize(
    ("failures", "worst"),
    [
        ([("crashed", "signal 9"), ("oom", "CUDA out of memory")], "CUDA out of memory"),
        ([("error", "[rank1]: Connection closed by peer"), ("crashed", "signal 11")], "signal 11"),
        ([("crashed", "signal 11"), ("error", "bad shape")], "bad shape"),
        ([("error", "ncclRemoteError: remote process exited"), ("error", "bad shape")], "bad shape"),
    ],
)
def test_the_worst_known_cause_wins(failures: list[tuple[Outcome, str]], worst: str) -> None:
    """Out of memory explains an error, an error a crash, and any of them a lost peer."""
    error = group._worst([Future(), *(_failed(outcome, message) for outcome, message in failures)])
    assert error.failure.message == worst


class _Leaving:
    """A rank that ends only when its sibling does, as one does that takes down a process group."""

    def __init__(self, together: threading.Barrier) -> None:
        self.killed = False
        self._together = together

    def close(self) -> None:
        """Wait for the sibling."""
        self._together.wait(10)

    def kill(self) -> None:
        """End at once."""
        self.killed = True
        self._together.abort()


class _Launcher:
    name = "fake"

    def __init__(self) -> None:
        together = threading.Barrier(2)
        self.ranks = [_Leaving(together), _Leaving(together)]

    def start(self, *_: object) -> Any:
        return self.ranks


def test_ranks_are_let_go_together() -> None:
    """One that waits for its siblings to leave is not waited for first."""
    launcher = _Launcher()
    RankGroup(launcher, [{}, {}]).close()
    assert [rank.killed for rank in launcher.ranks] == [False, False]


def test_an_interrupt_while_ranks_leave_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves nothing behind, however late it comes."""
    launcher = _Launcher()

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "wait", interrupted)
    launcher.ranks[0].close = launcher.ranks[0].kill  # type: ignore[method-assign]  # one that does not wait
    with pytest.raises(KeyboardInterrupt):
        RankGroup(launcher, [{}, {}]).close()
    assert all(rank.killed for rank in launcher.ranks)
