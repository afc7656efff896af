"""The engine of a server, against a stub with OpenAI's API and its faults."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from support import openai_stub, report_factory, tiny_model
from support.report_factory import known

# pytester forgets what a run inside this process has imported; a module that is here already keeps its identity.
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.engines.openai import COMMAND, URL, Server
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report import derived, file
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.report import Report

_CASE = msgspec.structs.replace(report_factory.make_case(), strategy="openai", model="m", device="cpu", devices=1)
_SOURCE = tiny_model.source({}, Path("m"))
_PROMPTS = [[5, 6, 7], [9, 8]]
_STUB = f"{sys.executable} -m support.openai_stub {{port}} "

Start = Callable[[str], Server]


def _case(**options: str) -> Case:
    return msgspec.structs.replace(_CASE, strategy_options={**options})


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a server with a fault, and end it after the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    started: list[Server] = []

    def start(fault: str) -> Server:
        server = Server()
        started.append(server)
        server.start(_case(**{COMMAND: f"{_STUB} {fault}"}), _SOURCE)
        server.prepare(2, 16, 4)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize("parts", ["none", "pairs"])
def test_tokens_times_and_log_likelihoods_of_a_server(start: Start, parts: str) -> None:
    """Prompts are ids, every stream gives a time for each token, also of several in a part, and `echo` scores.

    The server ends with the engine.
    """
    server = start(parts)
    texts = server.generate(_PROMPTS, 4)
    expected = []
    for prompt in _PROMPTS:
        text = [prompt[-1]]
        for _ in range(4):
            text.append(openai_stub.following(text[-1]))
        expected.append(text[1:])
    assert texts.tokens == expected
    assert texts.loglikelihoods == [[-0.25] * 4] * 2
    assert texts.first_token_s is not None
    assert texts.first_token_s > 0
    assert len(texts.step_s) == 3
    assert min(texts.step_s) > 0, "of tokens in one part, too"
    scored = server.score(_PROMPTS, [1, 1])
    assert scored == [[openai_stub.loglikelihood(*pair) for pair in pairwise(prompt)] for prompt in _PROMPTS]
    assert server.counters() == {"prefix_cache_hits": 2.0 * (1 + 2 + 2)}, "of two engines, with the probe"
    process = server._process
    assert process is not None
    server.stop()
    assert process.poll() is not None


def serve_until(end: str) -> None:
    """Start a server with a child that ignores SIGTERM, and end it, or this process."""
    server = Server()
    server.start(_case(**{COMMAND: f"{_STUB} child"}), _SOURCE)
    server.stop() if end == "stop" else os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("end", "status"), [("stop", 0), ("kill", -signal.SIGKILL)])
def test_nothing_of_a_server_outlives_its_rank(end: str, status: int) -> None:
    """Also where a process of the server does not end, or the rank is killed."""
    script = f"from engines import test_openai; test_openai.serve_until({end!r})"
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    # All of them have its error output, which ends with the last one.
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    assert done.returncode == status, done.stderr


def test_a_server_without_ids_or_echo_is_measured_without_them(start: Start) -> None:
    """Its texts have their times alone; prompts are read and not scored."""
    texts = start("text").generate(_PROMPTS, 4)
    assert (texts.tokens, texts.loglikelihoods, len(texts.step_s)) == (None, None, 3)
    whole = start("whole").generate(_PROMPTS, 4)
    assert (whole.tokens is not None, whole.first_token_s, len(whole.step_s)) == (True, None, 0), (
        "at once, in no chunks"
    )
    assert start("no_echo").score(_PROMPTS, [1, 1]) is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("500", 'the server answered 500: {"error": "the engine is broken"}'),
        ("cut", "ended a request: Response ended prematurely"),
        ("short", "the server sent 3 tokens of a text, 4 were requested"),
        ("dies", "ended"),
    ],
)
def test_a_fault_in_a_batch_is_one_line(start: Start, fault: str, message: str) -> None:
    """The case has the error, and the next one starts a new server."""
    server = start(fault)
    with pytest.raises(RuntimeError, match=message):
        server.generate(_PROMPTS, 4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none other", r"serves other, not m: pass its model as --llmgpu-model"),
        ("exits", "the server ended with exit status 1"),
    ],
)
def test_a_wrong_model_and_a_server_that_ends_are_refused_at_the_start(start: Start, fault: str, message: str) -> None:
    """Nothing is measured."""
    with pytest.raises((RuntimeError, ValueError), match=message):
        start(fault)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--llmgpu-server-url=URL or --llmgpu-server-command='vllm serve {model} --port {port}' is needed"),
        ({URL: "http://h", COMMAND: "c {port}"}, "both are given"),
        ({URL: "localhost:8000"}, "--llmgpu-server-url=localhost:8000: http://HOST:PORT is needed"),
        ({URL: "http://me:secret@h"}, "--llmgpu-server-url: the report would have its password"),
        ({COMMAND: "vllm serve m"}, "--llmgpu-server-command=vllm serve m: it has no {port}"),
    ],
)
def test_a_run_without_one_server_is_refused(options: dict[str, str], message: str) -> None:
    """The options are checked before a process starts."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Server().check(_case(**options), _SOURCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({URL: "http://127.0.0.1:9/v1"}, "^--llmgpu-server-url: http://127.0.0.1:9/v1/models: no server"),
        ({COMMAND: "/no {port}"}, "/no"),
    ],
)
def test_a_server_that_cannot_be_reached_or_started_is_one_line(options: dict[str, str], message: str) -> None:
    """The message names the option."""
    with pytest.raises((RuntimeError, ValueError), match=message):
        Server().start(_case(**options), _SOURCE)


