"""Compare a report with a baseline: every metric of every case gets a verdict.

Cases are paired first. The outcome comes before the numbers: a case that no longer fits in memory is a regression even
where every number improved. Then come the metrics of a completed case.
"""

from __future__ import annotations

import datetime
import enum
import math
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis.capacity import capacities
from pytest_llmgpu.analysis.environments import hardware_differences, shortened, software_differences
from pytest_llmgpu.gate import answers, figures, program, promotion, times
from pytest_llmgpu.gate.answers import Answered, below_floor
from pytest_llmgpu.gate.cause import host_calls_row, program_row, with_cause, with_slower_kernels
from pytest_llmgpu.gate.exact import NAMED, execution_row, memory_row, path_row, traffic_row, worse
from pytest_llmgpu.gate.policy import Policy, TimeRule, check_figures, dump_policy, unmatched, with_allowed
from pytest_llmgpu.gate.stats import holm
from pytest_llmgpu.gate.times import Timed
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.derived import latencies, of_prefill
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.report import Report, command
from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult, Declared, declared_in
from pytest_llmgpu.report.text import listed, sentence
from pytest_llmgpu.report.verdicts import DIFFERS, NO_COMMON, UNCLEAR, Baseline, Candidate, Decided, Row, Verdicts

_BROKEN = {"timeout": "exceeded its time limit", "crashed": "crashed", "error": "ended with an error"}

TIMES: tuple[MetricName, ...] = ("device_time", *times.WALL_TIMES)
"""The metrics that show a slowdown, the best first."""

LARGEST_UNSEEN = 0.5
"""The largest slowdown of a case that may stay unseen, as a fraction: else the gate does not pass."""

Level = Literal["failure", "warning", "info"]
"""Severity of a row: it fails the gate; it is worse or unclear, which the policy lets pass; it is neither."""


class ExitStatus(enum.IntEnum):
    """Exit status of every command."""

    PASSED = 0
    REGRESSED = 1
    """A metric regressed, a case failed, or one is missing."""
    USAGE = 2
    """The arguments are wrong, or a file cannot be read."""
    NOT_JUDGED = 3
    """The candidate could not be judged: it is undecided, not comparable, or nothing that is gated was compared."""


def level(row: Row, policy: Policy) -> Level:
    """Return the severity of a row under a policy."""
    if fails(row, policy):
        return "failure"
    return "warning" if row.worse or row.verdict in UNCLEAR else "info"


def fails(row: Row, policy: Policy) -> bool:
    """Return whether a row alone makes the gate fail. A case that was interrupted does, which is no matter of noise."""
    if not row.gated or row.allowed is not None:
        return False
    if row.verdict == "UNDECIDED":
        return policy.strict or row.unseen or row.metric == "outcome"
    return row.verdict in {"REGRESSED", "MISSING", "NOT_COMPARABLE"}


def exit_status(verdicts: Verdicts, policy: Policy) -> ExitStatus:
    """Return the exit status that all verdicts come to."""
    failing = {row.verdict for row in verdicts.rows if fails(row, policy)}
    compared = any(row.compared and row.gated for row in verdicts.rows)
    if failing & {"REGRESSED", "MISSING"} and (compared or "NOT_COMPARABLE" not in failing):
        return ExitStatus.REGRESSED
    if verdicts.baseline is None:
        compared = policy.allow_no_baseline and bool(verdicts.rows)
    return ExitStatus.PASSED if compared and not failing else ExitStatus.NOT_JUDGED


def judge(
    base: Report | None,
    head: Report,
    policy: Policy,
    *,
    today: datetime.date,
    baseline: Baseline | None = None,
    in_turn: bool = False,
    declared: Mapping[str, Declared] = {},
) -> Verdicts:
    """Compare a report with a baseline, if there is one. Equal arguments give equal verdicts, to the byte.

    `today` decides whether an accepted regression expired. `baseline` is where `base` came from; without it only its
    commit is named. `in_turn`: launches of both reports alternated. `declared`: figures that no case may have, too.
    """
    undeclared = check_figures(policy, {**declared, **declared_in([*(base.cases if base else []), *head.cases])})
    compared = Comparison(base, head, policy, in_turn=in_turn)
    rows, warnings = with_allowed(compared.rows, policy, today)
    rows = with_unseen(rows, {result.key for result in head.cases if result.case.device == "cpu"})
    if base is not None:
        warnings += unmatched(policy, [*base.cases, *head.cases])
        baseline = baseline or Baseline(commit=base.commit.sha)
        differing = software_differences(base.environment, head.environment)
        if base.promotion is not None:
            warnings.append(f"the baseline was promoted by force: {base.promotion.reason}")
        warnings = [*(f"{DIFFERS}{text}" for text in differing), *warnings]
    warnings += undeclared
    compared.not_compared.update(f"{row.metric}: {row.verdict}" for row in rows if not row.compared)
    states = list(promotion.states(head))
    return Verdicts(
        baseline=baseline if base is not None else None,
        head=Candidate(created=head.created, commit=head.commit.sha, command=command(head), states=states),
        policy=dump_policy(policy),
        in_turn=in_turn,
        not_compared=dict(sorted(compared.not_compared.items())),
        warnings=warnings,
        rows=rows,
    )


