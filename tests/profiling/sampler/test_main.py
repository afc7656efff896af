"""The sampler process, its stream, and the times at which its readings begin, on a fake clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from pytest_llmgpu.profiling.sampler import __main__ as sampling
from pytest_llmgpu.profiling.sampler.__main__ import Sampler, ticks
from pytest_llmgpu.profiling.sampler.devices import CALLS, METRICS, Cumulative, Device

GIB = 1 << 30
StubEnvironment = Callable[..., dict[str, str]]
PCIE = "nvmlDeviceGetPcieThroughput"
RING = "nvmlDeviceGetSamples, without a sample for a second nvmlDeviceGetUtilizationRates"
NEITHER = {
    **dict.fromkeys(METRICS[6:8], "nvmlDeviceGetFieldValues [138, 139]: Not Supported"),
    **dict.fromkeys(METRICS[8:], "nvmlGpmMetricsGet: Not Supported"),
}
"""The reasons of a device without NVLink and GPM."""


_MAIN = """
import sys
from pytest_llmgpu.profiling.sampler import __main__
__main__._GIVE_UP_S = 300.0
__main__.main(float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
"""


@contextmanager
def sampler(
    environment: dict[str, str], method: str = "auto", period_s: float = 0.025
) -> Iterator[subprocess.Popen[str]]:
    """Run the sampler with a period of 25 ms; a busy machine may make a call that blocks last long."""
    command = [sys.executable, "-c", _MAIN, str(period_s), method, str(os.getpid())]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rescue = threading.Timer(300, process.kill)  # a stream without output must fail the test
    rescue.start()
    with process:
        try:
            yield process
        finally:
            rescue.cancel()
            process.kill()


def records(process: subprocess.Popen[str], count: int) -> list[dict[str, Any]]:
    """Read the given number of lines of the stream."""
    assert process.stdout is not None
    return [json.loads(process.stdout.readline()) for _ in range(count)]


@pytest.mark.parametrize("gpus", [1, 16])
def test_blocking_calls_of_a_tick_run_all_at_once(nvml_stub: StubEnvironment, gpus: int, tmp_path: Path) -> None:
    """Each GPU and direction has a thread, all are inside their call at once; other calls are in the main thread."""
    log = tmp_path / "calls"
    with sampler(nvml_stub(gpus=gpus, pcie_together=2 * gpus, pcie_us=1000, log=log)) as process:
        header, *stream = records(process, 4)
    assert all(device["why"] == NEITHER for device in header["devices"])
    assert all(None not in values[:6] for tick in stream for values in tick["values"])
    calls = [line.split() for line in log.read_text().splitlines()]
    threads = {(device, thread) for _, _, thread, _, function, device in calls if function == PCIE}
    assert Counter(device for device, _ in threads) == {str(index): 2 for index in range(gpus)}
    assert len({thread for _, thread in threads} - {str(process.pid)}) == 2 * gpus
    assert {function for _, _, thread, process_id, function, _ in calls if thread != process_id} == {PCIE}


def test_a_pcie_reading_above_the_link_rate_is_null(nvml_stub: StubEnvironment) -> None:
    """A rate that the link cannot carry is in another unit: it is refused, and the reason has the value."""
    with sampler(nvml_stub(pcie_kb=50_000_000)) as process:
        header, tick = records(process, 2)
    assert tick["values"][0][2:4] == [5e10, None]
    assert header["devices"][0]["why"] == {
        **NEITHER,
        "pcie_rx_bytes_per_s": f"{PCIE}: 1e+11 bytes/s is more than the link can carry",
    }


def column(tick: dict[str, Any], metric: str) -> Any:
    """Return the value of a metric on the first device."""
    return tick["values"][0][METRICS.index(metric)]


def methods(header: dict[str, Any]) -> dict[str, str]:
    """Return the method of each metric on the first device."""
    return dict(zip(header["metrics"], header["devices"][0]["methods"], strict=True))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fields": "197,198"}, ["nvmlDeviceGetFieldValues [197, 198]"] * 2),
        ({"fields": "197"}, ["nvmlDeviceGetFieldValues [197, 198]", PCIE]),
        ({"gpus": 2, "fields": "197@1,198@1"}, [PCIE, PCIE]),
        ({"gpm": 1, "fields": "197,198"}, ["nvmlGpmMetricsGet"] * 2),
        ({"gpm": 1, "gpm_refused": "20"}, [PCIE, "nvmlGpmMetricsGet"]),
        ({"gpm": 1, "fields": "197,198", "gpm_refused": "20,21"}, ["nvmlDeviceGetFieldValues [197, 198]"] * 2),
        ({}, [PCIE, PCIE]),
    ],
)
def test_each_metric_has_its_source(nvml_stub: StubEnvironment, settings: dict[str, Any], expected: list[str]) -> None:
    """A metric that GPM lacks comes from byte counters, and one that these lack from the blocking call."""
    with sampler(nvml_stub(**settings), period_s=0.1) as process:
        (header,) = records(process, 1)
    assert [methods(header)[metric] for metric in METRICS[2:4]] == expected


def test_byte_counters_are_polled_between_ticks(nvml_stub: StubEnvironment, tmp_path: Path) -> None:
    """However long the period, the counters are read at least every 40 ms."""
    log = tmp_path / "calls"
    with sampler(nvml_stub(fields="197,198", log=log), period_s=0.2) as process:
        _, first, *others = records(process, 6)
    calls = [line.split() for line in log.read_text().splitlines()]
    read_s = [int(call[0]) / 1e6 for call in calls if call[4] == "nvmlDeviceGetFieldValues"]
    assert sum(first["t_s"] <= each_s < others[-1]["t_s"] for each_s in read_s) > len(others), "each tick reads once"


@pytest.mark.parametrize(("ring", "value"), [("absent", 40), ("idle", None), ("70", None)])
def test_utilization_comes_from_the_ring_of_samples(nvml_stub: StubEnvironment, ring: str, value: int | None) -> None:
    """An idle ring is a source too; without a ring the driver's rate is read at every tick."""
    with sampler(nvml_stub(ring=ring)) as process:
        header, tick = records(process, 2)
    assert methods(header)["utilization_pct"] == ("nvmlDeviceGetUtilizationRates" if ring == "absent" else RING)
    assert column(tick, "utilization_pct") == value


def marks(process: subprocess.Popen[str], count: int) -> list[dict[str, Any]]:
    """Request the given number of marks, one after another, and read until the last has come."""
    found: list[dict[str, Any]] = []
    for _ in range(count):
        print("mark", file=process.stdin, flush=True)
        while "mark" not in (record := records(process, 1)[0]):
            pass
        found.append(record)
    return found


def test_a_mark_reads_the_counters(nvml_stub: StubEnvironment) -> None:
    """Energy in J, throttled time in s, NVLink counts in bytes; errors add up, processes are those of the moment."""
    settings = {"fields": "74,75,138,139", "ecc": "1:1", "xid": "0:1", "processes": "0@0,3@1"}
    with sampler(nvml_stub(gpus=2, **settings)) as process:
        found = marks(process, 3)
    names = ("ecc_uncorrected", "xids", "compute_processes")
    for index, expected in enumerate([[(0, 0, 0), (0, 1, 0), (0, 2, 0)], [(0, 0, 3), (1, 0, 3), (2, 0, 3)]]):
        assert [tuple(mark["counters"][index][name] for name in names) for mark in found] == expected
    first, second = found[:2]
    assert (first["mark"], second["mark"]) == (1, 2)
    assert [second["counters"][i]["energy_j"] - first["counters"][i]["energy_j"] for i in (0, 1)] == [5, 6]
    assert set(first["counters"][0]) == {*Cumulative.NAMES, "nvlink_tx_bytes", "nvlink_rx_bytes"}
    assert first["why"] == second["why"] == [{}, {}]
    assert second["counters"][1]["throttled_heat_s"] > first["counters"][1]["throttled_heat_s"]
    assert second["t_s"][0] >= first["t_s"][1] >= first["t_s"][0]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("nvmlDeviceGetTotalEccErrors", "ecc_uncorrected"),
        ("nvmlDeviceRegisterEvents", "xids"),
        ("nvmlEventSetWait_v2", "xids"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "compute_processes"),
    ],
)
def test_a_count_that_is_not_supported_has_a_reason(nvml_stub: StubEnvironment, call: str, name: str) -> None:
    """A GPU without ECC has no count of memory errors, which differs from 0 errors."""
    with sampler(nvml_stub(gpus=2, fields="74,75", unsupported=f"{call}@0")) as process:
        found = marks(process, 2)
    for mark in found:
        assert mark["why"] == [{name: f"{call}: Not Supported"}, {}]
        assert [set(counters) for counters in mark["counters"]] == [{*Cumulative.NAMES} - {name}, {*Cumulative.NAMES}]


