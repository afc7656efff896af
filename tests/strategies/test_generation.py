"""Generation under the strategies, with and without faults of the KV cache, on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import emulated_iok, kv_cache_faults, rank_functions
from support.report_factory import make_case

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
from pytest_llmgpu.report.result import CaseResult

_TP = "support.rank_functions:UncompiledTensorParallel"
_COMPILE = "support.rank_functions:Traced"
_IOK = "support.emulated_iok:EmulatedInjection"
_NEEDS_DEEPSPEED = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs the extra deepspeed")


OfMp = Callable[..., tuple[CaseResult, ReferenceTexts]]


def _prompts() -> Dataset:
    """Return six prompts of unequal length."""
    whole = Prompts().load("bundled", rootdir=Path.cwd(), limit=6).items
    lengths = range(9, 100, 12)
    return Dataset.of(
        "custom",
        [msgspec.structs.replace(item, context=item.context[:end]) for item, end in zip(whole, lengths, strict=False)],
    )


def _case(items: Dataset, **fields: Any) -> Case:
    bundled = {"model": "bundled", "dtype": "float32", "device": "cpu", "dataset_sha256": items.sha256}
    return make_case(**bundled, workload="generate", new_tokens=6, **fields)


def _fault(result: CaseResult, reference: CaseResult | None) -> str | None:
    """Return the fault that the check of the texts finds; None if they are those of the reference."""
    decision = check_texts(result, reference)
    assert decision is not None
    assert decision.check.ok is (decision.fault is None), decision.check.text
    assert decision.fault or reference is None or decision.check.source == reference.id
    return decision.fault


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "tp", "batch_size": 4, "prompt_tokens": 64},
        pytest.param(
            {"strategy": "tp", "backend": "deepspeed", "batch_size": 4, "prompt_tokens": 64}, marks=_NEEDS_DEEPSPEED
        ),
        # Products of one row are fused.
        {"strategy": "compile", "batch_size": 1, "prompt_tokens": 7},
    ],
    ids=["tp", "tp deepspeed", "compile"],
)
def test_texts_of_two_ranks_are_those_of_mp(
    gloo_pair: RankGroup, bundled: ModelSource, generated_by_mp: OfMp, fields: dict[str, Any]
) -> None:
    """Each rank keeps half of the heads; every fault of the cache fails the check; all-reduces are part of graphs."""
    items = _prompts()
    case = _case(items, devices=2, **{"backend": "transformers"} | fields)
    mp, texts = generated_by_mp(case, items)
    of_mp = mp.launches[0].generation
    assert of_mp is not None

    def ask(fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        return gloo_pair.ask(fn, *arguments, phase="forward", timeout_s=300)

    ask(worker.load, case, bundled, _COMPILE if case.strategy == "compile" else _TP)
    ask(worker.give, items.sha256, items.items, tasks.BUILT_IN["prompts"])
    replies = ask(kv_cache_faults.generate, case, None, texts)
    assert len({reply.generation.tokens for reply in replies}) == 1
    held_bytes = sum(reply.generation.kv_cache_bytes for reply in replies)
    assert held_bytes == of_mp.kv_cache_bytes == of_mp.kv_cache_formula_bytes
    assert _fault(kv_cache_faults.result(case, replies[0]), mp) is None
    if case.strategy == "compile":
        assert ask(rank_functions.graphs) == [2, 2], "a prefill and a decode step, as on one device"
        return
    for fault in kv_cache_faults.FAULTS:
        broken = kv_cache_faults.result(case, ask(kv_cache_faults.generate, case, fault, texts)[0])
        assert _fault(broken, mp) == "cache", fault


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
    for case in cases[1::2]:
        generation = case.launches[0].generation
        assert generation is not None
        assert (generation.new_tokens, max(generation.prompt_tokens)) == ([5] * 6, 9)
        assert (len(generation.first_token_s), len(generation.step_s)) == (2, 2 * 4)
        assert case.accuracy_check is not None
        assert case.accuracy_check.ok is True
        assert case.token_p50_s is not None
    tp = cases[3]
    assert tp.comparison is not None
    assert (tp.comparison.reference, tp.comparison.items) == ("mp-generate-bs4", 6)
    assert tp.traffic is not None
    assert tp.traffic.step is not None
    ((all_reduce, all_gather), _) = tp.traffic.step
    # Two all-reduces for each of two layers and one for the embeddings, of four rows of 256 numbers.
    assert (all_reduce.calls, all_reduce.payload_bytes, all_gather.calls) == (5, 5 * 4 * 256 * 4, 1)
    result.stdout.fnmatch_lines(
        ["Time per token / time to first token, 6 texts", "tp compared with mp*of 6 texts diverge*"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "batch_size"),
    [
        pytest.param("iok", 1, marks=_NEEDS_DEEPSPEED),
        pytest.param("iok", 4, marks=_NEEDS_DEEPSPEED),
        ("compile", 4),
    ],
)
def test_texts_of_one_device_are_those_of_mp(
    load_here: Callable[..., RankState],
    generated_by_mp: OfMp,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    batch_size: int,
) -> None:
    """Kernels of iok keep keys and values at one position for all rows; each fault of a cache is found without mp."""
    items = _prompts()
    backend, place, faults = "transformers", _COMPILE, {*kv_cache_faults.FAULTS}
    if strategy == "iok":
        emulated_iok.reset_deepspeed(monkeypatch)
        backend, place, faults = "deepspeed", _IOK, {*kv_cache_faults.KERNEL_FAULTS}
    if batch_size == 1:
        faults -= {"padding", "of other rows"}
    case = _case(items, strategy=strategy, backend=backend, devices=1, batch_size=batch_size, prompt_tokens=64)
    mp, texts = generated_by_mp(case, items)
    of_mp = mp.launches[0].generation
    state = load_here(case, place, items)
    reply = kv_cache_faults.generate(state, case, None, texts)
    assert of_mp is not None
    assert reply.generation is not None
    assert len(set(reply.generation.prompt_tokens)) > 2, "rows of unequal length"
    assert reply.generation.kv_cache_bytes == of_mp.kv_cache_bytes
    assert reply.generation.tokens == of_mp.tokens
    assert _fault(kv_cache_faults.result(case, reply), mp) is None
    for fault in sorted(faults):
        broken = kv_cache_faults.result(case, kv_cache_faults.generate(state, case, fault, None))
        assert _fault(broken, None) == "cache", fault
