from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from support.report_factory import known, make_document, make_full_report, make_report

from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.schema import schema
from pytest_llmgpu.report.verdicts import Baseline, Candidate

_AVOIDED = re.compile(r"\b(told|anew|reckon\w*|for want of|held against|yardsticks?|surer)\b", re.IGNORECASE)
"""Words that the documentation of this project does not use."""


@pytest.mark.parametrize("make", [make_full_report, make_report])
def test_a_report_fits_its_schema(make: Callable[[], Report]) -> None:
    """Other tools can rely on `llmgpu schema`."""
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    validator.validate(make_document(make()))


_ABSENT = object()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("schema_version",), 1),
        (("schema_version",), _ABSENT),
        (("environment",), _ABSENT),
        (("cases", 0, "outcome"), "fine"),
        (("cases", 0, "outcome"), _ABSENT),
        (("cases", 0, "launches", 0, "batches"), []),
        (("cases", 0, "launches", 0, "accuracy", "acc"), 82.8),
    ],
)
def test_the_schema_refuses_wrong_and_missing_values(place: tuple[Any, ...], value: object) -> None:
    """A wrong type, an unknown word, a figure out of bounds, or a field that every report of its version has."""
    document = make_document(make_full_report())
    part = document
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    if value is _ABSENT:
        del part[place[-1]]
    with pytest.raises(jsonschema.ValidationError, match=str(place[-1]) if value is _ABSENT else None):
        jsonschema.validate(document, schema())


def test_a_field_that_came_later_is_not_required() -> None:
    """A version grows by fields with a default: its first reports fit its schema too."""
    document = make_document(make_full_report())
    del document["cases"][0]["launches"][0]["work"]["model"]
    del document["capacity"]
    jsonschema.validate(document, schema())


def test_every_record_and_field_is_described_in_full_sentences() -> None:
    """A reader of `llmgpu schema` finds the unit and the meaning of every figure in plain English."""
    described: dict[str, str] = {}
    for name, record in schema()["$defs"].items():
        described[name] = record.get("description", "")
        for field, properties in record.get("properties", {}).items():
            described[f"{name}.{field}"] = properties.get("description", "")
    assert len(described) > 200
    assert [place for place, text in described.items() if not re.fullmatch(r"[A-Z].*\.", text)] == []
    assert [place for place, text in described.items() if _AVOIDED.search(text)] == []


_REPORTS = Path(__file__).parents[1] / "data" / "reports"

_SHA256 = {
    "schema-2-promoted.json": "33815e5c5d94c3e8166274b35454c4c0fc8ee562535b0768222fa305bbfdfe33",
    "schema-2.json": "5cec8676a47c1b2f3905b9d6b652cebc8c3335b3a148accce6ae6e527d42a93f",
}
"""File to its hash. If a test here fails, the reader is wrong, not the file."""


_CHANGED = {
    *(
        "argv",
        "capacity.prediction",
        "capacity.why",
        "verdicts.armed",
        "verdicts.calibration_sha256",
        "verdicts.policy_sha256",
    ),
    *("cases.markers", "cases.launches.profile.sampler_cpu_s", "cases.traffic.path.nvlink_shares"),
    *("verdicts.rows.alone", "cases.case.workload", "cases.key", "verdicts.rows.key", "verdicts.rows.verdict"),
    "cases.launches.work.ranks.kernels_sha256",
}
"""Fields that are no longer read, or have other names of their values."""


def _differing(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Yield each field of a JSON value that another one lacks, or has with another value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name, value in old.items():
            yield from _differing(value, new.get(name, ...), f"{place}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new, strict=True):
            yield from _differing(one, other, place)
    elif old != new:
        yield place.removeprefix(".")


@pytest.mark.parametrize("name", _SHA256)
def test_a_stored_report_keeps_its_figures(name: str, tmp_path: Path) -> None:
    """Its file is unchanged, and what this version writes of it fits the present schema and has equal values."""
    data = (_REPORTS / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == _SHA256[name]
    report = load(_REPORTS / name)
    dump(report, tmp_path / "new.json")
    assert load(tmp_path / "new.json") == report
    written = json.loads((tmp_path / "new.json").read_bytes())
    jsonschema.validate(written, schema())
    assert set(_differing(json.loads(data), written)) <= _CHANGED
    assert {result.case.workload for result in report.cases} == {"score"}


def test_the_verdicts_of_a_promoted_report_keep_their_meaning() -> None:
    """They are about the previous baseline and change no verdict on a candidate."""
    base = load(_REPORTS / "schema-2-promoted.json")
    verdicts = known(base.verdicts)
    assert verdicts.head == Candidate(created="2026-02-03T04:05:06Z", commit="c" * 40)
    assert verdicts.baseline == Baseline(name="baseline.json", sha256="cd" * 32, commit="b" * 40)
    time, *_ = verdicts.rows
    assert (time.key, time.nodeid, time.id) == (base.cases[0].key, base.cases[0].nodeid, "mp-bs1")
    assert (time.base, time.head, time.ratio) == pytest.approx((10.01, 10.46, 1.045), rel=1e-3)
    bare, today = msgspec.structs.replace(base, verdicts=None), datetime.date(2026, 2, 5)
    assert judge(base, base, Policy(), today=today) == judge(bare, bare, Policy(), today=today)
