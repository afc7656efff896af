"""The calibration of a machine: the deviation of times between launches, measured from reports, and its file.

A calibration adds launches to the prior of a case (`times`). The gate works without one.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pytest_llmgpu.gate.times import Deviation, deviation
from pytest_llmgpu.report import disturbances, file
from pytest_llmgpu.report.bounds import Count
from pytest_llmgpu.report.derived import device_times_s
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.store import git
from pytest_llmgpu.store import store as storage

VERSION = 2
"""Version of the format of `Measured`."""

LEAST = 2
"""Least number of launches of a case to estimate its noise."""

ENOUGH = 10
"""Recommended number of launches of a case: they estimate its noise to about a quarter."""

_FILE = "calibration.json"
_LIMIT_BYTES = 2**26

_MOST_SD = 2.0
"""The largest accepted deviation of log times, a factor of 7. With more noise a gate detects nothing."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """The noise of one case."""

    id: str
    """Id of the case, such as `tp-bs8`."""
    launches: Count
    """Number of launches that were measured."""
    time: Deviation
    """Deviation of the wall time between the launches of a session."""
    device_time: Deviation | None = None
    """Deviation of the device time between the launches of a session; None if it was not measured."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One report that was measured."""

    created: str
    """Time at which the report was created."""
    commit: str | None
    """Commit of the report."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The calibration of a machine: the object in the JSON file."""

    calibration_version: int = VERSION
    """Version of the format."""
    machine: str
    """Name of the machine in the store, such as `4x-NVIDIA-H200-140GiB`."""
    commit: str | None = None
    """Commit that the launches measured."""
    cases: dict[str, Noise]
    """Noise of each case, by its key."""
    sessions: list[Session] = []
    """Reports that were measured; empty in files of versions that did not record them."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The noise on one machine that a gate adds to its priors."""

    cases: Mapping[str, Noise] = {}
    """Noise of each case, by its key."""
    sessions: Sequence[Session] = ()
    """Reports that the noise was measured from."""
    sha256: str | None = None
    """SHA-256 of the calibration file."""
    warnings: Sequence[str] = ()
    """A warning if the file is of an older version."""

    def of(self, key: str, metric: str) -> Deviation | None:
        """Return the deviation of `time` or `device_time` of a case; None if it was not measured."""
        noise = self.cases.get(key)
        return None if noise is None else noise.device_time if metric == "device_time" else noise.time


class _OldNoise(msgspec.Struct, frozen=True):
    """The noise of one case in a file of version 1, which has wall time only."""

    id: str
    sd: float
    launches: Count
    sessions: int = 1


class _Old(msgspec.Struct, frozen=True):
    """A calibration of version 1."""

    machine: str
    time: dict[str, _OldNoise]
    commit: str | None = None


class _Head(msgspec.Struct):
    calibration_version: int = VERSION


def measure(*sessions: Report, reports: Sequence[Report] = ()) -> Measured:
    """Return the deviation between the launches of each case within a session.

    Disturbed launches and launches with other batches than the first are left out, and so are cases with one launch.
    Sessions of one launch each count as one session.

    Args:
        sessions: One merged report for each session (`merging`).
        reports: The reports before they were merged; empty if they are the sessions.

    Raises:
        ValueError: No case has two launches, or a launch is there twice.
    """
    cases: dict[str, Noise] = {}
    by_key = [{result.key: result for result in reversed(session.cases)} for session in sessions]
    for key, result in ((result.key, result) for session in sessions for result in session.cases):
        if key not in cases:
            parts = _paired([found[key] for found in by_key if key in found])
            if sum(map(len, parts)) >= LEAST:
                cases[key] = _noise(result.id, parts)
    if not cases:
        raise ValueError(
            f"no case has {LEAST} undisturbed launches of the same batches, the minimum of a calibration; {ENOUGH} are "
            "recommended: measure with --llmgpu-launches, or name several reports"
        )
    return Measured(
        machine=storage.hardware(sessions[0]),
        commit=sessions[0].commit.sha,
        cases=cases,
        sessions=[Session(created=one.created, commit=one.commit.sha) for one in reports or sessions],
    )


def default_path(store: Path, machine: str) -> Path:
    """Return the path of a machine's calibration in the store."""
    return store / machine / _FILE


def dump(measured: Measured, path: Path) -> None:
    """Write a calibration atomically.

    Raises:
        ValueError: The calibration has a value that `load` refuses.
        OSError: The file cannot be written.
    """
    _check(measured, path)
    file.write(path, msgspec.json.format(msgspec.json.encode(measured), indent=2) + b"\n")


def load(path: Path, repository: Path = Path()) -> Calibration:
    """Read a calibration.

    Args:
        path: The file, or `git:REV:PATH`, which is read from that commit.
        repository: A folder inside the working tree of git.

    Raises:
        ValueError: The file is not valid; one line with the file, the error and its place.
    """
    return _read(path, repository)[1]


def in_force(store: Path, head: Report, given: Path | None = None, *, repository: Path = Path()) -> Calibration | None:
    """Return the calibration to judge a report with; None if there is none.

    Args:
        store: The folder of the store.
        head: The candidate.
        given: A calibration file as in `load`; None: the file of the candidate's machine in the store.
        repository: A folder inside the working tree of git.

    Raises:
        ValueError: The file is not a calibration, or is of another machine.
    """
    machine = storage.hardware(head)
    path = default_path(store, machine) if given is None else given
    if given is None and not path.exists():
        return None
    measured_on, calibration = _read(path, repository)
    if measured_on != machine:
        raise ValueError(f"calibration {path}: was measured on {measured_on}, the report on {machine}")
    return calibration


