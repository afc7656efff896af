"""What noise between launches is on one runner: how it is measured from reports, and how it counts.

Only time has such noise: traffic is exact, accuracy is judged by its own items, and memory by its margin.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import msgspec

from pytest_llmgpu.gate.stats.distributions import largest_sd, t_quantile
from pytest_llmgpu.gate.stats.intervals import UNCALIBRATED_SD, levels
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.store import store

__all__ = ["ENOUGH", "LEAST", "VERSION", "Calibration", "Measured", "Noise", "as_it_counts", "measure"]

VERSION = 1
"""Of the shape of `Measured`."""

LEAST = 2
"""Launches of a case without which nothing is known of its noise."""

ENOUGH = 10
"""Launches of a case that tell its noise to about a quarter."""

_SURE = 0.975
_LUCK = 0.01  # probability with which any case of a calibration counts as quieter than it is


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

    calibration_version: int = VERSION
    machine: str
    """As the store names it: `4x-NVIDIA-H200-140GiB`."""
    commit: str | None = None
    """What the launches measured."""
    time: dict[str, Noise]
    """Key of a case to the noise of its time."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Noise between launches on one runner, from launches of the same thing, as a gate reckons with it."""

    sd: dict[str, float] = {}
    """Key of a case to the standard deviation of its log times between launches."""
    typical: float | None = None
    """For cases that were not calibrated; None: they count as uncalibrated."""
    session_sd: dict[str, float] = {}
    """Key of a case to the standard deviation of its log times between sessions, whatever their launches: more of them
    do not average it out. Empty where one session alone was measured."""
    typical_session: float = 0.0
    """For cases of which that is not known."""
    sha256: str | None = None
    """Of the file that it was read from."""

    def of(self, key: str) -> float | None:
        """Return the standard deviation of a case's log times; None where it is not known."""
        return self.sd.get(key, self.typical)

    def between_sessions(self, key: str) -> float:
        """Return the standard deviation of a case's log times between sessions; 0 where it is not known."""
        return self.session_sd.get(key, self.typical_session)

    def of_one_session(self) -> Calibration:
        """Return the noise of sides that are launched in turn: what differs between sessions is alike for both."""
        return msgspec.structs.replace(self, session_sd={}, typical_session=0.0)


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
    return Measured(machine=store.hardware(sessions[0]), commit=sessions[0].commit.sha, time=time)


def as_it_counts(measured: Measured, sha256: str | None = None) -> Calibration:
    """Return the noise to judge with.

    A case counts as no quieter than half of the calibrated ones, unless it surely is: among many, some look quiet by
    luck, and would give false alarms; and a batch size that keeps its GPU busy is far quieter than one that waits for
    the CPU. One that was not calibrated counts as such, and as no quieter than the noisiest that was.

    Args:
        measured: the calibration.
        sha256: of the file that it was read from.
    """
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
        [launch for launch in result.launches if launch.batches.latency_s and disturbances.untimed(launch) is None]
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
