from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.faked_runs import FakedRuns
from support.page_reports import EVIL, paper_report, time_row
from support.report_factory import make_failed, make_finding, make_report, make_result
from support.verdict_factory import any_unseen, make_verdicts

from pytest_llmgpu.cli import main
from pytest_llmgpu.cli.commands.reports import page_name
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.render.charts import theme
from pytest_llmgpu.render.html import assets
from pytest_llmgpu.render.html import report as html_report
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.report import Commit, Report
from pytest_llmgpu.report.result import CaseResult, Failure

pytest.importorskip("jinja2", reason="the page needs the extra report")
pytest.importorskip("vl_convert", reason="the page needs the extra report")

_EMPTY = frozenset(("meta", "link", "br", "wbr", "img", "input", "hr"))


class Page(html.parser.HTMLParser):
    """The elements of a page; an element that is not closed in order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[dict[str, str | None]] = []
        """The attributes of each element."""
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.charts: dict[str, object] = {}
        self.cases: dict[str, list[dict[str, object]]] = {}
        self._open: list[str] = []
        self._words: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []
        self.text = " ".join(" ".join(self._words).split())
        """The visible text with single spaces."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an element, and remember that it is open."""
        self.elements.append(dict(attrs))
        if tag not in _EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the element that was opened last."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep the words of the page, its scripts and styles, and the data of charts and cases by their ids."""
        attributes = self.elements[-1] if self.elements else {}
        if not self._open or self._open[-1] not in self.inside:
            self._words.append(data)
        elif attributes.get("type") != "application/json":
            self.inside[self._open[-1]].append(data)
        elif case := attributes.get("data-case"):
            self.cases[case] = json.loads(data)
        elif "id" not in attributes:
            self.charts[self.values("data-chart")[-1]] = json.loads(data)

    def values(self, attribute: str) -> list[str]:
        """Return the values of an attribute, one per element that has it."""
        return [attributes[attribute] or "" for attributes in self.elements if attribute in attributes]


def _page(report: Report, *more: Any, **fields: Any) -> Page:
    return Page(html_report.render(report, *more, **fields))


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out Vega except in slow tests: to bundle it takes seconds."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(html_report, "vega", lambda: "/* Vega */")


@pytest.fixture(scope="module")
def whole() -> str:
    """Return a page with every section: Table 2 of Shin et al. 2024 compared with a slower baseline."""
    base = paper_report()
    for result in base.cases:
        for launch in result.launches:
            launch.batches.latency_s = [2 * value for value in launch.batches.latency_s]
    return html_report.render(paper_report(points=2000), base, name="sweep.json")


@pytest.mark.slow
def test_the_page_is_valid_markup(whole: str) -> None:
    """Elements are closed in order, ids are unique, and every reference has a target."""
    page = Page(whole)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert set(page.values("for")) | set(" ".join(page.values("aria-labelledby")).split()) <= set(ids)
    assert {link.removeprefix("#") for link in page.values("href") if link.startswith("#")} <= set(ids)


@pytest.mark.slow
def test_nothing_is_fetched_and_nothing_else_runs(whole: str) -> None:
    """Links stay within the page, and the content security policy permits scripts and styles by hash only."""
    page = Page(whole)
    assert page.values("src") == page.values("srcset") == page.values("action") == []
    assert {link for link in page.values("href") if not link.startswith("#")} == {"data:,"}
    [style] = page.inside["style"]
    assert "@import" not in style
    assert "url(" not in style
    assert not [name for one in page.elements for name in one if name.startswith("on") or name == "style"]
    [policy] = [value for value in page.values("content") if value.startswith("default-src")]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for kind, texts in (("script-src", page.inside["script"]), ("style-src", [style])):
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[kind] == " ".join(f"'sha256-{value}'" for value in hashes)


def test_text_of_a_report_is_never_markup() -> None:
    """An id, a message, an argument or a version that looks like a script is text, also inside the JSON."""
    report = paper_report()
    report.cases[0].id = report.cases[-1].id = EVIL
    report.cases[-1].failure = Failure(phase="forward", message=EVIL)
    report.cases[0].findings = [make_finding(code=EVIL, text=EVIL, next_step=EVIL)]
    report.options = {"--llmgpu-model": EVIL}
    report.environment.versions = {EVIL: EVIL}
    report.environment.variables = {"NCCL_X": EVIL}
    report.verdicts = make_verdicts(time_row(report, reason=EVIL))
    text = html_report.render(report, name=EVIL)
    page = Page(text)
    assert len(page.inside["script"]) == 3
    assert "<script>window" not in text
    assert page.text.count("<script>window.evil = 1</script>") > 6
    assert EVIL in page.cases


