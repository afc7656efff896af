from __future__ import annotations

import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_llmgpu.strategies.deepspeed import build_lock, kernels

_ENDED_S = 30


class Clock:
    """Stands still until the build is where the test wants it, then leaps."""

    def __init__(self, ready: Path, leap: Callable[[], float]) -> None:
        self._ready = ready
        self._leap = leap

    def __call__(self) -> float:
        """Return the time."""
        return self._leap() if self._ready.exists() else 0.0


class Machine:
    """A machine on which everything is there to compile with, in folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scripts = folder / "scripts"
        self.site = folder / "site"
        self.lock = folder / "extensions/transformer_inference/lock"
        self.lock.parent.mkdir(parents=True)
        self.ready = folder / "ready"
        self.environ = {
            "PATH": str(folder / "bin"),
            "CUDA_HOME": str(folder / "cuda"),
            "HOME": str(folder / "home"),
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
            "PYTHONPATH": f"{self.site}{os.pathsep}{Path(kernels.__file__).parents[3]}",
            "READY": str(self.ready),
            "LOCK": str(self.lock),
        }
        for program in ("bin/ninja", "bin/c++", "cuda/bin/nvcc"):
            self.program(program)
        self.deepspeed("")

    def program(self, name: str) -> Path:
        """Make a program that can be found."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    def deepspeed(self, body: str, installed: str = "") -> None:
        """Install a DeepSpeed whose op is loaded by the lines of `body`."""
        builder = self.site / "deepspeed/ops/op_builder"
        builder.mkdir(parents=True, exist_ok=True)
        for folder in (builder.parent.parent, builder.parent):
            (folder / "__init__.py").touch()
        (builder.parent.parent / "git_version_info_installed.py").write_text(installed)
        (builder / "__init__.py").write_text(
            "import os, signal, subprocess, sys\n"
            "class InferenceBuilder:\n"
            "    def load(self, verbose=True):\n"
            "        assert not verbose\n" + textwrap.indent(textwrap.dedent(body) or "pass\n", " " * 8)
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine that can compile; this process finds its fake DeepSpeed, and logs go to its folder."""
    made = Machine(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.syspath_prepend(made.site)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(made.scripts))
    monkeypatch.setattr(kernels, "_DEFAULT_CUDA_HOME", tmp_path / "nowhere")
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "logs"))
    return made


def _refusal(machine: Machine) -> str:
    with pytest.raises(ValueError, match=r"iok|lock") as refused:
        kernels.check(machine.environ)
    message = str(refused.value)
    assert "\n" not in message
    return message


def _build(machine: Machine, *, clock: Callable[[], float] = lambda: 0.0, timeout_s: float = 60.0) -> list[str]:
    said: list[str] = []
    kernels.build(said.append, timeout_s, environ=machine.environ, clock=clock, tick_s=0.01)
    return said


def _failure(machine: Machine) -> str:
    with pytest.raises(RuntimeError) as failed:
        _build(machine)
    message = str(failed.value)
    assert "\n" not in message
    return message


def _logs(machine: Machine) -> list[Path]:
    return list((machine.folder / "logs").iterdir())


def test_a_machine_that_can_compile_is_accepted(machine: Machine) -> None:
    """With a toolkit, ninja and a compiler there is nothing to say."""
    kernels.check(machine.environ)


def test_no_toolkit_is_refused(machine: Machine) -> None:
    """Where torch would find no CUDA, the message says what to set."""
    del machine.environ["CUDA_HOME"]
    assert _refusal(machine) == (
        "strategy iok compiles DeepSpeed's kernels: no CUDA toolkit was found "
        "(CUDA_HOME is not set, nvcc is not on PATH): set CUDA_HOME to one"
    )


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_folder_without_nvcc_is_named(machine: Machine, variable: str) -> None:
    """A variable that leads nowhere is told with its value, also where nvcc is on PATH: torch does not look there."""
    del machine.environ["CUDA_HOME"]
    machine.program("bin/nvcc")
    machine.environ[variable] = "/opt/no-cuda"
    assert f"{variable}=/opt/no-cuda, and there is no bin/nvcc in it" in _refusal(machine)


def test_the_toolkit_is_found_where_torch_finds_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nvcc on PATH comes before the default folder, and what is above it must hold bin/nvcc."""
    home = machine.environ.pop("CUDA_HOME")
    monkeypatch.setattr(kernels, "_DEFAULT_CUDA_HOME", Path(home))
    kernels.check(machine.environ)
    machine.program("tools/nvcc")
    machine.environ["PATH"] += f"{os.pathsep}{machine.folder / 'tools'}"
    assert f"so torch takes {machine.folder} for CUDA_HOME, and there is no bin/nvcc" in _refusal(machine)


def test_a_default_folder_without_nvcc_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with CUDA's libraries alone has /usr/local/cuda and no compiler in it."""
    del machine.environ["CUDA_HOME"]
    monkeypatch.setattr(kernels, "_DEFAULT_CUDA_HOME", machine.folder / "home")
    (machine.folder / "home").mkdir()
    assert f"so torch takes {machine.folder / 'home'}, and there is no bin/nvcc" in _refusal(machine)


def test_ninja_is_found_beside_this_python(machine: Machine) -> None:
    """A virtual environment need not be activated: its ninja is found, and without any it is asked for."""
    (machine.folder / "bin/ninja").rename(machine.folder / "ninja")
    assert "ninja is not on PATH: pip install ninja" in _refusal(machine)
    machine.program("scripts/ninja")
    kernels.check(machine.environ)


def test_no_compiler_is_refused(machine: Machine) -> None:
    """CXX is the compiler where it is set, with its arguments, and c++ where it is not."""
    machine.environ["CXX"] = "c++ -pipe"
    kernels.check(machine.environ)
    machine.environ["CXX"] = "icpx"
    assert "CXX=icpx was not found" in _refusal(machine)
    del machine.environ["CXX"]
    (machine.folder / "bin/c++").unlink()
    assert "no C++ compiler c++ on PATH" in _refusal(machine)


def test_a_prebuilt_op_needs_nothing(machine: Machine) -> None:
    """Where DeepSpeed came with the op compiled for CUDA, nothing is asked for, and nothing is started or said."""
    info = "version='1'\ninstalled_ops={'transformer_inference': %s}\naccelerator_name=%r\n"
    machine.environ.clear()
    machine.deepspeed("raise AssertionError", info % (True, "cuda"))
    kernels.check(machine.environ)
    assert _build(machine) == []
    for built, accelerator in ((True, "cpu"), (False, "cuda")):
        machine.deepspeed("", info % (built, accelerator))
        assert "no CUDA toolkit" in _refusal(machine)


def test_a_lock_that_nobody_holds_is_refused(machine: Machine) -> None:
    """The ranks would wait for it for ever, so it is named before anything starts, and by a build, too."""
    machine.lock.touch()
    said = f"{machine.lock} was left by a build that was killed (no process here has it open): delete it and run again"
    assert _refusal(machine) == said
    assert _failure(machine) == said
    assert machine.lock.exists()


def test_the_lock_is_looked_for_where_torch_builds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TORCH_EXTENSIONS_DIR it is a folder of the cache, named for this Python and torch's CUDA."""
    del machine.environ["TORCH_EXTENSIONS_DIR"]
    (machine.site / "torch").mkdir()
    (machine.site / "torch/__init__.py").touch()
    (machine.site / "torch/version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    for cache in (machine.folder / "home/.cache", machine.folder / "cache"):
        lock = cache / f"torch_extensions/{python}_cu130/transformer_inference/lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        assert str(lock) in _refusal(machine)
        machine.environ["XDG_CACHE_HOME"] = str(machine.folder / "cache")


def test_a_lock_that_a_process_holds_is_waited_for(machine: Machine) -> None:
    """Another build is no error, and it is said why nothing seems to happen."""
    holding = (
        "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holding, str(machine.lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        kernels.check(machine.environ)
        machine.deepspeed("open(os.environ['READY'], 'w').close()\nsignal.pause()")
        clock = Clock(machine.ready, lambda: 61.0)
        with pytest.raises(RuntimeError, match=f"not compiled within 60 s, another process holds {machine.lock}"):
            _build(machine, clock=clock)
        machine.deepspeed("")
        assert _build(machine) == ["waiting for another process that compiles DeepSpeed's transformer_inference ..."]
        assert machine.lock.exists()
    assert "was left by a build that was killed" in _refusal(machine)


def test_what_cannot_be_known_counts_as_held(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may not be looked into may hold the lock if it is of the lock's owner."""
    machine.lock.touch()

    def hide(_: Path) -> list[os.stat_result]:
        raise PermissionError

    monkeypatch.setattr(build_lock, "_open_files", hide)
    kernels.check(machine.environ)
    monkeypatch.setattr(build_lock, "_may_build", lambda *_: False)
    assert "delete it" in _refusal(machine)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    kernels.check(machine.environ)


def test_a_python_of_the_owner_may_build() -> None:
    """Of the processes that hide their files, only those count that could compile for the owner of the lock."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as cat:
        mine, other = Path(f"/proc/{os.getpid()}"), Path(f"/proc/{cat.pid}")
        found = [build_lock._may_build(mine, os.getuid()), build_lock._may_build(mine, os.getuid() + 1)]
        found += [build_lock._may_build(other, os.getuid()), build_lock._may_build(Path("/proc/0"), os.getuid())]
    assert found == [True, False, False, False]


def test_the_op_is_loaded_in_a_process_with_the_given_variables(machine: Machine) -> None:
    """What decides the build reaches it, ninja beside this Python included; a line tells that it takes a minute."""
    machine.environ["CUDA_VISIBLE_DEVICES"] = "GPU-1"
    machine.deepspeed(
        """\
        told = os.environ["CUDA_VISIBLE_DEVICES"], os.getsid(0) == os.getpid(), os.environ["PATH"]
        with open(os.environ["READY"], "w") as file:
            print(*told, file=file)
        """
    )
    assert _build(machine) == ["compiling DeepSpeed's transformer_inference (once; about a minute) ..."]
    device, own_session, path = machine.ready.read_text().split()
    assert (device, own_session) == ("GPU-1", "True")
    assert path.startswith(f"{machine.folder / 'bin'}{os.pathsep}")
    assert str(Path(sys.executable).parent) in path
    assert _logs(machine) == []


def test_nothing_is_said_of_an_op_that_is_there(machine: Machine) -> None:
    """An op newer than DeepSpeed and torch is only loaded; one that is older is announced."""
    library = machine.lock.with_name("transformer_inference.so")
    library.touch()
    assert _build(machine) == []
    os.utime(library, (0, 0))
    assert len(_build(machine)) == 1


def test_a_long_build_says_how_long_it_takes(machine: Machine) -> None:
    """A line every 15 seconds, so that nobody takes it for a hang."""
    machine.deepspeed("open(os.environ['READY'], 'w').close()\nsys.stdin.read()\nsignal.pause()")
    times = iter([1.0, 14.0, 16.0, 29.0, 31.0, 50.0, 61.0])
    said: list[str] = []
    with pytest.raises(RuntimeError, match="not compiled within 60 s"):
        kernels.build(
            said.append, 60.0, environ=machine.environ, clock=Clock(machine.ready, lambda: next(times)), tick_s=0.01
        )
    assert [line.rpartition(" ... ")[2] for line in said[1:]] == ["16 s", "31 s", "50 s"]


_NINJA = "Error building extension 'transformer_inference': [1/9] nvcc -Werror -c a.cu"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            f'{_NINJA}\na.cu(3): error: "x" is undefined\na.cu(4): error: more\n2 errors',
            'a.cu(3): error: "x" is undefined',
        ),
        (f"{_NINJA}\nb.cpp:1:10: fatal error: cuda.h: No such file", "b.cpp:1:10: fatal error: cuda.h: No such file"),
        (f"{_NINJA}\nnvcc fatal   : Unsupported gpu", "nvcc fatal   : Unsupported gpu"),
        (
            f"{_NINJA}\n/bin/ld: cannot find -lcurand: No such file\ncollect2: error: ld returned 1 exit status",
            "/bin/ld: cannot find -lcurand: No such file",
        ),
        (
            f"{_NINJA}\nnvcc error   : 'cicc' died due to signal 9 (Kill signal)",
            "nvcc error   : 'cicc' died due to signal 9 (Kill signal); set MAX_JOBS to compile fewer files at a time",
        ),
        (f"{_NINJA}\nninja: build stopped", f"RuntimeError: {_NINJA}"),
        ("not compatible", "RuntimeError: not compatible"),
    ],
)
def test_a_failure_is_told_in_the_line_that_matters(machine: Machine, output: str, reason: str) -> None:
    """The first error of the compiler, else the exception; what was tried for other ops before is noise."""
    machine.deepspeed(
        f"""\
        print("/bin/ld: cannot find -laio: No such file\\ncollect2: error: ld returned 1 exit status", flush=True)
        raise RuntimeError({output!r})
        """
    )
    message = _failure(machine)
    (log,) = _logs(machine)
    assert message == f"DeepSpeed's transformer_inference did not compile: {reason} (log: {log})"
    assert "Traceback" in log.read_text()


def test_a_build_that_is_killed_leaves_no_lock(machine: Machine) -> None:
    """The host may end it for want of memory; the next one does not wait for it."""
    machine.deepspeed("os.open(os.environ['LOCK'], os.O_CREAT | os.O_EXCL)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert "did not compile: it ended with signal SIGKILL" in _failure(machine)
    assert not machine.lock.exists()


_NINJA_AND_COMPILER = """\
baton = os.open(os.environ["LOCK"], os.O_CREAT | os.O_EXCL)
pause = "import signal; signal.pause()"
compiler = subprocess.Popen([sys.executable, "-c", pause], process_group=0) if sys.version_info >= (3, 11) else \\
    subprocess.Popen([sys.executable, "-c", pause], preexec_fn=os.setpgrp)
with open(os.environ["READY"] + ".part", "w") as file:
    print(compiler.pid, file=file)
"""
_REPORT = 'os.rename(os.environ["READY"] + ".part", os.environ["READY"])\n'


def _compiler_of(machine: Machine) -> int:
    return os.pidfd_open(int(machine.ready.read_text()))


def _has_ended(process: int) -> bool:
    ended, _, _ = select.select([process], [], [], _ENDED_S)
    os.close(process)
    return bool(ended)


def test_a_build_that_takes_too_long_is_ended_with_all_it_started(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler in a process group of its own is ended, too, and the lock of a build that hears nothing is removed."""
    monkeypatch.setattr(kernels, "_GRACE_S", 0.01)
    machine.deepspeed(
        f"{_NINJA_AND_COMPILER}signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{_REPORT}while True: signal.pause()"
    )
    found: list[int] = []

    def leap() -> float:
        found.append(_compiler_of(machine))
        return 61.0

    with pytest.raises(RuntimeError, match=r"transformer_inference was not compiled within 60 s \(log: "):
        _build(machine, clock=Clock(machine.ready, leap))
    (compiler,) = found
    assert _has_ended(compiler)
    assert not machine.lock.exists()


def test_ctrl_c_ends_the_build_in_order(machine: Machine) -> None:
    """The build is asked to end, so that torch lets go of its lock itself; no process, lock or log is left."""
    machine.deepspeed(
        f"{_NINJA_AND_COMPILER}try:\n    {_REPORT}    signal.pause()\nfinally:\n    os.remove(os.environ['LOCK'])\n"
        "    open(os.environ['READY'] + '.order', 'w').close()"
    )
    found: list[int] = []

    def interrupt() -> float:
        found.append(_compiler_of(machine))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _build(machine, clock=Clock(machine.ready, interrupt))
    (compiler,) = found
    assert _has_ended(compiler)
    assert not machine.lock.exists()
    assert machine.folder.joinpath("ready.order").exists()
    assert _logs(machine) == []


def test_nothing_heavy_is_imported() -> None:
    """The module is loaded in pytest's process, which must not import torch or DeepSpeed."""
    kernels_only = "import sys, pytest_llmgpu.strategies.deepspeed.kernels"
    asked = f"{kernels_only}; print(sorted({{'torch', 'deepspeed'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
