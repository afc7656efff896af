"""Compares a run with its baseline and assigns the verdicts to the tests.

Policy and baseline are read before anything is measured, so that a typo costs no hours. The whole report is judged at
once, since the rows of a metric are one family of tests; then every test gets the rows of its own cases.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_llmgpu.analysis.environments import hardware_differences
from pytest_llmgpu.gate import cause, headline
from pytest_llmgpu.gate.exact import NAMED
from pytest_llmgpu.gate.judge import ExitStatus, exit_status, fails, judge
from pytest_llmgpu.gate.policy import check_figures, in_force, unmatched
from pytest_llmgpu.profiling.machine import Machine, environment
from pytest_llmgpu.render.terminal import verdicts as verdict_tables
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.metrics import is_own
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Environment, Report
from pytest_llmgpu.report.result import Declared, declared_in
from pytest_llmgpu.report.verdicts import Row, Verdict, Verdicts, worst_first
from pytest_llmgpu.store import git, store
from pytest_llmgpu.store.store import Source

_OF_RUN = ("model", "load_format", "dtype", "device", "devices", "attention", "quantization")
"""Fields of a case that its test does not choose with its items."""
_SHOWN = 3  # rows or reasons in a message; the table has all of them


class TestVerdict(NamedTuple):
    """The result of the gate for one test, or for the rows that belong to no test."""

    verdict: Verdict
    """The worst verdict of the rows that count."""
    fails: bool
    """True if the test fails."""
    text: str
    """One entry for each row that fails, or the reason why nothing was compared; empty where all is well."""
    rows: Sequence[Row] = ()
    """All rows, worst first."""


class RunGate:
    """Compares the report of a run with its baseline."""

    def __init__(self, options: Options, *, rootdir: Path, policy_path: Path | None, storage_path: Path) -> None:
        """Read the policy, by default that of pyproject.toml in `rootdir`; options of the run override it.

        ValueError if the policy is invalid.
        """
        self._reference = options.compare
        self._rootdir = rootdir
        self._storage_path = storage_path
        self._today = datetime.datetime.now(datetime.timezone.utc).date()
        self.base: Report | None = None
        """The baseline; None where there is none."""
        self._source: Source | None = None
        self._here: Environment | None = None
        self._why: str | None = None
        """The reason why there is no baseline, where the policy allows that."""
        self._undeclared: list[str] = []
        self._declared: Mapping[str, Declared] = {}
        self.verdicts: Verdicts | None = None
        """Those of the latest judgement; None before the first one."""
        self._tests: frozenset[str] = frozenset()
        self._failed = False
        self.policy, self._policy_in_words = in_force(policy_path, options, rootdir)
        if self._reference is None:
            self.policy = msgspec.structs.replace(self.policy, allow_no_baseline=True)

    def find_baseline(self, machine: Machine) -> None:
        """Read the baseline, if a reference is given. Of reports of several machines, the one of this machine counts.

        ValueError if there is no baseline although one is needed, or it is no report.
        """
        if self._reference is None:
            return
        # A path that is not found is relative to the rootdir, as in an ini file.
        reference, in_root = self._reference, self._rootdir / self._reference
        with suppress(OSError):  # too long for a path
            if not Path(reference).exists() and in_root.is_file():
                reference = str(in_root)
        self._here = environment(machine)
        here = Report(created="", plugin_version=None, environment=self._here)
        name = store.hardware(here, on_gpu=machine.device == "cuda")
        try:
            self._source = store.resolve(reference, self._storage_path, machine=name, repository=self._rootdir)
            self.base = self._source.report()
        except ValueError as error:
            absent = isinstance(error, git.AbsentError) and not isinstance(error, git.MisspeltError)
            if absent and self.policy.allow_no_baseline:
                self._why = str(error)
                return
            remedy = "; --llmgpu-allow-no-baseline lets a first run pass" if absent else ""
            remedy = git.FIRST if isinstance(error, git.MisspeltError) else remedy
            raise ValueError(f"--llmgpu-compare: {error}{remedy}") from None

    def check_figures(self, declared: Mapping[str, Declared]) -> None:
        """Refuse a policy with figures that are looser than declared, or declared by neither report (ValueError)."""
        before, self._declared = {} if self.base is None else declared_in(self.base.cases), declared
        self._undeclared = check_figures(self.policy, {**before, **declared})
        if self._undeclared and self._reference is not None:
            raise ValueError(self._undeclared[0])

    def notes(self, planned: Sequence[Case] = ()) -> list[str]:
        """Return a line for each name of the policy that nothing declares or no case of the baseline has.

        And one if no planned case can be compared, whatever items its test chooses.
        """
        found = list(self._undeclared)
        if self.base is not None:
            found += unmatched(self.policy, self.base.cases)
            reasons = list(map(self._unlike, planned))
            if reasons and all(reasons):
                text = "; ".join(list(dict.fromkeys(itertools.chain(*reasons)))[:NAMED])
                found.append(f"no case can be compared with the baseline: {text}")
        return [f"llmgpu: note: {text}" for text in found]

    def _unlike(self, case: Case) -> list[str]:
        """Return why no result of the baseline can be compared with a planned case; empty where one may be."""
        assert self.base is not None and self._here is not None, "the baseline was found"  # noqa: PT018
        hardware = hardware_differences(self.base.environment, self._here, case.device, alone=case.devices == 1)
        alike = [result.case for result in self.base.cases if result.case.strategy == case.strategy]
        both = [[(name, getattr(one, name), getattr(case, name)) for name in _OF_RUN] for one in alike]
        differing = [[f"{name} {was} -> {now}" for name, was, now in fields if was != now] for fields in both]
        return hardware or min(differing, key=len, default=[])

    def expect(self, nodeids: Sequence[str]) -> None:
        """Set the tests that get a verdict of their own."""
        self._tests = frozenset(nodeids)

    def judge(self, report: Report) -> Verdicts | None:
        """Return the verdicts on a report: those of `llmgpu gate` on the same two files under the same policy.

        None for a run that is not compared, and keeps the bounds of its policy.
        """
        known = self._source is not None and self.base is not None
        baseline = self._source.baseline(self._reference, self.base) if known else None  # type: ignore[union-attr,arg-type]
        verdicts = judge(self.base, report, self.policy, today=self._today, baseline=baseline, declared=self._declared)
        if self._reference is not None or any(is_own(row.metric) and fails(row, self.policy) for row in verdicts.rows):
            self.verdicts = verdicts
        return self.verdicts

    def verdict_of(self, nodeid: str | None) -> TestVerdict:
        """Return the verdict on the cases of a test; for None, on the rows that belong to no test.

        The latter, on missing cases, fails also if too little was compared.
        """
        verdicts = self.verdicts
        if nodeid is not None:
            rows = [row for row in verdicts.rows if row.nodeid == nodeid] if verdicts is not None else []
            found = self._of_rows(rows) if rows else TestVerdict("MISSING", False, "the test measured no case")
        elif verdicts is None:
            found = TestVerdict("MISSING", fails=True, text="no case was measured: nothing was compared.")
        else:
            found = self._of_rows([row for row in verdicts.rows if row.nodeid not in self._tests])
            decided = headline.headline(verdicts, self.policy)
            if not found.fails and decided.status is ExitStatus.NOT_JUDGED and not decided.worst:
                verdict: Verdict = "NEW" if verdicts.baseline is None else "NOT_COMPARABLE"
                found = TestVerdict(verdict, fails=True, text=decided.text)
        self._failed |= found.fails
        return found

    def unreported(self) -> list[str]:
        """Return one line on why the gate fails, if no test failed: their verdicts may not have been requested."""
        if self.verdicts is None or self._failed or not exit_status(self.verdicts, self.policy):
            return []
        return [f"llmgpu gate: {verdict_tables.conclusion(self.verdicts, self.policy)}"]

    def summary(self) -> str:
        """Return the verdicts as text for the terminal."""
        lines = [] if self._why is None else [f"no baseline: {self._why}"]
        if self.verdicts is not None:
            lines.append(verdict_tables.conclusion(self.verdicts, self.policy))
            table = verdict_tables.table(self.verdicts, self.policy)
            lines.append(table.replace("llmgpu gate` with --all", "llmgpu gate --verdicts REPORT --all`"))
            lines += [self._policy_in_words] if self.verdicts.baseline is not None else []
        return "\n\n".join(lines)

    def _of_rows(self, rows: Sequence[Row]) -> TestVerdict:
        ordered = worst_first(rows)
        if failing := [row for row in ordered if fails(row, self.policy)]:
            return TestVerdict(failing[0].verdict, fails=True, text=_describe(failing), rows=ordered)
        counting = [row for row in ordered if row.gated and row.allowed is None]
        worst: Verdict = counting[0].verdict if counting else "OK"
        return TestVerdict(worst, False, "" if worst == "OK" else _describe(counting[:1]), ordered)


def _describe(rows: Sequence[Row]) -> str:
    """Return each of the first rows with its reason, and the number of the others."""
    lines = []
    for row in rows[:_SHOWN]:
        first = f"{row.word}: {headline.row_in_words(row)}"
        # The first line of a reason has the change, which the headline of the row has as well.
        reason = row.reason.splitlines()[0 if row.ratio is None or row.unseen else 1 :]
        lines += [first, *(line for line in reason if line.removeprefix(cause.PREFIX).rstrip(".") not in first)]
    more = [f"and {len(rows) - _SHOWN} more rows: see the table"] if len(rows) > _SHOWN else []
    return "\n".join([*lines, *more, f"Next: {headline.step_of(rows[0])}"])