@pytest.mark.slow
def test_a_gpu_lost_under_gpm_and_counters_is_null_with_its_reasons(nvml_stub: StubEnvironment) -> None:
    """Every metric and count has the loss as its reason, and the other device continues."""
    settings = {"gpm": 1, "gpm_refused": "20,21", "fields": "74,75,138,139,197,198", "ring": 50}
    with sampler(nvml_stub(gpus=2, lost="1:60", **settings), period_s=0.1) as process:
        _, *stream = records(process, 25)
        (mark,) = marks(process, 1)
    assert stream[-1]["values"][1] == [None] * len(METRICS)
    assert column(stream[-1], "pcie_tx_bytes_per_s") is not None
    reasons = dict(reason for tick in stream for reason in tick.get("why", {}).get("1", {}).items())
    assert set(reasons) == set(METRICS)
    assert (mark["counters"][1], mark["why"][0]) == ({}, {})
    lost = mark["why"][1]
    assert set(lost) == {*Cumulative.NAMES, "nvlink_tx_bytes", "nvlink_rx_bytes"}
    assert lost["nvlink_tx_bytes"] == "nvmlDeviceGetFieldValues [138, 139]: GPU is lost"
    assert all(reason.endswith(": GPU is lost") for reason in [*reasons.values(), *lost.values()]), reasons


