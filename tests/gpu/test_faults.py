"""Faults of one rank while the other is in a collective: on two processes of a CPU, and with -m gpu on two GPUs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import gpu, rank_faults
from support.faked_runs import BENCHMARK
from support.report_factory import known, make_case

from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import LocalLauncher, RankFailedError
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.case import Case

_WAIT_S = 120.0
_STOPPED_S = 3.0
_FREED_S = 10.0
"""The driver may free the memory of a process just after its end."""
_IDLE_BYTES = 64 * 2**20
"""A CUDA context needs over 100 MiB."""
_GPUS = torch.cuda.device_count()
_TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(_GPUS < 2, reason="needs two GPUs that torch can use")]
_EITHER_VICTIM = pytest.mark.parametrize(
    ("pair", "victim"),
    # On a CPU both ranks take the same path: what starts four processes is shown once.
    [("cpu", 1), *(pytest.param("cuda", victim, marks=_TWO_GPUS) for victim in (0, 1))],
    indirect=["pair"],
)
_ASSERTION = {"cpu": "out of bounds", "cuda": "device-side assert"}


class _Pair(NamedTuple):
    """Two ranks, and what starts two others."""

    case: Case
    ranks: RankGroup
    start: Callable[[], RankGroup]

    def failure(self, fault: Callable[..., Any], *arguments: Any, timeout_s: float = _WAIT_S) -> RankFailedError:
        """Return how a fault in the ranks ends their command; the ranks are ended as after every failure."""
        with pytest.raises(RankFailedError) as caught:
            self.ranks.ask(fault, self.case, *arguments, phase="forward", timeout_s=timeout_s)
        self.ranks.kill()
        return caught.value


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_TWO_GPUS)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Pair]:
    """Two ranks; after the test nothing is left of them, and two new ranks can use the same devices."""
    case = make_case(strategy="tp", device=request.param, devices=2)
    launcher = LocalLauncher(tmp_path)
    before = _left_over(case)
    started = []

    def start() -> RankGroup:
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        # torch would write what each rank of NCCL did to a file, and wait for it.
        common["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        if case.device == "cpu":
            common["CUDA_VISIBLE_DEVICES"] = ""
        started.append(RankGroup(launcher, [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]))
        return started[-1]

    try:
        yield _Pair(case, start(), start)
        _assert_as_before(before, case)
        assert start().ask(rank_faults.join, case, phase="load", timeout_s=_WAIT_S) == [2.0, 2.0]
    finally:
        for ranks in started:
            ranks.kill()
    _assert_as_before(before, case)


class _LeftOver(NamedTuple):
    """What a dead process may leave behind."""

    used_bytes: dict[str, int]
    """The memory in use on each GPU."""
    shared: set[Path]
    """Segments of shared memory."""


def _left_over(case: Case) -> _LeftOver:
    uuids = [gpu.uuid for gpu in nvml.inventory().gpus] if case.device == "cuda" else []
    return _LeftOver(nvml.used_bytes(uuids), set(Path("/dev/shm").iterdir()))


def _assert_as_before(before: _LeftOver, case: Case) -> None:
    began_s = time.monotonic()
    while True:
        now = _left_over(case)
        waited_s = time.monotonic() - began_s
        freed = all(now.used_bytes[uuid] <= used + _IDLE_BYTES for uuid, used in before.used_bytes.items())
        if freed or waited_s > _FREED_S:
            break
    print(f"{waited_s:.3f} s until memory is as before: {before.used_bytes} -> {now.used_bytes}")
    assert freed
    assert now.shared <= before.shared


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_a_collective_is_a_crash(pair: _Pair, victim: int) -> None:
    """The failure names the rank and the signal, not the connection that the other rank lost."""
    error = pair.failure(rank_faults.signal_in_a_collective, victim, signal.SIGKILL)
    assert (error.outcome, error.failure.rank, error.failure.signal) == ("crashed", victim, signal.SIGKILL)


@pytest.mark.slow
@_EITHER_VICTIM
def test_a_rank_that_is_stopped_in_a_collective_is_a_time_out(pair: _Pair, victim: int) -> None:
    """The stack of the rank that waits for it is in the log."""
    pair.ranks.ask(rank_faults.join, pair.case, phase="load", timeout_s=_WAIT_S)
    error = pair.failure(rank_faults.signal_in_a_collective, victim, signal.SIGSTOP, timeout_s=_STOPPED_S)
    assert error.outcome == "timeout"
    assert "in _reduce_for_ever" in (error.failure.log_tail or "")


@pytest.mark.slow
@_EITHER_VICTIM
def test_out_of_memory_on_one_rank_is_out_of_memory(pair: _Pair, victim: int) -> None:
    """The other rank waits in a collective, and the failure names the rank without memory."""
    piece_bytes = 2**30 if pair.case.device == "cuda" else 2**60
    error = pair.failure(rank_faults.run_out_of_memory, victim, piece_bytes)
    assert (error.outcome, error.failure.rank) == ("oom", victim)
    if pair.case.device == "cuda":
        assert error.failure.requested_bytes == piece_bytes
        assert (error.failure.free_bytes or 0) < piece_bytes


@pytest.mark.slow
@_EITHER_VICTIM
def test_a_failed_assertion_of_a_kernel_is_an_error(pair: _Pair, victim: int) -> None:
    """No later call of CUDA succeeds in that process: the reason arrives all the same."""
    error = pair.failure(rank_faults.fail_an_assertion, victim)
    assert error.failure.rank == victim
    # NCCL's watchdog may find the error first, and ends the process.
    assert error.outcome == "error" or (pair.case.device, error.outcome) == ("cuda", "crashed")
    assert _ASSERTION[pair.case.device] in f"{error.failure.message} {error.failure.log_tail}"


@pytest.mark.slow
def test_a_time_out_of_the_collectives_names_the_rank_that_waited(pair: _Pair) -> None:
    """NCCL's watchdog ends the process, and gloo raises; the log has the reason."""
    error = pair.failure(rank_faults.exceed_the_time_limit, 1)
    assert error.failure.rank == 0
    if pair.case.device == "cuda":
        assert (error.outcome, error.failure.signal) == ("crashed", signal.SIGABRT)
        assert "collective operation timeout" in (error.failure.log_tail or "")
    else:
        assert error.outcome == "error"
        assert "Timed out" in error.failure.message


