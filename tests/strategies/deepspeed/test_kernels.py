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
from typing import Any
from unittest.mock import Mock

import pytest

from pytest_llmgpu.strategies.deepspeed import kernels

_ENDED_S = 300


class Machine:
    """A machine that can compile the kernels, with all programs in a folder of its own."""

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
        """Create an executable."""
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
            "import os, select, signal, subprocess, sys\n"
            "class InferenceBuilder:\n"
            "    def load(self, verbose=True):\n"
            "        assert not verbose\n" + textwrap.indent(textwrap.dedent(body) or "pass\n", " " * 8)
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine that can compile; this process imports its fake DeepSpeed, and logs are in its folder."""
    made = Machine(tmp_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.syspath_prepend(made.site)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(made.scripts))
    monkeypatch.setattr(kernels, "DEFAULT_CUDA_HOME", tmp_path / "nowhere")
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "logs"))
    return made


def _refusal(machine: Machine) -> str:
    with pytest.raises(ValueError, match="strategy iok") as refused:
        kernels.check(machine.environ)
    message = str(refused.value)
    assert "\n" not in message
    return message


def _build(machine: Machine, *, ready_s: Callable[[], float] = lambda: 0.0, grace_s: float = 300.0) -> list[str]:
    """Return the lines of a build, whose clock stands still until the build is ready, then jumps."""
    lines: list[str] = []

    def clock() -> float:
        return ready_s() if machine.ready.exists() else 0.0

    kernels.build(lines.append, 60.0, environ=machine.environ, clock=clock, tick_s=0.01, grace_s=grace_s)
    return lines


def _failure(machine: Machine, **options: Any) -> str:
    with pytest.raises(RuntimeError) as failed:
        _build(machine, **options)
    message = str(failed.value)
    assert "\n" not in message
    return message


def _logs(machine: Machine) -> list[Path]:
    return list((machine.folder / "logs").iterdir())


@pytest.mark.parametrize(
    ("variables", "lacking", "message"),
    [
        ({}, None, None),
        ({"CUDA_HOME": ""}, None, "no CUDA toolkit was found (CUDA_HOME is not set, nvcc is not on PATH)"),
        ({"CUDA_HOME": "/opt/no-cuda"}, None, "CUDA_HOME=/opt/no-cuda"),
        ({"CUDA_HOME": "", "CUDA_PATH": "/opt/no-cuda"}, None, "CUDA_PATH=/opt/no-cuda"),
        ({}, "bin/ninja", "pip install ninja"),
        ({"CXX": "c++ -pipe"}, None, None),
        ({"CXX": "icpx"}, None, "CXX=icpx was not found"),
        ({}, "bin/c++", "C++ compiler c++ is not on PATH"),
    ],
)
def test_a_machine_that_cannot_compile_is_refused(
    machine: Machine, variables: dict[str, str], lacking: str | None, message: str | None
) -> None:
    """A toolkit, ninja and a compiler suffice; the message has what is missing, the variable and its value."""
    machine.environ |= variables
    if lacking is not None:
        (machine.folder / lacking).unlink()
    if message is None:
        kernels.check(machine.environ)
    else:
        assert message in _refusal(machine)


def test_the_toolkit_and_ninja_are_searched_as_torch_does(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvcc on PATH comes before the default folder; the ninja of a virtual environment needs no activation."""
    home = machine.environ.pop("CUDA_HOME")
    monkeypatch.setattr(kernels, "DEFAULT_CUDA_HOME", Path(home))
    kernels.check(machine.environ)
    (machine.folder / "bin/ninja").unlink()
    machine.program("scripts/ninja")
    kernels.check(machine.environ)
    machine.program("tools/nvcc")
    machine.environ["PATH"] += f"{os.pathsep}{machine.folder / 'tools'}"
    assert f"torch takes {machine.folder} as CUDA_HOME" in _refusal(machine)


def test_a_prebuilt_op_needs_nothing(machine: Machine) -> None:
    """If DeepSpeed was installed with the op compiled for CUDA, nothing is checked, started or shown."""
    info = "version='1'\ninstalled_ops={'transformer_inference': %s}\naccelerator_name=%r\n"
    machine.environ.clear()
    machine.deepspeed("raise AssertionError", info % (True, "cuda"))
    kernels.check(machine.environ)
    assert _build(machine) == []
    for built, accelerator in ((True, "cpu"), (False, "cuda")):
        machine.deepspeed("", info % (built, accelerator))
        assert "no CUDA toolkit" in _refusal(machine)


_BUILD_AS_TORCH_DOES = """\
try:
    os.open(os.environ["LOCK"], os.O_CREAT | os.O_EXCL)
except FileExistsError:
    open(os.environ["READY"], "w").close()
    while os.path.exists(os.environ["LOCK"]):
        select.select([], [], [], 0.01)
else:
    os.remove(os.environ["LOCK"])
"""


_LOCKED = 'os.open(os.environ["LOCK"], os.O_CREAT | os.O_EXCL)\n'


def test_a_killed_build_does_not_block_the_next_one(machine: Machine) -> None:
    """The build removes the lock file of torch that a killed build left, instead of waiting for ever."""
    machine.deepspeed(f"{_LOCKED}os.kill(os.getpid(), signal.SIGKILL)")
    assert "SIGKILL" in _failure(machine)
    assert machine.lock.exists()
    kernels.check(machine.environ)
    machine.deepspeed(_BUILD_AS_TORCH_DOES)
    assert len(_build(machine)) == 1
    assert not machine.lock.exists()


