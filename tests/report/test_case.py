from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.report_factory import make_case

from pytest_llmgpu.report.case import Case, next_id

_CHANGES: dict[str, Any] = {
    "strategy": "tp",
    "backend": "accelerate",
    "strategy_options": {"replace": True},
    "batch_size": 2,
    "workload": "prefill",
    "scoring": "harness",
    "model": "bundled",
    "revision": "abc",
    "load_format": "dummy",
    "seed": 1,
    "dtype": "float32",
    "device": "cpu",
    "devices": 1,
    "launcher": "ray",
    "nodes": 2,
    "cuda_graphs": "off",
    "execution": "compile",
    "gpu_memory_bytes": 2**30,
    "dataset": "bundled",
    "dataset_sha256": "0" * 64,
    "tokenizer_sha256": "1" * 64,
    "add_bos": False,
    "limit": 10,
    "task": "another",
    "attention": "eager",
    "prompt_tokens": 8,
    "new_tokens": 4,
}


def test_the_id_names_strategy_and_batch_size() -> None:
    """The id is short, as in `mp-bs8`."""
    assert make_case(strategy="mp", batch_size=8).id == "mp-bs8"
    assert make_case(strategy="tp", batch_size=8, workload="generate").id == "tp-generate-bs8"


def test_a_second_measurement_gets_a_number() -> None:
    """Ids of results are unique."""
    assert next_id(["mp-bs8", "mp-bs8#2"], make_case(batch_size=8)) == "mp-bs8#3"
    assert next_id(["mp-bs8"], make_case(batch_size=16)) == "mp-bs16"


def test_every_field_has_a_changed_value_in_this_file() -> None:
    """The tests below include every new field."""
    assert set(_CHANGES) == set(Case.__struct_fields__)


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_a_field_changes_key_series_and_loading(name: str) -> None:
    """Other settings are another measurement; how the ranks were started, and how the forwards ran, are none.

    A series is a curve over batch sizes. A loaded model serves every batch size, dataset and workload.
    """
    default, changed = make_case(), make_case(**{name: _CHANGES[name]})
    same = {"execution", "launcher"}
    assert (default.key == changed.key) is (name in same)
    assert (default.series == changed.series) is (name in same | {"batch_size"})
    data = {"dataset", "dataset_sha256", "limit", "task", "workload", "scoring", "prompt_tokens", "new_tokens"}
    assert (default.loading == changed.loading) is (name in same | {"batch_size"} | data)


def test_the_key_survives_a_report() -> None:
    """A case that was written and read has the same key."""
    case = make_case(strategy_options={"tokens": 512, "fused": True, "path": None})
    assert msgspec.json.decode(msgspec.json.encode(case), type=Case).key == case.key


def test_a_field_of_another_version_does_not_change_the_key() -> None:
    """An older report lacks fields, which then have their defaults; a newer one has fields that are not known."""
    case = make_case(limit=10)
    fields = msgspec.to_builtins(case)
    required = {field.name for field in msgspec.structs.fields(Case) if field.required}
    older = {name: value for name, value in fields.items() if name in required or name == "limit"}
    for other in (older, {**fields, "a_new_field": 1}):
        assert msgspec.convert(other, Case).key == case.key


def test_keys_do_not_change_between_versions() -> None:
    """Scripts can join reports by their keys: fields of each type, and no field that has its default."""
    assert make_case().key == "c736f18c6448649dd909c279dd3f345fdce98e4c6458e2113e4126f634b9b40c"
    assert make_case(**_CHANGES).key == "0588d94cc47b16095178af487e6bed078c233f79f9a6c25a1903dbf8a3cf3fc2"


@pytest.mark.parametrize(("stored", "scoring"), [("loglikelihood", "lean"), ("loglikelihood_full_logits", "harness")])
def test_a_stored_workload_has_its_present_name(stored: str, scoring: str) -> None:
    """A stored report and a new one of the same measurement have equal keys."""
    read = msgspec.convert({**msgspec.to_builtins(make_case()), "workload": stored}, Case)
    assert (read.workload, read.scoring) == ("score", scoring)
    assert read == make_case(scoring=scoring)
    assert read.key == make_case(scoring=scoring).key


def test_options_of_other_types_are_other_measurements() -> None:
    """1 and true are equal in Python, and their keys differ."""
    keys = {make_case(strategy_options={"x": value}).key for value in (1, True, 1.0, "1", None)}
    assert len(keys) == 5
