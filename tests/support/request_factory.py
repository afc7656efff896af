"""Requests of given tokens, without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmgpu.inference.batching import Request, Requests

MIXED = (((5, 6, 7, 8, 9), 2), ((5, 6, 7), 1), ((1, 2, 3, 4, 5, 6, 7, 8), 5), ((9, 8, 7, 6), 3), ((3, 4), 1))
"""Tokens of different numbers, and the number of those that are the ending."""


def make_requests(
    pairs: Sequence[tuple[Sequence[int], int]] = MIXED, *, max_length: int = 64, new_tokens: int = 0
) -> Requests:
    """Return items of one request each: its tokens, and the number of those that are the ending."""
    return Requests(
        item_ids=tuple(map(str, range(len(pairs)))),
        endings=(1,) * len(pairs),
        requests=tuple(Request(tuple(tokens), ending) for tokens, ending in pairs),
        max_length=max_length,
        new_tokens=new_tokens,
    )


def make_prompts(prompts: Sequence[Sequence[int]], *, max_length: int, new_tokens: int) -> Requests:
    """Return a request for the continuation of each prompt."""
    return make_requests([((*prompt, 0), 1) for prompt in prompts], max_length=max_length, new_tokens=new_tokens)
