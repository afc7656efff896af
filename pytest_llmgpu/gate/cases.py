"""The verdicts on all cases: the outcome first, then each metric of a completed case, then the series."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.environments import hardware_differences, software_differences
from pytest_llmgpu.analysis.noise_regime import NoiseRegime
from pytest_llmgpu.gate import answers, times
from pytest_llmgpu.gate.answers import Answered, below_floor
from pytest_llmgpu.gate.calibration import Calibration
from pytest_llmgpu.gate.cause import with_cause
from pytest_llmgpu.gate.exact import (
    by_series,
    exact_rows,
    execution_row,
    largest_batch_row,
    was_probed,
    with_distinct_names,
    worse,
)
from pytest_llmgpu.gate.matching import apart, pairs
from pytest_llmgpu.gate.policy import Policy, Rules, TimeRule
from pytest_llmgpu.gate.times import GPU_SD, Prior, Timed, comparable, prior_of, prior_of_case
from pytest_llmgpu.report.derived import of_prefill
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.report import Report, started
from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult
from pytest_llmgpu.report.verdicts import ALSO_CHANGED, NEITHER, Decided, Row

_BROKEN = {"timeout": "exceeded its time limit", "crashed": "crashed", "error": "ended with an error"}

_NAMED = 3
"""Most differences that a reason names."""

_OF_SCORING = [("time", times.WALL_TIMES["time"])]
"""The wall times of a case that scores: it has no tokens."""

_WIDTH = 200
"""Most characters of a failure's message in a reason."""