def with_unseen(rows: Sequence[Row], on_cpu: Collection[str] = ()) -> list[Row]:
    """Mark the row of each case whose launches would not have shown a slowdown of `LARGEST_UNSEEN`.

    The best gated time of a case decides. A row that is OK by chance, with so much noise, is undecided. A case on a
    CPU, given by its key, is judged by its FLOPs where its program was compared.
    """
    judged = {row.key for row in rows if row.metric == "program" and row.gated and row.compared and row.key in on_cpu}
    gated = [number for number, row in enumerate(rows) if row.metric in TIMES and row.gated and row.key not in judged]
    # Times that were compared come last, then the better metric: of a case the last one counts.
    gated.sort(key=lambda one: (rows[one].smallest_seen is not None, -TIMES.index(rows[one].metric), -one))
    best = {(rows[number].key, rows[number].id): number for number in gated}
    marked = list(rows)
    for number in best.values():
        row = rows[number]
        seen = math.inf if row.smallest_seen is None else row.smallest_seen
        if row.allowed is None and (row.unchanged or row.verdict == "UNDECIDED") and seen > LARGEST_UNSEEN:
            marked[number] = msgspec.structs.replace(row, verdict="UNDECIDED", unseen=True)
    return marked


class Pair(NamedTuple):
    """A result of the baseline and one of the candidate; one of them can be absent."""

    base: CaseResult | None
    head: CaseResult | None
    differing: list[str]
    """Fields that make them different measurements in spite of the same id: `dtype float16 -> bfloat16`."""


def pairs(base: Sequence[CaseResult], head: Sequence[CaseResult]) -> list[Pair]:
    """Match results by key and test, then by key, then by id; the second of a key with the second.

    Results of one id whose cases differ are matched as well, with the differing fields. The pairs are in the
    candidate's order; results that only the baseline has come last.
    """
    left = list(base)
    matched: dict[int, CaseResult] = {}
    for name_of in (attrgetter("key", "nodeid"), attrgetter("key"), attrgetter("id")):
        there: dict[Hashable, list[CaseResult]] = {}
        for result in left:
            there.setdefault(name_of(result), []).append(result)
        for number, now in enumerate(head):
            if number not in matched and (alike := there.get(name_of(now))):
                matched[number] = alike.pop(0)
        used = set(map(id, matched.values()))
        left = [result for result in left if id(result) not in used]
    found = []
    for number, now in enumerate(head):
        then = matched.get(number)
        differing = []
        if then is not None and then.key != now.key:
            was, is_now = msgspec.structs.asdict(then.case), msgspec.structs.asdict(now.case)
            # `execution` is no part of the key.
            names = [name for name in was if was[name] != is_now[name] and name != "execution"]
            was |= then.launches[-1].implementations if then.launches else {}  # also where no option names it
            is_now |= now.launches[-1].implementations if now.launches else {}
            texts = [f"{name} {shortened(was[name])} -> {shortened(is_now[name])}" for name in names]
            # Digests come last. That of a folder is a fingerprint of its files; the commit of a hub model is not cut.
            texts = [re.sub(r"^revision .*\.\.\.", r"files of the model folder (\g<0>)", text) for text in texts]
            differing = sorted(texts, key=lambda text: "..." in text)
        found.append(Pair(then, now, differing))
    return [*found, *(Pair(result, None, []) for result in left)]


def decided(tests: Sequence[Timed | Answered], confidence: float) -> list[Row]:
    """Return the row of each test. Its p is adjusted over those of its family by Holm's method."""
    families = [one.family for one in tests]
    sizes = Counter(families)
    adjusted = (holm([one.p(sign) for one in tests], families) for sign in (1, -1))
    return [one.row(ps, sizes[family], confidence) for one, family, *ps in zip(tests, families, *adjusted, strict=True)]


_Entry = Row | Timed | Answered | tuple[CaseResult, CaseResult]
"""A row, what one is judged from once all cases are known, or two results where the row of their program is."""


