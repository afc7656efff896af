"""The colours of the charts as CSS variables: the theme changes and the page prints without drawing charts again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_llmgpu.render.charts.theme import theme

__all__ = ["as_variables", "config_and_style"]

_COLOR = re.compile(r"#[0-9a-f]{6}", re.IGNORECASE)


def config_and_style() -> tuple[dict[str, Any], str]:
    """Return the `config` of Vega-Lite with a variable for each colour, and the style that sets the variables."""
    light, dark = theme(dark=False), theme(dark=True)
    pairs = list(dict.fromkeys(_colors(light, dark)))
    config: dict[str, Any] = as_variables(light, dark, pairs)
    # The page has the background, and the container has the text for screen readers.
    config |= {"background": "transparent", "aria": False}
    on_white = " ".join(f"{_name(number)}: {pair[0]};" for number, pair in enumerate(pairs))
    on_black = " ".join(f"{_name(number)}: {pair[1]};" for number, pair in enumerate(pairs))
    style = (
        f":root {{ {on_white} }}\n"
        f'@media screen {{ :root[data-theme="dark"] {{ {on_black} }} }}\n'
        "@media screen and (prefers-color-scheme: dark) "
        f'{{ :root:not([data-theme="light"]) {{ {on_black} }} }}\n'
    )
    return config, style


def as_variables(light: Any, dark: Any, pairs: Sequence[tuple[str, str]]) -> Any:
    """Return `light` with a variable for each colour; `dark` has the same structure."""
    if isinstance(light, Mapping):
        return {key: as_variables(value, dark[key], pairs) for key, value in light.items()}
    if isinstance(light, list):
        return [as_variables(*both, pairs) for both in zip(light, dark, strict=True)]
    return f"var({_name(pairs.index((light, dark)))})" if _is_color(light) else light


def _colors(light: Any, dark: Any) -> Iterator[tuple[str, str]]:
    if isinstance(light, Mapping):
        for key, value in light.items():
            yield from _colors(value, dark[key])
    elif isinstance(light, list):
        for both in zip(light, dark, strict=True):
            yield from _colors(*both)
    elif _is_color(light):
        yield light, dark


def _is_color(value: Any) -> bool:
    return isinstance(value, str) and _COLOR.fullmatch(value) is not None


def _name(number: int) -> str:
    return f"--chart-{number}"
