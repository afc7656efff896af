"""Compile DeepSpeed's kernels once, before the ranks of strategy iok start.

DeepSpeed compiles its extension `transformer_inference` when it is first loaded. In the ranks this minute would count
as load time. The build runs in a child process (`python -m pytest_llmgpu.strategies.deepspeed.kernels`): torch is
imported there and in the ranks, never in the process of pytest.

torch marks a running build by a file and waits until the file is gone (`FileBaton` of torch.utils). A killed build
leaves the file, and every later load of the extension waits for ever. Processes of this package therefore share a lock
of the kernel (flock) while they build or load: it ends with its process. A process that is alone removes torch's file.
A build of the same extension by another program at the same moment is not detected.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import os
import re
import runpy
import secrets
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
from pytest_llmgpu.report.text import log_tail

_OP = "transformer_inference"
_NEEDS = "strategy iok has to compile DeepSpeed's kernels"
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
"""torch takes this folder if nothing names another one."""
_BUILD_TIMEOUT_S = 900.0  # A build takes 35 s on 64 cores and 75 s on 2. It may wait for the build of another process.
_PROGRESS_EVERY_S = 15.0
_TICK_S = 0.5
_GRACE_S = 5.0
_OUR_LOCK, _TORCHS_LOCK = "llmgpu.lock", "lock"
_MARK = "LLMGPU_BUILD_OF"
"""This variable of the build is inherited by every process that it starts."""

_COMPILER_ERROR = re.compile(r"\b(?:error|fatal) *:|cannot find -l")
_PYTHON_ERROR = re.compile(r"[\w.]*(?:Error|Exception)(?::|$)")


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a machine that cannot compile the kernels, before a process starts.

    ValueError if there is no CUDA toolkit, no ninja or no compiler, and DeepSpeed has no prebuilt kernels.
    """
    if _is_prebuilt():
        return
    # torch takes the first of CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda.
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if home is not None:
        source = f"{'CUDA_HOME' if environ.get('CUDA_HOME') else 'CUDA_PATH'}={home}"
    elif nvcc is not None:
        home = os.path.dirname(os.path.dirname(nvcc))  # noqa: PTH120 - as torch does, without following links
        source = f"nvcc on PATH is {nvcc}, and torch takes {home} as CUDA_HOME"
    elif DEFAULT_CUDA_HOME.exists():
        home = str(DEFAULT_CUDA_HOME)
        source = f"CUDA_HOME is not set and nvcc is not on PATH, and torch takes {home} as CUDA_HOME"
    else:
        remedy = "set CUDA_HOME"
        raise ValueError(f"{_NEEDS}: no CUDA toolkit was found (CUDA_HOME is not set, nvcc is not on PATH): {remedy}")
    if not os.access(os.path.join(home, "bin", "nvcc"), os.X_OK):  # noqa: PTH118 - an empty home is not `.`
        raise ValueError(f"{_NEEDS}: {source}, which has no bin/nvcc: set CUDA_HOME to a CUDA toolkit")

    if shutil.which("ninja", path=search_path(environ)) is None:
        raise ValueError(f"{_NEEDS}: ninja is not on PATH: install it (pip install ninja)")
    compiler = environ.get("CXX", "c++")
    words = shlex.split(compiler)  # CXX may have arguments, such as `ccache g++`.
    if not words or shutil.which(words[0], path=search_path(environ)) is None:
        problem = f"CXX={compiler} was not found" if "CXX" in environ else "the C++ compiler c++ is not on PATH"
        raise ValueError(f"{_NEEDS}: {problem}: install a C++ compiler, or set CXX to one")


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH with the scripts folder of this Python at its end.

    DeepSpeed runs `ninja` from PATH, where that of a virtual environment is only if it is activated.
    """
    return os.pathsep.join([environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def is_compiled(op: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch would find a compiled op of DeepSpeed."""
    return (_build_folder(environ).parent / op / f"{op}.so").exists()


def load() -> None:
    """Load the op into this process, and compile it if necessary: in the child of `build` and in every rank."""
    os.environ["PATH"] = search_path(os.environ)
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    with contextlib.nullcontext() if _is_prebuilt() else shared_lock(_build_folder(os.environ)):
        builders.InferenceBuilder().load(verbose=False)


