from __future__ import annotations

from typing import Any

import pytest
from support.prose import Prose
from support.report_factory import GIB, make_failed, make_result

from pytest_llmgpu.analysis.capacity import capacities, search, split
from pytest_llmgpu.report.result import CaseResult, DeviceMemory, Failure

_LOADING = Failure(phase="load", message="CUDA out of memory")
_MEMORY = {
    "weights_bytes": 13 * GIB,
    "peak_allocated_bytes": 16 * GIB,
    "peak_reserved_bytes": 18 * GIB,
    "workspace_bytes": GIB,
    "nvml_used_max_bytes": 20 * GIB,
}


@pytest.mark.parametrize(
    ("changed", "parts", "reasons"),
    [
        ({}, (13, 3, 2, 1, 1), {}),
        ({"workspace_bytes": None, "why": {"workspace_bytes": "none"}}, (13, 3, 2, None, 2), {"workspace": "none"}),
        ({"nvml_used_max_bytes": None, "why": {"nvml_used_max_bytes": "no"}}, (13, 3, 2, 1, None), {"rest": "no"}),
        ({"nvml_used_max_bytes": 19 * GIB - 1}, (13, 3, 2, 1, None), {"rest": "nvml_used_max_bytes is 1 bytes less"}),
        ({"weights_bytes": 16 * GIB + 1}, (16, None, 2, 1, 1), {"activations": "peak_allocated_bytes is 1 bytes less"}),
        ({"peak_reserved_bytes": None}, (13, 3, None, 1, None), {"cached": "peak_reserved", "rest": "peak_reserved"}),
    ],
)
def test_memory_parts_add_up(changed: dict[str, Any], parts: tuple[int | None, ...], reasons: dict[str, str]) -> None:
    """A part with a missing figure, or one that would be negative, has its reason."""
    found = split(DeviceMemory(index=0, **{**_MEMORY, **changed}))
    names = ("weights", "activations", "cached", "workspace", "rest")
    sizes = [found[f"{name}_bytes"] for name in names]
    assert tuple(size // GIB if isinstance(size, int) else None for size in sizes) == parts
    why = {name: size for name, size in zip(names, sizes, strict=True) if isinstance(size, str)}
    assert why.keys() == reasons.keys()
    assert all(why[name].startswith(text) for name, text in reasons.items())


def _fits(size: int, **fields: Any) -> CaseResult:
    return make_result(60.0, batch_size=size, **fields)


def _oom(size: int, failure: Failure | None = None) -> CaseResult:
    return make_failed("oom", failure, batch_size=size)


def test_the_measured_limit_is_one_sentence(prose: Prose) -> None:
    """It has the largest size that fits and the smallest that does not, for each series in the order of the run."""
    series = {
        (8, 64): [_fits(1), _fits(8), _oom(64)],
        (32, 33): [_fits(32), _oom(33)],
        (32, None): [_fits(32)],
        (None, 8): [_oom(8), make_failed("skipped_after_oom", batch_size=16)],
        (None, 4): [_oom(4, _LOADING)],
        (None, None): [make_failed("crashed")],
        (32, 8): [_oom(8), _fits(32)],
    }
    found = [capacities(results)[0] for results in series.values()]
    assert [(one.largest_fit, one.smallest_oom) for one in found] == list(series)
    assert prose == "\n".join(one.text for one in found)
    found = capacities([_fits(1), _fits(1, strategy="tp"), _oom(2)])
    assert [(each.strategy, each.largest_fit, each.smallest_oom) for each in found] == [("mp", 1, 2), ("tp", 1, None)]
    assert found[0].series == _fits(1).case.series


_ENDED = (make_failed("timeout"), make_failed("skipped_after_oom"), _oom(4, _LOADING), None)


@pytest.mark.parametrize(
    ("results", "limit", "tried"),
    [
        ([_oom(8)], 5, [4, 6, 5]),
        ([_oom(64), _fits(8)], 52, [36, 50, 57, 53, 51, 52]),
        ([_fits(2), _fits(16), _oom(8), make_failed("skipped_after_oom", batch_size=12), _oom(5)], 3, [3, 4]),
        ([_fits(7), _oom(8)], 7, []),
        ([_oom(8, _LOADING)], 0, []),
        *(([_oom(8)], ended, [4]) for ended in _ENDED),
    ],
)
def test_a_search_halves_the_interval(
    results: list[CaseResult], limit: int | CaseResult | None, tried: list[int]
) -> None:
    """It begins below the smallest size that is out of memory, and ends where the limit of memory is unknown."""
    sizes: list[int] = []

    def probe(size: int) -> CaseResult | None:
        sizes.append(size)
        if not isinstance(limit, int):
            return limit
        return _fits(size) if size <= limit else _oom(size)

    search(results, probe)
    assert sizes == tried
