"""How much one runner's times differ from launch to launch: measured from launches of the same thing, kept by machine.

Only time has such noise: traffic is exact, accuracy is judged by its own items, and memory by its margin.
"""

from __future__ import annotations

import hashlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_llmgpu import evidence, storage, unpacking
from pytest_llmgpu.distributions import t_quantile
from pytest_llmgpu.report import Report
from pytest_llmgpu.result import CaseResult
from pytest_llmgpu.statistics import UNCALIBRATED_SD, Calibration, launch_levels

__all__ = ["ENOUGH", "LEAST", "Measured", "Noise", "default_path", "dump", "in_force", "in_words", "load", "measure"]

LEAST = 2
"""Launches of a case without which nothing is known of its noise."""

ENOUGH = 10
"""Launches of a case that tell its noise to about a quarter."""

_FILE = "calibration.json"
_VERSION = 1
_LIMIT_BYTES = 2**26
_SURE = 0.975
_ASSUMED = f"{100 * UNCALIBRATED_SD:g} % assumed"


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one case."""

    id: str
    sd: float
    """Standard deviation, between launches, of the logarithm of the time."""
    launches: int
    """Launches that it was taken from."""

    @property
    def cautious(self) -> float:
        """The deviation as it counts: larger, by how unsure so few launches leave it.

        By as much as Student's t is wider than the normal distribution: 6.5 times with two launches, 1.15 with ten.
        """
        return self.sd * t_quantile(self.launches - 1, _SURE) / statistics.NormalDist().inv_cdf(_SURE)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The calibration of a machine: the whole object of the JSON file."""

    calibration_version: int = _VERSION
    machine: str
    """As the store names it: `4x-NVIDIA-H200-140GiB`."""
    commit: str | None = None
    """What the launches measured."""
    time: dict[str, Noise]
    """Key of a case to the noise of its time."""


def measure(report: Report) -> Measured:
    """Return the noise between the launches of each case of a report, as `launch_merging` makes one of several.

    Launches that were disturbed, or ran other batches than the first, do not count; nor does a case with one launch.

    Raises:
        ValueError: no case has two launches, or one launch is there twice.
    """
    time: dict[str, Noise] = {}
    for result in report.cases:
        launches = _paired(result)
        if len(launches) < LEAST or result.key in time:
            continue
        if len(set(map(tuple, launches))) < len(launches):
            raise ValueError(f"{result.id}: two launches took the same time to the last digit: a report is there twice")
        _, levels = launch_levels(launches, launches)
        time[result.key] = Noise(id=result.id, sd=statistics.stdev(levels), launches=len(launches))
    if not time:
        raise ValueError(
            f"no case has {LEAST} undisturbed launches of the same batches, the least for a calibration; {ENOUGH} tell "
            "enough: measure with --llmgpu-launches, or name several reports"
        )
    return Measured(machine=storage.hardware(report), commit=report.commit.sha, time=time)


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


def load(path: Path) -> tuple[Measured, str]:
    """Read a calibration; return it with the sha256 of its file.

    Raises:
        ValueError: one line that names the file, what is wrong with it and where.
    """
    try:
        data = unpacking.read(path, _LIMIT_BYTES)
        measured = msgspec.json.decode(data, type=Measured)
    except OSError as error:
        raise ValueError(f"calibration {path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"calibration {path}: {' '.join(str(error).split())}") from None
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
    return measured, hashlib.sha256(data).hexdigest()


def in_force(store: Path, head: Report, given: Path | None = None) -> Calibration | None:
    """Return the noise to judge a report with: of the file that was named, else of its machine's in the store.

    A case counts as no quieter than half of the calibrated ones: among many, some look quiet by luck, and would give
    false alarms. One that was not calibrated counts as the noisiest. None where there is no calibration.

    Args:
        store: folder of the store.
        head: the candidate.
        given: a calibration's file; None: the one of the candidate's machine, if there is one.

    Raises:
        ValueError: the file is no calibration, or one of another machine.
    """
    found = _found(store, head, given)
    if found is None:
        return None
    _, measured, sha256 = found
    sd = {key: noise.cautious for key, noise in measured.time.items()}
    if not sd:
        return Calibration(sha256=sha256)
    least = statistics.median(sd.values())
    return Calibration(
        sd={key: max(least, value) for key, value in sd.items()}, typical=max(sd.values()), sha256=sha256
    )


def in_words(store: Path, head: Report, given: Path | None = None) -> str:
    """Return the noise to judge a report with in a line for people; the arguments and errors are those of `in_force`.

    No folder is named: the line gets published.
    """
    found = _found(store, head, given)
    if found is None:
        return f"noise: {_ASSUMED} (llmgpu calibrate)"
    path, measured, _ = found
    counts = {noise.launches for noise in measured.time.values()}
    if not counts:
        return f"noise: {_ASSUMED} ({path.name} has no case)"
    fewest, most = min(counts), max(counts)
    return f"noise: {path.name}, {fewest:,} {'' if fewest == most else f'to {most:,} '}launches"


def _found(store: Path, head: Report, given: Path | None) -> tuple[Path, Measured, str] | None:
    """Return the calibration's path, the calibration and its sha256; None where none was named and none is kept."""
    machine = storage.hardware(head)
    path = default_path(store, machine) if given is None else given
    if given is None and not path.exists():
        return None
    measured, sha256 = load(path)
    if measured.machine != machine:
        raise ValueError(f"calibration {path}: is of {measured.machine}, and the report of {machine}")
    return path, measured, sha256


def _paired(result: CaseResult) -> Sequence[Sequence[float]]:
    """Return the latencies of the launches that count, and that ran the batches of the first of them."""
    counting = [launch for launch in result.launches if launch.batches.latency_s and evidence.untimed(launch) is None]
    first = counting[0] if counting else None
    return [
        launch.batches.latency_s
        for launch in counting
        if first is not None
        and launch.plan_sha256 == first.plan_sha256
        and len(launch.batches.latency_s) == len(first.batches.latency_s)
    ]
