"""The commands of `llmgpu`: each file in this folder defines one as `COMMAND`."""

from __future__ import annotations

import importlib
import pkgutil

from pytest_llmgpu.cli.protocol import Command


def commands() -> list[Command]:
    """Return all commands, sorted by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").COMMAND for name in names]
