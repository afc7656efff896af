"""Generation under the strategies, with and without faults of the KV cache, on a CPU."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import emulated_iok, kv_cache_faults, rank_functions
from support.report_factory import known, make_case

from pytest_llmgpu.gate.answers import texts_row
from pytest_llmgpu.gate.policy import Policy, TextsRule
from pytest_llmgpu.inference import tasks
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.hellaswag import Prompts
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import registered, worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.worker import RankState, ReferenceTexts
from pytest_llmgpu.report import file
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import explained
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row

_TP = "support.rank_functions:UncompiledTensorParallel"
_PLACES = {
    "tp": _TP,
    "compile": "support.rank_functions:Traced",
    "iok": "support.emulated_iok:EmulatedInjection",
}
_NEEDS_DEEPSPEED = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs the extra deepspeed")


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
    check, fault = kv_cache_faults.check(result, reference)
    assert check.ok is (fault is None), check.text
    assert fault or reference is None or check.source == reference.id
    return fault


def _verdict(base: CaseResult, head: CaseResult) -> str:
    """Return the verdict of the gate on the texts; the cases may differ."""
    row = texts_row(base, head, Policy().texts)
    assert isinstance(row, Row), row
    return row.result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "backend", "devices", "batch_size", "prompt_tokens"),
    [
        ("tp", "transformers", 2, 4, 64),
        pytest.param("tp", "deepspeed", 2, 4, 64, marks=_NEEDS_DEEPSPEED),
        ("compile", "transformers", 1, 4, 64),
        ("compile", "transformers", 2, 1, 7),  # products of one row are fused
        pytest.param("iok", "deepspeed", 1, 1, 64, marks=_NEEDS_DEEPSPEED),
        pytest.param("iok", "deepspeed", 1, 4, 64, marks=_NEEDS_DEEPSPEED),
    ],
)
def test_texts_are_those_of_mp(
    gloo_pair: RankGroup,
    bundled: ModelSource,
    generated_by_mp: Callable[..., tuple[CaseResult, ReferenceTexts]],
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    backend: str,
    devices: int,
    batch_size: int,
    prompt_tokens: int,
) -> None:
    """A rank keeps its part of the heads; each fault of its cache fails the check, on one device without mp, too."""
    items = _prompts()
    sizes = {"batch_size": batch_size, "prompt_tokens": prompt_tokens}
    case = _case(items, strategy=strategy, backend=backend, devices=devices, **sizes)
    if strategy == "iok":
        emulated_iok.reset_deepspeed(monkeypatch)
    mp, texts = generated_by_mp(case, items)
    of_mp = known(mp.launches[0].generation)
    state = RankState(lambda _: None)

    def ask(fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        if devices == 1:
            return [fn(state, *arguments)]
        return gloo_pair.ask(fn, *arguments, phase="forward", timeout_s=300)

    ask(worker.load, case, bundled, _PLACES[strategy])
    ask(worker.give, items.sha256, items.items, tasks.BUILT_IN["prompts"])
    replies = ask(kv_cache_faults.generate, case, None, texts)
    assert len(set(replies[0].generation.prompt_tokens)) > 1, "rows of unequal length"
    assert {reply.generation.tokens for reply in replies} == {of_mp.tokens}
    held_bytes = sum(reply.generation.kv_cache_bytes for reply in replies)
    assert held_bytes == of_mp.kv_cache_bytes == of_mp.kv_cache_formula_bytes
    assert _fault(kv_cache_faults.result(case, replies[0]), mp) is None
    assert _verdict(mp, kv_cache_faults.result(case, replies[0])) == "OK"
    if strategy == "compile" and prompt_tokens == 7:
        assert ask(rank_functions.graphs) == [2, 2], "a prefill and a decode step, as on one device"
    faults = {*(kv_cache_faults.KERNEL_FAULTS if strategy == "iok" else kv_cache_faults.FAULTS)}
    for fault in sorted(faults - ({"padding", "of other rows"} if batch_size == 1 else set())):
        reference = (texts, mp) if devices > 1 else (None, None)
        broken = kv_cache_faults.result(case, ask(kv_cache_faults.generate, case, fault, reference[0])[0])
        assert _fault(broken, reference[1]) == "cache", fault


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_a_run_generates_under_both_strategies(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run scores and generates with one loaded model; the report has texts, times, traffic of a step and checks."""
    monkeypatch.setitem(registered.BUILT_IN, "tp", _TP)
    pytester.makepyfile(
        """
        def test_score(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)

        def test_generate(llm, prompts, batch_size, measure):
            assert measure(llm, prompts, batch_size, new_tokens=5).tokens_per_s > 0
        """
    )
    cpu = ("--llmgpu-device=cpu", "--llmgpu-devices=2", "-p", "no:cacheprovider", "--strategy=tp,mp", "-v")
    sizes = ("--llmgpu-limit=6", "--llmgpu-batch-sizes=4", "--llmgpu-prompt-tokens=9")
    result = pytester.runpytest_inprocess(*cpu, *sizes)
    assert result.ret == 0
    cases = file.load(pytester.path / ".llmgpu" / "last.json").cases
    assert [case.id for case in cases] == ["mp-bs4", "mp-generate-bs4", "tp-bs4", "tp-generate-bs4"]
    assert cases[0].launches[0].load_s == cases[1].launches[0].load_s, "the model was loaded once"
    for case in cases[1::2]:
        generation = known(case.launches[0].generation)
        assert (generation.new_tokens, max(generation.prompt_tokens)) == ([5] * 6, 9)
        assert (len(generation.first_token_s), len(generation.step_s)) == (2, 2 * 4)
        assert known(case.accuracy_check).ok is True
        assert case.token_p50_s is not None
    comparison = known(cases[3].comparison)
    assert (comparison.reference, comparison.items) == ("mp-generate-bs4", 6)
    ((all_reduce, all_gather), _) = known(known(cases[3].traffic).step)
    # Two all-reduces for each of two layers and one for the embeddings, of four rows of 256 numbers.
    assert (all_reduce.calls, all_reduce.payload_bytes, all_gather.calls) == (5, 5 * 4 * 256 * 4, 1)
    result.stdout.fnmatch_lines(
        ["Time to first token / time per token*, 6 texts", "tp compared with mp*6 texts diverge*"]
    )


