"""DeepSpeed's compiled kernels, which strategy iok runs on: what compiling them needs, and compiling them once.

DeepSpeed compiles its extension `transformer_inference` where it is first loaded. Left to the ranks, that is a minute
of the time a model takes to load, in which all but one wait for a lock file: for ever, if a build was killed before.
Torch is imported in a child process (`python -m pytest_llmgpu.strategies.deepspeed.kernels`) and in the ranks, never
here.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_llmgpu import processes
from pytest_llmgpu.strategies.deepspeed.build_lock import is_stale, may_hold

__all__ = ["build", "check", "is_compiled", "load", "search_path"]

_OP = "transformer_inference"
_NEEDS = "strategy iok compiles DeepSpeed's kernels"
_DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
_BUILD_TIMEOUT_S = 900.0  # it takes 35 s on 64 cores, 75 s on 2; another build that is waited for counts too
_SAY_EVERY_S = 15.0
_TICK_S = 0.5
_GRACE_S = 5.0  # ninja ends its compilers and torch removes its lock meanwhile

_COMPILER_SAID = re.compile(r"\b(?:error|fatal) *:|cannot find -l")
_PYTHON_SAID = re.compile(r"[\w.]*(?:Error|Exception)(?::|$)")


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse, before anything is started, what cannot be compiled; nothing is needed of an op that came prebuilt.

    Raises:
        ValueError: There is no CUDA toolkit, no ninja or no compiler, or a build that was killed left its lock.
    """
    if _prebuilt():
        return
    _check_toolkit(environ)
    if shutil.which("ninja", path=search_path(environ)) is None:
        raise ValueError(f"{_NEEDS}: ninja is not on PATH: pip install ninja")
    compiler = environ.get("CXX", "c++")
    words = shlex.split(compiler)  # `ccache g++` is a compiler, too
    if not words or shutil.which(words[0], path=search_path(environ)) is None:
        named = f"CXX={compiler} was not found" if "CXX" in environ else "there is no C++ compiler c++ on PATH"
        raise ValueError(f"{_NEEDS}: {named}: install one, or set CXX to one")
    if is_stale(lock := _build_folder(environ) / "lock"):
        raise ValueError(_left_behind(lock))


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH with this Python's scripts behind it.

    DeepSpeed runs `ninja` from PATH, where the one that pip installed is missing if pytest was started by its path and
    the virtual environment was not activated.
    """
    return os.pathsep.join([environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def is_compiled(op: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether an op of DeepSpeed lies compiled where torch would look for it."""
    return (_build_folder(environ).parent / op / f"{op}.so").exists()


def load() -> None:
    """Load the op into this process, in the child that compiles it and in every rank before DeepSpeed asks for it."""
    os.environ["PATH"] = search_path(os.environ)
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    builders.InferenceBuilder().load(verbose=False)


def build(
    say: Callable[[str], None],
    timeout_s: float = _BUILD_TIMEOUT_S,
    *,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
    tick_s: float = _TICK_S,
) -> None:
    """Compile the op in a child process and see that it loads; a few seconds where that was done before.

    Args:
        say: Shows a line when it begins and every 15 s; nothing is said of an op that is there and loads at once.
        timeout_s: Seconds until it is given up.
        environ: Variables of the child. PATH, CUDA_HOME, CUDA_VISIBLE_DEVICES, TORCH_* and the like decide what is
            compiled, so the ranks must have the same.
        clock: Returns seconds.
        tick_s: Seconds between two looks at the child.

    Raises:
        RuntimeError: It failed or took too long, with the line that says why. Nothing of the build is left running.
    """
    if _prebuilt():
        return
    folder = _build_folder(environ)
    lock = folder / "lock"
    if is_stale(lock):
        raise RuntimeError(_left_behind(lock))
    if lock.exists():
        say(f"waiting for another process that compiles DeepSpeed's {_OP} ...")
    elif not _is_up_to_date(folder / f"{_OP}.so"):
        say(f"compiling DeepSpeed's {_OP} (once; about a minute) ...")

    with _child(environ, lock) as (process, log):
        _wait(process, say, timeout_s, clock, tick_s)
        if process.returncode is None:
            held = lock.exists() and not may_hold(Path("/proc", str(process.pid)), lock)
            who = f", another process holds {lock}" if held else ""
            raise RuntimeError(f"DeepSpeed's {_OP} was not compiled within {timeout_s:g} s{who} (log: {log})")
        if process.returncode != 0:
            reason = _reason(log.read_text("utf-8", "replace"), process.returncode)
            raise RuntimeError(f"DeepSpeed's {_OP} did not compile: {reason} (log: {log})")


