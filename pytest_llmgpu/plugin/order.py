"""The order of measurements: a model is loaded once, and small batches run before the large ones that may not fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

__all__ = ["ascending"]

_T = TypeVar("_T")


def ascending(
    tests: Sequence[_T],
    group: Callable[[_T], Hashable],
    batch_size: Callable[[_T], int],
    first: Callable[[_T], bool] = lambda _: False,
) -> list[_T]:
    """Return the tests group by group, as the groups first appear, and by batch size within one.

    Tests of equal batch size keep their order.

    Args:
        tests: in the order they were collected.
        group: what a test shares its loaded model with.
        batch_size: sequences per forward of a test.
        first: whether a test's group runs before the others, which are compared with it.
    """
    turns = {name: turn for turn, name in enumerate(dict.fromkeys(map(group, tests)))}
    return sorted(tests, key=lambda test: (not first(test), turns[group(test)], batch_size(test)))
