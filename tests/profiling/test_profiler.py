"""The profiler: starting the sampler, windows, and failures of the sampler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.report_factory import known, make_profile
from support.worlds import ends

from pytest_llmgpu.profiling import profiler as module
from pytest_llmgpu.profiling.profiler import NodeProfilers, Profiler, ask_here, joined
from pytest_llmgpu.profiling.sampler.devices import METRICS
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import DeviceProfile, Profile, Series

GIB = 1 << 30
PERIOD_S = 0.025
pytestmark = pytest.mark.usefixtures("patient_profiler")
StubEnvironment = Callable[..., dict[str, str]]


def uuid(index: int) -> str:
    """Return the UUID the stub gives that device."""
    return f"GPU-{index:08d}-0000-0000-0000-000000000000"


@contextmanager
def profiler(environment: dict[str, str], uuids: list[str] | None = None) -> Iterator[Profiler]:
    """Start a profiler with a period of 25 ms."""
    with mock.patch.dict(os.environ, environment, clear=True):
        profiler = Profiler(PERIOD_S, uuids)
        try:
            profiler.start()
            yield profiler
        finally:
            profiler.close()


def wait_for_ticks(profiler: Profiler, count: int) -> None:
    """Wait until the given number of further ticks has come."""
    recording = profiler.recording
    assert recording is not None, profiler.why
    with profiler._changed:
        goal = len(recording.readings) + count
        assert profiler._changed.wait_for(lambda: len(recording.readings) >= goal, 300)


def wait_for_end(profiler: Profiler) -> None:
    """Wait until the profiler has noticed the end of the sampler."""
    with profiler._changed:
        assert profiler._changed.wait_for(lambda: profiler._ended, 300)


@pytest.mark.parametrize("gpus", [1, 4, 16])
def test_a_window_profiles_every_gpu(nvml_stub: StubEnvironment, gpus: int) -> None:
    """It has the metrics of each device and every tick inside, also where the driver prints to stdout."""
    with profiler(nvml_stub(gpus=gpus, print=1)) as nvml:
        nvml.held_bytes = {uuid(0): 4 * GIB}
        with nvml.window() as window:
            wait_for_ticks(nvml, 3)
        assert nvml.why is None
    profile = known(window.profile)
    assert (profile.samples >= 2, profile.why) == (True, {})
    assert [(device.index, device.uuid) for device in profile.devices] == [(i, uuid(i)) for i in range(gpus)]
    for index, device in enumerate(profile.devices):
        assert {name: metric.max for name, metric in device.metrics.items()} == {
            "utilization_pct": 40 + index,
            "memory_used_bytes": (10 + index - (4 if index == 0 else 0)) * GIB,
            "pcie_tx_bytes_per_s": 1_000_000 * (index + 1),
            "pcie_rx_bytes_per_s": 2_000_000 * (index + 1),
            "power_w": 300 + index,
            "sm_clock_mhz": 1500 + index,
            **dict.fromkeys(METRICS[6:]),
        }
        assert device.energy_j == 5 + index
        assert {*METRICS[6:]} == {*device.why} - {"throttled_s"}
    assert profile.duration_s == known(window.end_s) - window.start_s


def test_a_window_over_nvlink_is_exact_and_has_its_counters(nvml_stub: StubEnvironment) -> None:
    """Marks at both ends give energy, throttled time, all bytes over NVLink, and errors, which are disturbances."""
    settings = {"fields": "74,75,138,139", "field_step": 1_000_000, "ecc": "0:1", "xid": "0:1", "processes": "5"}
    with profiler(nvml_stub(**settings)) as nvml:
        with nvml.window() as window:
            wait_for_ticks(nvml, 4)
        first, last = known(nvml.recording).kept_marks
    profile, end_s = known(window.profile), known(window.end_s)
    # The number of own programs is not known here.
    titles = [sentence.partition(":")[0] for sentence in profile.invalid]
    assert titles == [disturbances.TITLES[name] for name in ("throttled", "ecc", "xid")]
    device = profile.devices[0]
    counted = last.counters[0]["nvlink_tx_bytes"] - first.counters[0]["nvlink_tx_bytes"]
    metric = device.metrics["nvlink_tx_bytes_per_s"]
    assert first.answered_s[0] <= window.start_s, "a window begins when its counters have been read"
    # Marks around the window have its bytes, and idle time.
    around = end_s <= last.t_s[0]
    seconds = end_s - window.start_s if around else last.t_s[0] - first.t_s[0]
    assert (metric.mean, metric.coverage) == pytest.approx((counted / seconds, 1.0))
    assert device.energy_j == 5.0
    assert (device.throttled_s or 0) > 0


def test_a_slice_waits_for_the_tick_after_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick between a window's end and the mark does not cover the last second: the ring is read at the next one."""
    nvml = Profiler(1.0)
    device = {"index": 0, "uuid": "GPU-0", "why": {}, "methods": ["ring"], "windows_s": [None]}
    header = {"t0_s": 100.0, "period_s": 1.0, "metrics": ["utilization_pct"], "devices": [device]}
    ended = {"k": 3, "t_s": 103.0, "values": [[None]], "seconds": [[None]], "orders": 0}
    after_mark = {"k": 4, "t_s": 104.0, "values": [[70.0]], "seconds": [[4.0]], "orders": 1}
    for record in (header, ended, {"mark": 1, "t_s": [103.1], "answered_s": [103.1], "counters": [{}], "why": [{}]}):
        nvml._take(json.dumps(record).encode() + b"\n")
    nvml._marks, nvml._marked_s = 1, 103.05

    def wait_for(settled: Callable[[], bool], _timeout_s: float) -> bool:
        assert not settled()
        nvml._take(json.dumps(after_mark).encode() + b"\n")
        return settled()

    monkeypatch.setattr(nvml._changed, "wait_for", wait_for)
    metric = nvml.slice([101.0], [102.9]).devices[0].metrics["utilization_pct"]
    assert (metric.mean, metric.coverage) == pytest.approx((70.0, 1.0))