def test_the_status_comes_first() -> None:
    """The order is: status, worst finding with its next step, table with its marks in words, charts, environment."""
    report = paper_report()
    wrong = next(result for result in report.cases if result.id == "iok-bs32")
    wrong.findings = [make_finding(code="wrong-answers", text="It is 26 %.", next_step="Use less.")]
    text = _page(report, name="sweep.json").text
    place = 0
    for words in (
        "Failed 20 of 21 cases completed, 1 out of memory. Worst: iok-bs32: It is 26 %.",
        "wrong answers",
        "Next: Use less.",
        "Batch size mp tp iok",
        "★ fastest 61.8 min / 82.8 %",
        "OOM out of memory",
        "Throughput by batch size",
        "Environment",
    ):
        place = text.index(words, place)


def test_every_chart_has_its_table(whole: str) -> None:
    """A reader without JavaScript reads the figures; the data of a timeline come with the data of the script."""
    page = Page(whole)
    drawn = page.values("data-chart")
    assert {"time", "throughput"} <= set(drawn)
    assert drawn == list(page.charts)
    assert drawn != []
    assert len([label for label in page.values("aria-label") if label.startswith("Data of ")]) == len(drawn)
    for charts in page.cases.values():
        assert all(chart["headers"] and chart["rows"] for chart in charts)


def test_the_page_compares_with_a_baseline() -> None:
    """The worst change comes first, each case has both times, and differences of the environment are notes."""
    head, base = paper_report(), paper_report()
    for launch in (launch for result in head.cases[:3] for launch in result.launches):
        launch.batches.latency_s = [500 * value for value in launch.batches.latency_s]
    base.environment.versions = {"torch": "2.10.0"}
    base.commit = Commit(sha="b" * 40)
    with any_unseen():
        page = _page(head, base, policy=Policy())
    assert f"Baseline: commit {'b' * 40}." in page.text
    assert page.text.count("mp-bs1 wall time +49900.0 %") == 1, "the cause of the sentence is stated once"
    assert page.text.startswith(
        "REGRESSED: huggyllama/llama-30b, 4x-NVIDIA-H200, bbbbbbbb \N{RIGHTWARDS ARROW} 3b1f09ac "
    )
    assert re.search(r"mp-bs1 time \S+ s \S+ s \+49900.0 % REGRESSED", page.text)
    assert all(f"{result.id} " in page.text.partition("Was and now")[2] for result in head.cases)
    assert "REGRESSED time: mp-bs1 , mp-bs2 , mp-bs4 Time +49900.0 %" in page.text
    assert "torch 2.10.0 \N{RIGHTWARDS ARROW} 2.11.0" in page.text
    assert page.text.startswith("REGRESSED")


def test_a_case_without_a_compared_number_has_what_changed() -> None:
    """A new outcome stands in place of its time, and the execution where that changed."""
    graphs = make_result(batch_size=1, execution="cuda_graphs")
    base = make_report([graphs, make_result(batch_size=2), make_result(batch_size=8)])
    head = make_report([make_result(batch_size=1), make_failed("oom", batch_size=2), make_result(batch_size=4)])
    head.cases[0].launches[0].plan_sha256 = "other"  # the times cannot be compared
    changes = _page(head, base).text.partition("Was and now, the largest change first")[2]
    assert "mp-bs1 execution graphs eager REGRESSED" in changes
    assert re.search(r"mp-bs2 time \S+ s oom REGRESSED", changes)
    assert re.search(r"mp-bs4 time - \S+ s NEW", changes)
    assert re.search(r"mp-bs8 time \S+ s - MISSING", changes)


def test_every_regressed_metric_is_in_the_first_table() -> None:
    """Of a case also a second one; FLOPs stand for a program without a price, and an equal case has its time."""
    report = paper_report()
    rows = [time_row(report, metric=name, base=1.0, head=2.0, ratio=2.0) for name in ("time", "memory")]
    program = time_row(report, 1, metric="program", base=None, head=None, ratio=1.1)
    report.verdicts = make_verdicts(*rows, program, time_row(report, 2, "OK", base=1.0, head=1.0, ratio=1.0))
    page = _page(report)
    table = page.text.partition("Was and now, the largest change first")[2].partition("Time by batch size")[0]
    assert table.count("REGRESSED") == 3
    assert re.search(r"mp-bs1 memory \S+ \w+ \S+ \w+ \+100.0 % REGRESSED", table)
    assert "mp-bs2 program - completed +10.0 % REGRESSED" in table
    assert "mp-bs4 time 1 s 1 s same OK" in table


