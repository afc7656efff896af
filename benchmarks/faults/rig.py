"""Run the bundled model on a CPU with a fault in each run, and check what it costs; prints JSON.

    python benchmarks/faults/rig.py > rig.json
    python benchmarks/faults/rig.py --list
    python benchmarks/faults/rig.py killed-in-a-batch promote-killed

Each fault has a folder of its own with a test of three cases, batch sizes 1, 2 and 4. What has to be right of each: the
exit status, the outcomes of the cases in their order, one line in the output, no traceback, and nothing that is left:
processes, temporary files, worktrees, reports that do not load. The exit status is 1 if a fault is bad.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_llmgpu.inference import bundled
from pytest_llmgpu.processes import end_marked
from pytest_llmgpu.report import file

_TEST = "def test_it(llm, hellaswag, batch_size, measure):\n    measure(llm, hellaswag, batch_size)\n"
_OPTIONS = ("--llmgpu-device=cpu", "--llmgpu-limit=2", "--llmgpu-batch-sizes=1,2,4", "--llmgpu-work=off")
_LIMIT_S = 500.0
_LOOK_S = 0.02
_MODEL = Path(bundled.__file__).parent / "model"
_REPORTS = Path(__file__).parents[1] / "reports"


@dataclasses.dataclass
class Found:
    """What a command did."""

    status: int
    text: str
    """Its stdout and stderr."""


class Rig:
    """A folder with a test suite, a folder for temporary files, and the processes that are started there."""

    def __init__(self, folder: Path) -> None:
        self.root, self.tmp = folder / "suite", folder / "tmp"
        self.root.mkdir()
        self.tmp.mkdir()
        shutil.copy(Path(__file__).with_name("injected.py"), self.root / "conftest.py")
        (self.root / "test_it.py").write_text(_TEST)
        self.mark = secrets.token_hex(8)
        self.left_allowed = "torchinductor_.*"
        """Names of temporary files that may stay."""

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start `pytest` or `llmgpu` with words; `fault`, `rows` and `variables` are for its environment."""
        ours = {"FAULT": options.pop("fault", ""), "ROWS": str(options.pop("rows", 2)), "OMP_NUM_THREADS": "1"}
        ours |= {"TMPDIR": str(self.tmp), "LLMGPU_RIG": self.mark, "PYTHONDONTWRITEBYTECODE": "1"}
        module = {"pytest": "pytest", "llmgpu": "pytest_llmgpu.cli"}[words[0]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        variables = {**os.environ, **ours, **pipes.pop("variables", {})}
        command = [sys.executable, "-m", module, *words[1:]]
        return subprocess.Popen(command, cwd=self.root, env=variables, text=True, **pipes)

    def run(self, *words: str, **options: Any) -> Found:
        """Run a command to its end."""
        return self.end(self.start(*words, **options))

    def end(self, process: subprocess.Popen[str]) -> Found:
        """Wait for a command."""
        out, error = process.communicate(timeout=_LIMIT_S)
        return Found(process.returncode, (out or "") + (error or ""))

    def measure(self, *words: str, **options: Any) -> Found:
        """Run pytest with the bundled model."""
        return self.run("pytest", "-q", "-p", "no:cacheprovider", *_OPTIONS, *words, **options)

    def outcomes(self) -> str:
        """Return the outcomes of the last report; empty without one."""
        path = self.root / ".llmgpu" / "last.json"
        return " ".join(one.outcome for one in file.load(path).cases) if path.exists() else ""

    def model(self, **fields: Any) -> Path:
        """Return a copy of the bundled model whose config has other fields."""
        copy = self.root / "model"
        shutil.copytree(_MODEL, copy)
        config = copy / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
        return copy

    def git(self, *words: str) -> str:
        """Return the output of git in the suite."""
        command = ["git", "-c", "user.name=rig", "-c", "user.email=rig@localhost", *words]
        return subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True).stdout

    def left(self) -> Iterator[str]:
        """Yield what is left: processes after ten seconds, temporary files, broken reports."""
        deadline = time.monotonic() + 10
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        yield from alive
        end_marked(f"LLMGPU_RIG={self.mark}")
        yield from (one.name for one in self.tmp.iterdir() if not re.fullmatch(self.left_allowed, one.name))
        for path in (self.root / ".llmgpu").rglob("*.json*"):
            try:
                file.load(path)
            except ValueError as error:
                yield str(error)

    def _alive(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"LLMGPU_RIG={self.mark}".encode() in path.read_bytes():
                    found.append(f"process {path.parent.name}")
        return found


Check = Callable[[Rig], tuple[Found, str]]
"""Injects a fault; returns what the command did, and the outcomes of cases or other facts."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and what is expected."""

    check: Check
    status: int
    facts: str = ""
    """Outcomes of the cases, or what the check returns."""
    line: str = ""
    """Regular expression of a line of the output."""
    left: str = "torchinductor_.*"
    """Regular expression of temporary files that may stay."""


def _in_run(fault: str, *words: str, **options: Any) -> Check:
    def check(rig: Rig) -> tuple[Found, str]:
        return rig.measure(*words, fault=fault, **options), rig.outcomes()

    return check


def _refused(prepare: Callable[[Rig], object]) -> Check:
    def check(rig: Rig) -> tuple[Found, str]:
        prepare(rig)
        return rig.measure("--llmgpu-model=model"), rig.outcomes()

    return check


def _output(redirect: dict[str, Any], *words: str) -> Check:
    """Run a command of llmgpu whose output cannot be written."""

    def check(rig: Rig) -> tuple[Found, str]:
        with Path("/dev/full").open("w") as full:
            given = {name: full if stream == "full" else stream for name, stream in redirect.items()}
            return rig.run("llmgpu", *words, **given), ""

    return check


def _quota(rig: Rig) -> tuple[Found, str]:
    before = rig.measure("--llmgpu-save=base", "--llmgpu-batch-sizes=1")
    old = (rig.root / ".llmgpu" / "last.json").read_bytes()
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (len(old) // 2, len(old) // 2))
    found = rig.measure(preexec_fn=limit)
    for copy in rig.tmp.glob("llmgpu-report-*"):
        shutil.rmtree(copy)
    same = (rig.root / ".llmgpu" / "last.json").read_bytes() == old
    return found, f"before {before.status}, old report {'unchanged' if same else 'lost'}"


def _link(rig: Rig) -> tuple[Found, str]:
    victim = rig.root / "victim"
    victim.write_text("mine")
    (rig.root / ".llmgpu").mkdir()
    (rig.root / ".llmgpu" / "last.json").symlink_to(victim)
    return rig.measure("--llmgpu-batch-sizes=1"), victim.read_text()


def _fifo(rig: Rig) -> None:
    config = rig.model() / "config.json"
    config.unlink()
    os.mkfifo(config)


def _two_sessions(rig: Rig) -> tuple[Found, str]:
    words = ("pytest", "-q", "-p", "no:cacheprovider", *_OPTIONS, "--llmgpu-batch-sizes=1")
    both = [rig.start(*words, f"--llmgpu-save={name}", f"--llmgpu-json={name}.json") for name in "ab"]
    ended = [rig.end(process) for process in both]
    kept = sorted(path.name.split("_")[0] for path in (rig.root / ".llmgpu").glob("*/0*.json"))
    return Found(max(one.status for one in ended), ended[0].text + ended[1].text), " ".join(kept)


def _resumed(rig: Rig) -> tuple[Found, str]:
    commit = {"variables": {"LLMGPU_COMMIT": "c" * 40}}  # a report of another program is not continued
    rig.measure(fault="killed", **commit)
    first = rig.outcomes()
    rig.measure("--llmgpu-resume=latest", fault="rank", rows=4, **commit)
    second = rig.outcomes()
    found = rig.measure("--llmgpu-resume=latest", **commit)
    return found, f"{first}; {second}; {rig.outcomes()}"


def _killed_often(*words: str) -> Check:
    """Kill a command of the store at ten times of its run: each file is whole, and the old baseline stays."""

    def check(rig: Rig) -> tuple[Found, str]:
        rig.run("llmgpu", "promote", str(_REPORTS / "clock-7b-gpu-1.json.gz"), "--force", "the rig")
        base, page = next((rig.root / ".llmgpu").glob("*/*_baseline.json")), rig.root / "trend.html"
        began, old, broken = time.monotonic(), base.read_bytes(), 0
        rig.run("llmgpu", *words)
        whole_s = time.monotonic() - began
        for number in range(10):
            process = rig.start("llmgpu", *words)
            time.sleep(whole_s * (0.5 + number / 20))
            process.kill()
            process.communicate()
            broken += len(list(rig.left())) + (page.exists() and not page.read_text().rstrip().endswith("</html>"))
        found = rig.run("llmgpu", *words)
        return found, f"broken {broken}, old baseline {'unchanged' if base.read_bytes() == old else 'lost'}"

    return check


def _worktrees(command: str) -> Check:
    """Kill `ab` or `bisect` in a launch; the next command removes its worktrees, and its pytest has ended."""

    def check(rig: Rig) -> tuple[Found, str]:
        (rig.root / ".gitignore").write_text(".llmgpu\n")
        rig.git("init", "-q", "-b", "main")
        for message in ("one", "two"):
            rig.git("add", ".")
            rig.git("commit", "-q", "--allow-empty", "-m", message)
        words = ("llmgpu", command, "main~1", "main", "--")
        process = rig.start(*words, sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)")
        while not list((rig.root / ".llmgpu").glob("*/*/launches/*.log")) and process.poll() is None:
            time.sleep(_LOOK_S)
        process.kill()
        process.communicate()
        before = len(rig.git("worktree", "list").splitlines())
        found = rig.run(*words, "false")
        after = len(rig.git("worktree", "list").splitlines())
        return found, f"worktrees {'left' if before > 1 else 'none'} then {after}"

    return check


def _stranger(rig: Rig) -> tuple[Found, str]:
    """Let a program send 64 random bytes to the socket on which rank 0 waits for rank 1."""
    words = ("pytest", "-q", "-p", "no:cacheprovider", *_OPTIONS, "--llmgpu-launcher=env", "--strategy=tp")
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
    }
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} for rank in (0, 1)]
    before = _listening()
    first, sent, limit = rig.start(*words, variables=ranks[0]), 0, time.monotonic() + 60
    while not sent and first.poll() is None and time.monotonic() < limit:
        for name in _listening() - before:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect("\0" + name[1:])
                sent += stranger.send(secrets.token_bytes(64))
        time.sleep(_LOOK_S)
    second = rig.start(*words, variables=ranks[1])
    found = rig.end(first)
    rig.end(second)
    return found, f"sent {sent}; {rig.outcomes()}"


