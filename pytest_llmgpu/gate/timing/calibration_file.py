"""How a calibration's file is found, read, checked and written, and how the noise in force is put into words.

It is JSON, kept by machine.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from pytest_llmgpu.gate.stats.intervals import UNCALIBRATED_SD
from pytest_llmgpu.gate.timing.calibration import LEAST, VERSION, Calibration, Measured, as_it_counts
from pytest_llmgpu.report import decompression
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.store import git
from pytest_llmgpu.store import store as storage

__all__ = ["ONE_SESSION", "default_path", "dump", "in_force", "in_words", "left_out", "load"]

ONE_SESSION = (
    "within one session only; sides measured on different days differ by more: use llmgpu ab, or calibrate with "
    "reports of several days"
)
"""What a calibration of one session does not say."""

_FILE = "calibration.json"
_LIMIT_BYTES = 2**26
_ASSUMED = f"at most {100 * UNCALIBRATED_SD:g} % assumed"
_UNLESS = "less where five launches a side tell"

_MOST_SD = 2.0
"""Of a logarithm: launches that differ by a factor of 7. With more in a file nothing would be told, and all passes."""


def default_path(store: Path, machine: str) -> Path:
    """Return where the store keeps a machine's calibration, beside its reports."""
    return store / machine / _FILE


def dump(measured: Measured, path: Path) -> None:
    """Write a calibration: a reader finds the old one or the new one, never a part.

    Raises:
        ValueError: it has a figure that `load` would refuse.
        OSError: it cannot be written.
    """
    _check(measured, path)
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
        data = git.content(path, repository) if git.is_reference(path) else decompression.read(path, _LIMIT_BYTES)
        measured = msgspec.json.decode(data, type=Measured)
    except OSError as error:
        raise ValueError(f"calibration {path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())  # git's begins with the name
        raise ValueError(f"calibration {path}: {reason}") from None
    if measured.calibration_version != VERSION:
        version = measured.calibration_version
        raise ValueError(f"calibration {path}: calibration_version {version} is unknown; this version reads {VERSION}")
    _check(measured, path)
    return measured, hashlib.sha256(data).hexdigest()


def in_force(store: Path, head: Report, given: Path | None = None, *, repository: Path = Path()) -> Calibration | None:
    """Return the noise to judge a report with: of the file that was named, else of its machine's in the store.

    It is as `calibration.as_it_counts` has it; None where there is no calibration.

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
    return as_it_counts(measured, sha256)


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
        return f"noise: {_ASSUMED}, {_UNLESS} (llmgpu calibrate)"
    path, measured, _ = found
    counts = {noise.launches for noise in measured.time.values()}
    if not counts:
        return f"noise: {_ASSUMED}, {_UNLESS} ({path.name} has no case)"
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
    assumed = _ASSUMED if noise.typical is None else f"{100 * noise.typical:.2g} % assumed"
    return f"not calibrated: {count:,} case{'s' * (count != 1)}, {assumed}" if count else ""


def _check(measured: Measured, path: Path) -> None:
    """Raise ValueError, with file and place, for the first figure that cannot be."""
    for key, noise in measured.time.items():
        place = f"$.time[{key!r}]"
        for name in ("sd", "session_sd"):
            sd = getattr(noise, name)
            if sd is not None and not 0 <= sd <= _MOST_SD:
                raise ValueError(
                    f"calibration {path}: Expected a number from 0 to {_MOST_SD:g}, got {sd} - at `{place}.{name}`"
                )
        if noise.launches < LEAST:
            raise ValueError(
                f"calibration {path}: Expected {LEAST} launches or more, got {noise.launches} - at `{place}.launches`"
            )
        if not 1 + (noise.session_sd is not None) <= noise.sessions <= noise.launches:
            raise ValueError(f"calibration {path}: sessions and their noise do not belong together - at `{place}`")


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
