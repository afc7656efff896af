"""The result of the gate in one sentence, and the next step."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from pytest_llmgpu.gate import cause
from pytest_llmgpu.gate.cause import KERNEL_SEEN
from pytest_llmgpu.gate.exact import NAMED
from pytest_llmgpu.gate.judge import LARGEST_UNSEEN, TIMES, ExitStatus, exit_status, fails
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.program import FLOPS, SYNCS
from pytest_llmgpu.gate.times import CLOCK, MEASURE_HERE, PRACTICAL_LAUNCHES
from pytest_llmgpu.report.disturbances import TITLES
from pytest_llmgpu.report.text import FACTORS_FROM, listed, percent, plural, signed_percent, slowdown
from pytest_llmgpu.report.verdicts import DIFFERS, NEITHER, NO_COMMON, ONLY_CANDIDATE, Row, Verdicts, worst_first

_STATES: dict[str, str] = {
    "interrupted": "was interrupted",
    "incomplete": "is incomplete",
    "failed": "has failed tests",
    "dirty": "has uncommitted changes",
    "disturbed": "was disturbed in every case",
}

_NEXT_STEPS = {
    "MISSING": "Measure it again; if it was removed on purpose, promote this report or allow it in the policy.",
    "NOT_COMPARABLE": "Measure both on one kind of machine with equal settings and files, or promote this report.",
    "UNDECIDED": "Measure again.",
    "NEW": "Make this report the baseline: llmgpu promote.",
}
"""The next step of the verdicts without a comparison; for the others it is in the table of metrics."""

SAME_ENVIRONMENT = "Measure again in the environment of the baseline, or the baseline in this one."
"""The next step where the environment differs from that of the baseline and no other cause is known."""

_QUIET = 0.015
"""Smallest slowdown of device time at a fixed clock, up to which `KERNEL_SEEN` is promised: not of other GPUs."""


class Headline(NamedTuple):
    """The result of the gate."""

    status: ExitStatus
    worst: Sequence[Row]
    """The rows that decide the status, the worst first; empty if no row does."""
    states: Sequence[str]
    text: str
    """One sentence that begins with the word for the exit status."""


def headline(verdicts: Verdicts, policy: Policy) -> Headline:
    """Return the result of the gate."""
    status = exit_status(verdicts, policy)
    failing = worst_first(row for row in verdicts.rows if fails(row, policy))
    worst: list[Row] = []
    if status is ExitStatus.REGRESSED:
        worst = [row for row in failing if row.verdict in {"REGRESSED", "MISSING"}]
        # Of each verdict outcomes and wrong answers come first, and rows that have a number.
        first = {"outcome", "accuracy", "texts"}
        worst.sort(key=lambda row: (row.verdict == "MISSING", row.metric not in first, row.ratio is None))
    elif status is ExitStatus.NOT_JUDGED:
        worst = sorted(failing, key=lambda row: row.verdict != "NOT_COMPARABLE")
    states = [] if verdicts.head is None else verdicts.head.states
    # Items of the gate fail tests themselves: where the gate fails, failed tests state nothing new.
    states = [state for state in states if state != "failed" or status is ExitStatus.PASSED]
    if worst:
        text = _of_rows(worst)
        changed = [row.cause for row in verdicts.rows if (row.metric, row.id) == ("program", worst[0].id) and row.cause]
        if worst[0].metric in {"accuracy", "texts"} and changed:
            text += f"; program changed: {cause.describe(changed[0])}"
    elif status is ExitStatus.PASSED:
        text = _of_pass(verdicts)
    else:
        often = sorted(verdicts.not_compared.items(), key=lambda pair: -pair[1])
        reasons = listed([f"{count:,} x {reason}" for reason, count in often], NAMED)
        reasons = next((reason for reason in verdicts.not_compared if reason.startswith(NO_COMMON)), reasons)
        why = "there is no baseline" if verdicts.baseline is None else reasons or "the reports share no case"
        text = f"NOTHING COMPARED: {why}"
    slower = [row for row in verdicts.rows if row.verdict == "UNDECIDED" and row.gated and (row.low or 0.0) > 1]
    if slower and not worst:
        text += f"; not enough data to decide {row_in_words(max(slower, key=lambda row: row.ratio or 0.0))}"
    if (slower or any(row.worse for row in worst)) and (differing := differences(verdicts)):
        text += f"; {DIFFERS}{listed(differing, NAMED)}"
    if states:
        text += f"; the candidate {' and '.join(_STATES[state] for state in states)}"
    return Headline(status, worst, states, text)


def differences(verdicts: Verdicts) -> list[str]:
    """Return the differences between the environments of both reports."""
    return [text.removeprefix(DIFFERS) for text in verdicts.warnings if text.startswith(DIFFERS)]


def row_in_words(row: Row) -> str:
    """Return one row in a few words: `tp-bs8 device time +4.1 % (0.0672 s, was 0.0646 s): 93 % in mlp.down_proj`."""
    spec = row.spec
    metric = "wall time" if row.metric == "time" else row.metric.replace("_", " ")
    of_part = "" if row.part is None else f" of the {row.part}"
    why = f": {cause.describe(row.cause)}" if row.cause is not None else ""
    if row.metric == "program" and row.cause is not None:
        growth = (row.ratio or 1.0) - 1
        if row.base is not None and (growth > (row.threshold or 0.0) or row.verdict != "REGRESSED"):
            what = f"{signed_percent(growth)} device time"
        else:  # The cause can be the same number.
            is_named = any(call.name not in (FLOPS, SYNCS) for call in (*row.cause.ops, *row.cause.kernels))
            what = row.reason.partition(", thr")[0] if is_named else "program"
        return f"{row.id} {what}{of_part}{why}"
    name = row.id if row.metric == "outcome" else f"{row.id} {metric}{of_part}"
    if row.unseen and row.smallest_seen is not None:
        seen = f"only slowdowns from {slowdown(row.smallest_seen)} would"
        if row.smallest_seen > FACTORS_FROM:
            seen = f"not even a slowdown by a factor of {FACTORS_FROM:g} would"
        return f"{name}: {seen} have been seen, allowed is {slowdown(LARGEST_UNSEEN)}"
    is_same = spec.points and row.base == row.head  # accuracy, where the numbers behind it are wrong
    ratio = 1.0 if spec.points else row.ratio
    if is_same or not row.compared or row.base is None or row.head is None or ratio is None:
        return f"{name}: {row.reason.splitlines()[0].rstrip('.')}" if row.reason else name
    change = f"{100 * (row.head - row.base):+.2f} pt" if spec.points else signed_percent(ratio - 1)
    # At an equal speed of the host no time is one that a run took.
    times = "" if row.part == "host at equal speed" else f" ({spec.written(row.head)}, was {spec.written(row.base)})"
    return f"{name} {change}{times}{why}"


def next_steps(verdicts: Verdicts, policy: Policy) -> str:
    """Return what to run next in one line; empty if there is nothing to do."""
    failing = headline(verdicts, policy).worst
    unclear = [row for row in verdicts.rows if row.verdict == "UNDECIDED" and row.gated]
    worst = next(iter(failing or worst_first(row for row in unclear if not row.compared)), None)
    base, head = (None if one is None else one.commit for one in (verdicts.baseline, verdicts.head))
    commits, command, both = "", "", "`llmgpu ab`"
    # A regression of uncommitted changes is between no two commits.
    if verdicts.head is not None and "dirty" not in verdicts.head.states and base and head and base != head:
        commits, command = f"{base[:8]} {head[:8]}", verdicts.head.command
        both = f"`llmgpu ab {commits} -- {command}`"
    parts = []
    if worst is not None and (worst.verdict != "UNDECIDED" or not worst.compared):
        known = worst.next_step or (worst.cause is not None and cause.module_of(worst.cause))
        if worst.worse and not known and worst.metric != "creep" and differences(verdicts):
            parts.append(SAME_ENVIRONMENT)
        elif worst.worse and commits and not worst.next_step:
            names = f"--metric {worst.metric} --case {shlex.quote(worst.id)}"
            parts.append(f"`llmgpu bisect {commits} {names} -- {command}` finds the commit, if several are possible.")
        else:
            parts.append(step_of(worst))
        if worst.trace is not None:
            parts.append(f"Its trace opens in ui.perfetto.dev: {worst.trace}")
    first = worst is not None and worst.verdict != "UNDECIDED"  # first things first
    undecided = [row for row in unclear if not first and row.compared and row.allowed is None]
    for why, reports in ((NEITHER, "both reports"), (ONLY_CANDIDATE, "the baseline")):
        lacks = f"device_time: {why}" in verdicts.not_compared
        if lacks and any(row.metric in TIMES and not row.next_step for row in undecided):
            parts.append(f"Measure {reports} with --llmgpu-work=on: one launch decides device time.")
            break
    way = "measure on a quieter machine" if verdicts.in_turn else f"{both} launches both in turn"
    parts += _deciding(undecided, way)
    if not parts and not any(row.compared and row.gated for row in verdicts.rows):
        promote = "Make this report the baseline: `llmgpu promote REPORT --to FILE`."
        parts.append(promote if verdicts.baseline is None else "Measure a case that the baseline has.")
    return f"Next: {' '.join(parts)}" if parts else ""


def step_of(row: Row, *others: Row) -> str:
    """Return the next step for the reader of a row, the worst one, and of others with the same cause."""
    if row.verdict == "UNDECIDED" and row.compared:
        return " ".join(_deciding([row, *others]))
    if row.metric == "accuracy" and not row.next_step and row.worse and not row.lost:
        return "No item was lost: look for the op, the kernel or the weights that changed the log-likelihoods."
    return row.next_step or _NEXT_STEPS.get(row.verdict) or row.spec.next_step


def _deciding(rows: Sequence[Row], way: str = "`llmgpu ab` launches both in turn") -> list[str]:
    """Return what decides rows: their own next steps, and the launches that decide at least half, else `way`."""
    noisy = [row for row in rows if not row.next_step]
    needed = sorted(enough for row in noisy if (enough := row.launches_needed or 0) > (row.n or 0))
    parts = list(dict.fromkeys(row.next_step for row in rows if row.next_step))
    undecided = plural(len(noisy), "undecided row")
    if needed and 2 * len(needed) >= len(noisy):
        parts.append(f"--llmgpu-launches={needed[-1]} in both reports decides {len(needed):,} of {undecided}.")
    elif noisy:
        parts.append(f"More than {PRACTICAL_LAUNCHES} launches are not practical for {undecided}: {way}.")
    return parts


def _of_rows(rows: Sequence[Row]) -> str:
    """Return the worst row, and the number of cases that the others are of."""
    worst, *others = rows
    counts: dict[str, set[str]] = {}
    for row in others:
        counts.setdefault(row.word, set()).update({row.id} - {worst.id})
    more = [f"{plural(len(cases), 'more case')} {verdict}" for verdict, cases in counts.items() if cases]
    if worst.verdict == "UNDECIDED" and not worst.unseen and worst.metric != "outcome":
        more.append("the policy is strict")
    return "; ".join([f"{worst.word}: {row_in_words(worst)}", *more])


def _of_pass(verdicts: Verdicts) -> str:
    """Return the changed program with the largest price, then what was compared, and what would have been seen."""
    compared = [row for row in verdicts.rows if row.compared]
    changed = [row for row in compared if row.metric == "program" and row.verdict == "CHANGED" and row.gated]
    program = max(changed, key=lambda row: row.ratio or 0.0, default=None)
    start = "PASSED:"
    if program is not None and program.cause is not None:
        start = f"PASSED, program changed: {cause.describe(program.cause)};"
    if verdicts.baseline is None:
        return f"{start} there is no baseline to compare with"
    parts = [plural(len({(row.key, row.id) for row in compared}), "case")]
    clocks = [(row.clock_ratio, row.clock_limited) for row in compared if row.clock_ratio is not None]
    clock_ratio, is_limited = max(clocks, key=lambda one: abs(one[0] - 1), default=(1.0, False))
    if abs(clock_ratio - 1) > CLOCK:
        why = " (limit of power or heat)" * is_limited
        than = f"slower{why} than in the baseline" if clock_ratio < 1 else f"faster than in the baseline{why}"
        parts.append(f"the GPU ran {100 * abs(clock_ratio - 1):.2g} % {than}: times compared at equal clock")
    timed = [row for row in compared if row.gated and row.smallest_seen is not None and row.allowed is None]
    least = max((row for row in timed if row.metric == "device_time"), key=attrgetter("smallest_seen"), default=None)
    seen = []
    if least is not None:
        smallest = least.smallest_seen or 0.0
        is_quiet = least.clock_ratio is not None and smallest < _QUIET
        one = f", from {percent(KERNEL_SEEN)} in one kernel" if is_quiet else ""
        seen.append(f"{slowdown(smallest)} of device time ({least.id}{one})")
    quiet = (row for row in timed if row.metric == "time" and row.verdict != "UNDECIDED")
    if (loudest := max(quiet, key=attrgetter("smallest_seen"), default=None)) is not None:
        seen.append(f"{slowdown(loudest.smallest_seen or 0.0)} of wall time ({loudest.id})")
    undecided = [row for row in verdicts.rows if row.gated and row.verdict == "UNDECIDED" and row.allowed is None]
    if seen:
        others = any(one is not None and one.next_step == MEASURE_HERE for one in (least, loudest))
        parts.append(f"{'against other GPUs ' * others}slowdowns from {' and '.join(seen)} would have been seen")
    elif not (undecided or timed):
        parts.append("no gated time was compared")
    if undecided:
        busy = " (CPU cores too busy)" if any(TITLES["cpu"] in row.reason for row in undecided) else ""
        parts.append(f"{plural(len(undecided), 'row')} undecided{busy}")
    if allowed := sum(row.allowed is not None for row in verdicts.rows):
        parts.append(f"{plural(allowed, 'allowed regression')}")
    return f"{start} {'; '.join(parts)}"
