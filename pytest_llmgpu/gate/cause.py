"""The program of a case: the verdict on a change, and the cause of other verdicts, with its words.

A change is stated, and fails by its price or where the time is not measured.

A changed program explains a longer device time by its price. Wall time grows in the kernels, in collectives, in waiting
for another rank, in copies or where the GPU is idle: what grew most in a work pass is named, with the added calls.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from pytest_llmgpu.gate import program
from pytest_llmgpu.gate.exact import absent, other_execution
from pytest_llmgpu.gate.policy import ProgramRule
from pytest_llmgpu.gate.program import FLOPS, OWN, SYNCS, WAITS, Pair
from pytest_llmgpu.gate.times import WALL_TIMES
from pytest_llmgpu.report.derived import of_prefill
from pytest_llmgpu.report.kernel_families import collective_of, family_of
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import listed, percent, plural, signed_percent
from pytest_llmgpu.report.verdicts import WORST_FIRST, CallsChange, Cause, Decided, Place, Row, SlowerKernel

_EXPLAINED = (*WALL_TIMES, "device_time", "traffic")
"""Metrics that work passes can explain, besides the program itself."""
_MORE = 0.01
"""A host that launches this fraction of kernels more is slower for that reason."""
_SHOWN = 0.3
"""Work passes show a change of wall time if a part of them grew by this fraction of it. They are too few to show all of
it: the time of the host alone varies."""
_MOST_CALLS = 6
"""Most names in a line."""
_EXPLAINS = 0.5
"""A changed program explains a slowdown if its price is this fraction of it."""

SLOWER_KERNEL, _BETWEEN_GPUS = 0.003, 0.004
"""Growth of one unchanged kernel beyond that of the others, as a fraction of device time, that is a regression, on the
same GPUs and on others: in 4,134 healthy pairs the largest was 0.29 %, in later ones of other GPUs 0.33 %."""
KERNEL_SEEN = 0.005
"""Growth of one kernel, as a fraction of device time, that the gate promises to find on the same GPU."""
_ERRORS = 4.0
"""Standard errors that such a growth has to exceed: one of 40 kernels of 21 cases seldom does by chance."""

_OUTSIDE = re.compile(r"(?:in |\b(from |to ))(?:other|\(outside\))(?!\S)")
"""Names that recorded ops (`other`) and kernels have outside of modules, as a place in a sentence."""

PREFIX = "Cause: "
"""Start of the line of a reason that states the cause."""


def program_row(
    base: CaseResult, head: CaseResult, pairs: Sequence[Pair], rule: ProgramRule, *, gain: float, better: bool
) -> Row | str | None:
    """Return the verdict on what a case calls, by the rank whose change costs most; a reason where nothing is known.

    `gain` is the least fraction by which device time became shorter at a fixed clock. `better`: device time or wall
    time became better by more than its threshold.
    """
    if not pairs:
        then, now = (any(map(program.is_known, result.launches)) for result in (base, head))
        missing = absent(head, "program", then, now, gated=rule.gate)
        return missing or other_execution(base, head) or "the forwards or their work passes ran other batches"
    found = [_of_rank(head, pair, rule, gain=gain, better=better) for pair in pairs]
    worst = min(found, key=lambda row: (WORST_FIRST.index(row.result), -(row.ratio or 0.0)))
    if worst.cause is None:
        return worst
    changed = [number for number, row in enumerate(found) if row.cause is not None]
    ran, runs = _implementations(base), _implementations(head)
    switched = [f"{name}: {was} -> {runs[name]}. " for name, was in ran.items() if runs.get(name, was) != was]
    alone = changed[0] if len(changed) == 1 < len(pairs) else None
    reason = "".join(switched) + worst.reason
    return stated(msgspec.structs.replace(worst, reason=reason), msgspec.structs.replace(worst.cause, rank=alone))


def host_calls_row(base: CaseResult, head: CaseResult, pairs: Sequence[Pair]) -> Row | str | None:
    """Compare the calls of Python functions in a forward, by the rank that has most more. A policy has to gate them."""
    then, now = (any(rank.host_calls for launch in one.launches for rank in launch.ranks) for one in (base, head))
    if (missing := absent(head, "host_calls", then, now, gated=True)) is not None:
        return missing
    versions = {rank.python_versions for pair in pairs for rank in pair}
    if len(versions) != 1 or not all(versions):
        return "the forwards or their work passes ran other batches, or another version of Python"
    pair = max(pairs, key=lambda one: one.after.python_calls - one.before.python_calls)
    before, after = pair.before.python_calls, pair.after.python_calls
    result: Decided = "REGRESSED" if after > before else "IMPROVED" if after < before else "OK"
    reason = f"Calls of Python functions in a forward: {after:,}, were {before:,}."
    row = Row.of(head, "host_calls", result, reason, base=before, head=after, ratio=after / max(1, before))
    changed = program.changes(pair)
    if before == after or changed is None:
        return row
    return stated(row, Cause(place="program", host_calls=changed.host_calls))


def _implementations(result: CaseResult) -> dict[str, str]:
    """Return the implementations of the latest launch by kind of layer, with their kernels where they were counted."""
    launch = result.launches[-1]
    counted = next((rank.implementations for rank in launch.ranks if rank.implementations), {})
    named = {*counted, *(("attention", "experts") if counted else ())}
    return {kind: name for kind, name in launch.implementations.items() if kind not in named} | counted


def _of_rank(head: CaseResult, pair: Pair, rule: ProgramRule, *, gain: float, better: bool) -> Row:
    """Return the verdict on one rank."""
    changed = program.changes(pair)
    if changed is None:
        return Row.of(head, "program", "OK", "The program is equal.", gated=rule.gate)
    limit, before, after = max(rule.threshold, changed.price_error or 0.0), pair.before, pair.after
    equal_flops = bool(before.flops) and before.flops == after.flops and not (before.device_s or after.device_s)
    free = not changed.kernels if pair.is_priced else equal_flops
    ratio = 1 + (changed.price or 0.0) if changed.price is not None or free else None
    flops = after.flops / before.flops if before.flops and after.flops else 1.0
    result: Decided = "CHANGED"
    reason = "The program changed; its kernels are the same, or their time is not known."
    syncs = sum(call.growth for call in changed.runtime_calls if call.name == SYNCS)
    if syncs > 0 and not better:
        result, reason = "REGRESSED", f"{plural(syncs, 'host synchronization')} more in a forward, threshold 0."
    elif changed.price is not None:
        allowed = f"threshold {percent(limit, 2)}"
        reason = f"The program changed by {signed_percent(changed.price, 2)} of device time, {allowed}"
        won = changed.price > limit and gain > limit
        reason += f"; device time became at least {percent(gain, 2)} shorter." if won else "."
        result = "REGRESSED" if changed.price > limit and not won else "CHANGED"
    elif flops != 1 and not (pair.is_priced or (before.device_s and better)):
        ratio = flops
        reason = f"FLOPs {signed_percent(flops - 1, 2)}, threshold {percent(rule.flops)}."
        result = "REGRESSED" if flops - 1 > rule.flops else "CHANGED"
    figures: dict[str, Any] = {"ratio": ratio, "threshold": rule.threshold, "cause": changed}
    if changed.price is not None:
        figures |= {"base": before.device_s, "head": (before.device_s or 0.0) * (1 + changed.price)}
    return Row.of(head, "program", result, reason, gated=rule.gate, **figures)


def with_slower_kernels(row: Row, pairs: Sequence[Pair]) -> Row:
    """Return a row on device time that is REGRESSED if an unchanged kernel became slower than the others.

    On other GPUs it has to be slower on every rank: one GPU may be slower than the others.
    """
    if row.base is None or row.cause is not None:
        return row
    of_ranks: dict[tuple[str, str], list[tuple[SlowerKernel, int]]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        for kernel in program.slower_kernels(pair):
            of_ranks[kernel.family, kernel.name].append((kernel, number))
    same = all(pair.same_gpus for pair in pairs)
    choose, ranks = (max, 1) if same else (min, len(pairs))
    shown = [choose(found, key=lambda one: one[0].excess) for found in of_ranks.values() if len(found) >= ranks]
    worst, number = max(shown, key=lambda one: one[0].excess, default=(None, 0))
    limit = SLOWER_KERNEL if same else _BETWEEN_GPUS
    if worst is None or worst.excess <= max(limit, _ERRORS * worst.error):
        return row
    cause = Cause(place="kernel", rank=number if len(pairs) > 1 else None, kernel=worst)
    if row.result == "REGRESSED":
        return stated(row, cause)
    excess = f"{signed_percent(worst.excess, 2)} of device time, threshold {percent(limit, 2)}"
    slower = f"One kernel takes {percent(worst.growth)} longer, relative to the others: {excess}"
    reason = f"{slower}. {row.reason.splitlines()[0]}"
    verdict = "REGRESSED" if row.gated else "CHANGED"
    return stated(msgspec.structs.replace(row, verdict=verdict, improved=False, reason=reason, next_step=""), cause)


def with_cause(row: Row, base: CaseResult, head: CaseResult, names: tuple[Sequence[str], Sequence[str]]) -> Row:
    """Return a row with its cause, which its reason states as well; the row itself where no cause is found."""
    if row.metric not in _EXPLAINED or not row.worse or row.cause is not None:
        return row
    if row.metric == "first_token" or row.part == "prefill":
        base, head = of_prefill(base), of_prefill(head)
    without_host = row.part in {"replays in a row", "batches that the GPU limits"}
    metric: MetricName = "device_time" if without_host else row.metric
    found = find(metric, program.pairs_of(base, head, names), ratio=row.ratio)
    return row if found is None else stated(row, found)


def stated(row: Row, found: Cause) -> Row:
    """Return a row with a cause, which its reason states at its end."""
    calls = Counter(
        f"{_short(change.name)} {change.before:,} -> {change.after:,}"
        for changes in (found.kernels, found.ops, found.runtime_calls, found.host_calls)
        for change in changes
        if change.name != FLOPS
    )
    texts = [text if count == 1 else f"{text} in {count} modules" for text, count in calls.items()]
    details = [f"Calls of {row.id}: {listed(texts, _MOST_CALLS)}."] if calls else []
    reason = "\n".join([row.reason, f"{PREFIX}{describe(found)}.", *details])
    return msgspec.structs.replace(row, cause=found, reason=reason)


def find(metric: MetricName, pairs: Sequence[Pair], *, ratio: float | None = None) -> Cause | None:
    """Return the cause of a growth, or None where the work passes cannot be compared or nothing changed in them.

    It is everything that is called more or less often, of the rank where it costs most; for traffic collectives alone.
    Device time has a changed program as its cause only if the price explains the growth.
    """
    growth = max(0.0, (ratio or 1.0) - 1)
    if pairs and metric in WALL_TIMES and all(rank.device_s is not None for pair in pairs for rank in pair):
        return _of_wall_time(pairs, growth)
    found: dict[int, Cause] = {}
    for number, pair in enumerate(pairs):
        changed = program.changes(pair)
        if changed is not None and metric == "traffic":
            changed = Cause(place="program", kernels=_collectives(changed.kernels), forwards=changed.forwards)
        if changed is not None and (changed.calls or changed.moved):
            found[number] = changed

    def cost(number: int) -> tuple[float, int]:
        return found[number].price or 0.0, max([0, *(call.growth for call in found[number].calls)])

    most = max(found, key=cost, default=None)
    if most is None or (metric == "device_time" and (found[most].price or 0.0) <= _EXPLAINS * growth):
        return None
    return msgspec.structs.replace(found[most], rank=most if len(found) == 1 < len(pairs) else None)


def describe(cause: Cause) -> str:
    """Return the cause as a clause for a headline."""
    text = _OUTSIDE.sub(r"\1outside modules", _place_in_words(cause))
    if cause.rank is None:
        return text
    return f"waiting for rank {cause.rank}: {text}" if cause.place in OWN else f"rank {cause.rank} alone: {text}"


def module_of(cause: Cause) -> str | None:
    """Return the module with the largest part of a cause; None if no module is named."""
    if cause.kernel is not None:
        return cause.kernel.module
    return next((call.module for call in (*cause.ops, *cause.kernels) if call.module is not None), None)


def _of_wall_time(pairs: Sequence[Pair], growth: float) -> Cause:
    """Return the part of a pass that grew most, of the rank that grew most, named if others grew half as much."""
    growths_s = [one.after.own_s - one.before.own_s for one in pairs]
    number = growths_s.index(max(growths_s))
    pair, others_s = pairs[number], [*growths_s[:number], *growths_s[number + 1 :]]
    before, after = pair.before.parts_s, pair.after.parts_s
    place = max(before, key=lambda one: after[one] - before[one])
    changed = program.changes(pair) or Cause(place=place, forwards=pair.after.batches)
    found = msgspec.structs.replace(changed, place=place)
    if after[place] - before[place] < _SHOWN * growth * sum(before.values()):
        # The GPU has the same work, and its passes show no growth: the rest of the time is the host's.
        return msgspec.structs.replace(found, place="host")
    alone = bool(others_s) and growths_s[number] > 0 and max(others_s) <= growths_s[number] / 2
    rank = number if alone and place in OWN else None
    return msgspec.structs.replace(found, rank=rank, before_s=before[place], after_s=after[place])


def _collectives(kernels: Iterable[CallsChange]) -> list[CallsChange]:
    return [change for change in kernels if family_of(change.name) == "collective"]


def _place_in_words(cause: Cause) -> str:
    """Return the calls that explain the difference in a place, else its growth in a work pass."""
    place, kernel = cause.place, cause.kernel
    if place == "program" or (place == "device" and cause.kernels):
        return _program_in_words(cause)
    if kernel is not None:
        where = "" if kernel.module is None else f"{kernel.module} "
        grown = signed_percent(kernel.excess, 2)
        return f"{where}{kernel.family} kernel {_short(kernel.name)} {grown}, called as often as before"
    launched = [change for change in cause.runtime_calls if change.growth > _MORE * change.before]
    calls: Sequence[tuple[Place, CallsChange | None, str]] = (
        ("host", _first_growth(cause.runtime_calls, WAITS), ": the host waits for the GPU"),
        ("host", _first_growth(launched, "Launch"), ": the host launches more kernels"),
        ("transfer", _first_growth(_collectives(cause.kernels)), ""),
        ("copies", _first_growth([*cause.kernels, *cause.runtime_calls], r"Mem(cpy|set)"), ""),
    )
    for of, found, why in calls:
        if of == place and found is not None:
            return _call_in_words(found) + why
    words = {"device": "kernels", "transfer": "transfers between GPUs", "waiting": "ranks that wait for each other"}
    text = "idle time of the GPU" if place == "host" else words.get(place, place)
    if cause.before_s is not None and cause.after_s is not None:
        text += f" {1e3 * (cause.after_s - cause.before_s):+.3g} ms in a work pass of "
        text += plural(cause.forwards, "forward")
    elif place == "host":
        text = "the kernels do not explain it"
    if place == "host":
        python = _first_growth(cause.host_calls)
        text += ": the host takes longer" + ("" if python is None else f" ({_call_in_words(python)})")
    return text


def _program_in_words(cause: Cause) -> str:
    """Return what is called more, first what computes something, with the kernel that costs most and the price."""
    more = _first_growth([one for one in cause.ops if not program.COMPUTES_NOTHING.search(one.name)])
    kernel = _first_growth(cause.kernels)
    syncs = next((one for one in cause.runtime_calls if one.name == SYNCS and one.growth > 0), None)
    if cause.moved and not (cause.ops or cause.kernels or syncs):
        return f"ops moved from {cause.moved}"
    gone = next((one for one in cause.kernels if one.growth < 0), None)
    priced = "" if cause.price is None else signed_percent(cause.price, 2)
    if more is None and kernel is not None and gone is not None:
        where = "" if kernel.module is None else f" in {kernel.module}"
        text, kernel = f"{_short(kernel.name)} in place of {_short(gone.name)}{where}", None
    else:
        first = more or kernel or syncs or _first_growth(cause.runtime_calls) or _first_growth(cause.host_calls)
        gone_op = next((one for one in cause.ops if more and one.growth < 0 and one.module == more.module), None)
        what = more and (more.name, more.growth, more.per_layer)
        alike = [one.module or "" for one in cause.ops if (one.name, one.growth, one.per_layer) == what]
        text = _call_in_words(first or cause.calls[0], cause.forwards if first is kernel else 1, gone_op, alike)
        kernel = kernel if first is more else None
    number = "" if kernel is None else f"{max(1, kernel.growth // cause.forwards):,} {_short(kernel.name)}"
    amounts = ", ".join(filter(None, (number, priced)))
    return f"{text} ({amounts})" if amounts else text


def _first_growth(changes: Iterable[CallsChange], pattern: str | re.Pattern[str] = "") -> CallsChange | None:
    """Return the first growth among names that a pattern matches."""
    return next((one for one in changes if one.growth > 0 and re.search(pattern, one.name)), None)


def _call_in_words(
    change: CallsChange, forwards: int = 1, gone: CallsChange | None = None, alike: Sequence[str] = ()
) -> str:
    """Return how often a function is called more, or less: `1 more aten::clone in each layers.*.mlp`.

    `gone` was called in its place: `1 more aten::silu in place of aten::gelu in each layers.*.mlp`. Modules that
    changed alike are counted: `1 more aten::mm in each of 3 modules of layers.*.mlp`.
    """
    if change.name == FLOPS:
        where = "" if change.module is None else f" in {change.module}"
        return f"{signed_percent(change.growth / max(1, change.before), 2)} FLOPs{where}"
    sign = "more" if change.growth > 0 else "fewer"
    name = f"Python calls in {change.name}" if change.name.endswith(".py") else _short(change.name)
    name += "" if gone is None else f" in place of {_short(gone.name)}"
    if len(alike) > 1:
        same = takewhile(lambda names: len({*names}) == 1, zip(*(module.split(".") for module in alike), strict=False))
        common = ".".join(names[0] for names in same)
        calls = change.per_layer or max(1, abs(change.growth) // forwards)
        return f"{calls:,} {sign} {name} in each of {len(alike)} modules{f' of {common}' if common else ''}"
    if change.per_layer:
        return f"{change.per_layer:,} {sign} {name} in each {change.module}"
    where = "" if change.module is None else f" in {change.module}"
    if where and change.layers is not None:
        where += f" ({'at most ' if change.layers > 1 else ''}{plural(change.layers, 'layer')})"
    return f"{max(1, abs(change.growth) // forwards):,} {sign} {name}{where}"


def _short(name: str) -> str:
    """Return a name without return type, namespaces, template arguments and parameters; of a collective its kind."""
    if family_of(name) == "collective":
        return collective_of(name)
    plain = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    short = plain if name.startswith("aten::") else (plain.rpartition("::")[2] or plain).strip("_ ")
    return short or name  # a source of Python such as <string>
