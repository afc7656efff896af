"""The calibration file: a JSON file per machine, which is found, read, checked, written and described here."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from pytest_llmgpu.gate.stats.intervals import UNCALIBRATED_SD
from pytest_llmgpu.gate.timing.calibration import LEAST, VERSION, Calibration, Measured, as_it_counts
from pytest_llmgpu.report import decompression, file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import plural
from pytest_llmgpu.store import git
from pytest_llmgpu.store import store as storage

__all__ = ["ONE_SESSION", "default_path", "dump", "in_force", "in_words", "left_out", "load"]

ONE_SESSION = (
    "measured in one session only; reports of different days differ by more: use llmgpu ab, or calibrate with "
    "reports of several days"
)
"""The limit of a calibration of one session."""

_FILE = "calibration.json"
_LIMIT_BYTES = 2**26
_ASSUMED = f"at most {100 * UNCALIBRATED_SD:g} % assumed"
_UNLESS = "less with at least five launches in each report"

_MOST_SD = 2.0
"""The largest accepted deviation of log times, a factor of 7. With more noise a gate detects nothing."""


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


def load(path: Path, repository: Path = Path()) -> tuple[Measured, str]:
    """Read a calibration and return it with the sha256 of its file.

    Args:
        path: The file, or `git:REV:PATH`, which is read from that commit.
        repository: A folder inside the working tree of git.

    Raises:
        ValueError: The file is not valid; one line with the file, the error and its place.
    """
    try:
        data = git.content(path, repository) if git.is_reference(path) else decompression.read(path, _LIMIT_BYTES)
        measured = msgspec.json.decode(data, type=Measured)
    except OSError as error:
        raise ValueError(f"calibration {path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())  # A message of git begins with the name.
        raise ValueError(f"calibration {path}: {reason}") from None
    if measured.calibration_version != VERSION:
        version = measured.calibration_version
        raise ValueError(f"calibration {path}: calibration_version {version} is not supported; allowed is {VERSION}")
    _check(measured, path)
    return measured, hashlib.sha256(data).hexdigest()


def in_force(store: Path, head: Report, given: Path | None = None, *, repository: Path = Path()) -> Calibration | None:
    """Return the noise to judge a report with, from `calibration.as_it_counts`; None if there is no calibration.

    Args:
        store: The folder of the store.
        head: The candidate.
        given: A calibration file as in `load`; None: the file of the candidate's machine in the store.
        repository: A folder inside the working tree of git.

    Raises:
        ValueError: The file is not a calibration, or is of another machine.
    """
    found = _found(store, head, given, repository)
    if found is None:
        return None
    _, measured, sha256 = found
    return as_it_counts(measured, sha256)


def in_words(
    store: Path, head: Report, given: Path | None = None, *, in_turn: bool = False, repository: Path = Path()
) -> str:
    """Describe the noise that `in_force` returns. The text is published, so it contains no folder.

    Args:
        store: The folder of the store.
        head: The candidate.
        given: A calibration file as in `load`; None: the file of the candidate's machine in the store.
        in_turn: Whether launches of both reports alternated, so that noise between sessions does not matter.
        repository: A folder inside the working tree of git.

    Raises:
        ValueError: The file is not a calibration, or is of another machine.
    """
    found = _found(store, head, given, repository)
    if found is None:
        return f"noise: {_ASSUMED}, {_UNLESS} (llmgpu calibrate)"
    path, measured, _ = found
    counts = {noise.launches for noise in measured.time.values()}
    if not counts:
        return f"noise: {_ASSUMED}, {_UNLESS} ({path.name} has no case)"
    fewest, most = min(counts), max(counts)
    launches = f"{fewest:,} {'' if fewest == most else f'to {most:,} '}launches"
    sessions = max(noise.sessions for noise in measured.time.values())
    in_sessions = f" in {sessions:,} sessions" if sessions > 1 and not in_turn else ""
    within = "" if in_turn or sessions > 1 else f"\n{ONE_SESSION}"
    return f"noise: {path.name}, {launches}{in_sessions}{within}"


def left_out(noise: Calibration | None, head: Report) -> str:
    """Return a line with the number of completed cases that the calibration lacks; empty if there are none."""
    if noise is None:
        return ""
    count = sum(result.outcome == "completed" and result.key not in noise.sd for result in head.cases)
    assumed = _ASSUMED if noise.typical is None else f"{100 * noise.typical:.2g} % assumed"
    return f"not calibrated: {plural(count, 'case')}, {assumed}" if count else ""


def _check(measured: Measured, path: Path) -> None:
    """Raise ValueError with file and place for the first value that is not possible."""
    for key, noise in measured.time.items():
        place = f"$.time[{key!r}]"
        for name in ("sd", "session_sd"):
            sd = getattr(noise, name)
            if sd is not None and not 0 <= sd <= _MOST_SD:
                raise ValueError(
                    f"calibration {path}: expected a number from 0 to {_MOST_SD:g}, got {sd} - at `{place}.{name}`"
                )
        if noise.launches < LEAST:
            raise ValueError(
                f"calibration {path}: expected {LEAST} launches or more, got {noise.launches} - at `{place}.launches`"
            )
        if not 1 + (noise.session_sd is not None) <= noise.sessions <= noise.launches:
            raise ValueError(
                f"calibration {path}: the number of sessions does not fit launches and session_sd - at `{place}`"
            )


def _found(store: Path, head: Report, given: Path | None, repository: Path) -> tuple[Path, Measured, str] | None:
    """Return the path of the calibration, the calibration and its sha256; None if none was given and none is stored."""
    machine = storage.hardware(head)
    path = default_path(store, machine) if given is None else given
    if given is None and not path.exists():
        return None
    measured, sha256 = load(path, repository)
    if measured.machine != machine:
        raise ValueError(f"calibration {path}: was measured on {measured.machine}, the report on {machine}")
    return path, measured, sha256
