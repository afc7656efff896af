from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
from support.export_reports import NASTY, judged, nasty, two_strategies
from support.faked_runs import FakedRuns
from support.report_factory import make_failed, make_report, make_result
from support.verdict_factory import make_row, make_verdicts, with_launches

from pytest_llmgpu.render.exports import FORMATS, export
from pytest_llmgpu.render.exports.tables import CSV_COLUMNS
from pytest_llmgpu.render.exports.tools import junit_properties, names
from pytest_llmgpu.report.report import Commit, Report
from pytest_llmgpu.report.result import Declared

_BENCHMARK_ACTION = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": r"^[^`|\n]+$"},  # no name breaks a comment's table
            "unit": {"type": "string", "minLength": 1},
            "value": {"type": "number"},
            **{name: {"type": "string"} for name in ("range", "extra")},
        },
        "required": ["name", "unit", "value"],
        "additionalProperties": False,
    },
}
_BENCHER = {
    "type": "object",
    "propertyNames": {"minLength": 1, "maxLength": 1024},
    "additionalProperties": {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "properties": {name: {"type": "number"} for name in ("value", "lower_value", "upper_value")},
            "required": ["value"],
            "additionalProperties": False,
        },
        "propertyNames": {"minLength": 1, "maxLength": 64},
    },
}


def _json(name: str, report: Report) -> Any:
    return json.loads(export(name, report), parse_constant=pytest.fail)


def _csv(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(export("csv", report))))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("report", [make_report(), make_report([make_failed("error")]), two_strategies(), nasty()])
def test_every_format_renders_every_report(name: str, report: Report) -> None:
    """Empty, failed, usual and hostile reports give text without a line break at the end, or what the tool reads."""
    text = export(name, report)
    assert text == text.rstrip("\n")
    assert not {"\x1b", "\u202e", "\r"} & set(text)
    if name == "bencher":
        jsonschema.validate(_json(name, report), _BENCHER)
    if name.startswith("github-action-benchmark"):
        entries = _json(name, report)
        jsonschema.validate(entries, _BENCHMARK_ACTION)
        assert len({entry["name"] for entry in entries}) == len(entries)


@pytest.mark.parametrize("name", FORMATS)
def test_a_case_out_of_memory_is_in_every_format(name: str) -> None:
    """It is there as its outcome, or as a number if the format has only numbers."""
    before, after = (export(name, two_strategies(oom=oom)) for oom in ((), (64,)))
    assert before != after
    if name == "github-annotations":
        assert "oom%3A tp-bs64" in after
    elif name == "github-action-benchmark-bigger":
        assert json.loads(after)[0]["value"] == json.loads(before)[0]["value"] - 1
    else:
        assert "tp-bs64" in after


def test_an_unknown_format_is_refused() -> None:
    """The message names the known formats."""
    with pytest.raises(ValueError, match=r"export format 'xml': allowed are bencher, csv, "):
        export("xml", two_strategies())


def test_exporting_needs_no_heavy_library() -> None:
    """All formats work without torch, numpy and pytest."""
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers', 'scipy', 'numpy', 'pytest')))\n"
        "from pytest_llmgpu.render.exports import FORMATS, export\n"
        "assert 'msgspec' not in sys.modules\n"
        "from pytest_llmgpu.report.report import Environment, Report\n"
        "empty = Report(created='', plugin_version=None, environment=Environment(python='', platform=''))\n"
        "[export(name, empty) for name in FORMATS]\n"
        "import pytest_llmgpu.render.exports.tools\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_case_has_the_same_name_in_every_report() -> None:
    """Other cases and their order do not matter, so that tools can follow it over commits."""
    first, second = make_result(model="llama-7b"), make_result(model="llama-13b", limit=64, load_format="dummy")
    second.id = "mp-bs1#2"
    assert names([first, second]) == [
        "mp-bs1 (llama-7b, float16, 4 x cuda, hellaswag)",
        "mp-bs1 (llama-13b with random weights, float16, 4 x cuda, first 64 of hellaswag)",
    ]
    assert sorted(names([second, first])) == sorted(names([first, second]))
    assert names([first, first])[1] == f"{names([first])[0]} #2"
    text = make_result(workload="generate", prompt_tokens=96, new_tokens=32)
    assert names([text])[0].endswith(", 32 tokens after 96)")
    assert all(name.isprintable() and len(name) <= 500 for name in names(nasty().cases))


def test_bencher_gets_its_own_measures_in_its_own_units() -> None:
    """Latency is in nanoseconds and throughput in sequences per second, both with the range over launches."""
    result = with_launches([1.0, 3.0, 2.0])
    result.inference_s, result.sequences_per_s = 420.0, 0.5
    measures, largest = _json("bencher", make_report([result])).values()
    assert set(largest) == {"largest-batch-size"}
    assert measures["latency"] == {"value": 420e9, "lower_value": 210e9, "upper_value": 630e9}
    assert measures["throughput"] == {"value": 0.5, "lower_value": 64 / 630, "upper_value": 64 / 210}


def test_bencher_gets_outcomes_as_numbers() -> None:
    """Each case has two of them; the largest batch size belongs to the series."""
    report = two_strategies()
    report.cases.append(make_failed("crashed", strategy="iok"))
    found = {name.split()[0]: measures for name, measures in _json("bencher", report).items()}
    assert found.pop("tp") == {"largest-batch-size": {"value": 8}}
    for name, outcome in {"mp-bs8": (1, 0), "tp-bs8": (1, 0), "tp-bs64": (0, 1), "iok-bs1": (0, 0)}.items():
        assert (found[name]["completed"]["value"], found[name]["out-of-memory"]["value"]) == outcome


def test_github_action_benchmark_has_each_figure_in_the_file_of_its_direction() -> None:
    """Time, memory and traffic should be small; rates, accuracy and the largest batch size should be large."""
    files = [_json(f"github-action-benchmark-{name}", two_strategies()) for name in ("smaller", "bigger")]
    smaller, bigger = ({entry["name"].rpartition(": ")[2]: entry for entry in entries} for entries in files)
    assert list(smaller) == ["cases that did not complete", "time", "sent per sequence", "peak memory"]
    rates = ["sequences per second", "tokens per second"]
    assert list(bigger) == ["cases that completed", *rates, "accuracy", "largest batch size"]
    assert smaller["time"]["value"] == 60.0
    assert bigger["largest batch size"]["value"] == 8
    assert smaller["cases that did not complete"]["extra"].startswith("oom: tp-bs64 (")


def test_github_action_benchmark_shows_range_and_verdicts_at_a_point() -> None:
    """The range is half of the difference between the launches; the verdicts are in the tooltip."""
    result = with_launches([1.0, 3.0])
    verdicts = make_verdicts(make_row(id=result.id, reason="slower.\nMuch."))
    entry = _json("github-action-benchmark-smaller", make_report([result], verdicts=verdicts))[1]
    assert entry["range"] == "± 210"
    assert entry["extra"] == "2 launches\nREGRESSED (time): slower. Much."


def test_csv_has_a_line_for_each_case_and_each_other_id_with_verdicts() -> None:
    """Cases of the baseline alone come after the cases, worst first."""
    report = judged(two_strategies(oom=(64,)), two_strategies(oom=()))
    gone = report.cases.pop(0)
    by_id = {line["id"]: line for line in _csv(judged(report, two_strategies(oom=())))}
    assert list(by_id) == ["mp-bs64", "tp-bs8", "tp-bs64", gone.id]
    failed = [by_id["tp-bs64"][name] for name in ("outcome", "inference_s", "failure", "verdict_outcome")]
    assert failed == ["oom", "", "CUDA out of memory. Tried to allocate 2 GiB", "REGRESSED"]
    assert (by_id["tp-bs8"]["inference_s"], by_id["tp-bs8"]["verdict_traffic"]) == ("60.0", "OK")
    assert by_id[gone.id]["verdict_outcome"] == "MISSING"


def test_csv_has_the_session_of_each_case() -> None:
    """Rows of several reports can be put together."""
    report = make_report([make_result(gpu_memory_bytes=2**34), make_failed(batch_size=8)], commit=Commit(sha="ab" * 20))
    first, second = _csv(report)
    for row in (first, second):
        assert (row["created"], row["commit"], row["gpu"]) == (report.created, "ab" * 20, "NVIDIA H200")
        assert row["machine"].startswith("4x-NVIDIA-H200")
    assert (first["gpu_memory_bytes"], second["gpu_memory_bytes"]) == (str(2**34), "")


def test_a_figure_of_ones_own_is_exported_as_a_metric() -> None:
    """It has a column and a verdict; a unit is text, and one without a direction is no figure to minimize."""
    result = make_result(batch_size=8)
    result.declared = {"hit_rate": Declared(better="larger", unit="<b>|x"), "waiting": Declared(better="smaller")}
    result.launches[0].figures = {"hit_rate": 0.5, "seen": 7.0}
    gone = make_row("MISSING", "waiting", result.id, declared=result.declared["waiting"])
    report = make_report([result])
    report.verdicts = make_verdicts(gone)
    (line,) = _csv(report)
    assert [line[name] for name in ("hit_rate", "seen", "verdict_waiting")] == ["0.5", "7.0", "MISSING"]
    header, _, row = export("markdown", report).splitlines()[:3]
    assert header.count("|") == row.count("|")
    assert "hit rate | seen" in header
    assert "<b>" not in row
    assert dict(junit_properties(result))["llmgpu.hit_rate"] == "0.5"
    bigger, smaller = (json.loads(export(f"github-action-benchmark-{name}", report)) for name in ("bigger", "smaller"))
    assert [one["value"] for one in bigger if "hit rate" in one["name"]] == [0.5]
    assert not any("seen" in one["name"] for one in (*bigger, *smaller))
    assert '"hit-rate"' in export("bencher", report)


def test_csv_runs_nothing_in_a_spreadsheet() -> None:
    """A formula begins with an apostrophe, and a cell has one line."""
    report = make_report([make_result(model="=1+1", dataset="@SUM(A1)"), nasty().cases[1]])
    assert len(export("csv", report).splitlines()) == 3
    formula, other = _csv(report)
    assert (formula["model"], formula["dataset"]) == ("'=1+1", "'@SUM(A1)")
    assert other["model"].startswith("<script>alert(1)</script> | a`b`")
    assert tuple(other) == CSV_COLUMNS


def test_junit_properties_name_their_units() -> None:
    """The name of a figure ends in its unit."""
    figures = {"time_s": 60.0, "sequences_per_s": 64 / 60, "tokens_per_s": 6400 / 60, "acc_norm": 0.75}
    figures |= {"memory_bytes": 17.0 * 2**30, "traffic_bytes_per_sequence": 40e6}
    pairs = junit_properties(two_strategies().cases[0])
    assert {f"llmgpu.{name}": repr(value) for name, value in figures.items()}.items() <= dict(pairs).items()
    assert all(NASTY not in value and value.isprintable() for _, value in junit_properties(nasty().cases[0]))


@pytest.mark.slow
def test_junit_has_each_case_once(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties of its test are those of all launches together."""
    run = FakedRuns(pytester).start(monkeypatch)
    run("--junitxml=junit.xml", "--llmgpu-launches=2", sizes="4")
    text = (pytester.path / "junit.xml").read_text()
    values = re.findall(r'<property name="llmgpu\.(?:id|launches)" value="(.*?)"', text)
    assert values == ["mp-bs4", "2"]
