from __future__ import annotations

import importlib
import importlib.util
import re
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest
from support.export_reports import NASTY, TODAY, judged, nasty, two_strategies
from support.report_factory import known, make_accuracy, make_failed, make_finding, make_report, make_result
from support.repository import first_commit, git
from support.verdict_factory import make_row, make_verdicts

from pytest_llmgpu.gate.policy import Allowed, Policy
from pytest_llmgpu.render.exports import export, github
from pytest_llmgpu.render.exports.github import (
    ANNOTATIONS,
    COMMENT_BYTES,
    COMMENT_MARK,
    command_property,
    command_value,
    notices,
)
from pytest_llmgpu.render.exports.tables import code, markdown, markdown_header, spreadsheet
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.report import Commit, Report
from pytest_llmgpu.report.text import one_line
from pytest_llmgpu.report.verdicts import Baseline, Candidate


def _summary(report: Report) -> str:
    return export("github-summary", report)


def _annotations(report: Report) -> list[str]:
    return export("github-annotations", report).splitlines()


def _parsed(command: str) -> tuple[str, dict[str, str], str]:
    """Return the command, the properties and the message that GitHub reads from a line."""
    found = known(re.fullmatch(r"::(\w+) ([^:]*)::(.*)", command))
    pairs = [pair.partition("=") for pair in found[2].split(",")]
    return found[1], {name: unquote(value) for name, _, value in pairs}, unquote(found[3])


def test_annotations_are_limited_to_what_github_shows() -> None:
    """The worst are kept, and the last one has the number of the others."""
    rows = [make_row("UNDECIDED", id=f"mp-bs{n}", reason=f"Noise {'x' * n}.") for n in range(20)]
    worst = [make_row(id="tp-bs1"), make_row(id="tp-bs2", metric="outcome")]
    lines = _annotations(make_report(verdicts=make_verdicts(*rows, *worst)))
    assert [_parsed(line)[0] for line in lines] == ["error", "error", *["warning"] * (ANNOTATIONS - 2)]
    assert _parsed(lines[0])[1]["title"] == "pytest-llmgpu: REGRESSED: tp-bs2: as said"
    assert _parsed(lines[-1])[2].startswith("13 more are not shown")
    lines = _annotations(make_report(verdicts=make_verdicts(make_row("OK"), *rows[:ANNOTATIONS])))
    assert len(lines) == ANNOTATIONS
    assert "are not shown" not in lines[-1]


def test_an_annotation_stands_at_its_test() -> None:
    """The file is that of the node id, the line is 1 if the report has none, and line breaks are kept."""
    verdicts = make_verdicts(make_row(reason="+5 %.\nRun it again.", nodeid="a/test_b.py::test_c[x]"))
    (line,) = _annotations(make_report(verdicts=verdicts))
    assert _parsed(line) == (
        "error",
        {"file": "a/test_b.py", "line": "1", "title": "pytest-llmgpu: REGRESSED: mp-bs8 wall time: +5 %"},
        f"Run it again.\nNext: {spec_of('time').next_step}",
    )
    measured = make_result()
    measured.nodeid, measured.line = "a/test_b.py::test_c[x]", 42
    (line,) = _annotations(make_report([measured], verdicts=verdicts))
    assert _parsed(line)[1]["line"] == "42"


def test_one_cause_has_one_annotation() -> None:
    """It names the largest change, and every metric with its cases."""
    rows = [make_row(id=f"mp-bs{size}", base=1.0, head=1 + size / 100, ratio=1 + size / 100) for size in (8, 64)]
    rows += [make_row(metric="traffic", id=one.id) for one in rows]
    (line,) = _annotations(make_report(verdicts=make_verdicts(*rows)))
    _, properties, text = _parsed(line)
    assert properties["title"] == "pytest-llmgpu: REGRESSED: mp-bs64 wall time +64.0 % (1.64 s, was 1 s)"
    assert "time REGRESSED: mp-bs64, mp-bs8.\ntraffic REGRESSED: mp-bs8, mp-bs64." in text


