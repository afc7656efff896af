"""The JSON Schema of a report, for other tools. The docstrings of the records are its descriptions."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from pytest_llmgpu.report.report import SCHEMA_VERSION, Report


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a report as this version writes it.

    A field with a default is not required: a version grows by such fields, and its first reports lack them.
    """
    described = msgspec.json.schema(Report)
    documented = {record.__name__: _docstrings(record) for record in _records(msgspec.inspect.type_info(Report))}
    for name, record in described["$defs"].items():
        properties = record.get("properties", {})
        for field, text in documented.get(name, {}).items():
            properties[field]["description"] = text
    whole = described["$defs"]["Report"]
    whole["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    whole["required"].insert(0, "schema_version")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pytest-llmgpu report, version {SCHEMA_VERSION}",
    } | described


def _records(part: object) -> Iterator[type]:
    """Yield the records in a type, including itself, from msgspec's description of the type."""
    if isinstance(part, msgspec.inspect.StructType):
        yield part.cls
        for field in part.fields:
            yield from _records(field.type)
    elif isinstance(part, msgspec.inspect.UnionType):
        for choice in part.types:
            yield from _records(choice)
    elif isinstance(part, msgspec.inspect.ListType):
        yield from _records(part.item_type)
    elif isinstance(part, msgspec.inspect.DictType):
        yield from _records(part.value_type)


def _docstrings(record: type) -> dict[str, str]:
    """Return field name to docstring. Python keeps the docstrings of fields in the source only."""
    base = record.__base__
    found = {} if base is None or base is msgspec.Struct else _docstrings(base)
    try:
        [definition] = ast.parse(inspect.getsource(record)).body
    except OSError:  # installed without sources: the schema lacks the descriptions of fields only
        return {}
    assert isinstance(definition, ast.ClassDef)
    for field, below in itertools.pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
