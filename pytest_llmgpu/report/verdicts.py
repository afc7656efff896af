"""What a gate says: the records of the report's `verdicts`, and their order for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

from pytest_llmgpu.report.result import CaseResult

__all__ = [
    "COMPARED",
    "LOST",
    "METRICS",
    "SEVERITY",
    "Armed",
    "Baseline",
    "Candidate",
    "MetricName",
    "Row",
    "Verdict",
    "Verdicts",
    "worst_first",
]

Verdict = Literal[
    "FAILED",
    "CAPACITY_REGRESSED",
    "REGRESSED",
    "MISSING",
    "NOT_COMPARABLE",
    "INVALID",
    "INCONCLUSIVE",
    "NO_BASELINE",
    "NEW",
    "CAPACITY_IMPROVED",
    "IMPROVED",
    "OK",
]
"""What is said of one metric of one case, worst first."""

MetricName = Literal["outcome", "largest_batch", "time", "accuracy", "predictions", "traffic", "path", "memory"]
"""What a row is about. `outcome` is the case as a whole, `largest_batch` a series of cases over batch sizes."""

SEVERITY: tuple[Verdict, ...] = get_args(Verdict)
"""Every verdict, worst first."""

METRICS: tuple[MetricName, ...] = get_args(MetricName)
"""Every metric, in the order in which people read them: outcome before numbers."""

COMPARED = frozenset(
    ("FAILED", "CAPACITY_REGRESSED", "REGRESSED", "INCONCLUSIVE", "CAPACITY_IMPROVED", "IMPROVED", "OK")
)
"""Verdicts that held one thing against another; the others say why that could not be done."""

LOST = frozenset(("FAILED", "REGRESSED", "CAPACITY_REGRESSED"))
"""Verdicts on a candidate that is worse."""


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One metric of one case against its baseline."""

    key: str
    """Of the case; of the series for `largest_batch`."""
    id: str
    """`mp-bs8`; for `largest_batch` the strategy."""
    nodeid: str | None = None
    metric: MetricName
    verdict: Verdict
    reason: str
    """Two lines at most: what was found, then what else differs or what to do."""
    gated: bool = True
    """False where the policy has the metric reported only."""
    base: float | None = None
    """Baseline's figure: seconds, bytes, a fraction of the items, or sequences per forward."""
    head: float | None = None
    """The candidate's."""
    ratio: float | None = None
    """Candidate to baseline. For time the typical ratio of two equal batches, or that of the sums where those alone are
    REGRESSED; for accuracy None."""
    low: float | None = None
    """Lower end of the ratio's interval; for accuracy of the fraction of items lost less those won."""
    high: float | None = None
    """Its upper end."""
    margin: float | None = None
    """The bar, absolute margin included: a fraction of the baseline, for accuracy of the items."""
    p: float | None = None
    """Probability of as much, or more, by chance were the change equal to the bar; adjusted (Holm) over the rows of the
    metric that are gated, or over those that are not, and for time over both figures of a row. In the direction of the
    change: a loss where the candidate is worse, else a gain."""
    n: int | None = None
    """Launches a side, the fewer of both."""
    smallest_change: float | None = None
    """Smallest true slowdown that these launches show with 95 % probability, as a fraction."""
    launches_needed: int | None = None
    """Launches a side that show a slowdown of the margin and 2 points with 95 % probability, five at least; None above
    1,000."""
    alone: Verdict | None = None
    """What the interval alone says where the row is judged with others (Holm), and the verdict is another for that."""
    lost: list[int] | None = None
    """Items that were right in the baseline and are wrong now; for `predictions` all that are answered otherwise."""
    won: list[int] | None = None
    """Items that were wrong in the baseline and are right now."""
    known: str | None = None
    """Why the policy lets this row pass: the reason of its `known` entry."""

    @classmethod
    def of(
        cls,
        result: CaseResult,
        metric: MetricName,
        verdict: Verdict,
        reason: str,
        *,
        gated: bool = True,
        **figures: Any,
    ) -> Row:
        """Return a row about a result's case; `figures` are the fields that have a default."""
        return cls(
            key=result.key,
            id=result.id,
            nodeid=result.nodeid,
            metric=metric,
            verdict=verdict,
            reason=reason,
            gated=gated,
            **figures,
        )


class Armed(msgspec.Struct, frozen=True, kw_only=True):
    """How much was really compared: a gate that compared nothing is not green."""

    compared: int = 0
    """Rows in which one thing was held against another."""
    gated: int = 0
    """Of them those that can fail the gate."""
    unarmed: dict[str, int] = {}
    """Why a metric of a case was not compared, to how often."""
    gated_unarmed: int = 0
    """Of those, the ones that the policy wants gated and that were not left out by whoever started the run."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the candidate was held against."""

    name: str | None = None
    """As it was asked for: a file's name, a number, a git ref."""
    sha256: str | None = None
    """Of the file's bytes."""
    commit: str | None = None
    """Commit that the baseline measured."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Which report was judged. It holds its own verdicts, so that no hash of its file can tell."""

    created: str
    """As in the report."""
    commit: str | None = None
    """Commit that it measured."""


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """All that a gate says of one report."""

    head: Candidate | None = None
    """The report that they are of; None where nobody said."""
    baseline: Baseline | None = None
    """None: there was none."""
    policy: str
    """The policy in force, as TOML."""
    policy_sha256: str
    """Of that text."""
    calibration_sha256: str | None = None
    """Of the file of this runner's noise; None where the noise is assumed."""
    armed: Armed
    warnings: list[str] = []
    """What to know beside the rows: software that differs, entries of the policy that expired."""
    rows: list[Row] = []
    """By case in the candidate's order, what only the baseline has at the end."""


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Return the rows as people should read them: by severity, then by metric; what cannot fail the gate comes last."""
    severity = {verdict: number for number, verdict in enumerate(SEVERITY)}
    order = {metric: number for number, metric in enumerate(METRICS)}
    return sorted(
        rows,
        key=lambda row: (row.known is not None or not row.gated, severity[row.verdict], order[row.metric]),
    )
