"""Times (Table 2 of Shin et al. 2024), memory (figure 6) and accuracy by batch size and strategy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.axes import Chart, Panel, Spec, formatted, rounded, value_range
from pytest_llmgpu.render.table import COLUMNS, Entry
from pytest_llmgpu.report.derived import measured, upper_bound, value_of
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import GIB, plural

Figure = Callable[[Entry], float | None]
"""A function that returns a case's figure in the unit of an axis; None where the case has none."""

_FAR = 2.5  # a capacity above this multiple of the memory in use is not drawn: it would flatten the curves
_Z = 1.96  # quantile of the normal distribution for a two-sided interval of 95 %


class Point(NamedTuple):
    """One mark of a chart."""

    entry: Entry
    kind: str
    """The curve among several curves of one strategy, such as `TX`."""
    value: float
    """The figure in the unit of the axis, not rounded: rounding twice may change the last digit."""


def points(entries: Sequence[Entry], figures: Mapping[str, Figure]) -> list[Point]:
    """Return the points of completed cases; `figures` maps the name of a curve to its figure."""
    return [
        Point(entry, kind, value)
        for kind, figure in figures.items()
        for entry in entries
        if (value := figure(entry)) is not None
    ]


def curves_of(
    panel: Panel,
    drawn: Sequence[Point],
    figures: Mapping[str, Figure],
    *,
    title: str,
    log: bool = True,
    more: Sequence[Spec] = (),
) -> Spec:
    """Return the specification of curves over batch sizes, with those of the baseline and `more` layers below them."""
    kinds = list(dict.fromkeys(point.kind for point in drawn))
    several = len(kinds) > 1
    then = [point for point in points(panel.before, figures) if point.kind in kinds and (point.value > 0 or not log)]

    def rows_of(some: Sequence[Point]) -> list[Spec]:
        found: list[Spec] = []
        for entry, kind, value in some:
            row = {"s": entry.title, "b": entry.batch_size, "v": rounded(value)}
            found.append({**row, "k": kind} if several else row)
        return found

    rows, before = rows_of(drawn), rows_of(then)
    dash: Spec = {}
    tooltip = axes.tooltip({"v": title})
    if several:
        dash = {"strokeDash": {**axes.text("k"), "scale": {"domain": kinds}}}
        tooltip.insert(1, axes.text("k", "curve"))
    colour = axes.curves(panel)
    batch_size = {"field": "b", "type": "quantitative"}
    layers = [
        *more,
        *axes.with_baseline(
            [
                {"mark": {"type": "line"}, "encoding": {"color": colour, "order": batch_size, **dash}},
                {"mark": {"type": "point"}, "encoding": {"color": colour, "shape": colour, "tooltip": tooltip}},
            ],
            before,
        ),
        *axes.failures(panel),
    ]
    sizes = [entry.batch_size for entry in (*panel.completed, *panel.failed, *panel.before)]
    y = axes.levels([row["v"] for row in (*rows, *before)], title, log=log)
    return axes.layered(layers, rows, x=axes.batch_sizes(sizes), y=y)


def row_of(entry: Entry, values: Iterable[float | None]) -> list[str]:
    """Return a row of a table with one case per row: strategy, batch size, and these figures."""
    return [entry.title, str(entry.batch_size), *map(formatted, values)]


def times(panel: Panel) -> Iterator[Chart | str]:
    """Yield the charts of a panel's time and throughput, or a sentence with the reason why there is none."""
    if panel.entries[0].result.case.generates:
        yield _speed(panel, "time per token", "ms", "token_p50_s", min)
        yield _speed(panel, "time to first token", "ms", "first_token_s", min)
    else:
        yield _speed(panel, "time", "s", "inference_s", min)
    yield _speed(panel, "throughput", "sequences/s", "sequences_per_s", max)


def _speed(panel: Panel, name: str, unit: str, field: str, best: Callable[..., Point]) -> Chart | str:
    """Return the chart of a field of the result in this unit; times are in seconds in the report."""

    def figure(entry: Entry) -> float | None:
        value: float | None = getattr(entry.result, field)
        return 1000 * value if value is not None and unit == "ms" else value

    def summary(drawn: Sequence[Point]) -> str:
        texts = []
        for one in panel.titles:
            of_title = [point for point in drawn if point.entry.title == one]
            if right := [point for point in of_title if not point.entry.result.has_wrong_answers]:
                winner = best(right, key=lambda point: point.value)
                texts.append(f"{one} {formatted(winner.value, unit, digits=3)} at batch size {winner.entry.batch_size}")
            elif of_title:
                texts.append(f"{one} none, because all its answers are wrong")
        return f"Best of each strategy: {', '.join(texts)}."

    title = f"{name.capitalize()} by batch size"
    return of_figure(panel, title, (name, unit), figure, summary) or f"{title}: no completed case has one."