def test_a_sampler_that_ended_is_replaced_and_a_refused_one_is_not(
    nvml_stub: StubEnvironment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that hangs costs its windows alone; without NVML, and after close, nothing is started again."""
    hanging = tmp_path / "hanging"
    os.mkfifo(hanging)  # the stub writes to it when its call hangs
    monkeypatch.setattr(module, "_STREAM_S", 0.05)
    with profiler(nvml_stub(hang="nvmlDeviceGetPowerUsage:3", hanging=hanging)) as nvml:
        hanging.read_bytes()
        first, process = known(nvml._process).pid, known(nvml._process)
        profile = nvml.slice([0.0], [time.monotonic() + 10 * PERIOD_S])
        assert "did not answer within" in profile.why["sampler"]
        assert profile.samples <= 2
        assert profile.missed >= 9
        process.kill()
        wait_for_end(nvml)
        nvml.start()
        assert known(nvml._process).pid != first
        last, process, listener = known(nvml._process).pid, known(nvml._process), known(nvml._listener)
        hanging.read_bytes()
        monkeypatch.setattr(module, "_END_S", 0.05)
        nvml.close()
        nvml.start()
        assert known(nvml._process).pid == last
        listener.join(300)
        assert process.returncode == -signal.SIGKILL, "close kills one that hangs"
    with profiler(nvml_stub(init=9)) as nvml:
        wait_for_end(nvml)
        first = known(nvml._process).pid
        nvml.start()
        assert known(nvml._process).pid == first


def test_a_window_gets_its_profile_when_the_block_raises(nvml_stub: StubEnvironment) -> None:
    """The profile up to an exception has the requested GPUs in their order; the index remains NVML's."""
    environment = nvml_stub(gpus=4)
    with profiler(environment, [uuid(3), uuid(1)]) as nvml, pytest.raises(KeyError), nvml.window() as window:
        raise KeyError
    devices = known(window.profile).devices
    assert [(device.index, device.metrics["power_w"].max) for device in devices] == [(3, 303), (1, 301)]


def test_a_closed_profiler_leaves_no_process_and_keeps_its_readings(nvml_stub: StubEnvironment) -> None:
    """Close ends the sampler, which Ctrl-C does not, may be called twice, and slices are still possible."""
    with profiler(nvml_stub()) as nvml:
        os.kill(known(nvml._process).pid, signal.SIGINT)
        start_s = time.monotonic()
        wait_for_ticks(nvml, 2)
        end_s = time.monotonic()
        nvml.close()
        nvml.close()
        assert known(nvml._process).returncode == 0
        assert nvml.why is None
        assert nvml.slice([start_s], [end_s]).samples >= 1


def test_without_a_gpu_the_profile_has_the_reason(nvml_stub: StubEnvironment, tmp_path: Path) -> None:
    """NVML absent, refused, without GPUs or without the requested one: no exception, but a reason."""
    (tmp_path / "libnvidia-ml.so.1").touch()
    absent = {**nvml_stub(), "LD_LIBRARY_PATH": str(tmp_path)}
    cases = [
        (absent, None, "nvmlInit: NVML Shared Library Not Found"),
        (nvml_stub(gpus=0), None, "NVML lists no GPU"),
        (nvml_stub(init=9), None, "nvmlInit: Driver Not Loaded"),
        (nvml_stub(), ["GPU-other"], "NVML lists no GPU GPU-other"),
        (nvml_stub(gpus=2, lost="1:0"), ["GPU-x"], "NVML lists no GPU GPU-x; gpu 1: nvmlDeviceGetUUID: GPU is lost"),
        (nvml_stub(), [], "no GPU is visible"),
    ]
    for environment, uuids, reason in cases:
        with profiler(environment, uuids) as nvml:
            with nvml.window() as window:
                pass
            assert nvml.why == reason
        profile = known(window.profile)
        assert profile.why == {"profile": reason}
        assert (profile.samples, profile.devices, profile.series) == (0, [], None)


def test_a_sampler_that_cannot_run_is_a_reason(
    nvml_stub: StubEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that fails to import gives its status and last line; a missing interpreter gives the error."""
    (tmp_path / "pynvml.py").write_text("raise SystemError('broken wheel')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with profiler({**nvml_stub(), "PYTHONPATH": path}) as nvml:
        wait_for_end(nvml)
        assert nvml.why == "the sampler ended with exit status 1: SystemError: broken wheel"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with profiler(nvml_stub()) as nvml:
        wait_for_end(nvml)
        assert "could not be started" in (nvml.why or "")


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 3, str(signal.SIGRTMIN + 3))]
)
def test_a_killed_sampler_leaves_its_readings(nvml_stub: StubEnvironment, number: int, name: str) -> None:
    """The readings before its death are profiled, later deadlines are missed; a mark without a sampler does nothing."""
    Profiler(PERIOD_S).mark()
    with profiler(nvml_stub()) as nvml:
        start_s = time.monotonic()
        wait_for_ticks(nvml, 2)
        os.kill(known(nvml._process).pid, number)
        nvml.mark()
        wait_for_end(nvml)
        nvml.mark()
        cause = f"the sampler ended with signal {name}"
        assert nvml.why == cause
        profile = nvml.slice([start_s], [time.monotonic() + 10 * PERIOD_S])
        nvml.close()
        nvml.mark()
    assert profile.why == {"sampler": cause}
    assert profile.samples >= 1
    assert profile.missed >= 9
    assert profile.devices[0].metrics["power_w"].mean == 300


PARENT = """
import sys
from pytest_llmgpu.profiling import profiler as module
module._HEADER_S = 300
profiler = module.Profiler(0.025)
profiler.start()
print(profiler._process.pid, profiler.why, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("hang", ["none", "nvmlDeviceGetPowerUsage:4"])
def test_the_sampler_dies_with_its_parent(nvml_stub: StubEnvironment, hang: str) -> None:
    """A killed test process leaves no sampler, also if the sampler hangs in NVML."""
    command = [sys.executable, "-c", PARENT]
    environment = nvml_stub(hang=hang)
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pid, why = known(parent.stdout).readline().split()
        assert why == "None"
        parent.kill()
        assert ends(int(pid))


_APART_S = 1e6


class _Ahead(Profiler):
    """The profiler of a node whose clock is ahead by eleven days."""

    def now_s(self) -> list[float]:
        return [super().now_s()[0] + _APART_S]

    def slice(
        self, starts_s: Sequence[float], ends_s: Sequence[float], held_bytes: Mapping[str, int] | None = None
    ) -> Profile:
        return super().slice([starts_s[0] - _APART_S], [ends_s[0] - _APART_S], held_bytes)


def test_each_node_cuts_its_stream_by_its_clock(nvml_stub: StubEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window has samples of every node."""
    for name, value in nvml_stub(gpus=1).items():
        monkeypatch.setenv(name, value)
    there = _Ahead(PERIOD_S)

    def ask(method: str, arguments: Mapping[str, Any]) -> Any:
        return getattr(there, method)(**arguments)

    profilers = NodeProfilers(here := Profiler(PERIOD_S), [ask], {})
    here.held_bytes = {uuid(0): 4 * GIB}
    profilers.start()
    try:
        starts_s = profilers.now_s()
        deadline_s = time.monotonic() + 300
        while (profile := profilers.slice(starts_s, profilers.now_s())).samples < 2 and time.monotonic() < deadline_s:
            profilers.mark(wait=True)
    finally:
        profilers.close()
    assert starts_s[1] - starts_s[0] == pytest.approx(_APART_S, abs=300)
    assert [device.metrics["memory_used_bytes"].max for device in profile.devices] == [6 * GIB] * 2
    assert not profile.why.get("profile")
    assert profile.samples >= 2
    assert all(device.metrics["power_w"].mean is not None for device in profile.devices)


def test_an_agent_keeps_the_profiler_of_its_node(
    nvml_stub: StubEnvironment, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """All calls with equal settings are of one sampler; other settings end it."""
    request.addfinalizer(module.close_here)
    for name, value in nvml_stub(gpus=1).items():
        monkeypatch.setenv(name, value)
    ask = partial(ask_here, (PERIOD_S, (uuid(0),), "auto"))
    ask("start", {})
    ask("mark", {"wait": True})
    starts_s = ask("now_s", {})
    ask("mark", {"wait": True})
    (device,) = ask("slice", {"starts_s": starts_s, "ends_s": ask("now_s", {}), "held_bytes": {}}).devices
    assert device.uuid == uuid(0)
    assert device.metrics["power_w"].mean is not None
    [first] = module._here.values()
    ask_here((PERIOD_S, (), "auto"), "start", {})
    assert list(module._here) == [(PERIOD_S, (), "auto")]
    assert first.why is None  # it was closed, which is no failure


def test_a_lost_node_has_a_profile_without_readings() -> None:
    """The other nodes keep theirs, and nothing raises."""

    def ask(*_: Any) -> Any:
        raise ConnectionError("its agent ended")

    known = _profile(["GPU-a"], samples=3)

    class _Here(Profiler):
        def slice(self, *_: Any, **__: Any) -> Profile:
            return known

    profilers = NodeProfilers(_Here(PERIOD_S), [ask], {})
    profilers.mark()
    assert profilers.now_s()[1] == 0
    assert profilers.used_bytes() == {}
    profile = profilers.slice([0.0, 0.0], [1.0, 0.0])
    assert profile.why == {"profile": "node 1: the node cannot be reached: its agent ended"}
    assert [device.uuid for device in profile.devices] == ["GPU-a"]
    assert profile.samples == 0


def _profile(uuids: list[str], *, samples: int, series: Series | None = None, **why: str) -> Profile:
    devices = [DeviceProfile(index=index, uuid=uuid) for index, uuid in enumerate(uuids)]
    times: dict[str, Any] = {"duration_s": float(samples), "lateness_p99_s": 0.1 * samples}
    return make_profile(devices=devices, samples=samples, missed=samples - 1, series=series, why=why, **times)


def test_profiles_are_joined_device_by_device() -> None:
    """The series of the second node are read at the times of the first, each at its nearest sample."""
    first = Series(t_s=[0.0, 0.5, 1.0], devices=[{"power_w": [1.0, 2.0, 3.0]}])
    other = Series(t_s=[0.2, 0.9], devices=[{"power_w": [10.0, 20.0]}, {"power_w": [None, 30.0]}])
    profile = joined(
        [_profile(["a"], samples=3, series=first), _profile(["b", "c"], samples=2, series=other, sampler="slow")],
        {"a": 0, "b": 1, "c": 2},
    )
    assert [(device.uuid, device.index) for device in profile.devices] == [("a", 0), ("b", 1), ("c", 2)]
    assert (profile.samples, profile.missed, profile.duration_s) == (2, 2, 3.0)
    assert profile.lateness_p99_s == pytest.approx(0.3)
    assert profile.why == {"sampler": "node 1: slow"}
    assert profile.series == Series(
        t_s=[0.0, 0.5, 1.0],
        devices=[{"power_w": [1.0, 2.0, 3.0]}, {"power_w": [10.0, 10.0, 20.0]}, {"power_w": [None, None, 30.0]}],
    )