@contextlib.contextmanager
def _child(environ: Mapping[str, str], lock: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start the build; whatever ends it, nothing of it runs on and its lock is gone. A failure keeps its log."""
    descriptor, name = tempfile.mkstemp(prefix=f"llmgpu-{_OP}-", suffix=".log")
    with os.fdopen(descriptor, "wb") as log:
        process = subprocess.Popen(
            processes.command("pytest_llmgpu.strategies.deepspeed.kernels"),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one in order
        )
    failed = False
    try:
        yield process, Path(name)
    except RuntimeError:
        failed = True
        raise
    finally:
        try:
            if process.returncode != 0:
                _end(process)
        finally:
            # It was not stale when the build began: it is the build's own.
            if is_stale(lock):
                lock.unlink(missing_ok=True)
            if not failed:
                Path(name).unlink()


def _wait(
    process: subprocess.Popen[bytes],
    say: Callable[[str], None],
    timeout_s: float,
    clock: Callable[[], float],
    tick_s: float,
) -> None:
    """Return when the build has ended or its time is over, and say now and then how long it takes."""
    began, said = clock(), 0
    while not _has_ended(process, tick_s):
        elapsed = clock() - began
        if elapsed > timeout_s:
            return
        if elapsed // _SAY_EVERY_S > said:
            said = int(elapsed // _SAY_EVERY_S)
            say(f"compiling DeepSpeed's {_OP} ... {elapsed:.0f} s")


def _check_toolkit(environ: Mapping[str, str]) -> None:
    """Look for nvcc where torch does: CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda, the first that is set."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if home is not None:
        named = f"{'CUDA_HOME' if environ.get('CUDA_HOME') else 'CUDA_PATH'}={home}"
    elif nvcc is not None:
        home = os.path.dirname(os.path.dirname(nvcc))  # noqa: PTH120 - what torch computes, links not followed
        named = f"nvcc on PATH is {nvcc}, so torch takes {home} for CUDA_HOME"
    elif _DEFAULT_CUDA_HOME.exists():
        home = str(_DEFAULT_CUDA_HOME)
        named = f"CUDA_HOME is not set and nvcc not on PATH, so torch takes {home}"
    else:
        raise ValueError(
            f"{_NEEDS}: no CUDA toolkit was found (CUDA_HOME is not set, nvcc is not on PATH): set CUDA_HOME to one"
        )
    if not os.access(os.path.join(home, "bin", "nvcc"), os.X_OK):  # noqa: PTH118 - an empty home is not `.`
        raise ValueError(f"{_NEEDS}: {named}, and there is no bin/nvcc in it: set CUDA_HOME to a CUDA toolkit")


def _prebuilt() -> bool:
    """Return whether DeepSpeed was installed with the op compiled, in which case it is only imported."""
    told = _literals("deepspeed", "git_version_info_installed.py")
    ops = told.get("installed_ops")
    return isinstance(ops, dict) and bool(ops.get(_OP)) and told.get("accelerator_name") == "cuda"


def _build_folder(environ: Mapping[str, str]) -> Path:
    """Return where torch builds the op: `_get_build_directory` of torch.utils.cpp_extension, without torch."""
    root = environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        home = environ.get("HOME") or str(Path.home())
        cache = environ.get("XDG_CACHE_HOME", f"{home}/.cache")
        cuda = _literals("torch", "version.py").get("cuda")
        built_for = f"cu{cuda.replace('.', '')}" if isinstance(cuda, str) else "cpu"
        python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        root = os.path.realpath(f"{cache}/torch_extensions/{python}_{built_for}")
    return Path(root, _OP)


def _is_up_to_date(library: Path) -> bool:
    """Return whether the op is newer than the torch and DeepSpeed it is made from; ninja knows for certain."""
    installed = (_file("torch", "version.py"), _file("deepspeed", "git_version_info_installed.py"))
    try:
        return library.stat().st_mtime > max(path.stat().st_mtime for path in installed if path is not None)
    except (OSError, ValueError):
        return False


def _literals(package: str, name: str) -> dict[str, object]:
    """Return the plain values that a file of a package assigns to names, without importing it."""
    path, found = _file(package, name), dict[str, object]()
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse(path.read_bytes() if path else b"").body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                with contextlib.suppress(ValueError):
                    found[target.id] = ast.literal_eval(node.value)
    return found


def _file(package: str, name: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((Path(folder, name) for folder in folders if Path(folder, name).is_file()), None)


def _left_behind(lock: Path) -> str:
    return f"{lock} was left by a build that was killed (no process here has it open): delete it and run again"


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a build and all it has started.

    ninja puts each compiler into a process group of its own and ends them when it is asked to end itself. Where it does
    not get to it, they are found by their session.
    """
    try:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            _has_ended(process, _GRACE_S)
    finally:
        for pid in _session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: state, parent, group, session.
            fields = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(fields[3]) == leader:
                found.append(int(stat.parent.name))
    return found


def _reason(log: str, status: int) -> str:
    """Return the line of a log that says why a build failed."""
    if status < 0:
        return f"it ended with signal {signal.Signals(-status).name}"
    # What is printed before torch's own message is noise: DeepSpeed tries compilers out for other ops as it imports.
    _, failed, built = log.rpartition("Error building extension")
    said = [line.strip() for line in built.splitlines() if _COMPILER_SAID.search(line)] if failed else []
    # The first error is the cause, those that follow are its consequences.
    if causes := [line for line in said if not line.startswith("collect2")]:
        few = "; set MAX_JOBS to compile fewer files at a time" if re.search(r"signal 9|Killed", causes[0]) else ""
        return causes[0] + few
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    raised = [line for line in lines if _PYTHON_SAID.match(line)]
    return (raised or lines or [f"exit status {status}"])[-1]


if __name__ == "__main__":
    # As Ctrl-C, which torch answers by removing its lock; a process that was started in the background ignores Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load()
