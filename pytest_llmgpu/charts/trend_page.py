"""Trends as one page that needs neither a network nor a script: pictures for light and dark, and tables."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from pytest_llmgpu.charts.chart import Chart
from pytest_llmgpu.charts.history import of_trends
from pytest_llmgpu.charts.pictures import image
from pytest_llmgpu.trend_tables import changes
from pytest_llmgpu.trends import Trend

__all__ = ["render"]

_STYLE = """
:root { color-scheme: light dark; --text: #24292f; --ground: #ffffff; --line: #d0d7de; --quiet: #57606a; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --ground: #16181d; --line: #32363d; --quiet: #a8b0ba; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: var(--text); background: var(--ground);
  font: 1rem/1.5 system-ui, sans-serif; }
p, li { overflow-wrap: anywhere; }
p.quiet { color: var(--quiet); }
img { width: 100%; min-width: 34rem; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.875rem; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; }
summary { cursor: pointer; }
"""


def render(trends: Sequence[Trend], machine: str) -> str:
    """Return the page.

    Raises:
        ValueError: the extra `report` is not installed.
    """
    drawn = of_trends(trends)
    charts = {chart.id: chart for chart in drawn.charts}
    parts = [_section(charts[name], trend) for trend in trends if (name := f"trend-{trend.metric}") in charts]
    parts += [f'<p class="quiet">Left out: {html.escape(reason)}</p>\n' for reason in drawn.omitted]
    title = html.escape(f"Trend of {machine}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><main><h1>{title}</h1>\n"
        '<p class="quiet">What counts as a change is what the gate says by its default policy, against the last '
        "earlier report that has the case.</p>\n"
        f"{''.join(parts)}</main></body></html>\n"
    )


def _section(chart: Chart, trend: Trend) -> str:
    told = "".join(f"<li>{html.escape(line)}</li>" for line in changes(trend))
    return (
        f"<section><h2>{html.escape(chart.title)}</h2>\n<p>{html.escape(chart.summary)}</p>\n"
        f'<div class="wide" tabindex="0"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{_address(chart, dark=True)}">'
        f'<img src="{_address(chart, dark=False)}" alt="{html.escape(chart.summary)}"></picture></div>\n'
        f"{f'<ul>{told}</ul>' if told else ''}"
        f'<details><summary>{html.escape(trend.title)} as a table</summary><div class="wide" tabindex="0">'
        f"{_table(chart)}</div></details></section>\n"
    )


def _table(chart: Chart) -> str:
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in chart.headers)
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>{"".join(f"<td>{html.escape(text)}</td>" for text in rest)}</tr>'
        for first, *rest in chart.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _address(chart: Chart, *, dark: bool) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(image(chart, 'svg', dark=dark, titled=False)).decode()}"
