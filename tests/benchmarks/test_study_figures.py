"""The data of figures 4 to 6 of Shin et al. 2024 are in the JSON of a report."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import pytest
from support.report_factory import GIB, make_report, paper_results

Key = tuple[str, int]
"""Strategy and batch size."""


@pytest.fixture
def written() -> dict[str, Any]:
    """Return the plain JSON of a report with the published cases."""
    answer: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(make_report(paper_results())))
    return answer


def launches(report: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """Return the one launch of each completed case."""
    return {
        (result["case"]["strategy"], result["case"]["batch_size"]): result["launches"][0]
        for result in report["cases"]
        if result["outcome"] == "completed"
    }


def per_gpu(launch: dict[str, Any], metric: str) -> list[float]:
    """Return the mean over the case of each GPU."""
    return [device["metrics"][metric]["mean"] for device in launch["profile"]["devices"]]


def test_mean_traffic_per_gpu_by_batch_size_and_strategy(written: dict[str, Any]) -> None:
    """Figure 4: the sent and received bytes of each GPU, one curve per strategy."""
    curves: dict[str, dict[int, tuple[float, float]]] = {}
    for (strategy, batch_size), launch in launches(written).items():
        sent, received = (per_gpu(launch, f"pcie_{way}_bytes_per_s") for way in ("tx", "rx"))
        assert len(sent) == len(received) == 4
        curves.setdefault(strategy, {})[batch_size] = (statistics.fmean(sent), statistics.fmean(received))
    assert {strategy: len(curve) for strategy, curve in curves.items()} == {"mp": 7, "tp": 7, "iok": 6}
    assert curves["mp"][8] == pytest.approx((1.025 * 0.085e9, 1.025 * 0.9 * 0.085e9))
    assert curves["tp"][32] == pytest.approx((1.025 * 6.7e9, 1.025 * 0.9 * 6.7e9))


def test_utilisation_against_traffic(written: dict[str, Any]) -> None:
    """Figure 5: a point per GPU and case, both coordinates of the same GPU."""
    points: dict[str, list[tuple[float, float]]] = {}
    for (strategy, _), launch in launches(written).items():
        pairs = zip(per_gpu(launch, "pcie_tx_bytes_per_s"), per_gpu(launch, "utilization_pct"), strict=True)
        points.setdefault(strategy, []).extend(pairs)
    assert {strategy: len(found) for strategy, found in points.items()} == {"mp": 28, "tp": 28, "iok": 24}
    assert points["mp"][0] == pytest.approx((0.085e9, 25.0))
    assert points["tp"][3] == pytest.approx((1.1 * 6.7e9, 88.0))


def test_memory_by_batch_size_and_strategy(written: dict[str, Any]) -> None:
    """Figure 6: the fullest GPU and the mean of all; a case that is out of memory is shown as such."""
    largest = {key: max(gpu["nvml_used_max_bytes"] for gpu in one["memory"]) for key, one in launches(written).items()}
    mean = {
        key: statistics.fmean(gpu["nvml_used_mean_bytes"] for gpu in one["memory"])
        for key, one in launches(written).items()
    }
    assert largest["mp", 64] == (17 + 8 + 1) * GIB
    assert mean["mp", 64] == (17 + 8) * GIB
    assert [largest["tp", size] for size in (1, 2, 4)] == sorted(largest["tp", size] for size in (1, 2, 4))
    lost = [result["case"] for result in written["cases"] if result["outcome"] == "oom"]
    assert [(case["strategy"], case["batch_size"]) for case in lost] == [("iok", 64)]


def test_every_mean_has_its_method_and_coverage(written: dict[str, Any]) -> None:
    """A mean has its NVML call and its coverage, and a profile has its period."""
    for launch in launches(written).values():
        assert launch["profile"]["period_s"] == pytest.approx(1 / 6)
        for device in launch["profile"]["devices"]:
            assert all({"mean", "max", "method", "coverage"} <= set(metric) for metric in device["metrics"].values())
