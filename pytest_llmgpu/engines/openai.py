"""openai: a server with OpenAI's API of completions, at a URL or started and ended with the rank.

The batch size is the number of requests in flight: all requests of a batch start together, each in a thread, and the
batch ends with the last one. Prompts are token ids. What a server has beyond OpenAI's API is used where it is there:
`ignore_eos` and `return_token_ids` (vLLM, SGLang), and `echo` with `logprobs`, which scores. A server without them is
measured without accuracy, or without its tokens; the report has the reason.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import PurePath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pytest_llmgpu.engines.protocol import Engine, Texts
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.text import beginning, first_line

URL, COMMAND = "server_url", "server_command"
"""The options of a case that have the server."""
_CONNECT_S = 10.0
_HEALTH_S = 0.25
_END_S = 10.0
_COUNTER = re.compile(
    r"^(?:\w+:)?(prefix_cache_hits|prefix_cache_queries|cached_tokens|num_preemptions|num_retracted\w*)_total"
    r"(?:{[^}]*})? ([\d.e+]+)$",
    re.MULTILINE,
)
"""A counter of the cache or of the scheduler of vLLM or SGLang."""
_ID = "token_id:"
"""Begin of the name of a token in vLLM's logprobs."""


class _Answer(NamedTuple):
    """What a server sent for one prompt."""

    tokens: list[int] | None
    """None if the server sent no ids."""
    length: int
    loglikelihoods: list[float]
    arrived_s: list[tuple[int, float]]
    """The number of tokens after each part of the stream, and its time; none if the server sent the text at once."""


