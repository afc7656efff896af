"""Finds the largest batch size that fits: as measured, as predicted, and by a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_llmgpu.analysis import memory_model
from pytest_llmgpu.analysis.reference import by_series
from pytest_llmgpu.report.report import Capacity, Gpu, Prediction
from pytest_llmgpu.report.result import CaseResult

_STEPS = 64  # a first step away from a wrong prediction is this part of it


def capacities(results: Sequence[CaseResult], gpus: Sequence[Gpu]) -> list[Capacity]:
    """Return the largest batch size of each series, in the order in which they appear.

    Args:
        results: The cases of a report, in the order in which they ran.
        gpus: The devices of its environment.
    """
    return [_capacity(series, gpus) for series in by_series(results)]


def search(results: Sequence[CaseResult], gpus: Sequence[Gpu], probe: Callable[[int], CaseResult | None]) -> None:
    """Measure batch sizes until the largest that fits and the smallest that does not are neighbours.

    The search ends early if a case ends in another way than completed or out of memory: that is no information on
    memory. It does not begin if the model itself does not fit.

    Args:
        results: The results of one series in the order in which they ran, one of them out of memory.
        gpus: The devices, for the prediction, which is the first size to try.
        probe: Measures one batch size; returns None if it cannot be measured.
    """
    failed = [result for result in results if result.outcome == "oom"]
    if any(_while_loading(result) for result in failed):
        return
    high = min(result.case.batch_size for result in failed)
    low = max((size for size in _completed(results) if size < high), default=0)
    prediction = memory_model.predict(_before(results), gpus)
    predicted = prediction.max_batch_size if isinstance(prediction, Prediction) else None
    while (size := next_probe(low, high, predicted)) is not None:
        result = probe(size)
        if result is not None and result.outcome == "completed":
            low = size
        elif result is not None and result.outcome == "oom" and not _while_loading(result):
            high = size
        else:
            return


def next_probe(low: int, high: int, predicted: int | None) -> int | None:
    """Return the batch size to try next; None once `low` and `high` are neighbours.

    The prediction comes first. If it is wrong, steps away from it double, since it is seldom far off. After they pass
    the limit, and without a prediction, the interval is halved.

    Args:
        low: The largest batch size that is known to fit, 0 for none.
        high: The smallest one that is known not to fit.
        predicted: The predicted largest one; None without a prediction.
    """
    if high - low <= 1:
        return None
    middle = (low + high) // 2
    if predicted is None:
        return middle
    step = max(1, predicted // _STEPS)
    if predicted <= low:
        return min(middle, low + max(step, 2 * (low - predicted)))
    if predicted >= high:
        return max(middle, high - max(step, 2 * (predicted - high)))
    return predicted


def _capacity(results: Sequence[CaseResult], gpus: Sequence[Gpu]) -> Capacity:
    found = memory_model.predict(_before(results), gpus)
    prediction, why = (None, {"prediction": found}) if isinstance(found, str) else (found, {})
    failed = [result for result in results if result.outcome == "oom"]
    fit = max(_completed(results), default=None)
    oom = min((result.case.batch_size for result in failed), default=None)
    text = _describe(fit, oom, loading=any(_while_loading(result) for result in failed))
    if prediction is not None:
        first = f", GPU {prediction.device_index} is full first" if results[0].case.devices > 1 else ""
        text += f" (predicted: {prediction.max_batch_size:,}{first})"
    return Capacity(
        series=results[0].case.series,
        strategy=results[0].case.strategy,
        largest_fit=fit,
        smallest_oom=oom,
        prediction=prediction,
        text=f"{text}.",
        why=why,
    )


def _before(results: Sequence[CaseResult]) -> Sequence[CaseResult]:
    """Return the results before the first one that ran out of memory; all if none did."""
    first = next((number for number, result in enumerate(results) if result.outcome == "oom"), len(results))
    return results[:first]


def _describe(fit: int | None, oom: int | None, *, loading: bool) -> str:
    """Return the measured limit in words, without a full stop.

    Args:
        fit: The largest batch size that completed; None for none.
        oom: The smallest one that ran out of memory; None for none.
        loading: Whether the model itself did not fit.
    """
    if fit is None:
        if oom is None:
            return "The largest batch size is unknown: none completed"
        return "The model itself does not fit" if loading else f"The largest batch size is below {oom}"
    if oom is None:
        return f"The largest batch size is {fit} or above: nothing was out of memory"
    if oom <= fit:
        return f"The largest batch size is not clear: {oom} ran out of memory and {fit} completed"
    if oom == fit + 1:
        return f"The largest batch size is {fit}: {oom} runs out of memory"
    return f"The largest batch size is between {fit}, which fits, and {oom}, which does not"


def _completed(results: Sequence[CaseResult]) -> list[int]:
    return [result.case.batch_size for result in results if result.outcome == "completed"]


def _while_loading(result: CaseResult) -> bool:
    return result.failure is not None and result.failure.phase == "load"
