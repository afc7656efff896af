"""Noise of times between launches on one machine: its measurement from reports, and its use.

Only time has such noise. Traffic is exact, accuracy is judged by its items, and memory by its threshold.
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
"""Version of the format of `Measured`."""

LEAST = 2
"""Least number of launches of a case to estimate its noise."""

ENOUGH = 10
"""Recommended number of launches of a case: they estimate its noise to about a quarter."""

_QUANTILE = 0.975
_CHANCE = 0.01  # probability that the noise of any case of a calibration is underestimated


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """The noise of one case."""

    id: str
    """Id of the case, such as `tp-bs8`."""
    sd: float
    """Standard deviation of the logarithm of the time between launches."""
    launches: int
    """Number of launches that were measured."""
    sessions: int = 1
    """Number of sessions that these launches are from."""
    session_sd: float | None = None
    """Standard deviation of the mean of the logarithm of the time between sessions; None with one session."""

    @property
    def cautious(self) -> float:
        """The deviation that is used: larger than the measured one, because few launches estimate it badly."""
        return self.sd * _wider(self.launches - self.sessions or self.launches - 1)

    @property
    def cautious_session(self) -> float | None:
        """The deviation between sessions that is used, also larger; None with one session."""
        return None if self.session_sd is None else self.session_sd * _wider(self.sessions - 1)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The calibration of a machine: the object in the JSON file."""

    calibration_version: int = VERSION
    """Version of the format."""
    machine: str
    """Name of the machine in the store, such as `4x-NVIDIA-H200-140GiB`."""
    commit: str | None = None
    """Commit that the launches measured."""
    time: dict[str, Noise]
    """Noise of the time for each key of a case."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The noise on one machine that a gate uses."""

    sd: dict[str, float] = {}
    """Standard deviation of the log times between launches for each key of a case."""
    typical: float | None = None
    """Standard deviation between launches for other cases; None if these are treated as not calibrated."""
    session_sd: dict[str, float] = {}
    """Standard deviation of the log times between sessions for each key of a case. More launches do not reduce it.
    Empty if only one session was measured."""
    typical_session: float = 0.0
    """Standard deviation between sessions for other cases."""
    sha256: str | None = None
    """SHA-256 of the calibration file."""

    def of(self, key: str) -> float | None:
        """Return the standard deviation of the log times of a case; None if it is not known."""
        return self.sd.get(key, self.typical)

    def between_sessions(self, key: str) -> float:
        """Return the standard deviation of the log times of a case between sessions; 0 if it is not known."""
        return self.session_sd.get(key, self.typical_session)

    def of_one_session(self) -> Calibration:
        """Return the noise without the part between sessions, for reports whose launches alternated."""
        return msgspec.structs.replace(self, session_sd={}, typical_session=0.0)


def measure(*sessions: Report) -> Measured:
    """Return the noise between the launches of each case, and between sessions if there are several.

    Launches of one session share conditions that last for hours, such as temperature, clocks and other load. Launches
    of different days differ by more. Disturbed launches and launches with other batches than the first are left out,
    and so are cases with one launch.

    Args:
        sessions: One merged report for each session (`launch_merging`).

    Raises:
        ValueError: No case has two launches, or a launch is there twice.
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
            f"no case has {LEAST} undisturbed launches of the same batches, the minimum of a calibration; {ENOUGH} are "
            "recommended: measure with --llmgpu-launches, or name several reports"
        )
    return Measured(machine=store.hardware(sessions[0]), commit=sessions[0].commit.sha, time=time)


def as_it_counts(measured: Measured, sha256: str | None = None) -> Calibration:
    """Return the noise that a gate uses.

    The noise of a case is raised to the median of all cases, unless it is smaller with statistical significance: among
    many cases some show little noise by chance and would cause false alarms, but a batch size that keeps its GPU busy
    has much less noise than one that waits for the CPU. A case that was not calibrated gets the noise without a
    calibration, or the largest calibrated noise if that is larger.

    Args:
        measured: The calibration.
        sha256: SHA-256 of the calibration file.
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
    """Return the noise of a case; ValueError if a launch is there twice.

    Args:
        case_id: Id of the case.
        sessions: [sessions, launches, batches] latencies.
    """
    launches = [launch for session in sessions for launch in session]
    if len(set(map(tuple, launches))) < len(launches):
        raise ValueError(f"{case_id}: two launches have identical times: name each report once")
    found = iter(levels(launches))
    parts = [list(itertools.islice(found, len(session))) for session in sessions]
    means = [statistics.fmean(part) for part in parts]
    degrees = len(launches) - len(parts)
    # With one launch in each session the two kinds of noise cannot be separated: each gets all of it.
    squares = math.fsum((level - mean) ** 2 for part, mean in zip(parts, means, strict=True) for level in part)
    between = statistics.stdev(means) if len(parts) > 1 else None
    sd = math.sqrt(squares / degrees) if degrees else statistics.stdev(means)
    return Noise(id=case_id, sd=sd, launches=len(launches), sessions=len(parts), session_sd=between)


def _paired(results: Sequence[CaseResult]) -> list[list[list[float]]]:
    """Return the latencies of the undisturbed launches with the batches of the first of them, by session."""
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
    """Return deviations that are at least the median, or the largest that is compatible with the measured one.

    Args:
        cautious: The deviation that is used, for each key.
        seen: The measured deviation and its degrees of freedom, for each key.
    """
    least, chance = statistics.median(cautious.values()) if cautious else 0.0, _CHANCE / max(1, len(cautious))
    return {key: max(min(least, largest_sd(*seen[key], chance)), value) for key, value in cautious.items()}


def _wider(degrees: int) -> float:
    """Return the quantile of Student's t divided by the normal one: 6.5 with two launches, 1.15 with ten."""
    return t_quantile(degrees, _QUANTILE) / statistics.NormalDist().inv_cdf(_QUANTILE)
