"""The JSON Schema of a report, for other tools. The docstrings of the records are its descriptions."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

import msgspec

from pytest_llmgpu.report import case, report, result, verdicts, work
from pytest_llmgpu.report.report import SCHEMA_VERSION, Report

_MODULES = (case, report, result, verdicts, work)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a report as this version writes it.

    A field with a default is not required: a version grows by such fields, and its first reports lack them.
    """
    described = msgspec.json.schema(Report)
    records = {name: one for module in _MODULES for name, one in vars(module).items() if isinstance(one, type)}
    for name, record in described["$defs"].items():
        for field, text in _docstrings(records[name]).items():
            record["properties"][field]["description"] = text
    whole = described["$defs"]["Report"]
    whole["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    whole["required"].insert(0, "schema_version")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pytest-llmgpu report, version {SCHEMA_VERSION}",
    } | described


def _docstrings(record: type) -> dict[str, str]:
    """Return field name to docstring. Python keeps the docstrings of fields in the source only."""
    base = record.__base__
    found = {} if base is None or base is msgspec.Struct else _docstrings(base)
    [definition] = ast.parse(inspect.getsource(record)).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in itertools.pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
