"""The collected tests: which of them use the model, with which options, and in which order they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_llmgpu.plugin import fixtures, options
from pytest_llmgpu.plugin.fixtures import BatchSize, StrategyName
from pytest_llmgpu.report.options import Options

DESELECTED = pytest.StashKey[list[str]]()
"""In `config.stash`: the limits of the selection (see `limits_of_selection`), then the ids of our deselected tests."""


def is_ours(item: pytest.Item) -> bool:
    """Return whether a test uses the fixture `llm` of this plugin, or measures an engine of its own."""
    if isinstance(fixtures.parameter(item, "llm"), StrategyName):
        return True
    return fixtures.used(item, ["measure", "llm"]) == ["measure"] and isinstance(
        fixtures.parameter(item, "batch_size"), BatchSize
    )


def measures(item: pytest.Item) -> bool:
    """Return whether a test of ours uses the fixture `measure`."""
    return is_ours(item) and bool(fixtures.used(item, ["measure"]))


def group_of(item: pytest.Item) -> tuple[str, Options]:
    """Return the strategy and the options of a test of ours: tests with equal ones share a loaded model.

    The strategy is empty for a test that measures an engine of its own.
    """
    return str(fixtures.parameter(item, "llm") or ""), fixtures.options_of(item)


def runs_nothing(config: pytest.Config) -> bool:
    """Return whether pytest only lists tests or fixtures."""
    listing = ("collectonly", "showfixtures", "show_fixtures_per_test", "setupplan")
    return any(config.getoption(name, default=False) for name in listing)


def limits_of_selection(config: pytest.Config) -> list[str]:
    """Return the options that take out tests which pytest does not collect and therefore cannot name.

    The report lists them with the deselected tests, so that its reader does not take the run for a complete one.
    """
    cache = getattr(config, "cache", None)
    failed = cache is not None and cache.get("cache/lastfailed", {})
    found = ["--lf: tests that passed last time"] if failed and config.getoption("lf", default=False) else []
    if any("::" in argument for argument in config.args):
        found.append("tests not named on the command line")
    if any("[" in argument.rpartition("::")[2] for argument in config.args if "::" in argument):
        found.append("parameters not named on the command line")
    return found


def run_order(items: Sequence[pytest.Item], runs: Callable[[pytest.Item], bool]) -> list[pytest.Item]:
    """Return the tests with ours ordered, in the places that ours have; the others stay.

    Ours are run group by group, the reference strategy first, then in the order in which groups first appear, with
    ascending batch sizes: each model is loaded once, and small batches run before large ones that may not fit. A test
    that sets its batch size itself comes first. Tests of equal batch size keep their order. `runs` returns whether a
    test is one of ours that is measured.
    """
    from pytest_llmgpu.report.case import REFERENCE_STRATEGY

    turns: dict[tuple[object, ...], int] = {}
    places: dict[pytest.Item, tuple[bool, int, int]] = {}
    for item in filter(runs, items):
        group, size = group_of(item), fixtures.parameter(item, "batch_size")
        # Folders whose conftest.py change the model have loadings of their own.
        changes = tuple(one.plugin_name for one in item.ihook.pytest_llmgpu_model.get_hookimpls())
        turn = turns.setdefault((*group, changes), len(turns))
        places[item] = (group[0] != REFERENCE_STRATEGY, turn, size if isinstance(size, int) else 0)
    ordered = iter(sorted(places, key=places.__getitem__))
    return [next(ordered) if item in places else item for item in items]


def idle_marker(item: pytest.Item) -> str | None:
    """Return an error if a marker of a test has no effect.

    In a `pytest.param` it cannot choose strategies or batch sizes: pytest makes the parameters of a test from the
    markers of its function, before it looks at those of a parameter. Options of the other workload are accepted in the
    marker of a class or a module, which can have tests of both.
    """
    chosen = options.resolve(item.config, item.iter_markers("llmgpu"))
    strategy, size = fixtures.parameter(item, "llm"), fixtures.parameter(item, "batch_size")
    quantization = strategy.quantization if isinstance(strategy, StrategyName) else None
    for name, value, allowed in (
        ("strategy", strategy if quantization else None, chosen.strategy),
        ("quantization", quantization, chosen.quantization),
        ("batch_sizes", size if isinstance(size, BatchSize) else None, chosen.batch_sizes),
    ):
        if value is not None and value not in allowed:
            return (
                f"marker llmgpu({name}=...): a marker of a pytest.param cannot choose it, and the test would run with "
                f"{value}: put the marker on the test function"
            )
    workloads = fixtures.workloads_of(item)
    for name in (name for marker in item.own_markers if marker.name == "llmgpu" for name in marker.kwargs):
        if owner := options.other_workload(name, workloads):
            return (
                f"marker llmgpu({name}=...): this is an option of workload {owner}, and the test has workload "
                f"{', '.join(sorted(workloads))}: remove it, or add workload={owner!r}"
            )
    return None
