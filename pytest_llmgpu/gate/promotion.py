"""Which report may become the baseline, and how it does: its verdicts against the one it replaces stay in it."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.classify import fails
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.timing.calibration import Calibration
from pytest_llmgpu.report import disturbances, file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Baseline, Verdicts, worst_first
from pytest_llmgpu.store import references
from pytest_llmgpu.store import store as storage
from pytest_llmgpu.store.store import Stored

__all__ = ["NAME", "Trial", "counted", "current_in", "is_same", "keep", "trial", "unfit"]

NAME = references.BASELINE
"""Name of the baseline in the store."""

_BAD = frozenset(("timeout", "crashed", "error", "interrupted"))
_NAMED = 3


class Trial(NamedTuple):
    """How a report stands against the baseline that it is to replace."""

    verdicts: Verdicts
    objections: list[str]
    """Why it may not; nothing where it may."""
    measure_noise: bool
    """Whether times could not be told while the runner's noise is assumed: calibrated it may pass."""
    begin_anew: bool
    """Whether all that stands against it is that it measured something else: no measurement of it will do."""


def unfit(candidate: Report) -> list[str]:
    """Return why a report may be no baseline at all, whatever there was before; nothing where it may."""
    session, found = candidate.session, []
    if candidate.commit.sha is None:
        found.append("nameless: it does not know which commit it measured")
    if candidate.commit.dirty:
        found.append("dirty: files were changed since the commit that it names")
    if not session.complete or session.interrupted:
        found.append("failed: its run did not complete")
    elif session.exit_status:
        found.append(f"failed: pytest ended with exit status {session.exit_status}")
    if not any(result.outcome == "completed" for result in candidate.cases):
        found.append("failed: no case completed")
    bad = [f"{result.id} {result.outcome}" for result in candidate.cases if result.outcome in _BAD]
    wrong = [result.id for result in candidate.cases if result.accuracy_check and result.accuracy_check.ok is False]
    invalid = [f"{result.id} ({reason})" for result in candidate.cases if (reason := _invalid(result)) is not None]
    for word, names in (("failed:", bad), ("failed: wrong answers of", wrong), ("invalid:", invalid)):
        if names:
            found.append(f"{word} {_listed(names)}")
    return found


def trial(
    base: Report,
    candidate: Report,
    policy: Policy,
    *,
    today: datetime.date,
    calibration: Calibration | None,
    baseline: Baseline,
) -> Trial:
    """Hold a report against the baseline that it is to replace.

    Stricter than the gate: what is inconclusive or invalid fails, and so does a case that was left out of the run,
    since nobody would miss it from then on.
    """
    strict = msgspec.structs.replace(policy, on_inconclusive="fail")
    session = msgspec.structs.replace(candidate.session, deselected=[])
    whole = msgspec.structs.replace(candidate, session=session)
    verdicts = judge.judge(base, whole, policy, today=today, calibration=calibration, baseline=baseline)
    failing = worst_first(row for row in verdicts.rows if fails(row, strict))
    found = [f"{row.verdict}: {row.id} {row.metric}: {row.reason}" for row in failing]
    if not failing and not verdicts.armed.gated:
        found.append("nothing of it could be compared with the present baseline")
    assumed = calibration is None and any(row.metric == "time" and row.verdict == "INCONCLUSIVE" for row in failing)
    other = bool(found) and {row.verdict for row in failing} <= {"MISSING", "NOT_COMPARABLE"}
    return Trial(verdicts, found, measure_noise=assumed, begin_anew=other)


def is_same(candidate: Report, base: Report) -> bool:
    """Return whether two reports hold the same measurement: they differ in what was said of it at most."""
    return msgspec.structs.replace(candidate, verdicts=None) == msgspec.structs.replace(base, verdicts=None)


def current_in(store: Path, machine: str) -> Stored | None:
    """Return the store's baseline of a machine, the newest of that name; None where there is none."""
    return max(_named(store, machine), key=lambda one: one.number, default=None)


def keep(candidate: Report, verdicts: Verdicts | None, *, path: Path | None, store: Path) -> Path:
    """Make a report the baseline; return its file.

    Args:
        candidate: the report.
        verdicts: against the baseline that it replaces, None where it is the first.
        path: file to write, which a baseline that is in git has; None: the store, under the name `baseline`. There the
            one before stays, under its number alone.
        store: folder of the store.

    Raises:
        ValueError: the name or the path cannot be written to.
        OSError: it cannot be written.
    """
    promoted = msgspec.structs.replace(candidate, verdicts=verdicts)
    if path is not None:
        file.check_writable(path)
        file.dump(promoted, path)
        return path
    before = _named(store, storage.hardware(candidate))
    kept = storage.save(promoted, store, NAME)
    # The new one first: two of a name are refused by whoever looks for it, and none would be a baseline that is gone.
    for one in before:
        one.path.rename(one.path.with_name(one.path.name.replace(f"_{NAME}.json", ".json")))
    return kept


def counted(verdicts: Verdicts) -> str:
    """Return how often each verdict was given: `12 OK, 3 IMPROVED`."""
    counts = Counter(row.verdict for row in worst_first(verdicts.rows))
    return ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())


def _named(store: Path, machine: str) -> list[Stored]:
    return [one for one in storage.stored(store) if one.machine == machine and one.name == NAME]


def _invalid(result: CaseResult) -> str | None:
    """Return why no launch of a completed case speaks for it; None where one does."""
    reasons = [
        disturbances.disturbed(launch.profile) if launch.profile is not None else None for launch in result.launches
    ]
    return reasons[0] if result.outcome == "completed" and reasons and None not in reasons else None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
