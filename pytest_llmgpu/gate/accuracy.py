"""Accuracy: items lost and won at the batch sizes of a series; the floor of the policy; log-likelihoods.

A trained model keeps its answers under a slightly wrong kernel, and random weights answer by chance. Therefore the
log-likelihoods are compared as well, and for random weights they alone.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis.answers import by_chance, differing, largest_difference, written
from pytest_llmgpu.gate.policy import AccuracyRule
from pytest_llmgpu.gate.stats import holm, net_loss
from pytest_llmgpu.report.derived import decode, explained, predictions_of, typical_difference, value_of
from pytest_llmgpu.report.result import Accuracy, CaseResult
from pytest_llmgpu.report.text import listed, percent, plural
from pytest_llmgpu.report.verdicts import ONLY_CANDIDATE, Decided, Row, stated

_ROUNDING = 1e-9  # a floor can be slightly above the same fraction in binary


class Answered(msgspec.Struct, frozen=True):
    """The answers of one case and of its baseline, before a verdict: that needs all cases."""

    before: CaseResult
    result: CaseResult
    rule: AccuracyRule
    items: int
    base: float
    """Accuracy of the baseline, as a fraction."""
    head: float
    """Accuracy of the candidate, as a fraction."""
    lost: list[int]
    """Items that were right and are wrong now."""
    won: list[int]
    """Items that were wrong and are right now."""
    other: int
    """Items with another answer in neither list: wrong both times, or all of them where there are no labels."""
    labelled: bool
    """True if the right answers are known."""
    difference: float | None
    """Typical difference of the log-likelihoods, as a fraction of the baseline's, in the launch where it is largest.

    None where a report lacks them, infinite where only the candidate's are not finite."""
    largest: float | None
    """Largest difference of one log-likelihood, as a fraction; None likewise, and for trained weights."""
    changed: int
    """Most items that one launch answers differently."""
    odd_launch: int | None
    """The launch that `lost` and `won` are of, counted from 1, where the candidate's launches differ and the baseline's
    agree; None where they are of the launch with the median accuracy."""
    launches: int
    """Launches of the candidate with answers."""

    @property
    def random_weights(self) -> bool:
        """True if the weights are random, so that the answers are chance."""
        return self.result.case.load_format == "dummy"

    @property
    def looks(self) -> int:
        """Launches among which the judged one is the worst; 1 for the median one."""
        return 1 if self.odd_launch is None else self.launches

    @property
    def allowed(self) -> float:
        """Typical difference of log-likelihoods that is allowed, as a fraction."""
        return explained(self.result.case.dtype) if self.rule.difference is None else self.rule.difference

    @property
    def allowed_largest(self) -> float:
        """Difference of one log-likelihood that is allowed: rounding can move both reports."""
        return 2 * self.allowed


def answered(base: CaseResult, head: CaseResult, rule: AccuracyRule) -> Answered | Row | str:
    """Compare the answers of two results of one case, in the launch with the median accuracy of each report.

    Greedy scoring gives equal answers in every launch. Where the candidate's launches differ and the baseline's agree,
    the worst launch is compared: a wrong minority of launches is wrong.

    Returns:
        The input of `rows`; a row where no comparison is possible; or the reason why there is nothing to compare.
    """
    thens, nows = base.accuracies, head.accuracies
    if thens and not nows:
        return Row.of(head, "accuracy", "MISSING", "Only the baseline scored items.", gated=rule.gate)
    if not thens or not nows:
        return ONLY_CANDIDATE if nows else "no items were scored"
    then, now = _median(thens, rule.metric), _median(nows, rule.metric)
    befores, afters = ([predictions_of(one, rule.metric) for one in scored] for scored in (thens, nows))
    before, labels = predictions_of(then, rule.metric), now.labels or then.labels
    if any(len(one) != len(before) for one in (*afters, *([labels] if labels is not None else []))):
        reason = f"The numbers of scored items differ: {len(afters[0]):,}, were {len(before):,}."
        return Row.of(head, "accuracy", "NOT_COMPARABLE", reason, gated=rule.gate)
    flips_of = [differing(before, after) for after in afters]
    odd = not _agree(afters) and _agree(befores)
    number = (
        min(range(len(nows)), key=lambda one: (value_of(nows[one], rule.metric), -len(flips_of[one])))
        if odd
        else nows.index(now)
    )
    now, after, flips = nows[number], afters[number], flips_of[number]
    lost = [number for number in flips if labels is not None and before[number] == labels[number]]
    won = [number for number in flips if labels is not None and after[number] == labels[number]]
    differences = [found for one in nows if (found := _difference(then, one)) is not None]
    dummy = head.case.load_format == "dummy"
    largest = [found for one in nows if dummy and (found := _largest_difference(then, one)) is not None]
    return Answered(
        before=base,
        result=head,
        rule=rule,
        items=len(after),
        base=value_of(then, rule.metric),
        head=value_of(now, rule.metric),
        lost=lost,
        won=won,
        other=len(flips) - len(lost) - len(won),
        labelled=labels is not None,
        difference=max(differences, default=None),
        largest=max(largest, default=None),
        changed=max(map(len, flips_of)),
        odd_launch=number + 1 if odd else None,
        launches=len(nows),
    )