def test_a_running_build_is_waited_for(machine: Machine) -> None:
    """The lock file of a running build stays."""
    machine.deepspeed(f'{_LOCKED}print("building", flush=True)\nsys.stdin.read()')
    command = [sys.executable, "-m", kernels.__name__]
    with subprocess.Popen(command, env=machine.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"building\n"
        machine.deepspeed(_BUILD_AS_TORCH_DOES)
        assert "not compiled within 60 s" in _failure(machine, ready_s=lambda: 61.0)
        assert machine.lock.exists()


def test_the_lock_is_where_torch_builds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TORCH_EXTENSIONS_DIR this is a folder of the cache, with the versions of Python and CUDA in its name."""
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
        _build(machine)
        assert not lock.exists()
        machine.environ["XDG_CACHE_HOME"] = str(machine.folder / "cache")


def test_the_op_is_loaded_in_a_process_with_the_given_variables(machine: Machine) -> None:
    """The build has the given variables, with the scripts of this Python on PATH; one line announces it."""
    machine.environ["CUDA_VISIBLE_DEVICES"] = "GPU-1"
    machine.deepspeed(
        """\
        with open(os.environ["READY"], "w") as file:
            print(os.environ["CUDA_VISIBLE_DEVICES"], os.getsid(0) == os.getpid(), os.environ["PATH"], file=file)
        """
    )
    assert len(_build(machine)) == 1
    device, own_session, path = machine.ready.read_text().split()
    assert (device, own_session) == ("GPU-1", "True")
    assert path.startswith(f"{machine.folder / 'bin'}{os.pathsep}")
    assert str(Path(sys.executable).parent) in path
    assert _logs(machine) == []


_NINJA = "Error building extension 'transformer_inference': [1/9] nvcc -Werror -c a.cu"
_UNDEFINED = 'error: "x" is undefined'
_NO_LIBRARY = "/bin/ld: cannot find -lcurand: No such file"
_KILLED = "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (f"{_NINJA}\na.cu(3): {_UNDEFINED}\na.cu(4): error: more\n2 errors", f"a.cu(3): {_UNDEFINED}"),
        (f"{_NINJA}\nnvcc fatal   : Unsupported gpu", "nvcc fatal   : Unsupported gpu"),
        (f"{_NINJA}\n{_NO_LIBRARY}\ncollect2: error: ld returned 1 exit status", _NO_LIBRARY),
        (f"{_NINJA}\n{_KILLED}", f"{_KILLED}; set MAX_JOBS to compile fewer files at a time"),
        (f"{_NINJA}\nninja: build stopped", f"RuntimeError: {_NINJA}"),
        ("not compatible", "RuntimeError: not compatible"),
    ],
)
def test_the_message_of_a_failure_has_the_decisive_line(machine: Machine, output: str, reason: str) -> None:
    """This is the first error of the compiler, else the exception; tests of other ops before it do not count."""
    machine.deepspeed(
        f"""\
        print("/bin/ld: cannot find -laio: No such file\\ncollect2: error: ld returned 1 exit status", flush=True)
        raise RuntimeError({output!r})
        """
    )
    message = _failure(machine)
    (log,) = _logs(machine)
    assert message.endswith(f": {reason} (log: {log})")
    assert "Traceback" in log.read_text()


_NINJA_AND_COMPILER = """\
baton = os.open(os.environ["LOCK"], os.O_CREAT | os.O_EXCL)
pause = "import signal; signal.pause()"
compiler = subprocess.Popen([sys.executable, "-c", pause], process_group=0) if sys.version_info >= (3, 11) else \\
    subprocess.Popen([sys.executable, "-c", pause], preexec_fn=os.setpgrp)
with open(os.environ["READY"] + ".part", "w") as file:
    print(compiler.pid, file=file)
"""
_REPORT = 'os.rename(os.environ["READY"] + ".part", os.environ["READY"])\n'


def _end(machine: Machine, body: str, jump: Callable[[], float], *, grace_s: float = 300.0) -> None:
    """Let a build take too long or be interrupted; its compiler, in a process group of its own, has to end."""
    machine.deepspeed(f"{_NINJA_AND_COMPILER}{body}")
    compilers: list[int] = []

    def ready_s() -> float:
        compilers.append(os.pidfd_open(int(machine.ready.read_text())))
        return jump()

    try:
        _build(machine, ready_s=ready_s, grace_s=grace_s)
    finally:
        (compiler,) = compilers
        assert select.select([compiler], [], [], _ENDED_S)[0]
        os.close(compiler)


def test_a_build_that_takes_too_long_is_ended_with_all_it_started(machine: Machine) -> None:
    """The compiler is ended even if the build ignores SIGTERM."""
    body = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{_REPORT}while True: signal.pause()"
    with pytest.raises(RuntimeError, match=r"transformer_inference was not compiled within 60 s \(log: "):
        _end(machine, body, lambda: 61.0, grace_s=0.01)


def test_ctrl_c_ends_the_build_in_order(machine: Machine) -> None:
    """The build gets SIGTERM, so that torch removes its lock; no process, lock or log is left."""
    body = (
        f"try:\n    {_REPORT}    signal.pause()\nfinally:\n    os.remove(os.environ['LOCK'])\n"
        "    open(os.environ['READY'] + '.order', 'w').close()"
    )
    with pytest.raises(KeyboardInterrupt):
        _end(machine, body, Mock(side_effect=KeyboardInterrupt))
    assert not machine.lock.exists()
    assert machine.folder.joinpath("ready.order").exists()
    assert _logs(machine) == []
