"""Answers: items lost and won; the floor of the policy; log-likelihoods; texts.

A trained model keeps its answers under a slightly wrong kernel, and random weights answer by chance. Therefore the
log-likelihoods are compared as well, and for random weights they alone. Generated texts are compared by the
log-likelihoods of their tokens, since rounding alone makes texts diverge.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from pytest_llmgpu.analysis.answers import by_chance, differing, largest_difference, written
from pytest_llmgpu.gate.exact import absent
from pytest_llmgpu.gate.policy import AccuracyRule, TextsRule
from pytest_llmgpu.gate.stats import net_loss
from pytest_llmgpu.report.derived import decode, explained, predictions_of, typical_difference, value_of
from pytest_llmgpu.report.result import CaseResult, Generation
from pytest_llmgpu.report.text import listed, percent, plural
from pytest_llmgpu.report.verdicts import Decided, Row

_ROUNDING = 1e-9  # a floor can be slightly above the same fraction in binary


class Answered(msgspec.Struct, frozen=True):
    """The answers of one case and of its baseline, before a verdict: that needs all cases."""

    before: CaseResult
    result: CaseResult
    rule: AccuracyRule
    items: int
    base: float
    """Accuracy in the worst launch as a fraction, of the baseline and of the candidate."""
    head: float
    lost: list[int]
    """Items that were right and are wrong now, and the other way."""
    won: list[int]
    difference: float | None
    """Typical difference of the log-likelihoods, as a fraction of the baseline's, in the launch where it is largest.

    None where a report lacks them, infinite where only the candidate's are not finite."""
    largest: float | None
    """Largest difference of one log-likelihood, as a fraction; None likewise, and for trained weights."""
    changed: int
    """Most items that one launch answers differently."""
    launch: int | None
    """The launch of the candidate that is compared, counted from 1; None where all have the same answers."""
    launches: int

    @property
    def random_weights(self) -> bool:
        """True if the weights are random, so that the answers are chance."""
        return self.result.case.load_format == "dummy"

    @property
    def allowed(self) -> float:
        """Typical difference of log-likelihoods that is allowed, as a fraction."""
        return explained(self.result.case.dtype) if self.rule.difference is None else self.rule.difference

    @property
    def numbers(self) -> Decided | None:
        """The verdict on log-likelihoods that differ by more than rounding explains; None where they do not."""
        # Rounding can move one log-likelihood of both reports.
        if (self.difference or 0.0) <= self.allowed and (self.largest or 0.0) <= 2 * self.allowed:
            return None
        return _of_other_numbers(self.before, self.result)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return the interval of the fraction of items lost less items won."""
        return net_loss(len(self.lost), len(self.won), self.items, confidence)

    @property
    def family(self) -> Hashable:
        """The gated cases are one family of tests, the others another. Answers of random weights are no test."""
        return self.random_weights, self.rule.gate

    def p(self, sign: int) -> float:
        """Return the p of a loss (1) or gain (-1) in its family. Log-likelihoods that differ explain the answers."""
        return 1.0 if self.numbers is not None else self.chance(sign)

    def chance(self, sign: int) -> float:
        """Return McNemar's exact p of a loss (1) or gain (-1) of items; of launches that differ one was chosen."""
        tests = 1 if self.launch is None else self.launches
        return min(1.0, tests * by_chance(*map(len, (self.lost, self.won)[::sign])))

    def row(self, ps: Sequence[float], _: int, confidence: float) -> Row:
        """Judge the items that were lost and won, by their p, adjusted over the cases of a family.

        The verdict is REGRESSED where p is at most 1 - confidence or answers are below a floor, IMPROVED likewise for
        items won, OK where a loss of the threshold is ruled out, else UNDECIDED. Random weights answer by chance.

        Log-likelihoods that differ by more than rounding explains are REGRESSED whatever the answers are, and IMPROVED
        where the baseline failed its own check and the candidate passes it.
        """
        rule, floor, numbers, random = self.rule, below_floor(self.result, self.rule), self.numbers, self.random_weights
        worse, better = (not random and p <= 1 - confidence for p in ps)
        decided = self.difference is not None if random else self.interval(confidence)[1] <= rule.threshold
        result: Decided = "OK" if decided else "UNDECIDED"
        if floor is not None or numbers == "REGRESSED" or worse:
            result = "REGRESSED"
        elif numbers is not None or better:
            result = "IMPROVED"
        launch = "" if self.launch is None else f" in launch {self.launch} of {self.launches}"
        gains = result == "IMPROVED" or len(self.won) > len(self.lost)
        chance = ps[gains] if numbers is None else self.chance(-1 if gains else 1)
        change = f"Accuracy ({rule.metric}) {percent(self.head, 2)}{launch}, was {percent(self.base, 2)}"
        flips = f"{plural(len(self.lost), 'item')} lost, {len(self.won):,} won of {self.items:,} ({written(chance)})"
        more = ""
        if floor is not None:
            reason = floor
            more = f"Compared with the baseline: {flips}." if self.changed else "No answer differs from the baseline's."
        elif numbers is not None:
            difference, allowed, how = self.difference or 0.0, self.allowed, "typically differ by"
            if difference <= allowed:
                difference, allowed, how = self.largest or 0.0, 2 * allowed, "differ by up to"
            dtype = None if rule.difference is not None else self.result.case.dtype
            reason = _difference_in_words(difference, allowed, dtype, launch, fixed=numbers == "IMPROVED", how=how)
            more = f"{change}: {flips}."
        elif random and self.difference is None:
            reason = f"Log-likelihoods are missing, or not finite{launch}."
        elif random:
            reason = f"Log-likelihoods of random weights typically differ by {self.difference:.1e} from the baseline's."
        else:
            reason = f"{change}: {flips if self.lost or self.won else 'no item was lost or won'}."
            is_open = f"A loss of {100 * rule.threshold:.2g} points is not ruled out: score more items."
            more = {"REGRESSED": f"Items lost: {listed(self.lost)}.", "UNDECIDED": is_open}.get(result, "")
        figures: dict[str, Any] = {}
        if not random:
            low, high = self.interval(confidence)
            figures = {"base": self.base, "head": self.head, "low": low, "high": high, "threshold": rule.threshold}
            figures |= {"p": chance, "lost": self.lost, "won": self.won}
        reason = f"{reason}\n{more}" if more and not random else reason
        return Row.of(self.result, "accuracy", result, reason, gated=rule.gate, **figures)


