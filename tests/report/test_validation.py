from __future__ import annotations

import json
from typing import Any

import pytest
from support.report_factory import make_document, make_full_report

from pytest_llmgpu.report.file import parse
from pytest_llmgpu.report.report import Report

_LAUNCH = "cases.0.launches.0"


def _parsed(document: object) -> Report:
    return parse(json.dumps(document).encode(), "report.json")


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("cases.1.case.batch_size", "two", "Expected `int`, got `str`"),
        ("cases.1.case.batch_size", 0, "Expected `int` >= 1, got 0"),
        ("cases.1.case.batch_size", 2**63, "Expected `int` <= 9223372036854775807, got 9223372036854775808"),
        ("cases.0.inference_s", -3.0, "Expected `float` >= 0.0, got -3.0"),
        ("cases.0.acc", 82.8, "Expected `float` <= 1.0, got 82.8"),
        (f"{_LAUNCH}.wall_s", -1e-9, "Expected `float` >= 0.0, got -1e-09"),
        (f"{_LAUNCH}.batches.latency_s.2", -0.5, "Expected `float` > 0.0, got -0.5"),
        (f"{_LAUNCH}.batches.latency_s.2", 1e308, "Expected `float` < 1000000000000.0, got 1e+308"),
        (f"{_LAUNCH}.batches.tokens.0", -1, "Expected `int` >= 0, got -1"),
        (f"{_LAUNCH}.batches.tokens.0", 10**400, f"got 1{'0' * 17}...{'0' * 19}"),
        (f"{_LAUNCH}.batches.sequences", [1, 1, 1], "Expected 4 values, got 3"),
        (f"{_LAUNCH}.memory.1.peak_allocated_bytes", -1, "got -1"),
        (f"{_LAUNCH}.profile.duration_s", -60.0, "got -60.0"),
        (f"{_LAUNCH}.profile.lateness_p99_s", 1e308, "got 1e+308"),
        (f"{_LAUNCH}.profile.sampler_cpu_s", -1.0, "got -1.0"),
        (f"{_LAUNCH}.profile.devices.1.throttled_s", -1e308, "got -1e+308"),
        (f"{_LAUNCH}.profile.devices.1.energy_j", -0.5, "got -0.5"),
        (f"{_LAUNCH}.profile.devices.0.counters.xids", -1.0, "Expected `float` >= 0.0, got -1.0"),
        (f"{_LAUNCH}.profile.devices.0.metrics.utilization_pct.mean", -1e308, "got -1e+308"),
        (f"{_LAUNCH}.profile.devices.1.metrics.utilization_pct.max", 1e308, "got 1e+308"),
        (f"{_LAUNCH}.profile.devices.1.metrics.utilization_pct.coverage", 1.5, "got 1.5"),
        (f"{_LAUNCH}.profile.series.devices.1.power_w", [300.0], "Expected 3 values, got 1"),
        (f"{_LAUNCH}.profile.series.devices.1.power_w.0", "x", "Expected `float | null`, got `str`"),
        (f"{_LAUNCH}.profile.series.devices", [], "Expected 2 values, got 0"),
        (f"{_LAUNCH}.profile.series.t_s.2", -1e308, "got -1e+308"),
        (f"{_LAUNCH}.accuracy.predictions.3", -7, "Expected `int` >= 0, got -7"),
        (f"{_LAUNCH}.accuracy.acc_norm", 82.8, "Expected `float` <= 1.0, got 82.8"),
        (f"{_LAUNCH}.accuracy.predictions", [0], "Expected 5 values, got 1"),
        (f"{_LAUNCH}.accuracy.labels", [0] * 6, "Expected 5 values, got 6"),
        (f"{_LAUNCH}.work.collectives.0.wait_s", [0.1], "Expected 3 values, got 1"),
        (f"{_LAUNCH}.prefill_work.ranks.1.copy_s", [0.1], "Expected 3 values, got 1"),
        (f"{_LAUNCH}.accuracy.loglikelihoods", "AAA", "Expected base64, got another text"),
        (f"{_LAUNCH}.accuracy.loglikelihoods", "\xe4AAA", "Expected base64, got another text"),
        (f"{_LAUNCH}.accuracy.loglikelihoods", "AAA=", "Expected numbers of 4 bytes, got 2 bytes"),
        ("cases.0.traffic.ranks.1.0.wire_bytes", -8, "got -8"),
        ("cases.0.traffic.wire_bytes_per_sequence", -8, "got -8"),
        (f"{_LAUNCH}.batches.latency_s.2", 0.0, "Expected `float` > 0.0, got 0.0"),
        ("cases.0.id", "", "Expected an id, got an empty text"),
        ("cases.0.failure", {"phase": "load", "message": "m"}, "Expected null, because the case completed"),
        ("cases.2.id", "mp-bs1", "Expected a unique id, got 'mp-bs1', which $.cases[0] has too"),
    ],
)
def test_an_impossible_value_is_refused_with_its_place(place: str, value: object, reason: str) -> None:
    """The message has the place, the value and the bound; so do keys of maps, which msgspec leaves out."""
    document = make_document(make_full_report())
    part: Any = document
    *steps, last = [int(step) if step.isdecimal() else step for step in place.split(".")]
    for step in steps:
        part = part[step]
    part[last] = value
    path = "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in place.split("."))
    with pytest.raises(ValueError, match="Expected") as caught:
        _parsed(document)
    assert reason in str(caught.value)
    assert str(caught.value).startswith("report report.json: breaks schema_version 2: Expected ")
    assert str(caught.value).endswith(f" - at `${path}`")