def _listening() -> set[str]:
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {line[7] for line in lines if len(line) > 7 and line[7].startswith("@") and "llmgpu" in line[7]}


def _ray(rig: Rig) -> tuple[Found, str]:
    words = ("llmgpu", "ray", "-n", "2", "--", sys.executable, "-m", "pytest", "-q", *_OPTIONS, "--strategy=tp")
    found = rig.run(*words, fault="killed")
    return found, rig.outcomes()


_DONE = "completed completed completed"
_LOST = "completed crashed completed"
FAULTS: dict[str, Fault] = {
    "healthy": Fault(_in_run(""), 0, _DONE),
    "killed-while-loading": Fault(_in_run("loading"), 1, "crashed completed completed", "SIGKILL"),
    "killed-in-a-batch": Fault(_in_run("rank"), 1, _LOST, "SIGKILL"),
    "killed-in-a-work-pass": Fault(_in_run("work", "--llmgpu-work=on"), 0, _DONE),
    "exits-in-a-batch": Fault(_in_run("exits"), 1, _LOST, "exit status 0"),
    "hangs-in-a-forward": Fault(_in_run("hangs", "--llmgpu-timeout=10"), 1, "completed timeout completed"),
    "raises-in-a-forward": Fault(_in_run("raises"), 1, "completed error completed", "a fault"),
    "forks-in-a-forward": Fault(_in_run("forks"), 1, _LOST),
    "daemon-of-a-forward": Fault(_in_run("daemon"), 0, _DONE),
    "text-in-the-pipes": Fault(_in_run("writes"), 1, _LOST, "no answer"),
    "folder-removed": Fault(_in_run("folder"), 1, _LOST, "SIGKILL"),
    "clock-jumps": Fault(_in_run("clock"), 0, _DONE),
    "sigterm": Fault(_in_run("sigterm"), 2, "completed interrupted", "SIGTERM"),
    "five-ctrl-c": Fault(_in_run("interrupts"), 2, "completed interrupted"),
    "sigkill": Fault(_in_run("killed"), -9, "completed", left="torchinductor_.*|llmgpu-run-.*"),
    "stdout-closed": Fault(
        _output({"stderr": subprocess.PIPE, "preexec_fn": functools.partial(os.close, 1)}, "list"), 2, line="closed"
    ),
    "stdout-full": Fault(_output({"stdout": "full", "stderr": subprocess.PIPE}, "--version"), 2, line="No space"),
    "stderr-full": Fault(_output({"stderr": "full"}, "show", "nothing"), 2),
    "quota": Fault(_quota, 1, "before 0, old report unchanged", "could not be written: File too large"),
    "link-as-report": Fault(_link, 0, "mine"),
    "fifo-as-config": Fault(_refused(_fifo), 4, line="config.json"),
    "no-layers": Fault(_refused(lambda rig: rig.model(num_hidden_layers=-1)), 4, line="num_hidden_layers"),
    "kernel-of-the-hub": Fault(_refused(lambda rig: rig.model(_attn_implementation="a/b")), 4, line="_attn_implement"),
    "large-config": Fault(_refused(lambda rig: rig.model(x="y" * 5_000_000)), 4, line="config.json.*larger"),
    "two-sessions-in-a-store": Fault(_two_sessions, 0, "0001 0002"),
    "resumed-under-faults": Fault(
        # A case that failed has a result, which is kept.
        _resumed,
        1,
        f"completed{2 * '; completed completed crashed'}",
        left="torchinductor_.*|llmgpu-run-.*",
    ),
    "promote-killed": Fault(
        _killed_often("promote", str(_REPORTS / "clock-7b-gpu-2.json.gz"), "--force", "the rig"),
        0,
        "broken 0, old baseline unchanged",
    ),
    "trend-killed": Fault(_killed_often("trend", "--html=trend.html"), 0, "broken 0, old baseline unchanged"),
    "ab-killed": Fault(_worktrees("ab"), 2, "worktrees left then 1"),
    "bisect-killed": Fault(_worktrees("bisect"), 2, "worktrees left then 1"),
    "stranger-at-the-socket": Fault(_stranger, 0, f"sent 64; {_DONE}"),
    # Ray keeps the logs of each of its sessions.
    "ray-run-killed": Fault(_ray, 247, "completed", left="torchinductor_.*|llmgpu-run-.*|ray"),
}