def in_words(calibration: Calibration | None, given: Path | None = None) -> str:
    """Describe the noise that a report is judged with. The text is published, so it contains no folder.

    Args:
        calibration: The calibration in force.
        given: The calibration file that the user named; None: the file of the store.
    """
    if calibration is None or not calibration.cases:
        return "noise: built-in priors of each regime and these launches; llmgpu calibrate adds launches"
    counts = [noise.launches for noise in calibration.cases.values()]
    fewest, most = min(counts), max(counts)
    launches = f"{fewest:,} {'' if fewest == most else f'to {most:,} '}launches"
    return f"noise: {_FILE if given is None else given.name}, {launches}"


def _noise(case_id: str, sessions: Sequence[Sequence[Launch]]) -> Noise:
    """Return the noise of a case; ValueError if a launch is there twice."""
    launches = [launch for session in sessions for launch in session]
    if len({tuple(launch.batches.latency_s) for launch in launches}) < len(launches):
        raise ValueError(f"{case_id}: two launches have identical times: name each report once")
    groups = sessions if any(len(session) > 1 for session in sessions) else [launches]
    wall = deviation(
        [statistics.fmean(map(math.log, launch.batches.latency_s)) for launch in group] for group in groups
    )
    return Noise(id=case_id, launches=len(launches), time=wall, device_time=_of_devices(groups))


def _of_devices(groups: Sequence[Sequence[Launch]]) -> Deviation | None:
    """Return the deviation of the device time, the root of the mean variance over the ranks; None without launches."""
    times = [[times for launch in group if (times := device_times_s(launch))] for group in groups]
    ranks = {len(launch) for group in times for launch in group}
    if len(ranks) != 1:
        return None
    of_ranks = [
        deviation([math.log(launch[rank]) for launch in group] for group in times) for rank in range(ranks.pop())
    ]
    if not of_ranks[0].degrees:
        return None
    # The ranks of a launch share its conditions: they add no degrees of freedom.
    sd = math.sqrt(statistics.fmean(one.sd**2 for one in of_ranks))
    return Deviation(sd=sd, degrees=of_ranks[0].degrees)


def _paired(results: Sequence[CaseResult]) -> list[list[Launch]]:
    """Return the undisturbed launches with the batches of the first of them, by session."""
    counting = [
        [launch for launch in result.launches if launch.batches.latency_s and disturbances.untimed(launch) is None]
        for result in results
    ]
    first = next((launch for launches in counting for launch in launches), None)
    found = [
        [
            launch
            for launch in launches
            if first is not None
            and launch.plan_sha256 == first.plan_sha256
            and len(launch.batches.latency_s) == len(first.batches.latency_s)
        ]
        for launches in counting
    ]
    return [launches for launches in found if launches]


def _read(path: Path, repository: Path) -> tuple[str, Calibration]:
    """Return the machine of a calibration file and its content."""
    try:
        data = git.content(path, repository) if git.is_reference(path) else file.read(path, _LIMIT_BYTES)
        version = msgspec.json.decode(data, type=_Head).calibration_version
        measured = _from_old(data) if version == 1 else msgspec.json.decode(data, type=Measured)
    except OSError as error:
        raise ValueError(f"calibration {path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())  # A message of git begins with the name.
        raise ValueError(f"calibration {path}: {reason}") from None
    if measured.calibration_version not in {1, VERSION}:
        raise ValueError(f"calibration {path}: calibration_version {version} is not supported; allowed is {VERSION}")
    _check(measured, path)
    name = str(path) if git.is_reference(path) else path.name
    old = (
        f"{name} is a calibration of version 1: its deviation between sessions has no effect, and it has no device "
        "time; run llmgpu calibrate again"
    )
    sha256 = hashlib.sha256(data).hexdigest()
    return measured.machine, Calibration(
        cases=measured.cases, sessions=measured.sessions, sha256=sha256, warnings=[old] if version == 1 else []
    )


def _from_old(data: bytes) -> Measured:
    """Return a calibration of version 1 in the present format."""
    old = msgspec.json.decode(data, type=_Old)
    cases = {
        key: Noise(
            id=noise.id,
            launches=noise.launches,
            time=Deviation(sd=noise.sd, degrees=noise.launches - noise.sessions or noise.launches - 1),
        )
        for key, noise in old.time.items()
    }
    return Measured(calibration_version=1, machine=old.machine, commit=old.commit, cases=cases)


def _check(measured: Measured, path: Path) -> None:
    """Raise ValueError with file and place for the first value that is not possible."""
    for key, noise in measured.cases.items():
        place = f"$.cases[{key!r}]"
        if noise.launches < LEAST:
            raise ValueError(
                f"calibration {path}: expected {LEAST} launches or more, got {noise.launches} - at `{place}.launches`"
            )
        for metric, found in (("time", noise.time), ("device_time", noise.device_time)):
            bounds = [] if found is None else [("sd", found.sd, 0, _MOST_SD)]
            bounds += [] if found is None else [("degrees", found.degrees, 1, noise.launches - 1)]
            for name, value, low, high in bounds:
                if not low <= value <= high:
                    raise ValueError(
                        f"calibration {path}: expected a number from {low} to {high:g}, got {value} - at "
                        f"`{place}.{metric}.{name}`"
                    )
