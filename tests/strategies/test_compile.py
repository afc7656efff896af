"""Strategy compile on a CPU, on one device and on two."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import kv_cache_faults
from support import rank_functions as ranks
from support.report_factory import make_case

from pytest_llmgpu.analysis.generated_texts import check_texts
from pytest_llmgpu.inference import scoring, tasks
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.worker import RankState, ReferenceTexts
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, typical_difference
from pytest_llmgpu.strategies.compile import Compiled

_MP = "pytest_llmgpu.strategies.mp:LayerParallel"
_COMPILE = "pytest_llmgpu.strategies.compile:Compiled"
_TRACED = "support.rank_functions:Traced"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the imports of inductor


def _items(task: str) -> Dataset:
    """Return four items, the last of which has a short context."""
    whole = tasks.make(tasks.BUILT_IN[task]).load("bundled", rootdir=Path.cwd(), limit=4).items
    return Dataset.of("custom", [*whole[:3], msgspec.structs.replace(whole[3], context=whole[3].context[:9])])


def _case(items: Dataset, *, strategy: str = "compile", batch_size: int = 2, **fields: Any) -> Case:
    common: dict[str, Any] = {"model": "bundled", "dtype": "float32", "device": "cpu", "dataset_sha256": items.sha256}
    if items.task == "prompts":
        common |= {"workload": "generate", "prompt_tokens": 7, "new_tokens": 6}
    backend = "accelerate" if strategy == "mp" else "transformers"
    return make_case(strategy=strategy, backend=backend, batch_size=batch_size, **{"devices": 1, **common, **fields})


@pytest.fixture
def loaded(bundled: ModelSource) -> Iterator[Callable[..., RankState]]:
    """Load the bundled model under a strategy in this process; its graphs end with the test."""

    def load(case: Case, place: str, *datasets: Dataset) -> RankState:
        state = RankState(lambda _: None)
        worker.load(state, case, bundled, place)
        for items in datasets:
            worker.give(state, items.sha256, items.items, tasks.BUILT_IN[items.task])
        return state

    yield load
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler named g++")
def test_compiled_layers_compute_the_numbers_of_mp(loaded: Callable[..., RankState]) -> None:
    """Inductor's code scores and generates like mp; what is only counted compiles nothing."""
    hellaswag, prompts = _items("hellaswag"), _items("prompts")
    states = {
        name: loaded(_case(hellaswag, strategy=name), place, hellaswag, prompts)
        for name, place in (("mp", _MP), ("compile", _COMPILE))
    }
    scored = {
        name: worker.score(state, _case(hellaswag, strategy=name, batch_size=16)) for name, state in states.items()
    }
    for name, reply in scored.items():
        assert (reply.execution_choice or "").startswith("eager" if name == "mp" else "compiled")
        assert (reply.compile_s is not None) == (name == "compile")
        assert (reply.warmup_s or 0) > 0
        assert reply.accuracy is not None
    found, expected = (decode(scored[name].accuracy.loglikelihoods) for name in ("compile", "mp"))  # type: ignore[union-attr]  # asserted above
    assert typical_difference(found, expected) < LOGLIKELIHOOD_TOLERANCES["float32"]
    of_mp = kv_cache_faults.result(
        _case(prompts, strategy="mp"), kv_cache_faults.generate(states["mp"], _case(prompts, strategy="mp"), None, None)
    )
    assert of_mp.launches[0].generation is not None
    texts = ReferenceTexts(key=of_mp.key, tokens=of_mp.launches[0].generation.tokens)
    state, case = states["compile"], _case(prompts)
    decision = check_texts(kv_cache_faults.result(case, kv_cache_faults.generate(state, case, None, texts)), of_mp)
    assert decision is not None
    assert decision.check.ok is True, decision.check.text
    assert state.loaded.compiled is not None
    assert ranks.graphs(state) == 2, "a prefill and a decode step"
    worker.record_work(state)
    worker.account(state)
    steps, prefills = worker.run_eager_passes(state)
    assert (steps.work.flops or 0) > 0
    assert (prefills.work.flops or 0) > (steps.work.flops or 0)
    assert ranks.graphs(state) == 2


@pytest.mark.slow
def test_every_fault_of_the_cache_is_found(loaded: Callable[..., RankState]) -> None:
    """The compiled layers read and write the KV cache that the faults are injected into."""
    prompts = _items("prompts")
    case = _case(prompts)
    state = loaded(case, _TRACED, prompts)
    for fault in kv_cache_faults.FAULTS:
        found = check_texts(kv_cache_faults.result(case, kv_cache_faults.generate(state, case, fault, None)), None)
        assert found is not None
        assert found.fault == "cache", fault


@pytest.mark.slow
def test_on_two_devices_the_layers_are_those_of_tp(
    gloo_pair: RankGroup, loaded: Callable[..., RankState], bundled: ModelSource
) -> None:
    """All-reduces are part of the graphs, products of one row are fused; a rank has as many graphs as one device."""
    prompts = _items("prompts")
    plain = _case(prompts, strategy="mp", batch_size=1)
    mp = kv_cache_faults.result(plain, kv_cache_faults.generate(loaded(plain, _MP, prompts), plain, None, None))
    assert mp.launches[0].generation is not None
    texts = ReferenceTexts(key=mp.key, tokens=mp.launches[0].generation.tokens)
    case = _case(prompts, devices=2, batch_size=1)

    def ask(fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        return gloo_pair.ask(fn, *arguments, phase="forward", timeout_s=300)

    ask(worker.load, case, bundled, _TRACED)
    ask(worker.give, prompts.sha256, prompts.items, tasks.BUILT_IN["prompts"])
    replies = ask(kv_cache_faults.generate, case, None, texts)
    found = check_texts(kv_cache_faults.result(case, replies[0]), mp)
    assert found is not None
    assert found.check.ok is True, found.check.text
    assert ask(ranks.graphs) == [2, 2], "a prefill and a decode step"


def test_a_cache_folder_of_another_user_is_refused(
    bundled: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch runs the code in it, and anybody can make a folder of that name first; a folder that is named is taken."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    Compiled().load(_case(_items("hellaswag")), bundled)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 1)
    with pytest.raises(ValueError, match=r"torchinductor_.* is of another user"):
        Compiled().load(_case(_items("hellaswag")), bundled)


def test_a_cache_that_grows_is_refused(bundled: ModelSource) -> None:
    """The line names the option and the allowed value."""
    case = _case(_items("hellaswag"), scoring=scoring.HARNESS)
    with pytest.raises(ValueError, match=r"--llmgpu-scoring=harness: .* use --llmgpu-scoring=lean"):
        Compiled().check(case, bundled)


@pytest.mark.parametrize(("devices", "refused"), [(1, False), (2, False), (3, True)])
def test_devices_are_those_of_tp_and_a_single_one(bundled: ModelSource, devices: int, refused: bool) -> None:
    """Four heads are split over two devices and not over three; one device splits nothing."""
    case = _case(_items("hellaswag"), devices=devices)
    assert Compiled().ranks(devices) == devices
    if not refused:
        Compiled().check(case, bundled)
        return
    with pytest.raises(ValueError, match="strategy compile cannot split"):
        Compiled().check(case, bundled)
