"""Compares a run with its baseline and assigns the verdicts to the tests.

Policy and baseline are read before anything is measured, so that a typo costs no hours. The whole report is judged at
once, since the rows of a metric are one family of tests; then every test gets the rows of its own cases.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_llmgpu.gate import calibration, cause, headline, policy_file
from pytest_llmgpu.gate import judge as gate
from pytest_llmgpu.gate.calibration import Calibration
from pytest_llmgpu.gate.classify import ExitStatus, exit_status, fails
from pytest_llmgpu.gate.policy import Policy, idle_overrides, switched
from pytest_llmgpu.profiling.machine import Machine, environment
from pytest_llmgpu.render.terminal import verdicts as verdict_tables
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row, Verdict, Verdicts, worst_first
from pytest_llmgpu.store import git, references, store
from pytest_llmgpu.store.references import Source

_SHOWN = 3  # rows or reasons in a message; the table has all of them

_GOOD = {"OK", "CHANGED"}


class Ruling(NamedTuple):
    """The result of the gate for one test, or for the rows that belong to no test."""

    verdict: Verdict
    """The worst verdict of the rows that count."""
    fails: bool
    """True if the test fails."""
    text: str
    """One entry for each row that fails, or the reason why nothing was compared; empty where all is well."""
    rows: Sequence[Row] = ()
    """All rows, worst first."""

    @property
    def open(self) -> bool:
        """True if the test neither fails nor passes."""
        return not self.fails and self.verdict not in _GOOD


class Judge:
    """Compares the report of a run with its baseline."""

    def __init__(
        self,
        options: Options,
        *,
        rootdir: Path,
        policy_path: Path | None,
        calibration_path: Path | None,
        storage_path: Path,
    ) -> None:
        """Read the policy; options of the run override it.

        Args:
            options: The options of the run; `compare` is set.
            rootdir: The folder whose pyproject.toml is the default policy, and whose git repository is used.
            policy_path: The policy, also as `git:REV:PATH`; None for the default.
            calibration_path: The calibration of this machine, also as `git:REV:PATH`; None for the one in the store.
            storage_path: The folder of the store.

        Raises:
            ValueError: The policy is invalid.
        """
        assert options.compare is not None, "a run without `compare` is not judged"
        self._reference = options.compare
        self._rootdir = rootdir
        self._storage_path = storage_path
        self._today = datetime.datetime.now(datetime.timezone.utc).date()
        self.base: Report | None = None
        """The baseline; None where there is none."""
        self._source: Source | None = None
        self._noise: Calibration | None = None
        self._why: str | None = None
        """The reason why there is no baseline, where the policy allows that."""
        self._verdicts: Verdicts | None = None
        self._tests: frozenset[str] = frozenset()
        self._failed = False
        path = policy_path or policy_file.find(rootdir)
        self.policy: Policy = switched(policy_file.load(path, rootdir), options)
        self._policy_in_words = policy_file.in_words(path, rootdir)
        self._calibration_path = calibration_path

    def find_baseline(self, machine: Machine) -> None:
        """Read the baseline and the calibration of this machine.

        If reports of several machines have the name of the baseline, the one of this machine counts.

        Raises:
            ValueError: There is no baseline although one is needed, it is no report, or the calibration is invalid.
        """
        identity = _report_of(machine)
        self._noise = calibration.in_force(
            self._storage_path, identity, self._calibration_path, repository=self._rootdir
        )
        try:
            self._source = references.resolve(
                self._named(), self._storage_path, machine=store.hardware(identity), repository=self._rootdir
            )
        except ValueError as error:
            absent = isinstance(error, git.AbsentError)
            if absent and self.policy.allow_no_baseline:
                self._why = str(error)
                return
            remedy = "; --llmgpu-allow-no-baseline lets a first run pass" if absent else ""
            raise ValueError(f"--llmgpu-compare: {error}{remedy}") from None
        try:
            # With all rows: the file can change during the run.
            self.base = self._source.report()
        except ValueError as error:
            raise ValueError(f"--llmgpu-compare: {error}") from None

    def notes(self) -> list[str]:
        """Return a line for each name of the policy that no case of the baseline has, before anything is measured."""
        if self.base is None:
            return []
        found = [*idle_overrides(self.policy, self.base.cases), *gate.unmatched(self.policy, self.base.cases)]
        return [f"llmgpu: note: {text}" for text in found]

    def expect(self, nodeids: Sequence[str]) -> None:
        """Set the tests that get a ruling of their own."""
        self._tests = frozenset(nodeids)

    def judge(self, report: Report) -> Verdicts:
        """Return the verdicts on a report: those of `llmgpu gate` on the same two files under the same policy."""
        self._verdicts = gate.judge(
            self.base,
            report,
            self.policy,
            today=self._today,
            calibration=self._noise,
            baseline=None
            if self._source is None or self.base is None
            else self._source.baseline(self._reference, self.base),
        )
        return self._verdicts

    def ruling(self, nodeid: str | None) -> Ruling:
        """Return the ruling on the cases of a test; for None, on the rows that belong to no test."""
        ruling = self._of_run() if nodeid is None else self._of_test(nodeid)
        self._failed |= ruling.fails
        return ruling

    def unreported(self) -> list[str]:
        """Return one line on why the gate fails, if no ruling failed: the rulings may not have been requested."""
        if self._verdicts is None or self._failed or not exit_status(self._verdicts, self.policy):
            return []
        return [f"llmgpu gate: {verdict_tables.conclusion(self._verdicts, self.policy)}"]

    def summary(self) -> str:
        """Return the verdicts as text for the terminal."""
        lines = [] if self._why is None else [f"no baseline: {self._why}"]
        if self._verdicts is not None:
            lines.append(verdict_tables.conclusion(self._verdicts, self.policy))
            lines.append(verdict_tables.table(self._verdicts, self.policy))
            if self._verdicts.baseline is not None:
                noise = calibration.in_words(self._noise, self._calibration_path)
                lines.append(f"{noise}\n{self._policy_in_words}")
        return "\n\n".join(lines)

    def _named(self) -> str:
        """Return the reference; a path that is not found is relative to the rootdir, as in an ini file."""
        in_root = self._rootdir / self._reference
        try:
            return str(in_root) if not Path(self._reference).exists() and in_root.is_file() else self._reference
        except OSError:  # too long for a path
            return self._reference

    def _of_test(self, nodeid: str) -> Ruling:
        rows = [row for row in self._verdicts.rows if row.nodeid == nodeid] if self._verdicts is not None else []
        return self._of_rows(rows) if rows else Ruling("MISSING", fails=False, text="the test measured no case")

    def _of_run(self) -> Ruling:
        """Return the ruling on series and on missing cases, which fails also if too little was compared."""
        verdicts = self._verdicts
        if verdicts is None:
            return Ruling("MISSING", fails=True, text="no case was measured: nothing was compared.")
        ruling = self._of_rows([row for row in verdicts.rows if row.nodeid not in self._tests])
        found = headline.decide(verdicts, self.policy)
        if ruling.fails or found.status != ExitStatus.NOT_JUDGED or found.worst:
            return ruling
        verdict: Verdict = "NEW" if verdicts.baseline is None else "NOT_COMPARABLE"
        return Ruling(verdict, fails=True, text=headline.describe(found))

    def _of_rows(self, rows: list[Row]) -> Ruling:
        ordered, limit = worst_first(rows), self.policy.largest_unseen_slowdown
        failing = [row for row in ordered if fails(row, self.policy)]
        counting = [row for row in ordered if row.gated and row.known is None]
        if failing:
            return Ruling(failing[0].verdict, fails=True, text=_describe_rows(failing, limit), rows=ordered)
        worst: Verdict = counting[0].verdict if counting else "OK"
        return Ruling(
            worst, fails=False, text="" if worst in _GOOD else _describe_rows(counting[:1], limit), rows=ordered
        )


def _describe_rows(rows: list[Row], limit: float) -> str:
    """Return each of the first rows with its reason, and the number of the others."""
    lines = []
    for row in rows[:_SHOWN]:
        first = f"{row.verdict}: {headline.row_in_words(row, limit)}"
        # The first line of a reason has the change, which the headline of the row has as well.
        reason = row.reason.splitlines()[0 if row.ratio is None or row.unseen else 1 :]
        lines += [first, *(line for line in reason if line.removeprefix(cause.PREFIX).rstrip(".") not in first)]
    more = [f"and {len(rows) - _SHOWN} more rows: see the table"] if len(rows) > _SHOWN else []
    return "\n".join([*lines, *more, f"Next: {headline.step_of(rows[0])}"])


def _report_of(machine: Machine) -> Report:
    """Return a report that identifies this machine: the store names machines by their reports."""
    case = Case(
        strategy="",
        batch_size=1,
        model="",
        dtype="",
        device=machine.device,
        devices=machine.devices,
        dataset="",
        dataset_sha256="",
        tokenizer_sha256="",
    )
    return Report(
        created="",
        plugin_version=None,
        environment=environment(machine),
        cases=[CaseResult(id="", key="", case=case, outcome="completed")],
    )