def test_a_verdict_has_one_colour() -> None:
    """A row that fails the gate and one that is not gated have the colour of their verdict."""
    report = paper_report()
    rows = [
        time_row(report, 0, "UNDECIDED", unseen=True, reason="UNDECIDED"),
        time_row(report, 1, "UNDECIDED", gated=False, reason="UNDECIDED"),
        time_row(report, 2, "REGRESSED", reason="REGRESSED"),
        time_row(report, 3, "REGRESSED", gated=False, reason="REGRESSED"),
    ]
    page = html_report.render(report, verdicts=make_verdicts(*rows))
    found = re.findall(r'class="verdict (\w+)">(\w+)', page.replace("_<wbr>", "_"))
    assert set(found) == {("warning", "UNDECIDED"), ("failure", "REGRESSED"), ("changed", "CHANGED")}
    assert re.findall(r'problem (\w+)">\s*<h3><span class="tag">([A-Z_]+)', page) == [
        ("failure", "REGRESSED"),
        ("warning", "UNDECIDED"),
    ]


def test_the_filters_have_what_differs_between_cases() -> None:
    """Each case, column, row and chart can be hidden; a report of one model has no filter of models."""
    page = _page(paper_report())
    assert page.values("data-filter") == ["strategy", "batch"]
    assert set(page.values("data-strategy")) == {"mp", "tp", "iok"}
    assert {"1", "64"} <= set(page.values("data-batch"))


def test_kept_verdicts_are_shown_under_their_own_policy() -> None:
    """Without a baseline the page shows the verdicts of the report and the notes of the terminal."""
    report = paper_report()
    rows, warning = (
        [time_row(report, 0, "UNDECIDED"), time_row(report, 1, "OK")],
        "allowed tq time: no case has that name",
    )
    for policy, word in (("", "PASSED"), ("strict = true\n", "UNDECIDED")):
        report.verdicts = make_verdicts(*rows, policy=policy, warnings=[warning])
        text = _page(report).text
        assert text.startswith(word)
        assert warning in text


@pytest.mark.parametrize(
    "cases", [[], [make_failed("oom")], [make_failed("error"), make_failed("skipped_after_oom", batch_size=2)]]
)
def test_a_report_without_a_figure_has_a_page(cases: list[CaseResult]) -> None:
    """A run without a single completed case has a page, too."""
    page = _page(make_report(cases))
    assert "Time by batch size and strategy" in page.text
    assert page.cases == {}