_VLLM = (
    f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {{model}} --port {{port}} --dtype float32 "
    "--max-model-len 1024 --max-num-seqs 4 --kv-cache-memory-bytes 200000000 --block-size 32 --enforce-eager"
)
_TEST = """
def test_scores(measure, llm, hellaswag, batch_size):
    measure(llm, hellaswag, batch_size)

def test_generates(measure, llm, prompts, batch_size):
    measure(llm, prompts, batch_size, new_tokens=16)
"""


def _having(variable: bytes) -> list[str]:
    """Return the commands of the processes that have a variable."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: tox -e vllm")
def test_a_real_server_computes_what_mp_does(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, bundled: ModelSource
) -> None:
    """Log-likelihoods, texts, times and counters of vLLM's server, which each launch starts, or another program.

    A second report is no regression of the first one, and no process of a server is left.
    """
    pytester.makepyfile(test_it=_TEST)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")

    def run(*flags: str) -> tuple[pytest.RunResult, Report]:
        common = ("-p", "no:cacheprovider", "--llmgpu-device=cpu", "--llmgpu-limit=4", "--llmgpu-batch-sizes=1,4")
        result = pytester.runpytest_inprocess(*common, *flags)
        return result, file.load(pytester.path / ".llmgpu" / "last.json")

    started = ("--strategy=mp,openai", f"--llmgpu-server-command={_VLLM} --no-enable-prefix-caching")
    with monkeypatch.context() as mark:
        mark.setenv("LLMGPU_TEST", str(pytester.path))
        result, base = run(*started, "--llmgpu-launches=2", "--llmgpu-save=base")
    result.assert_outcomes(passed=8)
    assert not _having(f"LLMGPU_TEST={pytester.path}".encode())
    cases = {one.id: one for one in base.cases}
    for size in (1, 4):
        scores = [
            list(derived.decode(known(known(cases[f"{name}-bs{size}"].launches[0].accuracy).loglikelihoods)))
            for name in ("mp", "openai")
        ]
        assert scores[1] == pytest.approx(scores[0], rel=1e-5, abs=1e-5)
        server = cases[f"openai-generate-bs{size}"]
        assert (known(server.comparison).flipped, known(server.accuracy_check).ok) == ([], True)
        for launch in server.launches:
            texts = known(launch.generation)
            assert texts.tokens == known(cases[f"mp-generate-bs{size}"].launches[0].generation).tokens
            assert (len(texts.first_token_s), len(texts.step_s)) == (4 // size, 4 // size * 15)
            assert launch.figures == {"prefix_cache_queries": 0, "prefix_cache_hits": 0, "num_preemptions": 0}

    _, head = run(*started, "--llmgpu-compare=base")
    rows = known(head.verdicts).rows
    assert {row.verdict for row in rows} <= {"OK", "UNDECIDED"}
    assert {row.id for row in rows if row.metric in ("predictions", "texts") and row.verdict == "OK"} == {*cases}

    server_of_others = Server()
    try:
        server_of_others.start(msgspec.structs.replace(_case(**{COMMAND: _VLLM}), model="bundled"), bundled)
        url = f"--llmgpu-server-url={server_of_others._url}"
        result, report = run("--strategy=mp,openai", url, "-k", "generates and bs4")
    finally:
        server_of_others.stop()
    result.assert_outcomes(passed=2)
    mp, of_url = report.cases
    assert "server" not in of_url.case.strategy_options, "it is on this machine"
    assert known(mp.launches[0].generation).tokens == known(of_url.launches[0].generation).tokens
    figures = of_url.launches[0].figures
    assert 0 < figures["prefix_cache_hits"] <= figures["prefix_cache_queries"], "the warm-up has read the prompts"
