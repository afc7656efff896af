from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from support import chart_data
from support.report_factory import make_failed, make_profile, make_report, make_result, paper_results

from pytest_llmgpu.cli import main
from pytest_llmgpu.cli.commands import html as html_command
from pytest_llmgpu.render.html import report as html_report
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.machine import Commit
from pytest_llmgpu.report.report import Report, Session
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Failure, Finding, Series
from pytest_llmgpu.report.verdicts import Armed, Baseline, Row, Verdicts

pytest.importorskip("jinja2", reason="the page needs the extra report")
pytest.importorskip("vl_convert", reason="the page needs the extra report")

EVIL = "<script>window.evil = 1</script><!-- &amp; "
"""What must never be markup, wherever it stands."""

_EMPTY = frozenset(("meta", "link", "br", "img", "input", "hr"))
_LINKS = [f"{link}_{way}_bytes_per_s" for link in ("pcie", "nvlink") for way in ("tx", "rx")]
_COLUMNS = ("utilization_pct", "memory_used_bytes", "power_w", "sm_clock_mhz", *_LINKS)


class Page(html.parser.HTMLParser):
    """The elements of a page; fails where one is not closed, or another is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an element, open until its end."""
        self.elements.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the element that was opened last."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep the words; what scripts and styles hold is kept apart."""
        if self._open and self._open[-1] in self.inside:
            self.inside[self._open[-1]].append(data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        """What people read, with single spaces."""
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> dict[str, dict[str, object]]:
        """What the page's script reads."""
        found: dict[str, dict[str, object]] = json.loads(self.inside["script"][0])
        return found

    def values(self, attribute: str) -> list[str]:
        """Return the values of an attribute of all elements that have it."""
        return [
            value or "" for _, attributes in self.elements for name, value in attributes.items() if name == attribute
        ]


def sampled(points: int, devices: int = 4) -> Series:
    """Return a series in which no two numbers are the same, which is the most that one can need in bytes."""
    columns = [
        {name: [1e9 / (1 + i + 7 * place + 31 * d) for i in range(points)] for place, name in enumerate(_COLUMNS)}
        for d in range(devices)
    ]
    return Series(t_s=[i / 6 for i in range(points)], devices=columns)  # type: ignore[arg-type]


def study(points: int = 30) -> Report:
    """Return the study's table as a complete report, every case with its time lines, and one that ran out of memory."""
    report = make_report(paper_results())
    report.session = Session(complete=True, exit_status=0, collected=len(report.cases))
    report.commit = Commit(sha="3b1f09ac" * 5, branch="main", dirty=False)
    report.argv = ["benchmarks", "--strategy=mp,tp,iok", "-k", "a b"]
    report.environment.versions = {"torch": "2.11.0", "absent": None}
    for result in report.cases:
        for launch in result.launches:
            launch.profile = make_profile(series=sampled(points))
    return report


def verdicts(*rows: Row, policy: str = "") -> Verdicts:
    """Return what a gate said against a baseline named `base.json`."""
    armed = Armed(compared=len(rows), gated=len(rows))
    return Verdicts(baseline=Baseline(name="base.json"), policy=policy, policy_sha256="0", armed=armed, rows=list(rows))


def row(report: Report, number: int = 0, verdict: str = "REGRESSED", **fields: object) -> Row:
    """Return a row on the time of a report's case."""
    result = report.cases[number]
    plain = {"metric": "time", "verdict": verdict, "reason": "time changed by +9.0 %.\nAlso changed: the driver."}
    return msgspec.convert({"key": result.key, "id": result.id, **plain, **fields}, Row)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out Vega, which takes seconds to bundle and says nothing of the rest."""
    monkeypatch.setattr(html_report, "_library", lambda: "/* Vega */")


@pytest.fixture(scope="module")
def whole() -> str:
    """Return the page of the study's table against itself with other times, with everything in it."""
    base = study()
    for result in base.cases:
        for launch in result.launches:
            launch.batches.latency_s = [2 * value for value in launch.batches.latency_s]
    return html_report.render(study(points=2000), base, name="study.json")


def test_the_page_is_valid_markup(whole: str) -> None:
    """Every element is closed where it has to be, ids are unique, and what is referred to is there."""
    page = Page(whole)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert set(page.values("for")) | set(" ".join(page.values("aria-labelledby")).split()) <= set(ids)
    assert {link.removeprefix("#") for link in page.values("href") if link.startswith("#")} <= set(ids)


def test_the_page_can_be_used_without_eyes(whole: str) -> None:
    """Landmarks, a language, headings without a gap, headers of tables with their scope, a name for what scrolls."""
    page = Page(whole)
    names = [name for name, _ in page.elements]
    assert {"header", "nav", "main", "h1", "caption"} <= set(names)
    assert names.count("main") == names.count("h1") == 1
    assert dict(page.elements)["html"]["lang"] == "en"
    levels = [int(name[1]) for name in names if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(
        attributes.get("scope") in {"col", "row", "rowgroup"} for name, attributes in page.elements if name == "th"
    )
    assert all(
        attributes.get("aria-label") for _, attributes in page.elements if attributes.get("role") in {"region", "img"}
    )


def test_nothing_is_fetched_and_nothing_else_runs(whole: str) -> None:
    """No address but the page's own places, and a policy that knows its scripts and its style by their hashes only."""
    page = Page(whole)
    assert page.values("src") == page.values("srcset") == page.values("action") == []
    assert {link for link in page.values("href") if not link.startswith("#")} == {"data:,"}
    [style] = page.inside["style"]
    assert "@import" not in style
    assert "url(" not in style
    assert not [
        name for _, attributes in page.elements for name in attributes if name.startswith("on") or name == "style"
    ]
    [policy] = [value for value in page.values("content") if value.startswith("default-src")]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    data, *scripts = page.inside["script"]
    assert data.startswith("{")
    for kind, texts in (("script-src", scripts), ("style-src", [style])):
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[kind] == " ".join(f"'sha256-{value}'" for value in hashes)


def test_the_page_of_the_study_stays_small(whole: str) -> None:
    """Three strategies, seven batch sizes, four GPUs and long series: under 3 MB, bundled library included."""
    page = Page(whole)
    assert len(page.data["cases"]) == 21
    assert len(whole.encode()) < 3_000_000


@pytest.mark.usefixtures("quick")
def test_text_of_a_report_is_never_markup() -> None:
    """An id, a message, an argument, a version that looks like a script shows as text, inside JSON too."""
    report = study()
    report.cases[0].id = report.cases[-1].id = EVIL
    report.cases[-1].failure = Failure(phase="forward", message=EVIL)
    report.cases[0].findings = [Finding(code=EVIL, severity="failure", text=EVIL, next_step=EVIL)]
    report.argv = [EVIL]
    report.environment.versions = {EVIL: EVIL}
    report.environment.variables = {"NCCL_X": EVIL}
    report.verdicts = verdicts(row(report, reason=EVIL))
    text = html_report.render(report, name=EVIL)
    page = Page(text)
    assert [name for name, _ in page.elements].count("script") == 3
    assert "<script>window" not in text
    assert page.text.count("<script>window.evil = 1</script>") > 6
    assert EVIL in page.data["cases"]


@pytest.mark.usefixtures("quick")
def test_the_first_screen_says_what_it_comes_to() -> None:
    """The verdict, the worst finding with its next step, then the study's table with its marks in words."""
    report = study()
    wrong = next(result for result in report.cases if result.id == "iok-bs32")
    wrong.findings = [Finding(code="accuracy-collapsed", severity="failure", text="It is 26 %.", next_step="Use less.")]
    text = Page(html_report.render(report, name="study.json")).text
    place = 0
    for words in (
        "Fail 20 of 21 cases completed, 1 out of memory. Worst: iok-bs32: It is 26 %.",
        "accuracy collapsed",
        "Next: Use less.",
        "Batch size mp tp iok",
        "★ fastest 61.8 min / 82.8 %",
        "OoM out of memory",
        "Throughput by batch size",
        "Environment and command pytest benchmarks --strategy=mp,tp,iok -k 'a b'",
    ):
        place = text.index(words, place)


@pytest.mark.usefixtures("quick")
def test_wrong_answers_are_marked_by_more_than_a_colour() -> None:
    """Whoever sees no red reads it."""
    report = study()
    wrong = next(result for result in report.cases if result.id == "iok-bs32")
    wrong.accuracy_check = AccuracyCheck(
        metric="acc_norm",
        value=0.26,
        baseline=0.82,
        source="published",
        tolerance=0.01,
        ok=False,
        text="26 % is not 82 %",
    )
    assert "✗ wrong answers 70.0 min / 26.0 %" in Page(html_report.render(report)).text


@pytest.mark.usefixtures("quick")
def test_every_chart_has_its_table(whole: str) -> None:
    """Whoever cannot see a chart, or has no JavaScript, reads its figures; a time line's come with its data."""
    page = Page(whole)
    drawn = page.values("data-chart")
    assert {"time", "throughput"} <= set(drawn)
    assert drawn == list(page.data["charts"])
    assert [label for label in page.values("aria-label") if label.startswith("Data of ")] != []
    assert len([label for label in page.values("aria-label") if label.startswith("Data of ")]) == len(drawn)
    for charts in page.data["cases"].values():
        assert isinstance(charts, list)
        assert all(chart["headers"] and chart["rows"] for chart in charts)


@pytest.mark.usefixtures("quick")
def test_a_baseline_is_judged_and_shown() -> None:
    """The rows of the gate, what fails open and first; and what differs in the environment."""
    head, base = study(), study()
    for launch in (launch for result in head.cases[:3] for launch in result.launches):
        launch.batches.latency_s = [5 * value for value in launch.batches.latency_s]
    base.environment.versions = {"torch": "2.10.0"}
    base.commit = Commit(sha="b" * 40)
    page = Page(html_report.render(head, base))
    assert f"Baseline: commit {'b' * 40}." in page.text
    assert "Fails: 3" in page.text
    assert "REGRESSED time: 3 mp-bs1 time changed by +400.0 %" in page.text
    assert "2.11.0 baseline: 2.10.0" in page.text
    assert page.text.startswith("Fail")


@pytest.mark.usefixtures("quick")
def test_the_verdicts_of_the_run_are_shown_by_its_own_policy() -> None:
    """Without a baseline at hand the page repeats what the gate said, and what its policy let pass."""
    report = study()
    report.verdicts = verdicts(row(report, verdict="MISSING"))
    assert "Fails: 1" in Page(html_report.render(report)).text
    report.verdicts = verdicts(row(report, verdict="MISSING"), policy="allow_missing = true\n")
    text = Page(html_report.render(report)).text
    assert "Not told: 1" in text
    assert "Fails" not in text
    assert "Holm" not in text
    told = row(report, verdict="INCONCLUSIVE", alone="REGRESSED")
    report.verdicts = verdicts(told)
    note = f"by the interval alone time of {told.id} would be REGRESSED. Rows are judged together (Holm)"
    assert note in Page(html_report.render(report)).text, "the page says what the terminal says"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "cases", [[], [make_failed("oom")], [make_failed("error"), make_failed("skipped_after_oom", batch_size=2)]]
)
def test_a_report_without_a_figure_has_a_page(cases: list[CaseResult]) -> None:
    """A run that failed from the first case on is the one that people look at."""
    report = make_report(cases)
    page = Page(html_report.render(report))
    assert "Time by batch size and strategy" in page.text
    assert page.data["cases"] == {}


@pytest.mark.usefixtures("quick")
def test_a_case_on_a_cpu_has_a_page() -> None:
    """The smallest use of all: no GPU, no samples."""
    report = make_report([make_result(device="cpu", devices=1)], gpus=0)
    assert "GPUs none" in Page(html_report.render(report)).text


@pytest.mark.parametrize("library", ["jinja2", "vl_convert"])
def test_a_missing_library_is_named_in_one_line(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it, before a run and after it, not with a traceback."""
    monkeypatch.setitem(sys.modules, library, None)
    for fails in (lambda: html_report.check(tmp_path / "page.html"), lambda: html_report.render(make_report())):
        with pytest.raises(ValueError, match=re.escape("pip install 'pytest-llmgpu[report]'")) as caught:
            fails()
        assert "\n" not in str(caught.value)


def test_a_page_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    """Another kind of name, a folder, a file where a folder has to be; nothing is left behind by looking."""
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path / "page.json", "must end in .html"),
        (tmp_path / "folder.html", "directory"),
        (tmp_path / "file" / "page.html", "[Nn]ot a directory"),
    ):
        with pytest.raises(ValueError, match=words):
            html_report.check(path)
    html_report.check(tmp_path / "new" / "page.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.html"]


@pytest.mark.usefixtures("quick")
def test_html_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the report's name beside where the command runs, or where it is asked for, folders included."""
    monkeypatch.chdir(tmp_path)
    dump(study(), tmp_path / "reports" / "head.json.gz")
    assert main(["html", "reports/head.json.gz"]) == 0
    assert capsys.readouterr().out == "head.html\n"
    assert "reports/head.json.gz" in Page(Path("head.html").read_text()).text
    assert main(["html", "reports/head.json.gz", "reports/head.json.gz", "--output", "new/page.html"]) == 0
    assert "Baseline: reports/head.json.gz." in Page(Path("new/page.html").read_text()).text


@pytest.mark.usefixtures("quick")
def test_names_between_backticks_are_code() -> None:
    """Sentences are written for a terminal; what is in them is text all the same, and a single backtick stays."""
    report = study()
    texts = ("See `profile.invalid`: 1 -> 2.", "Of `<b>` and `x`.", "A ` alone, <i>.")
    report.cases[0].findings = [
        Finding(code=f"code-{number}", severity="failure", text=text, next_step="Read `why`.")
        for number, text in enumerate(texts)
    ]
    page = html_report.render(report)
    assert "See <code>profile.invalid</code>: 1 \u2192 2." in page
    assert "Of <code>&lt;b&gt;</code> and <code>x</code>." in page
    assert "A ` alone, &lt;i&gt;." in page
    assert "Read <code>why</code>." in page


@pytest.mark.usefixtures("quick")
def test_the_end_of_a_log_is_on_the_page() -> None:
    """Where the next step is to read it; folded away, and only of cases with a problem."""
    report = study()
    report.cases[0].failure = Failure(phase="forward", message="x", log_tail="Traceback: <deep>")
    assert "Traceback" not in Page(html_report.render(report)).text
    report.cases[0].findings = [Finding(code="crashed", severity="failure", text="It crashed.", next_step="Read.")]
    page = Page(html_report.render(report))
    assert "It crashed. End of the log of mp-bs1 (failure.log_tail) Traceback: <deep>" in page.text
    assert "End of the log of mp-bs1" in page.values("aria-label")


@pytest.mark.usefixtures("quick")
def test_the_page_says_which_options_were_in_force() -> None:
    """Without the report's JSON at hand."""
    report = study()
    report.options = {"--llmgpu-scoring": "harness", "--llmgpu-dtype": "float16", "--llmgpu-limit": None}
    text = Page(html_report.render(report)).text
    assert "Options that are not the defaults --llmgpu-scoring harness" in text
    assert "--llmgpu-limit" not in text


@pytest.mark.usefixtures("quick")
def test_html_shows_verdicts_that_were_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the page of a gate that went first says what the gate said; what would change nothing is refused."""
    monkeypatch.chdir(tmp_path)
    head = study()
    dump(head, tmp_path / "base.json")
    del head.cases[0]
    dump(head, tmp_path / "head.json")
    assert main(["gate", "base.json", "head.json", "--json", "said.json"]) == 1
    assert main(["html", "head.json", "--verdicts", "said.json", "--output", "page.html"]) == 0
    assert "Fails: 1" in Page(Path("page.html").read_text()).text
    capsys.readouterr()
    for more, words in (
        (["--verdicts", "said.json"], "--verdicts: were made already"),
        (["--policy", "x.toml"], "--policy: is for BASELINE"),
    ):
        arguments = ["html", "head.json", *(["base.json"] if "--verdicts" in more else []), *more]
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_html_judges_by_the_policy_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of pyproject.toml, as the gate does, or another by its name."""
    monkeypatch.chdir(tmp_path)
    head = study()
    dump(head, tmp_path / "base.json")
    del head.cases[0]
    dump(head, tmp_path / "head.json")
    Path("pyproject.toml").write_text("[tool.llmgpu.gate]\nallow_missing = true\n")
    Path("strict.toml").write_text("allow_missing = false\n")
    assert main(["html", "head.json", "base.json", "--output", "own.html"]) == 0
    assert main(["html", "head.json", "base.json", "--output", "strict.html", "--policy", "strict.toml"]) == 0
    assert "Fails" not in Page(Path("own.html").read_text()).text
    assert "Fails" in Page(Path("strict.html").read_text()).text


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "arguments", [["nope.json"], ["head.json", "nope.json"], ["head.json", "--output", "page.txt"]]
)
def test_html_says_in_one_line_what_cannot_be_done(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stdout, exit status 2."""
    monkeypatch.chdir(tmp_path)
    dump(study(), tmp_path / "head.json")
    assert main(["html", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("llmgpu: ")
    assert printed.err.count("\n") == 1


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
    """Without the folders of the store or of git."""
    assert html_command._file_name(name) == file


@pytest.mark.usefixtures("quick")
def test_the_page_has_one_rounding_for_a_time() -> None:
    """In the table, the caption and the list of cases: that of the terminal's table, with its unit."""
    results = [chart_data.sampled(20, batch_size=size) for size in (1, 2)]
    for seconds, shown in ((7.4652, "7.47 s"), (7465.2, "124 min")):
        for result in results:
            result.inference_s = seconds
        text = Page(html_report.render(make_report(results))).text
        assert f"mp-bs1: {shown}" in text
        assert text.count(shown) >= 4
        assert "7.46 s" not in text
