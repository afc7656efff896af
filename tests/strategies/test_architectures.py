"""Tiny random models of other architectures, scored and continued under every strategy, on a CPU."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import kv_cache_faults, tiny_model
from support.report_factory import known, make_case, make_report, make_result
from support.tiny_model import ARCHITECTURES

from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.inference import tasks
from pytest_llmgpu.inference.models import EXPERTS, ModelSource
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.registered import ModelHook
from pytest_llmgpu.ranks.worker import RankState, ReferenceTexts
from pytest_llmgpu.recording import work
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, typical_difference
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.strategies.protocol import Loaded
from pytest_llmgpu.strategies.tp import TensorParallel

_PLACES = {
    "mp": "pytest_llmgpu.strategies.mp:LayerParallel",
    "tp": "support.rank_functions:UncompiledTensorParallel",
    "compile": "support.rank_functions:Traced",
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _here(state: RankState, fn: Callable[..., Any], *arguments: Any) -> Any:
    return fn(state, *arguments)


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path, bundled: ModelSource) -> Iterator[ModelSource]:
    """The source of a model of two layers with random weights."""
    fields = tiny_model.architecture(request.param)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    yield tiny_model.source(
        fields, tmp_path, load_format="dummy", tokenizer_directory=bundled.tokenizer_directory, name=request.param
    )
    torch.compiler.reset()


def _items(task: str) -> Dataset:
    """Return four items with contexts of unequal length."""
    items = tasks.make(tasks.BUILT_IN[task]).load("bundled", rootdir=Path.cwd(), limit=4).items
    return Dataset.of(
        "custom", [msgspec.structs.replace(one, context=one.context[: 9 + 12 * n]) for n, one in enumerate(items)]
    )


Ask = Callable[..., Any]
"""Calls a command of a rank with its arguments."""


def _cases(source: ModelSource, strategy: str, devices: int) -> tuple[Case, Case]:
    """Return a case that scores and one that generates; `tp all_reduce` has whole experts."""
    name, _, spread = strategy.partition(" ")
    common: dict[str, Any] = {"model": source.name, "load_format": "dummy", "dtype": "float32", "device": "cpu"}
    common |= {"strategy": name, "devices": devices, "batch_size": 2}
    common |= {"backend": "transformers", "strategy_options": {"expert_parallel": spread} if spread else {}}
    lengths = {"workload": "generate", "prompt_tokens": 20, "new_tokens": 6, "batch_size": 4}
    hashes = [_items(task).sha256 for task in ("hellaswag", "prompts")]
    return make_case(**common, dataset_sha256=hashes[0]), make_case(**common | lengths, dataset_sha256=hashes[1])


def _load(ask: Ask, source: ModelSource, case: Case) -> None:
    ask(worker.load, case, source, _PLACES[case.strategy])
    for items in map(_items, ("hellaswag", "prompts")):
        ask(worker.give, items.sha256, items.items, tasks.BUILT_IN[items.task])


def _measured(
    ask: Ask, source: ModelSource, strategy: str, devices: int, mp: CaseResult | None = None
) -> tuple[Launch, CaseResult]:
    """Return the launch of a case that scores, and the result of one that generates and whose texts are right."""
    scored, generated = _cases(source, strategy, devices)
    _load(ask, source, scored)
    launch = ask(worker.score, scored)
    texts = None if mp is None else ReferenceTexts(key=mp.key, tokens=known(mp.launches[0].generation).tokens)
    result = kv_cache_faults.result(generated, ask(kv_cache_faults.generate, generated, None, texts))
    check, _ = kv_cache_faults.check(result, mp)
    assert check.ok is True, check.text
    return launch, result


def _of_transformers(state: RankState, case: Case) -> list[float]:
    """Return the log-likelihood of each ending by the forward of transformers, one sequence at a time."""
    state.case, found = case, []
    for request in worker.encoded(state).requests:
        ids_1S = torch.tensor([request.tokens])
        with torch.inference_mode():
            values_SV = state.loaded.model(input_ids=ids_1S).logits[0].log_softmax(-1)
        found.append(float(values_SV[:-1].gather(-1, ids_1S[0, 1:, None])[-request.ending :].sum()))
    return found


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Ask:
    """Ask two ranks, and return the answer of the first."""
    group: RankGroup = request.getfixturevalue("gloo_pair")
    return lambda fn, *arguments: group.ask(fn, *arguments, phase="forward", timeout_s=300)[0]


@pytest.mark.parametrize("source", ARCHITECTURES, indirect=True)
def test_an_architecture_scores_and_generates(source: ModelSource) -> None:
    """Log-likelihoods are those of `model.forward`, and decode steps equal a forward without a cache."""
    state = RankState(lambda _: None)
    scored, generated = _measured(partial(_here, state), source, "mp", 1)
    expected = _of_transformers(state, _cases(source, "mp", 1)[0])
    assert decode(known(scored.accuracy).loglikelihoods) == pytest.approx(expected, rel=1e-5)
    texts = known(generated.launches[0].generation)
    assert texts.kv_cache_bytes == texts.kv_cache_formula_bytes


@pytest.mark.slow
@pytest.mark.parametrize("source", ARCHITECTURES, indirect=True)
def test_strategies_compute_an_architecture_alike(source: ModelSource, pair: Ask) -> None:
    """Both workloads equal those of mp under tp, with parts of experts and with whole ones, and under compile.

    gpt-oss has no plan of tp for its layers in transformers, and a plan for whole experts.
    """
    state = RankState(lambda _: None)
    here = partial(_here, state)
    scored, generated = _measured(here, source, "mp", 1)
    assert all(batch.lines is None for batch in state.plan.batches)
    strategies = ["tp", "compile"]
    if any(source.config.get(name) for name in EXPERTS):
        strategies.append("tp all_reduce")
    for strategy in strategies:
        case, _ = _cases(source, strategy, 2)
        if (strategy, source.name) == ("tp", "gpt_oss"):
            with pytest.raises(ValueError, match=r"no tensor-parallel plan .*: use --llmgpu-tp-expert-parallel=all_re"):
                TensorParallel().check(case, source)
            continue
        if case.strategy == "tp":
            TensorParallel().check(case, source)
        ask, devices = (pair, 2) if case.strategy == "tp" else (here, 1)
        other, result = _measured(ask, source, strategy, devices, generated)
        found, expected = (decode(known(launch.accuracy).loglikelihoods) for launch in (other, scored))
        assert typical_difference(found, expected) < LOGLIKELIHOOD_TOLERANCES["float32"]
        assert known(result.launches[0].generation).tokens == known(generated.launches[0].generation).tokens
        if strategy == "compile":
            shared = [batch.lines is not None for batch in state.plan.batches]
            assert shared == [source.name != "qwen3_next"], "prompts share a line unless a layer has a state"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["mixtral"], indirect=True)
def test_tokens_are_sent_to_the_ranks_of_their_experts(source: ModelSource, pair: Ask) -> None:
    """Answers are those of mp; bytes follow from its routing: each layer sends counts, hidden states, and outputs."""
    state = RankState(lambda _: None)
    scored, generated = _measured(partial(_here, state), source, "mp", 1)
    other, _ = _measured(pair, source, "tp all_to_all", 2, generated)
    assert decode(known(other.accuracy).loglikelihoods) == pytest.approx(decode(known(scored.accuracy).loglikelihoods))
    case, _ = _cases(source, "tp all_to_all", 2)
    pair(worker.score, case)
    found, _ = pair(worker.account)
    routes: list[torch.Tensor] = []
    for module in state.loaded.model.modules():
        if type(module).__name__ == "MixtralExperts":
            module.register_forward_pre_hook(lambda _, arguments: routes.append(arguments[1]))
    worker.score(state, case)
    experts, row_bytes, count_bytes = source.config["num_local_experts"], 4 * source.config["hidden_size"], 8
    payload = wire = 0
    measured = routes[-2 * len(state.plan.batches) :]  # of two layers; those before are of the warm-up
    for chosen_TK in measured:
        own, others = (part // (experts // 2) for part in chosen_TK.tensor_split([-(-len(chosen_TK) // 2)]))
        sent, away, returned = own.numel(), int(own.sum()), int((others == 0).sum())
        payload += experts * count_bytes + (sent + (sent - away + returned)) * row_bytes
        wire += experts * count_bytes // 2 + (away + returned) * row_bytes
    (all_to_all,) = [one for one in found if one.collective == "all_to_all"]
    assert (all_to_all.calls, all_to_all.payload_bytes, all_to_all.wire_bytes) == (3 * len(measured), payload, wire)
    worker.record_work(state)
    pair(worker.record_work)
    (alone,), (of_rank,) = worker.run_eager_passes(state), pair(worker.run_eager_passes)
    assert known(alone.work.routing) == of_rank.work.routing


def loop_over_experts(loaded: Loaded) -> None:
    """Run the experts in a loop."""
    loaded.model.set_experts_implementation("eager")  # type: ignore[operator]


def attend_eagerly(loaded: Loaded) -> None:
    """Compute attention by products and a softmax."""
    loaded.model.set_attn_implementation("eager")  # type: ignore[operator]


def mask_in_each_layer(loaded: Loaded) -> None:
    """Build the causal mask again in each layer."""

    def build(_module: object, _arguments: object, named: dict[str, Any]) -> dict[str, Any]:
        length = named["hidden_states"].shape[1]
        return named | {"attention_mask": torch.ones(length, length).tril().bool()[None, None]}

    for layer in loaded.model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.register_forward_pre_hook(lambda *given: ((), build(*given)), with_kwargs=True)


@pytest.mark.parametrize("source", ["qwen3_moe"], indirect=True)
def test_a_change_of_a_choice_is_found_and_named(source: ModelSource) -> None:
    """A hook of the test suite changes the experts, the attention, or where the mask is built."""
    case, _ = _cases(source, "mp", 1)
    items = _items("hellaswag")

    def measured(*hooks: Callable[..., None]) -> Report:
        state = RankState(lambda _: None)
        worker.load(state, case, source, _PLACES["mp"], [ModelHook.of(hook, ["loaded"]) for hook in hooks])
        worker.give(state, items.sha256, items.items, tasks.BUILT_IN["hellaswag"])
        launch = worker.score(state, case)
        worker.record_work(state)
        launch.work = work.join(worker.run_eager_passes(state), {}, worker.model_size(state) or "")
        return make_report(
            [msgspec.structs.replace(make_result(), id=case.id, key=case.key, case=case, launches=[launch])]
        )

    def program(*hooks: Callable[..., None]) -> Row:
        rows = judge(base, measured(*hooks), Policy(), today=datetime.date(2026, 6, 1)).rows
        return next(row for row in rows if row.metric == "program")

    base = measured()
    assert program().result == "OK"
    experts, attention, mask = map(program, (loop_over_experts, attend_eagerly, mask_in_each_layer))
    assert {row.result for row in (experts, attention, mask)} == {"CHANGED"}
    assert experts.reason.startswith("experts: grouped_mm (_grouped_mm) -> eager (mm). The program changed")
    assert attention.reason.startswith("attention: sdpa (flash) -> eager. The program changed")
    changes = {change.name: change for change in known(mask.cause).ops}
    assert (changes["aten::tril"].module, changes["aten::tril"].per_layer) == ("layers.*.self_attn", 1)