class Comparison:
    """The verdicts on all cases, and the reasons where there is none."""

    def __init__(self, base: Report | None, head: Report, policy: Policy, *, in_turn: bool = False) -> None:
        """Compare every case of a report with the baseline's."""
        self.base, self.head, self.policy = base, head, policy
        self.not_compared: Counter[str] = Counter()
        """Reason why a case, or a metric of one, has no row, to the number of such cases."""
        self._cases: list[list[_Entry]] = []
        self._entries: list[_Entry] = []
        """The entries of the latest case."""
        reports = (head if base is None else base), head
        self._machines = before, after = reports[0].environment, head.environment
        self._unmeasured = [found for report in reports if (found := report.commit.not_measured()) is not None]
        self._same_gpus = {gpu.uuid for gpu in before.gpus} == {gpu.uuid for gpu in after.gpus}
        self._same_host = len({(one.cpu, one.python, one.versions.get("torch")) for one in self._machines}) == 1
        self._names = before.kernel_names, after.kernel_names
        self._in_turn = in_turn
        cases = [] if base is None else base.cases, head.cases
        matched = pairs(*cases)
        both = [(pair.base.launches, pair.head.launches) for pair in matched if pair.base and pair.head]
        # A launch that failed before it was timed is equal to another one by chance.
        timed = any(one.load_s is not None or one.batches.latency_s for then, _ in both for one in then)
        self._same_run = timed and all(then == now for then, now in both)
        self._shares = bool(both)
        self._capacities = [{one.series: one for one in capacities(of_report)} for of_report in cases]
        for pair in matched:
            self._entries = []
            self._cases.append(self._entries)
            if pair.head is not None:
                self._case(pair.base, pair.head, pair.differing)
            elif pair.base is not None and (why := self._why_absent(pair.base)) is not None:
                self.not_compared[why] += 1
            elif pair.base is not None:
                ended = "; the run was interrupted" if head.session.interrupted else ""
                reason = f"The baseline has this case and the candidate does not{ended}: measure it again."
                self._outcome(pair.base, "MISSING", reason)
        self.rows = self._finished()
        """Every row, case by case."""

    def _case(self, base: CaseResult | None, head: CaseResult, differing: Sequence[str]) -> None:
        hardware = hardware_differences(*self._machines, head.case.device, alone=head.case.devices == 1)
        if (undecided := self._undecided(base, head)) is not None:
            self._outcome(head, "UNDECIDED", undecided)
        elif head.outcome in _BROKEN:
            also = ", as in the baseline" if base is not None and base.outcome == head.outcome else ""
            self._outcome(head, "REGRESSED", f"The case {_BROKEN[head.outcome]}{also}.{_message(head)}")
        elif base is None:
            reason = "There is no baseline." if self.base is None else "The baseline lacks this case."
            self._outcome(head, "NEW", reason)
        elif found := list(dict.fromkeys([*differing, *self._unmeasured, *hardware])):
            text = "; ".join(found[:NAMED])
            self._outcome(head, "NOT_COMPARABLE", sentence(f"The measurements differ from the baseline's: {text}"))
        elif base.outcome in OUT_OF_MEMORY and head.outcome == "completed":
            self._outcome(head, "IMPROVED", "The batch size fits in memory; in the baseline it did not.")
        elif base.outcome in OUT_OF_MEMORY:
            self._outcome(head, "OK", "Out of memory, as in the baseline.")
        elif base.outcome != "completed":
            reason = f"The baseline's case {_BROKEN.get(base.outcome, 'was interrupted')}: there is nothing to compare."
            self._outcome(head, "NEW", reason)
        elif head.outcome in OUT_OF_MEMORY:
            how = "Out of memory" if head.outcome == "oom" else "Skipped, since a smaller batch size is out of memory"
            then, now = (of_report[head.case.series].largest_fit for of_report in self._capacities)
            fits = f" The largest batch size that fits is {now}, was {then}." if now else ""
            self._outcome(head, "REGRESSED", f"{how}; in the baseline the case completed.{fits}{_message(head)}")
        else:
            self._metrics(base, head)

    def _undecided(self, base: CaseResult | None, head: CaseResult) -> str | None:
        """Return why a case cannot be judged whatever its figures are; None if it can be."""
        if base is not None and self._same_run:
            return "Baseline and candidate are of the same run: measure the candidate."
        if head.outcome == "interrupted":
            return "The case was interrupted: measure it again."
        for name, one in (("candidate", head), ("baseline", base)):
            timed = one is None or one.outcome != "completed" or any(of.batches.latency_s for of in one.launches)
            if head.outcome == "completed" and not timed:
                return f"The {name} measured no batch: measure it again."
        return None

    def _metrics(self, base: CaseResult, head: CaseResult) -> None:
        rules = self.policy
        self._take("execution", execution_row(base, head, gated=rules.execution.gate))
        self._times(base, head)
        self._entries.append((base, head))
        answered = None if head.case.generates else answers.answered(base, head, rules.accuracy)
        if isinstance(answered, Answered):
            self._entries += [answered, answers.predictions_row(answered, gated=rules.predictions.gate)]
        else:
            if not isinstance(answered, Row):
                self._floor(head)  # Texts have no accuracy: they are right or wrong by themselves.
            self._take("accuracy", answered)
        self._take("texts", answers.texts_row(base, head, rules.texts))
        exact = {
            "traffic": traffic_row(base, head, rules.traffic),
            "path": path_row(base, head, gated=rules.path.gate),
            "memory": memory_row(base, head, rules.memory),
        }
        for metric, found in exact.items():
            # A metric that is not gated has a row only where it changed.
            changed = isinstance(found, Row) and found.result not in {"OK", "MISSING"}
            if changed or getattr(rules, metric).gate:
                self._take(metric, found)

    def _times(self, base: CaseResult, head: CaseResult) -> None:
        rule = self.policy.device_time
        found = times.device_times(base, head, rule)
        self._take("device_time", found)
        if isinstance(found, Timed) and head.case.generates:
            found = times.device_times(of_prefill(base), of_prefill(head), rule)
            if isinstance(found, Timed):
                self._entries.append(msgspec.structs.replace(found, part="prefill"))
        before, after = ({of.uuid for profile in one.profiles for of in profile.devices} for one in (base, head))
        # Without a profile, the GPUs of the machines count.
        same_gpus = before == after if before and after else self._same_gpus
        for metric in times.WALL_TIMES:
            # A case that scores has no times of tokens.
            timed = (any(latencies(launch, metric)[0] for launch in one.launches) for one in (base, head))
            if metric != "time" and not all(timed):
                continue
            wall_rule: TimeRule = getattr(self.policy, metric)
            wall = times.wall_times(base, head, wall_rule, metric=metric, in_turn=self._in_turn, same_gpus=same_gpus)
            self._take(metric, wall)
            if metric == "time" and isinstance(wall, Timed):
                for part in times.parts(base, head, wall_rule, same_gpus=same_gpus, same_host=self._same_host):
                    self._take("time", part)
        for metric, own in figures.rows(base, head, self.policy, same_gpus=same_gpus):
            self._take(metric, own)

    def _take(self, metric: MetricName, found: Row | Timed | str | None) -> None:
        if isinstance(found, str):
            self.not_compared[f"{metric}: {found}"] += 1
        elif found is not None:
            self._entries.append(found)

    def _floor(self, head: CaseResult) -> None:
        if (floor := below_floor(head, self.policy.accuracy)) is not None:
            step = next((found.next_step for found in head.findings if found.severity == "failure"), "")
            gated = self.policy.accuracy.gate
            self._entries.append(Row.of(head, "accuracy", "REGRESSED", floor, gated=gated, next_step=step))

    def _outcome(self, result: CaseResult, verdict: Decided, reason: str) -> None:
        """Add why a case is not compared; its answers and its figures can be wrong by themselves."""
        self._entries.append(Row.of(result, "outcome", verdict, reason))
        if verdict in {"IMPROVED", "NEW", "NOT_COMPARABLE"}:
            self._floor(result)
            self._entries += figures.out_of_bounds(result, self.policy).values()

    def _why_absent(self, gone: CaseResult) -> str | None:
        """Return the reason why a case of the baseline is absent; None where it is missing."""
        # Each run probes other sizes for the largest that fits, in the test whose own case was out of memory. This run
        # has to have a result for the size: at most the largest that fits, or at least the smallest that does not.
        series, nodeid = gone.case.series, gone.nodeid
        found = self._capacities[1].get(series)
        fit, oom = (0, None) if found is None else (found.largest_fit or 0, found.smallest_oom)
        known = oom is not None and not fit < gone.case.batch_size < oom
        if known and nodeid in {one.nodeid for one in self.head.cases if one.case.series == series} - {None}:
            return "a probe for the largest batch size"
        ran, deselected = {result.nodeid for result in self.head.cases}, self.head.session.deselected
        if nodeid in deselected:
            return "deselected in this run"
        if not self._shares:
            reports = (self.base, self.head) if self.base is not None and self.head.cases else ()
            ids = (listed([result.id for result in report.cases], NAMED) for report in reports)
            where = map("{} in the {}".format, ids, ("baseline", "candidate"))
            return f"{NO_COMMON}: {', '.join(where)}" if reports else "the candidate has no case"
        if nodeid is not None and nodeid not in ran:
            # An entry without `::` is no node id: it narrowed the run without a name for each test. Where the function
            # was named as a whole, only a named parameter, or --lf, leaves others out.
            same_function = nodeid.partition("[")[0] in {(name or "").partition("[")[0] for name in ran}
            for entry in deselected:
                if "::" not in entry and not (same_function and entry.startswith("tests not named")):
                    return f"left out: {entry}"
        if gone.outcome != "completed" and gone.outcome not in OUT_OF_MEMORY:
            return "the baseline's case failed and is absent"
        return None

    def _finished(self) -> list[Row]:
        tests = [entry for of_case in self._cases for entry in of_case if isinstance(entry, Timed | Answered)]
        judged = iter(decided(tests, self.policy.confidence))
        rows: list[Row] = []
        compared: list[CaseResult] = []
        for of_case in self._cases:
            found: list[Row] = []
            for entry in of_case:
                if isinstance(entry, tuple):
                    found = self._with_program(found, *entry)
                elif isinstance(entry, Timed) and entry.part:
                    found[-1] = worse(found[-1], next(judged), entry.part, in_turn=self._in_turn)
                else:
                    found.append(entry if isinstance(entry, Row) else next(judged))
            for base, head in (entry for entry in of_case if isinstance(entry, tuple)):
                compared.append(head)
                found = [self._explained(row, base, head) for row in found]
            rows += found
        return rows if self.base is None else rows + promotion.rows(self.base, compared, rows, self.policy)

    def _with_program(self, rows: Sequence[Row], base: CaseResult, head: CaseResult) -> list[Row]:
        """Return the rows of the times of a case with their causes, and those on its program."""
        device = next((row for row in rows if row.metric == "device_time"), None)
        better = any(row.improved for row in rows if row.metric in TIMES)
        phases = [(base, head), (of_prefill(base), of_prefill(head))] if head.case.generates else [(base, head)]
        found: dict[MetricName, Row] = {}
        for number, results in enumerate(phases):
            pairs = program.pairs_of(*results, self._names)
            if device is not None and (slower := with_slower_kernels(device, pairs)) is not device:
                device = msgspec.structs.replace(slower, part="prefill" if number else None)
            gain = 0.0  # beyond its noise, and of other GPUs only where it exceeds their differences
            if device is not None and device.high and (device.improved or all(pair.same_gpus for pair in pairs)):
                gain = max(0.0, 1 - device.high)
            judged = {"program": program_row(*results, pairs, self.policy.program, gain=gain, better=better)}
            if self.policy.host_calls.gate:  # Without it they are in the row on the program alone.
                judged["host_calls"] = host_calls_row(*results, pairs)
            for metric, row in judged.items():
                if isinstance(row, Row):
                    found[metric] = worse(found.get(metric), row) if number else row
                elif not number:
                    self._take(metric, row)
        with_kernels = [device if row.metric == "device_time" and device is not None else row for row in rows]
        return [*with_kernels, *found.values()]

    def _explained(self, row: Row, base: CaseResult, head: CaseResult) -> Row:
        """Return a row with its cause, and with the trace of the passes and of the rank that it is about."""
        row = with_cause(row, base, head, self._names)
        if row.clock_ratio is not None:
            slower = [disturbances.of_profile(profile) for profile in (head if row.clock_ratio < 1 else base).profiles]
            is_limited = bool(slower) and all(any(map(disturbances.is_power, texts)) for texts in slower)
            row = msgspec.structs.replace(row, clock_limited=is_limited)
        if row.worse and row.metric in {"program", *TIMES}:
            phase = ""
            if head.case.generates:
                phase = "prefill-" if row.part == "prefill" or row.metric == "first_token" else "decode-"
            rank = 0 if row.cause is None else row.cause.rank or 0
            # The second where there is no GPU.
            names = [f"-rank{rank}-{phase}{passes}." for passes in ("passes", "modules")]
            traces = (path for name in names for path in head.launches[-1].traces if name in path)
            row = msgspec.structs.replace(row, trace=next(traces, None))
        return times.with_power(row, base, head) if self._in_turn else row


def _message(result: CaseResult) -> str:
    """Return a failure's message as the second line of a reason, shortened."""
    text = "" if result.failure is None else result.failure.message
    return f"\n{textwrap.shorten(text, 200, placeholder=' ...')}" if text.strip() else ""
