"""Answers: items lost and won at the batch sizes of a series; the floor of the policy; log-likelihoods; texts.

A trained model keeps its answers under a slightly wrong kernel, and random weights answer by chance. Therefore the
log-likelihoods are compared as well, and for random weights they alone. Generated texts are compared by the
log-likelihoods of their tokens, since rounding alone makes texts diverge.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis.answers import by_chance, differing, largest_difference, written
from pytest_llmgpu.gate.policy import AccuracyRule, TextsRule
from pytest_llmgpu.gate.stats import holm, net_loss
from pytest_llmgpu.report.derived import (
    decode,
    decode_tokens,
    explained,
    generated,
    predictions_of,
    typical_difference,
    value_of,
)
from pytest_llmgpu.report.result import Accuracy, CaseResult, Generation
from pytest_llmgpu.report.text import listed, percent, plural
from pytest_llmgpu.report.verdicts import NEITHER, ONLY_CANDIDATE, Decided, Row, stated

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
    def allowed(self) -> float:
        """Typical difference of log-likelihoods that is allowed, as a fraction."""
        return explained(self.result.case.dtype) if self.rule.difference is None else self.rule.difference

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return the interval of the fraction of items lost less items won."""
        return net_loss(len(self.lost), len(self.won), self.items, confidence)

    @property
    def typically_differs(self) -> bool:
        """True if log-likelihoods typically differ by more than rounding explains."""
        return self.difference is not None and self.difference > self.allowed

    @property
    def numbers(self) -> Decided | None:
        """The verdict on log-likelihoods that differ by more than rounding explains; None where they do not."""
        # Rounding can move one log-likelihood of both reports.
        if not self.typically_differs and (self.largest or 0.0) <= 2 * self.allowed:
            return None
        return _of_other_numbers(self.before, self.result)


