"""A server with OpenAI's API that answers by arithmetic: `python -m support.openai_stub PORT FAULT [MODEL]`.

The next token is a function of the one before it, and its log-likelihood of both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

VOCABULARY = 512


def following(token: int) -> int:
    """Return the token after a token."""
    return (token * 7 + 3) % VOCABULARY


def loglikelihood(before: int, token: int) -> float:
    """Return the log-likelihood of a token after another one."""
    return -0.25 if token == following(before) else -1.0 - (before + token) % 5


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fault = ""
    served = "m"
    requests = 0

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            data = "".join(
                f'vllm:prefix_cache_hits_total{{engine="{one}"}} {self.requests}.0\n' for one in "01"
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        self._answer(503 if self.fault == "never" else 200, {"data": [{"id": self.served}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, probe = body["prompt"], body["prompt"] == [1, 2, 3]
        _Handler.requests += 1
        if self.fault == "500" and not probe:
            self._answer(500, {"error": "the engine is broken"})
        elif self.fault == "dies" and not probe:
            os._exit(3)
        elif body.get("stream"):
            self._stream(ids[-1], body["max_tokens"] - (self.fault == "short"))
        elif not body.get("echo") or self.fault == "no_echo":
            self._answer(400 if body.get("echo") else 200, {"choices": [{"text": "x"}]})
        else:
            values = [None, *(loglikelihood(one, other) for one, other in pairwise(ids)), -0.25]
            if self.fault == "nan" and not probe:
                values[-2] = float("nan")
            self._answer(200, {"choices": [{"text": "x", "logprobs": {"token_logprobs": values}}]})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, token: int, new_tokens: int) -> None:
        self.send_response(200)
        if self.fault != "whole":
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(new_tokens):
            if self.fault == "cut" and number == 2:
                self.close_connection = True
                return
            before, token = token, following(token)
            choice: dict[str, Any] = {"text": "x"}
            if self.fault != "text":
                choice |= {"token_ids": [token], "logprobs": {"token_logprobs": [loglikelihood(before, token)]}}
            if self.fault == "pairs" and number % 2:
                choice["token_ids"].insert(0, before)
                choice["logprobs"]["token_logprobs"] *= 2  # that of each token after the one before it is equal
            if self.fault != "pairs" or number % 2:
                self._chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        self._chunk(b"data: [DONE]\n\n")
        if self.fault != "whole":
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = self.fault == "whole"  # else the client would use a connection that is about to close

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(data if self.fault == "whole" else b"%x\r\n%s\r\n" % (len(data), data))


if __name__ == "__main__":
    _Handler.fault, *names = sys.argv[2:]
    _Handler.served = names[0] if names else "m"
    if _Handler.fault == "child":
        subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600"])
    if _Handler.fault == "exits":
        sys.exit("no GPU was found")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
