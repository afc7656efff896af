"""What lies beside the pages' code: templates and style."""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment as Templates

__all__ = ["MISSING", "asset", "templates"]

MISSING = "the page needs the extra report: pip install 'pytest-llmgpu[report]'"
"""What is said where a library of the page is not installed."""

_FOLDER = "page"


def asset(name: str) -> str:
    """Return the text of a file."""
    return (importlib.resources.files("pytest_llmgpu") / _FOLDER / name).read_text(encoding="utf-8")


def templates() -> Templates:
    """Return the templates; ValueError, one line, where jinja2 is not installed."""
    try:
        import jinja2
    except ImportError:
        raise ValueError(MISSING) from None
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("pytest_llmgpu", _FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["arrows"] = lambda text: text.replace(" -> ", " \u2192 ")
    return found
