"""The child process: its deadlines, its threads, its stream."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from pytest_llmgpu.profiling.devices import SOURCES, Device
from pytest_llmgpu.profiling.sampler import BlockingCall, Tick, ticks

GIB = 1 << 30
StubEnvironment = Callable[..., dict[str, str]]
PCIE = "nvmlDeviceGetPcieThroughput"


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def wait(self, seconds: float) -> bool:
        """Let time pass."""
        self.now_s += seconds
        return False


def run_ticks(clock: FakeClock, work_s: list[float]) -> list[Tick]:
    """Take one tick per entry, each working that long, at 1 s period from t0 = 100 s."""
    taken = []
    for tick, work in zip(ticks(100.0, 1.0, clock, clock.wait), work_s, strict=False):
        taken.append(tick)
        clock.now_s += work
    return taken


def test_deadlines_do_not_drift() -> None:
    """However long each reading takes within the period, the next begins at t0 + k * period."""
    taken = run_ticks(FakeClock(100.0), [0.3, 0.9, 0.0, 0.5])
    assert taken == [Tick(0, 100.0), Tick(1, 101.0), Tick(2, 102.0), Tick(3, 103.0)]


def test_a_late_tick_begins_at_once_and_the_next_is_on_time() -> None:
    """A reading that runs over makes the next late, not the one after."""
    assert run_ticks(FakeClock(100.0), [1.25, 0.25, 0.0]) == [Tick(0, 100.0), Tick(1, 101.25), Tick(2, 102.0)]


def test_a_deadline_that_passed_entirely_is_skipped() -> None:
    """After a reading of three and a half periods one tick follows, that of the deadline in force."""
    assert run_ticks(FakeClock(100.0), [3.5, 0.0, 0.0]) == [Tick(0, 100.0), Tick(3, 103.5), Tick(4, 104.0)]


def test_a_wait_that_ends_early_is_taken_up_again() -> None:
    """A tick never begins before its deadline."""
    clock = FakeClock(100.0)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        clock.now_s += 0.4 if seconds > 0.5 else seconds
        return False

    assert list(islice(ticks(100.5, 1.0, clock, wait), 2)) == [Tick(0, 100.5), Tick(1, 101.5)]
    assert waits == pytest.approx([0.5, 0.0, 1.0, 0.6, 0.2, 0.0])


def test_ticks_end_when_told() -> None:
    """The end is noticed at a tick that is late already, too."""
    clock = FakeClock(105.0)
    assert list(ticks(100.0, 1.0, clock, lambda _: True)) == []


class GatedDevice:
    """A device whose blocking call returns when the test says so."""

    def __init__(self) -> None:
        self.index = 0
        self.why: dict[str, str] = {}
        self.gate = threading.Semaphore(0)
        self.calls = 0

    def read(self, metric: str) -> float:
        """Return the number of the call."""
        assert metric == "pcie_tx_bytes_per_s"
        self.calls += 1
        assert self.gate.acquire(timeout=10)
        return float(self.calls)


def test_a_hung_call_gives_none_until_it_returns() -> None:
    """A call given up is not repeated while it hangs, and its late answer belongs to no tick."""
    device = GatedDevice()
    call = BlockingCall(cast("Device", device), "pcie_tx_bytes_per_s")
    call.ask()
    assert call.answer(timeout_s=0) is None
    assert device.why == {"pcie_tx_bytes_per_s": f"{PCIE}: did not return within 1 s"}
    call.ask()
    device.gate.release()
    call._answers.put(call._answers.get(timeout=10))  # the late answer has come
    assert call.answer(timeout_s=10) is None
    device.gate.release()
    call.ask()
    assert call.answer(timeout_s=10) == 2.0
    assert device.calls == 2


@contextmanager
def sampler(environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the sampler every 20 ms."""
    command = [sys.executable, "-m", "pytest_llmgpu.profiling.sampler", "--period", "0.02", *arguments]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rescue = threading.Timer(30, process.kill)  # so that a stream that stays silent fails the test
    rescue.start()
    with process:
        try:
            yield process
        finally:
            rescue.cancel()
            process.kill()


