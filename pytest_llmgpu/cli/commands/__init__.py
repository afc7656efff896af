"""The commands of `llmgpu`, one file each: a file that is here and has a `COMMAND` is a command."""

from __future__ import annotations

import importlib
import pkgutil

from pytest_llmgpu.cli.protocol import Command

__all__ = ["commands"]


def commands() -> list[Command]:
    """Return every command, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").COMMAND for name in names]