def below_floor(result: CaseResult, rule: AccuracyRule) -> str | None:
    """Return why the answers are wrong whatever the baseline's are; None where they are not."""
    values = [value_of(accuracy, rule.metric) for accuracy in result.accuracies]
    if values and rule.floor is not None and result.case.load_format != "dummy":
        worst = min(values)
        if worst < rule.floor - _ROUNDING:
            where = "" if worst == max(values) else f" in launch {values.index(worst) + 1} of {len(values)}"
            return (
                f"Accuracy ({rule.metric}) {percent(worst, 2)}{where}, below the policy's floor of "
                f"{percent(rule.floor, 2)}."
            )
    check = result.accuracy_check
    return f"{check.text}." if check is not None and check.ok is False else None


def rows(cases: Sequence[Answered], confidence: float, note: str) -> list[Row]:
    """Judge the answers of all cases: one row for each series, whose cases differ in their batch size only.

    All batch sizes score the same items with the same model, and a wrong kernel can concern all of them or one.
    Therefore two tests have half of the allowed probability of a false alarm each: a sign test over items, of the
    number of batch sizes at which an item is right now less the number at which it was right before; and McNemar's test
    at the batch size with the largest loss, adjusted over the batch sizes by Holm's method. Both are exact and
    one-sided. p is the smaller one of the two, doubled, and adjusted over the series by Holm's method: the gated series
    are one family, the others another.

    The verdict is REGRESSED where p is at most 1 - confidence or answers are below a floor, IMPROVED likewise for items
    won, OK where a loss of the threshold is ruled out at each batch size, else UNDECIDED. The worst of several
    launches that differ has its p multiplied by their number; it is never OK.

    Log-likelihoods that differ by more than rounding explains are REGRESSED whatever the answers are, and IMPROVED
    where the baseline failed its own check and the candidate passes it.
    """
    groups: dict[tuple[object, AccuracyRule], list[Answered]] = {}
    for case in cases:
        groups.setdefault((case.result.case.series, case.rule), []).append(case)
    tested = [_tests(group, 1 - confidence) for group in groups.values() if not group[0].random_weights]
    gates = [tests.cases[0].rule.gate for tests in tested]
    adjusted = zip(
        tested, holm([one.loss for one in tested], gates), holm([one.gain for one in tested], gates), strict=True
    )
    return [
        _row_of_random_weights(group, note) if group[0].random_weights else _row(*next(adjusted), confidence, note)
        for group in groups.values()
    ]


class _Tests(NamedTuple):
    """The tests of the cases of one series."""

    cases: list[Answered]
    """All cases of the series."""
    loss: float
    """The probability of a loss like this one by chance, over both tests."""
    gain: float
    """The probability of a gain like this one by chance."""
    lost: list[Answered]
    """The cases that the loss concerns: all with a loss, or those of the single batch sizes that decided."""
    won: list[Answered]
    """The cases that the gain concerns."""


def _tests(cases: list[Answered], alpha: float) -> _Tests:
    """Test the items of a series in both directions. Log-likelihoods that differ explain the answers of their case."""
    tested = [case for case in cases if case.labelled and not _numbers_differ(case)]
    typical = [case for case in tested if case.odd_launch is None]
    lost, won = _lost_and_won(typical)
    losses = [min(1.0, case.looks * by_chance(len(case.lost), len(case.won))) for case in tested]
    gains = [by_chance(len(case.won), len(case.lost)) for case in tested]
    loss, with_loss = _either(by_chance(len(lost), len(won)), losses, tested, sign=1, alpha=alpha)
    gain, with_gain = _either(by_chance(len(won), len(lost)), gains, tested, sign=-1, alpha=alpha)
    return _Tests(cases, loss, gain, with_loss, with_gain)


