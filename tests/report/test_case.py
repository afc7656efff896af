from __future__ import annotations

import msgspec
import pytest
from support.report_factory import make_case

from pytest_llmgpu.report.case import Case, next_id


def test_the_id_names_strategy_and_batch_size() -> None:
    """The id is short, as in `mp-bs8`."""
    assert make_case(strategy="mp", batch_size=8).id == "mp-bs8"
    assert make_case(strategy="tp", batch_size=8, workload="generate").id == "tp-generate-bs8"


def test_a_second_measurement_gets_a_number() -> None:
    """Ids of results are unique."""
    assert next_id(["mp-bs8", "mp-bs8#2"], make_case(batch_size=8)) == "mp-bs8#3"
    assert next_id(["mp-bs8"], make_case(batch_size=16)) == "mp-bs16"


@pytest.mark.parametrize("name", Case.__struct_fields__)
def test_a_field_changes_key_series_and_loading(name: str) -> None:
    """How ranks were started and forwards ran is no setting; a loaded model serves every batch size and dataset."""
    default, changed = make_case(), make_case(**{name: "changed"})
    same = {"execution", "launcher"}
    assert (default.key == changed.key) is (name in same)
    assert (default.series == changed.series) is (name in same | {"batch_size"})
    data = {"dataset", "dataset_sha256", "limit", "task", "workload", "scoring", "prompt_tokens", "new_tokens"}
    assert (default.loading == changed.loading) is (name in same | {"batch_size"} | data)


def test_a_field_of_another_version_does_not_change_the_key() -> None:
    """An older report lacks fields, which then have their defaults; a newer one has fields that are not known."""
    case = make_case(limit=10, strategy_options={"tokens": 512, "fused": True, "path": None})
    fields = msgspec.to_builtins(case)
    required = {field.name for field in msgspec.structs.fields(Case) if field.required}
    older = {name: fields[name] for name in (*required, "limit", "strategy_options")}
    for other in (older, {**fields, "a_new_field": 1}):
        assert msgspec.convert(other, Case).key == case.key


def test_keys_do_not_change_between_versions() -> None:
    """Scripts can join reports by their keys: fields of each type, and no field that has its default."""
    assert make_case().key == "c736f18c6448649dd909c279dd3f345fdce98e4c6458e2113e4126f634b9b40c"
    texts = ("backend", "workload", "scoring", "revision", "load_format", "cuda_graphs", "task", "attention")
    numbers = ("seed", "nodes", "gpu_memory_bytes", "limit", "prompt_tokens", "new_tokens")
    others = {"strategy_options": {"replace": True}, "add_bos": False}
    case = make_case(**dict.fromkeys(texts, "other"), **dict.fromkeys(numbers, 7), **others)
    assert case.key == "65d39ca5ff5c824088820f712e338dbbd94c5c161ced88dbb7b084e9fbc34607"


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
