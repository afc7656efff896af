"""The report as text for the terminal: headline, live line, tables of each block of cases, findings."""

from __future__ import annotations

import itertools
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from tabulate import tabulate

from pytest_llmgpu.analysis.capacity import split
from pytest_llmgpu.analysis.reference import by_series
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.render import table as figures
from pytest_llmgpu.render.summary import Problem, cases_in_words, finding_problems
from pytest_llmgpu.render.table import Entry, Place
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.report import Environment, Report
from pytest_llmgpu.report.result import CaseResult, CollectiveKind, Path
from pytest_llmgpu.report.text import listed, plural, printable, printable_lines

WIDTH = 100
"""The largest width of a table or message, in columns of the terminal; three strategies fit."""

Painter = Callable[[str, str], str]
"""A function of a text and the number of an ANSI style that returns the styled text."""

_ANSI = re.compile(r"\x1b\[\d+m")

_RED, _GREEN, _YELLOW, _BOLD = "31", "32", "33", "1"
_MARKS = {"best": "*", "wrong": "x", "disturbed": "?", "graphs": "g:", "oom": "OOM:", "skipped": "-:"}
"""The marks of the legend. A case that failed needs none: its cell has the outcome."""

_COLOURS = {"best": _GREEN, "wrong": _RED, "oom": _YELLOW, "skipped": _YELLOW, "failed": _RED}

_SEVERAL = ("nvlink_tx_bytes_per_s", "sent_bytes")  # columns of devices that are shown only if a case ran on several

_Columns = Mapping[str, tuple[str, Sequence[str]]]
"""Name of a figure, by which its column is dropped if the table is too wide, to the title and the cell of each case."""


def summary_table(cases: Sequence[CaseResult], paint: Painter, most: int | None = None) -> tuple[str, int]:
    """Return the table with one row per case, or of more than `most` the fastest of each series; and its rows."""
    table = figures.make_time_table(cases)
    cells = {cell.id: cell for _, row in table.rows for cell in row}
    shown = figures.entries(cases)
    if most is not None and len(shown) > most:
        fastest = {
            id(max(found, key=lambda result: (not result.has_wrong_answers, result.sequences_per_s or 0.0)))
            for found in by_series(entry.result for entry in shown)
        }
        shown = [entry for entry in shown if id(entry.result) in fastest][:most]
    times = []
    for cell in (cells[entry.result.id] for entry in shown):
        is_marked = cell.kind == "wrong" or (cell.kind == "best" and not cell.rate)
        sign = f"{_MARKS[cell.kind]} " if is_marked else ""
        text = cell.word or f"{sign}{'? ' * cell.disturbed}{'g ' * cell.graphs}{cell.time}"
        colour = _COLOURS.get(cell.kind, _YELLOW if cell.disturbed else "")
        times.append(paint(text, colour) if colour else text)
    second = [cells[entry.result.id].second for entry in shown]
    columns: dict[str, tuple[str, Sequence[str]]] = {"time": (table.time_title, times)}
    generates, on_gpu = cases[0].case.generates, cases[0].case.device == "cuda"
    # What the tokens have as well, and on a CPU the figure that judges.
    left_out = {"sequences_per_s"} if generates else {"token_p95_s"}
    left_out |= {"flops_per_sequence"} if on_gpu else set()
    for column in figures.columns_of("summary", cases):
        name, values = column.name, [column.value(entry.result) for entry in shown]
        if name == ("token_p95_s" if generates else "speedup") and any(second):
            columns["second"] = (table.metric, second)
        less_exact = name == "utilization_pct" and "device_busy" in columns
        # A figure of the user's own can be 0.
        if name in left_out or less_exact or (name in figures.COLUMNS and not any(values)):
            continue
        texts = figures.written(values, column.unit)
        if name == "new_tokens_per_s":
            marks = ["* " if cells[one.result.id].kind == "best" else "" for one in shown]
            texts = [f"{mark}{text}" for mark, text in zip(marks, texts, strict=True)]
        columns[name] = (column.title, texts)
    text, *_ = _fitted("summary", [entry[:2] for entry in shown], columns)
    notes = [f"{_MARKS[kind]} {meaning}" for kind, (_, meaning) in table.legend.items() if kind in _MARKS]
    notes += ["#2: measured again, by another test or strategy"] * any("#" in one.row for one in shown)
    legend = textwrap.wrap("   ".join(notes), WIDTH)
    return "\n".join([table.title.removesuffix(f" / {table.metric}"), text, *legend]), len(shown)