def _other_rope_base(module: Any) -> None:
    """Rotate queries and keys by the base 500,000 in place of 10,000."""
    if hasattr(module, "inv_freq"):
        count = len(module.inv_freq)
        module.inv_freq.copy_(torch.tensor([500_000.0 ** (-number / count) for number in range(count)]))


def _other_epsilon(module: Any) -> None:
    """Normalize with an epsilon of 1e-5 in place of 1e-6."""
    if hasattr(module, "variance_epsilon"):
        module.variance_epsilon = 1e-5


def _other_scale(module: Any) -> None:
    """Scale the products of queries and keys by 10 % more."""
    if hasattr(module, "scaling"):
        module.scaling *= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("fault", [_other_rope_base, _other_epsilon, _other_scale])
def test_a_model_that_is_wrong_alike_in_prefill_and_decode_is_a_regression(
    load_here: Callable[..., RankState], generated_by_mp: Callable[..., Any], fault: Callable[[Any], None]
) -> None:
    """Its own check passes, since its prefill has the same fault. Another batch size of the right model is OK."""
    items = _prompts()
    case = _case(items, batch_size=4, prompt_tokens=64)
    mp, _ = generated_by_mp(case, items)
    other_size, _ = generated_by_mp(msgspec.structs.replace(case, batch_size=1), items)
    assert _verdict(mp, other_size) == "OK"
    state = load_here(mp.case, "pytest_llmgpu.strategies.mp:LayerParallel", items)
    state.loaded.model.apply(fault)
    wrong = kv_cache_faults.result(mp.case, kv_cache_faults.generate(state, mp.case, None, None))
    assert _fault(wrong, None) is None
    assert _verdict(mp, wrong) == "REGRESSED"


_KEPT = Path(__file__).parents[2] / "benchmarks" / "reports"


@pytest.mark.skipif(not _KEPT.is_dir(), reason="the kept reports lie in a checkout only")
@pytest.mark.parametrize("name", ["generate-llama-7b-1xH200", "generate-llama-13b-2xH200"])
def test_rounding_of_real_texts_is_far_below_the_threshold(name: str) -> None:
    """Texts in float16 under mp, compile and tp at batch sizes 1 and 64 diverge, and differ by less than half of it."""
    completed = [result for result in file.load(_KEPT / f"{name}.json.gz").cases if result.outcome == "completed"]
    assert len(completed) > 1
    for base, head in itertools.permutations(completed, 2):
        row = texts_row(base, head, TextsRule(difference=explained("float16") / 2))
        assert isinstance(row, Row)
        assert row.verdict == "CHANGED"
