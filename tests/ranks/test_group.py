from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import rank_functions as ranks
from support.worlds import hurry

from pytest_llmgpu.ranks import group, local
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import BatchListener, FinishedBatch, LocalLauncher, RankFailedError
from pytest_llmgpu.report.result import Failure, Outcome


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RankGroup]:
    """Two ranks with their numbers."""
    made = RankGroup(LocalLauncher(tmp_path), [{"RANK": "0"}, {"RANK": "1"}])
    yield made
    made.kill()


def test_one_failure_ends_the_wait_for_the_others(pair: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure has the number, the phase and the message of the rank that failed while the other one hangs."""
    assert pair.ask(ranks.variable, "RANK", phase="forward", timeout_s=300) == ["0", "1"]
    monkeypatch.setattr(group, "_OTHER_RANKS_S", 0.0)
    with pytest.raises(RankFailedError) as caught:
        pair.ask(ranks.hang_on_rank_0_fail_on_rank_1, phase="load", timeout_s=300)
    failure = caught.value.failure
    assert (caught.value.outcome, failure.rank, failure.phase) == ("error", 1, "load")
    assert failure.message == "ValueError: the layer is broken"


def test_a_time_limit_has_the_stacks_of_ranks(pair: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit without a finished batch is an outcome of its own, with the stacks of every rank."""
    begun = tmp_path / "begun"
    hurry(monkeypatch, while_exists=begun)
    monkeypatch.setattr(local, "_STACKS_S", 300)
    assert pair.ask(ranks.add, 1, 1, phase="forward", timeout_s=300) == [2, 2]
    with pytest.raises(RankFailedError) as caught:
        pair.ask(ranks.hang_in_a_collective, str(begun), phase="forward", timeout_s=300)
    assert caught.value.outcome == "timeout"
    assert caught.value.failure.message == "no finished batch for 300 s"
    assert "hang_in_a_collective" in (caught.value.failure.log_tail or "")


def test_a_stopped_rank_is_a_time_out_whatever_is_sent_to_it(pair: RankGroup) -> None:
    """A dataset is more than a pipe holds: sending it must not wait for the rank."""
    identities = pair.ask(ranks.identity, phase="forward", timeout_s=300)
    os.kill(identities[1][0], signal.SIGSTOP)
    with pytest.raises(RankFailedError) as caught:
        pair.ask(ranks.add, b"1" * 2**22, b"", phase="forward", timeout_s=0.5)
    assert caught.value.outcome == "timeout"


def test_a_batch_has_the_latency_of_its_slowest_rank() -> None:
    """Columns have the batches that all ranks finished, with the largest latency of each batch."""
    launcher = _Launcher()
    started = RankGroup(launcher, [{}, {}])
    launcher.on_batch(0, FinishedBatch(1.0, 4, 40, 44, 3))
    launcher.on_batch(1, FinishedBatch(2.0, 4, 40, 44, 3))
    launcher.on_batch(0, FinishedBatch(5.0, 2, 20, 20, 3))
    batches = started.batches()
    assert (batches.latency_s, batches.sequences, batches.padded_tokens) == ([2.0], [4], [44])
    launcher.on_batch(1, FinishedBatch(3.0, 2, 20, 20, 3))
    assert started.batches().latency_s == [2.0, 5.0]


def test_progress_is_the_number_of_finished_and_planned_batches(pair: RankGroup, tmp_path: Path) -> None:
    """The listener gets both numbers while the ranks run."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reported: list[tuple[int, int]] = []

    def tick(done: int, planned: int) -> None:
        if (7, 10) not in reported and (done, planned) == (7, 10):
            pipe.write_bytes(b"")
        reported.append((done, planned))

    pair.ask(ranks.finish_batches, 7, ranks.read, pipe, phase="forward", timeout_s=300, tick=tick)
    assert reported == sorted(reported)
    assert reported[-1] == (7, 10)
    pair.ask(ranks.finish_batches, 2, phase="forward", timeout_s=300)
    assert len(pair.batches().latency_s) == 2, "each command starts without batches"


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([("crashed", "signal 9"), ("oom", "CUDA out of memory")], "CUDA out of memory"),
        ([("error", "[rank1]: Connection closed by peer"), ("crashed", "signal 11")], "signal 11"),
        ([("crashed", "signal 11"), ("error", "bad shape")], "bad shape"),
        ([("error", "ncclRemoteError: remote process exited"), ("error", "bad shape")], "bad shape"),
    ],
)
def test_the_most_specific_cause_is_reported(failures: list[tuple[Outcome, str]], expected: str) -> None:
    """Out of memory explains an error, an error explains a crash, and each of them a lost connection."""
    errors = [RankFailedError(outcome, Failure(phase="forward", message=message)) for outcome, message in failures]
    assert group.most_specific([None, *errors]).failure.message == expected


class _Leaving:
    """A rank that ends only together with the other one, as in a torch process group."""

    def __init__(self, together: threading.Barrier) -> None:
        self.killed = False
        self._together = together

    def close(self, limit_s: float) -> None:
        """Wait for the other rank, or end at once."""
        if limit_s:
            self._together.wait(limit_s)
        else:
            self.killed = True
            self._together.abort()


class _Launcher(LocalLauncher):
    """A launcher without processes."""

    on_batch: BatchListener

    def __init__(self, *, leaving: int = 2) -> None:
        together = threading.Barrier(leaving)
        self.ranks = [_Leaving(together), _Leaving(together)]

    def start(self, _environments: object, on_batch: BatchListener) -> Any:
        self.on_batch = on_batch
        return self.ranks


def test_ranks_are_closed_at_the_same_time() -> None:
    """A rank that waits for the others to leave ends by itself."""
    launcher = _Launcher()
    RankGroup(launcher, [{}, {}]).close()
    assert [rank.killed for rank in launcher.ranks] == [False, False]


def test_an_interrupt_while_ranks_close_kills_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the end of the ranks leaves no process."""
    launcher = _Launcher(leaving=3)  # a third rank never comes

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RankGroup(launcher, [{}, {}]).close()
    assert all(rank.killed for rank in launcher.ranks)
