"""Which result of the baseline each result of the candidate is compared with."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
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
        there: dict[Hashable, list[CaseResult]] = {}
        for result in left:
            there.setdefault(name_of(result), []).append(result)
        for number, now in enumerate(head):
            if number not in matched and (alike := there.get(name_of(now))):
                matched[number] = alike.pop(0)
        used = set(map(id, matched.values()))
        left = [result for result in left if id(result) not in used]
    found = []
    for number, now in enumerate(head):
        then = matched.get(number)
        differing = []
        if then is not None and then.key != now.key:
            was, is_now = msgspec.structs.asdict(then.case), msgspec.structs.asdict(now.case)
            # `execution` is no part of the key.
            names = [name for name in was if was[name] != is_now[name] and name != "execution"]
            texts = [f"{name} {shortened(was[name])} -> {shortened(is_now[name])}" for name in names]
            # Digests come last. That of a folder is a fingerprint of its files; the commit of a hub model is not cut.
            texts = [re.sub(r"^revision .*\.\.\.", r"files of the model folder (\g<0>)", text) for text in texts]
            differing = sorted(texts, key=lambda text: "..." in text)
        found.append(Pair(then, now, differing))
    return [*found, *(Pair(result, None, []) for result in left)]
