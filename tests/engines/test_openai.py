"""The engine of a server, against a stub with OpenAI's API and its faults."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from support import openai_stub, report_factory, tiny_model

from pytest_llmgpu.engines.openai import COMMAND, URL, Server
from pytest_llmgpu.report.case import Case

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


def test_tokens_times_and_log_likelihoods_of_a_server(start: Start) -> None:
    """Prompts are ids, every stream gives a time for each token, and `echo` scores; the server ends with the engine."""
    server = start("none")
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
    scored = server.score(_PROMPTS, [1, 1])
    assert scored == [[openai_stub.loglikelihood(*pair) for pair in pairwise(prompt)] for prompt in _PROMPTS]
    assert server.counters() == {"prefix_cache_hits": 2.0 * (1 + 2 + 2)}, "of two engines, with the probe"
    process = server._process
    assert process is not None
    server.stop()
    assert process.poll() is not None


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
