"""Measure what a case on many ranks costs besides its forwards; prints JSON.

One pytest session with `--llmgpu-launcher=env` runs cases on 64 simulated ranks of 8 nodes, which answer at once
through the real connections. One process simulates all but the first. This file is also the plugin of the session.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import many_cases
import pytest
from many_cases import CASES_S, RESULT, TEST, WRITES_S, pytest_runtest_call  # noqa: F401 - a hook of the session

from pytest_llmgpu.profiling import nodes
from pytest_llmgpu.ranks import env, wire, world
from pytest_llmgpu.ranks.futures import Answer, Listener
from pytest_llmgpu.ranks.wire import Command, FromRankZero, Goodbye, Hello, Reply, Request, Sent, Start

LIMIT_S = 0.5
LIMIT_FACTOR = 3.0
"""Memory grows by the records of the report, and by nothing else: they take up to twice the space of their JSON."""
PER_NODE, FIRST = 8, 20
"""Ranks of a node, and cases at the beginning that do not count."""
MEMORY_MB = list[float]()


def main() -> int:
    """Run the session and print; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--work", choices=("on", "off"), default="off")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = ",".join(map(str, range(1, options.cases + 1)))
        Path(folder, "test_many.py").write_text(TEST.format(limit=options.cases), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider", folder]
        command += ["--strategy=tp", "--llmgpu-load-format=dummy", "--llmgpu-device=cpu", "--llmgpu-launcher=env"]
        command += ["--llmgpu-model=llama-65b"]  # 64 heads
        command += ["--llmgpu-json=report.json", f"--llmgpu-work={options.work}", f"--llmgpu-batch-sizes={sizes}"]
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        shared = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20399"}
        shared |= {"LOCAL_WORLD_SIZE": str(PER_NODE), world.KEY: os.urandom(16).hex()}
        environment = {
            **os.environ,
            **shared,
            "RANK": "0",
            "PYTHONPATH": paths,
            RESULT: str(Path(folder, "result.json")),
        }
        facts = nodes.gather()
        for rank in range(1, options.ranks):
            here = world.of_environment({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % PER_NODE)})
            threading.Thread(target=simulate, args=(here, facts), daemon=True).start()
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
        if done.returncode:
            sys.exit(done.stdout[-2000:])
        found = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
        found["report_mb_per_case"] = round(Path(folder, "report.json").stat().st_size / 1e6 / options.cases, 3)
    ok = found["case_s"] < LIMIT_S and found["mb_per_case"] < LIMIT_FACTOR * found["report_mb_per_case"]
    limits = {"limit_s": LIMIT_S, "limit_factor": LIMIT_FACTOR, "ok": ok}
    sizes = {"ranks": options.ranks, "cases": options.cases, "work": options.work}
    json.dump({**sizes, **found, **limits}, sys.stdout, indent=2)
    print()
    return 0 if ok else 1


def simulate(here: world.World, facts: nodes.NodeFacts) -> None:
    """Be a process that torchrun started with a rank above 0, whose rank answers at once."""
    connection = wire.connect(here, world.JOIN_S)
    connection.send(Hello(env.version(), here.rank, here.size, here.local_rank, here.node))
    number, answers = 0, dict[str, bytes]()
    while not isinstance(message := connection.receive(FromRankZero), Goodbye):
        if isinstance(message, Start):
            number = message.number
        elif isinstance(message, Request):
            connection.send(Reply(message.number, done=True, content=_reply(message, facts)))
        else:
            name = _name(message)
            answers.setdefault(name, pickle.dumps(many_cases.answer(name, here.rank)))
            connection.send(Sent(number, Answer(done=True, content=answers[name])))


def _name(message: Command) -> str:
    function, _ = pickle.loads(message.content)  # noqa: S301 - written by the session
    name: str = function.__name__
    return name


def _reply(message: Request, facts: nodes.NodeFacts) -> bytes:
    if message.what != "call":
        return pickle.dumps("")
    function, arguments = pickle.loads(message.content)  # noqa: S301 - written by the session
    if function.__name__ == "gather":
        return pickle.dumps(facts)
    method, given = arguments[1], arguments[2]
    answer: Any = {"now_s": 0.0, "used_bytes": {}}.get(method)
    return pickle.dumps(many_cases.profile(None, **given) if method == "slice" else answer)


class Process(many_cases.Rank):
    """The process of rank 0, which answers at once, in this process."""

    def __init__(self, _launcher: object, rank: int, _environment: object, listener: Listener, *_: object) -> None:
        super().__init__(rank)
        self._listener = listener

    def send(self, command: bytes) -> None:
        """Answer from another thread, as a process does."""
        answer = Answer(done=True, content=pickle.dumps(many_cases.answer(_name(Command(command)), self.rank)))
        threading.Thread(target=self._listener, args=(answer,)).start()


def pytest_configure() -> None:
    """Replace the profiler and the process of the first rank, and time the reports."""
    from pytest_llmgpu.ranks.local import LocalLauncher

    many_cases.pytest_configure()
    pytest.MonkeyPatch().setattr(LocalLauncher, "start_process", functools.partialmethod(Process))


def pytest_runtest_logfinish() -> None:
    """Note the memory in use after a case."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    MEMORY_MB.append(pages * os.sysconf("SC_PAGESIZE") / 1e6)


def pytest_unconfigure() -> None:
    """Write the figures."""
    cases = CASES_S[FIRST:]
    found = {
        "case_s": round(sum(cases) / len(cases), 3),
        "slowest_case_s": round(max(cases), 3),
        "last_write_s": round(WRITES_S[-1], 3),
        "cpu_s_per_case": round(time.process_time() / len(CASES_S), 3),
        "mb_per_case": round((MEMORY_MB[-1] - MEMORY_MB[FIRST]) / len(cases), 3),
        "memory_mb": round(MEMORY_MB[-1]),
    }
    Path(os.environ[RESULT]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
