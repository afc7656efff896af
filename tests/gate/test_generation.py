"""The gate on cases that generate: their times, their check, and no accuracy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.report_factory import make_generation, make_report, make_result, make_work

from pytest_llmgpu.gate.headline import row_in_words
from pytest_llmgpu.gate.judge import Comparison
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import AccuracyCheck, Launch


def _report(*, first: float = 0.02, step: float = 0.01, wrong: bool = False, **fields: Any) -> Report:
    """Return a report of one case that generates texts of three tokens in 64 batches and four launches."""
    result = make_result(workload="generate", prompt_tokens=96, new_tokens=3, **fields)
    (plain,) = result.launches
    batches = len(plain.batches.latency_s)

    def launch(noise: float) -> Launch:
        generation = make_generation(
            [[1, 2, 3]],
            [[-1.0] * 3],
            [[-1.0] * 3],
            first_token_s=[first * noise] * batches,
            step_s=[step * noise] * 2 * batches,
        )
        return msgspec.structs.replace(plain, generation=generation)

    result.launches = [launch(noise) for noise in (0.999, 1.0, 1.001, 1.0)]
    if wrong:
        result.accuracy_check = AccuracyCheck(
            metric="m", value=1.0, baseline=0.0, source=None, tolerance=0.1, ok=False, text="texts are wrong"
        )
    return make_report([result])


def _judge(head: Report) -> Comparison:
    return Comparison(_report(), head, Policy())


@pytest.mark.parametrize(
    ("fields", "slower"),
    [({}, set()), ({"first": 0.026}, {"first_token"}), ({"step": 0.013}, {"token_time"})],
)
def test_the_time_to_first_token_and_the_time_per_token_are_judged(fields: dict[str, Any], slower: set[str]) -> None:
    """Each has a row of its own by the rule of wall time, so that a trade of one for the other is seen."""
    rows = {row.metric: row for row in _judge(_report(**fields)).rows}
    assert {name for name, row in rows.items() if row.result == "REGRESSED"} == slower
    assert rows["time"].verdict in {"OK", "UNDECIDED"}
    for name in slower:
        assert rows[name].ratio == pytest.approx(1.3, rel=0.01)
        assert rows[name].gated


def test_wrong_texts_are_a_regression_and_right_ones_need_no_accuracy() -> None:
    """A case that generates has no accuracy, which is no gap of the comparison."""
    judged = _judge(_report(wrong=True))
    assert [(row.metric, row.result) for row in judged.rows if row.metric == "accuracy"] == [("accuracy", "REGRESSED")]
    judged = _judge(_report())
    assert not [row for row in judged.rows if row.metric == "accuracy"]
    assert not [why for why in judged.not_compared if why.startswith("accuracy")]


@pytest.mark.parametrize(
    ("step", "prefill", "verdict", "of_prefill"),
    [
        (1.0, 1.0, "OK", False),
        (1.0, 1.032, "REGRESSED", True),
        (1.0, 0.968, "IMPROVED", True),
        (1.01, 0.968, "REGRESSED", False),
        (1.01, 1.032, "REGRESSED", True),
        (1.032, 1.01, "REGRESSED", False),
    ],
)
def test_the_worse_of_decode_step_and_prefill_stands(
    step: float, prefill: float, verdict: str, of_prefill: bool
) -> None:
    """The step alone would state that nothing changed; of two regressions the larger one is named."""

    def report(*factors: float) -> Report:
        found = _report()
        whole = make_work(1)
        ranks = [msgspec.structs.replace(whole.ranks[0], flops=round(1e6 * factor)) for factor in factors]
        works = [msgspec.structs.replace(whole, ranks=[rank]) for rank in ranks]
        for launch in found.cases[0].launches:
            launch.work, launch.prefill_work = works
        return found

    (row,) = (
        row for row in Comparison(report(1.0, 1.0), report(step, prefill), Policy()).rows if row.metric == "flops"
    )
    assert row.result == verdict
    assert row.prefill == of_prefill
    assert row.ratio == pytest.approx(prefill if of_prefill else step)


def _worked() -> Report:
    """Return a report with the work of prefills and decode steps."""
    found = _report()
    for launch in found.cases[0].launches:
        launch.work = launch.prefill_work = make_work()
    return found


def _later(report: Report) -> Report:
    """Return another run with equal times."""
    cases = [
        msgspec.structs.replace(
            case, launches=[msgspec.structs.replace(one, load_s=(one.load_s or 0.0) + 1.0) for one in case.launches]
        )
        for case in report.cases
    ]
    return msgspec.structs.replace(report, cases=cases)


@pytest.mark.parametrize("part", ["work", "prefill_work"])
def test_slower_kernels_of_prefills_are_found_as_those_of_decode_steps(part: str) -> None:
    """A slower prefill is found by its kernels although the decode steps are as fast."""
    base, head = _worked(), _worked()
    for launch in head.cases[0].launches:
        work = make_work()
        ranks = [
            msgspec.structs.replace(rank, device_time_s=[1.4 * one for one in rank.device_time_s or []])
            for rank in work.ranks
        ]
        setattr(launch, part, msgspec.structs.replace(work, ranks=ranks))
    rows = Comparison(base, head, Policy()).rows
    (worse,) = (row for row in rows if row.verdict == "REGRESSED")
    assert worse.metric == "device_time"
    assert worse.prefill == (part == "prefill_work")
    assert ("device time of the prefill +" in row_in_words(worse)) == (part == "prefill_work")


def test_the_device_time_of_a_case_is_seen_as_well_as_in_the_noisier_of_its_parts() -> None:
    """Prefills count as limited by computation, whose clock is random: the headline promises no more than they show."""
    base, alone = _worked(), _worked()
    for launch in alone.cases[0].launches:
        launch.prefill_work = None
    seen = [
        next(row.smallest_seen for row in Comparison(one, _later(one), Policy()).rows if row.metric == "device_time")
        for one in (alone, base)
    ]
    assert None not in seen
    assert seen[0] < seen[1]  # type: ignore[operator]  # no None
