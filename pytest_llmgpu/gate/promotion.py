"""Promotions: what is wrong with a report, and growth over several baselines (`creep`).

Each baseline is within the threshold of the one before, and their sum is not. A baseline has the figures of the
baselines before it, and the gate compares the candidate with the oldest of them.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.gate.exact import NAMED
from pytest_llmgpu.gate.policy import Policy, with_allowed
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.metrics import MetricName, spec_of
from pytest_llmgpu.report.report import Promoted, PromotedCase, Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import MIB, capital, listed, signed_percent
from pytest_llmgpu.report.verdicts import Row, SessionState, Verdicts

FOLLOWED: tuple[MetricName, ...] = ("device_time", "traffic", "memory")
"""Metrics whose small growth is no chance. Wall time varies by more."""

MOST_PROMOTIONS = 50

_STEPS = 2
"""Number of thresholds by which a figure may grow over all promotions."""

_EQUAL_CLOCK = 0.005
"""Largest relative difference of clocks that count as equal: device time differs by at most as much."""


class Growth(NamedTuple):
    """A metric of a case that grew by more than is allowed since an earlier baseline."""

    metric: MetricName
    then: float
    now: float
    threshold: float
    """Threshold for one promotion with its absolute part, as a fraction."""
    since: Promoted
    ago: int
    """The earlier baseline, and the number of promotions since then, its own included."""


def states(report: Report) -> Iterator[SessionState]:
    """Yield the reasons to doubt a report as a whole."""
    session = report.session
    if session.interrupted:
        yield "interrupted"
    elif not session.complete:
        yield "incomplete"
    elif session.exit_status and session.failed_tests != 0:
        yield "failed"
    if report.commit.dirty:
        yield "dirty"
    if report.cases and all(map(disturbances.of_case, report.cases)):
        yield "disturbed"


def unfit(candidate: Report) -> Iterator[str]:
    """Yield the reasons why a report cannot be a baseline, whatever the present one is, each with its remedy."""
    found, status = set(states(candidate)), candidate.session.exit_status
    if candidate.commit.sha is None:
        yield "the report does not record its commit: commit the benchmark (git init, git add, git commit) and measure"
    if "dirty" in found:
        yield "files were changed after the commit: commit them (git status), and measure again"
    # Items of the gate fail a run whose tests passed: its exit status is 1 then.
    if found & {"interrupted", "incomplete", "failed"} or status not in {None, 0, 1}:
        yield f"the run did not complete, or tests failed (exit status {status})"
    bad = {"timeout", "crashed", "error", "interrupted"}
    failed = [f"{one.id} {one.outcome}" for one in candidate.cases if one.outcome in bad]
    failed += [f"wrong answers of {one.id}" for one in candidate.cases if one.has_wrong_answers]
    if failed or not any(one.outcome == "completed" for one in candidate.cases):
        yield f"failed: {listed(failed, NAMED) or 'no case completed'}"


def judged(candidate: Report, present: Verdicts | None, policy: Policy, today: datetime.date) -> list[Verdicts]:
    """Return the verdicts that a promotion needs to pass: against the present baseline, and those of the run itself.

    The run was not compared, or with the present baseline: then its own verdicts add nothing.
    """
    own, found = candidate.verdicts, [present] if present is not None else []
    if own is not None and own.baseline is not None:
        again = present is not None and present.baseline is not None and present.baseline.sha256 == own.baseline.sha256
        rows, _ = with_allowed(own.rows, policy, today)
        found += [] if again else [msgspec.structs.replace(own, rows=rows)]
    return found


def promotions(base: Report, head: Report, verdicts: Verdicts, policy: Policy) -> list[Promoted]:
    """Return the earlier baselines of a report that replaces a baseline, the oldest first.

    A metric that the policy allowed to grow, or that improved, starts again: its earlier figures are dropped.
    """
    again = {(row.key, row.metric) for row in verdicts.rows if row.improved or (row.worse and row.allowed is not None)}
    crept = [result for result in head.cases if (result.key, "creep") in again]
    again |= {(result.key, one.metric) for result in crept for one in growths(base.promotions, result, policy)}
    cases = {result.key: _promoted(result) for result in reversed(base.cases) if result.outcome == "completed"}
    earlier = [*base.promotions, Promoted(commit=base.commit.sha, created=base.created, cases=cases)]
    earlier = copy.deepcopy(earlier[-MOST_PROMOTIONS:])
    for entry, (key, metric) in itertools.product(earlier, again):
        if key in entry.cases:
            entry.cases[key].figures.pop(metric, None)
    return earlier


def rows(base: Report, results: Sequence[CaseResult], judged: Sequence[Row], policy: Policy) -> list[Row]:
    """Return a row for each result that crept. A metric that is worse than the baseline has a row of its own."""
    stated = {(row.id, row.metric) for row in judged if row.worse or row.verdict == "NOT_COMPARABLE"}
    found = []
    for result in {one.key: one for one in reversed(results)}.values():  # of two with one key, the first was recorded
        grown = [one for one in growths(base.promotions, result, policy) if (result.id, one.metric) not in stated]
        if not grown:
            continue
        also = [f"{capital(one.metric.replace('_', ' '))} {signed_percent(one.now / one.then - 1, 2)}" for one in grown]
        worst, change, limit = grown[0], also[0], f"{100 * grown[0].threshold:.3g} %"
        was, now = map(spec_of(worst.metric).written, (worst.then, worst.now))
        if worst.metric == "memory":
            change = f"Memory {(worst.now - worst.then) / MIB:+,.0f} MiB ({signed_percent(worst.now / worst.then - 1)})"
            limit = f"{worst.threshold * worst.then / MIB:,.0f} MiB"
        elif worst.metric == "traffic":
            now += " per sequence"
        since = f"{(worst.since.commit or 'unknown')[:8]} of {worst.since.created[:10]}, {worst.ago} promotions ago"
        reason = f"{change} since {since}, threshold {_STEPS} x {limit}: {now}, was {was}."
        reason += f"\nAlso: {', '.join(also[1:])}." if also[1:] else ""
        figures = {"ratio": worst.now / worst.then, "threshold": _STEPS * worst.threshold}
        step = spec_of("creep").next_step  # in place of bisect, whose reports have no promotions
        row = Row.of(result, "creep", "REGRESSED", reason, gated=policy.creep.gate, next_step=step, **figures)
        found.append(row)
    return found[::-1]


def growths(earlier: Sequence[Promoted], result: CaseResult, policy: Policy) -> list[Growth]:
    """Return the metrics that grew by more than twice their threshold since the oldest baseline, the worst first."""
    now, found = _promoted(result), []
    for metric, value in now.figures.items():
        rule = getattr(policy, metric)
        place, was = 0, 0.0
        for number, then in enumerate(entry.cases.get(result.key) for entry in earlier):
            # An earlier figure counts if it was measured in the same way.
            if then is None or metric not in then.figures or then.execution != now.execution:
                continue
            low, high = sorted(one.clock_ghz or 0.0 for one in (then, now))
            alike = then.uuids == now.uuids and 0 < high <= (1 + _EQUAL_CLOCK) * low
            same = metric == "memory" or then.batches_sha256 == now.batches_sha256
            if same and (metric != "device_time" or alike):
                place, was = number, then.figures[metric]
                break
        threshold = max(rule.threshold, getattr(rule, "absolute_bytes", 0) / (was or 1))
        if rule.gate and was and value - was > _STEPS * threshold * was:
            found.append(Growth(metric, was, value, threshold, earlier[place], len(earlier) - place + 1))
    return sorted(found, key=lambda one: (1 - one.now / one.then) / max(one.threshold, 1e-9))


def _promoted(result: CaseResult) -> PromotedCase:
    """Return the figures of a completed result, and what has to be equal where they are compared."""
    launches = [launch for launch in result.launches if disturbances.untimed(launch, "device_time") is None]
    launches = [one for one in launches if all(rank.clock_ghz for rank in one.ranks)] or launches
    timed = msgspec.structs.replace(result, launches=launches)
    figures = {metric: spec_of(metric).of(timed if metric == "device_time" else result) for metric in FOLLOWED}
    ranks = [rank for launch in launches for rank in launch.ranks]
    clocks_ghz = [ghz for rank in ranks for passes in rank.clock_ghz or () for ghz in passes]
    works = [(one.plan_sha256, one.work and (one.work.batches, one.work.eager_batches)) for one in result.launches]
    # A launch without work passes ran the same batches.
    ran = {f"{plan} {batches}" for plan, passes in works for batches in (None, passes)}
    conditions = sorted(ran | {"forwards launched ahead" for rank in ranks if rank.launched_ahead})
    return PromotedCase(
        figures={metric: figure.value for metric, figure in figures.items() if figure is not None},
        execution=result.case.execution,
        batches_sha256=hashlib.sha256("\n".join(conditions).encode()).hexdigest(),
        uuids=sorted({uuid for rank in ranks for uuid in rank.uuids}),
        clock_ghz=statistics.fmean(clocks_ghz) if clocks_ghz and all(rank.clock_ghz for rank in ranks) else None,
    )
