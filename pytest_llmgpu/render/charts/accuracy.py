"""Accuracy by batch size with its interval, and how many items are answered otherwise than under mp."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Chart, Spec, rounded, span, written
from pytest_llmgpu.render.charts.panels import Entry, Panel
from pytest_llmgpu.report.derived import measured, upper_bound, value_of

__all__ = ["charts"]

_Z = 1.96  # of a two-sided interval of 95 %
_ASIDE = 0.16  # strategies of one batch size stand so many doublings apart


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the chart of a panel's accuracy, or in a sentence why there is none."""
    title = "Accuracy by batch size"
    metric = _metric(panel)
    rows = [row for entry in panel.completed if (row := _row(panel, entry, metric)) is not None]
    if not rows:
        yield f"{title}: nothing was scored."
        return
    published = _published(panel, metric)
    failed = axes.failures(panel)
    expected = [] if published is None else axes.limit(published, f"{written(published)} % expected")
    sizes = [place for row in rows for place in (row["n"], row["b"])]
    sizes += [entry.batch_size for entry in panel.failed]
    values = [value for row in rows for value in (row["l"], row["h"])] + ([published] if published is not None else [])
    shared = {
        "x": axes.batch_sizes(sizes),
        "y": axes.levels(values, f"{metric}, interval of 95 % (%)", log=False, lines=len(failed) + 1),
    }
    flipped = [row for row in rows if row.get("f")]
    yield Chart(
        id="accuracy",
        title=title,
        summary=_summary(panel, rows, metric),
        spec={
            **axes.sized([*expected, *_marks(panel, metric), *_flips(panel, flipped), *failed], rows),
            "encoding": shared,
        },
        headers=[
            "strategy",
            "batch size",
            f"{metric} (%)",
            "95 % from (%)",
            "to (%)",
            "items",
            "answered otherwise than mp",
        ],
        rows=[
            [
                row["s"],
                str(row["n"]),
                written(row["v"]),
                written(row["l"]),
                written(row["h"]),
                f"{row['i']:,}",
                "-" if row.get("f") is None else f"{row['f']:,}",
            ]
            for row in rows
        ],
    )


def _row(panel: Panel, entry: Entry, metric: str) -> Spec | None:
    accuracy = measured(entry.result)
    if accuracy is None:
        return None
    value, items = value_of(accuracy, metric), accuracy.items
    place = panel.place(entry)
    row: Spec = {
        "s": entry.title,
        "n": entry.batch_size,
        "b": rounded(entry.batch_size * 2 ** (_ASIDE * place)),
        "v": rounded(100 * value),
        "l": rounded(100 * (1 - upper_bound(1 - value, items, _Z))),
        "h": rounded(100 * upper_bound(value, items, _Z)),
        "i": items,
    }
    if entry.result.comparison is not None:
        row["f"] = len(entry.result.comparison.flipped)
        row["t"] = f"{row['f']:,}"
    return row


def _marks(panel: Panel, metric: str) -> list[Spec]:
    colour = axes.curves(panel)
    tooltip = [
        {"field": "s", "type": "nominal", "title": "strategy"},
        {"field": "n", "type": "quantitative", "title": "batch size"},
        {"field": "v", "type": "quantitative", "title": f"{metric} (%)", "format": axes.NUMBER},
        {"field": "l", "type": "quantitative", "title": "95 % from (%)", "format": axes.NUMBER},
        {"field": "h", "type": "quantitative", "title": "to (%)", "format": axes.NUMBER},
        {"field": "i", "type": "quantitative", "title": "items", "format": ",d"},
        {"field": "f", "type": "quantitative", "title": "items answered otherwise than mp", "format": ",d"},
    ]
    interval = {"y": {"field": "l", "type": "quantitative"}, "y2": {"field": "h"}}
    return [
        {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": {"color": colour, **interval}},
        {"mark": {"type": "point"}, "encoding": {"color": colour, "shape": axes.shapes(panel), "tooltip": tooltip}},
    ]


def _flips(panel: Panel, rows: list[Spec]) -> list[Spec]:
    """Return the numbers of flipped items over their intervals, where there are any."""
    return [
        {
            "data": {"values": rows},
            "mark": {"type": "text", "style": "note", "dy": -9, "fontWeight": "bold"},
            "encoding": {
                "color": axes.curves(panel),
                "y": {"field": "h", "type": "quantitative"},
                "text": {"field": "t", "type": "nominal"},
            },
        }
    ] * bool(rows)


def _summary(panel: Panel, rows: list[Spec], metric: str) -> str:
    values = [row["v"] for row in rows]
    text = f"{metric} is {span(values, '%')} of {max(row['i'] for row in rows):,} items"
    if panel.entries[0].result.case.load_format == "dummy":
        text += " (random weights answer by chance)"
    compared = [row for row in rows if row.get("f") is not None]
    if compared:
        worst = max(compared, key=lambda row: row["f"])
        text += (
            f"; at most {worst['f']:,} are answered otherwise than under mp ({worst['s']} at batch size {worst['n']})"
            if worst["f"]
            else "; all are answered as under mp"
        )
    return f"{text}."


def _metric(panel: Panel) -> str:
    checks = [entry.result.accuracy_check for entry in panel.completed]
    return next(
        (check.metric for check in checks if check is not None and check.metric in {"acc", "acc_norm"}), "acc_norm"
    )


def _published(panel: Panel, metric: str) -> float | None:
    """Return the accuracy that the cases were held against where it comes from outside of the run, in percent."""
    ids = {entry.result.id for entry in panel.entries}
    for entry in panel.completed:
        check = entry.result.accuracy_check
        if check is not None and check.metric == metric and check.baseline is not None and check.source not in ids:
            return 100 * check.baseline
    return None
