"""The records of the report's `verdicts` with their causes, and the order in which they are shown.

A cause is the part of the program in which the difference to the baseline lies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

from pytest_llmgpu.report.bounds import Count, Seconds
from pytest_llmgpu.report.metrics import BY_NAME, MetricName, MetricSpec, own, place_of, spec_of
from pytest_llmgpu.report.result import CaseResult, Declared
from pytest_llmgpu.report.work import KernelFamily

Verdict = Literal["REGRESSED", "MISSING", "NOT_COMPARABLE", "UNDECIDED", "CHANGED", "NEW", "OK"]
"""The verdict on one metric of one case; the worst comes first.

REGRESSED: worse by more than the threshold, failed, or out of memory. MISSING: only the baseline has it.
NOT_COMPARABLE: the conditions differ. UNDECIDED: the launches are disturbed, or too few. CHANGED: different, and no
regression, or not gated. NEW: the baseline has nothing to compare with. OK: equal within the threshold, or better.
"""

SEVERITY: tuple[Verdict, ...] = get_args(Verdict)
"""Every verdict, worst first."""

Decided = Verdict | Literal["IMPROVED"]
"""The result of a comparison: a row states IMPROVED as OK with a sign (`stated`)."""

Part = Literal["prefill", "replays in a row", "host at equal speed", "batches that the GPU limits"]
"""A part of a metric that is judged by itself before the worse one counts."""

WORST_FIRST: tuple[Decided, ...] = (*SEVERITY[:-1], "IMPROVED", "OK")
"""Every result of a comparison, worst first."""

UNCLEAR: frozenset[Verdict] = frozenset(("MISSING", "NOT_COMPARABLE", "UNDECIDED"))
"""Verdicts where something should have been compared and was not, or could not be decided."""

DIFFERS = "differs from the baseline: "
"""Start of a warning that lists a difference between the environments of both reports."""

NEITHER, ONLY_CANDIDATE = "neither report has it", "only the candidate has it"
"""Reasons why a metric was not compared."""

NO_COMMON = "no case in common"
"""Start of the reason why cases were not compared of which neither is in the other report; it ends with their ids."""

Place = Literal["device", "kernel", "transfer", "waiting", "copies", "host", "program"]
"""The place of a difference. device: kernels that are no collective. kernel: one of them, called as often as before.
transfer: collectives while all ranks are inside, and copies between GPUs.
waiting: collectives of ranks that wait for another one. copies: copies and memsets. host: the GPU is idle and waits for
the host. program: the number of ops, kernels or runtime calls changed, and no time was compared."""


class SlowerKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that is called as often as before, and became slower than the others."""

    name: str
    """Name of the kernel."""
    family: KernelFamily
    """Family of the kernel."""
    module: str | None
    """Module that has most of the time of its family; null if none has half of it."""
    growth: float
    """Growth of its time beyond the factor that all unchanged kernels have in common, as a fraction of it."""
    excess: float
    """The same growth as a fraction of device time."""
    error: float
    """Standard error of `excess`."""