def of_figure(
    panel: Panel, title: str, axis: tuple[str, str], figure: Figure, summary: Callable[[Sequence[Point]], str]
) -> Chart | None:
    """Return the chart of a figure above 0, with the name and the unit of its axis; None if no case has it."""
    (name, unit), drawn = axis, [point for point in points(panel.completed, {"": figure}) if point.value > 0]
    if not drawn:
        return None
    before = {(entry.title, entry.batch_size): figure(entry) for entry in panel.before}
    cells: dict[int, dict[str, list[str]]] = {}
    for entry in panel.entries:
        value = figure(entry) if entry.result.outcome == "completed" else None
        ended = {"completed": "-", "oom": "OOM", "skipped_after_oom": "not run"}
        text = formatted(value) if value is not None else ended.get(entry.result.outcome, entry.result.outcome)
        if entry.result.has_wrong_answers:
            text += " (wrong answers)"
        if (then := before.get((entry.title, entry.batch_size))) is not None:
            text += f" (was {formatted(then)})"
        cells.setdefault(entry.batch_size, {}).setdefault(entry.title, []).append(text)
    return Chart(
        id=name.replace(" ", "-"),
        title=title,
        summary=summary(drawn),
        spec=curves_of(panel, drawn, {"": figure}, title=f"{name} ({unit})"),
        headers=["batch size", *(f"{one} ({unit})" for one in panel.titles)],
        rows=[
            [str(size), *("; ".join(by_title.get(one, [])) for one in panel.titles)]
            for size, by_title in sorted(cells.items())
        ],
    )


def memory(panel: Panel) -> Iterator[Chart | str]:
    """Yield the chart of a panel's memory with its capacity, or the reason why there is none."""

    def gib(of_devices: Callable[[Sequence[float]], float], entry: Entry) -> float | None:
        found, _ = _memory_of(entry.result)
        return of_devices(found) / GIB if found else None

    fullest: Figure = partial(gib, max)
    figures = {"fullest GPU": fullest}
    if panel.several:
        figures["mean of the GPUs"] = partial(gib, statistics.fmean)
    drawn = points(panel.completed, figures)
    if not drawn:
        yield "Memory by batch size: it was not measured."
        return
    capacity = _capacity_gib(panel)
    near = capacity is not None and capacity <= _FAR * max(point.value for point in drawn)
    texts = []
    for title in panel.titles:
        found = [(entry.batch_size, value) for entry in panel.of(title) if (value := fullest(entry)) is not None]
        if found:
            (small, low), (large, high) = min(found), max(found)
            grows = f" to {formatted(high, digits=3)} GiB at {large}" if large > small else ""
            texts.append(f"{title} {formatted(low, digits=3)} GiB at batch size {small}{grows}")
    summary = f"Peak of the fullest GPU: {', '.join(texts)}"
    if capacity is not None:
        summary += f"; capacity {formatted(capacity)} GiB per GPU{'' if near else ', far above this chart'}"
    layers = axes.limit(capacity, f"{formatted(capacity)} GiB per GPU") if capacity is not None and near else []
    source = next(source for entry in panel.completed for found, source in [_memory_of(entry.result)] if found)
    axis = f"memory in use by {source} (GiB)"
    yield Chart(
        id="memory",
        title="Memory by batch size",
        summary=f"{summary}.",
        spec=curves_of(panel, drawn, figures, title=axis, log=False, more=layers),
        headers=["strategy", "batch size", *(f"{name} (GiB)" for name in figures), "capacity per GPU (GiB)", "outcome"],
        rows=[
            [*row_of(entry, [*(figure(entry) for figure in figures.values()), capacity]), entry.result.outcome]
            for entry in panel.entries
        ],
    )


def _memory_of(result: CaseResult) -> tuple[Sequence[float], str]:
    """Return the peak memory of each device and launch, and its source: NVML, or torch where NVML has no figure."""
    if found := COLUMNS["nvml_used_max_bytes"].devices(result):
        return found, "NVML"
    sizes = [memory.peak_reserved_bytes for launch in result.launches for memory in launch.memory]
    return [size for size in sizes if size is not None], "torch"


