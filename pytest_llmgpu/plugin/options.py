"""Options in pytest: a flag wins over the marker `llmgpu`, a marker over the ini file, that over the default."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from pytest_llmgpu.report.options import GATE_OPTIONS, RUN_OPTIONS, Options, check_name_is_free, flag_of, ini_key_of

FLAGS = [flag_of(field) for field in dataclasses.fields(Options)]
EXPECT_OOM = "expect_oom"
"""The only marker argument that is not an option: no batch size of the test needs to fit in memory."""

NO_WORKERS = "the workers of xdist cannot share the GPUs: run this test with -n 0"

_OF_WORKLOAD = {
    "score": ("scoring", "accuracy_baseline", "accuracy_metric"),
    "generate": ("prompt_tokens", "new_tokens"),
}
"""Options that have an effect in one workload only."""

_OF_ENGINE = dict.fromkeys(("server_url", "server_command"), "openai")
"""Options of an engine to its name; those of strategies begin with it."""

_INI_TYPES: dict[str | None, Any] = {}
"""Types of ini keys beside strings and lists, by the placeholder of their value in the help."""
if pytest.version_tuple >= (9, 2):
    # Native TOML writes numbers and booleans. Strings are accepted too: ini files have no other type, and 1/6 is one.
    _INI_TYPES[None] = bool | str
    _INI_TYPES |= dict.fromkeys(("ITEMS", "N", "SIZE"), int | str)
    _INI_TYPES |= dict.fromkeys(("SECONDS", "FRACTION"), float | str)


def declare(parser: pytest.Parser) -> None:
    """Add every option to pytest's command line and ini file."""
    group = parser.getgroup("llmgpu", "LLM inference on GPUs (pytest-llmgpu)")
    for field in dataclasses.fields(Options):
        declared = field.metadata
        help_text = declared["help"].replace("%", "%%")
        if declared["text"] is not None:
            help_text += f" (default: {declared['text']})"
        flag = flag_of(field)
        group.addoption(
            flag,
            dest=ini_key_of(field),
            default=None,
            action="append" if field.name == "strategy" else "store" if declared["metavar"] else "store_true",
            help=help_text,
            **({"metavar": declared["metavar"]} if declared["metavar"] else {}),
            **({"nargs": "?", "const": declared["bare"]} if declared["bare"] is not None else {}),
        )
        is_list = (declared["metavar"] or "").endswith("]")
        ini_type: Any = "args" if is_list else _INI_TYPES.get(declared["metavar"], "string")
        parser.addini(ini_key_of(field), f"default of {flag}", type=ini_type, default=None)


def declare_short(parser: pytest.Parser) -> None:
    """Add `--strategy`, once every conftest.py is read, unless one has an option of this name."""
    flag = "--strategy"
    try:
        is_free = flag in parser.parse_known_and_unknown_args([flag])[1]
    except pytest.UsageError:  # it needs a value
        is_free = False
    if is_free:
        group, text = parser.getgroup("llmgpu"), "the same as --llmgpu-strategy"
        group.addoption(flag, dest="llmgpu_strategy", action="append", metavar="NAME[,NAME]", help=text)


def as_typed(config: pytest.Config, text: str) -> str:
    """Return a message with `--strategy` where the command line has that name of the option."""
    is_short = any(str(word).partition("=")[0] == "--strategy" for word in config.invocation_params.args)
    return text.replace("--llmgpu-strategy", "--strategy") if is_short else text


def resolve(config: pytest.Config, markers: Iterable[pytest.Mark] = ()) -> Options:
    """Return the options of a run or, with its markers `llmgpu`, the closest first, of a test.

    A pytest.UsageError has a value that is not allowed, its source and the allowed values.
    """
    marked: dict[str, Any] = {}
    for marker in markers:
        _check_marker(marker)
        marked = {**marker.kwargs, **marked}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        try:
            ini = config.getini(ini_key_of(field))
        except TypeError as error:  # before pytest 9.2, which raises a usage error itself
            raise pytest.UsageError(f"{error}: write it as a string, or use pytest 9.2 or newer") from None
        if (flag := config.getoption(ini_key_of(field), None)) is not None:
            raw, source = flag, as_typed(config, flag_of(field))
            if isinstance(flag, list):  # a strategy of addopts may be repeated on the command line
                raw = ",".join(dict.fromkeys(name for one in flag for name in one.split(",")))
        elif marked.get(field.name) is not None:
            raw, source = marked[field.name], f"@pytest.mark.llmgpu({field.name}=...)"
        elif ini is not None:
            raw, source = ini, ini_key_of(field)
        else:
            continue
        # An ini file writes a list as `1, 2`, which pytest splits like arguments of a shell.
        text = ",".join(str(part).strip(",") for part in raw) if isinstance(raw, (list, tuple)) else str(raw)
        try:
            values[field.name] = field.metadata["parse"](text)
        except ValueError as error:
            raise pytest.UsageError(f"{source}: {text!r} is not allowed: {error}") from None
    return Options(**values)


