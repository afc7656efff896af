"""Generation on GPUs: one start of ranks per strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import msgspec
import pytest
import torch
from support import gpu, kv_cache_faults, tiny_model
from support.gpu import Ranks
from support.report_factory import known, make_case
from support.request_factory import make_prompts
from support.texts import generated
from transformers import AutoConfig, AutoModelForCausalLM

from pytest_llmgpu.inference import compiled_layers, models
from pytest_llmgpu.inference.batching import plan
from pytest_llmgpu.inference.compiled_layers import CompiledLayers
from pytest_llmgpu.inference.generation import Generator
from pytest_llmgpu.inference.tasks.hellaswag import Prompts
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks.worker import ReferenceTexts
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, typical_difference
from pytest_llmgpu.report.result import CaseResult, Generation, Launch

pytestmark = gpu.ONE_GPU

_PROMPTS, _BATCH_SIZE, _NEW = 24, 8, 32
_STRATEGIES = [
    pytest.param("mp", 1, "accelerate", id="mp on one GPU"),
    pytest.param("compile", 1, "transformers", id="compile on one GPU"),
    pytest.param("iok", 1, "deepspeed", id="iok on one GPU"),
    pytest.param("mp", 2, "accelerate", id="mp on two GPUs", marks=gpu.TWO_GPUS),
    pytest.param("tp", 2, "transformers", id="tp", marks=gpu.TWO_GPUS),
    pytest.param("tp", 2, "deepspeed", id="tp by DeepSpeed", marks=gpu.TWO_GPUS),
    pytest.param("compile", 2, "transformers", id="compile on two GPUs", marks=gpu.TWO_GPUS),
    pytest.param("iok", 2, "deepspeed", id="iok on two GPUs", marks=gpu.TWO_GPUS),
]


class _Generated(NamedTuple):
    """The results of a strategy by `off` and `on` for CUDA graphs, each with the launch of rank 0."""

    results: dict[str, CaseResult]
    launches: dict[str, Launch]
    again: CaseResult
    """With CUDA graphs, once more."""
    broken: dict[str, CaseResult]
    """With CUDA graphs, by the fault that was injected."""


def _generate(
    ranks: Ranks, cuda_graphs: str, fault: str | None = None, mp: CaseResult | None = None
) -> tuple[CaseResult, Launch]:
    """Return the case as a result of rank 0, whose tokens every rank has chosen."""
    of_mp = None if mp is None else mp.launches[0].generation
    texts = None if mp is None or of_mp is None else ReferenceTexts(key=mp.key, tokens=of_mp.tokens)
    case = msgspec.structs.replace(ranks.case, cuda_graphs=cuda_graphs)
    launches: list[Launch] = ranks.ask(kv_cache_faults.generate, case, fault, texts)
    assert len({launch.generation.tokens for launch in launches if launch.generation is not None}) == 1
    return kv_cache_faults.result(case, launches[0]), launches[0]


def _generated(folder: Path, strategy: str, devices: int, backend: str, mp: CaseResult | None) -> _Generated:
    """Start the ranks of a strategy once, and generate all that the tests compare."""
    whole = Prompts().load("bundled", rootdir=folder, limit=_PROMPTS)
    cut = [msgspec.structs.replace(item, context=item.context[: 40 + 8 * at]) for at, item in enumerate(whole.items)]
    items = Dataset.of("custom", cut)  # of unequal length
    source = models.resolve(str(folder / "wide"), load_format="dummy", texts=[], rootdir=folder)
    case = make_case(
        strategy=strategy,
        backend=backend,
        model=source.name,
        load_format="dummy",
        devices=devices,
        batch_size=_BATCH_SIZE,
        dataset_sha256=items.sha256,
        workload="generate",
        prompt_tokens=96,
        new_tokens=_NEW,
    )
    faults = kv_cache_faults.KERNEL_FAULTS if strategy == "iok" else kv_cache_faults.FAULTS
    with gpu.started(folder / f"{strategy}-{devices}-{backend}", case, source, items) as ranks:
        pairs = {cuda_graphs: _generate(ranks, cuda_graphs, mp=mp) for cuda_graphs in ("off", "on")}
        return _Generated(
            results={cuda_graphs: result for cuda_graphs, (result, _) in pairs.items()},
            launches={cuda_graphs: launch for cuda_graphs, (_, launch) in pairs.items()},
            again=_generate(ranks, "on")[0],
            broken={fault: _generate(ranks, "on", fault)[0] for fault in faults},
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model and of the logs."""
    made = tmp_path_factory.mktemp("generation")
    gpu.write_narrow_model(made / "wide", list(Prompts().load("bundled", rootdir=made, limit=100).texts()))
    return made