def _capacity_gib(panel: Panel) -> float | None:
    """Return what a case may use of each GPU: its cap, else all of it; None if it is not known or the GPUs differ."""
    case = panel.entries[0].result.case
    if case.gpu_memory_bytes is not None:
        return case.gpu_memory_bytes / GIB
    sizes = {gpu.memory_bytes for gpu in panel.report.environment.gpus}
    size = sizes.pop() if len(sizes) == 1 and case.device == "cuda" else None
    return None if size is None else size / GIB


def accuracy(panel: Panel) -> Iterator[Chart | str]:
    """Yield the chart of a panel's accuracy with its 95 % confidence interval, or the reason why there is none."""
    title = "Accuracy by batch size"
    checks = [check for entry in panel.completed if (check := entry.result.accuracy_check) is not None]
    metric = next((check.metric for check in checks if check.metric in {"acc", "acc_norm"}), "acc_norm")
    rows, before = (
        [row for entry in entries if (row := _accuracy_row(entry, metric)) is not None]
        for entries in (panel.completed, panel.before)
    )
    if not rows:
        yield f"{title}: nothing was scored."
        return
    summary = f"{metric} is {value_range([row['v'] for row in rows], '%')} of {max(row['i'] for row in rows):,} items"
    if panel.entries[0].result.case.load_format == "dummy":
        summary += " (random weights answer by chance)"
    if compared := [row for row in rows if "f" in row]:
        worst = max(compared, key=lambda row: row["f"])
        most = f"at most {plural(worst['f'], 'answer')} different from mp ({worst['s']} at batch size {worst['b']})"
        summary += f"; {most if worst['f'] else 'no answer differs from mp'}"
    cells = []
    for row in rows:
        differ = f"{row['f']:,}" if "f" in row else "-"
        interval = [formatted(row[name]) for name in ("v", "l", "h")]
        cells.append([row["s"], str(row["b"]), *interval, f"{row['i']:,}", differ])
    yield Chart(
        id="accuracy",
        title=title,
        summary=f"{summary}.",
        spec=_accuracy_spec(panel, rows, before, metric),
        headers=["strategy", "batch size", f"{metric} (%)", "95 % CI from (%)", "to (%)", "items", "differ from mp"],
        rows=cells,
    )


def _accuracy_row(entry: Entry, metric: str) -> Spec | None:
    answers = measured(entry.result)
    if answers is None:
        return None
    value, items = value_of(answers, metric), answers.items
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


def _accuracy_spec(panel: Panel, rows: list[Spec], before: list[Spec], metric: str) -> Spec:
    # Each batch size has one place, in which the strategies stand side by side.
    domain = {"domain": [one for one in panel.titles if panel.of(one)]}
    shared = {"color": axes.curves(panel), "xOffset": {"field": "s", "type": "nominal", "scale": domain}}
    sizes = sorted({entry.batch_size for entry in (*panel.completed, *panel.failed, *panel.before)})
    x = {
        "field": "b",
        "type": "ordinal",
        "title": axes.BATCH_SIZE,
        "scale": {"domain": sizes, "paddingInner": 0.3, "paddingOuter": 0.2},
        "axis": {"labelAngle": 0, "format": ",d", "labelOverlap": "greedy"},
    }
    low, high = ({"field": name, "type": "quantitative"} for name in ("l", "h"))
    titles = {"v": f"{metric} (%)", "l": "95 % CI from (%)", "h": "to (%)", "i": "items"}
    tooltip = axes.tooltip({**titles, "f": "answers that differ from mp"})
    marks: list[Spec] = [
        {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": {**shared, "y": low, "y2": {"field": "h"}}},
        {"mark": {"type": "point"}, "encoding": {**shared, "shape": shared["color"], "tooltip": tooltip}},
    ]
    # The reference accuracy, where it comes from outside the run.
    ids = {entry.result.id for entry in panel.entries}
    checks = [one for entry in panel.completed if (one := entry.result.accuracy_check) is not None]
    outside = [one for one in checks if one.metric == metric and one.source not in ids]
    published = [one.baseline for one in outside if one.baseline is not None]
    layers = axes.limit(100 * published[0], f"{formatted(100 * published[0])} % expected") if published else []
    layers += axes.with_baseline(marks, before)
    if any(row.get("f") for row in rows):
        number = {"field": "f", "type": "quantitative", "format": ",d"}
        bold = {"type": "text", "style": "note", "dy": -9, "fontWeight": "bold"}
        above = {**shared, "y": high, "text": number}
        layers.append({"transform": [{"filter": "datum.f > 0"}], "mark": bold, "encoding": above})
    y = axes.levels([row["v"] for row in (*rows, *before)], f"{metric}, 95 % confidence interval (%)", log=False)
    return axes.layered([*layers, *axes.failures(panel)], rows, x=x, y=y)
