"""The commands of `llmgpu`: each module of this folder is one, with its name.

A command has `HELP`, its line in `llmgpu --help`; `add_arguments(parser)`, which declares its arguments
(`cli.arguments` has those of several commands); and `run(arguments)`, which returns the exit status. All output goes
through `output.show`. A ValueError of `run` is one line, which `llmgpu` prints before it exits with 2. Every `llmgpu`
imports all commands; heavy modules are therefore imported in `run`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def commands() -> dict[str, ModuleType]:
    """Return all commands by name, sorted."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}
