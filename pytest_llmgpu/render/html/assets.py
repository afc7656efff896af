"""The files of a page: templates, style and scripts, and the colours of its charts.

The colours are CSS variables: the theme changes and the page prints without drawing charts again.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.resources
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.render.charts import theme

if TYPE_CHECKING:
    from jinja2 import Environment as Templates
    from markupsafe import Markup

MISSING = "the page needs jinja2 and vl-convert: pip install 'pytest-llmgpu[report]'"
"""The message if a library of the page is not installed."""

_COLOR = re.compile(r'(?<=")#[0-9a-f]{6}(?=")', re.IGNORECASE)


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(MISSING) from None


def templates() -> Templates:
    """Return the templates; ValueError if jinja2 is not installed."""
    jinja2 = _library("jinja2")
    found: Templates = jinja2.Environment(
        loader=jinja2.PackageLoader("pytest_llmgpu.render", "html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["as_markup"] = _as_markup
    return found


def vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; ValueError if vl-convert is not installed."""
    bundle: str = _library("vl_convert").javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # The string keeps its value, and an HTML parser does not read it as the end of the element.
    return re.sub(r"<(?=/script|!--)", r"\\x3c", bundle, flags=re.IGNORECASE)


def config_and_style() -> tuple[dict[str, Any], str]:
    """Return the `config` of Vega-Lite with a variable for each colour, and the style that sets the variables."""
    light, dark = (msgspec.json.encode(theme(dark=dark)).decode() for dark in (False, True))
    colors = list(zip(_COLOR.findall(light), _COLOR.findall(dark), strict=True))
    names = {pair: f"--chart-{number}" for number, pair in enumerate(dict.fromkeys(colors))}
    variables = iter([names[pair] for pair in colors])
    config: dict[str, Any] = msgspec.json.decode(_COLOR.sub(lambda _: f"var({next(variables)})", light))
    # The page has the background, and the container has the text for screen readers.
    config |= {"background": "transparent", "aria": False}
    on_white, on_black = (" ".join(f"{name}: {pair[n]};" for pair, name in names.items()) for n in (0, 1))
    chosen = f'@media screen {{ :root[data-theme="dark"] {{ {on_black} }} }}'
    other = f':root:not([data-theme="light"]) {{ {on_black} }}'
    of_system = f"@media screen and (prefers-color-scheme: dark) {{ {other} }}"
    return config, f":root {{ {on_white} }}\n{chosen}\n{of_system}\n"


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
