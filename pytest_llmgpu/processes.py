"""How this package starts a Python process, and how that process ends with its parent.

`python -m` puts the working directory first in the import path, and PYTHONPATH comes before the standard library: a
file `queue.py` or `select.py` next to the tests would be imported in place of Python's own module. A process that is
started with `command` finds the standard library first, and then everything that its parent finds.

A shell starts a background job with SIGINT ignored, and children inherit that. A process of `command` has the default
handlers of the signals that end it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_START = """\
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
module, path = sys.argv[1:3]
sys.path[:] = [folder for folder in sys.path if folder]
sys.path += [folder for folder in path.split({separator!r}) if folder and folder not in sys.path]
sys.argv[:] = [module, *sys.argv[3:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new process, with this process's import path after the libraries."""
    return [sys.executable, "-c", _START.format(separator=os.pathsep), module, os.pathsep.join(sys.path), *arguments]


def ask(module: str, *arguments: str, library: str, timeout_s: float = 300.0) -> str:
    """Run a module, which imports a library, in a child process, and return the last line that it prints.

    ValueError, with the last line of the child process, if the library cannot be imported, or not in time: a first
    import from a network disk takes minutes.
    """
    try:
        done = subprocess.run(
            command(module, *arguments), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"the import of {library} took more than {timeout_s:g} s in {sys.executable}") from None
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode == 0 and lines:
        return lines[-1]
    last = (done.stderr.decode(errors="replace").strip() or "no message").splitlines()[-1]
    raise ValueError(f"{library} cannot be used: {last} (exit status {done.returncode} of {sys.executable})")


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (Linux: prctl(2)).

    The bond is to the thread that started this process. If the parent has ended already, this process exits now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <sys/prctl.h>
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this process, has ended")


def describe_end(status: int) -> str:
    """Return the exit status of a process, or the signal that ended it, negative as in subprocess, in words."""
    names = {int(number): number.name for number in signal.Signals}  # most real-time signals have none
    return f"signal {names.get(-status, -status)}" if status < 0 else f"exit status {status}"


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of its own for a signal; False if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("SigCgt:"):  # proc(5): the mask of caught signals
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def family(roots: Iterable[int]) -> set[int]:
    """Return the ids of processes and of all their descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    found, more = set[int](), set(roots)
    while more:
        found |= more
        more = {pid for pid, parent in parents.items() if parent in more} - found
    return found


def listeners(port: int | None) -> set[int]:
    """Return the ids of the processes that listen on a TCP port, of those whose files this user may see."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):  # no IPv6
            for line in Path(table).read_text().splitlines():
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{inode}]")
    found = set()
    for file in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        with suppress(OSError):
            if str(file.readlink()) in sockets:
                found.add(int(file.parts[2]))
    return found


def end_marked(mark: str) -> None:
    """Kill every process that has a variable in its environment, such as `NAME=value`.

    A daemon has left its parent's process group, but its environment stays (Linux: proc_pid_environ(5)). A process that
    has ended and is not reaped has no variables.
    """
    killed, before = set[int](), -1
    while len(killed) > before:  # one of them may have started another meanwhile
        before = len(killed)
        for environment in Path("/proc").glob("[0-9]*/environ"):
            pid = int(environment.parent.name)
            with suppress(OSError):  # it is of another user, or has ended
                if pid not in killed and mark.encode() in environment.read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
