"""The self-test of a gate: regressions are injected into copies of a report, and the gate must detect each of them.

A copy has the noise of its original, so that a regression is easier to detect than in another run. A slowdown therefore
counts as detected only if it is at least the smallest slowdown that the launches of the report show.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.gate import noise_model, policy_file
from pytest_llmgpu.gate.calibration import Calibration
from pytest_llmgpu.gate.classify import fails
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.selftest.injected_regressions import Regression, regressions
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import WORSE, Row, Verdict, Verdicts


class Missed(msgspec.Struct, frozen=True, kw_only=True):
    """A case in which a regression is not detected, or an unchanged copy is worse."""

    id: str
    """Id of the case."""
    metric: MetricName
    """The metric that the regression changes."""
    verdict: Verdict | None = None
    """The verdict on that metric; None if nothing could be injected or compared."""
    reason: str
    """The reason why the regression is not detected."""
    launches_needed: int | None = None
    """Minimum launches required in each report to detect the slowdown with 95 % probability at the expected noise. None
    above 1,000, where the report has as many, and for other regressions."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one regression, which was injected into each suitable case."""

    plant: str
    """Name of the regression."""
    text: str
    """Description of the regression in a few words."""
    metric: MetricName
    """The metric that the regression changes."""
    cases: int
    """Number of cases with the regression."""
    missed: list[Missed] = []
    """The cases in which the regression is not detected."""
    caught: bool
    """True if there are cases and the regression is detected in all of them."""


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """True if a gate with this policy detects regressions in a report."""

    policy: str
    """The policy as TOML."""
    policy_sha256: str
    """SHA-256 of the text of `policy`."""
    ok: bool
    """True if every regression is detected and an unchanged copy is not worse."""
    compared: int
    """Number of rows of the unchanged copy that were compared."""
    control: list[Missed] = []
    """The rows in which the unchanged copy is worse."""
    trials: list[Trial] = []
    """The result of each regression."""
    left_out: list[str] = []
    """The names of the regressions of figures that no case of the report has, such as memory on a CPU."""
    not_gated: list[str] = []
    """The names of the regressions of metrics that the policy gates in no case."""


def selftest(
    report: Report,
    policy: Policy,
    *,
    today: datetime.date,
    calibration: Calibration | None = None,
    injected: Sequence[Regression] | None = None,
    in_turn: bool = False,
) -> SelfTest:
    """Inject each regression into a copy of a report and compare the copy with the report, which is not changed.

    Args:
        report: The report of a run.
        policy: The policy of the gate.
        today: The day on which known regressions expire.
        calibration: Noise between launches on this machine; None: the priors alone.
        injected: The regressions to inject; None: all.
        in_turn: True if launches of the baseline and of the candidate will alternate.
    """
    noise = calibration or Calibration()

    def judged(copy: Report) -> Verdicts:
        return judge(report, copy, policy, today=today, calibration=noise, in_turn=in_turn)

    control = judged(report)
    worse = [
        Missed(id=row.id, metric=row.metric, verdict=row.verdict, reason=row.reason)
        for row in control.rows
        if row.gated and row.verdict in WORSE
    ]
    chosen = regressions() if injected is None else injected
    trials: list[Trial] = []
    left_out: list[str] = []
    not_gated: list[str] = []
    for one in chosen:
        suited = [result for result in _completed(report) if one.suits is None or one.suits(result)]
        gated = [result for result in suited if _gates(policy, one, result)]
        if one.suits is not None and not suited:
            left_out.append(one.name)
        elif suited and not gated:
            not_gated.append(one.name)
        else:
            trials.append(_trial(one, _largest(gated) if one.largest_only else gated, report, policy, noise, judged))
    return SelfTest(
        policy=policy_file.dump(policy),
        policy_sha256=policy_file.sha256(policy),
        ok=bool(trials) and not worse and all(trial.caught for trial in trials),
        compared=control.armed.compared,
        control=worse,
        trials=trials,
        left_out=left_out,
        not_gated=not_gated,
    )


