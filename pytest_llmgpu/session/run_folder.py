"""The temporary folder of a run. A run that was killed leaves its folder, and the next run removes it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "llmgpu-run-"
_LOCK = "lock"


class RunFolder:
    """A temporary folder with a locked file: the kernel unlocks it when the process ends, in whatever way."""

    def __init__(self) -> None:
        """Remove the folders of runs that have ended, and make one for this run."""
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        """The folder."""
        # The file gets its name when it is locked: another run must not find it before that.
        unnamed = self.path / f".{_LOCK}"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the folder; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    """Remove each folder of this user whose lock nobody holds. Folders of other users and links are left alone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # the lock is held, or the folder is not ours, or is gone
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
