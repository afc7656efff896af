"""The conftest.py of the rig: each rank, or pytest, does what the variable FAULT names."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT, ROWS = os.environ.get("FAULT", ""), int(os.environ.get("ROWS", "2"))
"""The fault, and the rows of a forward in which it happens."""
IN_PYTEST = {"sigterm": [signal.SIGTERM], "killed": [signal.SIGKILL], "interrupts": 5 * [signal.SIGINT]}


def step_clock() -> None:
    """Make the clock of the wall step an hour back and forth at each call."""
    signs, real = itertools.cycle([-3600, 3600]), time.time
    time.time = lambda: real() + next(signs)


def _signal_pytest() -> None:
    for number in IN_PYTEST[FAULT]:
        os.kill(os.getppid(), number)
    time.sleep(60)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _remove_folder() -> None:
    for folder in Path(tempfile.gettempdir()).glob("llmgpu-run-*"):
        shutil.rmtree(folder)
    _kill()


def _raise() -> None:
    raise RuntimeError("a fault")


def _start_daemon() -> None:
    if not os.fork():
        os.setsid()
        time.sleep(600)


def _write() -> None:
    for number in range(3, 30):
        with contextlib.suppress(OSError):
            os.write(number, b"text of a library" * 9)


ACTS: dict[str, Callable[[], object]] = {
    **dict.fromkeys(IN_PYTEST, _signal_pytest),
    "daemon": _start_daemon,
    "exits": lambda: os._exit(0),
    "folder": _remove_folder,
    "forks": os.fork,
    "hangs": lambda: time.sleep(600),
    "raises": _raise,
    "rank": _kill,
    "writes": _write,
}
"""What a forward of a rank does."""


def pytest_sessionstart() -> None:
    """Change the clock of pytest's process."""
    if FAULT == "clock":
        step_clock()


def pytest_llmgpu_model(loaded: Any) -> None:
    """Act while the model is loaded, or let a forward do it."""
    if FAULT == "clock":
        step_clock()
    if FAULT == "loading":
        try:
            Path("once").touch(exist_ok=False)
        except FileExistsError:
            return
        _kill()

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        in_pass = _get_current_dispatch_mode() is not None
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if FAULT == "work" and in_pass:
            _kill()
        if len(tokens) == ROWS and not in_pass:
            ACTS.get(FAULT, int)()

    loaded.model.register_forward_pre_hook(before, with_kwargs=True)