@pytest.mark.slow
def test_ranks_listen_on_the_loopback_interface_only(pair: _Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody on the network can connect to a rank, although a cluster sets an interface for other programs."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth0")
    ranks = pair.start()
    answers = ranks.ask(rank_faults.listening, pair.case, phase="load", timeout_s=_WAIT_S)
    ranks.kill()
    assert all(answers), "gloo and NCCL listen"
    assert {address for addresses in answers for address in addresses} == {"0100007F"}  # 127.0.0.1


_STRATEGIES = """
import torch
from support import rank_faults
from pytest_llmgpu.strategies.mp import LayerParallel

class Profiled(LayerParallel):
    name = "profiled"

    def load(self, case, source):
        loaded = super().load(case, source)
        assert rank_faults.take_cupti() == 0
        return loaded

class Asserting(LayerParallel):
    name = "asserting"

    def prepare(self, loaded, rows, tokens):
        if rows == 1:
            print(torch.zeros(1, device=loaded.devices[0])[torch.tensor([5], device=loaded.devices[0])])
        return super().prepare(loaded, rows, tokens)
"""


@pytest.mark.gpu
@pytest.mark.skipif(_GPUS < 1, reason="needs a GPU that torch can use")
def test_a_case_after_a_fault_of_the_device_is_measured(tmp_path: Path) -> None:
    """A failed assertion ends one case; where another profiler has CUPTI, only the figures of kernels are missing."""
    flags = ("--strategy=own:Asserting,own:Profiled", "--llmgpu-devices=1", "--llmgpu-limit=4")
    status, written = gpu.run_pytest(
        tmp_path / "run", BENCHMARK, *flags, "--llmgpu-batch-sizes=1,2", strategies=_STRATEGIES
    )
    assert status == 1
    cases = {(case.case.strategy, case.case.batch_size): case for case in written.cases}
    assert [case.outcome for case in written.cases].count("error") == 1
    assert _ASSERTION["cuda"] in known(cases["asserting", 1].failure).message
    assert disturbances.disturbed(cases["asserting", 2].launches[0]) is None, "the next case is alone on the device"
    for batch_size in (1, 2):
        launch = cases["profiled", batch_size].launches[0]
        assert launch.work is not None, launch.why
        (rank,) = launch.work.ranks
        assert rank.device_time_s is None
        assert "another profiler uses it" in rank.why["device_time_s"]
        assert rank.flops