def test_the_key_of_a_map_is_named_although_another_part_is_broken_too() -> None:
    """The message names the first error of the file, and the key that causes it."""
    document = make_document(make_full_report())
    devices = document["cases"][0]["launches"][0]["profile"]["devices"]
    devices[0]["counters"] = {"ecc_uncorrected": 0, "xids": -1}
    devices[1]["counters"] = {"xids": -2}
    with pytest.raises(ValueError, match=r"got -1 - at `\$.*\.devices\[0\]\.counters\.xids`$"):
        _parsed(document)


def test_unusual_values_that_are_possible_are_read() -> None:
    """Throttling by power and heat adds up; a reading can be from before the window; an item can have many endings."""
    document = make_document(make_full_report())
    launch = document["cases"][0]["launches"][0]
    launch["profile"]["devices"][0]["throttled_s"] = 1.5 * launch["profile"]["duration_s"]
    launch["profile"]["series"]["t_s"][0] = -0.045
    launch["accuracy"]["predictions"][0] = 300
    accuracy = _parsed(document).cases[0].launches[0].accuracy
    assert accuracy is not None
    assert accuracy.predictions[0] == 300


def test_a_name_that_occurs_twice_is_refused() -> None:
    """Readers of JSON take the first value, the last one, or both."""
    text = json.dumps(make_document(make_full_report())).replace('"outcome":', '"outcome": "oom", "outcome":', 1)
    with pytest.raises(ValueError, match=r"report.json: .*the name 'outcome' occurs 2 times in one object"):
        parse(text.encode(), "report.json")


@pytest.mark.parametrize("metric", ["acc", "acc_norm"])
def test_an_accuracy_that_its_predictions_contradict_is_refused(metric: str) -> None:
    """A report with the right answers has the accuracy twice."""
    document: Any = make_document(make_full_report())
    accuracy = document["cases"][0]["launches"][0]["accuracy"]
    accuracy["labels"] = accuracy["predictions_norm"] = accuracy["predictions"]
    accuracy |= {"acc": 1.0, "acc_norm": 1.0}
    _parsed(document)
    accuracy[metric] = 0.25
    place = f"`$.cases[0].launches[0].accuracy.{metric}`"
    with pytest.raises(ValueError, match=r"Expected 1, which the predictions give, got 0\.25") as caught:
        _parsed(document)
    assert place in str(caught.value)