def test_annotations_contain_no_command_of_a_user() -> None:
    """Each is one line whose properties and message decode to the given text."""
    for line in _annotations(nasty()):
        _, properties, message = _parsed(line)
        assert set(properties) == {"file", "line", "title"} or set(properties) == {"title"}
        assert message
        assert not set("\r\x1b\u202e") & set(line)
    assert any("::error::%0A" in _parsed(line)[2] for line in _annotations(nasty()))


def test_the_severity_follows_the_policy() -> None:
    """A row that fails is an error; a known, ungated or allowed one is a warning."""
    report = judged(two_strategies(), two_strategies(oom=()))
    assert notices(report)[0].level == "failure"
    known = Allowed(case="tp-bs64", metric="outcome", reason="bug 7", expires=TODAY)
    report = judged(two_strategies(), two_strategies(oom=()), Policy(allow=[known]))
    [known_one] = [one for one in notices(report) if one.title.startswith("REGRESSED: tp-bs64: ")]
    assert known_one.level == "warning"
    assert "Allowed: bug 7" in known_one.text
    strict = judged(two_strategies(), two_strategies(), Policy(strict=True))
    assert {notice.level for notice in notices(strict) if "UNDECIDED" in notice.title} == {"failure"}


def test_without_verdicts_findings_and_outcomes_are_notices() -> None:
    """A crash is an error, out of memory is information, and a finding replaces the outcome."""
    result = make_result(batch_size=2)
    result.findings = [make_finding(severity, code=severity) for severity in ("warning", "info", "failure")]
    crashed = make_failed("crashed", batch_size=4)
    found = notices(make_report([make_failed("oom", batch_size=8), result, crashed]))
    assert [(notice.level, notice.title) for notice in found] == [
        ("failure", "failure: mp-bs2"),
        ("failure", "crashed: mp-bs4"),
        ("warning", "warning: mp-bs2"),
        ("info", "oom: mp-bs8"),
    ]
    crashed.findings = [make_finding()]
    assert [notice.title for notice in notices(make_report([crashed]))] == ["slow: mp-bs4"]


def test_a_case_with_a_verdict_on_its_outcome_is_noticed_once() -> None:
    """The row replaces its findings and its outcome; a completed case keeps its findings."""
    head = two_strategies()
    head.cases[0].findings = [make_finding("warning")]
    for number, result in enumerate(head.cases[2:]):
        result.outcome = "crashed"
        result.findings = [make_finding()] * number
    titles = [notice.title for notice in notices(judged(head, two_strategies(oom=())))]
    assert sorted(title.partition(" ")[0] for title in titles) == [*["REGRESSED:"] * 2, "UNDECIDED:", "slow:"]


@pytest.mark.parametrize(
    ("report", "headline"),
    [
        (judged(two_strategies(), two_strategies(oom=())), r"❌ REGRESSED: tp-bs64: .*\(1 REGRESSED, "),
        (judged(two_strategies(), two_strategies()), r"⚠️ PASSED: 4 cases; .*\(3 UNDECIDED, .* OK"),
        (judged(two_strategies(), None), r"❌ NOTHING COMPARED: there is no baseline \(\d+ NEW"),
        (judged(two_strategies(), None, Policy(allow_no_baseline=True)), r"⚠️ PASSED: there is no baseline to compare"),
        (two_strategies(), r"nothing was compared \(3 completed, 1 oom\)"),
        (make_report([make_failed("crashed")]), r"❌ 1 to look at \(1 crashed\)"),
        (make_report(), r"nothing was compared$"),
    ],
)
def test_the_first_line_of_the_summary_has_the_result(report: Report, headline: str) -> None:
    """It is green only if gated rows were compared and decided."""
    first = _summary(report).splitlines()[0]
    assert re.match(rf"## LLM inference: {headline}", first), first


