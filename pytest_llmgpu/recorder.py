"""What was measured in this session: every result is judged, kept and written as soon as it is there."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_llmgpu import accuracy, comparison, environment, findings, metrics, report
from pytest_llmgpu.commit import commit
from pytest_llmgpu.environment import TorchFacts
from pytest_llmgpu.options import Options
from pytest_llmgpu.privacy import anonymous, short_paths
from pytest_llmgpu.report import Report
from pytest_llmgpu.result import CaseResult, Failure

__all__ = ["Recorder"]


class Recorder:
    """Keeps the report of a session, and its file as complete as the session is."""

    def __init__(self, path: Path | None, rootdir: Path, options: Options, arguments: Sequence[str]) -> None:
        """Prepare a report.

        Args:
            path: Where it goes; None for nowhere.
            rootdir: Folder that relative paths in the report start from, and that the commit is read from.
            options: Those of the run, without any test's markers.
            arguments: pytest's own.

        Raises:
            ValueError: The report cannot be written there.
        """
        self._rootdir = rootdir
        self._options = options
        self._arguments = arguments
        self.path = path
        self.report: Report | None = None
        """The report so far; None until the first case is there."""
        self.trouble: str | None = None
        """Why the file is not what the report is."""
        if path is not None:
            report.check_writable(path)

    @property
    def shown_path(self) -> str:
        """The report's path as people write it."""
        return "" if self.path is None else _relative(str(self.path), self._rootdir)

    def add(self, result: CaseResult, options: Options, nodeid: str, facts: TorchFacts) -> None:
        """Judge a result against its baseline and those before it, and write the report."""
        if self.report is None:
            self.report = self._start(facts)
        earlier = list(self.report.cases)
        result.nodeid = nodeid
        result.id = report.next_id(self.report, result.case)
        if result.failure is not None:
            # Before anything quotes it.
            result.failure = _publishable(result.failure, self._rootdir)
        metrics.derive(result)
        mp = comparison.reference(result, earlier)
        if mp is None:
            result.why["comparison"] = comparison.why_not(result, earlier)
        else:
            result.comparison = comparison.compare(result, mp, options.accuracy_metric)
        result.accuracy_check = accuracy.check(
            result,
            earlier,
            given=options.accuracy_baseline,
            metric=options.accuracy_metric,
            tolerance=options.accuracy_tolerance,
        )
        result.findings = findings.findings(result, earlier)
        self.report.cases.append(result)
        self._write()

    def finish(
        self, exit_status: int, *, interrupted: bool, expected: Sequence[str], deselected: Sequence[str]
    ) -> None:
        """Say how the session ended; without a case there is no report."""
        if self.report is None:
            return
        done = {result.nodeid for result in self.report.cases}
        self.report.session = report.Session(
            complete=not interrupted and done.issuperset(expected),
            interrupted=interrupted,
            exit_status=exit_status,
            collected=len(expected),
            deselected=list(deselected),
        )
        self._write()

    def _start(self, facts: TorchFacts) -> Report:
        return Report(
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
            plugin_version=environment.installed_version("pytest-llmgpu"),
            argv=[_argument(argument, self._rootdir) for argument in self._arguments],
            options={
                flag: _argument(value, self._rootdir) if isinstance(value, str) else _plain(value)
                for flag, value in self._options.in_force().items()
            },
            environment=environment.fingerprint(facts),
            commit=commit(self._rootdir),
        )

    def _write(self) -> None:
        if self.report is None or self.path is None:
            return
        try:
            report.dump(self.report, self.path)
            self.trouble = None
        except OSError as error:
            # A full disk must not end the measuring: it is tried again after the next case.
            self.trouble = f"{self.shown_path} could not be written: {error.strerror or error}"


def _publishable(failure: Failure, rootdir: Path) -> Failure:
    """Return a failure whose texts, a library's and a traceback's, tell neither this machine's folders nor its user."""
    log = failure.log_tail
    return msgspec.structs.replace(
        failure,
        message=anonymous(short_paths(failure.message, rootdir)),
        log_tail=None if log is None else anonymous(short_paths(log, rootdir)),
    )


def _plain(value: report.OptionValue | tuple[str | int, ...]) -> report.OptionValue:
    return list(value) if isinstance(value, tuple) else value


def _argument(argument: str, rootdir: Path) -> str:
    """Return a command-line argument without what is private: a path becomes relative, else its basename."""
    name, equals, value = argument.rpartition("=") if argument.startswith("-") else ("", "", argument)
    return anonymous(f"{name}{equals}{_relative(value, rootdir)}")


def _relative(text: str, rootdir: Path) -> str:
    path = Path(text)
    if not path.is_absolute():
        return text
    return str(path.relative_to(rootdir)) if path.is_relative_to(rootdir) else path.name