def _trial(
    regression: Regression,
    chosen: Sequence[CaseResult],
    report: Report,
    policy: Policy,
    noise: Calibration,
    judged: Callable[[Report], Verdicts],
) -> Trial:
    """Inject a regression into one copy of a report, in the chosen cases."""
    copies = {result.id: regression.inject(result, policy.rules(result)) for result in chosen}
    cases = [copy if isinstance(copy := copies.get(result.id), CaseResult) else result for result in report.cases]
    verdicts = judged(msgspec.structs.replace(report, cases=cases))
    rows = {case: row for row in verdicts.rows if row.metric == regression.metric for case in row.cases or [row.id]}
    families = Counter(row.gated for row in verdicts.rows if row.smallest_seen is not None)
    missed = []
    for result in chosen:
        copy, row = copies[result.id], rows.get(result.id)
        reason = _why_missed(regression, copy, row, policy)
        if reason is not None:
            compared = row if isinstance(copy, CaseResult) else None
            needed = None
            if compared is not None and compared.n is not None and compared.smallest_seen is not None:
                needed = _launches_needed(regression, result, compared, policy, noise, families[compared.gated])
                needed = needed if needed is not None and compared.n < needed else None
            missed.append(
                Missed(
                    id=result.id,
                    metric=regression.metric,
                    verdict=compared.verdict if compared is not None else None,
                    reason=reason,
                    launches_needed=needed,
                )
            )
    return Trial(
        plant=regression.name,
        text=regression.text,
        metric=regression.metric,
        cases=len(chosen),
        missed=missed,
        caught=bool(chosen) and not missed,
    )


def _why_missed(regression: Regression, copy: CaseResult | str, row: Row | None, policy: Policy) -> str | None:
    """Return the reason why a regression is not detected in a case; None if it is detected."""
    if isinstance(copy, str):
        return copy
    if row is None:
        return f"The {regression.metric} of the case cannot be compared."
    if row.known is not None:
        return f"The policy accepts this regression: {row.known}."
    if row.verdict not in WORSE or not fails(row, policy):
        return row.reason.splitlines()[0]
    by_chance = regression.slowdown is not None and (row.smallest_seen or 0.0) > regression.slowdown
    noise = "It is detected only because a copy has the noise of its original: another run needs more launches."
    return noise if by_chance else None


def _launches_needed(
    regression: Regression, result: CaseResult, row: Row, policy: Policy, noise: Calibration, family: int
) -> int | None:
    """Return how many launches in each report detect a slowdown at the expected noise; None above 1,000."""
    assert regression.slowdown is not None
    assert row.threshold is not None
    metric: Literal["device_time", "time"] = "device_time" if regression.metric == "device_time" else "time"
    prior = noise_model.prior_of_case(noise_regime.noisiest(metric, result), policy.noise, result)
    return noise_model.launches_needed(
        prior.calibrated(noise.of(result.key, regression.metric)),
        slowdown=regression.slowdown,
        threshold=row.threshold,
        # As in the gate: each rank is a test of its own.
        family=family * (max(len(launch.ranks) for launch in result.launches) if metric == "device_time" else 1),
        confidence=policy.confidence,
    )


def _gates(policy: Policy, regression: Regression, result: CaseResult) -> bool:
    """Return whether the policy gates the metric of a regression in a case. An outcome has no rule and counts."""
    rule = getattr(policy.rules(result), regression.metric, None)
    return rule is None or rule.gate


def _completed(report: Report) -> list[CaseResult]:
    return [result for result in report.cases if result.outcome == "completed"]


def _largest(results: Sequence[CaseResult]) -> list[CaseResult]:
    """Return the result of the largest batch size of each series."""
    ascending = sorted(results, key=lambda result: result.case.batch_size)
    return list({result.case.series: result for result in ascending}.values())
