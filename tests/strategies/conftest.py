"""The bundled model under a strategy in this process, and the texts that others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from support import kv_cache_faults
from support.report_factory import known

# pytester removes modules that a run in this process has imported; modules imported before it stay the same.
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu.inference import tasks
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.worker import RankState, ReferenceTexts
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.result import CaseResult

_MP = "pytest_llmgpu.strategies.mp:LayerParallel"


@pytest.fixture
def load_here(bundled: ModelSource) -> Iterator[Callable[..., RankState]]:
    """`load_here(case, place, *datasets)`: load the bundled model; its graphs end with the test."""

    def load(case: Case, place: str, *datasets: Dataset) -> RankState:
        state = RankState(lambda _: None)
        worker.load(state, case, bundled, place)
        for items in datasets:
            worker.give(state, items.sha256, items.items, tasks.BUILT_IN[items.task])
        return state

    yield load
    torch.compiler.reset()


@pytest.fixture
def generated_by_mp(load_here: Callable[..., RankState]) -> Callable[..., tuple[CaseResult, ReferenceTexts]]:
    """`generated_by_mp(case, items)`: the result of a case under strategy mp, and its texts."""

    def generate(case: Case, items: Dataset) -> tuple[CaseResult, ReferenceTexts]:
        plain = msgspec.structs.replace(case, strategy="mp", backend="accelerate", devices=1)
        reply = kv_cache_faults.generate(load_here(plain, _MP, items), plain, None, None)
        result = kv_cache_faults.result(plain, reply)
        return result, ReferenceTexts(key=result.key, tokens=known(reply.generation).tokens)

    return generate
