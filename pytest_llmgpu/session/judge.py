"""What a run is judged by, and what that says of each of its tests.

Policy and baseline are read before anything is measured, so that a typo costs no hours. The whole report is judged at
once, since a metric's rows are one family, and every test gets what is said of its own cases.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_llmgpu.gate import judge as gate
from pytest_llmgpu.gate import policy_file
from pytest_llmgpu.gate.classify import ExitStatus, exit_status, fails
from pytest_llmgpu.gate.policy import Policy, switched
from pytest_llmgpu.gate.timing import calibration_file
from pytest_llmgpu.gate.timing.calibration import Calibration
from pytest_llmgpu.profiling import machine as environment
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.render.terminal import verdicts as verdict_tables
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import BETTER, Baseline, Row, Verdict, Verdicts, worst_first
from pytest_llmgpu.store import references, store
from pytest_llmgpu.store.references import Source

__all__ = ["Judge", "Ruling"]

_SHOWN = 3  # reasons that a test's message or the run's names: the table has them all

_GOOD = BETTER | {"OK"}


class Ruling(NamedTuple):
    """What is said of one test, or of what belongs to none."""

    verdict: Verdict
    """The worst of what counts."""
    fails: bool
    text: str
    """Two lines at most for each row that fails, or for why nothing can be said; empty where all is well."""
    rows: Sequence[Row] = ()
    """All that was said, worst first."""

    @property
    def open(self) -> bool:
        """Whether it neither fails nor says that all is well."""
        return not self.fails and self.verdict not in _GOOD


class Judge:
    """Holds the report of a run against its baseline."""

    def __init__(
        self,
        options: Options,
        *,
        rootdir: Path,
        policy_path: Path | None,
        calibration_path: Path | None,
        storage_path: Path,
    ) -> None:
        """Read the policy; what the options say goes before it.

        Args:
            options: Those of the run, `compare` among them.
            rootdir: Folder whose pyproject.toml is the policy where no other is named, and that git is asked in.
            policy_path: The policy, also `git:REV:PATH`; None for the folder's.
            calibration_path: This runner's noise, likewise; None for what the store has of the machine.
            storage_path: Folder of the store.

        Raises:
            ValueError: The policy is none.
        """
        assert options.compare is not None, "there is something to be compared with"
        self._reference = options.compare
        self._rootdir = rootdir
        self._storage_path = storage_path
        self._today = datetime.datetime.now(datetime.timezone.utc).date()
        self.base: Report | None = None
        """What is compared with; None where there is none."""
        self._source: Source | None = None
        self._noise: Calibration | None = None
        self._noise_in_words = ""
        self._left_out = ""
        self._why: str | None = None
        """Why there is no baseline, where a run may do without one."""
        self._verdicts: Verdicts | None = None
        self._tests: frozenset[str] = frozenset()
        self._refused = False
        path = policy_path or policy_file.find(rootdir)
        self.policy: Policy = switched(policy_file.load(path, rootdir), options)
        self._policy_in_words = policy_file.in_words(path, rootdir)
        self._calibration_path = calibration_path

    def find_baseline(self, machine: Machine) -> None:
        """Read the baseline, of this machine where several have one of that name, and this machine's noise.

        Raises:
            ValueError: It is not there, and has to be, or it is no report; or the calibration is none.
        """
        begun = _begun(machine)
        asked = (self._storage_path, begun, self._calibration_path)
        self._noise = calibration_file.in_force(*asked, repository=self._rootdir)
        self._noise_in_words = calibration_file.in_words(*asked, repository=self._rootdir)
        try:
            self._source = references.resolve(
                self._named(), self._storage_path, machine=store.hardware(begun), repository=self._rootdir
            )
        except ValueError as error:
            absent = isinstance(error, references.AbsentError)
            if absent and self.policy.allow_no_baseline:
                self._why = str(error)
                return
            remedy = "; --llmgpu-allow-no-baseline lets a first run pass" if absent else ""
            raise ValueError(f"--llmgpu-compare: {error}{remedy}") from None
        try:
            self.base = self._source.report()
        except ValueError as error:
            raise ValueError(f"--llmgpu-compare: {error}") from None

    def expect(self, nodeids: Sequence[str]) -> None:
        """Name the tests that get a ruling of their own."""
        self._tests = frozenset(nodeids)

    def judge(self, report: Report) -> Verdicts:
        """Return what is said of a report: what `llmgpu gate` says of the same two files under the same policy."""
        self._verdicts = gate.judge(
            self.base,
            report,
            self.policy,
            today=self._today,
            calibration=self._noise,
            baseline=self._baseline(),
        )
        self._left_out = calibration_file.left_out(self._noise, report)
        return self._verdicts

    def ruling(self, nodeid: str | None) -> Ruling:
        """Return what is said of a test's cases; None: of what belongs to no test."""
        ruling = self._of_run() if nodeid is None else self._of_test(nodeid)
        self._refused |= ruling.fails
        return ruling

    def unsaid(self) -> list[str]:
        """Return why the gate is not green in a line, where no ruling has said so: nobody may have asked for it."""
        if self._verdicts is None or self._refused or not exit_status(self._verdicts, self.policy):
            return []
        return [f"llmgpu gate: {verdict_tables.conclusion(self._verdicts, self.policy)}"]

    def summary(self) -> str:
        """Return the verdicts as people read them."""
        lines = [] if self._why is None else [f"no baseline: {self._why}"]
        if self._verdicts is not None:
            lines.append(verdict_tables.table(self._verdicts))
            if self._verdicts.baseline is not None:
                judged_by = (self._noise_in_words, self._left_out, self._policy_in_words)
                lines.append("\n".join(filter(None, judged_by)))
            lines.append(verdict_tables.conclusion(self._verdicts, self.policy))
        return "\n\n".join(lines)

    def _named(self) -> str:
        """Return the reference; a path that is not here counts from the rootdir, as an ini file has it."""
        in_root = self._rootdir / self._reference
        try:
            return str(in_root) if not Path(self._reference).exists() and in_root.is_file() else self._reference
        except OSError:  # too long for a path
            return self._reference

    def _of_test(self, nodeid: str) -> Ruling:
        rows = [row for row in self._verdicts.rows if row.nodeid == nodeid] if self._verdicts is not None else []
        return self._of_rows(rows) if rows else Ruling("MISSING", fails=False, text="it measured no case")

    def _of_run(self) -> Ruling:
        """Return what is said of the rest: series, cases that are gone, and whether anything was compared at all."""
        verdicts = self._verdicts
        if verdicts is None:
            return Ruling("MISSING", fails=True, text="no case was measured: nothing was compared.")
        ruling = self._of_rows([row for row in verdicts.rows if row.nodeid not in self._tests])
        if ruling.fails or exit_status(verdicts, self.policy) != ExitStatus.NOTHING_COMPARED:
            return ruling
        if verdicts.baseline is None:
            return Ruling("NO_BASELINE", fails=True, text="there is no baseline: nothing was compared.")
        what = "not all that is gated was compared" if verdicts.armed.gated else "nothing that is gated was compared"
        reasons = sorted(verdicts.armed.unarmed.items(), key=lambda entry: -entry[1])[:_SHOWN]
        text = "; ".join(f"{count:,} x {reason}" for reason, count in reasons) or "the reports share no case"
        return Ruling("NOT_COMPARABLE", fails=True, text=f"{what}: a gate that compares nothing is not green.\n{text}.")

    def _of_rows(self, rows: list[Row]) -> Ruling:
        ordered = worst_first(rows)
        failing = [row for row in ordered if fails(row, self.policy)]
        counting = [row for row in ordered if row.gated and row.known is None]
        if failing:
            return Ruling(failing[0].verdict, fails=True, text=_text(failing), rows=ordered)
        worst: Verdict = counting[0].verdict if counting else "OK"
        return Ruling(worst, fails=False, text="" if worst in _GOOD else _text(counting[:1]), rows=ordered)

    def _baseline(self) -> Baseline | None:
        """Return what the baseline is, as it was asked for but without private folders."""
        if self._source is None or self.base is None:
            return None
        return self._source.baseline(self._reference, self.base)


def _text(rows: list[Row]) -> str:
    lines = [f"{row.id}: {row.metric} {row.verdict}: {row.reason}" for row in rows[:_SHOWN]]
    more = [f"and {len(rows) - _SHOWN} more rows: see the table"] if len(rows) > _SHOWN else []
    return "\n".join([*lines, *more])


def _begun(machine: Machine) -> Report:
    """Return a report that tells the machine at hand as this run's will: the store names machines by that."""
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
        environment=environment.fingerprint(machine.facts),
        cases=[CaseResult(id="", key="", case=case, outcome="completed")],
    )
