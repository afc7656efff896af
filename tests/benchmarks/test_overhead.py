"""The judgements of the scripts in benchmarks/overhead."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.report_factory import make_report, make_result

FOLDER = Path(__file__).parents[2] / "benchmarks" / "overhead"
MIB = 1 << 20


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script by its name, with those beside it."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def agreement(script: Callable[[str], ModuleType]) -> ModuleType:
    """Import agreement.py."""
    return script("agreement")


def step(kind: str, message_bytes: int, wire_bytes: int, **counted: list[int | None]) -> dict[str, Any]:
    """Return a step of two ranks that sent the message ten times."""
    return {
        "kind": kind,
        "message_bytes": message_bytes,
        "ranks": 2,
        "nvlink": True,
        "wire_bytes_of_one": wire_bytes,
        "expected_bytes": 10 * wire_bytes,
        "devices": counted,
        "why_not_counted": ["nvlink_tx_bytes: refused"],
    }


def over_nvlink(tx: int | None, message_bytes: int = 4 * MIB, wire_bytes: int = 4 * MIB) -> dict[str, Any]:
    """Return an all-reduce for which the second device has this count."""
    rx = 10 * wire_bytes
    return step("all_reduce", message_bytes, wire_bytes, nvlink_tx_bytes=[rx, tx], nvlink_rx_bytes=[rx, rx])


@pytest.mark.parametrize(
    ("off", "ok"), [(0.0009, True), (-0.0009, True), (0.001 + 4090 / (4 * MIB), True), (0.002, False), (-0.0011, False)]
)
def test_a_collective_agrees_within_a_thousandth_and_its_protocol(agreement: ModuleType, off: float, ok: bool) -> None:
    """A step fails if one counter is off by 0.1 % and more than 2 KiB for each step of the ring."""
    answer = agreement.judged(over_nvlink(round(40 * MIB * (1 + off))))
    assert answer["ok"] is ok
    assert answer["ratios"]["nvlink_tx_bytes"] == pytest.approx([1, 1 + off], abs=2e-6)
    assert answer["bound"] == (0.999, pytest.approx(1.001 + 4096 / (4 * MIB), abs=1e-6))


def test_a_missing_count_does_not_agree(agreement: ModuleType) -> None:
    """A missing counter fails the step, with the reason of the device."""
    answer = agreement.judged(over_nvlink(None))
    assert answer["ok"] is False
    assert answer["why"] == "nvlink_tx_bytes: refused"


@pytest.mark.parametrize(
    ("shown", "ok", "why"),
    [
        ([40 * MIB, 44 * MIB], True, "there is no NVLink: compared with PCIe"),
        ([40 * MIB, 100 * MIB], True, "there is no NVLink: compared with PCIe"),
        ([39 * MIB, 44 * MIB], False, "there is no NVLink: compared with PCIe; a ratio lies outside the bound"),
        ([40 * MIB, None], None, "there is no NVLink, and PCIe was not counted: nvlink_tx_bytes: refused"),
    ],
)
def test_without_nvlink_a_collective_is_compared_with_pcie(
    agreement: ModuleType, shown: list[int | None], ok: bool | None, why: str
) -> None:
    """PCIe must show at least the sent bytes. A machine that cannot count them does not fail."""
    given = step("all_reduce", 4 * MIB, 4 * MIB, pcie_tx_bytes=shown, pcie_rx_bytes=shown, nvlink_tx_bytes=[None, None])
    answer = agreement.judged({**given, "nvlink": False})
    assert (answer["ok"], answer["why"], answer["bound"]) == (ok, why, (0.99, None))


@pytest.mark.parametrize(("ratio", "ok"), [(0.98, False), (1.0, True), (1.14, True), (1.16, False)])
def test_a_copy_is_counted_with_its_protocol_and_no_more(agreement: ModuleType, ratio: float, ok: bool) -> None:
    """A device receives at least the payload of a copy, and at most the payload with packet headers."""
    counted = round(160 * MIB * ratio)
    given = step("host_to_device", 16 * MIB, 16 * MIB, pcie_rx_bytes=[counted, counted], pcie_tx_bytes=[0, 0])
    assert agreement.judged(given)["ok"] is ok


@pytest.mark.parametrize(
    ("count", "least", "most", "confidence"), [(3, 1, 3, 0.75), (10, 2, 9, 0.9785), (20, 6, 15, 0.9586)]
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(
    script: Callable[[str], ModuleType], count: int, least: int, most: int, confidence: float
) -> None:
    """Tables of the binomial give the same order statistics and confidence."""
    values = list(range(count, 0, -1))
    assert script("profiler").interval(values) == (least, most, pytest.approx(confidence, abs=1e-4))


@pytest.mark.parametrize(
    ("median", "least", "most", "device", "ok", "sure", "status"),
    [
        (0.05, -0.1, 0.15, "cuda", True, True, 0),
        (0.05, -0.1, 0.9, "cuda", True, False, 0),
        (0.3, 0.1, 0.5, "cuda", False, False, 1),
        (-0.3, -0.5, -0.1, "cuda", False, False, 1),
        (0.3, 0.1, 0.5, "cpu", False, False, 0),
        (0.3, 0.25, 0.5, "cpu", False, False, 1),
    ],
)
def test_a_profiler_that_costs_more_than_its_limit_fails_on_a_gpu(
    script: Callable[[str], ModuleType],
    median: float,
    least: float,
    most: float,
    device: str,
    ok: bool,
    sure: bool,
    status: int,
) -> None:
    """The median decides; on a CPU, whose noise is larger than the limit, the whole interval."""
    profiler = script("profiler")
    assert profiler.judged(median, least, most) == {"ok": ok, "sure": sure}
    assert profiler.status(median, least, device) == status


def test_a_command_is_measured_by_itself(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """The memory of the process that starts the command does not count."""
    judging = script("gate")
    for seed, name in enumerate(("base", "head")):
        sizes = {"cases": 1, "batches": 2, "items": 1, "launches": 1, "devices": 1}
        judging.write(tmp_path / name, seed, **sizes, rows_of_work=0, ranks_of_work=1)
    held = b"x" * (256 * MIB)
    found = judging.measured([tmp_path / "base", tmp_path / "head"])
    assert 10 < found["peak_mb"] < len(held) / MIB
    assert min(found["wall_s"], found["cpu_s"]) > 0
    with pytest.raises(ValueError, match="could not read"):
        judging.measured([tmp_path / "base", tmp_path / "nowhere"])


def test_lateness_and_missed_ticks_come_from_the_stream(script: Callable[[str], ModuleType]) -> None:
    """Of a hundred ticks one is missing and one is late: the late one is the maximum, not the 99th percentile."""
    ticks = [{"k": k, "t_s": 5 + k * 0.1 + 0.001, "cpu_s": 0.01 * k} for k in range(101) if k != 7]
    ticks[50]["t_s"] += 0.05
    figures = script("sampler").figures({"t0_s": 5.0, "period_s": 0.1}, ticks)
    assert figures["missed"] == 1
    assert figures["lateness_max_s"] == pytest.approx(0.051)
    assert figures["lateness_p99_s"] == pytest.approx(0.001)
    assert figures["cpu_s_per_s"] == pytest.approx(0.1)


def test_a_sampler_that_is_not_installed_has_the_reason(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are missing with a reason."""

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(sys, "argv", ["peers.py", "nvitop"])
    script("peers").main()
    assert json.loads(capsys.readouterr().out) == {"installed": None, "why": "nvitop is not installed"}


