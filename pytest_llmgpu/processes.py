"""How a Python process of ours is started: it finds what this one finds, and nobody's file shadows a library.

`python -m` puts the working directory first in the import path, and PYTHONPATH comes before the standard library: a
`queue.py` or `select.py` beside the tests would be imported in place of Python's own.
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


def command(module: str, *arguments: str) -> list[str]:
    """Return what runs a module in a process of its own, with this process's import path behind the libraries."""
    path = os.pathsep.join(sys.path)
    return [sys.executable, "-c", _START.format(separator=os.pathsep), module, path, *arguments]


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux: prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this rank is gone")


_PR_SET_PDEATHSIG = 1