class CallsChange(msgspec.Struct, frozen=True, kw_only=True):
    """The number of calls of one function in a work pass, in both reports."""

    name: str
    """Name of a kernel, of an op of torch, of a function of the CUDA runtime, or of a source file."""
    module: str | None = None
    """Module of the model whose number of calls changed most; null if it is not known."""
    layers: Count | None = None
    """Largest number of layers that can have the added calls, if these are fewer than the layers of the model; null for
    a module without a layer number, and where all layers may have changed."""
    per_layer: Count | None = None
    """Number of calls that every layer has more, or fewer, in one forward; null where layers can differ."""
    before: Count
    """Number of calls in the baseline."""
    after: Count
    """Number of calls in the candidate."""

    @property
    def growth(self) -> int:
        """The number of calls in the candidate less that in the baseline."""
        return self.after - self.before


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a verdict by the work passes of both reports. Several launches of a report count by their median."""

    place: Place
    """Place of the largest part of the difference."""
    rank: Count | None = None
    """The one rank that became slower, so that the other ranks wait for it; null if all ranks changed alike."""
    before_s: Seconds | None = None
    """Time of the place in one work pass of the baseline; null for a verdict on a number, and where no part of a pass
    grew as wall time did."""
    after_s: Seconds | None = None
    """The same time in the candidate."""
    kernel: SlowerKernel | None = None
    """The kernel of the place `kernel`; null for other places."""
    kernels: list[CallsChange] = []
    """Kernels with another number of calls, the largest change first."""
    runtime_calls: list[CallsChange] = []
    """Functions of the CUDA runtime with another number of calls; those that make the host wait come first."""
    ops: list[CallsChange] = []
    """Ops of torch with another number of calls, the largest change first."""
    moved: str | None = None
    """A module that ops left, and the one that has them: `layers.*.mlp to layers.*.mlp.mlp`; null if none moved."""
    host_calls: list[CallsChange] = []
    """Source files of Python functions with another number of calls in a forward, the largest change first."""
    price: float | None = None
    """Time of the calls of kernels that were added less that of those that went, as a fraction of the device time of a
    pass, at the clock of the candidate. Null where the kernels are the same, or their times are not known."""
    price_error: float | None = None
    """Largest error of `price`, as a fraction of device time."""
    forwards: Count = 1
    """Forwards of the pass in which kernels are counted."""

    @property
    def calls(self) -> list[CallsChange]:
        """Everything that is called more or less often."""
        return [*self.ops, *self.kernels, *self.runtime_calls, *self.host_calls]


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One metric of one case, compared with its baseline."""

    key: str
    """Key of the case."""
    id: str
    """Id of the case, such as `mp-bs8`."""
    nodeid: str | None = None
    """Node id of the test that measured the case; null if no test did."""
    metric: MetricName
    """Metric that was compared."""
    verdict: Verdict
    """Result of the comparison."""
    improved: bool = False
    """True if the candidate is better by more than the threshold; its verdict is OK, or CHANGED if it is not gated."""
    reason: str
    """Explanation: the result in one line, then details, then the cause if there is one."""
    next_step: str = ""
    """Next step for the reader where it depends on the reason; empty if that of the verdict or the metric applies."""
    declared: Declared | None = None
    """Declaration of the figure of the user's own that the row is on; null for other metrics."""
    gated: bool = True
    """False if the policy only reports this metric, so that it cannot fail the gate."""
    part: Part | None = None
    """The part of the metric that decided: `prefill` of a case that generates; another one of wall time. Null for the
    first part: the decode steps of such a case, or the timed batches."""
    base: float | None = None
    """Value of the baseline, in seconds, bytes, a fraction of the items, or sequences per forward."""
    head: float | None = None
    """Value of the candidate, in the unit of `base`."""
    ratio: float | None = None
    """Candidate divided by baseline. For times it is the ratio of the geometric means of the launches, of the rank that
    became slowest for device time. For accuracy it is null."""
    low: float | None = None
    """Lower end of the confidence interval of `ratio`, for times of 90 %; for accuracy, of the fraction of items lost
    minus items won."""
    high: float | None = None
    """Upper end of the interval that starts at `low`."""
    threshold: float | None = None
    """Threshold with its absolute part, as a fraction of the baseline; for accuracy, as a fraction of the items."""
    p: float | None = None
    """One-sided p-value: the probability of a change at least as large if nothing changed. It tests for a loss if the
    candidate is worse, and for a gain if it is better. It is adjusted (Holm) over the gated rows of all times, where it
    is not gated over such rows of its metric, and for accuracy over the cases."""
    clock_ratio: float | None = None
    """Mean SM clock of the candidate divided by that of the baseline, where a time was compared at a fixed clock."""
    clock_limited: bool = False
    """True if power or heat limited every launch of the report with the lower clock."""
    n: int | None = None
    """Number of launches in each report; the smaller number if they differ."""
    smallest_seen: float | None = None
    """Smallest true slowdown that these launches detect with 95 % probability, as a fraction; null for metrics
    that are no time."""
    launches_needed: int | None = None
    """Minimum launches in each report that detect, with 95 % probability, the threshold plus 2 percentage points, or
    a larger change with its interval above the threshold, for a time that is OK or UNDECIDED; null: above 20."""
    lost: list[int] | None = None
    """Items that are right in the baseline and wrong in the candidate; for `predictions` all items whose answer
    changed."""
    won: list[int] | None = None
    """Items that are wrong in the baseline and right in the candidate."""
    unseen: bool = False
    """True if these launches would not have shown a slowdown by a factor of 1.5, so that the row fails the gate. It
    is set on one row of a case: device time, or wall time if there is no device time."""
    allowed: str | None = None
    """Reason of the policy's `allow` entry that accepts this row; null if there is no such entry."""
    trace: str | None = None
    """Path of a trace of the candidate's work passes where the change is for the worse; null without one."""
    cause: Cause | None = None
    """Changes in the work passes that explain a change for the worse; null without such a change, and if a report has
    no work passes of the same batches."""

    def __post_init__(self) -> None:
        """Make a change that is not gated CHANGED."""
        if not self.gated and (self.verdict == "REGRESSED" or self.improved):
            msgspec.structs.force_setattr(self, "verdict", "CHANGED")

    @property
    def spec(self) -> MetricSpec:
        """The row of its metric in the table of metrics; a metric of earlier verdicts is only shown."""
        return spec_of(self.metric) if self.metric in BY_NAME else own(self.metric, self.declared)

    @property
    def worse(self) -> bool:
        """True if the candidate is worse, gated or not."""
        return self.verdict in {"REGRESSED", "CHANGED"} and not self.improved

    @property
    def result(self) -> Decided:
        """The verdict, or IMPROVED."""
        return "IMPROVED" if self.improved else self.verdict

    @property
    def word(self) -> str:
        """The verdict as it is written for people."""
        return self.verdict.replace("_", " ")

    @property
    def unchanged(self) -> bool:
        """True if the candidate is as the baseline is."""
        return self.verdict == "OK" and not self.improved

    @property
    def compared(self) -> bool:
        """True if the candidate was compared with the baseline."""
        return self.verdict in {"REGRESSED", "CHANGED", "OK"} or (self.verdict == "UNDECIDED" and self.base is not None)

    @classmethod
    def of(cls, result: CaseResult, metric: MetricName, verdict: Decided, reason: str, **figures: Any) -> Row:
        """Return a row for the case of a result; `figures` are fields that have a default."""
        case: dict[str, Any] = {"key": result.key, "id": result.id, "nodeid": result.nodeid}
        return cls(metric=metric, reason=reason, **case, **stated(verdict), **figures)


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The report that the candidate was compared with."""

    name: str | None = None
    """Name of the baseline as the user gave it: a file name, a number in the store, or a git reference."""
    sha256: str | None = None
    """SHA-256 of the bytes of the baseline's file."""
    commit: str | None = None
    """Commit that was measured in the baseline."""