def answered(base: CaseResult, head: CaseResult, rule: AccuracyRule) -> Answered | Row | str:
    """Compare the answers of two results of one case, in the launch with the lowest accuracy of each report.

    Greedy scoring gives equal answers in every launch, and a wrong minority of launches is wrong. A row or a reason is
    returned where there is nothing to compare.
    """
    thens, nows = base.accuracies, head.accuracies
    if (missing := absent(head, "accuracy", thens, nows, gated=rule.gate)) is not None:
        return missing
    then, now = (min(scored, key=lambda one: value_of(one, rule.metric)) for scored in (thens, nows))
    before, after = (predictions_of(one, rule.metric) for one in (then, now))
    afters = [predictions_of(one, rule.metric) for one in nows]
    labels = now.labels or then.labels or []
    if any(len(one) != len(before) for one in (*afters, labels or before)):
        reason = f"The numbers of scored items differ: {len(after):,}, were {len(before):,}."
        return Row.of(head, "accuracy", "NOT_COMPARABLE", reason, gated=rule.gate)
    flips = differing(before, after) if labels else []
    numbers = then.loglikelihoods
    typical = [_typical(decode(one.loglikelihoods), decode(numbers)) for one in nows]
    largest: list[float | None] = []
    if head.case.load_format == "dummy":
        comparable = [one for one in nows if numbers and len(one.loglikelihoods) == len(numbers)]
        largest = [largest_difference(one.loglikelihoods, numbers) for one in comparable]
    return Answered(
        before=base,
        result=head,
        rule=rule,
        items=len(after),
        base=value_of(then, rule.metric),
        head=value_of(now, rule.metric),
        lost=[number for number in flips if before[number] == labels[number]],
        won=[number for number in flips if after[number] == labels[number]],
        difference=max((one for one in typical if one is not None), default=None),
        largest=max((one for one in largest if one is not None), default=None),
        changed=max(len(differing(before, one)) for one in afters),
        launch=None if all(one == after for one in afters) else nows.index(now) + 1,
        launches=len(nows),
    )


