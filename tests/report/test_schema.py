from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from support.report_factory import make_document, make_full_report, make_report

from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.schema import schema

_AVOIDED = re.compile(r"\b(told|anew|reckon\w*|for want of|held against|yardsticks?|surer)\b", re.IGNORECASE)
"""Words that the documentation of this project does not use."""


def _descriptions() -> Iterator[tuple[str, str]]:
    """Yield each place of the schema with its description; an empty one where it has none."""
    for name, record in schema()["$defs"].items():
        yield name, record.get("description", "")
        for field, properties in record.get("properties", {}).items():
            yield f"{name}.{field}", properties.get("description", "")


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
    del document["cases"][0]["launches"][0]["work"]["eager_batches"]
    del document["capacity"]
    jsonschema.validate(document, schema())


def test_every_record_and_field_is_described_in_full_sentences() -> None:
    """A reader of `llmgpu schema` finds the unit and the meaning of every figure in plain English."""
    described = dict(_descriptions())
    assert len(described) > 200
    assert [place for place, text in described.items() if not re.fullmatch(r"[A-Z].*\.", text)] == []
    assert [place for place, text in described.items() if _AVOIDED.search(text)] == []


def test_without_sources_the_schema_lacks_only_descriptions_of_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """The docstrings under fields are in the source only, which an installation of bytecode does not have."""

    def missing(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", missing)
    jsonschema.validate(make_document(make_full_report()), schema())