def _either(
    together: float, singles: Sequence[float], cases: Sequence[Answered], *, sign: int, alpha: float
) -> tuple[float, list[Answered]]:
    """Return the probability over both tests, and the cases that the smaller one concerns.

    Args:
        together: The probability of the test over all batch sizes.
        singles: The probability of the test of each case.
        cases: The cases.
        sign: 1 for a loss, -1 for a gain.
        alpha: The allowed probability of a false alarm.
    """
    if len(cases) < 2:  # noqa: PLR2004 - both tests are the same for one batch size
        return min(singles, default=1.0), list(cases)
    adjusted = holm(singles)
    least = min(adjusted)
    if together <= least:
        concerned = [case for case in cases if sign * (len(case.lost) - len(case.won)) > 0]
    else:
        concerned = [case for case, p in zip(cases, adjusted, strict=True) if p <= max(least, alpha / 2)]
    return min(1.0, 2 * min(together, least)), concerned


def _lost_and_won(cases: Sequence[Answered]) -> tuple[list[int], list[int]]:
    """Return the items that are right at fewer batch sizes than before, and those that are right at more."""
    balance: Counter[int] = Counter()
    for case in cases:
        balance.subtract(case.lost)
        balance.update(case.won)
    lost, won = (sorted(item for item, right in balance.items() if sign * right > 0) for sign in (-1, 1))
    return lost, won


def predictions_row(case: Answered, *, gated: bool) -> Row:
    """Judge whether a launch answers any item differently, whether right or wrong."""
    flipped = case.changed
    return Row.of(
        case.result,
        "predictions",
        "REGRESSED" if flipped else "OK",
        f"{flipped:,} of {case.items:,} items have another answer ({case.rule.metric})."
        if flipped
        else f"All {case.items:,} items have the same answer.",
        gated=gated,
        base=0.0,
        head=flipped / case.items if case.items else 0.0,
        threshold=0.0,
    )


_Cause = Literal["floor", "numbers", "unknown", "unlabelled", "lost", "disagree", "won", "ruled_out", "not_ruled_out"]
"""Why a verdict on the answers is what it is."""


class _Decision(NamedTuple):
    """The verdict on a series of cases."""

    verdict: Decided
    cause: _Cause
    concerned: list[Answered]
    """The cases that the verdict is about."""


def _row(tests: _Tests, loss: float, gain: float, confidence: float, note: str) -> Row:
    decision = _decide(tests, loss, gain, confidence)
    concerned, rule = decision.concerned, tests.cases[0].rule
    lost, won = _lost_and_won(concerned)
    # Batch sizes mostly lose the same items: the means of the ends are an interval of the mean change.
    ends = [net_loss(len(case.lost), len(case.won), case.items, confidence) for case in concerned]
    low, high = (statistics.fmean(end) for end in zip(*ends, strict=True))
    chance = gain if decision.verdict == "IMPROVED" or len(won) > len(lost) else loss
    return _series_row(
        tests.cases,
        decision,
        _reason(tests.cases, decision, lost, won, chance),
        note,
        base=statistics.fmean(case.base for case in concerned),
        head=statistics.fmean(case.head for case in concerned),
        low=low,
        high=high,
        threshold=rule.margin,
        p=chance if any(case.labelled for case in concerned) else None,
        lost=lost,
        won=won,
    )


def _series_row(cases: Sequence[Answered], decision: _Decision, reason: str, note: str, **figures: Any) -> Row:
    case = cases[0].result.case
    if note and decision.verdict in {"REGRESSED", "IMPROVED"} and "\n" not in reason:
        reason += f"\n{note}"
    return Row(
        key=case.series,
        id=case.strategy,
        cases=[one.result.id for one in decision.concerned],
        metric="accuracy",
        **stated(decision.verdict),
        reason=reason,
        gated=cases[0].rule.gate,
        **figures,
    )