def work_table(cases: Sequence[CaseResult]) -> str:
    """Return the tables of work, energy, latencies and tokens; empty if none of it was measured."""
    found = []
    for place, table in figures.figure_tables(cases).items():
        cells = zip(*(texts for _, _, texts in table.rows), strict=True)
        columns = {one.name: (one.title, texts) for one, texts in zip(table.columns, cells, strict=True)}
        found.append("\n".join([table.title, *_fitted(place, [row[:2] for row in table.rows], columns)]))
    return "\n\n".join(found)


def device_tables(cases: Sequence[CaseResult], environment: Environment) -> str:
    """Return the communication, path and memory of the completed cases, or the reason why there are no tables."""
    order = [entry for entry in figures.entries(cases) if entry.result.outcome == "completed"]
    if not order:
        return ""
    titles = dict.fromkeys(entry.title for entry in order)
    by_title = {title: [entry.result for entry in order if entry.title == title] for title in titles}
    if cases[0].case.device == "cpu":
        return "\n".join(_collectives(by_title))
    reasons: dict[str, list[str]] = {}
    communication = _device_table("communication", order, reasons, environment)
    sent = "\n".join(filter(None, [communication, *_collectives(by_title), *_paths(by_title)]))
    memory = _device_table("memory", order, reasons, environment)
    lines = [line for why, names in reasons.items() for line in textwrap.wrap(f"No {', '.join(names)}: {why}.", WIDTH)]
    return "\n\n".join(filter(None, [sent, memory, "\n".join(lines)]))


def painter(color: bool) -> Painter:
    """Return a function that styles text; without colour it returns the text unchanged."""
    return lambda text, style: f"\x1b[{style}m{text}\x1b[0m" if color and text else text


def filled(text: str, indent: str = "  ", used: int = 0) -> str:
    """Return text in lines of the largest width, after `used` columns; a command in backticks stays whole."""
    whole = re.sub("`[^`]+`", lambda found: found[0].replace(" ", "\0"), text)
    wrapper = textwrap.TextWrapper(WIDTH, " " * used, indent, break_on_hyphens=False, break_long_words=False)
    return wrapper.fill(whole).replace("\0", " ")[used:]


def _device_table(place: Place, order: Sequence[Entry], reasons: dict[str, list[str]], environment: Environment) -> str:
    """Return a table of the columns that have values, and add the others to `reasons`: reason -> names of columns."""
    results = [entry.result for entry in order]
    several = any(result.case.devices > 1 for result in results)
    shown: dict[str, tuple[str, Sequence[str]]] = {}
    with_largest = False
    for name in figures.TABLES[place]:
        column = figures.COLUMNS[name]
        values = [[value / column.unit for value in column.devices(result)] for result in results]
        if name in _SEVERAL and not several:
            continue
        if any(values):
            means = [statistics.fmean(each) if each else None for each in values]
            places = figures.digits(min((mean for mean in means if mean), default=1.0))
            texts = []
            for mean, each in zip(means, values, strict=True):
                largest = f" ({max(each):.{places}f})" if len(each) > 1 else ""
                texts.append("" if mean is None else f"{mean:.{places}f}{largest}")
            shown[name] = (column.title, texts)
            with_largest = with_largest or any(len(each) > 1 for each in values)
        elif name != "workspace_bytes":  # most strategies have no workspace
            why = _missing(results, name, environment, sampled=place == "communication")
            reasons.setdefault(why, []).append(column.title.partition("\n")[0])
    heading = f"{place.capitalize()} per GPU{': mean over the GPUs (largest)' if with_largest else ''}"
    return "\n".join([heading, *_fitted(place, [entry[:2] for entry in order], shown)]) if shown else ""