class Server(Engine):
    """Sends the sequences of a batch as parallel requests."""

    name = "openai"
    backend = "requests"
    options = (URL, COMMAND)
    elsewhere = "the server computes in processes of its own, whose kernels, ops and memory are not recorded"

    def __init__(self) -> None:
        self._url = ""
        self._model = ""
        self._scores = False
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Any = None
        self._session: Any = None
        self._pool: ThreadPoolExecutor | None = None

    def check(self, case: Case, source: ModelSource) -> None:  # noqa: ARG002 - the server checks the model
        """Refuse a run that names no server, or two."""
        url, command = case.strategy_options.get(URL), case.strategy_options.get(COMMAND)
        if bool(url) == bool(command):
            given = "both are given" if url else "none is given"
            either = "--llmgpu-server-url=URL or --llmgpu-server-command='vllm serve {model} --port {port}'"
            raise ValueError(f"--strategy={self.name}: {either} is needed, and {given}")
        if url and (urlsplit(str(url)).scheme not in ("http", "https") or not urlsplit(str(url)).hostname):
            raise ValueError(f"--llmgpu-server-url={url}: http://HOST:PORT is needed")
        if url and urlsplit(str(url)).username is not None:
            raise ValueError("--llmgpu-server-url: the report would have its password: set OPENAI_API_KEY, or a proxy")
        if command and "{port}" not in str(command):
            remedy = "it has no {port}, which stands for a free port: write it where the server takes its port"
            raise ValueError(f"--llmgpu-server-command={command}: {remedy}")

    def start(self, case: Case, source: ModelSource) -> None:
        """Start the server, if a command is given, wait until it is healthy, and find its model.

        RuntimeError if the server ended, or cannot be reached; ValueError if it serves other models.
        """
        import requests
        from requests.adapters import HTTPAdapter

        self._session = requests.Session()
        # A server of this machine needs no proxy of the environment.
        self._session.trust_env = "server" in case.strategy_options
        self._session.mount("http", HTTPAdapter(pool_maxsize=max(64, case.batch_size)))
        if key := os.environ.get("OPENAI_API_KEY"):
            self._session.headers["Authorization"] = f"Bearer {key}"
        command = case.strategy_options.get(COMMAND)
        if command:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self._url = f"http://127.0.0.1:{port}"
            model = source.directory or source.name
            words = [one.replace("{port}", f"{port}").replace("{model}", model) for one in shlex.split(str(command))]
            try:
                # Its output is the log of the rank.
                self._process = subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL)
            except OSError as error:
                raise ValueError(f"--llmgpu-server-command={command}: {error}") from None
            # At the end of its input, also where this process is killed, it ends all processes of the server.
            guard = ["sh", "-c", 'read _; kill -KILL -"$0" 2>&-', str(self._process.pid)]
            self._guard = subprocess.Popen(guard, start_new_session=True, stdin=subprocess.PIPE)
        else:
            self._url = str(case.strategy_options[URL]).rstrip("/").removesuffix("/v1")
        served = self._models()
        known = {source.name, source.directory, PurePath(source.directory or source.name).name}
        self._model = next((name for name in served if name in known or PurePath(name).name in known), "")
        if not self._model:
            wanted = f"not {source.name}: pass its model as --llmgpu-model, or name it so (--served-model-name of vLLM)"
            raise ValueError(f"the server at {self._url} serves {', '.join(served) or 'no model'}, {wanted}")
        with suppress(RuntimeError):  # not every server computes log-likelihoods of a prompt
            scored = self._post({"prompt": [1, 2, 3], "max_tokens": 1, "echo": True, "logprobs": 1})
            self._scores = len(_logprobs(scored.json())) >= 3  # noqa: PLR2004 - the three of the prompt

    def prepare(self, batch_size: int, tokens: int, new_tokens: int) -> None:  # noqa: ARG002 - the server decides
        """Make a thread for each request of a batch."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = ThreadPoolExecutor(batch_size)

    def generate(self, token_ids: list[list[int]], new_tokens: int) -> Texts:
        """Send all prompts at once and read their streams.

        RuntimeError if a request failed, a stream was cut, or a text has another number of tokens.
        """
        began_s = time.perf_counter()
        answers = self._together(lambda ids: self._stream(ids, new_tokens), token_ids)
        wrong = next((answer.length for answer in answers if answer.length != new_tokens), None)
        if wrong is not None:
            raise RuntimeError(f"the server sent {wrong} tokens of a text, {new_tokens} were requested")
        firsts = [answer.arrived_s[0][1] for answer in answers if answer.arrived_s]
        times_s = [_of_tokens(answer.arrived_s, new_tokens) for answer in answers]
        ends_s = list(map(max, zip(*times_s, strict=True))) if all(times_s) else []
        tokens = [answer.tokens for answer in answers if answer.tokens is not None]
        values = [answer.loglikelihoods for answer in answers if len(answer.loglikelihoods) == new_tokens]
        return Texts(
            tokens=tokens if len(tokens) == len(answers) else None,
            loglikelihoods=values if len(values) == len(answers) else None,
            first_token_s=max(firsts) - began_s if len(firsts) == len(answers) else None,
            step_s=[later - earlier for earlier, later in pairwise(ends_s)],
        )

    def score(self, token_ids: list[list[int]], from_position: list[int]) -> list[list[float]] | None:
        """Return the log-likelihoods of prompts; None from a server that computes none, which reads them all the same.

        RuntimeError if a request failed.
        """
        body = {"max_tokens": 1, "temperature": 0.0, **({"echo": True, "logprobs": 1} if self._scores else {})}
        found = self._together(lambda ids: self._post({"prompt": ids, **body}).json(), token_ids)
        if not self._scores:
            return None
        pairs = zip(found, token_ids, from_position, strict=True)
        return [_logprobs(answer)[start : len(ids)] for answer, ids, start in pairs]

    def counters(self) -> dict[str, float]:
        """Return the counters of the cache and of preemptions in the server's `/metrics`; none from one without them.

        The text is that of Prometheus, `vllm:prefix_cache_hits_total{engine="0"} 5.0`; labels are summed.
        """
        import requests

        text = ""
        for _ in range(2):  # a connection that was kept may be closed meanwhile
            with suppress(requests.RequestException):  # it costs no figure of the case
                response = self._session.get(f"{self._url}/metrics", timeout=_CONNECT_S)
                text = response.text if response.ok else ""
                break
        found: dict[str, float] = {}
        for name, value in _COUNTER.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def stop(self) -> None:
        """End the server that was started, with everything that it started."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._process is None:
            return
        for end in (partial(os.killpg, self._process.pid, signal.SIGTERM), self._guard.communicate):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                end()
                self._process.wait(_END_S)
        self._process = None

    def _models(self) -> list[str]:
        """Return the names of the served models; wait for a server that was started, until the rank's time limit."""
        import requests

        while True:
            self._check_alive()
            try:
                response = self._session.get(f"{self._url}/v1/models", timeout=_CONNECT_S)
                if response.ok:
                    return [str(one["id"]) for one in response.json()["data"]]
                problem = _problem(response)
            except (requests.RequestException, ValueError, LookupError, TypeError) as error:
                absent = isinstance(error, requests.ConnectionError)
                problem = "no server answers there" if absent else first_line(error)
            if self._process is None:
                raise RuntimeError(f"--llmgpu-server-url: {self._url}/v1/models: {problem}")
            time.sleep(_HEALTH_S)

    def _check_alive(self) -> None:
        if self._process is not None and (status := self._process.poll()) is not None:
            raise RuntimeError(f"the server ended with exit status {status}: its output is in the log of the rank")

    def _together(self, send: Any, token_ids: list[list[int]]) -> list[Any]:
        import requests

        assert self._pool is not None, "the case is prepared"
        try:
            return list(self._pool.map(send, token_ids))
        except requests.RequestException as error:
            self._check_alive()
            raise RuntimeError(f"the server at {self._url} ended a request: {first_line(error)}") from error

    def _post(self, body: dict[str, Any]) -> Any:
        body = {"model": self._model, **body}
        # No time limit of its own: that of the rank holds.
        response = self._session.post(
            f"{self._url}/v1/completions", json=body, stream=bool(body.get("stream")), timeout=(_CONNECT_S, None)
        )
        if not response.ok:
            raise RuntimeError(_problem(response))
        return response

    def _stream(self, token_ids: list[int], new_tokens: int) -> _Answer:
        body = {"prompt": token_ids, "max_tokens": new_tokens, "temperature": 0.0, "stream": True}
        extended = {"ignore_eos": True, "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
        tokens: list[int] = []
        values: list[float] = []
        arrived_s: list[tuple[int, float]] = []
        count, used, ended = 0, 0, False
        with self._post({**body, **extended, "stream_options": {"include_usage": True}}) as response:
            chunked = bool(getattr(response.raw, "chunked", False))
            for line in response.iter_lines():
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    ended = ended or data == b"[DONE]"
                    continue
                part = json.loads(data)
                if "error" in part:
                    raise RuntimeError(f"the server sent an error: {beginning(str(part['error']))}")
                used = (part.get("usage") or {}).get("completion_tokens") or used
                for choice in part.get("choices") or ():
                    logprobs = choice.get("logprobs") or {}
                    named = logprobs.get("tokens") or ()
                    ids = choice.get("token_ids") or [int(one[len(_ID) :]) for one in named if one.startswith(_ID)]
                    tokens += ids
                    values += logprobs.get("token_logprobs") or ()
                    if arrived := len(ids) or len(named) or bool(choice.get("text")):
                        count += arrived
                        arrived_s.append((count, time.perf_counter()))
        if not ended or not count:
            raise RuntimeError("the server cut the stream of a text before its end")
        return _Answer(tokens or None, len(tokens) or used or count, values, arrived_s if chunked else [])


@functools.cache
def local_port(url: str) -> int | None:
    """Return the port of a URL whose host is this machine; None for another one, and for a URL that is none."""
    parts = urlsplit(url)
    with suppress(OSError, ValueError):
        for family, kind, _, _, address in socket.getaddrinfo(parts.hostname, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as own:
                own.bind(address)  # only an address of this machine can be bound to
                return parts.port or (443 if parts.scheme == "https" else 80)
    return None


def _of_tokens(arrived_s: Sequence[tuple[int, float]], tokens: int) -> list[float]:
    """Return the time of each token of a stream; none of one whose parts lack tokens, or that has a single part.

    A server that computes faster than it sends puts several tokens into a part: they share the time since the part
    before, those of the first one the time up to the second.
    """
    if not arrived_s or arrived_s[-1][0] != tokens or len(arrived_s) == 1 < tokens:
        return []
    times_s: list[float] = []
    for (before, from_s), (count, to_s) in pairwise([(1, arrived_s[0][1]), *arrived_s[1:]]):
        times_s += [from_s + (to_s - from_s) * number / (count - before) for number in range(count - before)]
    return [*times_s, arrived_s[-1][1]]


def _logprobs(answer: Any) -> list[float]:
    """Return the log-likelihoods of the tokens of the first choice; the first token of a text has none."""
    try:
        values: Sequence[Any] = answer["choices"][0]["logprobs"]["token_logprobs"]
        return [float("nan") if value is None else float(value) for value in values]
    except (LookupError, TypeError):
        return []


def _problem(response: Any) -> str:
    return f"the server answered {response.status_code}: {beginning(response.text.strip().partition(chr(10))[0])}"
