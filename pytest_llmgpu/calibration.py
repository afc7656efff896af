"""How much one runner's times differ from launch to launch: measured from launches of the same thing, kept by machine.

Only time has such noise: traffic is exact, accuracy is judged by its own items, and memory by its margin.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_llmgpu import evidence, git, storage, unpacking
from pytest_llmgpu.distributions import largest_sd, t_quantile
from pytest_llmgpu.report import Report
from pytest_llmgpu.result import CaseResult
from pytest_llmgpu.statistics import UNCALIBRATED_SD, Calibration, levels

__all__ = [
    "ENOUGH",
    "LEAST",
    "ONE_SESSION",
    "Measured",
    "Noise",
    "default_path",
    "dump",
    "in_force",
    "in_words",
    "left_out",
    "load",
    "measure",
]

LEAST = 2
"""Launches of a case without which nothing is known of its noise."""

ENOUGH = 10
"""Launches of a case that tell its noise to about a quarter."""

ONE_SESSION = (
    "within one session only; sides measured on different days differ by more: use llmgpu ab, or calibrate with "
    "reports of several days"
)
"""What a calibration of one session does not say."""

_FILE = "calibration.json"
_VERSION = 1
_LIMIT_BYTES = 2**26
_SURE = 0.975
_LUCK = 0.01  # probability with which any case of a calibration counts as quieter than it is
_ASSUMED = f"{100 * UNCALIBRATED_SD:g} % assumed"


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one case."""

    id: str
    sd: float
    """Standard deviation, between launches, of the logarithm of the time."""
    launches: int
    """Launches that it was taken from."""
    sessions: int = 1
    """Sessions that these launches are of."""
    session_sd: float | None = None
    """Standard deviation, between sessions, of the mean of that logarithm; None with one session."""

    @property
    def cautious(self) -> float:
        """The deviation as it counts: larger, by how unsure so few launches leave it."""
        return self.sd * _wider(self.launches - self.sessions or self.launches - 1)

    @property
    def cautious_session(self) -> float | None:
        """The deviation between sessions as it counts, likewise; None with one session."""
        return None if self.session_sd is None else self.session_sd * _wider(self.sessions - 1)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The calibration of a machine: the whole object of the JSON file."""

    calibration_version: int = _VERSION
    machine: str
    """As the store names it: `4x-NVIDIA-H200-140GiB`."""
    commit: str | None = None
    """What the launches measured."""
    time: dict[str, Noise]
    """Key of a case to the noise of its time."""


def measure(*sessions: Report) -> Measured:
    """Return the noise between the launches of each case, and between sessions where there are several.

    Launches of one session share what lasts for hours, such as heat, clocks and neighbours: those of another day differ
    by more, however many they are. Launches that were disturbed, or ran other batches than the first, do not count; nor
    does a case with one launch.

    Args:
        sessions: one report for each, as `launch_merging` makes it of the session's launches.

    Raises:
        ValueError: no case has two launches, or one launch is there twice.
    """
    time: dict[str, Noise] = {}
    by_key = [{result.key: result for result in reversed(session.cases)} for session in sessions]
    for key, result in ((result.key, result) for session in sessions for result in session.cases):
        if key not in time:
            parts = _paired([found[key] for found in by_key if key in found])
            if sum(map(len, parts)) >= LEAST:
                time[key] = _noise(result.id, parts)
    if not time:
        raise ValueError(
            f"no case has {LEAST} undisturbed launches of the same batches, the least for a calibration; {ENOUGH} tell "
            "enough: measure with --llmgpu-launches, or name several reports"
        )
    return Measured(machine=storage.hardware(sessions[0]), commit=sessions[0].commit.sha, time=time)


def default_path(store: Path, machine: str) -> Path:
    """Return where the store keeps a machine's calibration, beside its reports."""
    return store / machine / _FILE


