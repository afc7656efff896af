"""The commands of the rank of an engine: what is measured of its answers, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support import report_factory, request_factory, tiny_model

from pytest_llmgpu.engines.function import Function
from pytest_llmgpu.engines.protocol import Texts
from pytest_llmgpu.ranks import engine_worker
from pytest_llmgpu.ranks.worker import RankState, ReferenceTexts
from pytest_llmgpu.report.derived import decode, encode
from pytest_llmgpu.report.result import Launch

_PROMPTS = [[5, 6, 7, 8], [5, 6], [9, 8, 7]]
_NEW = 3


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class _Engine:
    """Counts up from the last token."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.model = answer, _Model()

    def generate(self, token_ids: list[list[int]], new_tokens: int) -> Any:
        self.model(torch.ones(len(token_ids), 4))
        right = [[ids[-1] + 1 + number for number in range(new_tokens)] for ids in token_ids]
        return right if self.answer is None else self.answer(right)

    def score(self, token_ids: list[list[int]], from_position: list[int]) -> list[list[float]]:
        pairs = zip(token_ids, from_position, strict=True)
        return [[-float(token) for token in ids[start:]] for ids, start in pairs]


def _state(engine: object) -> RankState:
    """Return the state of a rank whose engine has started, with three prompts."""
    state = RankState(lambda _: None)
    state.engine = Function(engine)
    case = report_factory.make_case()
    case = msgspec.structs.replace(
        case,
        workload="generate",
        prompt_tokens=8,
        new_tokens=_NEW,
        batch_size=2,
        device="cpu",
        devices=1,
        model="random",
    )
    requests = request_factory.make_prompts(_PROMPTS, max_length=8, new_tokens=_NEW)
    state.datasets[case.dataset_sha256] = None, []  # type: ignore[assignment]  # the prompts are tokenised
    state.requests[case.dataset_sha256, 8, _NEW] = requests
    engine_worker.load(state, case, tiny_model.source({"vocab_size": 64}), "")
    return state


def _score(state: RankState) -> Launch:
    engine_worker.warm_up(state, state.case)
    launch = engine_worker.measure(state).launch
    launch.generation = engine_worker.check_texts(state)
    return launch


def _measure(engine: object) -> Launch:
    return _score(_state(engine))


def test_texts_are_in_the_order_of_the_dataset_and_scored_again() -> None:
    """Batches run longest first; `score` gives the log-likelihoods of the texts, and of those of mp."""
    state = _state(_Engine())
    launch = _score(state)
    texts = launch.generation
    assert texts is not None
    assert decode(texts.tokens, "i").tolist() == [9, 10, 11, 7, 8, 9, 8, 9, 10]
    assert decode(texts.prefill_loglikelihoods).tolist() == [-9, -10, -11, -7, -8, -9, -8, -9, -10]
    assert (texts.loglikelihoods, texts.first_token_s, texts.kv_cache_bytes) == (None, [], None)
    assert launch.why["loglikelihoods"] == "engine _Engine returns no log-likelihoods of its tokens"
    assert launch.batches.sequences == [2, 1]
    again = engine_worker.check_texts(state, ReferenceTexts(key="mp", tokens=encode([1] * 9, "i")))
    assert decode(again.reference_loglikelihoods).tolist() == [-1.0] * 9


def test_the_ops_of_a_call_have_the_modules_of_the_engine() -> None:
    """The program of an engine is recorded without knowing its model, and equal in every call."""
    state = _state(_Engine())
    _score(state)
    counted = []
    for _ in range(2):
        engine_worker.record_work(state)
        counted.append(engine_worker.run_eager_passes(state)[0].work)
    ops = counted[0].ops_by_module or {}
    assert ops["layers.*"]["aten::addmm"] == 2
    assert counted[0].flops == 2 * (2 * 4 * 4)  # two products of the one row of the last batch
    assert counted[0].host_calls is not None
    assert counted[0] == counted[1]


@pytest.mark.parametrize("of_library", [np.array, torch.tensor, lambda right: [np.array(row) for row in right]])
def test_arrays_of_numpy_and_torch_are_lists_of_numbers(of_library: Any) -> None:
    """What an engine returns of them needs no conversion."""
    texts = _measure(_Engine(of_library)).generation
    assert texts is not None
    assert decode(texts.tokens, "i").tolist() == [9, 10, 11, 7, 8, 9, 8, 9, 10]


def test_an_engine_that_computes_elsewhere_has_no_passes() -> None:
    """The reason is an answer, since an error would end the rank and its server."""
    state = _state(_Engine())
    _score(state)
    assert state.engine is not None
    state.engine.elsewhere = "far away"
    assert engine_worker.record_work(state) == "far away"
    assert engine_worker.account(state) == "far away"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda right: right[:-1], "generate returned 1 text for 2 prompts"),
        (
            lambda right: [right[0][:-1], *right[1:]],
            "generate returned 2 tokens for prompt 0 of its batch, 3 are",
        ),
        (lambda right: [[*right[0][:-1], 64], *right[1:]], "generate returned token 64: allowed"),
        (
            lambda right: [[*right[0][:-1], 1.5], *right[1:]],
            "a list with a list of token ids for each sequence",
        ),
        (lambda right: ["abc" for _ in right], "generate returned list: a list with a list of token ids"),
        (lambda right: right[0], "('int' object is not iterable)"),
        (
            lambda right: Texts(tokens=right, first_token_s=-1.0),
            "generate returned a time of -1.0 s: at least 0 is needed",
        ),
        (
            lambda right: Texts(tokens=right, loglikelihoods=[[1.0] * _NEW] * len(right)),
            "log-likelihood 1.0: a finite",
        ),
        (lambda right: Texts(tokens=right, loglikelihoods=["abc"] * len(right)), "a list of log-likelihoods"),  # type: ignore[list-item]
        (lambda _: None, "generate returned None: generate(token_ids, new_tokens) returns a list for each sequence"),
        (lambda right: Texts(tokens=right, step_s=[1.0]), "1 times of further tokens, 2 are needed"),
        (
            lambda right: Texts(tokens=right, loglikelihoods=[[0.0]] * len(right)),
            "log-likelihoods of [1, 1] tokens",
        ),
        (
            lambda right: Texts(tokens=right, loglikelihoods=[[math.nan] * _NEW] * len(right)),
            "generate returned the log-likelihood nan: a finite number of at most 0 is needed",
        ),
    ],
)
def test_a_wrong_answer_is_refused_in_the_first_batch(answer: Any, message: str) -> None:
    """The message has the number and what is needed."""
    with pytest.raises(ValueError, match=re.escape(message)):
        _measure(_Engine(answer))