def _timed(factor: float) -> Any:
    """Return a report of one case whose batches took this many times as long."""
    result = make_result()
    (launch,) = result.launches
    launch.batches.latency_s = [factor * latency_s for latency_s in launch.batches.latency_s]
    launch.warmup_s = 2 * factor
    return make_report([result])


@pytest.mark.slow
def test_generation_is_compared_with_bare_forwards_and_with_transformers(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each piece is a line when it is finished, and each arm has a time."""
    generation = script("generation")
    sizes = ("--batch-sizes=1,2", "--prefill-batch-sizes=2", "--prompt-tokens=9", "--prefill-tokens=12")
    monkeypatch.setattr(sys, "argv", ["generation.py", "--strategies=mp", *sizes, "--new-tokens=3", "--repeats=1"])
    generation.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["piece"] for row in rows] == ["settings", "load", "generate", "generate", "prefill"]
    assert [row.get("batch_size") for row in rows[2:]] == [1, 2, 2]
    for row in rows[2:]:
        assert min(row[f"{arm}_batch_ms"] for arm in ("ours", "bare", "peer")) > 0
        assert (row["execution"], row["compile_s"]) == ("eager", None)
    layers, hidden = 2, 256  # of the bundled model, in float32
    assert [row["kv_cache_bytes"] for row in rows[2:4]] == [2 * layers * hidden * (9 + 3) * 4 * size for size in (1, 2)]
