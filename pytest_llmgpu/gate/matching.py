"""Which result of a baseline a result is held against, and whether the machines allow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.analysis.environment_differences import shortened
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.result import CaseResult

__all__ = ["Pair", "other_devices", "pairs"]


class Pair(NamedTuple):
    """A result of each side, at least one of them."""

    base: CaseResult | None
    head: CaseResult | None
    differing: list[str]
    """What makes them different measurements in spite of the same id: `dtype float16 -> bfloat16`."""


def pairs(base: Sequence[CaseResult], head: Sequence[CaseResult]) -> list[Pair]:
    """Match results: by key and test, by key alone what is left, the second of a key with the second; then by id.

    Results of one id whose cases differ are matched too, and say in what. In the candidate's order; what only the
    baseline has comes last.
    """
    left = list(base)
    matched: dict[int, CaseResult] = {}
    for name_of in (_key_and_test, _key, _id):
        waiting = [number for number in range(len(head)) if number not in matched]
        there = dict(zip(_numbered(left, name_of), left, strict=True))
        names = _numbered([head[number] for number in waiting], name_of)
        matched |= {number: there.pop(name) for number, name in zip(waiting, names, strict=True) if name in there}
        left = list(there.values())
    found = [Pair(matched.get(number), now, []) for number, now in enumerate(head)]
    found = [
        pair._replace(differing=_differing(pair.base.case, pair.head.case))
        if pair.base is not None and pair.head is not None and pair.base.key != pair.head.key
        else pair
        for pair in found
    ]
    return [*found, *(Pair(result, None, []) for result in left)]


def other_devices(base: Sequence[CaseResult], head: Sequence[CaseResult]) -> list[str]:
    """Return in a line that two reports measured other kinds of devices; nothing where they have one in common."""
    then, now = ({result.case.device for result in cases} for cases in (base, head))
    if not then or not now or then & now:
        return []
    was, is_now = (" and ".join(sorted(devices)) for devices in (then, now))
    return [f"the baseline was measured on {was} and the candidate on {is_now}: they do not compare"]


def _key_and_test(result: CaseResult) -> Hashable:
    return result.key, result.nodeid


def _key(result: CaseResult) -> Hashable:
    return result.key


def _id(result: CaseResult) -> Hashable:
    return result.id


def _numbered(results: Sequence[CaseResult], name_of: Callable[[CaseResult], Hashable]) -> list[tuple[Hashable, int]]:
    """Return each result's name and how many had it before."""
    counts: Counter[Hashable] = Counter()
    numbered = []
    for name in map(name_of, results):
        numbered.append((name, counts[name]))
        counts[name] += 1
    return numbered


def _differing(base: Case, head: Case) -> list[str]:
    then, now = msgspec.structs.asdict(base), msgspec.structs.asdict(head)
    # `execution` is an answer and no part of the key. Keys may also differ because an older version knew fewer fields.
    names = [name for name in then if then[name] != now[name] and name != "execution"]
    return [f"{name} {shortened(then[name])} -> {shortened(now[name])}" for name in names]