def records(process: subprocess.Popen[str], count: int) -> list[dict[str, Any]]:
    """Read so many lines of its stream."""
    assert process.stdout is not None
    return [json.loads(process.stdout.readline()) for _ in range(count)]


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_values_arrive_in_their_columns_and_units(nvml_stub: StubEnvironment, gpus: int) -> None:
    """Each device's readings stand under their metric, in percent, bytes, bytes/s, W and MHz."""
    with sampler(nvml_stub(gpus=gpus)) as process:
        header, first, second = records(process, 3)
    assert header["metrics"] == list(SOURCES)
    assert [device["index"] for device in header["devices"]] == list(range(gpus))
    assert all(device["why"] == {} for device in header["devices"])
    for tick in (first, second):
        for index, values in enumerate(tick["values"]):
            assert dict(zip(header["metrics"], values, strict=True)) == {
                "utilization_pct": 40 + index,
                "memory_used_bytes": (10 + index) * GIB,
                "pcie_tx_bytes_per_s": 1_000_000 * (index + 1),
                "pcie_rx_bytes_per_s": 2_000_000 * (index + 1),
                "power_w": 300 + index,
                "sm_clock_mhz": 1500 + index,
            }
    assert first["k"] == 0
    assert second["t_s"] >= header["t0_s"] + second["k"] * header["period_s"]


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_blocking_calls_of_a_tick_run_all_at_once(nvml_stub: StubEnvironment, gpus: int, tmp_path: Path) -> None:
    """Each GPU and direction has a thread, all meet inside their call, and no other call leaves the main thread."""
    log = tmp_path / "calls"
    with sampler(nvml_stub(gpus=gpus, pcie_together=2 * gpus, pcie_us=1000, log=log)) as process:
        header, *stream = records(process, 4)
    assert all(device["why"] == {} for device in header["devices"])
    assert all(None not in values for tick in stream for values in tick["values"])
    calls = [line.split() for line in log.read_text().splitlines()]
    threads: dict[str, set[int]] = {}
    for _, _, thread, _, function, device in calls:
        if function == PCIE:
            threads.setdefault(device, set()).add(int(thread))
    assert {device: len(of_device) for device, of_device in threads.items()} == {str(i): 2 for i in range(gpus)}
    assert len(set.union(*threads.values())) == 2 * gpus
    assert {function for _, _, thread, process_id, function, _ in calls if thread != process_id} == {PCIE}
    assert process.pid not in set.union(*threads.values())


def test_what_a_device_does_not_support_is_null_with_its_reason(nvml_stub: StubEnvironment) -> None:
    """A refusal at the start is told in the header and the call is not made again."""
    refused = f"nvmlDeviceGetPowerUsage,{PCIE}@1"
    with sampler(nvml_stub(gpus=2, unsupported=refused)) as process:
        header, tick = records(process, 2)
    power, pcie = "nvmlDeviceGetPowerUsage: Not Supported", f"{PCIE}: Not Supported"
    assert header["devices"][0]["why"] == {"power_w": power}
    assert header["devices"][1]["why"] == {
        "power_w": power,
        "pcie_tx_bytes_per_s": pcie,
        "pcie_rx_bytes_per_s": pcie,
    }
    assert tick["values"] == [[40, 10 * GIB, 1e6, 2e6, None, 1500], [41, 11 * GIB, None, None, None, 1501]]


def test_an_unsupported_call_is_made_once(nvml_stub: StubEnvironment, tmp_path: Path) -> None:
    """What NVML refused at the start costs nothing later."""
    log = tmp_path / "calls"
    with sampler(nvml_stub(unsupported="nvmlDeviceGetPowerUsage", log=log)) as process:
        records(process, 5)
    functions = [line.split()[4] for line in log.read_text().splitlines()]
    assert functions.count("nvmlDeviceGetPowerUsage") == 1
    assert functions.count("nvmlDeviceGetClockInfo") >= 4


