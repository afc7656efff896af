"""Strategy compile on a CPU, on one device and on two."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import kv_cache_faults
from support import rank_functions as ranks
from support.report_factory import known, make_case

from pytest_llmgpu.inference import models, scoring, tasks
from pytest_llmgpu.inference.models import ModelFacts, ModelSource
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.worker import RankState, ReferenceTexts
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, typical_difference
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.strategies.compile import Compiled

_MP = "pytest_llmgpu.strategies.mp:LayerParallel"
_COMPILE = "pytest_llmgpu.strategies.compile:Compiled"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the imports of inductor


def _items(task: str) -> Dataset:
    """Return four items, the last of which has a short context."""
    whole = tasks.make(tasks.BUILT_IN[task]).load("bundled", rootdir=Path.cwd(), limit=4).items
    return Dataset.of("custom", [*whole[:3], msgspec.structs.replace(whole[3], context=whole[3].context[:9])])


def _case(items: Dataset, *, strategy: str = "compile", **fields: Any) -> Case:
    common: dict[str, Any] = {"model": "bundled", "dtype": "float32", "device": "cpu", "devices": 1, "batch_size": 2}
    if items.task == "prompts":
        common |= {"workload": "generate", "prompt_tokens": 7, "new_tokens": 6}
    backend = "accelerate" if strategy == "mp" else "transformers"
    return make_case(strategy=strategy, backend=backend, dataset_sha256=items.sha256, **common | fields)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler named g++")
def test_compiled_layers_compute_the_numbers_of_mp(
    load_here: Callable[..., RankState], generated_by_mp: Callable[..., tuple[CaseResult, ReferenceTexts]]
) -> None:
    """Inductor's code scores and generates like mp; what is only counted compiles nothing."""
    hellaswag, prompts = _items("hellaswag"), _items("prompts")
    states, loglikelihoods = list[RankState](), []
    for strategy, place in (("mp", _MP), ("compile", _COMPILE)):
        scoring_case = _case(hellaswag, strategy=strategy, batch_size=16)
        states.append(load_here(scoring_case, place, hellaswag, prompts))
        reply = worker.score(states[-1], scoring_case)
        assert (reply.execution_choice or "").startswith("eager" if strategy == "mp" else "compiled")
        assert (reply.compile_s is not None) == (strategy == "compile")
        assert (reply.warmup_s or 0) > 0
        loglikelihoods.append(decode(known(reply.accuracy).loglikelihoods))
    assert typical_difference(*loglikelihoods) < LOGLIKELIHOOD_TOLERANCES["float32"]
    case, state = _case(prompts), states[-1]
    mp, texts = generated_by_mp(case, prompts)
    check, _ = kv_cache_faults.check(
        kv_cache_faults.result(case, kv_cache_faults.generate(state, case, None, texts)), mp
    )
    assert check.ok is True, check.text
    assert ranks.graphs(state) == 2, "a prefill and a decode step"
    worker.record_work(state)
    worker.account(state)
    steps, prefills = worker.run_eager_passes(state)
    assert (prefills.work.flops or 0) > (steps.work.flops or 0) > 0
    assert ranks.graphs(state) == 2


def test_another_users_cache_is_refused(bundled: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch runs the code in it, and anybody can make a folder of that name first; a folder that is named is taken."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    Compiled().load(_case(_items("hellaswag")), bundled)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 1)
    with pytest.raises(ValueError, match=r"torchinductor_.* is of another user"):
        Compiled().load(_case(_items("hellaswag")), bundled)


def test_what_cannot_be_compiled_or_split_is_refused(bundled: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of tp are no remedy here."""
    with pytest.raises(ValueError, match=r"^--llmgpu-experts=eager: its loop"):
        Compiled().check(_case(_items("hellaswag")), msgspec.structs.replace(bundled, experts="eager"))
    monkeypatch.setattr(models, "facts", lambda _: ModelFacts(has_plan=False, expert_parallel=("all_reduce",)))
    with pytest.raises(ValueError, match=r": use --llmgpu-devices=1 or another strategy$"):
        Compiled().check(_case(_items("hellaswag"), devices=2), bundled)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring": scoring.HARNESS}, r"--llmgpu-scoring=harness: .* use --llmgpu-scoring=lean"),
        # Four heads are split over two devices and not over three; one device splits nothing.
        ({"devices": 3}, "strategy compile cannot split"),
        ({"devices": 2}, None),
        ({"devices": 1}, None),
    ],
)
def test_an_impossible_case_is_refused(bundled: ModelSource, fields: dict[str, Any], message: str | None) -> None:
    """A cache that grows is refused with the option and the allowed value; devices are those of tp, or one."""
    case = _case(_items("hellaswag"), **fields)
    assert Compiled().ranks(case.devices) == case.devices
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        Compiled().check(case, bundled)
