"""A lock that distinguishes a running build from a killed one.

torch marks a running build by a file and waits until the file is gone (`FileBaton` of torch.utils). A killed build
leaves the file, and every later load of the extension waits for ever. Processes of this package therefore share a lock
of the kernel (flock) while they build or load: it ends with its process. A process that is alone removes torch's file.

A build of the same extension by another program at the same moment is not detected.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

_OURS, _TORCHS = "llmgpu.lock", "lock"


@contextlib.contextmanager
def shared(folder: Path) -> Iterator[None]:
    """While entered, the extension in `folder` may be built or loaded, and no killed build blocks it."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Without a lock, as on a file system that has none, the extension is loaded as torch does.
        with contextlib.suppress(OSError):
            # Network file systems need a file open for reading and writing.
            lock = stack.enter_context((folder / _OURS).open("a+b"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / _TORCHS).unlink(missing_ok=True)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def is_held(folder: Path) -> bool:
    """Return whether another process builds the extension in `folder`."""
    try:
        with (folder / _OURS).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return (folder / _TORCHS).exists()
    except OSError:
        return False
    return False
