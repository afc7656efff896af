"""The page of a report: one HTML file that needs no network, for example as a CI artifact."""

from __future__ import annotations

import base64
import datetime
import hashlib
import importlib.util
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.policy_file import policy_of
from pytest_llmgpu.render import charts, grouping
from pytest_llmgpu.render.charts import timelines
from pytest_llmgpu.render.charts.chart import Chart
from pytest_llmgpu.render.html import colors, facts
from pytest_llmgpu.render.html.templates import MISSING, asset, templates, vega
from pytest_llmgpu.render.html.verdict_groups import grouped
from pytest_llmgpu.render.summary import conclude, describe
from pytest_llmgpu.render.time_table import make_time_table
from pytest_llmgpu.render.work_table import make_work_table
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Verdicts

_LIBRARIES = ("jinja2", "vl_convert")
_OPEN_PROBLEMS = 3  # the other problems are in a closed element


def check(path: Path) -> None:
    """Check before a run of hours that its page can be made and written; leave no file behind.

    Raises:
        ValueError: the name, a library or the folder does not permit it; one line with the path and the reason.
    """
    for library in _LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise ValueError(MISSING)
    file.check_writable(path, "page", (".html", ".htm"))


def write(page: str, path: Path) -> None:
    """Write a page and create its folders.

    Raises:
        ValueError: the page cannot be written; one line with the path and the reason.
    """
    file.save(path, page.encode("utf-8", "backslashreplace"), "page")


def render(
    report: Report,
    baseline: Report | None = None,
    *,
    name: str = "",
    verdicts: Verdicts | None = None,
    policy: Policy | None = None,
) -> str:
    """Return the page.

    Args:
        report: the report to show.
        baseline: the report that it is compared with; None if there is none.
        name: the name of the report, mostly its path.
        verdicts: the verdicts to show; None: those of the report, or new ones by `policy` if it has none.
        policy: the policy that decides which verdicts fail; None: the policy of the verdicts.

    Raises:
        ValueError: a library of the page is not installed; one line with the command that installs it.
    """
    verdicts = verdicts or report.verdicts
    if verdicts is None and baseline is not None:
        today = datetime.datetime.now(datetime.timezone.utc).date()
        verdicts = judge.judge(baseline, report, policy or Policy(), today=today)
    judged = msgspec.structs.replace(report, verdicts=verdicts)  # charts and tables show the same verdicts
    return _page(judged, baseline, policy or policy_of(verdicts), name)


def _page(report: Report, baseline: Report | None, policy: Policy, name: str) -> str:
    library = vega()
    drawn = charts.of_report(report)
    timelines = _timelines(report)
    tables = list(_tables(report))
    times = {cell.id: cell.time for one in tables for _, cells in one["table"].rows for cell in cells}
    config, colored = colors.config_and_style()
    style, script = asset("page.css") + colored, asset("page.js")
    specs = {chart.id: chart.spec for chart in drawn.charts}
    verdicts = report.verdicts
    conclusion = conclude(report, verdicts, policy)
    template = templates().get_template("page.html")
    return template.render(
        policy_header=_content_security_policy([library, script], [style]),
        library=library,
        script=script,
        style=style,
        name=name or "pytest-llmgpu",
        report=report,
        conclusion=conclusion,
        sentence=describe(conclusion),
        open_problems=_OPEN_PROBLEMS,
        logs={result.id: log for result in report.cases if result.failure and (log := result.failure.log_tail)},
        tables=tables,
        charts=drawn.charts,
        omitted=drawn.omitted,
        cases=[
            (result.id, f"{result.id}: {times[result.id] or result.outcome.replace('_', ' ')}")
            for result in report.cases
            if result.id in timelines
        ],
        verdicts=verdicts,
        parts=[] if verdicts is None else grouped(verdicts, policy),
        notes=[] if verdicts is None else verdicts.warnings,
        machine=facts.machine(report, baseline),
        libraries=facts.libraries(report, baseline),
        options=facts.options(report, baseline),
        command=[shlex.quote(word) for word in ("pytest", *report.argv)],
        data=_json({"config": config, "charts": specs, "cases": timelines}),
    )


def _tables(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the table of each block of cases, with its caption and the largest batch sizes."""
    found = grouping.blocks(report.cases)
    known = grouping.capacities(report)
    for caption, cases in zip(grouping.captions(found, report), found, strict=True):
        series = {result.case.series for result in cases}
        largest = [
            f"{one.strategy}: {one.text}"
            for one in known
            if one.series in series and (one.smallest_oom is not None or one.prediction is not None)
        ]
        yield {"caption": caption, "table": make_time_table(cases), "work": make_work_table(cases), "largest": largest}


def _timelines(report: Report) -> dict[str, list[Chart]]:
    """Return the timelines of each case that has samples."""
    drawn = {result.id: list(timelines.charts(result, report.environment)) for result in report.cases}
    return {name: found for name, found in drawn.items() if found}


def _json(value: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element, whatever its strings are."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _content_security_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return a policy that permits these scripts and styles only, and no request."""
    rules = {
        "default-src": ["'none'"],
        "script-src": [_hash(script) for script in scripts],
        "style-src": [_hash(style) for style in styles],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    return "; ".join(" ".join([name, *values]) for name, values in rules.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
