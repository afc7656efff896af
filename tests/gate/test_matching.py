from __future__ import annotations

from typing import Any

import pytest
from support.report_factory import make_report, make_result

from pytest_llmgpu.gate.judge import pairs
from pytest_llmgpu.report.file import encode, parse
from pytest_llmgpu.report.result import CaseResult


def _named(name: str, **fields: Any) -> CaseResult:
    result = make_result(**fields)
    result.id = name
    return result


def test_cases_match_by_key_whatever_their_ids() -> None:
    """A run of fewer tests numbers its cases differently; the second one of a key is compared with the second."""
    base = [_named("mp-bs1"), _named("mp-bs1#2", model="other"), _named("mp-bs1#3", model="other")]
    head = [_named("mp-bs1", model="other"), _named("mp-bs1#2", model="other")]
    matched = pairs(base, head)
    assert [(pair.base, pair.head) for pair in matched] == [(base[1], head[0]), (base[2], head[1]), (base[0], None)]
    assert not any(pair.differing for pair in matched)


def test_one_id_and_another_case_differ_by_name() -> None:
    """Digests are cut; `execution` is an answer and no difference."""
    base = _named("mp-bs1", dtype="float16", dataset_sha256="a" * 64, execution="eager")
    head = _named("mp-bs1", dtype="bfloat16", dataset_sha256="b" * 64, execution="cuda_graphs")
    (pair,) = pairs([base], [head])
    assert pair.differing == ["dtype float16 -> bfloat16", "dataset_sha256 aaaaaaaaaaaa... -> bbbbbbbbbbbb..."]


def test_what_a_person_can_read_comes_before_digests() -> None:
    """The fingerprint of a folder is named as its files; the commit of a hub model is a revision."""
    base = _named("mp-bs1", revision="a" * 64, dataset_sha256="a" * 64, limit=None)
    head = _named("mp-bs1", revision="b" * 64, dataset_sha256="b" * 64, limit=16)
    (pair,) = pairs([base], [head])
    files = "files of the model folder (revision aaaaaaaaaaaa... -> bbbbbbbbbbbb...)"
    assert pair.differing[0] == "limit none -> 16"
    assert files in pair.differing
    (pair,) = pairs([_named("mp-bs1", revision="a" * 40)], [_named("mp-bs1", revision="b" * 40)])
    assert pair.differing == [f"revision {'a' * 40} -> {'b' * 40}"]


def test_the_attention_that_ran_is_named_where_no_option_chose_it() -> None:
    """An older report has no implementations: the option that is absent stays `none`."""
    base, head = _named("mp-bs1"), _named("mp-bs1", attention="eager")
    (pair,) = pairs([base], [head])
    assert pair.differing == ["attention none -> eager"]
    base.launches[-1].implementations = {"attention": "sdpa"}
    (pair,) = pairs([base], [head])
    assert pair.differing == ["attention sdpa -> eager"]
    head.launches.clear()  # a case that was skipped
    assert pairs([base], [head])[0].differing == ["attention sdpa -> eager"]


@pytest.mark.parametrize(("field", "value"), [("limit", 100), ("dataset_sha256", "b" * 64)])
def test_other_items_under_a_stored_key_that_is_equal_differ(field: str, value: Any) -> None:
    """A key is computed when a report is read; the stored one does not count."""
    base, head = make_report([_named("mp-bs1")]), make_report([_named("mp-bs1", **{field: value})])
    head.cases[0].key = base.cases[0].key
    base, head = (parse(encode(report, compressed=False), "report") for report in (base, head))
    (pair,) = pairs(base.cases, head.cases)
    assert [name.split()[0] for name in pair.differing] == [field]


def test_new_and_gone() -> None:
    """Each stands alone, the gone ones last."""
    gone, new = _named("mp-bs1"), _named("tp-bs1", strategy="tp")
    assert pairs([gone], [new]) == [(None, new, []), (gone, None, [])]


def test_two_tests_of_one_case_are_each_compared_with_their_own() -> None:
    """Leaving the first test out does not put the second in its place; a test that was renamed is found by its case."""
    base = [_named("mp-bs1"), _named("mp-bs1#2")]
    head = [_named("mp-bs1")]
    base[0].nodeid, base[1].nodeid, head[0].nodeid = "test_a", "test_b", "test_b"
    assert [(pair.base, pair.head) for pair in pairs(base, head)] == [(base[1], head[0]), (base[0], None)]
    head[0].nodeid = "test_renamed"
    assert [(pair.base, pair.head) for pair in pairs(base, head)] == [(base[0], head[0]), (base[1], None)]