def dump(measured: Measured, path: Path) -> None:
    """Write a calibration: a reader finds the old one or the new one, never a part.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".llmgpu-{os.getpid()}.tmp"
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=2) + b"\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path, repository: Path = Path()) -> tuple[Measured, str]:
    """Read a calibration; return it with the sha256 of its file.

    Args:
        path: its file, or `git:REV:PATH`, which is read from that commit.
        repository: folder inside the working tree of git.

    Raises:
        ValueError: one line that names the file, what is wrong with it and where.
    """
    try:
        data = git.content(path, repository) if git.is_reference(path) else unpacking.read(path, _LIMIT_BYTES)
        measured = msgspec.json.decode(data, type=Measured)
    except OSError as error:
        raise ValueError(f"calibration {path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())  # git's begins with the name
        raise ValueError(f"calibration {path}: {reason}") from None
    if measured.calibration_version != _VERSION:
        version = measured.calibration_version
        raise ValueError(f"calibration {path}: calibration_version {version} is unknown; this version reads {_VERSION}")
    for key, noise in measured.time.items():
        place = f"$.time[{key!r}]"
        if noise.sd < 0:
            raise ValueError(f"calibration {path}: Expected a number of at least 0, got {noise.sd} - at `{place}.sd`")
        if noise.launches < LEAST:
            raise ValueError(
                f"calibration {path}: Expected {LEAST} launches or more, got {noise.launches} - at `{place}.launches`"
            )
        if not 1 + (noise.session_sd is not None) <= noise.sessions <= noise.launches or (noise.session_sd or 0) < 0:
            raise ValueError(f"calibration {path}: sessions and their noise do not belong together - at `{place}`")
    return measured, hashlib.sha256(data).hexdigest()


def in_force(store: Path, head: Report, given: Path | None = None, *, repository: Path = Path()) -> Calibration | None:
    """Return the noise to judge a report with: of the file that was named, else of its machine's in the store.

    A case counts as no quieter than half of the calibrated ones, unless it surely is: among many, some look quiet by
    luck, and would give false alarms; and a batch size that keeps its GPU busy is far quieter than one that waits for
    the CPU. One that was not calibrated counts as such, and as no quieter than the noisiest that was. None where there
    is no calibration.

    Args:
        store: folder of the store.
        head: the candidate.
        given: a calibration's file, as `load` takes it; None: the one of the candidate's machine, if there is one.
        repository: as `load` has it.

    Raises:
        ValueError: the file is no calibration, or one of another machine.
    """
    found = _found(store, head, given, repository)
    if found is None:
        return None
    _, measured, sha256 = found
    sd = {key: noise.cautious for key, noise in measured.time.items()}
    session_sd = {key: wide for key, noise in measured.time.items() if (wide := noise.cautious_session) is not None}
    return Calibration(
        sd=_no_quieter(sd, {key: (noise.sd, noise.launches - noise.sessions) for key, noise in measured.time.items()}),
        typical=None if (worst := max(sd.values(), default=0.0)) <= UNCALIBRATED_SD else worst,
        session_sd=_no_quieter(
            session_sd,
            {
                key: (noise.session_sd, noise.sessions - 1)
                for key, noise in measured.time.items()
                if noise.session_sd is not None
            },
        ),
        typical_session=max(session_sd.values(), default=0.0),
        sha256=sha256,
    )


def in_words(
    store: Path, head: Report, given: Path | None = None, *, in_turn: bool = False, repository: Path = Path()
) -> str:
    """Return the noise to judge a report with for people; the arguments and errors are those of `in_force`.

    No folder is named: the line gets published.

    Args:
        store: as for `in_force`, and the arguments that are not named here.
        head: likewise.
        given: likewise.
        in_turn: whether both sides were launched in turn, so that noise between sessions is nothing to them.
        repository: as for `in_force`.
    """
    found = _found(store, head, given, repository)
    if found is None:
        return f"noise: {_ASSUMED} (llmgpu calibrate)"
    path, measured, _ = found
    counts = {noise.launches for noise in measured.time.values()}
    if not counts:
        return f"noise: {_ASSUMED} ({path.name} has no case)"
    fewest, most = min(counts), max(counts)
    launches = f"{fewest:,} {'' if fewest == most else f'to {most:,} '}launches"
    sessions = max(noise.sessions for noise in measured.time.values())
    told = f" in {sessions:,} sessions" if sessions > 1 and not in_turn else ""
    within = "" if in_turn or sessions > 1 else f"\n{ONE_SESSION}"
    return f"noise: {path.name}, {launches}{told}{within}"


def left_out(noise: Calibration | None, head: Report) -> str:
    """Return in a line how many completed cases of a report the calibration in force does not have; empty for none."""
    if noise is None:
        return ""
    count = sum(result.outcome == "completed" and result.key not in noise.sd for result in head.cases)
    sd = UNCALIBRATED_SD if noise.typical is None else noise.typical
    return f"not calibrated: {count:,} case{'s' * (count != 1)}, {100 * sd:.2g} % assumed" if count else ""


def _found(store: Path, head: Report, given: Path | None, repository: Path) -> tuple[Path, Measured, str] | None:
    """Return the calibration's path, the calibration and its sha256; None where none was named and none is kept."""
    machine = storage.hardware(head)
    path = default_path(store, machine) if given is None else given
    if given is None and not path.exists():
        return None
    measured, sha256 = load(path, repository)
    if measured.machine != machine:
        raise ValueError(f"calibration {path}: is of {measured.machine}, and the report of {machine}")
    return path, measured, sha256


