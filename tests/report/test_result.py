from __future__ import annotations

import msgspec
import pytest
from support.report_factory import make_failed

from pytest_llmgpu.report.result import CaseResult


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
