"""Whether a gate can fail: losses are planted into copies of a report, and each has to be seen.

A copy shares the noise of its original, so that it shows more than a run of its own would. A slowdown counts as caught
only where the report has as many launches as would show it, at their noise, with 95 % probability.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence

import msgspec

from pytest_llmgpu.gate import policy_file
from pytest_llmgpu.gate.classify import fails
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.selftest.injected_regressions import Plant, plants
from pytest_llmgpu.gate.timing import pairing
from pytest_llmgpu.gate.timing.calibration import Calibration
from pytest_llmgpu.gate.timing.pairing import Timed
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import WORSE, Row, Verdict, Verdicts

__all__ = ["Missed", "SelfTest", "Trial", "selftest"]


class Missed(msgspec.Struct, frozen=True, kw_only=True):
    """A case in which a loss is not seen, or, in an unchanged copy, one that is."""

    id: str
    metric: MetricName
    verdict: Verdict | None = None
    """What the gate says; None where nothing could be planted or judged."""
    reason: str
    launches_needed: int | None = None
    """Launches a side that show the slowdown with 95 % probability; None above 1,000, and for all else."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One loss, planted in every case that should show it."""

    plant: str
    text: str
    metric: MetricName
    cases: int
    """That should show it."""
    missed: list[Missed] = []
    caught: bool
    """Whether all of them do, and there is one."""


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a policy can fail on a report."""

    policy: str
    """The policy in force, as TOML."""
    policy_sha256: str
    ok: bool
    """Whether every loss is caught, and an unchanged copy loses nothing."""
    compared: int
    """Rows of the unchanged copy in which one thing was held against another."""
    control: list[Missed] = []
    """What the unchanged copy loses."""
    trials: list[Trial] = []


def selftest(
    report: Report,
    policy: Policy,
    *,
    today: datetime.date,
    calibration: Calibration | None = None,
    losses: Sequence[Plant] | None = None,
) -> SelfTest:
    """Plant each loss into a copy of a report and hold it against the report itself, which stays as it is.

    Args:
        report: what a run measured.
        policy: in force.
        today: day on which known regressions expire.
        calibration: noise between launches of this runner; None: as `assumed_sd` has it.
        losses: what to plant; None: all there is.
    """
    court = _Court(report, policy, today, calibration or Calibration())
    control = court.judged(report)
    lost = [
        Missed(id=row.id, metric=row.metric, verdict=row.verdict, reason=row.reason)
        for row in control.rows
        if row.gated and row.verdict in WORSE
    ]
    trials = [court.trial(plant) for plant in (plants() if losses is None else losses)]
    return SelfTest(
        policy=policy_file.dump(policy),
        policy_sha256=policy_file.sha256(policy),
        ok=not lost and all(trial.caught for trial in trials),
        compared=control.armed.compared,
        control=lost,
        trials=trials,
    )


class _Court:
    """A report that copies are held against."""

    def __init__(self, report: Report, policy: Policy, today: datetime.date, noise: Calibration) -> None:
        self.report, self.policy, self.today, self.noise = report, policy, today, noise

    def judged(self, copy: Report) -> Verdicts:
        return judge(self.report, copy, self.policy, today=self.today, calibration=self.noise)

    def trial(self, plant: Plant) -> Trial:
        chosen = _largest(self.report) if plant.largest_only else _completed(self.report)
        sown = {result.id: plant.sow(result, self.policy.rules(result)) for result in chosen}
        copies = {name: copy for name, copy in sown.items() if isinstance(copy, CaseResult)}
        cases = [copies.get(result.id, result) for result in self.report.cases]
        said = self.judged(msgspec.structs.replace(self.report, cases=cases))
        rows = {row.id: row for row in said.rows if row.metric == plant.metric}
        families = Counter(row.gated for row in rows.values() if row.p is not None)
        found = [self._missed(plant, result, sown[result.id], rows.get(result.id), families) for result in chosen]
        missed = [one for one in found if one is not None]
        return Trial(
            plant=plant.name,
            text=plant.text,
            metric=plant.metric,
            cases=len(chosen),
            missed=missed,
            caught=bool(chosen) and not missed,
        )

    def _missed(
        self, plant: Plant, result: CaseResult, copy: CaseResult | str, row: Row | None, families: Counter[bool]
    ) -> Missed | None:
        """Return why a case does not show a loss; None where it does."""
        if isinstance(copy, str) or row is None:
            reason = copy if isinstance(copy, str) else f"its {plant.metric} cannot be compared."
            return Missed(id=result.id, metric=plant.metric, reason=reason)
        seen, needed, reason = row.verdict in WORSE and fails(row, self.policy), None, ""
        if plant.slowdown is not None and row.n is not None:
            needed = self._launches(plant.slowdown, result, copy, families[row.gated])
            if seen and (needed is None or row.n < needed):
                seen = False
                reason = "a copy shows it, since it has the noise of its original; a run of its own may not."
        if seen:
            return None
        if not row.gated:
            reason = f"the policy does not gate {row.metric}."
        elif row.known is not None:
            reason = f"the policy lets it pass: {row.known}."
        return Missed(
            id=row.id,
            metric=row.metric,
            verdict=row.verdict,
            reason=reason or row.reason.splitlines()[0],
            launches_needed=_asked(needed, row.n),
        )

    def _launches(self, slowdown: float, result: CaseResult, copy: CaseResult, cases: int) -> int | None:
        rule = self.policy.rules(result).time
        noise = self.noise.of(result.key), self.noise.between_sessions(result.key)
        timed = pairing.timed(result, copy, rule, *noise)
        assert isinstance(timed, Timed), "it has been judged"
        # One launch does show what is larger than noise: that an outlier may hide it is no matter of the gate's.
        return pairing.launches_for(timed, slowdown, self.policy.confidence, cases, least=1)


def _asked(needed: int | None, there: int | None) -> int | None:
    """Return how many launches are asked for; None where there are as many: then something else is missing."""
    if needed is None or there is None:
        return None
    asked = max(pairing.FEWEST, needed)
    return asked if there < asked else None


def _completed(report: Report) -> list[CaseResult]:
    return [result for result in report.cases if result.outcome == "completed"]


def _largest(report: Report) -> list[CaseResult]:
    """Return the completed result of the largest batch size of each series."""
    found: dict[str, CaseResult] = {}
    for result in sorted(_completed(report), key=lambda result: result.case.batch_size):
        found[result.case.series] = result
    return list(found.values())