def _missing(results: Sequence[CaseResult], name: str, environment: Environment, *, sampled: bool) -> str:
    """Return the reason why no case has a value of a column, from the `why` of the reports, the most specific one."""
    key = "traffic" if name == "sent_bytes" else name
    found = [result.why.get(key) for result in results]
    launches = [launch for result in results for launch in result.launches]
    profiles = [launch.profile for launch in launches if launch.profile is not None]
    for launch in launches:
        maps = [launch.why, *(memory.why for memory in launch.memory)]
        found += [part for memory in launch.memory if isinstance(part := split(memory).get(key), str)]
        if launch.profile is not None:
            maps += [launch.profile.why, *(device.why for device in launch.profile.devices)]
        found += [why.get(key) or why.get("profile") for why in maps]
    found.append(environment.why.get("nvml"))
    found += [profile.why.get("samples") for profile in profiles if sampled]
    return next(filter(None, found), "no sample was taken").rstrip(".")


def _collectives(by_title: Mapping[str, Sequence[CaseResult]]) -> Iterator[str]:
    """Yield per strategy how often its ranks communicate and how many bytes they send, by kind of collective."""
    for (title, results), of_step in itertools.product(by_title.items(), (False, True)):
        found = [_calls_and_bytes(result, of_step=of_step) for result in results]
        whole, share = ("decode step", "token") if of_step else ("batch", "sequence")
        parts = []
        for kind in dict.fromkeys(kind for of_case in found for kind in of_case):
            calls, sizes = zip(*(of_case[kind] for of_case in found if kind in of_case), strict=True)
            megabytes = _range(size / 1e6 for size in sizes)
            parts.append(f"{_range(calls)} {kind} per {whole} ({megabytes} MB/{share})")
        if parts:
            ranks = [result.traffic.ranks for result in results if result.traffic is not None]
            equal = all(rank == of_case[0] for of_case in ranks for rank in of_case)
            several = any(len(of_case) > 1 for of_case in ranks)
            sender = "each rank" if several and equal else "mean over the ranks" if several else "one process"
            yield filled(f"{title}, {sender}: {', '.join(parts)}")


def _calls_and_bytes(result: CaseResult, *, of_step: bool) -> dict[CollectiveKind, tuple[float, float]]:
    """Return per kind the calls per batch and the wire bytes per sequence: both are means over the ranks.

    Of a step: calls per decode step of the largest batch and bytes per token; none for a case that scores.
    """
    sequences = result.launches[-1].batches.sequences if result.launches else []
    if result.traffic is None or not sum(sequences):
        return {}
    ranks, batches, rows = result.traffic.ranks, len(sequences), sum(sequences)
    if of_step:
        ranks, batches, rows = result.traffic.step or [], 1, max(sequences)
    sums: dict[CollectiveKind, tuple[float, float]] = {}
    for one in itertools.chain.from_iterable(ranks):
        calls, size = sums.get(one.collective, (0.0, 0.0))
        calls += one.calls / batches / len(ranks)
        sums[one.collective] = (calls, size + one.wire_bytes / rows / len(ranks))
    return sums


def _paths(by_title: Mapping[str, Sequence[CaseResult]]) -> Iterator[str]:
    """Yield which links carried the traffic of each strategy: one line per link, about the case with the largest error.

    A text that is also a finding of its case is left out.
    """
    for title, results in by_title.items():
        links: dict[str | None, list[tuple[float, CaseResult, Path]]] = {}
        for result in results:
            path = result.traffic.path if result.traffic is not None else None
            if path is not None and path.expected_bytes and path.text not in (one.text for one in result.findings):
                counted = path.pcie_bytes if path.link in ("pcie", "host") else path.nvlink_bytes
                error = abs((counted or 0.0) / path.expected_bytes - 1)
                links.setdefault(path.link, []).append((error, result, path))
        for found in links.values():
            _, result, path = max(found, key=lambda one: one[0])
            where = f"at batch size {result.case.batch_size}"
            yield filled(f"{title} {f'(largest error {where})' if len(found) > 1 else where}: {path.text}")


