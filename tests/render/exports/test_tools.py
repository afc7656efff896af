from __future__ import annotations

import csv
import io
import json
from typing import Any

import jsonschema
import pytest
from support.export_reports import NASTY, judged, nasty, two_strategies
from support.report_factory import make_failed, make_report, make_result
from support.verdict_factory import make_row, make_verdicts, with_launches

from pytest_llmgpu.render.exports import export
from pytest_llmgpu.render.exports.tables import CSV_COLUMNS
from pytest_llmgpu.render.exports.tools import junit_properties
from pytest_llmgpu.report.report import Report

_BENCHER = {
    "type": "object",
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


def _rendered(name: str, report: Report) -> Any:
    return json.loads(export(name, report))


def test_bencher_gets_its_own_measures_in_its_own_units() -> None:
    """Latency is in nanoseconds and throughput in sequences per second, both with the range over launches."""
    result = with_launches([1.0, 3.0, 2.0])
    result.inference_s, result.sequences_per_s = 420.0, 0.5
    measures, largest = _rendered("bencher", make_report([result])).values()
    assert set(largest) == {"largest-batch-size"}
    assert measures["latency"] == {"value": 420e9, "lower_value": 210e9, "upper_value": 630e9}
    assert measures["throughput"]["value"] == 0.5
    assert measures["throughput"]["lower_value"] < measures["throughput"]["upper_value"]


@pytest.mark.parametrize("report", [make_report(), two_strategies(), nasty()])
def test_bencher_exports_fit_its_format(report: Report) -> None:
    """Names are no longer than Bencher allows, and values are numbers."""
    document = _rendered("bencher", report)
    jsonschema.validate(document, _BENCHER)
    assert all(0 < len(name.encode()) <= 1024 for name in document)


def test_bencher_gets_outcomes_as_numbers() -> None:
    """Each case has two of them; the largest batch size belongs to the series."""
    report = two_strategies()
    report.cases.append(make_failed("crashed", strategy="iok"))
    found = {name.split()[0]: measures for name, measures in _rendered("bencher", report).items()}
    assert found.pop("tp") == {"largest-batch-size": {"value": 8}}
    outcomes = {
        name: (measures["completed"]["value"], measures["out-of-memory"]["value"])
        for name, measures in found.items()
        if "-" in name
    }
    assert outcomes == {"mp-bs8": (1, 0), "mp-bs64": (1, 0), "tp-bs8": (1, 0), "tp-bs64": (0, 1), "iok-bs1": (0, 0)}


def test_long_names_stay_different_for_bencher() -> None:
    """They end in a digest; the limit of 1,024 is in bytes."""
    long = [make_result(model="\N{GRINNING FACE}" * 300 + end) for end in "ab"]
    found = _rendered("bencher", make_report(long))
    assert len(found) == 4, "two cases, and the series of each"
    for name in found:
        assert 1000 < len(name.encode()) <= 1024
        assert name.startswith(("mp-bs1 (\N{GRINNING FACE}", "mp (\N{GRINNING FACE}"))


@pytest.mark.parametrize("direction", ["smaller", "bigger"])
@pytest.mark.parametrize("report", [make_report(), make_report([make_failed()]), two_strategies(), nasty()])
def test_github_action_benchmark_gets_valid_entries(direction: str, report: Report) -> None:
    """The list is never empty, and no name breaks a comment's table."""
    entries = _rendered(f"github-action-benchmark-{direction}", report)
    assert entries
    assert len({entry["name"] for entry in entries}) == len(entries)
    for entry in entries:
        assert set(entry) <= {"name", "unit", "value", "range", "extra"}
        assert type(entry["value"]) in {int, float}
        assert entry["unit"]
        assert not set("`|\n") & set(entry["name"])
        assert all(isinstance(entry.get(key, ""), str) for key in ("unit", "range", "extra"))


def test_github_action_benchmark_has_each_figure_in_the_file_of_its_direction() -> None:
    """Time, memory and traffic should be small; rates, accuracy and the largest batch size should be large."""
    found = {
        direction: {
            entry["name"].rpartition(": ")[2]: entry
            for entry in _rendered(f"github-action-benchmark-{direction}", two_strategies())
        }
        for direction in ("smaller", "bigger")
    }
    assert set(found["smaller"]) == {"cases that did not complete", "time", "peak memory", "sent per sequence"}
    assert set(found["bigger"]) == {
        "cases that completed",
        "sequences per second",
        "tokens per second",
        "accuracy",
        "largest batch size",
    }
    assert found["smaller"]["time"]["value"] == 60.0
    assert found["bigger"]["largest batch size"]["value"] == 8
    assert found["smaller"]["cases that did not complete"]["extra"].startswith("oom: tp-bs64 (")


def test_github_action_benchmark_shows_range_and_verdicts_at_a_point() -> None:
    """The range is half of the difference between the launches; the verdicts are in the tooltip."""
    result = with_launches([1.0, 3.0])
    report = make_report([result])
    report.verdicts = make_verdicts(make_row(id=result.id, reason="slower.\nMuch."))
    entry = _rendered("github-action-benchmark-smaller", report)[1]
    assert entry["range"] == "± 210"
    assert entry["extra"] == "2 launches\nREGRESSED (time): slower. Much."


def test_csv_has_a_line_for_each_case_and_each_other_id_with_verdicts() -> None:
    """Cases of the baseline and series come after the cases, worst first."""
    report = judged(two_strategies(oom=(64,)), two_strategies(oom=()))
    gone = report.cases.pop(0)
    report = judged(report, two_strategies(oom=()))
    lines = list(csv.DictReader(io.StringIO(export("csv", report))))
    assert [line["id"] for line in lines] == ["mp-bs64", "tp-bs8", "tp-bs64", "tp", gone.id, "mp"]
    by_id = {line["id"]: line for line in lines}
    assert by_id["tp-bs64"]["outcome"] == "oom"
    assert by_id["tp-bs64"]["inference_s"] == ""
    assert by_id["tp-bs64"]["failure"] == "CUDA out of memory. Tried to allocate 2 GiB"
    assert by_id["tp-bs64"]["verdict_outcome"] == "REGRESSED"
    assert by_id["tp-bs8"]["inference_s"] == "60.0"
    assert by_id["tp-bs8"]["verdict_traffic"] == "OK"
    assert by_id[gone.id]["verdict_outcome"] == "MISSING"
    assert by_id["tp"]["verdict_largest_batch"] == "REGRESSED"


def test_csv_runs_nothing_in_a_spreadsheet() -> None:
    """A formula begins with an apostrophe, and a cell has one line."""
    report = make_report([make_result(model="=1+1", dataset="@SUM(A1)"), nasty().cases[1]])
    text = export("csv", report)
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(text.splitlines()) == 3
    assert (lines[0]["model"], lines[0]["dataset"]) == ("'=1+1", "'@SUM(A1)")
    assert lines[1]["model"].startswith("<script>alert(1)</script> | a`b`")
    assert set(lines[1]) == set(CSV_COLUMNS)


def test_junit_properties_name_their_units() -> None:
    """The name of a figure ends in its unit."""
    pairs = dict(junit_properties(two_strategies().cases[0]))
    assert {name: pairs[f"llmgpu.{name}"] for name in ("time_s", "sequences_per_s", "tokens_per_s", "acc_norm")} == {
        "time_s": "60.0",
        "sequences_per_s": repr(64 / 60),
        "tokens_per_s": repr(6400 / 60),
        "acc_norm": "0.75",
    }
    assert pairs["llmgpu.memory_bytes"] == str(17.0 * 2**30)
    assert pairs["llmgpu.traffic_bytes_per_sequence"] == "40000000.0"
    assert all(NASTY not in value and value.isprintable() for _, value in junit_properties(nasty().cases[0]))
