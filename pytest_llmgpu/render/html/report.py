"""The page of a report: one HTML file that needs no network, for example as a CI artifact."""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.gate import headline, judge
from pytest_llmgpu.gate.policy import Policy, policy_of
from pytest_llmgpu.render import charts, summary
from pytest_llmgpu.render.charts import timelines
from pytest_llmgpu.render.html.assets import MISSING, asset, config_and_style, content_security_policy, templates, vega
from pytest_llmgpu.render.table import blocks, captions, entries, figure_tables, limits, make_time_table, with_reference
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report, command
from pytest_llmgpu.report.text import gib, listed, plural
from pytest_llmgpu.report.verdicts import Row, Verdicts, worst_first
from pytest_llmgpu.store import store


def check(path: Path) -> None:
    """Raise ValueError before a run of hours if its page cannot be made or written; leave no file behind."""
    for library in ("jinja2", "vl_convert"):
        if importlib.util.find_spec(library) is None:
            raise ValueError(MISSING)
    file.check_writable(path, "page", (".html", ".htm"))


def write(page: str, path: Path) -> None:
    """Write a page and create its folders; ValueError has the path and the reason if it cannot be written."""
    file.save(path, page.encode("utf-8", "backslashreplace"), "page")


def render(
    report: Report,
    baseline: Report | None = None,
    *,
    name: str = "",
    verdicts: Verdicts | None = None,
    policy: Policy | None = None,
) -> str:
    """Return the page of a report with its verdicts, or new ones against the baseline by the policy.

    ValueError if a library of the page is not installed.
    """
    verdicts = verdicts or report.verdicts
    if verdicts is None and baseline is not None:
        today = datetime.datetime.now(datetime.timezone.utc).date()
        verdicts = judge.judge(baseline, report, policy or Policy(), today=today)
    library, script, theme = vega(), asset("page.js"), asset("theme.js")
    config, colored = config_and_style()
    style = asset("page.css") + colored
    conclusion = summary.conclude(report, verdicts, policy or policy_of(verdicts))
    tables = list(_tables(report))
    times = {cell.id: cell.time for one in tables for _, row in one["table"].rows for cell in row}
    of_cases = []
    for result in report.cases:
        if found := list(timelines.charts(result, report.environment)):
            title = f"{result.id}: {times[result.id] or result.outcome.replace('_', ' ')}"
            of_cases.append((result.id, title, _json(found)))
    # The strategy, model and batch size by which each case is filtered, by its id.
    titled = [(result, result.case.strategy) for result in (() if baseline is None else baseline.cases)]
    titled += [(one.result, one.title) for block in blocks(report.cases) for one in entries(block)]
    keys = {
        result.id: {"strategy": title, "model": result.case.model, "batch": str(result.case.batch_size)}
        for result, title in titled
    }
    filters = []
    for field, label in {"strategy": "Strategy", "model": "Model", "batch": "Batch size"}.items():
        values = list(dict.fromkeys(key[field] for key in keys.values()))
        if len(values) > 1:
            filters.append((field, label, sorted(values, key=int) if field == "batch" else values))
    drawn, omitted = charts.of_report(report)
    page = templates().get_template("page.html")
    return page.render(
        policy_header=content_security_policy([library, script, theme], [style]),
        library=library,
        script=script,
        theme=theme,
        style=style,
        name=name or "pytest-llmgpu",
        title=_title(report, verdicts),
        next=headline.next_steps(verdicts, policy or policy_of(verdicts)) if verdicts is not None else "",
        report=report,
        conclusion=conclusion,
        logs={result.id: log for result in report.cases if result.failure and (log := result.failure.log_tail)},
        tables=tables,
        charts=[(chart, _json(chart.spec)) for chart in drawn],
        omitted=omitted,
        cases=of_cases,
        verdicts=verdicts,
        verdict=summary.verdict,
        mark=summary.mark,
        **({"compared": [], "parts": [], "reasons": []} if verdicts is None else _rows(verdicts, report, baseline)),
        counts=summary.counts,
        keys=keys,
        filters=filters,
        machine=machine(report),
        libraries={name: version for name, version in report.environment.versions.items() if version},
        licenses=asset("licenses.txt"),
        data=_json({"config": config}),
    )


def _title(report: Report, verdicts: Verdicts | None) -> str:
    """Return the models, the machine and the commits that were compared."""
    models = listed(dict.fromkeys(result.case.model for result in report.cases), 2)
    base = None if verdicts is None or verdicts.baseline is None else verdicts.baseline.commit
    commits = [sha[:8] for sha in (base, report.commit.sha) if sha]
    return ", ".join(filter(None, (models, store.hardware(report), " \N{RIGHTWARDS ARROW} ".join(commits))))


def _rows(verdicts: Verdicts, report: Report, baseline: Report | None) -> dict[str, Any]:
    """Return the regressed rows and one of each case, the rows that are not OK and those that are, and the reasons."""
    parts: dict[str, list[tuple[Row, summary.Figures]]] = {"Changed, undecided or missing": [], "Unchanged": []}
    for row in worst_first(verdicts.rows):
        parts["Unchanged" if row.unchanged else "Changed, undecided or missing"].append((row, summary.figures(row)))
    reasons = summary.by_reason(row for row in verdicts.rows if not row.unchanged)
    compared = summary.was_and_now(verdicts, report, baseline)
    return {"compared": compared, "parts": [part for part in parts.items() if part[1]], "reasons": reasons}


def _tables(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the table of each block of cases, with its caption, the comparison with mp and the largest batch sizes."""
    found = blocks(report.cases)
    for (caption, _), cases in zip(captions(found, report), found, strict=True):
        yield {
            "caption": caption,
            "model": cases[0].case.model,
            "table": make_time_table(cases),
            "works": list(figure_tables(cases).values()),
            "notes": [*with_reference(cases, verbose=True), *limits(cases, report)],
        }


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script element, whatever its strings are."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def machine(report: Report) -> dict[str, str]:
    """Return the time, the commit, the command and the machine of the measurement."""
    environment, commit = report.environment, report.commit
    gpus = []
    for gpu in environment.gpus:
        size = gib(gpu.memory_bytes, 0) if gpu.memory_bytes else ""
        link = f"PCIe {gpu.pcie_gen}.0 x{gpu.pcie_width}" if gpu.pcie_gen and gpu.pcie_width else ""
        power = f"{gpu.power_limit_w:g} W" if gpu.power_limit_w else ""
        gpus.append(", ".join(filter(None, (gpu.name, size, link, power))))
    links = dict.fromkeys(link for row in environment.topology or [] for link in row if link != "X")
    branch = f"({commit.branch})" if commit.branch else None
    source = [commit.sha, branch, "with uncommitted changes" if commit.dirty else None]
    found = {
        "Measured": report.created,
        "Resumed": ", ".join(f"{one.created}, with {plural(one.kept, 'case')}" for one in report.resumed),
        "Commit": " ".join(part for part in source if part),
        "Command": command(report),
        "Nodes": str(len(environment.nodes) or ""),
        "GPUs": f"{len(environment.gpus)} x {'; '.join(dict.fromkeys(gpus))}" if gpus else "none",
        "Links": ", ".join(links),
        "CPU": f"{environment.cpu or 'unknown'}, {environment.cores or 'unknown number of'} cores",
        "Platform": environment.platform,
        "Python": environment.python,
        "Driver": environment.driver or "",
        "CUDA": environment.cuda or "",
        "NCCL": environment.nccl or "",
        **environment.variables,
    }
    return {name: value for name, value in found.items() if value}
