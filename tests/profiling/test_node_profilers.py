"""The profilers of several nodes, whose clocks are apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from pytest_llmgpu.profiling import profiler
from pytest_llmgpu.profiling.profiler import NodeProfilers, Profiler, RemoteProfiler, Settings, joined
from pytest_llmgpu.report.result import DeviceProfile, Profile, Series

_PERIOD_S = 0.025
_APART_S = 1e6
_UUID = "GPU-00000000-0000-0000-0000-000000000000"
_SETTINGS = Settings(period_s=_PERIOD_S, uuids=(_UUID,))


class _Ahead(Profiler):
    """The profiler of a node whose clock is ahead by eleven days."""

    def now_s(self) -> list[float]:
        return [super().now_s()[0] + _APART_S]

    def slice(
        self, starts_s: Sequence[float], ends_s: Sequence[float], held_bytes: Mapping[str, int] | None = None
    ) -> Profile:
        return super().slice([starts_s[0] - _APART_S], [ends_s[0] - _APART_S], held_bytes)


pytestmark = pytest.mark.usefixtures("patient_profiler")


@pytest.fixture(autouse=True)
def close_here() -> Iterator[None]:
    """End the samplers of this process."""
    yield
    profiler.close_here()


def test_each_node_cuts_its_stream_by_its_own_clock(
    nvml_stub: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window has samples of every node."""
    for name, value in nvml_stub(gpus=1).items():
        monkeypatch.setenv(name, value)
    there = _Ahead(_PERIOD_S)

    def call(_fn: object, _settings: Settings, method: str, arguments: dict[str, Any]) -> Any:
        return getattr(there, method)(**arguments)

    profilers = NodeProfilers(here := Profiler(_PERIOD_S), [RemoteProfiler(call, _SETTINGS)], {})
    here.held_bytes = {_UUID: 4 << 30}
    profilers.start()
    try:
        starts_s = profilers.now_s()
        deadline_s = time.monotonic() + 300
        while (profile := profilers.slice(starts_s, profilers.now_s())).samples < 2 and time.monotonic() < deadline_s:
            profilers.mark(wait=True)
    finally:
        profilers.close()
    assert starts_s[1] - starts_s[0] == pytest.approx(_APART_S, abs=300)
    assert [device.metrics["memory_used_bytes"].max for device in profile.devices] == [6 << 30] * 2
    assert not profile.why.get("profile")
    assert profile.samples >= 2
    assert all(device.metrics["power_w"].mean is not None for device in profile.devices)


def test_an_agent_keeps_the_profiler_of_its_node(
    nvml_stub: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls with equal settings are of one sampler; other settings end it."""

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        """Be the agent of a node, in this process."""
        return fn(*args)

    for name, value in nvml_stub(gpus=1).items():
        monkeypatch.setenv(name, value)
    remote = RemoteProfiler(call, _SETTINGS)
    remote.ask("start")
    remote.ask("mark", {"wait": True})
    starts_s = remote.ask("now_s")
    remote.ask("mark", {"wait": True})
    (device,) = remote.ask("slice", {"starts_s": starts_s, "ends_s": remote.ask("now_s"), "held_bytes": {}}).devices
    assert device.uuid == _UUID
    assert device.metrics["power_w"].mean is not None
    [first] = profiler._here.values()
    RemoteProfiler(call, others := Settings(period_s=_PERIOD_S, uuids=())).ask("start")
    assert list(profiler._here) == [others]
    assert first.why is None  # it was closed, which is no failure


def test_a_lost_node_has_a_profile_without_readings() -> None:
    """The other nodes keep theirs, and nothing raises."""

    def call(*_: Any) -> Any:
        raise ConnectionError("its agent ended")

    known = _profile(["GPU-a"], samples=3)

    class _Here(Profiler):
        def slice(self, *_: Any, **__: Any) -> Profile:
            return known

    profilers = NodeProfilers(_Here(_PERIOD_S), [RemoteProfiler(call, _SETTINGS)], {})
    profilers.mark()
    assert profilers.now_s()[1] == 0
    assert profilers.used_bytes() == {}
    profile = profilers.slice([0.0, 0.0], [1.0, 0.0])
    assert profile.why == {"profile": "node 1: the node cannot be reached: its agent ended"}
    assert [device.uuid for device in profile.devices] == ["GPU-a"]
    assert profile.samples == 0


def _profile(uuids: list[str], *, samples: int, series: Series | None = None, **why: str) -> Profile:
    return Profile(
        period_s=0.5,
        duration_s=float(samples),
        samples=samples,
        missed=samples - 1,
        lateness_p99_s=0.1 * samples,
        devices=[DeviceProfile(index=index, uuid=uuid) for index, uuid in enumerate(uuids)],
        sampler_cpu_s=1.0,
        series=series,
        why=why,
    )


def test_profiles_are_joined_device_by_device() -> None:
    """The series of the second node are read at the times of the first, each at its nearest sample."""
    first = Series(t_s=[0.0, 0.5, 1.0], devices=[{"power_w": [1.0, 2.0, 3.0]}])
    other = Series(t_s=[0.2, 0.9], devices=[{"power_w": [10.0, 20.0]}, {"power_w": [None, 30.0]}])
    profile = joined(
        [_profile(["a"], samples=3, series=first), _profile(["b", "c"], samples=2, series=other, sampler="slow")],
        {"a": 0, "b": 1, "c": 2},
    )
    assert [(device.uuid, device.index) for device in profile.devices] == [("a", 0), ("b", 1), ("c", 2)]
    assert (profile.samples, profile.missed, profile.duration_s, profile.sampler_cpu_s) == (2, 2, 3.0, 2.0)
    assert profile.lateness_p99_s == pytest.approx(0.3)
    assert profile.why == {"sampler": "node 1: slow"}
    assert profile.series == Series(
        t_s=[0.0, 0.5, 1.0],
        devices=[{"power_w": [1.0, 2.0, 3.0]}, {"power_w": [10.0, 10.0, 20.0]}, {"power_w": [None, None, 30.0]}],
    )