@pytest.mark.slow
@pytest.mark.parametrize("library", ["jinja2", "vl_convert"])
def test_a_missing_library_is_named_in_one_line(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs the library, before a run and after it."""
    monkeypatch.setitem(sys.modules, library, None)
    for fails in (lambda: html_report.check(tmp_path / "page.html"), lambda: html_report.render(make_report())):
        with pytest.raises(ValueError, match=r"pip install 'pytest-llmgpu\[report\]'$") as caught:
            fails()
        assert "\n" not in str(caught.value)


def test_a_page_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    """The errors are those of a report, with the page's suffix; the check leaves no file."""
    with pytest.raises(ValueError, match=r"^page .*page\.json: the name must end in \.html"):
        html_report.check(tmp_path / "page.json")
    html_report.check(tmp_path / "new" / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_html_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is named after the report, or has the given path; missing folders are created."""
    monkeypatch.chdir(tmp_path)
    dump(paper_report(), Path("reports/head.json.gz"))
    assert main(["html", "reports/head.json.gz"]) == 0
    assert capsys.readouterr().out == "head.html\n"
    assert main(["html", "reports/head.json.gz", "reports/head.json.gz", "--output", "new/page.html"]) == 0
    assert "Baseline: reports/head.json.gz." in Page(Path("new/page.html").read_text()).text
    assert main(["html", "reports/head.json.gz", "--output", "page.txt"]) == 2


def test_names_between_backticks_are_code() -> None:
    """The names are escaped, and a single backtick stays a backtick."""
    report = paper_report()
    texts = ("See `profile.invalid`: 1 -> 2.", "Of `<b>` and `x`.", "A ` alone, <i>.")
    report.cases[0].findings = [make_finding(code=text, text=text, next_step="Read `why`.") for text in texts]
    page = html_report.render(report)
    assert "See <code>profile.invalid</code>: 1 \u2192 2." in page
    assert "Of <code>&lt;b&gt;</code> and <code>x</code>." in page
    assert "A ` alone, &lt;i&gt;." in page
    assert "Read <code>why</code>." in page


def test_the_end_of_a_log_is_on_the_page() -> None:
    """It is in a closed element, and only cases with a problem have it."""
    report = paper_report()
    report.cases[0].failure = Failure(phase="forward", message="x", log_tail="Traceback: <deep>")
    assert "Traceback" not in _page(report).text
    report.cases[0].findings = [make_finding(text="It crashed.")]
    page = _page(report)
    assert "It crashed. End of the log of mp-bs1 (failure.log_tail) Traceback: <deep>" in page.text
    assert "End of the log of mp-bs1" in page.values("aria-label")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("reports/head.json.gz", "head.html"),
        (".llmgpu/machine/0001_3b1f09ac.json", "0001_3b1f09ac.html"),
        ("git:origin/main:reports/base.json", "base.html"),
        ("git:v1.0:base", "base.html"),
    ],
)
def test_the_page_is_named_for_its_report(name: str, file: str) -> None:
    """Folders of the store and git references are removed from the name."""
    assert page_name(name) == file


@pytest.mark.slow
def test_an_unwritable_page_loses_no_report(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written, and the run fails."""

    def full(_page: str, path: Path) -> None:
        raise ValueError(f"{path.name}: no space left on device")

    run = FakedRuns(pytester).start(monkeypatch)
    monkeypatch.setattr(html_report, "write", full)
    result = run("--llmgpu-html=page.html")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED no page: page.html: no space left on device"])
    assert (pytester.path / ".llmgpu" / "last.json").exists()


def _contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2.2, 1 to 21."""

    def luminance(color: str) -> float:
        shares = [value / 255 for value in bytes.fromhex(color[1:])]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    "selector", [":root {", ':root[data-theme="dark"] {', ':root:not([data-theme="light"]) {', "@media print {"]
)
def test_colours_have_contrast(selector: str) -> None:
    """In every theme text has a contrast of 4.5 to 1 or more, and the edges of controls 3 to 1 or more."""
    style = (resources.files("pytest_llmgpu.render.html") / "page.css").read_text(encoding="utf-8")
    body = style.split(selector, 1)[1].split("}", 1)[0]
    color = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", body))
    for ground in (color["ground"], color["surface"]):
        assert min(_contrast(color[name], ground) for name in ("ink", "soft", "link", "good", "bad", "warn")) >= 4.5
        assert _contrast(color["edge"], ground) >= 3


@pytest.mark.parametrize("dark", [False, True])
def test_colours_of_charts_have_contrast(dark: bool) -> None:
    """WCAG 2.2 asks for 3 to 1 for marks and 4.5 to 1 for text."""
    found = theme(dark=dark)
    marks = found["range"]["category"]
    assert len(set(marks)) == len(marks) == 8
    assert min(_contrast(mark, found["background"]) for mark in marks) >= 3
    letters = [found["axis"]["labelColor"], found["axis"]["titleColor"], found["style"]["limit-note"]["color"]]
    assert min(_contrast(letter, found["background"]) for letter in letters) >= 4.5


def test_colours_of_charts_are_variables() -> None:
    """The style sets each variable to the colour of the chart theme, for light and dark."""
    config, style = assets.config_and_style()
    assert "#" not in msgspec.json.encode(config).decode()
    chosen = re.findall(r"var\((--chart-\d+)\)", str(config["range"]["category"]))
    light, dark, system = (dict(re.findall(r"(--chart-\d+): (#\w+);", line)) for line in style.splitlines())
    assert [light[name] for name in chosen] == theme(dark=False)["range"]["category"]
    assert [dark[name] for name in chosen] == theme(dark=True)["range"]["category"]
    assert system == dark


def test_the_command_has_the_options_that_are_not_the_defaults() -> None:
    """It measures the same again."""
    own = {"--strategy": ["mp", "tp"], "--llmgpu-limit": None, "--llmgpu-gpu-memory": 34034679808}
    report = make_report(options=own)
    assert html_report.machine(report)["Command"].endswith(" --llmgpu-strategy=mp,tp --llmgpu-gpu-memory=34034679808")


def test_facts_are_in_words() -> None:
    """A library that is not installed, and a fact that is not known, are left out."""
    own = make_report(commit=Commit(sha="a" * 40, branch="main", dirty=True))
    board = {"memory_bytes": 2**35, "pcie_gen": 3, "pcie_width": 8}
    own.environment.gpus = [msgspec.structs.replace(gpu, **board) for gpu in own.environment.gpus]
    own.environment.versions = {"torch": "2.11.0", "ray": None}
    assert "<dt>torch</dt><dd>2.11.0</dd>" in html_report.render(own)
    assert "<dt>ray</dt>" not in html_report.render(own)
    machine = html_report.machine(own)
    assert machine["Commit"] == f"{'a' * 40} (main) with uncommitted changes"
    assert machine["GPUs"] == "4 x NVIDIA H200, 32 GiB, PCIe 3.0 x8"
    assert "Resumed" not in machine