def _decide(tests: _Tests, loss: float, gain: float, confidence: float) -> _Decision:
    if (decision := _decide_without_items(tests.cases)) is not None and decision.verdict == "REGRESSED":
        return decision
    if loss <= 1 - confidence:
        return _Decision("REGRESSED", "lost", tests.lost)
    if decision is None:
        decision = _decide_without_a_test(tests.cases)
    if decision is None and gain <= 1 - confidence:
        decision = _Decision("IMPROVED", "won", tests.won)
    return decision or _decide_on_interval(tests.cases, confidence)


def _decide_without_items(cases: list[Answered]) -> _Decision | None:
    """Decide where answers are below a floor or log-likelihoods differ, whatever the items are; None elsewhere."""
    if wrong := [case for case in cases if below_floor(case.result, case.rule) is not None]:
        return _Decision("REGRESSED", "floor", wrong)
    differing = [case for case in cases if _numbers_differ(case)]
    if worse := [case for case in differing if _verdict_on_numbers(case) == "REGRESSED"]:
        return _Decision("REGRESSED", "numbers", worse)
    return _Decision("IMPROVED", "numbers", differing) if differing else None


def _decide_without_a_test(cases: list[Answered]) -> _Decision | None:
    """Decide where the right answers are not known or launches differ, so that a case has no test; None elsewhere."""
    unlabelled = [case for case in cases if not case.labelled]
    if any(case.other or case.odd_launch is not None for case in unlabelled):
        return _Decision("UNDECIDED", "unlabelled", unlabelled)
    if odd := [case for case in cases if case.odd_launch is not None]:
        return _Decision("UNDECIDED", "disagree", odd)
    return _Decision("OK", "unlabelled", unlabelled) if unlabelled else None


def _decide_on_interval(cases: list[Answered], confidence: float) -> _Decision:
    unclear = [
        case for case in cases if net_loss(len(case.lost), len(case.won), case.items, confidence)[1] > case.rule.margin
    ]
    return _Decision("UNDECIDED", "not_ruled_out", unclear) if unclear else _Decision("OK", "ruled_out", cases)


def _reason(
    cases: Sequence[Answered], decision: _Decision, lost: Sequence[int], won: Sequence[int], chance: float
) -> str:
    concerned, cause = decision.concerned, decision.cause
    where = _where(cases, concerned)
    average = ", on average" if len(concerned) > 1 else ""
    first, rule = concerned[0], concerned[0].rule
    base, head = (statistics.fmean(getattr(case, name) for case in concerned) for name in ("base", "head"))
    change = f"Accuracy ({rule.metric}) {percent(head, 2)}{where}, was {percent(base, 2)}{average}"
    flips = f"{plural(len(lost), 'item')} lost, {len(won):,} won of {first.items:,} ({written(chance)})"
    labelled = all(case.labelled for case in concerned)
    if cause == "floor":
        same = not any(case.lost or case.won or case.other for case in concerned)
        sizes = _sizes(cases, concerned)
        compared = f"\nCompared with the baseline{sizes}: {flips}." if labelled else ""
        floor = below_floor(first.result, rule)
        assert floor is not None
        return floor + (f"\nThe baseline has the same answers{sizes}." if same else compared)
    if cause == "numbers":
        return _reason_of_numbers(concerned, where) + (f"\n{change}: {flips}." if labelled else "")
    if cause == "unlabelled":
        other = max(case.other for case in concerned)
        return f"{other:,} of {first.items:,} items have another answer{where}; the report lacks the right answers."
    more = {
        "lost": f"\nItems lost: {listed(lost)}.",
        "disagree": "\nThe candidate's launches differ in their answers; the baseline's agree.",
        "not_ruled_out": f"\nA loss of {100 * rule.margin:.2g} points is not ruled out: score more items.",
    }
    return f"{change}: {flips if lost or won else 'no item was lost or won'}.{more.get(cause, '')}"


def _where(cases: Sequence[Answered], concerned: Sequence[Answered]) -> str:
    """Return the launch and the batch sizes that a verdict is about; empty where it is about a series of one case."""
    first = concerned[0]
    launch = "" if first.odd_launch is None else f" in launch {first.odd_launch} of {first.launches}"
    return launch + _sizes(cases, concerned)


