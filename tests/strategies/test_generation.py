"""Generation under the strategies, with and without faults of the KV cache, on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import emulated_iok, kv_cache_faults
from support.report_factory import make_case

# pytester removes modules that a run in this process has imported; modules imported before it stay the same.
import pytest_llmgpu.session.session  # noqa: F401
from pytest_llmgpu import strategies
from pytest_llmgpu.analysis.generated_texts import check_texts
from pytest_llmgpu.inference import tasks
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.prompts import Prompts
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.worker import RankState, ReferenceTexts
from pytest_llmgpu.report import file
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.result import Launch

_TP = "support.rank_functions:UncompiledTensorParallel"
_MP = "pytest_llmgpu.strategies.mp:LayerParallel"
_BACKENDS = [
    "transformers",
    pytest.param(
        "deepspeed",
        marks=pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs the extra deepspeed"),
    ),
]


def _prompts() -> Dataset:
    """Return six prompts of unequal length."""
    whole = Prompts().load("bundled", rootdir=Path.cwd(), limit=6)
    cut = [
        msgspec.structs.replace(item, context=item.context[: 20 + 12 * place]) for place, item in enumerate(whole.items)
    ]
    return Dataset.of("custom", cut)


def _case(items: Any, **fields: Any) -> Case:
    return make_case(
        model="bundled",
        dtype="float32",
        device="cpu",
        devices=1,
        batch_size=4,
        dataset_sha256=items.sha256,
        workload="generate",
        prompt_tokens=64,
        new_tokens=6,
        **fields,
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", _BACKENDS)
def test_texts_of_two_ranks_are_those_of_mp(gloo_pair: RankGroup, bundled: ModelSource, backend: str) -> None:
    """Each rank keeps half of the heads; every fault of the cache fails the check, as it does in mp."""
    items = _prompts()
    plain = _case(items)
    split = msgspec.structs.replace(plain, strategy="tp", backend=backend, devices=2)
    state = RankState(lambda _: None)
    worker.load(state, plain, bundled, _MP)
    worker.give(state, items.sha256, items.items, tasks.BUILT_IN["prompts"])
    mp = kv_cache_faults.result(plain, kv_cache_faults.generate(state, plain, None, None))
    of_mp = mp.launches[0].generation
    assert of_mp is not None
    texts = ReferenceTexts(key=mp.key, tokens=of_mp.tokens)
    gloo_pair.ask(worker.load, split, bundled, _TP, phase="load", timeout_s=300)
    gloo_pair.ask(worker.give, items.sha256, items.items, tasks.BUILT_IN["prompts"], phase="load", timeout_s=300)

    def ask(fault: str | None) -> list[Launch]:
        return gloo_pair.ask(kv_cache_faults.generate, split, fault, texts, phase="forward", timeout_s=300)

    replies = ask(None)
    assert len({reply.generation.tokens for reply in replies if reply.generation is not None}) == 1
    sizes = [reply.generation.kv_cache_bytes for reply in replies if reply.generation is not None]
    assert sum(sizes) == of_mp.kv_cache_bytes == of_mp.kv_cache_formula_bytes
    decision = check_texts(kv_cache_faults.result(split, replies[0]), mp)
    assert decision is not None
    assert decision.check.ok is True
    assert decision.check.source == mp.id
    for fault in kv_cache_faults.FAULTS:
        broken = (
            kv_cache_faults.result(split, ask(fault)[0]),
            kv_cache_faults.result(plain, kv_cache_faults.generate(state, plain, fault, None)),
        )
        for one in broken:
            found = check_texts(one, mp)
            assert found is not None
            assert found.fault == "cache", (one.id, fault)


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_a_run_generates_under_both_strategies(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run scores and generates with one loaded model; the report has texts, times, traffic of a step and checks."""
    monkeypatch.setitem(strategies.BUILT_IN, "tp", _TP)
    pytester.makepyfile(
        """
        def test_score(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)

        def test_generate(llm, prompts, batch_size, measure):
            assert measure(llm, prompts, batch_size, new_tokens=5).tokens_per_s > 0
        """
    )
    cpu = ("--llmgpu-device=cpu", "--llmgpu-devices=2", "-p", "no:cacheprovider", "--strategy=tp,mp", "-v")
    result = pytester.runpytest_inprocess(
        *cpu, "--llmgpu-limit=6", "--llmgpu-batch-sizes=4", "--llmgpu-prompt-tokens=9"
    )
    assert result.ret == 0
    cases = file.load(pytester.path / ".llmgpu" / "last.json").cases
    assert [case.id for case in cases] == ["mp-bs4", "mp-generate-bs4", "tp-bs4", "tp-generate-bs4"]
    assert cases[0].launches[0].load_s == cases[1].launches[0].load_s, "the model was loaded once"
    mp, tp = cases[1], cases[3]
    for case in (mp, tp):
        (launch,) = case.launches
        assert launch.generation is not None
        assert launch.generation.new_tokens == [5] * 6
        assert max(launch.generation.prompt_tokens) == 9
        assert (len(launch.generation.first_token_s), len(launch.generation.step_s)) == (2, 2 * 4)
        assert case.accuracy_check is not None
        assert case.accuracy_check.ok is True
        assert case.token_p50_s is not None
    assert tp.comparison is not None
    assert (tp.comparison.reference, tp.comparison.items) == ("mp-generate-bs4", 6)
    assert tp.traffic is not None
    assert tp.traffic.step is not None
    ((all_reduce, all_gather), _) = tp.traffic.step
    # Two all-reduces for each of two layers and one for the embeddings, of four rows of 256 numbers.
    assert (all_reduce.calls, all_reduce.payload_bytes) == (5, 5 * 4 * 256 * 4)
    assert all_gather.calls == 1
    result.stdout.fnmatch_lines(
        ["Time per token / time to first token, 6 texts", "tp compared with mp*of 6 texts diverge*"]
    )


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs the extra deepspeed")
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_kernels_of_iok_generate_the_texts_of_mp(
    bundled: ModelSource, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """They keep keys and values in their workspace, at one position for all rows; each fault of that is found."""
    emulated_iok.reset_deepspeed(monkeypatch)
    items = _prompts()
    plain = msgspec.structs.replace(_case(items), batch_size=batch_size)
    injected = msgspec.structs.replace(plain, strategy="iok", backend="deepspeed")

    def load(case: Case, place: str) -> RankState:
        state = RankState(lambda _: None)
        worker.load(state, case, bundled, place)
        worker.give(state, items.sha256, items.items, tasks.BUILT_IN["prompts"])
        return state

    mp = kv_cache_faults.result(plain, kv_cache_faults.generate(load(plain, _MP), plain, None, None))
    of_mp = mp.launches[0].generation
    assert of_mp is not None
    state = load(injected, "support.emulated_iok:EmulatedInjection")
    reply = kv_cache_faults.generate(state, injected, None, ReferenceTexts(key=mp.key, tokens=of_mp.tokens))
    assert reply.generation is not None
    assert len(set(reply.generation.prompt_tokens)) > 2, "rows of unequal length"
    assert reply.generation.kv_cache_bytes == of_mp.kv_cache_bytes
    assert reply.generation.tokens == of_mp.tokens
    decision = check_texts(kv_cache_faults.result(injected, reply), mp)
    assert decision is not None
    assert decision.check.ok is True, decision.check.text
    for fault in kv_cache_faults.KERNEL_FAULTS:
        if fault in {"padding", "of other rows"} and batch_size == 1:
            continue  # One row has none.
        found = check_texts(
            kv_cache_faults.result(injected, kv_cache_faults.generate(state, injected, fault, None)), None
        )
        assert found is not None
        assert found.fault == "cache", fault
