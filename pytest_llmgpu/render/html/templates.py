"""What lies beside the pages' code: templates and style."""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment as Templates
    from markupsafe import Markup

__all__ = ["MISSING", "asset", "templates"]

MISSING = "the page needs the extra report: pip install 'pytest-llmgpu[report]'"
"""What is said where a library of the page is not installed."""


def asset(name: str) -> str:
    """Return the text of a file."""
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def templates() -> Templates:
    """Return the templates; ValueError, one line, where jinja2 is not installed."""
    try:
        import jinja2
    except ImportError:
        raise ValueError(MISSING) from None
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("pytest_llmgpu.render", "html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["told"] = _told
    return found


def _told(text: str) -> Markup:
    """Return a sentence that was written for a terminal: arrows, and names between backticks as code."""
    from markupsafe import Markup, escape

    text = text.replace(" -> ", " \u2192 ")
    parts, code = text.split("`"), Markup("<code>{}</code>")
    if len(parts) % 2 == 0:  # one of them is a character of a name
        return escape(text)
    # What is no Markup is escaped as it is joined.
    return Markup("").join(code.format(part) if number % 2 else part for number, part in enumerate(parts))