def _sizes(cases: Sequence[Answered], concerned: Sequence[Answered]) -> str:
    sizes = sorted({case.result.case.batch_size for case in concerned})
    if len(cases) == 1:
        return ""
    if len(sizes) == 1:
        return f" at batch size {sizes[0]}"
    return f" at all {len(sizes)} batch sizes" if len(concerned) == len(cases) else f" at batch sizes {listed(sizes)}"


def _row_of_random_weights(cases: list[Answered], note: str) -> Row:
    """Judge random weights, whose answers are chance: equal inputs have to give equal log-likelihoods."""
    unknown = [case for case in cases if case.difference is None]
    decision = _decide_without_items(cases)
    if decision is None:
        decision = _Decision("UNDECIDED", "unknown", unknown) if unknown else _Decision("OK", "ruled_out", cases)
    if decision.cause == "floor":
        reason = below_floor(decision.concerned[0].result, decision.concerned[0].rule) or ""
    elif decision.cause == "numbers":
        reason = _reason_of_numbers(decision.concerned, _where(cases, decision.concerned))
    elif decision.cause == "unknown":
        reason = f"The baseline has no log-likelihoods to compare with{_where(cases, unknown)}."
    else:
        difference = max(case.difference or 0.0 for case in cases)
        reason = f"Log-likelihoods of random weights typically differ by {difference:.1e} from the baseline's."
    return _series_row(cases, decision, reason, note)


def _numbers_differ(case: Answered) -> bool:
    """Return whether log-likelihoods differ by more than rounding explains; `largest` is of random weights only."""
    return _typically_differ(case) or (case.largest is not None and case.largest > case.allowed_largest)


def _typically_differ(case: Answered) -> bool:
    return case.difference is not None and case.difference > case.allowed


def _verdict_on_numbers(case: Answered) -> Decided:
    """Return the verdict on log-likelihoods that differ: a baseline that failed its own check was the wrong one."""
    fixed = case.before.has_wrong_answers and not case.result.has_wrong_answers
    return "IMPROVED" if fixed else "REGRESSED"


def _reason_of_numbers(cases: Sequence[Answered], where: str) -> str:
    case = max(cases, key=lambda one: one.difference or 0.0)
    assert case.difference is not None
    wrong = ": the baseline failed its own accuracy check" if _verdict_on_numbers(case) == "IMPROVED" else ""
    if not math.isfinite(case.difference):
        return f"Log-likelihoods are not finite{where}, and the baseline's are{wrong}."
    if _typically_differ(case):
        how, difference, allowed = "typically differ by", case.difference, case.allowed
    else:
        assert case.largest is not None
        how, difference, allowed = "differ by up to", case.largest, case.allowed_largest
    threshold = (
        f"rounding in {case.result.case.dtype} explains" if case.rule.difference is None else "the policy allows"
    )
    return (
        f"Log-likelihoods {how} {100 * difference:.2g} % from the baseline's{where}; "
        f"{threshold} {100 * allowed:.2g} %{wrong}."
    )


def _median(scored: Sequence[Accuracy], metric: str) -> Accuracy:
    """Return the answers with the median accuracy, the lower of two."""
    return sorted(scored, key=lambda accuracy: value_of(accuracy, metric))[(len(scored) - 1) // 2]


def _agree(predictions: Sequence[Sequence[int]]) -> bool:
    return all(one == predictions[0] for one in predictions)


def _difference(before: Accuracy, after: Accuracy) -> float | None:
    """Return the typical difference of log-likelihoods; infinite where only the later ones are not finite."""
    if before.loglikelihoods == after.loglikelihoods:  # most launches: nothing to decode
        return 0.0 if before.loglikelihoods else None
    expected, values = decode(before.loglikelihoods), decode(after.loglikelihoods)
    if not expected or len(expected) != len(values) or not math.isfinite(sum(expected)):
        return None
    found = typical_difference(values, expected)
    return math.inf if math.isnan(found) else found


def _largest_difference(before: Accuracy, after: Accuracy) -> float | None:
    """Return the largest difference of one log-likelihood; None where they cannot be compared or are not finite."""
    if before.loglikelihoods == after.loglikelihoods:
        return 0.0 if before.loglikelihoods else None
    if len(before.loglikelihoods) != len(after.loglikelihoods):
        return None
    return largest_difference(after.loglikelihoods, before.loglikelihoods)
