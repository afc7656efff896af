"""How this package starts a Python process, and how that process ends with its parent.

`python -m` puts the working directory first in the import path, and PYTHONPATH comes before the standard library: a
file `queue.py` or `select.py` next to the tests would be imported in place of Python's own module. A process that is
started with `command` finds the standard library first, and then everything that its parent finds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["command", "die_with_parent"]

_START = """\
import runpy, sys
module, path = sys.argv[1:3]
sys.path[:] = [folder for folder in sys.path if folder]
sys.path += [folder for folder in path.split({separator!r}) if folder and folder not in sys.path]
sys.argv[:] = [module, *sys.argv[3:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new process, with this process's import path after the libraries."""
    path = os.pathsep.join(sys.path)
    return [sys.executable, "-c", _START.format(separator=os.pathsep), module, path, *arguments]


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (Linux: prctl(2)).

    The bond is to the thread that started this process. If the parent has ended already, this process exits now.

    Args:
        parent: process id of the parent.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this process, has ended")
