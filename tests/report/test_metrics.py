"""The table of metrics is whole: what reads it finds what it needs in every row."""

from __future__ import annotations

import msgspec
import pytest
from support.report_factory import make_result, make_work

from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.metrics import JUDGED, METRICS, MetricSpec, spec_of
from pytest_llmgpu.report.result import Batches
from pytest_llmgpu.report.verdicts import Row

_JUDGED = [spec for spec in METRICS if spec.rule]


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_a_metric_is_judged_or_shown(spec: MetricSpec) -> None:
    """A row without a verdict has a figure; what is exported or followed has one, too."""
    assert spec.rule or spec.figure
    assert bool(spec.figure) >= bool(spec.exported or spec.trended)


@pytest.mark.parametrize("spec", _JUDGED, ids=lambda spec: spec.name)
def test_a_judged_metric_has_a_next_step_and_a_policy_with_its_defaults(spec: MetricSpec) -> None:
    """The reader of a regression gets a next step, and the policy starts from the table's threshold and gate.

    The threshold of wall time depends on the comparison, so that the policy has none.
    """
    assert spec.next_step.endswith(".")
    if spec.name != "outcome":
        rule = getattr(Policy(), spec.name)
        assert rule.gate == spec.gate
        assert (
            spec.name in {"time", "first_token", "token_time"}
            or spec.threshold is None
            or rule.threshold == spec.threshold
        )


def test_the_work_of_a_case_is_exported_for_one_sequence_or_forward() -> None:
    """Work passes run a few batches: FLOPs by sequence, calls by forward, of the batches that each pass ran."""
    result = make_result(batch_size=4)
    names = ("flops", "host_syncs", "kernels")
    figures = [spec_of(name).figure for name in names]
    assert [figure(result) for figure in figures if figure] == [None] * 3
    result.launches[0].work = make_work(eager_batches=[2])
    found = [one.value for figure in figures if figure and (one := figure(result))]
    assert found == [2 * 10**12 / 4, 2 * 4, 2 * 1000 / 2]
    result.launches[0].work = make_work()
    found = [one.value for figure in figures if figure and (one := figure(result))]
    assert found == [2 * 10**12 / 8, 2 * 4 / 2, 2 * 1000 / 2]
    result.launches[0].batches = Batches()
    assert spec_of("flops").figure is not None
    assert spec_of("flops").figure(result) is None  # type: ignore[misc]


def test_the_flops_of_a_text_are_those_of_its_prefill_and_its_steps() -> None:
    """The work passes have a prefill and one decode step."""
    result = make_result(batch_size=4, workload="generate", new_tokens=11)
    result.launches[0].work = make_work(eager_batches=[2])
    assert spec_of("flops").figure is not None
    assert spec_of("flops").figure(result) is None  # type: ignore[misc]
    result.launches[0].prefill_work = make_work(ranks=4, eager_batches=[2])
    assert spec_of("flops").figure(result).value == (4 + 10 * 2) * 10**12 / 4  # type: ignore[misc,union-attr]


def test_names_are_unique() -> None:
    """No two rows share a name, a column, a label or a measure."""
    exported = [spec.exported for spec in METRICS if spec.exported]
    for names in (
        [spec.name for spec in METRICS],
        [one.column for one in exported],
        [one.label for one in exported if one.label],
        [one.measure for one in exported if one.measure],
    ):
        assert len(set(names)) == len(names)


def test_a_verdict_on_an_unknown_metric_is_refused() -> None:
    """A row of a report names a metric of the table."""
    row = {"key": "k", "id": "mp-bs1", "metric": "speed", "verdict": "OK", "reason": "none."}
    with pytest.raises(msgspec.ValidationError, match="speed"):
        msgspec.convert(row, Row)
    for name in JUDGED:
        assert msgspec.convert({**row, "metric": name}, Row).metric == name