def test_the_summary_begins_with_the_worst() -> None:
    """Failed rows come first, then unclear ones, then the cases; the others are folded."""
    report = judged(two_strategies(sent=50e6), two_strategies(oom=()))
    verdicts = known(report.verdicts)
    verdicts.warnings.append("differs from the baseline: driver")
    page = _summary(report)
    parts = ("REGRESSED |", "| UNDECIDED |", "**Comparison**", markdown_header(report)[0], "| OK |")
    places = [page.index(text) for text in parts]
    assert places == sorted(places)
    assert page.count("<details>") == page.count("</details>") == 2
    words = Counter(row.verdict for row in verdicts.rows if row.compared)
    assert f"{words.total()} rows compared: {words['OK']} OK, " in page
    assert f"{words['REGRESSED']} REGRESSED" in page


def test_a_page_of_any_size_stays_below_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out if the whole page fits; the pages of four steps fit into the 1 MiB of GitHub."""
    assert 4 * github.LIMIT_BYTES <= 2**20
    report = judged(two_strategies(), two_strategies(oom=()))
    whole = len(_summary(report).encode())
    for limit in range(2500, whole + 2000, 97):
        monkeypatch.setattr(github, "LIMIT_BYTES", limit)
        page = _summary(report)
        assert len(page.encode()) <= limit
        if limit > whole + 1000:
            assert "left out" not in page


def test_tables_keep_their_columns_with_any_text() -> None:
    """A name with pipes and line breaks is one cell, without HTML."""
    for text in (export("markdown", nasty()), _summary(nasty())):
        widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
        assert widths
        assert widths <= {7, 9}
        assert not re.search(r"<(?!/?(?:code|br|details|summary)>|!-- -->)", text)
        assert not re.search(r"@\w|\bhttps?://|www\.|::error::%0A *$", text)


@pytest.mark.skipif(importlib.util.find_spec("markdown_it") is None, reason="renders Markdown by markdown-it-py")
def test_escaped_text_is_rendered_as_given() -> None:
    """It has no markup in a paragraph or in a table."""
    markdown_it = importlib.import_module("markdown_it")
    renderer = markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    table = f"| a | b |\n|---|---|\n| {code(NASTY)} | {markdown(NASTY)} |"
    page = renderer.render(table)
    cells = re.findall(r"<td>(.*?)</td>", page, re.DOTALL)
    assert len(cells) == 2
    for cell in cells:
        plain = cell.replace("<!-- -->", "").removeprefix("<code>").removesuffix("</code>")
        assert "<" not in plain
        assert unescape(plain) == one_line(NASTY)


def test_a_table_of_texts_has_the_times_of_a_token() -> None:
    """They are before the accuracy, which texts do not have; a column has a figure of some case."""
    text = make_result(workload="generate", batch_size=8)
    text.first_token_s, text.token_p50_s = 0.0081, 0.00676
    lines = export("markdown", make_report([text])).splitlines()
    assert "| sequences/s | time to first token | time per token | verdict |" in lines[0]
    assert "| 0.0081 s | 0.00676 s |" in lines[2]
    both = make_report([text, make_result(60.0, make_accuracy(0.75, items=16))])
    assert "| time per token | accuracy |" in export("markdown", both)


def test_a_table_of_cases_has_units_and_reasons() -> None:
    """Figures have units; wrong answers and failures are with the outcome."""
    report = judged(two_strategies(), two_strategies(oom=()))
    lines = export("markdown", report).splitlines()
    assert lines[:2] == list(markdown_header(report))
    assert lines[2] == (
        "| <code>mp-bs8</code> | huggyllama/llama-30b, float16, 4 x cuda, hellaswag | completed | 60 s | 1.067 "
        "| 75.00 % | 17.00 GiB | 40 MB | UNDECIDED: time |"
    )
    assert "| oom: CUDA out of memory. Tried to allocate 2 GiB |  |  |  |  |  | REGRESSED: outcome |" in lines[5]


@pytest.mark.parametrize(
    ("function", "text", "escaped"),
    [
        (markdown, "a_b _c_ 2*3", "a_b &#95;c&#95; 2&#42;3"),
        (markdown, "&#124; <b>", "&#38;&#35;124; &#60;b>"),
        (markdown, "https://a www.b @c", "https&#58;//a www&#46;b @<!-- -->c"),
        (spreadsheet, "=1+1", "'=1+1"),
        (spreadsheet, " \n-x", "'-x"),
        (spreadsheet, "a=1", "a=1"),
        (command_value, "100%\r\n::x,y", "100%25%0D%0A::x,y"),
        (command_property, "a:b,c%0A", "a%3Ab%2Cc%250A"),
    ],
)
def test_text_is_escaped(function: Any, text: str, escaped: str) -> None:
    """Characters with a meaning in the format become plain text."""
    assert function(text) == escaped


def test_a_comment_has_what_changed_the_next_step_and_the_commits_since_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with the mark by which a workflow finds it; without the commits the list is left out."""
    report = judged(two_strategies(), two_strategies())
    lines = export("github-comment", report).splitlines()
    assert lines[:2] == [COMMENT_MARK, _summary(report).splitlines()[0]]
    assert not {"<summary>Cases</summary>", "<summary>All other verdicts</summary>"} & {*lines}
    assert "since the baseline" not in "".join(lines)
    (tmp_path / "a").write_text("a")
    first_commit(tmp_path)
    base = git(tmp_path, "rev-parse", "HEAD")
    for subject in ("Faster <b>", "Slower"):
        git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", subject)
    monkeypatch.chdir(tmp_path)
    head = git(tmp_path, "rev-parse", "HEAD")
    both = {"baseline": Baseline(name="base.json", commit=base), "head": Candidate(created="", commit=head)}
    report = make_report(verdicts=make_verdicts(make_row(next_step=""), **both))
    report.commit = Commit(sha=head)
    text = export("github-comment", report)
    assert f"Next: `llmgpu bisect {base[:8]} {head[:8]} --metric " in unescape(text)
    assert "<summary>2 commits since the baseline</summary>" in text
    commits = [line.split(" ", 2)[2] for line in text.splitlines() if line.startswith("- ")]
    assert commits == ["Slower", "Faster &#60;b>"]


