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
    "cuda_graphs": "off",
    "execution": "compile",
    "gpu_memory_bytes": 2**30,
    "dataset": "bundled",
    "dataset_sha256": "0" * 64,
    "tokenizer_sha256": "1" * 64,
    "limit": 10,
    "task": "another",
}


def test_the_id_names_strategy_and_batch_size() -> None:
    """The id is short, as in `mp-bs8`."""
    assert make_case(strategy="mp", batch_size=8).id == "mp-bs8"


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
    assert (make_case().series == make_case(**{name: _CHANGES[name]}).series) is (name in {"batch_size", "execution"})


def test_the_key_survives_a_report() -> None:
    """A case that was written and read has the same key."""
    case = make_case(strategy_options={"tokens": 512, "fused": True, "path": None})
    assert msgspec.json.decode(msgspec.json.encode(case), type=Case).key == case.key


def test_keys_do_not_change_between_versions() -> None:
    """With other keys, no report could be compared with an older baseline."""
    assert make_case().key == "7875d216a2164baf61385223694bd9fb625768556f1cdd359346108e8133ceff"


@pytest.mark.parametrize("name", sorted(_CHANGES))
def test_batch_size_dataset_and_task_do_not_need_another_loaded_model(name: str) -> None:
    """A loaded model serves every batch size, dataset and task; every other setting needs new processes."""
    shared = name in {"batch_size", "execution", "dataset", "dataset_sha256", "limit", "task"}
    assert (make_case().loading == make_case(**{name: _CHANGES[name]}).loading) is shared