def _range(values: Iterable[float]) -> str:
    """Return `least to most` with about three digits, or a single value if all are equal."""
    ends = sorted(set(values))
    shown = [f"{value:,.{0 if value.is_integer() else figures.digits(value)}f}" for value in (ends[0], ends[-1])]
    return " to ".join(dict.fromkeys(shown))


def _fitted(table: Place, places: Sequence[tuple[str, str]], columns: _Columns) -> list[str]:
    """Return the table of places and of the columns that fit the width, and a line with the names of the others."""
    firsts = [("" if n and places[n - 1][0] == name else name, size) for n, (name, size) in enumerate(places)]
    shown, dropped = dict(columns), list[str]()
    candidates = [name for name in reversed(figures.TABLES[table]) if name in columns and name in figures.DROPPABLE]
    while True:
        headers = ["strategy", "batch\nsize", *(title for title, _ in shown.values())]
        body = [[*first, *(texts[n] for _, texts in shown.values())] for n, first in enumerate(firsts)]
        align = ["left"] + ["right"] * (len(headers) - 1)
        text = tabulate(body, headers=headers, colalign=align, disable_numparse=True)
        if max(map(len, _ANSI.sub("", text).splitlines())) <= WIDTH or not candidates:
            break
        title, _ = shown.pop(candidates.pop(0))
        dropped.append(title.replace("\n", " "))
    note = f"Columns dropped to fit the width (the report has them): {', '.join(dropped)}."
    return [text, note] if dropped else [text]


_STYLES = {"failure": _RED, "warning": _YELLOW, "info": _BOLD}

_MOST_ROWS = 30  # largest number of rows of the short tables
_MOST_LINES = 3  # largest number of comparisons and of findings in the short text, and of texts of a finding
_MOST_IDS = 8  # largest number of further cases of a finding in the short text


def headline(machine: Machine, cases: Sequence[Case], batch_sizes: Iterable[int]) -> str:
    """Return one line with the machine and the selected cases; tests that choose their batch size give none."""
    parts = [machine.describe()]
    if cases:
        parts += dict.fromkeys(figures.model(case) for case in cases)
        parts.append(", ".join(dict.fromkeys(case.dtype for case in cases)))
        parts += dict.fromkeys(figures.dataset(case) for case in cases)
        workloads = dict.fromkeys("generate" if case.generates else "score" for case in cases)
        if [*workloads] != ["score"]:
            parts.append(("workload " if len(workloads) == 1 else "workloads ") + ", ".join(workloads))
        strategies = dict.fromkeys(case.strategy for case in cases)
        parts.append(("strategy " if len(strategies) == 1 else "strategies ") + ", ".join(strategies))
    if sizes := sorted(set(batch_sizes)):
        parts.append(("batch size " if len(sizes) == 1 else "batch sizes ") + ", ".join(map(str, sizes)))
    return f"llmgpu: {'; '.join(parts)}"


