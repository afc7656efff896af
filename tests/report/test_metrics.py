"""The table of metrics is whole: what reads it finds what it needs in every row."""

from __future__ import annotations

import msgspec
import pytest
from support.report_factory import make_accuracy, make_check, make_result, make_work
from support.verdict_factory import with_launches

from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.metrics import METRICS, Figure, MetricSpec, spec_of
from pytest_llmgpu.report.result import Batches, CaseResult
from pytest_llmgpu.report.verdicts import Row

_JUDGED = [spec for spec in METRICS if spec.rule]


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_a_metric_is_judged_or_shown(spec: MetricSpec) -> None:
    """A row without a verdict has a figure; what is exported has one, too."""
    assert spec.rule or spec.figure
    assert bool(spec.figure) >= bool(spec.exported or spec.trend)


@pytest.mark.parametrize("spec", _JUDGED, ids=lambda spec: spec.name)
def test_a_judged_metric_has_a_next_step_and_a_policy_with_its_defaults(spec: MetricSpec) -> None:
    """The policy starts from the table; only the threshold of wall time depends on the comparison."""
    assert spec.next_step.endswith(".")
    if spec.name != "outcome":
        rule = getattr(Policy(), spec.name)
        assert rule.gate == spec.gate
        if spec.threshold is not None and spec.name not in {"time", "first_token", "token_time"}:
            assert rule.threshold == spec.threshold


def _values(result: CaseResult, *names: str) -> list[float | None]:
    return [None if (figure := spec_of(name).of(result)) is None else figure.value for name in names]


def test_the_work_of_a_case_is_exported_for_one_sequence_or_forward() -> None:
    """Work passes run a few batches: FLOPs by sequence, calls by forward, of the batches that each pass ran."""
    result = make_result(batch_size=4)
    assert _values(result, "flops", "host_syncs", "kernels") == [None] * 3
    result.launches[0].work = make_work(eager_batches=[2])
    assert _values(result, "flops", "host_syncs", "kernels") == [2 * 10**12 / 4, 2 * 4, 2 * 1000 / 2]
    result.launches[0].work = make_work()
    assert _values(result, "flops", "host_syncs", "kernels") == [2 * 10**12 / 8, 2 * 4 / 2, 2 * 1000 / 2]
    result.launches[0].batches = Batches()
    assert _values(result, "flops") == [None]


def test_the_flops_of_a_text_are_those_of_its_prefill_and_its_steps() -> None:
    """The work passes have a prefill and one decode step."""
    result = make_result(batch_size=4, workload="generate", new_tokens=11)
    result.launches[0].work = make_work(eager_batches=[2])
    assert _values(result, "flops") == [None]
    result.launches[0].prefill_work = make_work(ranks=4, eager_batches=[2])
    assert _values(result, "flops") == [(4 + 10 * 2) * 10**12 / 4]


def test_a_figure_has_the_range_over_launches() -> None:
    """The time is the median, between the fastest and the slowest launch; an incomplete case has no figures."""
    result = with_launches([1.0, 3.0, 2.0])
    result.inference_s, result.sequences_per_s = 420.0, 0.2
    assert spec_of("time").of(result) == Figure(unit="s", value=420.0, low=210.0, high=630.0)
    assert spec_of("sequences").of(result) == Figure(unit="sequences/s", value=0.2, low=64 / 630, high=64 / 210)
    result.launches = result.launches[:1]
    assert spec_of("time").of(result) == Figure(unit="s", value=420.0)
    result.launches = []
    assert spec_of("time").of(result) == Figure(unit="s", value=420.0)
    result.outcome = "timeout"
    assert spec_of("time").of(result) is None


def test_the_accuracy_is_that_of_the_check_and_not_of_random_weights() -> None:
    """The accuracy of random weights is chance."""
    result = make_result(accuracy=msgspec.structs.replace(make_accuracy(0.75, items=16), acc=0.5))
    assert spec_of("accuracy").of(result) == Figure(unit="acc_norm", value=0.75)
    result.accuracy_check = msgspec.structs.replace(make_check(), metric="acc")
    assert spec_of("accuracy").of(result) == Figure(unit="acc", value=0.5)
    result.case = msgspec.structs.replace(result.case, load_format="dummy")
    assert spec_of("accuracy").of(result) is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("time", 10264.3, "10,260 s"),
        ("traffic", 0.0, "0"),
        ("traffic", 999.9e6, "999.9 MB"),
        ("traffic", 1e9, "1 GB"),
        ("flops", 12345.0, "12,345 FLOP"),
        ("flops", 1e6, "1 MFLOP"),
        ("flops", 2.5e9, "2.5 GFLOP"),
        ("flops", 1e12, "1 TFLOP"),
        ("host_syncs", 1234.0, "1,234"),
        ("accuracy", 0.82825, "82.83 %"),
        ("memory", 2.0**31, "2.00 GiB"),
    ],
)
def test_a_number_is_written_with_its_unit(name: str, value: float, text: str) -> None:
    """The unit is the largest one that the number reaches."""
    assert spec_of(name).written(value) == text


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


def test_a_verdict_on_a_metric_of_another_version_is_shown() -> None:
    """Its report stays readable."""
    row = {"key": "k", "id": "mp-bs1", "metric": "speed", "verdict": "OK", "reason": "none."}
    assert msgspec.convert(row, Row).spec.rule is None
