from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.report_factory import make_accuracy, make_check, make_failed, make_result

from pytest_llmgpu.analysis.reference import missing, reference
from pytest_llmgpu.report.result import CaseResult


def _scored(strategy: str = "mp", batch_size: int = 1, **fields: Any) -> CaseResult:
    return make_result(1.0, make_accuracy(items=5), strategy=strategy, batch_size=batch_size, **fields)


@pytest.mark.parametrize(
    ("sizes", "size", "chosen"),
    [([1, 8, 64], 8, 8), ([1, 4, 9], 8, 4), ([1, 9], 8, 1), ([64, 16], 8, 16), ([64], 1, 64), ([], 8, None)],
)
def test_the_same_batch_size_of_mp_is_compared_with(sizes: list[int], size: int, chosen: int | None) -> None:
    """Without it, the largest smaller batch size comes next, then the smallest larger one; a wrong case is the last."""
    cases = [_scored(batch_size=one) for one in sizes]
    found = reference(_scored("tp", size), cases)
    assert (found.case.batch_size if found else None) == chosen
    wrong = msgspec.structs.replace(_scored(batch_size=size), accuracy_check=make_check(ok=False))
    assert reference(_scored("tp", size), [*cases, wrong]) is (found or wrong)


def test_cases_that_compute_other_numbers_are_not_compared() -> None:
    """A difference may have another reason than the strategy. A GPU draws other random weights than a CPU."""
    names = ("workload", "model", "revision", "load_format", "dtype", "dataset_sha256", "tokenizer_sha256")
    others: list[dict[str, Any]] = [{name: "other"} for name in names]
    for fields in (*others, {"seed": 1}, {"limit": 1}, {"add_bos": False}):
        assert reference(_scored("tp"), [_scored(**fields)]) is None, fields
    dummy: dict[str, Any] = {"load_format": "dummy"}
    assert reference(_scored("tp", **dummy), [_scored(device="cpu", **dummy)]) is None
    assert reference(_scored("tp", **dummy), [_scored(devices=1, **dummy)]) is not None


def test_quantised_weights_are_compared_with_mp_of_theirs_then_with_plain_ones() -> None:
    """A case of mp itself is compared with plain weights alone."""
    plain, quantised, tp = _scored(), _scored(quantization="int8"), _scored("tp")
    case = _scored("tp", quantization="int8")
    assert reference(case, [plain, tp, _scored(quantization="int4"), quantised]) is quantised
    assert reference(case, [tp, plain]) is plain
    assert reference(quantised, [tp, plain, _scored(quantization="int4")]) is plain
    assert reference(plain, [quantised]) is None


@pytest.mark.parametrize(
    "fields",
    [{"devices": 1}, {"device": "cpu"}, {"backend": "other"}, {"gpu_memory_bytes": 1}, {"execution": "cuda_graphs"}],
)
def test_devices_and_execution_do_not_matter(fields: dict[str, Any]) -> None:
    """Two GPUs compute the same as one; a case on the same devices is preferred."""
    other = _scored(**fields)
    assert reference(_scored("tp"), [other]) is other
    same = _scored()
    assert reference(_scored("tp"), [other, same]) is (same if {"devices", "device"} & set(fields) else other)


@pytest.mark.parametrize(
    ("result", "earlier", "reason"),
    [
        (_scored(), [_scored()], "it is mp itself"),
        (make_failed("oom", strategy="tp"), [_scored()], "did not complete"),
        (make_result(1.0, strategy="tp"), [_scored()], "scored nothing"),
        (_scored("tp"), [make_failed("oom"), make_result(1.0)], "no case of mp completed"),
        (_scored("tp"), [_scored("tp"), _scored(dtype="float32")], "mp was not measured"),
        (_scored(quantization="int8"), [_scored(quantization="fp8")], "mp with plain weights was not measured"),
    ],
)
def test_a_missing_reference_has_its_reason(result: CaseResult, earlier: list[CaseResult], reason: str) -> None:
    """The reason is that of the case itself first."""
    assert reference(result, earlier) is None
    assert reason in missing(result, earlier)