def build(
    show: Callable[[str], None],
    timeout_s: float = _BUILD_TIMEOUT_S,
    *,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
    tick_s: float = _TICK_S,
    grace_s: float = _GRACE_S,
) -> None:
    """Compile the op in a child process and check that it loads; a compiled op takes a few seconds.

    A line is shown at the start of a compilation and every 15 s. The ranks must have the variables of the child: PATH,
    CUDA_HOME, CUDA_VISIBLE_DEVICES, TORCH_* and others decide what is compiled. The child is checked every `tick_s`. A
    build that takes too long is ended: in `grace_s` ninja may end its compilers and torch remove its lock.
    RuntimeError, with the decisive line, if the build failed or took too long: its processes have ended.
    """
    if _is_prebuilt():
        return
    if not is_compiled(_OP, environ):
        show(f"compiling DeepSpeed's {_OP} (once; about a minute) ...")

    mark = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile(prefix=f"llmgpu-{_OP}-", suffix=".log", delete=False) as file:
        process = subprocess.Popen(
            processes.command("pytest_llmgpu.strategies.deepspeed.kernels"),
            env={**environ, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the build.
        )
    log, failure = Path(file.name), ""
    try:
        began_s, shown = clock(), 0
        while not failure and not _has_ended(process, tick_s):
            elapsed_s = clock() - began_s
            if elapsed_s > timeout_s:
                failure = f"was not compiled within {timeout_s:g} s"
            elif elapsed_s // _PROGRESS_EVERY_S > shown:
                shown = int(elapsed_s // _PROGRESS_EVERY_S)
                show(f"compiling DeepSpeed's {_OP} ... {elapsed_s:.0f} s")
        if process.returncode:
            reason = _reason(log_tail(log, most_lines=2**16, most_bytes=2**24), process.returncode)
            failure = f"did not compile: {reason}"
    finally:
        if process.returncode != 0:
            # ninja puts each compiler into a process group of its own, and ends it on SIGTERM.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            _has_ended(process, grace_s)
            processes.end_marked(f"{_MARK}={mark}")
            process.wait()
        if not failure:
            log.unlink()
    if failure:
        raise RuntimeError(f"DeepSpeed's {_OP} {failure} (log: {log})")


@contextlib.contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """While entered, the extension in `folder` may be built or loaded, and no killed build blocks it."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Without a lock, as on a file system that has none, the extension is loaded as torch does.
        with contextlib.suppress(OSError):
            # Network file systems need a file open for reading and writing.
            lock = stack.enter_context((folder / _OUR_LOCK).open("a+b"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / _TORCHS_LOCK).unlink(missing_ok=True)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _is_prebuilt() -> bool:
    """Return whether DeepSpeed was installed with the compiled op, so that loading only imports it."""
    installed = _variables("deepspeed", "git_version_info_installed.py")
    ops = installed.get("installed_ops")
    return isinstance(ops, dict) and bool(ops.get(_OP)) and installed.get("accelerator_name") == "cuda"


def _build_folder(environ: Mapping[str, str]) -> Path:
    """Return the build folder of torch, without importing it: `_get_build_directory` of torch.utils.cpp_extension."""
    root = environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        home = environ.get("HOME") or str(Path.home())
        cache = environ.get("XDG_CACHE_HOME", f"{home}/.cache")
        cuda = _variables("torch", "version.py").get("cuda")
        built_for = f"cu{cuda.replace('.', '')}" if isinstance(cuda, str) else "cpu"
        python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        root = os.path.realpath(f"{cache}/torch_extensions/{python}_{built_for}")
    return Path(root, _OP)


def _variables(package: str, name: str) -> dict[str, Any]:
    """Return the variables of a small file of a package, without importing the package; none without the file."""
    with contextlib.suppress(Exception):  # it is not installed, or broken
        spec: Any = importlib.util.find_spec(package)
        return runpy.run_path(str(Path(spec.submodule_search_locations[0], name)))
    return {}


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


def _reason(log: str, status: int) -> str:
    """Return the line of a log that has the cause of a failed build."""
    if status < 0:
        return f"the build ended with {processes.describe_end(status)}"
    # Lines before torch's message do not matter: on import, DeepSpeed tests compilers for other ops.
    _, failed, built = log.rpartition("Error building extension")
    errors = [line.strip() for line in built.splitlines() if _COMPILER_ERROR.search(line)] if failed else []
    # The first error is the cause; the later ones are its consequences.
    if causes := [line for line in errors if not line.startswith("collect2")]:
        few = "; set MAX_JOBS to compile fewer files at a time" if re.search(r"signal 9|Killed", causes[0]) else ""
        return causes[0] + few
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    raised = [line for line in lines if _PYTHON_ERROR.match(line)]
    return (raised or lines or [f"exit status {status}"])[-1]


if __name__ == "__main__":
    # torch removes its lock on KeyboardInterrupt. A background process ignores SIGINT, so that SIGTERM has to raise it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load()
