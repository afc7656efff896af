"""CSV and Markdown: one line per case, then one per case of the baseline alone that has a verdict.

CSV has every figure in the units of the report. The Markdown table is to paste into an issue or a page.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

from pytest_llmgpu.render import summary
from pytest_llmgpu.render.exports.tools import describe
from pytest_llmgpu.render.table import COLUMNS, MARKDOWN, TABLES, Column, own_columns
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.metrics import JUDGED, METRICS, spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import one_line
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.store.store import hardware

_CASE = (
    *("strategy", "batch_size", "model", "load_format", "dtype"),
    *("device", "devices", "dataset", "limit", "execution"),
)
_FIGURES = [spec.exported.column for spec in METRICS if spec.exported]
_FIGURES += [name for name in (*TABLES["work"], *TABLES["tokens"]) if name != "speedup"]

CSV_COLUMNS = tuple(
    dict.fromkeys(
        [
            *("id", "nodeid", *_CASE, "outcome", "failure", "launches", "disturbed", "inference_s"),
            *("inference_s_low", "inference_s_high", *_FIGURES, *(f"verdict_{name}" for name in JUDGED), "reasons"),
            *("created", "commit", "machine", "gpu", "gpu_memory_bytes"),
        ]
    )
)
"""The header of the CSV table; its columns are read by name, in the order of the metrics."""

_MESSAGE = 120  # most characters of a failure's message in Markdown; its numbers come first

_MARKDOWN = {character: f"&#{ord(character)};" for character in "\\`*[]<&|~$#"}
"""Characters with a meaning in Markdown or HTML, as character references, which are never structure."""

_FORMULA = ("=", "+", "-", "@")  # first characters of a formula in a spreadsheet


def markdown(text: str) -> str:
    """Return text for a paragraph or a table cell in GitHub's Markdown, without markup, links and mentions."""
    escaped = "".join(_MARKDOWN.get(letter, letter) for letter in one_line(text))
    escaped = re.sub(r"(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9])", "&#95;", escaped)  # within a word it is no markup
    escaped = re.sub(r"://|(?<=www)\.", lambda found: f"&#{ord(found[0][0])};{found[0][1:]}", escaped)
    # GitHub searches the rendered page for mentions; a comment separates the sign from the name.
    return escaped.replace("@", "@<!-- -->")


def code(text: str) -> str:
    """Return text as code for a paragraph or a table cell in GitHub's Markdown."""
    return f"<code>{markdown(text)}</code>"


def spreadsheet(text: str) -> str:
    """Return text that a spreadsheet does not evaluate as a formula."""
    line = one_line(text)
    return f"'{line}" if line.startswith(_FORMULA) else line


def render_csv(report: Report) -> str:
    """Return the report as CSV."""
    rows, own = summary.by_id(report.verdicts), own_columns(report.cases)
    text = io.StringIO()
    verdicts = (f"verdict_{row.metric}" for others in rows.values() for row in others)
    writer = csv.DictWriter(text, dict.fromkeys([*CSV_COLUMNS, *own, *verdicts]), restval="", lineterminator="\n")
    writer.writeheader()
    session = {
        "created": report.created,
        "commit": spreadsheet(report.commit.sha or ""),
        "machine": spreadsheet(hardware(report)),
        "gpu": spreadsheet(", ".join(dict.fromkeys(gpu.name for gpu in report.environment.gpus))),
    }
    for result in report.cases:
        fields: dict[str, object] = {name: getattr(result.case, name) for name in _CASE}
        fields |= {
            "id": result.id,
            "nodeid": result.nodeid or "",
            "outcome": result.outcome,
            "failure": result.failure.message if result.failure is not None else "",
            "launches": len(result.launches),
            "disturbed": disturbances.of_case(result) or "",
            "gpu_memory_bytes": result.case.gpu_memory_bytes,  # the cap; empty without one
        }
        line = {name: spreadsheet(value) if isinstance(value, str) else value for name, value in fields.items()}
        line |= {name: COLUMNS[name].value(result) for name in _FIGURES}
        line |= {name: column.value(result) for name, column in own.items()}
        if (time := spec_of("time").of(result)) is not None:
            line |= {"inference_s_low": time.low, "inference_s_high": time.high}
        writer.writerow({**session, **line, **_verdicts(rows.pop(result.id, ()))})
    for name, others in rows.items():
        nodeid = spreadsheet(others[0].nodeid or "")
        writer.writerow({**session, "id": spreadsheet(name), "nodeid": nodeid, **_verdicts(others)})
    return text.getvalue().rstrip("\n")


def _verdicts(rows: Sequence[Row]) -> dict[str, object]:
    verdicts: dict[str, object] = {f"verdict_{row.metric}": row.verdict for row in rows}
    reasons = " / ".join(f"{row.metric}: {row.reason}" for row in rows if not row.unchanged)
    return {**verdicts, "reasons": spreadsheet(reasons)}


def render_markdown(report: Report) -> str:
    """Return the report as a table of Markdown."""
    return "\n".join([*markdown_header(report), *markdown_lines(report)])


def markdown_header(report: Report) -> tuple[str, str]:
    """Return the first two lines of the table."""
    titles = [markdown(MARKDOWN.get(name) or name.replace("_", " ")) for name in _shown(report)]
    first = markdown_line(["case", "measured", "outcome", *titles, "verdict"])
    return first, f"|---|---|---|{'---:|' * len(titles)}---|"


def markdown_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the cases in the order of the report, then those of other ids with verdicts."""
    rows, columns = summary.by_id(report.verdicts), _shown(report)
    for result in report.cases:
        values = [(column, column.value(result)) for column in columns.values()]
        cells = ["" if value is None else markdown(column.written(value)) for column, value in values]
        outcome = summary.outcome(result)
        if result.failure is not None:
            outcome += f": {one_line(result.failure.message, _MESSAGE)}"
        first = [code(result.id), markdown(describe(result.case)), markdown(outcome)]
        yield markdown_line([*first, *cells, _worst(rows.pop(result.id, ()))])
    for name, others in rows.items():
        yield markdown_line([code(name), *[""] * (2 + len(columns)), _worst(others)])


def markdown_line(cells: Sequence[str]) -> str:
    """Return a line of the table; its cells must be escaped."""
    return f"| {' | '.join(cells)} |"


def _shown(report: Report) -> dict[str, Column]:
    """Return the columns of the Markdown table that have a figure."""
    columns = {name: COLUMNS[name] for name in MARKDOWN} | own_columns(report.cases)
    return {name: one for name, one in columns.items() if any(one.value(result) is not None for result in report.cases)}


def _worst(rows: Sequence[Row]) -> str:
    """Return the worst verdict with all metrics that have it."""
    if not rows:
        return ""
    worst = summary.verdict(rows[0])
    return f"{worst}: {', '.join(row.metric.replace('_', ' ') for row in rows if summary.verdict(row) == worst)}"
