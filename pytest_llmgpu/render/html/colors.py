"""The colours of the charts as CSS variables: the theme changes and the page prints without drawing charts again."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pytest_llmgpu.render.charts import theme

_COLOR = re.compile(r'(?<=")#[0-9a-f]{6}(?=")', re.IGNORECASE)


def config_and_style() -> tuple[dict[str, Any], str]:
    """Return the `config` of Vega-Lite with a variable for each colour, and the style that sets the variables."""
    light, dark = (msgspec.json.encode(theme(dark=dark)).decode() for dark in (False, True))
    colors = list(zip(_COLOR.findall(light), _COLOR.findall(dark), strict=True))
    names = {pair: f"--chart-{number}" for number, pair in enumerate(dict.fromkeys(colors))}
    variables = iter([names[pair] for pair in colors])
    config: dict[str, Any] = msgspec.json.decode(_COLOR.sub(lambda _: f"var({next(variables)})", light))
    # The page has the background, and the container has the text for screen readers.
    config |= {"background": "transparent", "aria": False}
    on_white = " ".join(f"{name}: {pair[0]};" for pair, name in names.items())
    on_black = " ".join(f"{name}: {pair[1]};" for pair, name in names.items())
    style = (
        f":root {{ {on_white} }}\n"
        f'@media screen {{ :root[data-theme="dark"] {{ {on_black} }} }}\n'
        "@media screen and (prefers-color-scheme: dark) "
        f'{{ :root:not([data-theme="light"]) {{ {on_black} }} }}\n'
    )
    return config, style
