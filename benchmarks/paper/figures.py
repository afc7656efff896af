"""The values of a report that the claims of Shin et al. 2024 are about, by case, or by batch size of a strategy.

Means are over GPUs and launches, as in the published figures. None or a missing key means that a report lacks the
value.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from pytest_llmgpu.report.derived import of_window
from pytest_llmgpu.report.result import CaseResult

Cases = dict[int, CaseResult]
"""Batch size to the result of one strategy."""

Figure = Callable[[CaseResult], float | None]


def by_strategy(results: Iterable[CaseResult], names: Iterable[str]) -> dict[str, Cases]:
    """Return for each strategy of the report, in the order of the names, the first result of each batch size."""
    cases: dict[str, Cases] = {}
    for result in results:
        cases.setdefault(result.case.strategy, {}).setdefault(result.case.batch_size, result)
    return {name: dict(sorted(cases[name].items())) for name in names if name in cases}


def of(cases: Cases, figure: Figure) -> dict[int, float]:
    """Return a value by batch size for the completed cases that have it."""
    found = {size: figure(result) for size, result in cases.items() if result.outcome == "completed"}
    return {size: value for size, value in found.items() if value is not None}


def seconds(cases: Cases) -> dict[int, float]:
    """Return the time for all items by batch size, without cases that are known to have wrong answers."""
    return of(cases, lambda result: None if result.has_wrong_answers else result.inference_s)


def accuracy(result: CaseResult) -> float | None:
    """Return the fraction of right answers, by log-likelihood per character."""
    return result.acc_norm


def pcie(result: CaseResult) -> float | None:
    """Return the bytes per second that a GPU sent over PCIe."""
    return _mean(result, "pcie_tx_bytes_per_s")


def links(result: CaseResult) -> float | None:
    """Return the bytes per second that a GPU sent over PCIe and, if it was counted, NVLink."""
    over_pcie, nvlink = pcie(result), _mean(result, "nvlink_tx_bytes_per_s")
    return over_pcie if nvlink is None else nvlink + (over_pcie or 0.0)


def sent(result: CaseResult) -> float | None:
    """Return the bytes per second that all ranks together sent, as the program counts them."""
    if result.traffic is None or result.sequences_per_s is None:
        return None
    return result.traffic.wire_bytes_per_sequence * result.sequences_per_s


def seen(counted: Figure) -> Figure:
    """Return `pcie` or `links` without the cases of which less than half of the program's bytes were counted.

    A case counts whose path is known to be these links: a sum in the NVLink switch takes fewer bytes than a ring.
    """

    def of_links(result: CaseResult) -> float | None:
        path = result.traffic.path if result.traffic is not None else None
        link, rate, sent_per_s = path.link if path is not None else None, counted(result), sent(result)
        if link is not None and (counted is links or link in ("pcie", "host")):
            return rate
        is_missed = rate is not None and sent_per_s is not None and rate * result.case.devices < sent_per_s / 2
        return None if is_missed else rate

    return of_links


def busy(result: CaseResult) -> float | None:
    """Return a GPU's utilisation in percent."""
    return _mean(result, "utilization_pct")


def used(result: CaseResult) -> float | None:
    """Return the most bytes that a GPU had in use."""
    devices = [memory for launch in result.launches for memory in launch.memory]
    most = [one.nvml_used_max_bytes for one in devices if one.nvml_used_max_bytes is not None]
    return statistics.fmean(most) if most else None


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's coefficient; 0 if one of the two does not change."""
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values get the mean of their ranks."""
    return [sum(other < one for other in values) + sum(other == one for other in values) / 2 for one in values]


def _mean(result: CaseResult, metric: str) -> float | None:
    profiles = [launch.profile for launch in result.launches if launch.profile is not None]
    found = [of_window(profile, device, metric) for profile in profiles for device in profile.devices]
    means = [one.mean for one in found if not isinstance(one, str) and one.mean is not None]
    return statistics.fmean(means) if means else None
