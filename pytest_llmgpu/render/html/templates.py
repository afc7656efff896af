"""The files of the page: templates, style and scripts."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment as Templates
    from markupsafe import Markup

MISSING = "the page needs jinja2 and vl-convert: pip install 'pytest-llmgpu[report]'"
"""The message if a library of the page is not installed."""


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def templates() -> Templates:
    """Return the templates.

    Raises:
        ValueError: jinja2 is not installed.
    """
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
    found.filters["as_markup"] = _as_markup
    return found


def vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script.

    Raises:
        ValueError: vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise ValueError(MISSING) from None
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # The string keeps its value, and an HTML parser does not read it as the end of the element.
    return re.sub(r"<(?=/script|!--)", r"\\x3c", bundle, flags=re.IGNORECASE)


def content_security_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return a policy that permits these scripts and styles only, and no request."""
    rules = {
        "default-src": ["'none'"],
        **({"script-src": [_hash(script) for script in scripts]} if scripts else {}),
        "style-src": [_hash(style) for style in styles],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    return "; ".join(" ".join([name, *values]) for name, values in rules.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_markup(text: str) -> Markup:
    """Return a message as HTML: ` -> ` becomes an arrow, and names between backticks become code."""
    from markupsafe import Markup, escape

    text = text.replace(" -> ", " \u2192 ")
    parts, code = text.split("`"), Markup("<code>{}</code>")
    if len(parts) % 2 == 0:  # an odd number of backticks: they do not enclose names
        return escape(text)
    # Markup escapes the plain strings that it joins.
    return Markup("").join(code.format(part) if number % 2 else part for number, part in enumerate(parts))