def progress(name: str, step: str, done: int, total: int, elapsed_s: float, *, batch_size: int) -> str:
    """Return the live line of a case: `mp-bs8  120/502 batches  1 234 seq/s  ETA 0:41`, or `mp-bs8  warm-up  0:12`."""
    shown_s, rate = elapsed_s, ""
    if done and elapsed_s > 0:
        shown_s = elapsed_s / done * (total - done)
        per_s = done * batch_size / elapsed_s
        rate = f"{per_s:,.{0 if per_s >= 10 else 2}f} seq/s  ETA ".replace(",", " ")  # noqa: PLR2004 - two digits at least
    minutes, seconds = divmod(round(max(0.0, shown_s)), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    return f"{name}  {f'{done}/{total} batches' if total else step}  {rate}{clock}"


_SAVE, _RESTORE, _CLEAR_TO_END = "\x1b7", "\x1b8", "\x1b[K"
_SMALLEST_WIDTH = 12
_LOG_S = 60.0


class LiveLine:
    """Draws on the terminal; if standard output is not one, it gets a line a minute."""

    def __init__(self, uncaptured: Callable[[], AbstractContextManager[None]], width: Callable[[], int]) -> None:
        """Prepare to draw within `uncaptured`, where standard output is the real one.

        There `width` returns the number of free columns in the line that pytest writes.
        """
        self._uncaptured = uncaptured
        self._width = width
        self._drawn = False
        self._due_s = time.monotonic() + _LOG_S

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Draw `text`, cut to the free width, in place of the text before it; a log gets it once a minute, or now."""
        with self._uncaptured():
            if not sys.stdout.isatty():
                if at_once or time.monotonic() >= self._due_s:
                    _write(f"\n{printable_lines(text)}\n")
                    self._due_s = time.monotonic() + _LOG_S
                return
            width = self._width() - 1
            if width >= _SMALLEST_WIDTH:
                _write((_RESTORE if self._drawn else _SAVE) + _CLEAR_TO_END + printable(text)[:width])
                self._drawn = True

    def clear(self) -> None:
        """Remove the line, and put the cursor where pytest left it."""
        if self._drawn:
            with self._uncaptured():
                _write(_RESTORE + _CLEAR_TO_END)
        self._drawn = False


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def tables(report: Report, color: bool = False, *, verbose: bool = False) -> str:
    """Return the report as tables: blocks of cases, differences from mp, then findings, worst first.

    There are about 40 lines; with `verbose` every case and finding, and the tables of work, communication and memory.
    """
    paint = painter(color)
    found = figures.blocks(report.cases)
    parts = [filled(cases_in_words(report, explained=True))] if found else []
    left, hidden = len(report.cases) if verbose else _MOST_ROWS, len(report.cases)
    for (caption, _), cases in zip(figures.captions(found, report), found, strict=True):
        if not left:
            break
        table, rows = summary_table(cases, paint, left)
        left, hidden = left - rows, hidden - rows
        lines = []
        for texts in (figures.with_reference(cases, verbose=verbose), figures.limits(cases, report)):
            notes = list(map(filled, texts))
            more = 0 if verbose else len(notes) - _MOST_LINES
            lines += notes if more <= 0 else [*notes[:_MOST_LINES], f"and {more} more (-v shows all)"]
        parts.append("\n".join([paint(caption, _BOLD), table, *lines]))
        if verbose:
            parts += [work_table(cases), device_tables(cases, report.environment)]
    if hidden:
        parts.append(f"{plural(hidden, 'case')} not shown: -v shows all, llmgpu export csv writes them.")
    problems = finding_problems(report.cases)
    shown = problems if verbose else problems[:_MOST_LINES]
    parts.append("\n".join(_finding(problem, paint, verbose=verbose) for problem in shown))
    if len(shown) < len(problems):
        labels = listed(dict.fromkeys(problem.label for problem in problems[len(shown) :]), _MOST_LINES)
        parts.append(f"and {plural(len(problems) - len(shown), 'more finding')}: {labels} (-v shows all)")
    parts.append("\n".join(resumptions(report)))
    return "\n\n".join(filter(None, parts))


def resumptions(report: Report) -> list[str]:
    """Return a line for each time that the session was resumed."""
    return [f"resumed {one.created} from {one.source}, with {plural(one.kept, 'case')}" for one in report.resumed]


def _finding(problem: Problem, paint: Painter, *, verbose: bool) -> str:
    """Return findings with the same next step: the text of the first case, or of the first three.

    The short text of an information is its first sentence, without a next step.
    """
    indent = " " * 9
    shown = problem.texts[: _MOST_LINES if verbose else 1]
    full = verbose or problem.severity != "info"
    lines = [f"{name}: {text if full else text.split('. ')[0].rstrip('.') + '.'}" for name, text in shown]
    if more := [name for name, _ in problem.texts[len(shown) :]]:
        lines.append(f"The same finding: {listed(more, len(more) if verbose else _MOST_IDS)}.")
    if full:
        lines.append(f"-> {problem.next_step}")
    text = f"\n{indent}".join(filled(line, indent, len(indent)) for line in lines)
    return paint(problem.severity.upper().ljust(9), _STYLES[problem.severity]) + text