def trial(name: str) -> dict[str, Any]:
    """Run one fault; return what was expected and what was found."""
    fault, began = FAULTS[name], time.monotonic()
    if name.startswith("ray") and importlib.util.find_spec("ray") is None:
        return {"fault": name, "result": "not run", "wrong": ["needs ray"]}
    with tempfile.TemporaryDirectory(prefix="rig-") as folder:
        rig = Rig(Path(folder))
        rig.left_allowed = fault.left
        try:
            found, facts = fault.check(rig)
        except Exception as error:  # noqa: BLE001 - one fault does not end the others
            found, facts = Found(-1, f"{type(error).__name__}: {error}"), ""
        left = list(rig.left())
    wrong = [f"status {found.status}"] if found.status != fault.status else []
    wrong += [f"found: {facts}"] if facts != fault.facts else []
    wrong += [f"no line {fault.line!r}"] if not re.search(fault.line, found.text) else []
    wrong += ["traceback"] if "Traceback (most" in found.text and name != "raises-in-a-forward" else []
    wrong += [f"left: {text}" for text in left]
    expected = {"status": fault.status, "facts": fault.facts, "line": fault.line}
    result = {"fault": name, "result": "bad" if wrong else "good", "wrong": wrong, "expected": expected}
    seconds = round(time.monotonic() - began, 1)
    return {**result, "found": {"status": found.status, "facts": facts}, "seconds": seconds} | (
        {"output": found.text[-1500:]} if wrong else {}
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAULT", help="faults to inject (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at the same time (default: 2)")
    chosen = parser.parse_args(words)
    if unknown := set(chosen.names) - FAULTS.keys():
        parser.error(f"no fault {', '.join(sorted(unknown))}: see --list")
    if chosen.list:
        print("\n".join(FAULTS))
        return 0
    trials = []
    with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        for found in pool.map(trial, chosen.names or FAULTS):
            trials.append(found)
            print(found["fault"], found["result"], *found["wrong"], file=sys.stderr, flush=True)
    counts = {result: sum(one["result"] == result for one in trials) for result in ("good", "bad", "not run")}
    print(json.dumps({**counts, "trials": trials}, indent=1))
    return int(counts["bad"] > 0)


if __name__ == "__main__":
    sys.exit(main())
