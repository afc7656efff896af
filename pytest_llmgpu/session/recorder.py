"""Keeps the report of a session: every result is assessed, added and written at once."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from pytest_llmgpu.analysis.assess import assess
from pytest_llmgpu.analysis.capacity import capacities
from pytest_llmgpu.analysis.environments import hardware_differences, shortened, software_differences
from pytest_llmgpu.analysis.merging import by_launch, merge_results
from pytest_llmgpu.analysis.reference import decisive
from pytest_llmgpu.gate import promotion
from pytest_llmgpu.profiling import machine
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.report import file
from pytest_llmgpu.report.case import Case, next_id
from pytest_llmgpu.report.options import GATE_OPTIONS, LATEST, OUTPUT_OPTIONS, Options, flag_of
from pytest_llmgpu.report.privacy import anonymous, short_paths
from pytest_llmgpu.report.report import OptionValue, Report, Resumption, Session
from pytest_llmgpu.report.result import CaseResult, Declared
from pytest_llmgpu.report.text import beginning, listed, valid
from pytest_llmgpu.report.verdicts import Verdicts
from pytest_llmgpu.report.work import TRAFFIC_STOPPED, WORK_STOPPED, Ceilings
from pytest_llmgpu.session.figures import checked
from pytest_llmgpu.store import store
from pytest_llmgpu.store.git import commit

_NAMED = 3
"""An error names at most this many differences."""
_SAVE = "--llmgpu-save"
"""The option whose value a session keeps when it is continued without it."""
_NO_CEILINGS = "the ceilings are measured after the first work passes on a GPU"


class Recorder:
    """Keeps the report of a session and writes its file as cases are added."""

    def __init__(self, paths: Mapping[str, Path], rootdir: Path, options: Options) -> None:
        """Prepare a report; the paths are those of `BenchmarkSession`, ValueError if one of them cannot be written."""
        self._rootdir = rootdir
        self._options = options
        self.declared: dict[str, Declared] = {}
        """The declarations of figures of the user's own, by name."""
        self.path = path = paths.get("json")
        self.report: Report | None = None
        """The report so far; None until the first case is there."""
        self.flags: dict[str, OptionValue] = {}
        """Options of other plugins without which nothing would be measured."""
        self.expected: list[str] = []
        """Node ids of the tests that are to measure a case."""
        self.judge: Callable[[Report], Verdicts | None] | None = None
        """Returns the verdicts on a report; None where nothing is to be judged."""
        self.failed_tests: set[str] = set()
        """Node ids of the tests of a model that failed."""
        self.problems: dict[Literal["report", "store", "page"], str] = {}
        """A line for each file that is missing or incomplete, with the reason."""
        self._saved: list[str] = []
        """The line with the path in the store; none before the report is saved."""
        self._began_s = time.monotonic()
        self._launch = 1
        """The number of the launch that is measured now."""
        self._counts: Counter[tuple[str, str]] = Counter()
        """Maps node id and key of a case to the number of its measurements in this launch."""
        self._measured: dict[tuple[tuple[str, str], int], tuple[int, list[CaseResult]]] = {}
        """Maps node id, key and number of a measurement to its place in the report and its results, one per launch."""
        self._resumed: Counter[tuple[tuple[str, str], int]] = Counter()
        """Maps node id, key and number of a measurement to its launches before the session was resumed."""
        self._storage_path = paths["storage"]
        self._page_path, self._trace_path = page_path, trace_path = paths.get("html"), paths.get("trace")
        self.name = ""
        """The name by which commands find the report; empty where none is written."""
        if path is not None:
            file.check_writable(path)
            is_last = path.absolute() == (self._storage_path / store.LAST).absolute()
            self.name = LATEST if is_last else _from_here(path)
        if page_path is not None:
            from pytest_llmgpu.render.html import report  # imports the charts

            report.check(page_path)
        if trace_path is not None:
            file.check_writable(trace_path / "case-rank0-passes.json.gz", "trace")
        if options.save is not None:
            file.check_writable(self._storage_path / "0001.json")

    def whereabouts(self) -> list[str]:
        """Return a line for each file, its path or the reason why it is missing, and one on what to do with them."""
        report, steps, name = self.report, [], "" if "report" in self.problems else self.name
        assert report is not None, "a case was measured"
        written = "no report was written (--llmgpu-json=)" if self.path is None else f"report: {_from_here(self.path)}"
        lines = [self.problems.get("report", written), *self._saved, *filter(None, [self.problems.get("store")])]
        if (found := report.commit.not_measured()) is not None:
            lines.append(f"note: the report names {found}: install this working tree (pip install -e .)")
        if name and not report.session.complete and report.commit.sha is not None and not report.commit.dirty:
            steps.append(f"the same command with --llmgpu-resume={name} (measures what is missing)")
        elif self._saved and report.verdicts is None:
            tests = next((result.nodeid for result in report.cases if result.nodeid), "")
            path = shlex.quote(str(Path(tests.partition("::")[0]).parent / "baseline.json.gz"))
            chosen = f"llmgpu promote {report.options.get(_SAVE) or LATEST} --to {path}"
            unfit = next(promotion.unfit(report), None)
            steps.append(f"{chosen} (makes it the baseline)" if unfit is None else f"no baseline: {unfit}")
        if self._page_path is not None:
            lines.append(self.problems.get("page", f"page: {self._shown(self._page_path)}"))
        elif name:
            steps.append(f"llmgpu html {name} (one page with charts)")
        if self._trace_path is not None:
            traced = any(launch.traces for result in report.cases for launch in result.launches)
            none = "no trace was written: traces are of work passes that completed (--llmgpu-work=on)"
            lines.append(f"trace: {self._shown(self._trace_path)}" if traced else none)
        if not self._saved and "store" not in self.problems:
            steps.append("--llmgpu-save=NAME (keeps the report)")
        return [*lines, f"next: {'; '.join(steps)}"] if steps else lines

    def resume(self, reference: str, devices: Machine) -> Report:
        """Continue a broken session: the results that follow are added to those of its report that stay.

        ValueError if there is no such report, or its session cannot be continued.
        """
        name = store.public(reference)
        try:
            source = store.resolve(reference, self._storage_path, repository=self._rootdir)
            report = continued(source.report(), self._start(devices), name=name, sha256=source.sha256)
        except ValueError as error:
            raise ValueError(f"--llmgpu-resume={reference}: {error}") from None
        self.report = report
        self._began_s -= report.session.duration_s or 0.0
        for place, result in enumerate(report.cases):
            result.declared = self.declared
            measured = result.nodeid or "", result.key
            self._measured[measured, self._counts[measured]] = (place, by_launch(result))
            self._resumed[measured, self._counts[measured]] = len(result.launches)
            self._counts[measured] += 1
        self._counts.clear()
        return report

    def kept(self, nodeid: str, case: Case) -> CaseResult | None:
        """Return the result of a case that the session had before it was resumed; None if it is to be measured.

        A test that measures the same case twice calls this, or `add`, once for each of them.
        """
        measured = valid(nodeid), case.key
        number = self._counts[measured]
        if self.report is None or self._resumed[measured, number] < self._launch:
            return None
        place, _ = self._measured[measured, number]
        self._counts[measured] += 1
        # It has the figures of its measurement.
        vars(self.report.cases[place])["recorder"] = lambda _, figures: checked(figures, self.declared)
        return self.report.cases[place]

    def start_launch(self, number: int) -> None:
        """Begin a launch: the results that follow are further launches of the same cases."""
        self._launch = number
        self._counts.clear()

    def begin_test(self, nodeid: str) -> None:
        """Begin a test. If it ran in this launch before, what it measures is a further attempt of the same cases."""
        for measured in [measured for measured in self._counts if measured[0] == valid(nodeid)]:
            del self._counts[measured]
        self.failed_tests.discard(nodeid)

    def add(
        self,
        result: CaseResult,
        options: Options,
        nodeid: str,
        devices: Machine,
        *,
        kernel_names: Sequence[str] = (),
        ceilings: Ceilings | None = None,
        imported_from: Mapping[str, str] = MappingProxyType({}),
    ) -> CaseResult:
        """Add one launch of a case to the report, with what the run states about it, and write the report.

        Return the case as it stands in the report: with the launches that were measured before.
        """
        if self.report is None:
            self.report = self._start(devices)
            if self.path is not None and self.path.parent == self._storage_path:
                with suppress(OSError):  # it is reported when the report is written
                    store.prepare(self._storage_path)
        cases, environment = self.report.cases, self.report.environment
        environment.kernel_names, environment.ceilings = list(kernel_names), ceilings
        environment.why = {name: reason for name, reason in environment.why.items() if name != "ceilings"}
        if ceilings is None:
            environment.why["ceilings"] = _NO_CEILINGS
        elsewhere = {name: anonymous(path) for name, path in imported_from.items()}
        self.report.commit = msgspec.structs.replace(self.report.commit, imported_from=elsewhere)
        result.nodeid, result.declared = nodeid, self.declared
        if (failure := result.failure) is not None:
            # Findings quote it.
            message, log = self._text(beginning(failure.message)), failure.log_tail
            log = None if log is None else self._text(log)
            result.failure = msgspec.structs.replace(failure, message=message, log_tail=log)
        for why in (result.why, *(launch.why for launch in result.launches)):
            why |= {name: self._text(reason) for name, reason in why.items()}
        result = file.encodable(result)
        for launch in result.launches:
            launch.traces = list(map(self._shown, launch.traces))
            launch.resumption = len(self.report.resumed)
        # A test that measures the same case twice has two cases in the report, in every launch.
        measured = valid(nodeid), result.key
        place, launches = self._measured.setdefault((measured, self._counts[measured]), (len(cases), []))
        self._counts[measured] += 1
        if len(launches) == self._launch:
            before = launches.pop()
            result.attempts, result.id = before.attempts + 1, before.id
        launches.append(result)
        if len(launches) == 1 and result.attempts == 1:
            result.id = next_id({one.id for one in cases}, result.case)
        # Series and references are among the cases whose answers the same fields decide.
        fields = decisive(result.case)
        earlier = [one for one in cases[:place] if decisive(one.case) == fields]
        whole = assess(launches, earlier=earlier, environment=environment, options=options)
        whole.attempts = max(one.attempts for one in launches)
        vars(whole)["recorder"] = self.record
        cases[place : place + 1] = [whole]
        self._write()
        return whole

    def record(self, result: CaseResult, figures: Mapping[str, float]) -> None:
        """Add figures of the user's own to the last launch of a case that `add` returned, and write the report.

        ValueError as for `figures.checked`, or if the launch has a figure of one of these names.
        """
        __tracebackhide__ = True
        known, before = checked(figures, self.declared), result.launches[-1].figures
        for name in known.keys() & before.keys():
            raise ValueError(f"figure {name!r}: this launch of {result.id} has one, {before[name]:g}: record it once")
        before |= known
        self._write()

    def _text(self, text: str) -> str:
        """Return a text of a library or a rank without private folders, names and secrets."""
        return anonymous(short_paths(text, self._rootdir))

    def conclude(self, exit_status: int | None, *, interrupted: bool, deselected: Sequence[str]) -> None:
        """Add the state of the run (see `BenchmarkSession.end`) to the report, judge it and write it.

        A running one has no exit status; without a case there is no report.
        """
        if self.report is None:
            return
        done, expected = {result.nodeid for result in self.report.cases}, list(map(valid, self.expected))
        self.report.session = Session(
            complete=not interrupted and done.issuperset(expected),
            interrupted=interrupted,
            exit_status=exit_status,
            failed_tests=len(self.failed_tests),
            collected=len(expected),
            deselected=list(map(valid, deselected)),
            duration_s=round(time.monotonic() - self._began_s, 3),
        )
        self.report.capacity = capacities(self.report.cases)
        if self.judge is not None:
            self.report.verdicts = self.judge(self.report)
        self._write()
        if "report" in self.problems and self.path is not None:
            # It may be the work of hours.
            with suppress(OSError):
                copy = Path(tempfile.mkdtemp(prefix="llmgpu-report-")) / self.path.name
                # A figure that is not finite is null in this copy.
                copy.write_bytes(msgspec.json.encode(self.report))
                self.problems["report"] += f"; the report is {copy}"

    def finish(self, baseline: Report | None) -> None:
        """Save the finished report in the store, and write it as a page with its baseline, as options request it."""
        if self.report is None:
            return
        if (chosen := self.report.options.get(_SAVE)) is not None:
            try:
                saved = store.save(self.report, self._storage_path, str(chosen or "") or None)
                note = "" if self.report.session.complete else " (a run that did not complete takes no name)"
                self._saved = [f"saved: {self._shown(saved)}{note}"]
            except (OSError, ValueError) as error:  # ValueError: a name in the report that was continued
                where = self._shown(self._storage_path)
                self.problems["store"] = f"the report could not be saved in {where}: {file.one_line(error)}"
        if self._page_path is not None:
            from pytest_llmgpu.render.html import report

            name = "" if self.path is None else self._shown(self.path)
            try:
                report.write(report.render(self.report, baseline, name=name), self._page_path)
            except ValueError as error:
                self.problems["page"] = f"no page: {error}"

    def _shown(self, where: Path | str) -> str:
        """Return a path relative to the rootdir; of one outside its base name. A relative path, or text, stays."""
        path = Path(where)
        if not path.is_absolute():
            return str(where)
        return str(path.relative_to(self._rootdir)) if path.is_relative_to(self._rootdir) else path.name

    def _start(self, devices: Machine) -> Report:
        chosen: dict[str, OptionValue] = {}
        for flag, value in self._options.in_force().items():
            text = anonymous(self._shown(value)) if isinstance(value, str) else value
            chosen[flag] = list(text) if isinstance(text, tuple) else text
        # The files of the tests, and of modules that were imported from the repository, such as conftest.py.
        needed = {nodeid.partition("::")[0] for nodeid in self.expected}
        installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
        for module in list(sys.modules.values()):
            name = getattr(module, "__dict__", {}).get("__file__")  # some modules import others when they are asked
            path = Path(name) if isinstance(name, str) else Path()
            if path.is_relative_to(self._rootdir) and not any(map(path.is_relative_to, installed)):
                needed.add(str(path.relative_to(self._rootdir)))
        now = datetime.datetime.now(datetime.timezone.utc)
        started = Report(
            created=now.isoformat(timespec="seconds").replace("+00:00", "Z"),
            plugin_version=machine.installed_version("pytest-llmgpu"),
            options=chosen | self.flags,
            environment=machine.environment(devices),
            commit=commit(self._rootdir, needed=needed),
        )
        return file.encodable(started)

    def _write(self) -> None:
        if self.report is None or self.path is None:
            return
        try:
            file.dump(self.report, self.path)
            self.problems.pop("report", None)
        except (OSError, ValueError) as error:  # ValueError: a figure of a case is not finite
            # A full disk must not end the run: the file is written again after the next case.
            self.problems["report"] = f"{self._shown(self.path)} could not be written: {file.one_line(error)}"


