"""Write the generated parts of `docs/`: options, commands, and metrics with their thresholds.

`python .ci/reference.py` rewrites the files; with `--check` it names each file that is not up to date and fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path

import msgspec

from pytest_llmgpu import cli
from pytest_llmgpu.gate import policy
from pytest_llmgpu.report.metrics import METRICS, own
from pytest_llmgpu.report.options import RUN_OPTIONS, Options, ini_key_of, key_of

_DOCS = Path(__file__).parents[1] / "docs"


def options() -> str:
    """Return the table of all options of pytest."""
    rows = []
    for field in dataclasses.fields(Options):
        given = field.metadata
        value = f" {given['metavar']}" if given["metavar"] else ""
        default = "" if given["text"] is None else f"`{given['text']}`"
        marker = "" if field.name in RUN_OPTIONS else "yes"
        rows.append([f"`{key_of(field)}{value}`", given["help"], default, f"`{ini_key_of(field)}`", marker])
    return _table(["flag", "meaning", "default", "ini key", "marker"], rows)


def commands() -> str:
    """Return every command of `llmgpu` with its arguments."""
    parts = []
    for name, command in _subcommands(cli.parser()).items():
        command.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100, max_help_position=32)
        parts.append(f"## llmgpu {name}\n\n```text\n{command.format_help().strip()}\n```")
    return "\n\n".join(parts)


def metrics() -> str:
    """Return the table of the metrics that the gate judges, with the keys of the built-in policy."""
    rows = []
    for spec in METRICS:
        if spec.rule is None:
            continue
        rule = getattr(policy.Policy(), spec.name, None)
        keys = (
            []
            if rule is None
            else [
                f"`{key}`" if value is None else f"`{key} = {_toml(value)}`"
                for key, value in msgspec.structs.asdict(rule).items()
            ]
        )
        rows.append([f"`{spec.name}`", spec.rule, ", ".join(keys), spec.next_step])
    keys = ", ".join(f"`{name}`" for name in policy.FigureRule.__struct_fields__)
    rows.append(["figures of your own", "exact or time", keys, own("", None).next_step])
    return _table(
        ["metric", "rule", "keys of `[tool.llmgpu.gate.METRIC]` with their defaults, if any", "after a regression"],
        rows,
    )


PAGES = {
    "options.md": ("Options", "Flags of pytest, with their keys in ini files and markers.", options),
    "commands.md": (
        "Commands",
        "Every command exits with 2 for wrong arguments and for files that cannot be read.",
        commands,
    ),
    "metrics.md": ("Metrics", "What the gate judges, in the order of its rows.", metrics),
}
"""File to its title, its first sentence and the function that makes the rest."""


def page(name: str) -> str:
    """Return the text of a generated page."""
    title, sentence, make = PAGES[name]
    return f"<!-- Written by .ci/reference.py. -->\n\n# {title}\n\n{sentence}\n\n{make()}\n"


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 - argparse has no public way


def _toml(value: object) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [
        name
        for name in PAGES
        if not _DOCS.joinpath(name).exists() or _DOCS.joinpath(name).read_text("utf-8") != page(name)
    ]
    if not check:
        _DOCS.mkdir(exist_ok=True)
        for name in stale:
            _DOCS.joinpath(name).write_text(page(name), "utf-8")
        return 0
    for name in stale:
        print(f"docs/{name} is not up to date: run python .ci/reference.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
