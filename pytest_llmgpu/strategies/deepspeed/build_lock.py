"""Whether the lock file of a build is held by anybody, or was left behind by one that was killed (Linux: proc(5))."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["is_stale", "may_hold"]


def is_stale(lock: Path) -> bool:
    """Return whether a lock is there that no process holds; what cannot be known counts as held.

    torch keeps the file open for as long as it builds (its `FileBaton`), and every other process waits until the file
    is gone, however long.
    """
    try:
        there = lock.stat()
    except OSError:
        return False
    # Of a process of another user it cannot be seen which files it has open, but for root.
    if os.geteuid() not in (0, there.st_uid) or not Path("/proc/self/fd").is_dir():
        return False
    if any(may_hold(process, lock) for process in Path("/proc").glob("[0-9]*")):
        return False
    return lock.exists()  # a build that ended just now closed its lock, then removed it


def may_hold(process: Path, lock: Path) -> bool:
    """Return whether a process, as its folder of /proc, has the lock open, or is one that might and tells nothing."""
    try:
        there = lock.stat()
        return any(os.path.samestat(found, there) for found in _open_files(process))
    except (FileNotFoundError, ProcessLookupError):
        return False  # one of both has gone
    except OSError:
        return _may_build(process, there.st_uid)


def _open_files(process: Path) -> Iterator[os.stat_result]:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield descriptor.stat()


def _may_build(process: Path, user: int) -> bool:
    """Return whether a process is a Python of a user; agents and session keepers hide their files, and never build."""
    try:
        owner = re.search(r"^Uid:\s+(\d+)", (process / "status").read_text("utf-8", "replace"), re.MULTILINE)
        return owner is not None and int(owner[1]) == user and b"python" in (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
