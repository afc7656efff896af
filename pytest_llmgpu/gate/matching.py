"""Which result of the baseline each result of the candidate is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from pytest_llmgpu.analysis.environments import shortened
from pytest_llmgpu.report.result import CaseResult


class Pair(NamedTuple):
    """A result of the baseline and one of the candidate; one of them can be absent."""

    base: CaseResult | None
    head: CaseResult | None
    differing: list[str]
    """Fields that make them different measurements in spite of the same id: `dtype float16 -> bfloat16`."""


def pairs(base: Sequence[CaseResult], head: Sequence[CaseResult]) -> list[Pair]:
    """Match results by key and test, then by key, then by id; the second of a key with the second.

    Results of one id whose cases differ are matched as well, with the differing fields. The pairs are in the
    candidate's order; results that only the baseline has come last.
    """
    left = list(base)
    matched: dict[int, CaseResult] = {}
    for name_of in (attrgetter("key", "nodeid"), attrgetter("key"), attrgetter("id")):
        waiting = [number for number in range(len(head)) if number not in matched]
        there = dict(zip(_numbered(left, name_of), left, strict=True))
        numbered = zip(waiting, _numbered([head[number] for number in waiting], name_of), strict=True)
        matched |= {number: there.pop(name) for number, name in numbered if name in there}
        left = list(there.values())
    found = []
    for number, now in enumerate(head):
        then = matched.get(number)
        differing = []
        if then is not None and then.key != now.key:
            was, is_now = msgspec.structs.asdict(then.case), msgspec.structs.asdict(now.case)
            # `execution` is no part of the key.
            names = [name for name in was if was[name] != is_now[name] and name != "execution"]
            differing = [f"{name} {shortened(was[name])} -> {shortened(is_now[name])}" for name in names]
        found.append(Pair(then, now, differing))
    return [*found, *(Pair(result, None, []) for result in left)]


def _numbered(results: Sequence[CaseResult], name_of: Callable[[CaseResult], Hashable]) -> list[tuple[Hashable, int]]:
    """Return each result's name with the number of earlier results of that name."""
    counts: Counter[Hashable] = Counter()
    numbered = []
    for name in map(name_of, results):
        numbered.append((name, counts[name]))
        counts[name] += 1
    return numbered
