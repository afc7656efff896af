from __future__ import annotations

import pytest

from pytest_llmgpu.render.charts import theme


@pytest.mark.parametrize("dark", [False, True])
def test_every_colour_contrasts_with_its_background(dark: bool) -> None:
    """WCAG 2.2 asks for 3 to 1 for marks and 4.5 to 1 for text."""
    found = theme(dark=dark)

    def light(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(colour: str) -> float:
        low, high = sorted([light(colour), light(found["background"])])
        return (high + 0.05) / (low + 0.05)

    marks = found["range"]["category"]
    assert len(set(marks)) == len(marks) == 8
    assert min(map(contrast, marks)) >= 3
    assert min(map(contrast, found["range"]["ordinal"])) >= 3
    letters = [found["axis"]["labelColor"], found["axis"]["titleColor"], found["style"]["limit-note"]["color"]]
    assert min(map(contrast, letters)) >= 4.5
