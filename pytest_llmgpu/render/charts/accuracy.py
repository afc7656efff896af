"""Accuracy by batch size with its 95 % confidence interval, and the number of answers that differ from mp."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Chart, Spec, formatted, rounded, value_range
from pytest_llmgpu.render.charts.panels import Panel
from pytest_llmgpu.render.time_table import Entry
from pytest_llmgpu.report.derived import measured, upper_bound, value_of
from pytest_llmgpu.report.text import plural

_Z = 1.96
"""Quantile of the normal distribution for a two-sided interval of 95 %."""


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the chart of a panel's accuracy, or a sentence with the reason why there is none."""
    title = "Accuracy by batch size"
    metric = _metric(panel)
    rows, before = (
        [row for entry in entries if (row := _row(entry, metric)) is not None]
        for entries in (panel.completed, panel.before)
    )
    if not rows:
        yield f"{title}: nothing was scored."
        return
    headers = ["strategy", "batch size", f"{metric} (%)", "95 % CI from (%)", "to (%)", "items", "differ from mp"]
    yield Chart(
        id="accuracy",
        title=title,
        summary=_summary(panel, rows, metric),
        spec=_spec(panel, rows, before, metric),
        headers=headers,
        rows=[
            [
                row["s"],
                str(row["b"]),
                *(formatted(row[name]) for name in ("v", "l", "h")),
                f"{row['i']:,}",
                f"{row['f']:,}" if "f" in row else "-",
            ]
            for row in rows
        ],
    )


def _row(entry: Entry, metric: str) -> Spec | None:
    accuracy = measured(entry.result)
    if accuracy is None:
        return None
    value, items = value_of(accuracy, metric), accuracy.items
    row: Spec = {
        "s": entry.title,
        "b": entry.batch_size,
        "v": rounded(100 * value),
        "l": rounded(100 * (1 - upper_bound(1 - value, items, _Z))),
        "h": rounded(100 * upper_bound(value, items, _Z)),
        "i": items,
    }
    if entry.result.comparison is not None:
        row["f"] = len(entry.result.comparison.flipped)
    return row


def _spec(panel: Panel, rows: list[Spec], before: list[Spec], metric: str) -> Spec:
    colour, offset = axes.curves(panel), axes.offset(panel)
    low, high = ({"field": name, "type": "quantitative"} for name in ("l", "h"))
    tooltip = axes.tooltip(
        axes.number("v", f"{metric} (%)"),
        axes.number("l", "95 % CI from (%)"),
        axes.number("h", "to (%)"),
        axes.number("i", "items"),
        axes.number("f", "answers that differ from mp"),
    )
    differing = {
        "transform": [{"filter": "datum.f > 0"}],
        "mark": {"type": "text", "style": "note", "dy": -9, "fontWeight": "bold"},
        "encoding": {
            "color": colour,
            "xOffset": offset,
            "y": high,
            "text": {"field": "f", "type": "quantitative", "format": ",d"},
        },
    }
    published = _published(panel, metric)
    layers = [
        *([] if published is None else axes.limit(published, f"{formatted(published)} % expected")),
        *axes.with_baseline(
            [
                {
                    "mark": {"type": "rule", "strokeWidth": 1.5},
                    "encoding": {"color": colour, "xOffset": offset, "y": low, "y2": {"field": "h"}},
                },
                {
                    "mark": {"type": "point"},
                    "encoding": {"color": colour, "shape": colour, "xOffset": offset, "tooltip": tooltip},
                },
            ],
            before,
        ),
        *([differing] if any(row.get("f") for row in rows) else []),
        *axes.failures(panel),
    ]
    y = axes.levels([row["v"] for row in (*rows, *before)], f"{metric}, 95 % confidence interval (%)", log=False)
    return axes.layered(layers, rows, x=axes.ordinal_batch_sizes(panel), y=y)


def _summary(panel: Panel, rows: list[Spec], metric: str) -> str:
    text = f"{metric} is {value_range([row['v'] for row in rows], '%')} of {max(row['i'] for row in rows):,} items"
    if panel.entries[0].result.case.load_format == "dummy":
        text += " (random weights answer by chance)"
    if compared := [row for row in rows if "f" in row]:
        worst = max(compared, key=lambda row: row["f"])
        text += (
            f"; at most {plural(worst['f'], 'answer')} different from mp ({worst['s']} at batch size {worst['b']})"
            if worst["f"]
            else "; no answer differs from mp"
        )
    return f"{text}."


def _metric(panel: Panel) -> str:
    checks = [entry.result.accuracy_check for entry in panel.completed]
    return next(
        (check.metric for check in checks if check is not None and check.metric in {"acc", "acc_norm"}), "acc_norm"
    )


def _published(panel: Panel, metric: str) -> float | None:
    """Return the reference accuracy in percent where it comes from outside the run."""
    ids = {entry.result.id for entry in panel.entries}
    for entry in panel.completed:
        check = entry.result.accuracy_check
        if check is not None and check.metric == metric and check.baseline is not None and check.source not in ids:
            return 100 * check.baseline
    return None