def test_a_gpu_lost_on_the_way_is_null_with_its_reason_told_once(nvml_stub: StubEnvironment) -> None:
    """Other devices go on, and the stream does not repeat the reason."""
    with sampler(nvml_stub(gpus=2, lost="1:25")) as process:
        header, *stream = records(process, 12)
    assert header["devices"][1]["why"] == {}
    assert None not in stream[0]["values"][1]
    assert stream[-1]["values"] == [[40, 10 * GIB, 1e6, 2e6, 300, 1500], [None] * 6]
    told = [tick["why"] for tick in stream if "why" in tick]
    reasons: dict[str, str] = {}
    for news in told:
        assert set(news) == {"1"}
        reasons.update(news["1"])
    assert set(reasons) == set(SOURCES)
    assert all(reason.endswith("GPU is lost") for reason in reasons.values())
    assert len(told) <= 2


def test_a_pcie_reading_above_the_link_is_null(nvml_stub: StubEnvironment) -> None:
    """A rate that the link cannot carry is in another unit: it is refused with the figure."""
    with sampler(nvml_stub(pcie_kb=50_000_000)) as process:
        header, tick = records(process, 2)
    assert tick["values"][0][2:4] == [5e10, None]
    assert header["devices"][0]["why"] == {
        "pcie_rx_bytes_per_s": f"{PCIE}: 1e+11 bytes/s is more than the link can carry"
    }


def test_devices_come_in_the_order_asked_for(nvml_stub: StubEnvironment) -> None:
    """Only the GPUs asked for are read, in that order."""
    wanted = [f"GPU-{index:08d}-0000-0000-0000-000000000000" for index in (2, 0)]
    with sampler(nvml_stub(gpus=3), "--uuids", ",".join(wanted)) as process:
        header, tick = records(process, 2)
    assert [device["uuid"] for device in header["devices"]] == wanted
    assert [values[0] for values in tick["values"]] == [42, 40]


@pytest.mark.parametrize(
    ("settings", "arguments", "reason"),
    [
        ({"init": 9}, [], "nvmlInit: Driver Not Loaded"),
        ({"gpus": 0}, [], "NVML shows no GPU"),
        ({"gpus": 1}, ["--uuids", "GPU-x"], "NVML shows no GPU GPU-x"),
        (
            {"gpus": 2, "lost": "1:0"},
            ["--uuids", "GPU-x"],
            "NVML shows no GPU GPU-x; gpu 1: nvmlDeviceGetUUID: GPU is lost",
        ),
    ],
)
def test_nothing_to_read_is_one_line_and_the_end(
    nvml_stub: StubEnvironment, settings: dict[str, Any], arguments: list[str], reason: str
) -> None:
    """Without NVML or a GPU the only line is the reason."""
    with sampler(nvml_stub(**settings), *arguments) as process:
        assert records(process, 1) == [{"error": reason}]
        assert process.wait(10) == 0


def test_it_ends_when_stdin_closes_and_not_on_ctrl_c(nvml_stub: StubEnvironment) -> None:
    """SIGINT is the test process's to handle; the end of stdin is the order to end."""
    with sampler(nvml_stub()) as process:
        records(process, 2)
        os.kill(process.pid, signal.SIGINT)
        records(process, 3)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def test_it_does_not_run_for_a_parent_that_is_gone(nvml_stub: StubEnvironment) -> None:
    """A parent that ended before the child could bind itself to it leaves no sampler behind."""
    with sampler(nvml_stub(), "--parent", "1") as process:
        assert process.wait(10) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_it_stays_light() -> None:
    """The child imports nothing that costs seconds or hundreds of megabytes."""
    heavy = "torch transformers accelerate datasets numpy pytest"
    script = f"import sys, pytest_llmgpu.profiling.sampler; print(set(sys.modules) & set({heavy!r}.split()))"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "set()\n"
    )