def answered(base: CaseResult, head: CaseResult, rule: AccuracyRule) -> Answered | Row | str:
    """Compare the answers of two results of one case, in the launch with the median accuracy of each report.

    Greedy scoring gives equal answers in every launch. Where the candidate's launches differ and the baseline's agree,
    the worst launch is compared: a wrong minority of launches is wrong. A row or a reason is returned where there is
    nothing to compare.
    """
    thens, nows = base.accuracies, head.accuracies
    if thens and not nows:
        return Row.of(head, "accuracy", "MISSING", "Only the baseline scored items.", gated=rule.gate)
    if not thens or not nows:
        return ONLY_CANDIDATE if nows else "no items were scored"
    # The answers with the median accuracy, the lower of two.
    then, now = (
        sorted(scored, key=lambda one: value_of(one, rule.metric))[(len(scored) - 1) // 2] for scored in (thens, nows)
    )
    befores, afters = ([predictions_of(one, rule.metric) for one in scored] for scored in (thens, nows))
    before, labels = predictions_of(then, rule.metric), now.labels or then.labels
    if any(len(one) != len(before) for one in (*afters, *([labels] if labels is not None else []))):
        reason = f"The numbers of scored items differ: {len(afters[0]):,}, were {len(before):,}."
        return Row.of(head, "accuracy", "NOT_COMPARABLE", reason, gated=rule.gate)
    flips_of = [differing(before, after) for after in afters]
    odd = any(one != afters[0] for one in afters) and all(one == befores[0] for one in befores)
    # A launch with the answers of the baseline is not the one that differs.
    ranked = [(not flips, value_of(one, rule.metric), -len(flips)) for one, flips in zip(nows, flips_of, strict=True)]
    number = ranked.index(min(ranked)) if odd else nows.index(now)
    now, after, flips = nows[number], afters[number], flips_of[number]
    lost = [number for number in flips if labels is not None and before[number] == labels[number]]
    won = [number for number in flips if labels is not None and after[number] == labels[number]]
    differences = [_differences(then, one, largest=head.case.load_format == "dummy") for one in nows]
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
        difference=max((typical for typical, _ in differences if typical is not None), default=None),
        largest=max((largest for _, largest in differences if largest is not None), default=None),
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
    tested = [_tests(group, 1 - confidence) for group in groups.values()]
    # The answers of random weights are chance, and no test of a family.
    families = [(one.cases[0].random_weights, one.cases[0].rule.gate) for one in tested]
    losses, gains = holm([one.loss for one in tested], families), holm([one.gain for one in tested], families)
    return [
        _row(one._replace(loss=loss, gain=gain), confidence, note)
        for one, loss, gain in zip(tested, losses, gains, strict=True)
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
    tested = [case for case in cases if case.labelled and case.numbers is None]
    of_series = _lost_and_won([case for case in tested if case.odd_launch is None])
    found: list[tuple[float, list[Answered]]] = []
    for sign in (1, -1):  # a loss, a gain
        together = by_chance(*map(len, of_series[::sign]))
        looks = [1 if case.odd_launch is None else case.launches for case in tested]
        chances = [by_chance(*map(len, (case.lost, case.won)[::sign])) for case in tested]
        singles = [min(1.0, many * chance) for many, chance in zip(looks, chances, strict=True)]
        if len(tested) < 2:  # noqa: PLR2004 - both tests are the same for one batch size
            found.append((min(singles, default=1.0), tested))
            continue
        adjusted = holm(singles)
        least = min(adjusted)
        concerned = [case for case in tested if sign * (len(case.lost) - len(case.won)) > 0]
        if together > least:
            concerned = [case for case, p in zip(tested, adjusted, strict=True) if p <= max(least, alpha / 2)]
        found.append((min(1.0, 2 * min(together, least)), concerned))
    (loss, with_loss), (gain, with_gain) = found
    return _Tests(cases, loss, gain, with_loss, with_gain)


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
        f"{flipped:,} of {case.items:,} predictions changed ({case.rule.metric})."
        if flipped
        else f"All {case.items:,} predictions are unchanged.",
        gated=gated,
        base=0.0,
        head=flipped / case.items if case.items else 0.0,
        threshold=0.0,
    )


_Cause = Literal["floor", "numbers", "unknown", "unlabelled", "lost", "disagree", "won", "ruled_out", "not_ruled_out"]
"""Why a verdict on the answers is what it is."""


def _decide(tests: _Tests, confidence: float) -> tuple[Decided, _Cause, list[Answered]]:
    """Return the verdict on a series of cases, its cause, and the cases that it is about: the first that has any."""
    cases, alpha = tests.cases, 1 - confidence
    steps: list[tuple[Decided, _Cause, list[Answered]]] = [
        ("REGRESSED", "floor", [case for case in cases if below_floor(case.result, case.rule) is not None]),
        ("REGRESSED", "numbers", [case for case in cases if case.numbers == "REGRESSED"]),
    ]
    differing = [case for case in cases if case.numbers is not None]
    if cases[0].random_weights:
        steps.append(("IMPROVED", "numbers", differing))
        steps.append(("UNDECIDED", "unknown", [case for case in cases if case.difference is None]))
    else:
        unlabelled = [case for case in cases if not case.labelled]
        changed = any(case.other or case.odd_launch is not None for case in unlabelled)
        steps += [
            ("REGRESSED", "lost", tests.lost if tests.loss <= alpha else []),
            ("IMPROVED", "numbers", differing),
            ("UNDECIDED", "unlabelled", unlabelled if changed else []),
            ("UNDECIDED", "disagree", [case for case in cases if case.odd_launch is not None]),
            ("OK", "unlabelled", unlabelled),
            ("IMPROVED", "won", tests.won if tests.gain <= alpha else []),
            (
                "UNDECIDED",
                "not_ruled_out",
                [case for case in cases if case.interval(confidence)[1] > case.rule.threshold],
            ),
        ]
    return next((step for step in steps if step[2]), ("OK", "ruled_out", cases))


def _row(tests: _Tests, confidence: float, note: str) -> Row:
    cases, (result, cause, concerned) = tests.cases, _decide(tests, confidence)
    case, rule = cases[0].result.case, cases[0].rule
    lost, won = _lost_and_won(concerned)
    chance = tests.gain if result == "IMPROVED" or len(won) > len(lost) else tests.loss
    figures: dict[str, Any] = {}
    reason = _reason(cases, cause, concerned, lost, won, chance)
    if not cases[0].random_weights:
        # Batch sizes mostly lose the same items: the means of the ends are an interval of the mean change.
        low, high = map(statistics.fmean, zip(*(one.interval(confidence) for one in concerned), strict=True))
        figures = {
            "base": statistics.fmean(one.base for one in concerned),
            "head": statistics.fmean(one.head for one in concerned),
            "low": low,
            "high": high,
            "threshold": rule.threshold,
            "p": chance if any(one.labelled for one in concerned) else None,
            "lost": lost,
            "won": won,
        }
    if note and result in {"REGRESSED", "IMPROVED"} and "\n" not in reason:
        reason += f"\n{note}"
    return Row(
        key=case.series,
        id=case.strategy,
        cases=[one.result.id for one in concerned],
        metric="accuracy",
        reason=reason,
        gated=rule.gate,
        **stated(result),
        **figures,
    )


def _reason(
    cases: Sequence[Answered],
    cause: _Cause,
    concerned: Sequence[Answered],
    lost: Sequence[int],
    won: Sequence[int],
    chance: float,
) -> str:
    """Return the reason of a verdict on a series. Answers of random weights do not count."""
    first, rule, random = concerned[0], concerned[0].rule, concerned[0].random_weights
    launch = "" if first.odd_launch is None else f" in launch {first.odd_launch} of {first.launches}"
    where, floor = launch + _sizes(cases, concerned), below_floor(first.result, rule) or ""
    if cause == "unknown":
        return f"The baseline has no log-likelihoods to compare with{where}."
    if random and cause == "ruled_out":
        difference = max(case.difference or 0.0 for case in cases)
        return f"Log-likelihoods of random weights typically differ by {difference:.1e} from the baseline's."
    average = ", on average" if len(concerned) > 1 else ""
    base, head = (statistics.fmean(getattr(case, name) for case in concerned) for name in ("base", "head"))
    change = f"Accuracy ({rule.metric}) {percent(head, 2)}{where}, was {percent(base, 2)}{average}"
    flips = f"{plural(len(lost), 'item')} lost, {len(won):,} won of {first.items:,} ({written(chance)})"
    labelled = all(case.labelled for case in concerned) and not random
    if cause == "floor":
        same = not any(case.lost or case.won or case.other for case in concerned)
        sizes = _sizes(cases, concerned)
        compared = f"\nCompared with the baseline{sizes}: {flips}." if labelled else ""
        baseline = f"\nThe baseline has the same answers{sizes}." if same else compared
        return floor if random else floor + baseline
    if cause == "numbers":
        return _reason_of_numbers(concerned, where) + (f"\n{change}: {flips}." if labelled else "")
    if cause == "unlabelled":
        other = max(case.other for case in concerned)
        return f"{other:,} of {first.items:,} items have another answer{where}; the report lacks the right answers."
    more = {
        "lost": f"\nItems lost: {listed(lost)}.",
        "disagree": "\nThe candidate's launches differ in their answers; the baseline's agree.",
        "not_ruled_out": f"\nA loss of {100 * rule.threshold:.2g} points is not ruled out: score more items.",
    }
    return f"{change}: {flips if lost or won else 'no item was lost or won'}.{more.get(cause, '')}"


def _sizes(cases: Sequence[Answered], concerned: Sequence[Answered]) -> str:
    """Return the batch sizes that a verdict is about; empty where it is about a series of one case."""
    sizes = sorted({case.result.case.batch_size for case in concerned})
    if len(cases) == 1:
        return ""
    if len(sizes) == 1:
        return f" at batch size {sizes[0]}"
    return f" at all {len(sizes)} batch sizes" if len(concerned) == len(cases) else f" at batch sizes {listed(sizes)}"


def _reason_of_numbers(cases: Sequence[Answered], where: str) -> str:
    case = max(cases, key=lambda one: one.difference or 0.0)
    dtype, fixed = None if case.rule.difference is not None else case.result.case.dtype, case.numbers == "IMPROVED"
    if case.typically_differs:
        return _difference_in_words(case.difference or 0.0, case.allowed, dtype, where, fixed=fixed)
    how = "differ by up to"
    return _difference_in_words(case.largest or 0.0, 2 * case.allowed, dtype, where, fixed=fixed, how=how)


def _difference_in_words(
    difference: float, allowed: float, dtype: str | None, where: str, *, fixed: bool, how: str = "typically differ by"
) -> str:
    """Return a difference of log-likelihoods with what is allowed: by rounding in a dtype; None: by the policy."""
    wrong = ": the baseline failed its own accuracy check" if fixed else ""
    if not math.isfinite(difference):
        return f"Log-likelihoods are not finite{where}, and the baseline's are{wrong}."
    threshold = "the policy allows" if dtype is None else f"rounding in {dtype} explains"
    return (
        f"Log-likelihoods {how} {100 * difference:.2g} % from the baseline's{where}; "
        f"{threshold} {100 * allowed:.2g} %{wrong}."
    )


def _of_other_numbers(before: CaseResult, after: CaseResult) -> Decided:
    """Return the verdict on numbers that differ. A baseline that failed its own check was the wrong one."""
    return "IMPROVED" if before.has_wrong_answers and not after.has_wrong_answers else "REGRESSED"


def _differences(before: Accuracy, after: Accuracy, *, largest: bool) -> tuple[float | None, float | None]:
    """Return the typical difference of log-likelihoods, and the largest one of them if asked for.

    The typical one is infinite where only the later ones are not finite. None: they cannot be compared.
    """
    if before.loglikelihoods == after.loglikelihoods:  # most launches: nothing to decode
        return (0.0, 0.0 if largest else None) if before.loglikelihoods else (None, None)
    expected, values = decode(before.loglikelihoods), decode(after.loglikelihoods)
    if not expected or len(expected) != len(values):
        return None, None
    one = largest_difference(after.loglikelihoods, before.loglikelihoods) if largest else None
    return _typical(values, expected), one


def _typical(values: Sequence[float], expected: Sequence[float]) -> float | None:
    """Return the typical difference, infinite where only the values are not finite; None: the expected ones are not."""
    if not math.isfinite(sum(expected)):
        return None
    typical = typical_difference(values, expected)
    return math.inf if math.isnan(typical) else typical


def texts_row(base: CaseResult, head: CaseResult, rule: TextsRule) -> Row | str | None:
    """Compare the log-likelihoods of generated tokens, text by text, up to the first token that differs.

    Up to it, and of it, both reports have the largest log-likelihood after the same tokens. Where rounding decides
    between two tokens, these are nearly equal; they are not for a model that is wrong from its first token. The worst
    launch of the candidate is compared with the first one of the baseline. A case that scores has no row.
    """
    if not head.case.generates:
        return None
    then, nows = generated(base), [launch.generation for launch in head.launches if launch.generation is not None]
    if then is None:
        return ONLY_CANDIDATE if nows else NEITHER
    if not nows:
        return Row.of(head, "texts", "MISSING", "Only the baseline has texts.", gated=rule.gate)
    if any((now.prompt_tokens, now.new_tokens) != (then.prompt_tokens, then.new_tokens) for now in nows):
        reason = "The prompts or the texts have other numbers of tokens than the baseline's."
        return Row.of(head, "texts", "NOT_COMPARABLE", reason, gated=rule.gate)
    found = [_on_common_prefix(then, now) for now in nows]
    if any(math.isnan(difference) for difference, _ in found):
        return "log-likelihoods of the baseline are not finite"
    allowed = explained(head.case.dtype) if rule.difference is None else rule.difference
    # Differences that are allowed are equal: of such launches the one with the most texts that diverge is the worst.
    worst = difference, diverged = max(found, key=lambda one: (max(one[0], allowed), len(one[1]), one[0]))
    where = "" if found.count(worst) == len(found) else f" in launch {found.index(worst) + 1} of {len(found)}"
    result: Decided = "CHANGED" if diverged else "OK"
    if difference > allowed:
        result = _of_other_numbers(base, head)
    dtype = None if rule.difference is not None else head.case.dtype
    reason = _difference_in_words(difference, allowed, dtype, where, fixed=result == "IMPROVED")
    if None in (then.loglikelihoods, *(now.loglikelihoods for now in nows)):
        reason = "The engine returns no log-likelihoods: whether rounding explains other tokens is not known."
    if diverged:
        texts = plural(len(then.new_tokens), "text")
        first = f"{len(diverged):,} of {texts} diverge{where}, the first at token {min(diverged)}."
        reason = f"{first}\n{reason}" if result == "CHANGED" else f"{reason}\n{first}"
    # Texts that diverge where rounding decides are both right: they never fail.
    gated = rule.gate and result != "CHANGED"
    return Row.of(head, "texts", result, reason, gated=gated, threshold=allowed)


def _on_common_prefix(before: Generation, after: Generation) -> tuple[float, list[int]]:
    """Return the typical difference, and the first token that differs in each text that diverges, counted from 1.

    The difference is infinite where only the later numbers are not finite, and NaN where the earlier ones are not.
    """
    then, now = decode_tokens(before.tokens), decode_tokens(after.tokens)
    expected, values = decode(before.loglikelihoods), decode(after.loglikelihoods)
    places: list[int] = []
    diverged = []
    for start, end in pairwise(accumulate(before.new_tokens, initial=0)):
        first = next((place for place in range(start, end) if then[place] != now[place]), end)
        if first < end:
            diverged.append(first - start + 1)
        places += range(start, min(first + 1, end))
    if not expected or not values:
        return 0.0, diverged  # engines without log-likelihoods: tokens alone are compared
    typical = _typical([values[place] for place in places], [expected[place] for place in places])
    return math.nan if typical is None else typical, diverged
