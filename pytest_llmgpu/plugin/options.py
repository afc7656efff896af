"""One declaration of every option: flag, ini key, marker argument, default and help in one place.

A flag wins over the marker, the marker over the ini file, the ini file over the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from pytest_llmgpu.report.options import Options, flag_of, ini_key_of

__all__ = ["EXPECT_OOM", "declare", "refuse_idle", "resolve"]

EXPECT_OOM = "expect_oom"
"""The one marker argument that is no option: the series may run out of memory at every batch size."""

_OF_THE_GATE = ("policy", "calibration", "on_inconclusive", "allow_missing", "allow_no_baseline", "require_armed")
"""Options that change nothing unless the run is compared with a baseline."""


def declare(parser: pytest.Parser) -> None:
    """Add every option to pytest's command line and ini file."""
    group = parser.getgroup("llmgpu", "LLM inference on GPUs (pytest-llmgpu)")
    for field in dataclasses.fields(Options):
        text = field.metadata["help"].replace("%", "%%")
        default = field.metadata["text"]
        shown = f"{text} (default: {default})" if default is not None else text
        metavar = field.metadata["metavar"]
        action = "append" if field.name == "strategy" else "store" if metavar else "store_true"
        group.addoption(
            flag_of(field),
            dest=ini_key_of(field),
            default=None,
            action=action,
            help=shown,
            **({"metavar": metavar} if metavar else {}),
            **({"nargs": "?", "const": field.metadata["bare"]} if field.metadata["bare"] is not None else {}),
        )
        parser.addini(ini_key_of(field), f"default of {flag_of(field)}", type="string", default=None)


def resolve(config: pytest.Config, markers: Iterable[pytest.Mark] = ()) -> Options:
    """Return the options in force.

    Args:
        config: Where flags and ini keys are.
        markers: `llmgpu` markers of a test, the closest first.

    Raises:
        pytest.UsageError: A value is not allowed; the text names it, its source and what is allowed.
    """
    given: dict[str, Any] = {}
    for marker in markers:
        _check_marker(marker)
        given = {**marker.kwargs, **given}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        flag, ini = config.getoption(ini_key_of(field), None), config.getini(ini_key_of(field))
        if flag is not None:
            raw, source = flag, flag_of(field)
        elif given.get(field.name) is not None:
            raw, source = given[field.name], f"@pytest.mark.llmgpu({field.name}=...)"
        elif ini is not None:
            raw, source = ini, ini_key_of(field)
        else:
            continue
        text = ",".join(map(str, raw)) if isinstance(raw, (list, tuple)) else str(raw)
        try:
            values[field.name] = field.metadata["parse"](text)
        except ValueError as error:
            raise pytest.UsageError(f"{source}: {text!r} is not allowed: {error}") from None
    return Options(**values)


def refuse_idle(config: pytest.Config, chosen: Options) -> None:
    """Refuse flags of the gate without a baseline: nothing would be judged, and nobody would notice.

    In the ini file they may wait for a run with one.

    Raises:
        pytest.UsageError: In one line with what is missing.
    """
    given = [field for field in dataclasses.fields(Options) if config.getoption(ini_key_of(field), None) is not None]
    idle = [flag_of(field) for field in given if field.name in _OF_THE_GATE]
    if idle and chosen.compare is None:
        raise pytest.UsageError(f"{idle[0]}: there is nothing to judge this run by: --llmgpu-compare=REF is needed")


def refuse_unread(config: pytest.Config, measured: Collection[str], built_in: Collection[str]) -> None:
    """Refuse a flag of one strategy where another is measured: it would change nothing, and nobody would notice.

    In the ini file it may wait for a run of that strategy.

    Args:
        config: Where flags are.
        measured: Names of the strategies that are measured, as `--strategy` has them.
        built_in: Names that flags begin with.

    Raises:
        pytest.UsageError: In one line with the flag and what is measured.
    """
    for field in dataclasses.fields(Options):
        owner = field.name.partition("_")[0]
        given = config.getoption(ini_key_of(field), None) is not None
        if given and owner in built_in and owner not in measured:
            names = ", ".join(sorted(measured))
            raise pytest.UsageError(f"{flag_of(field)}: is for strategy {owner}, and this run measures {names}")


def _check_marker(marker: pytest.Mark) -> None:
    allowed = [field.name for field in dataclasses.fields(Options) if field.metadata["marker"]]
    allowed.append(EXPECT_OOM)
    unknown = [name for name in marker.kwargs if name not in allowed]
    if marker.args or unknown:
        wrong = repr(marker.args[0]) if marker.args else unknown[0]
        raise pytest.UsageError(
            f"@pytest.mark.llmgpu: {wrong} is not allowed: allowed are {', '.join(allowed)}, by name"
        )
    expected = marker.kwargs.get(EXPECT_OOM, False)
    if not isinstance(expected, bool):
        raise pytest.UsageError(
            f"@pytest.mark.llmgpu({EXPECT_OOM}=...): {expected!r} is not allowed: allowed are True and False"
        )
