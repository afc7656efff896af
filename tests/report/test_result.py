from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from support.report_factory import GIB, make_accuracy, make_failed, make_memory, make_profile, make_result

from pytest_llmgpu.report.result import Batches, CaseResult, Failure, Launch, Outcome


def test_a_result_survives_json_with_everything_in_it() -> None:
    """A result that was written and read is equal, including its samples."""
    result = make_result(3.0, make_accuracy(items=5), make_profile(2), make_memory(2), batch_size=4)
    assert msgspec.json.decode(msgspec.json.encode(result), type=CaseResult) == result


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_every_outcome_survives_json(outcome: Outcome) -> None:
    """Every outcome can be written and read."""
    failure = Failure(phase="forward", rank=1, message="why", requested_bytes=GIB, free_bytes=0)
    result = make_failed(outcome, failure)
    assert msgspec.json.decode(msgspec.json.encode(result), type=CaseResult) == result


def test_an_outcome_that_does_not_exist_is_refused() -> None:
    """A report with a misspelt outcome is an error."""
    data = msgspec.json.encode(make_failed("oom")).replace(b'"oom"', b'"oomph"')
    with pytest.raises(msgspec.ValidationError, match=r"oomph.*outcome"):
        msgspec.json.decode(data, type=CaseResult)


def test_a_missing_value_is_null_and_not_absent() -> None:
    """A failed case has every field of a record."""
    fields = msgspec.to_builtins(make_failed("skipped_after_oom"))
    assert set(fields) == set(CaseResult.__struct_fields__)
    assert fields["inference_s"] is None


def test_two_records_share_no_list() -> None:
    """A batch of one launch does not appear in another."""
    first, second = Launch(), Launch()
    first.batches.latency_s.append(1.0)
    first.why["profile"] = "no NVML"
    assert second.batches == Batches()
    assert second.why == {}
