"""The judgements of the scripts in benchmarks/overhead."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20


def judged(counted: dict[str, Any]) -> Any:
    """Return the judgement of a step."""
    return import_module("agreement").judged(counted)


def step(kind: str, message_bytes: int, **counted: list[int | None]) -> dict[str, Any]:
    """Return a step of two ranks that sent the message ten times."""
    return {
        "kind": kind,
        "message_bytes": message_bytes,
        "ranks": 2,
        "nvlink": True,
        "wire_bytes_of_one": message_bytes,
        "expected_bytes": 10 * message_bytes,
        "devices": counted,
        "why_not_counted": ["nvlink_tx_bytes: refused"],
    }


def over_nvlink(tx: int | None) -> dict[str, Any]:
    """Return an all-reduce for which the second device has this count."""
    rx = 40 * MIB
    return step("all_reduce", 4 * MIB, nvlink_tx_bytes=[rx, tx], nvlink_rx_bytes=[rx, rx])


@pytest.mark.parametrize(
    ("off", "ok"), [(0.0009, True), (-0.0009, True), (0.001 + 4090 / (4 * MIB), True), (0.002, False), (-0.0011, False)]
)
def test_a_collective_agrees_within_a_thousandth_and_its_protocol(off: float, ok: bool) -> None:
    """A step fails if one counter is off by 0.1 % and more than 2 KiB for each step of the ring."""
    answer = judged(over_nvlink(round(40 * MIB * (1 + off))))
    assert answer["ok"] is ok
    assert answer["ratios"]["nvlink_tx_bytes"] == pytest.approx([1, 1 + off], abs=2e-6)
    assert answer["bound"] == (0.999, pytest.approx(1.001 + 4096 / (4 * MIB), abs=1e-6))


def test_a_missing_count_does_not_agree() -> None:
    """A missing counter fails the step, with the reason of the device."""
    answer = judged(over_nvlink(None))
    assert (answer["ok"], answer["why"]) == (False, "nvlink_tx_bytes: refused")


@pytest.mark.parametrize(
    ("shown", "ok", "why"),
    [
        ([40 * MIB, 44 * MIB], True, "there is no NVLink: compared with PCIe"),
        ([40 * MIB, 100 * MIB], True, "there is no NVLink: compared with PCIe"),
        ([39 * MIB, 44 * MIB], False, "there is no NVLink: compared with PCIe; a ratio lies outside the bound"),
        ([40 * MIB, None], None, "there is no NVLink, and PCIe was not counted: nvlink_tx_bytes: refused"),
    ],
)
def test_without_nvlink_a_collective_is_compared_with_pcie(shown: list[int | None], ok: bool | None, why: str) -> None:
    """PCIe must show at least the sent bytes. A machine that cannot count them does not fail."""
    given = step("all_reduce", 4 * MIB, pcie_tx_bytes=shown, pcie_rx_bytes=shown, nvlink_tx_bytes=[None, None])
    answer = judged({**given, "nvlink": False})
    assert (answer["ok"], answer["why"], answer["bound"]) == (ok, why, (0.99, None))


@pytest.mark.parametrize(("ratio", "ok"), [(0.98, False), (1.0, True), (1.14, True), (1.16, False)])
def test_a_copy_is_counted_with_its_protocol_and_no_more(ratio: float, ok: bool) -> None:
    """A device receives at least the payload of a copy, and at most the payload with packet headers."""
    counted = round(160 * MIB * ratio)
    given = step("host_to_device", 16 * MIB, pcie_rx_bytes=[counted, counted], pcie_tx_bytes=[0, 0])
    assert judged(given)["ok"] is ok


@pytest.mark.parametrize(
    ("count", "least", "most", "confidence"), [(3, 1, 3, 0.75), (10, 2, 9, 0.9785), (20, 6, 15, 0.9586)]
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(
    count: int, least: int, most: int, confidence: float
) -> None:
    """Tables of the binomial give the same order statistics and confidence."""
    values = list(range(count, 0, -1))
    assert import_module("profiler").interval(values) == (least, most, pytest.approx(confidence, abs=1e-4))


@pytest.mark.parametrize(
    ("figures_pct", "ok", "sure", "device", "status"),
    [
        ((0.05, -0.1, 0.15), True, True, "cuda", 0),
        ((0.05, -0.1, 0.9), True, False, "cuda", 0),
        ((0.3, 0.1, 0.5), False, False, "cuda", 1),
        ((-0.3, -0.5, -0.1), False, False, "cuda", 1),
        ((0.3, 0.1, 0.5), False, False, "cpu", 0),
        ((0.3, 0.25, 0.5), False, False, "cpu", 1),
    ],
)
def test_a_profiler_that_costs_more_than_its_limit_fails_on_a_gpu(
    figures_pct: tuple[float, float, float], ok: bool, sure: bool, device: str, status: int
) -> None:
    """The median, the first figure, decides; on a CPU, whose noise is larger than the limit, the whole interval."""
    profiler = import_module("profiler")
    assert profiler.judged(*figures_pct) == {"ok": ok, "sure": sure}
    assert profiler.status(*figures_pct[:2], device) == status


def test_a_command_is_measured_by_itself(tmp_path: Path) -> None:
    """The memory of the process that starts the command does not count."""
    judging = import_module("gate")
    for seed, name in enumerate(("base", "head")):
        sizes = {"cases": 1, "batches": 2, "items": 1, "launches": 1, "devices": 1}
        judging.write(tmp_path / name, seed, **sizes, rows_of_work=0, ranks_of_work=1)
    held = b"x" * (256 * MIB)
    found = judging.measured([tmp_path / "base", tmp_path / "head"])
    assert 10 < found["peak_mb"] < len(held) / MIB
    assert min(found["wall_s"], found["cpu_s"]) > 0
    with pytest.raises(ValueError, match="could not read"):
        judging.measured([tmp_path / "base", tmp_path / "nowhere"])


def test_lateness_and_missed_ticks_come_from_the_stream() -> None:
    """Of a hundred ticks one is missing and one is late: the late one is the maximum, not the 99th percentile."""
    ticks = [{"k": k, "t_s": 5 + k * 0.1 + 0.001, "cpu_s": 0.01 * k} for k in range(101) if k != 7]
    ticks[50]["t_s"] += 0.05
    figures = import_module("sampler").figures({"t0_s": 5.0, "period_s": 0.1}, ticks)
    assert figures["missed"] == 1
    assert figures["lateness_max_s"] == pytest.approx(0.051)
    assert figures["lateness_p99_s"] == pytest.approx(0.001)
    assert figures["cpu_s_per_s"] == pytest.approx(0.1)


@pytest.mark.slow
def test_generation_is_compared_with_bare_forwards_and_with_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each piece is a line when it is finished, and each arm has a time."""
    generation = import_module("generation")
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