def continued(broken: Report, now: Report, *, name: str, sha256: str) -> Report:
    """Return the report of a broken session with the results that stay, for the results that are missing.

    It is saved under the name of the broken one, unless the options have another name. ValueError if the session was of
    another commit or machine, of uncommitted changes, or had other options.
    """
    for one in (broken, now):
        if one.commit.sha is None:
            raise ValueError(f"the commit is not known: {one.commit.why.get('sha', 'no reason was recorded')}")
        if one.commit.dirty:
            raise ValueError(f"files differ from commit {one.commit.sha}: only a committed state can be continued")
    then, here = broken.environment, now.environment
    found = [*hardware_differences(then, here, "cpu"), *hardware_differences(then, here, "cuda")]
    found = [*dict.fromkeys(found), *software_differences(then, here)]
    free = {flag_of(field) for field in dataclasses.fields(Options) if field.name in OUTPUT_OPTIONS + GATE_OPTIONS}
    flags = sorted({*broken.options, *now.options} - free)
    pairs = [
        ("commit", broken.commit.sha, now.commit.sha),
        ("pytest-llmgpu", broken.plugin_version, now.plugin_version),
        *((flag, broken.options.get(flag), now.options.get(flag)) for flag in flags),
    ]
    found += [f"{what} {shortened(before)} -> {shortened(after)}" for what, before, after in pairs if before != after]
    if found:
        raise ValueError(f"it was measured in another way: {listed(found, _NAMED)}")
    save = now.options.get(_SAVE) if now.options.get(_SAVE) is not None else broken.options.get(_SAVE)
    cases = [whole for result in broken.cases if (whole := _whole(result)) is not None]
    return msgspec.structs.replace(
        broken,
        schema_version=now.schema_version,
        options={**broken.options, _SAVE: save},
        session=Session(duration_s=broken.session.duration_s),
        resumed=[*broken.resumed, Resumption(created=now.created, source=name, sha256=sha256, kept=len(cases))],
        cases=cases,
        verdicts=None,
    )


def _from_here(path: Path) -> str:
    """Return a path as commands find it that are pasted where pytest was started."""
    here, path = Path.cwd(), path.absolute()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _whole(result: CaseResult) -> CaseResult | None:
    """Return a result without the launch that was interrupted; None if it has no other."""
    last = result.launches[-1] if result.launches else None
    stopped = result.why.get("traffic") == TRAFFIC_STOPPED or (last and last.why.get("work") == WORK_STOPPED)
    if result.outcome != "interrupted" and (last is None or not stopped):
        return result
    before = msgspec.structs.replace(result, outcome="completed", failure=None, launches=result.launches[:-1])
    return merge_results(by_launch(before)) if before.launches else None