@pytest.fixture(scope="module")
def mp(folder: Path) -> _Generated:
    """The texts of mp on one GPU."""
    return _generated(folder, "mp", 1, "accelerate", None)


@pytest.mark.parametrize(("strategy", "devices", "backend"), _STRATEGIES)
def test_texts_are_right_eagerly_and_as_cuda_graphs(
    folder: Path, mp: _Generated, strategy: str, devices: int, backend: str
) -> None:
    """Decode steps agree with a forward without a KV cache, the strategy with mp, replays with eager steps."""
    alone = (strategy, devices) == ("mp", 1)
    found = mp if alone else _generated(folder, strategy, devices, backend, mp.results["on"])
    for cuda_graphs, launch in found.launches.items():
        graphed = cuda_graphs == "on" and (strategy, devices) != ("mp", 2) and strategy != "iok"
        sentence = launch.execution_choice or ""
        assert ("CUDA graphs" in sentence.partition(":")[0]) == graphed, sentence
        assert sentence.startswith("compiled") == (strategy == "compile"), sentence
        assert (launch.compile_s is not None) == (strategy == "compile")
        check, _ = kv_cache_faults.check(found.results[cuda_graphs], None if alone else mp.results["on"])
        print(strategy, devices, backend, sentence, check.text)
        assert check.ok, check.text
    for injected, result in found.broken.items():
        check, fault = kv_cache_faults.check(result, None)
        assert fault == "cache", (injected, check.text)
    eager, replayed, again = (known(one.launches[0].generation) for one in (*found.results.values(), found.again))
    assert (again.tokens, again.loglikelihoods) == (replayed.tokens, replayed.loglikelihoods), "it is repeatable"
    _assert_alike(eager, replayed)


def _assert_alike(eager: Generation, replayed: Generation) -> None:
    """Up to the first token that rounding decides differently, tokens are equal and log-likelihoods agree."""
    same: list[tuple[float, float]] = []
    tokens = [decode(one.tokens, "i") for one in (eager, replayed)]
    values = [decode(one.loglikelihoods) for one in (eager, replayed)]
    for start in range(0, _PROMPTS * _NEW, _NEW):
        for place in range(start, start + _NEW):
            if tokens[0][place] != tokens[1][place]:
                break
            same.append((values[0][place], values[1][place]))
    print(f"{len(same)} of {_PROMPTS * _NEW} tokens; {sum(eager.step_s)} s, {sum(replayed.step_s)} s")
    assert len(same) > _PROMPTS * _NEW // 2
    found, expected = zip(*same, strict=True)
    assert typical_difference(found, expected) < LOGLIKELIHOOD_TOLERANCES["float16"]


@pytest.mark.filterwarnings("ignore")  # the imports of inductor, and its hint to compute in TF32
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_kernels_of_decode_steps_give_the_numbers_of_torch(
    model_type: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of one row, and the attention of many rows of unequal length, with groups of heads and windows.

    The prompts share lines, those that are expected have one each.
    """
    device, kernels_of = torch.device("cuda", 0), Mock(wraps=compiled_layers.kernels_of)
    monkeypatch.setattr(compiled_layers, "kernels_of", kernels_of)
    prompts = make_prompts([range(2, 5 + row % 13) for row in range(rows)], max_length=16, new_tokens=8)

    def generate(model: Any, *, pack: bool) -> torch.Tensor:
        batches = plan(prompts, rows, few_shapes=True, pack=pack)
        assert (batches.batches[0].lines is not None) == (pack and rows > 1)
        with Generator(model, batches, input_device=device, devices=[device], recorded_tokens=4096) as generator:
            generator.warm_up()
            return torch.tensor(generated(generator).loglikelihoods)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_model.architecture(model_type)))
    model = model.to(device).eval()
    expected = generate(model, pack=False)
    CompiledLayers(model)
    torch.testing.assert_close(generate(model, pack=True), expected, atol=1e-3, rtol=1e-3)
    assert kernels_of.called
    assert compiled_layers.kernels_of(device) is not None
