from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.report_factory import make_case

from pytest_llmgpu.report.case import Case

_CHANGES: dict[str, Any] = {
    "strategy": "tp",
    "backend": "accelerate",
    "strategy_options": {"replace": True},
    "batch_size": 2,
    "workload": "prefill",
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


def test_every_field_has_a_changed_value_in_this_file() -> None:
    """The tests below include every new field."""
    assert set(_CHANGES) == set(Case.__struct_fields__)


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_every_field_but_the_execution_changes_the_key(name: str) -> None:
    """Different settings are different measurements; the execution can be decided during the run."""
    assert (make_case().key == make_case(**{name: _CHANGES[name]}).key) is (name == "execution")


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_every_field_but_batch_size_and_execution_changes_the_series(name: str) -> None:
    """A series is a curve over batch sizes, with all other settings equal."""
    changed = make_case(**{name: _CHANGES[name]})
    of_series = name in {"batch_size", "execution"}
    assert (make_case().series == changed.series) is of_series
    assert (make_case().series_fields == changed.series_fields) is of_series


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
    before = {name: value for name, value in _CHANGES.items() if name != "attention"}
    older = {name: value for name, value in before.items() if name not in {"prompt_tokens", "new_tokens", "nodes"}}
    assert make_case(**older).key == "1b0b3be0aad2f519fa14ca425d4aef2c615217642487bf59cb470c180199f562"
    newer = {**older, **{name: _CHANGES[name] for name in ("prompt_tokens", "new_tokens")}}
    assert make_case(**newer).key == "e3bf16b15046bf53fca76b60e94fc4efb9ce7c8f15fbb2f84c6d21706b25b3aa"
    assert make_case(**before).key == "876828b3febb003e3af8988545d31c0b2b2979b8a36492148b79ef780f2d375a"


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_batch_size_dataset_and_workload_do_not_need_another_loaded_model(name: str) -> None:
    """A loaded model serves every batch size, dataset and workload; every other setting needs new processes."""
    shared = name in {
        *("batch_size", "execution", "dataset", "dataset_sha256", "limit", "task"),
        *("workload", "prompt_tokens", "new_tokens"),
    }
    assert (make_case().loading == make_case(**{name: _CHANGES[name]}).loading) is shared


def test_options_of_other_types_are_other_measurements() -> None:
    """1 and true are equal in Python, and their keys differ."""
    keys = {make_case(strategy_options={"x": value}).key for value in (1, True, 1.0, "1", None)}
    assert len(keys) == 5
