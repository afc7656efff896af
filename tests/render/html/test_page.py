"""The data of a page: the facts, and the colours of the charts."""

from __future__ import annotations

import re
from importlib import resources

import msgspec
import pytest
from support.report_factory import make_report

from pytest_llmgpu.render.charts import theme
from pytest_llmgpu.render.html import assets, report
from pytest_llmgpu.report.report import Commit

_TEXT = ("ink", "soft", "link", "good", "bad", "warn")
"""Colours of text."""


def _variables(selector: str) -> dict[str, tuple[int, int, int]]:
    """Return the colours of a selector in the style, as red, green and blue."""
    style = (resources.files("pytest_llmgpu.render.html") / "page.css").read_text(encoding="utf-8")
    body = style.split(selector, 1)[1].split("}", 1)[0]
    found = re.findall(r"--([a-z]+): #([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})", body)
    return {name: (int(red, 16), int(green, 16), int(blue, 16)) for name, red, green, blue in found}


def _contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """Return the contrast of two colours by WCAG 2.2, 1 to 21."""

    def luminance(color: tuple[int, int, int]) -> float:
        shares = [value / 255 for value in color]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    "selector", [":root {", ':root[data-theme="dark"] {', ':root:not([data-theme="light"]) {', "@media print {"]
)
def test_colours_have_contrast(selector: str) -> None:
    """In every theme text has a contrast of 4.5 to 1 or more, and the edges of controls 3 to 1 or more."""
    color = _variables(selector)
    for ground in (color["ground"], color["surface"]):
        assert {name: _contrast(color[name], ground) for name in _TEXT if _contrast(color[name], ground) < 4.5} == {}
        assert _contrast(color["edge"], ground) >= 3


@pytest.mark.parametrize("dark", [False, True])
def test_colours_of_charts_have_contrast(dark: bool) -> None:
    """WCAG 2.2 asks for 3 to 1 for marks and 4.5 to 1 for text."""
    found = theme(dark=dark)

    def contrast(colour: str) -> float:
        one, ground = (tuple(bytes.fromhex(text[1:])) for text in (colour, found["background"]))
        return _contrast((one[0], one[1], one[2]), (ground[0], ground[1], ground[2]))

    marks = found["range"]["category"]
    assert len(set(marks)) == len(marks) == 8
    assert min(map(contrast, [*marks, *found["range"]["ordinal"]])) >= 3
    letters = [found["axis"]["labelColor"], found["axis"]["titleColor"], found["style"]["limit-note"]["color"]]
    assert min(map(contrast, letters)) >= 4.5


def test_colours_of_charts_are_variables() -> None:
    """The style sets each variable to the colour of the chart theme, for light and dark."""
    config, style = assets.config_and_style()
    assert "#" not in msgspec.json.encode(config).decode()
    chosen = re.findall(r"var\((--chart-\d+)\)", str(config["range"]["category"]))
    light, dark, system = (dict(re.findall(r"(--chart-\d+): (#\w+);", line)) for line in style.splitlines())
    assert [light[name] for name in chosen] == theme(dark=False)["range"]["category"]
    assert [dark[name] for name in chosen] == theme(dark=True)["range"]["category"]
    assert system == dark


def test_options_are_shown_if_they_are_not_the_defaults() -> None:
    """The other report has the value `default`; a limit in bytes has six digits, because nearly equal limits differ."""
    own, other = make_report(), make_report()
    own.options = {"--strategy": ["mp", "tp"], "--llmgpu-limit": None, "--llmgpu-scoring": "harness"}
    other.options = {"--strategy": ["mp"], "--llmgpu-limit": 60, "--llmgpu-scoring": "harness"}
    own.options["--llmgpu-gpu-memory"], other.options["--llmgpu-gpu-memory"] = 34037615821, 34034679808
    facts = report.compared_facts(report.options, own, other, absent="default")
    found = {fact.name: (fact.value, fact.baseline) for fact in facts}
    assert found == {
        "--strategy": ("mp,tp", "default"),
        "--llmgpu-scoring": ("harness", None),
        "--llmgpu-limit": ("default", "60"),
        "--llmgpu-gpu-memory": ("31.7 GiB", "31.6973 GiB"),
    }


def test_facts_have_the_value_of_the_baseline_if_it_differs() -> None:
    """A fact that one report lacks is `-` there; without a baseline no fact has a second value."""
    own, other = make_report(), make_report()
    for one in (own, other):
        gpus = [
            msgspec.structs.replace(gpu, memory_bytes=2**35, pcie_gen=3, pcie_width=8) for gpu in one.environment.gpus
        ]
        one.environment.gpus = gpus
    own.commit, other.commit = Commit(sha="a" * 40, branch="main", dirty=True), Commit(sha="b" * 40)
    own.environment.versions = {"torch": "2.11.0", "triton": "3.6.0", "ray": None}
    other.environment.versions = {"torch": "2.10.0", "triton": "3.6.0", "deepspeed": "0.19.8"}
    libraries = {fact.name: (fact.value, fact.baseline) for fact in report.compared_facts(report.libraries, own, other)}
    assert libraries == {"torch": ("2.11.0", "2.10.0"), "triton": ("3.6.0", None), "deepspeed": ("-", "0.19.8")}
    machine = {fact.name: (fact.value, fact.baseline) for fact in report.compared_facts(report.machine, own, other)}
    assert machine["Commit"] == (f"{'a' * 40} (main) with uncommitted changes", "b" * 40)
    assert machine["GPUs"] == ("4 x NVIDIA H200, 32 GiB, PCIe 3.0 x8", None)
    assert all(fact.baseline is None for fact in report.compared_facts(report.machine, own, None))