def below_floor(result: CaseResult, rule: AccuracyRule) -> str | None:
    """Return why the answers are wrong whatever the baseline's are; None where they are not."""
    values = [value_of(accuracy, rule.metric) for accuracy in result.accuracies]
    if values and rule.floor is not None and result.case.load_format != "dummy":
        worst = min(values)
        if worst < rule.floor - _ROUNDING:
            where = "" if worst == max(values) else f" in launch {values.index(worst) + 1} of {len(values)}"
            floor = f"below the policy's floor of {percent(rule.floor, 2)}."
            return f"Accuracy ({rule.metric}) {percent(worst, 2)}{where}, {floor}"
    check = result.accuracy_check
    return f"{check.text}." if check is not None and check.ok is False else None


def predictions_row(case: Answered, *, gated: bool) -> Row:
    """Judge whether a launch answers any item differently, whether right or wrong."""
    result: Decided = "REGRESSED" if case.changed else "OK"
    reason = f"{case.changed:,} of {case.items:,} predictions changed ({case.rule.metric})."
    reason = reason if case.changed else f"All {case.items:,} predictions are unchanged."
    figures = {"base": 0.0, "head": case.changed / max(1, case.items), "threshold": 0.0}
    return Row.of(case.result, "predictions", result, reason, gated=gated, **figures)


def _difference_in_words(
    difference: float, allowed: float, dtype: str | None, where: str, *, fixed: bool, how: str = "typically differ by"
) -> str:
    """Return a difference of log-likelihoods with what is allowed: by rounding in a dtype; None: by the policy."""
    wrong = ": the baseline failed its own accuracy check" if fixed else ""
    if not math.isfinite(difference):
        return f"Log-likelihoods are not finite{where}, and the baseline's are{wrong}."
    threshold = "the policy allows" if dtype is None else f"rounding in {dtype} explains"
    percents = 100 * difference, 100 * allowed
    digits = next((one for one in range(2, 9) if len({f"{value:.{one}g}" for value in percents}) > 1), 2)
    found, limit = (f"{value:.{digits}g} %" for value in percents)
    return f"Log-likelihoods {how} {found} from the baseline's{where}; {threshold} {limit}{wrong}."


def _of_other_numbers(before: CaseResult, after: CaseResult) -> Decided:
    """Return the verdict on numbers that differ. A baseline that failed its own check was the wrong one."""
    return "IMPROVED" if before.has_wrong_answers and not after.has_wrong_answers else "REGRESSED"


def _typical(values: Sequence[float], expected: Sequence[float]) -> float | None:
    """Return the typical difference, infinite where only the values are not finite; None: they cannot be compared."""
    if not expected or len(expected) != len(values) or not math.isfinite(sum(expected)):
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
    thens, nows = ([one.generation for one in of.launches if one.generation is not None] for of in (base, head))
    known = bool(thens) and thens[0].tokens, bool(nows) and all(now.tokens for now in nows)  # a server can have none
    if not all(known):
        return absent(head, "texts", *known, gated=rule.gate)
    then = thens[0]
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
    return Row.of(head, "texts", result, reason, gated=rule.gate and result != "CHANGED", threshold=allowed)


def _on_common_prefix(before: Generation, after: Generation) -> tuple[float, list[int]]:
    """Return the typical difference, NaN where `_typical` has none, and the first other token of each text, from 1."""
    then, now = decode(before.tokens, "i"), decode(after.tokens, "i")
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
