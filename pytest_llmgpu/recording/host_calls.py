"""Calls of Python and C functions in a forward: exact where the time of the host is not."""

from __future__ import annotations

import gc
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from pytest_llmgpu.report.work import HostCalls


def count_calls(run: Callable[[], object]) -> HostCalls:
    """Run a function and return its calls of Python and C functions: exact where the time of the host is not.

    The bundled model's forward calls 429 Python and 279 C functions in every process, whatever the batch size, while
    its time differs by 30 %. The calls of one thread are counted, that of the forward. `sys.setprofile` sees both kinds
    in every version of Python; its numbers differ between versions, which inline other functions.

    The garbage collector is off: it would call destructors at any time. A profiler of the thread is suspended.
    """
    python: Counter[str] = Counter()
    c_calls = 0

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        nonlocal c_calls
        if event == "call":
            python[frame.f_code.co_filename] += 1
        elif event == "c_call":
            c_calls += 1

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()
    by_file: Counter[str] = Counter()
    for path, calls in python.items():
        by_file[source_name(path)] += calls
    return HostCalls(
        python=python.total(),
        c=c_calls - 1,  # The call that ends the counting is one of C.
        by_file=dict(sorted(by_file.items())),
        python_version=".".join(platform.python_version_tuple()[:2]),
    )


def source_name(path: str) -> str:
    """Return the name of a source file below the folder that it was imported from: `torch/nn/modules/module.py`."""
    roots = [folder for folder in map(os.path.abspath, filter(None, sys.path)) if path.startswith(f"{folder}{os.sep}")]
    if roots:
        return os.path.relpath(path, max(roots, key=len))
    return path if path.startswith("<") else Path(path).name