def check_policy(config: pytest.Config, chosen: Options) -> None:
    """Refuse a policy without bounds, which was given as a flag to a run that is not compared."""
    if config.getoption("llmgpu_policy") is not None:
        found = f"{chosen.policy} has no bounds of figures, and the run is not compared with a baseline"
        raise pytest.UsageError(f"--llmgpu-policy: {found}: --llmgpu-compare=REF is needed")


def check_run(config: pytest.Config, chosen: Options) -> None:
    """Refuse flags of the gate without a baseline, where they have no effect, and a name that finds another file.

    ini keys of the gate are accepted, and a policy, whose bounds need no baseline. The name is checked once, because a
    file may appear during the run.
    """
    unused = [field for field in _given_flags(config) if field.name in GATE_OPTIONS and field.name != "policy"]
    if unused and chosen.compare is None:
        found = "the run is not compared with a baseline"
        raise pytest.UsageError(f"{flag_of(unused[0])}: {found}: --llmgpu-compare=REF is needed")
    if config.getoption("tx", None) and config.getoption("llmgpu_compare") is not None:
        raise pytest.UsageError(f"--llmgpu-compare: {NO_WORKERS}")
    try:
        if chosen.save:
            check_name_is_free(chosen.save)
    except ValueError as error:
        source = "llmgpu_save" if config.getoption("llmgpu_save") is None else "--llmgpu-save"
        raise pytest.UsageError(f"{source}: {chosen.save!r} is not allowed: {error}") from None


def check_owners(
    config: pytest.Config, measured: Collection[str], built_in: Collection[str], workloads: Collection[str]
) -> None:
    """Refuse flags of a strategy or a workload that no test has, where they have no effect; ini keys are accepted.

    Strategies that are `built_in` have flags of their own, whose fields begin with the strategy's name; `measured` are
    those of the run, and `workloads` those of all tests.
    """
    for field in _given_flags(config):
        owner = _OF_ENGINE.get(field.name, field.name.partition("_")[0])
        if owner in built_in and owner not in measured:
            found = f"this is an option of strategy {owner}, and the run measures {', '.join(sorted(measured))}"
            remedy = f"remove the flag or add --llmgpu-strategy={owner}"
            raise pytest.UsageError(f"{flag_of(field)}: {found}: {remedy}")
        if workload := other_workload(field.name, workloads):
            found = f"this is an option of workload {workload}, and no test has it"
            remedy = f"remove the flag, or add --llmgpu-workload={workload}"
            raise pytest.UsageError(f"{flag_of(field)}: {found}: {remedy}")


def other_workload(name: str, workloads: Collection[str]) -> str | None:
    """Return the workload that an option belongs to if it is none of these; else None."""
    owner = next((workload for workload, names in _OF_WORKLOAD.items() if name in names), None)
    return None if owner in workloads else owner


def _given_flags(config: pytest.Config) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(Options) if config.getoption(ini_key_of(field), None) is not None]


def _check_marker(marker: pytest.Mark) -> None:
    allowed = [*(field.name for field in dataclasses.fields(Options) if field.name not in RUN_OPTIONS), EXPECT_OOM]
    unknown = [name for name in marker.kwargs if name not in allowed]
    if wrong := [*map(repr, marker.args), *unknown]:
        names = f"{', '.join(allowed)}, by name"
        raise pytest.UsageError(f"@pytest.mark.llmgpu: {wrong[0]} is not allowed: allowed are {names}")
    expected = marker.kwargs.get(EXPECT_OOM, False)
    if not isinstance(expected, bool):
        source = f"@pytest.mark.llmgpu({EXPECT_OOM}=...)"
        raise pytest.UsageError(f"{source}: {expected!r} is not allowed: allowed are True and False")
