"""What pytest has collected: which tests ask for the model, under what options, and what narrowed the run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import pytest

from pytest_llmgpu.plugin import fixtures
from pytest_llmgpu.plugin.fixtures import StrategyName
from pytest_llmgpu.report.options import Options

__all__ = [
    "DESELECTED",
    "ascending",
    "batch_size_of",
    "fixture_names",
    "group_of",
    "is_ours",
    "measures",
    "parameter",
    "runs_nothing",
    "selection",
]

DESELECTED = pytest.StashKey[list[str]]()
"""In `config.stash`: what kept tests from being collected (see `selection`), then ids of ours that were taken out."""


def is_ours(item: pytest.Item) -> bool:
    """Return whether a test asks for the model."""
    return isinstance(parameter(item, "llm"), StrategyName)


def measures(item: pytest.Item) -> bool:
    """Return whether a test of ours measures a case."""
    return is_ours(item) and "measure" in fixture_names(item)


def parameter(item: pytest.Item, name: str) -> object:
    """Return a test's parameter; None where it has none of that name."""
    return item.callspec.params.get(name) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None


def fixture_names(item: pytest.Item) -> list[str]:
    """Return the fixtures that a test uses."""
    return item.fixturenames if isinstance(item, pytest.Function) else []


def group_of(item: pytest.Item) -> tuple[str, Options]:
    """Return what a test of ours shares its loaded model with."""
    return str(parameter(item, "llm")), fixtures.options_of(item)


def batch_size_of(item: pytest.Item) -> int:
    """Return a test's batch size, 0 where it chooses for itself."""
    size = parameter(item, "batch_size")
    return int(size) if isinstance(size, int) else 0


def runs_nothing(config: pytest.Config) -> bool:
    """Return whether tests or fixtures are only listed."""
    listing = ("collectonly", "showfixtures", "show_fixtures_per_test", "setupplan")
    return any(config.getoption(name, default=False) for name in listing)


def selection(config: pytest.Config) -> list[str]:
    """Return what takes tests out without naming them: pytest does not even collect those.

    They stand among the deselected ids, so that a reader of the report never takes such a run for a whole one.
    """
    cache = getattr(config, "cache", None)
    failed = cache is not None and cache.get("cache/lastfailed", {})
    found = ["--lf: tests that passed last time"] if failed and config.getoption("lf", default=False) else []
    if any("::" in argument for argument in config.args):
        found.append("tests not named on the command line")
    if any("[" in argument.rpartition("::")[2] for argument in config.args if "::" in argument):
        found.append("parameters not named on the command line")
    return found


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