SessionState = Literal["interrupted", "incomplete", "failed", "dirty", "disturbed"]
"""A reason to doubt a report as a whole: its session was interrupted, it lacks selected tests, pytest failed, files
were changed after the commit, or every case was disturbed."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """The report that was judged. It contains its own verdicts, and therefore no hash of its file."""

    created: str
    """Time at which the candidate was created, as `created` of its report."""
    commit: str | None = None
    """Commit that was measured in the candidate."""
    command: str = "pytest"
    """Command that measures the same again, from the root of the repository."""
    states: list[SessionState] = []
    """Reasons to doubt the candidate as a whole; empty if its session completed undisturbed, pytest passed and the tree
    was clean or not known."""


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """All verdicts of the gate on one report."""

    head: Candidate | None = None
    """Report that was judged; null if it was not recorded."""
    baseline: Baseline | None = None
    """Report that was the baseline; null if there was none."""
    policy: str
    """Policy that was applied, as TOML."""
    in_turn: bool = False
    """True if launches of the baseline and the candidate alternated, which lowers the threshold of wall time."""
    not_compared: dict[str, int] = {}
    """Reason why a case, or a metric of one, was not compared, mapped to the number of such cases."""
    warnings: list[str] = []
    """Warnings that belong to no row, such as different software or expired entries of the policy."""
    rows: list[Row] = []
    """Rows by case in the order of the candidate; cases that only the baseline has come last."""


def stated(result: Decided) -> dict[str, Any]:
    """Return the fields of a row for the result of a comparison."""
    return {"verdict": "OK" if result == "IMPROVED" else result, "improved": result == "IMPROVED"}


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Return rows by severity, then by metric, then the largest change; rows that cannot fail the gate come last."""

    def place(row: Row) -> tuple[bool, int, bool, int, float]:
        spec = row.spec
        change = 0.0 if row.ratio is None else row.ratio - 1
        if spec.points:
            change = 0.0 if row.base is None or row.head is None else row.head - row.base
        gain = round(change if spec.bigger_is_better else -change, 9)  # equal changes keep their order
        ungated = row.allowed is not None or not row.gated
        return ungated, SEVERITY.index(row.verdict), not row.improved, place_of(row.metric), gain

    return sorted(rows, key=place)
