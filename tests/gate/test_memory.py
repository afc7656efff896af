from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import GIB, make_memory, make_result
from support.verdict_factory import make_invalid

from pytest_llmgpu.gate.exact import memory_row
from pytest_llmgpu.gate.policy import MemoryRule
from pytest_llmgpu.report.result import CaseResult

_TENSORS, _RESERVED, _USED = "peak_allocated_bytes", "peak_reserved_bytes", "nvml_used_max_bytes"


def _using(*launches: Sequence[float | None], field: str = _TENSORS) -> CaseResult:
    """Return a result with launches on four devices, in each of which a field grew by GiB; None: it was not measured.

    Before, live tensors and reserved memory are 16, 16, 16 and 17 GiB, and memory in use is 18, 18, 18 and 19 GiB.
    """
    result = make_result()
    for grown in launches:
        launch = make_result(memory=make_memory()).launches[0]
        for place, (device, gib) in enumerate(zip(make_memory(), grown, strict=True)):
            size = None if gib is None else int((getattr(device, field) or 0) + gib * GIB)
            launch.memory[place] = msgspec.structs.replace(device, **{field: size})
        result.launches.append(launch)
    del result.launches[0]
    return result


def _row(head: CaseResult, **rule: Any) -> Any:
    return memory_row(_using([0] * 4), head, MemoryRule(**rule))


@pytest.mark.parametrize(
    ("grown", "verdict", "where"),
    [
        ((0, 0, 0, 0), "OK", "the fullest device"),
        ((0.05, 0.05, 0.05, 0), "OK", "the fullest device"),
        ((0.08, 0.08, 0.08, 0.08), "OK", "the fullest device"),
        ((0.1, 0.1, 0.1, 0.1), "REGRESSED", "the fullest device"),
        ((-0.1, -0.1, -0.1, -0.1), "IMPROVED", "the fullest device"),
        ((0, 0, 0.5, 0), "REGRESSED", "device 2"),
        ((0, 0, -0.5, 0), "IMPROVED", "device 2"),
        ((0, 0.3, 0.5, 0.2), "REGRESSED", "the fullest device"),
        ((0.5, 0, 0, -0.5), "IMPROVED", "the fullest device"),
    ],
)
def test_the_fullest_device_decides_then_every_other_one(grown: Sequence[float], verdict: str, where: str) -> None:
    """0.5 % of 17 GiB are 87 MiB. A device that is not the fullest can grow; memory may move to emptier devices."""
    row = _row(_using(grown))
    assert row.result == verdict
    assert f" on {where}, was " in row.reason
    place, before = (-1, 17 * GIB) if where == "the fullest device" else (2, 16 * GIB)
    assert (row.base, row.head) == pytest.approx((before, before + grown[place] * GIB), abs=1)
    assert row.ratio == row.low == row.high == (row.head or 0) / before


@pytest.mark.parametrize(
    ("field", "grown", "rule", "verdict"),
    [
        (_TENSORS, (1, 1, 1, 1), {"absolute_bytes": 2 * GIB}, "OK"),
        ("workspace_bytes", (1, 1, 1, 1), {}, "REGRESSED"),
        (_RESERVED, (0, 1.5, 0, 0), {}, "OK"),
        (_RESERVED, (0, 1.7, 0, 0), {}, "REGRESSED"),
        (_RESERVED, (0, 1.7, 0, 0), {"used_threshold": 0.5}, "OK"),
        (_USED, (0, 1.7, 0, 0), {}, "OK"),
        (_USED, (0, 1.9, 2.5, 2.2), {}, "REGRESSED"),
        (_USED, (0, 1.1, 0, 0), {"used_threshold": 0.01}, "REGRESSED"),
        (_USED, (0, 0.9, 0, 0), {"used_threshold": 0.01}, "OK"),
        (_USED, (-8, -8, -8, -8), {}, "OK"),
        (_USED, (None, None, None, None), {}, "OK"),
    ],
    ids=str,
)
def test_memory_outside_live_tensors_has_a_threshold_of_its_own(
    field: str, grown: Sequence[float | None], rule: dict[str, Any], verdict: str, prose: Prose
) -> None:
    """Workspace counts as tensors do. Caches and buffers take the space of a batch: 10 % and 1 GiB are allowed."""
    row = _row(_using(grown, field=field), **rule)
    assert row.result == verdict
    assert prose == row.reason


def test_memory_that_other_programs_use_does_not_count() -> None:
    """What NVML reports in use is also theirs. On a busy host it is that of the case."""
    for disturbance, verdict in (("programs of others at work: GPU 0", "OK"), ("CPU cores too busy", "REGRESSED")):
        head = _using([5] * 4, field=_USED)
        make_invalid(head.launches[0], disturbance)
        assert _row(head).verdict == verdict


def test_devices_that_a_launch_lacks_are_not_compared() -> None:
    """Then the fullest device alone decides."""
    fewer = _using([0, 5, 0, 0])
    del fewer.launches[0].memory[:2]
    assert _row(fewer).verdict == "OK"


def test_launches_that_differ_have_not_enough_data() -> None:
    """One of two grew: the range has the threshold inside."""
    row = _row(_using([0] * 4, [1] * 4))
    assert (row.result, row.n, row.low, row.high) == ("UNDECIDED", 1, 1.0, 18 / 17)
    assert memory_row(make_result(), make_result(), MemoryRule()) == "neither report has it"


def test_a_change_between_graphs_and_eager_forwards_is_not_comparable() -> None:
    """Recorded graphs hold memory of their own."""
    head = _using([1] * 4)
    head.case = msgspec.structs.replace(head.case, execution="cuda_graphs")
    row = _row(head)
    assert row.result == "NOT_COMPARABLE"
    assert "--llmgpu-cuda-graphs" in row.reason