class Comparison:
    """The verdicts on all cases, and the reasons where there is none."""

    def __init__(
        self, base: Report | None, head: Report, policy: Policy, calibration: Calibration, *, in_turn: bool = False
    ) -> None:
        """Compare every case of a report with the baseline's.

        Args:
            base: The baseline; None: there is none.
            head: The candidate.
            policy: Thresholds and priors.
            calibration: Noise between launches of this machine.
            in_turn: True if launches of both reports alternated.
        """
        self.base, self.head, self.policy, self.calibration = base, head, policy, calibration
        self.unarmed: Counter[str] = Counter()
        """Reason why a metric of a case has no row, to the number of such metrics."""
        self.gaps: Counter[str] = Counter()
        """The part of `unarmed` that the policy gates."""
        self.copied = 0
        """The number of cases whose launches in the candidate are launches of the baseline."""
        self.left_out: Counter[str] = Counter()
        """Reason why a case has no row at all, to the number of such cases."""
        self._entries: list[Row | Timed] = []
        self._answered: list[Answered] = []
        self._compared: dict[str, tuple[CaseResult, CaseResult]] = {}
        self._plain = not policy.override
        self._deselected = frozenset(head.session.deselected)
        self._ran = frozenset(result.nodeid for result in head.cases)
        environments = (base.environment if base is not None else head.environment, head.environment)
        self._hardware = {device: hardware_differences(*environments, device) for device in ("cpu", "cuda")}
        then, now = ({gpu.uuid for gpu in one.gpus} for one in environments)
        self._same_gpus = then == now
        self._in_turn = in_turn
        self.rows = self._compare()
        """Every row: case by case, then the series."""

    def _compare(self) -> list[Row]:
        before = self.base.cases if self.base is not None else []
        matched, self._apart = pairs(before, self.head.cases), apart(before, self.head.cases)
        gone: list[CaseResult] = []
        for pair in matched:
            if pair.head is None:
                assert pair.base is not None
                gone.append(pair.base)
            else:
                self._case(pair.base, pair.head, pair.differing)
        self._entries += answers.rows(self._answered, self.policy.confidence, self._note())
        then, now = by_series(before), by_series(self.head.cases)
        for result in gone:
            if was_probed(result, now, self.head.cases):
                self.left_out["a probe for the largest batch size"] += 1
            else:
                self._gone(result)
        for key, series in now.items():
            if key in then and not self._hardware[_device(series.result)]:
                gated = self._rules(series.result).largest_batch.gate
                if (row := largest_batch_row(then[key], series, gated=gated)) is not None:
                    self._entries.append(row)
        return self._finished()

    def _case(self, base: CaseResult | None, head: CaseResult, differing: Sequence[str]) -> None:
        rules = self._rules(head)
        hardware = self._hardware[_device(head)]
        if head.outcome in _BROKEN:
            also = ", as in the baseline" if base is not None and base.outcome == head.outcome else ""
            message = f"\n{head.failure.message}" if head.failure is not None else ""
            self._outcome(head, "REGRESSED", f"The case {_BROKEN[head.outcome]}{also}.{_one_line(message)}")
        elif head.outcome == "interrupted":
            self._outcome(head, "UNDECIDED", "The case was interrupted: measure it again.")
        elif base is None:
            nothing = self.base is None
            reason = "There is no baseline." if nothing else "The baseline lacks this case."
            self._alone(head, rules, "NEW", reason)
        elif differing or hardware:
            text = "; ".join([*dict.fromkeys([*differing, *hardware])][:_NAMED])
            self._alone(head, rules, "NOT_COMPARABLE", f"The measurements differ from the baseline's: {text}.")
        elif base.outcome in OUT_OF_MEMORY or head.outcome in OUT_OF_MEMORY:
            self._capacity(base, head, rules)
        elif base.outcome != "completed":
            reason = f"The baseline's case {_BROKEN.get(base.outcome, 'was interrupted')}: there is nothing to compare."
            self._alone(head, rules, "NEW", reason)
        else:
            self._metrics(base, head, rules)

    def _capacity(self, base: CaseResult, head: CaseResult, rules: Rules) -> None:
        if head.outcome == "completed":
            self._alone(head, rules, "IMPROVED", "The batch size fits in memory; in the baseline it did not.")
        elif base.outcome == "completed":
            how = "Out of memory" if head.outcome == "oom" else "Skipped, since a smaller batch size is out of memory"
            message = f"\n{head.failure.message}" if head.failure is not None else ""
            self._outcome(head, "REGRESSED", f"{how}; in the baseline the case completed.{_one_line(message)}")
        elif base.outcome in OUT_OF_MEMORY:
            self._outcome(head, "OK", "Out of memory, as in the baseline.")
        else:
            self._outcome(head, "NEW", "Out of memory; the baseline's case failed.")

    def _metrics(self, base: CaseResult, head: CaseResult, rules: Rules) -> None:
        self._compared[head.id] = base, head
        if (execution := execution_row(base, head, gated=rules.execution.gate)) is not None:
            self._entries.append(execution)
        self._times(base, head, rules)
        self._answers(base, head, rules)
        for metric, found in exact_rows(base, head, rules):
            self._take(metric, found, gated=metric != "path" and found != NEITHER and getattr(rules, metric).gate)

    def _answers(self, base: CaseResult, head: CaseResult, rules: Rules) -> None:
        if head.case.generates:
            self._floor(head, rules)  # Texts have no accuracy: they are right or wrong by themselves.
            return
        found = answers.answered(base, head, rules.accuracy)
        if isinstance(found, Answered):
            self._answered.append(found)
            self._entries.append(answers.predictions_row(found, gated=rules.predictions.gate))
        else:
            if isinstance(found, str):
                self._floor(head, rules)
            self._take("accuracy", found, rules.accuracy.gate)

    def _on_other_days(self, base: CaseResult, head: CaseResult) -> bool:
        """Return whether launches of two results are of different days; never if launches alternated."""
        assert self.base is not None
        then, now = (
            {started(report, launch) for launch in result.launches}
            for report, result in ((self.base, base), (self.head, head))
        )
        return not self._in_turn and any(times.days_apart(one, other) for one in then for other in now)

    def _times(self, base: CaseResult, head: CaseResult, rules: Rules) -> None:
        sides = comparable(base, head)
        self.copied += base.launches == head.launches
        regime = noise_regime.noisiest("device_time", base, head)
        found = times.device_times(
            base,
            head,
            sides,
            rules.device_time,
            prior=self._prior("device_time", regime, base, head),
            regime=regime,
            other_day=self._on_other_days(base, head),
        )
        if found is not None:
            self._take("device_time", found, rules.device_time.gate)
        if isinstance(found, Timed) and head.case.generates:
            self._prefills(of_prefill(base), of_prefill(head), rules)
        regime = noise_regime.noisiest("time", base, head)
        prior = self._prior("time", regime, base, head)
        machine_sd = 0.0
        if not self._on_same_gpus(base, head):
            machine_sd = max(GPU_SD, prior_of(regime).s0)
        for metric, (latencies_s, _) in times.WALL_TIMES.items() if head.case.generates else _OF_SCORING:
            # The times of a case that generates are there wherever its batches are.
            if metric != "time" and not all(any(map(latencies_s, one.launches)) for one in (base, head)):
                continue
            rule: TimeRule = getattr(rules, metric)
            wall = times.wall_times(
                base,
                head,
                sides,
                rule,
                metric=metric,
                prior=prior,
                regime=regime,
                in_turn=self._in_turn,
                machine_sd=machine_sd,
            )
            self._take(metric, wall, rule.gate)

    def _prefills(self, base: CaseResult, head: CaseResult, rules: Rules) -> None:
        """Add the device times of prefills, if both reports have them. Computation is assumed to limit them.

        A calibration is of decode steps. It counts where it is the noisier one: the clock is the same.
        """
        built_in = prior_of_case("device_compute", base, head)
        found = times.device_times(
            base,
            head,
            comparable(base, head),
            rules.device_time,
            prior=max(built_in, self._prior("device_time", "device_compute", base, head), key=lambda one: one.s0),
            regime="device_compute",
            other_day=self._on_other_days(base, head),
        )
        if isinstance(found, Timed):
            self._entries.append(msgspec.structs.replace(found, prefill=True))

    def _on_same_gpus(self, base: CaseResult, head: CaseResult) -> bool:
        """Return whether both results are of the same GPUs; without a profile, those of the machines count."""
        then, now = _gpus(base), _gpus(head)
        return then == now if then and now else self._same_gpus

    def _prior(
        self, metric: Literal["device_time", "time"], regime: NoiseRegime, base: CaseResult, head: CaseResult
    ) -> Prior:
        return prior_of_case(regime, base, head).calibrated(self.calibration.of(head.key, metric))

    def _take(self, metric: MetricName, found: Row | Timed | str, gated: bool) -> None:
        if isinstance(found, str):
            self.unarmed[f"{metric}: {found}"] += 1
            if gated:
                self.gaps[f"{metric}: {found}"] += 1
        else:
            self._entries.append(found)

    def _alone(self, head: CaseResult, rules: Rules, verdict: Decided, reason: str) -> None:
        """Add why a case is not compared; its answers can be wrong by themselves."""
        self._outcome(head, verdict, reason)
        self._floor(head, rules)

    def _floor(self, head: CaseResult, rules: Rules) -> None:
        if (floor := below_floor(head, rules.accuracy)) is not None:
            step = next((found.next_step for found in head.findings if found.severity == "failure"), "")
            gated = rules.accuracy.gate
            self._entries.append(Row.of(head, "accuracy", "REGRESSED", floor, gated=gated, next_step=step))

    def _outcome(self, result: CaseResult, verdict: Decided, reason: str) -> None:
        self._entries.append(Row.of(result, "outcome", verdict, reason))

    def _gone(self, result: CaseResult) -> None:
        session = self.head.session
        if self._apart is not None:
            self._outcome(result, "NOT_COMPARABLE", self._apart)
        elif (excuse := self._excuse(result.nodeid)) is not None:
            self.left_out[excuse] += 1
        elif result.outcome != "completed" and result.outcome not in OUT_OF_MEMORY:
            self.left_out["the baseline's case failed and is absent"] += 1
        else:
            ended = "; the run was interrupted" if session.interrupted else ""
            self._outcome(
                result, "MISSING", f"The baseline has this case and the candidate does not{ended}: measure it again."
            )

    def _excuse(self, nodeid: str | None) -> str | None:
        """Return the reason why a test was not in the run; None where there is none, and where it ran."""
        if nodeid is not None and nodeid in self._deselected:
            return "deselected in this run"
        if nodeid is None or nodeid in self._ran:
            return None
        # An entry without `::` is no node id: it narrowed the run without a name for each test.
        entries = [entry for entry in self.head.session.deselected if "::" not in entry]
        if nodeid.partition("[")[0] in {(ran or "").partition("[")[0] for ran in self._ran}:
            # The function was named as a whole: only a named parameter, or --lf, leaves others out.
            entries = [entry for entry in entries if not entry.startswith("tests not named")]
        return next((f"left out: {entry}" for entry in entries), None)

    def _rules(self, result: CaseResult) -> Rules:
        return self.policy if self._plain else self.policy.rules(result)

    def _finished(self) -> list[Row]:
        note = self._note()
        judged = iter(times.rows([e for e in self._entries if isinstance(e, Timed)], self.policy.confidence, note))
        rows: list[Row] = []
        for entry in self._entries:
            row = next(judged) if isinstance(entry, Timed) else entry
            if isinstance(entry, Timed) and entry.prefill:
                rows[-1] = worse(rows[-1], row)
            else:
                rows.append(row)
        named = with_distinct_names(rows, self.head.cases)
        return [self._with_cause(row) for row in named]

    def _with_cause(self, row: Row) -> Row:
        if row.verdict == "OK" or self.base is None or row.id not in self._compared:
            return row
        names = self.base.environment.kernel_names, self.head.environment.kernel_names
        return with_cause(row, *self._compared[row.id], names=names)

    def _note(self) -> str:
        if self.base is None:
            return ""
        soft = software_differences(self.base.environment, self.head.environment)
        more = f" and {len(soft) - _NAMED} more" if len(soft) > _NAMED else ""
        return f"{ALSO_CHANGED}{'; '.join(soft[:_NAMED])}{more}." if soft else ""


def _gpus(result: CaseResult) -> set[str]:
    """Return the UUIDs of the GPUs that the launches of a result used."""
    return {device.uuid for profile in result.profiles for device in profile.devices}


def _device(result: CaseResult) -> str:
    return "cpu" if result.case.device == "cpu" else "cuda"


def _one_line(text: str) -> str:
    """Return a failure's message as the second line of a reason, shortened."""
    return f"\n{textwrap.shorten(text, _WIDTH, placeholder=' ...')}" if text.strip() else ""