def test_a_cause_is_stated_once() -> None:
    """Rows and cases that share it name themselves alone."""
    reason = "FLOPs +{} %.\nCause: 1 more aten::mm."
    rows = [make_row(id=f"mp-bs{n}", metric="program", reason=reason.format(n)) for n in (1, 2)]
    report = make_report([make_result(batch_size=n) for n in (1, 2)], verdicts=make_verdicts(*rows))
    for result in report.cases:
        result.findings = [make_finding()]
    text = unescape(export("github-comment", report))
    assert [text.count(words) for words in ("Cause: 1 more", "It is slow.")] == [1, 1]
    assert "**slow: mp-bs1, mp-bs2**" in text


def test_a_comment_fits_the_limit_of_comments() -> None:
    """The last lines of its tables are left out."""
    report = judged(two_strategies(), two_strategies())
    report.verdicts = msgspec.structs.replace(known(report.verdicts), rows=known(report.verdicts).rows * 200)
    text = export("github-comment", report)
    assert len(text.encode()) <= COMMENT_BYTES < len(_summary(report).encode())
    assert "left out" in text


def test_a_gate_that_compared_nothing_is_an_annotation() -> None:
    """It fails the job although no row fails, and is the first annotation."""
    report = judged(two_strategies(), None)
    command, properties, text = _parsed(_annotations(report)[0])
    assert (command, properties["title"]) == ("error", "pytest-llmgpu: Gate")
    assert text.startswith("NOTHING COMPARED: there is no baseline")
    allowed = judged(two_strategies(), None, Policy(allow_no_baseline=True))
    assert not [line for line in _annotations(allowed) if line.startswith("::error")]