def test_polling_makes_its_calls_one_after_another(nvml_stub: StubEnvironment, tmp_path: Path) -> None:
    """Utilisation, memory, PCIe out and in, device by device in one thread, and no other call after the start."""
    log = tmp_path / "calls"
    with sampler(nvml_stub(gpus=2, gpm=1, fields="138", ring=50, log=log), "polling") as process:
        header, *stream = records(process, 4)
    calls = [line.split() for line in log.read_text().splitlines()]
    first = next(number for number, call in enumerate(calls) if call[4] == "nvmlDeviceGetUtilizationRates")
    order = ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo_v2", PCIE, PCIE]
    one_round = [(function, device) for device in ("0", "1") for function in order]
    assert [(call[4], call[5]) for call in calls[first:]][:24] == one_round * 3
    assert {call[2] for call in calls} == {str(process.pid)}
    assert stream[-1]["values"][1] == [41, 11 * GIB, 2e6, 4e6, *[None] * 7]
    assert set(header["devices"][0]["why"]) == set(METRICS[4:])
    assert methods(header)["pcie_tx_bytes_per_s"] == PCIE


def test_it_imports_no_heavy_library() -> None:
    """The child imports nothing that costs seconds or hundreds of megabytes."""
    heavy = "torch transformers accelerate datasets numpy pytest"
    script = f"import sys, pytest_llmgpu.profiling.sampler.__main__; print(set(sys.modules) & set({heavy!r}.split()))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


@pytest.mark.parametrize(
    ("work_s", "expected"),
    [
        ([0.3, 0.9, 0.0, 0.5], [(0, 100.0), (1, 101.0), (2, 102.0), (3, 103.0)]),
        # The tick after a late one is on time; a deadline that has passed entirely is skipped.
        ([1.25, 0.25, 0.0], [(0, 100.0), (1, 101.25), (2, 102.0)]),
        ([3.5, 0.0, 0.0], [(0, 100.0), (3, 103.5), (4, 104.0)]),
    ],
)
def test_rounds_begin_at_their_deadlines(work_s: list[float], expected: list[tuple[int, float]]) -> None:
    """The next round begins at t0 + k * period, however long each takes within the period of 1 s."""
    now_s = [100.0]

    def pass_s(seconds: float) -> bool:
        now_s[0] += seconds
        return False

    taken = []
    for tick, work in zip(ticks(100.0, 1.0, lambda: now_s[0], pass_s), work_s, strict=False):
        taken.append(tick)
        pass_s(work)
    assert taken == expected


def test_a_wait_that_ends_early_is_continued() -> None:
    """A tick never begins before its deadline, and a late one notices the request to end."""
    now_s, waits = 100.0, list[float]()

    def wait(seconds: float) -> bool:
        nonlocal now_s
        waits.append(seconds)
        now_s += 0.4 if seconds > 0.5 else seconds
        return False

    assert list(islice(ticks(100.5, 1.0, lambda: now_s, wait), 2)) == [(0, 100.5), (1, 101.5)]
    assert waits == pytest.approx([0.5, 0.0, 1.0, 0.6, 0.2, 0.0])
    assert list(ticks(100.0, 1.0, lambda: 105.0, lambda _: True)) == []


_TX = "pcie_tx_bytes_per_s"


class _GatedDevice:
    """A device whose blocking call returns when the test says so."""

    index, method = 0, "auto"
    chosen: ClassVar = {_TX: CALLS[_TX]}
    lacking: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        self.why: dict[str, str] = {}
        self.gate = threading.Semaphore(1)
        self.calls = 0

    def read(self, metric: str) -> float:
        assert metric == _TX
        self.calls += 1
        assert self.gate.acquire(timeout=300)
        return float(self.calls)

    def averages(self, now_s: float, *, window_ended: bool) -> dict[str, tuple[float, float]]:  # noqa: ARG002
        return {}

    def poll(self, now_s: float) -> None:
        """Poll nothing."""


def test_a_hung_call_gives_none_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was given up is not repeated while it hangs, and its late result belongs to no tick."""
    device = _GatedDevice()
    sampler = Sampler([cast("Device", device)])

    def read() -> float | None:
        return sampler.round(1.0)[0][0][METRICS.index(_TX)]

    monkeypatch.setattr(sampling, "_GIVE_UP_S", 0.0)
    assert (read(), read()) == (None, None)
    assert device.why == {_TX: "nvmlDeviceGetPcieThroughput: did not return within 0 s"}
    device.gate.release(2)
    monkeypatch.setattr(sampling, "_GIVE_UP_S", 300.0)
    assert sampler._latest[0, _TX].result(300) == 2.0
    assert (read(), device.calls) == (3.0, 3)