def _noise(case_id: str, sessions: Sequence[Sequence[Sequence[float]]]) -> Noise:
    """Return the noise of a case; ValueError where a launch is there twice.

    Args:
        case_id: of the case.
        sessions: [sessions, launches, batches] latencies.
    """
    launches = [launch for session in sessions for launch in session]
    if len(set(map(tuple, launches))) < len(launches):
        raise ValueError(f"{case_id}: two launches took the same time to the last digit: a report is there twice")
    found = iter(levels(launches))
    parts = [list(itertools.islice(found, len(session))) for session in sessions]
    means = [statistics.fmean(part) for part in parts]
    degrees = len(launches) - len(parts)
    # Sessions of one launch each do not tell one noise from the other: either may be all of it.
    squares = math.fsum((level - mean) ** 2 for part, mean in zip(parts, means, strict=True) for level in part)
    between = statistics.stdev(means) if len(parts) > 1 else None
    sd = math.sqrt(squares / degrees) if degrees else statistics.stdev(means)
    return Noise(id=case_id, sd=sd, launches=len(launches), sessions=len(parts), session_sd=between)


def _paired(results: Sequence[CaseResult]) -> list[list[list[float]]]:
    """Return the latencies of the launches that count, and that ran the batches of the first of them, by session."""
    counting = [
        [launch for launch in result.launches if launch.batches.latency_s and evidence.untimed(launch) is None]
        for result in results
    ]
    first = next((launch for launches in counting for launch in launches), None)
    found = [
        [
            launch.batches.latency_s
            for launch in launches
            if first is not None
            and launch.plan_sha256 == first.plan_sha256
            and len(launch.batches.latency_s) == len(first.batches.latency_s)
        ]
        for launches in counting
    ]
    return [launches for launches in found if launches]


def _no_quieter(cautious: dict[str, float], seen: dict[str, tuple[float, int]]) -> dict[str, float]:
    """Return deviations of which none is less than the median, or than the most that luck explains.

    Args:
        cautious: key to the deviation as it counts by itself.
        seen: key to the deviation that was measured, and its degrees of freedom.
    """
    least, luck = statistics.median(cautious.values()) if cautious else 0.0, _LUCK / max(1, len(cautious))
    return {key: max(min(least, largest_sd(*seen[key], luck)), value) for key, value in cautious.items()}


def _wider(degrees: int) -> float:
    """Return how many times Student's t is wider than the normal distribution: 6.5 with two launches, 1.15 with ten."""
    return t_quantile(degrees, _SURE) / statistics.NormalDist().inv_cdf(_SURE)
