"""Generation on GPUs: `pytest tests/gpu/test_generation.py -m gpu`, the tests of tp on a machine with two."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import kv_cache_faults
from support.report_factory import make_case, make_result

from pytest_llmgpu import strategies
from pytest_llmgpu.analysis.answers import check_texts
from pytest_llmgpu.inference import models, tasks
from pytest_llmgpu.inference.bundled import save_tokenizer
from pytest_llmgpu.inference.tasks.hellaswag import Prompts
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.local import LocalLauncher
from pytest_llmgpu.ranks.worker import ReferenceTexts
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, decode_tokens, typical_difference
from pytest_llmgpu.report.result import CaseResult, Generation, Launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here"),
]

_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
_KERNELS = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs the extra deepspeed")
_PROMPTS, _BATCH_SIZE, _NEW = 24, 8, 32
_WAIT_S = 300.0


def _write_model(folder: Path) -> None:
    """Write the config of four layers as wide as those of LLaMA-7B; its weights are random."""
    folder.mkdir()
    save_tokenizer(list(Prompts().load("bundled", rootdir=folder, limit=100).texts()), 32_000, folder)
    fields = {"num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    more = {"vocab_size": 32_000, "max_position_embeddings": 2048, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**fields, **more, "architectures": ["LlamaForCausalLM"]}))


class _Ranks:
    """The ranks of a strategy with the model loaded in float16."""

    def __init__(self, group: RankGroup, case: Case) -> None:
        self._group = group
        self.case = case

    def generate(
        self, cuda_graphs: str = "off", fault: str | None = None, mp: CaseResult | None = None, **fields: Any
    ) -> tuple[CaseResult, Launch]:
        """Return the case as a result of rank 0, whose tokens every rank has chosen."""
        of_mp = None if mp is None else mp.launches[0].generation
        texts = None if mp is None or of_mp is None else ReferenceTexts(key=mp.key, tokens=of_mp.tokens)
        case = msgspec.structs.replace(self.case, cuda_graphs=cuda_graphs, **fields)
        asked = kv_cache_faults.generate, case, fault, texts
        replies: list[Launch] = self._group.ask(*asked, phase="forward", timeout_s=_WAIT_S)
        assert len({reply.generation.tokens for reply in replies if reply.generation is not None}) == 1
        launch = Launch(generation=replies[0].generation)
        result = msgspec.structs.replace(make_result(), id=case.id, key=case.key, case=case, launches=[launch])
        return result, replies[0]


@contextmanager
def _started(folder: Path, strategy: str, devices: int, backend: str) -> Iterator[_Ranks]:
    if not (folder / "wide").exists():
        _write_model(folder / "wide")
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
    place = strategies.find(strategy)
    strategies.make(place).build(case, print)
    ranks = strategies.make(place).ranks(devices)
    numbers = [
        {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        for number in range(ranks)
    ]
    logs = folder / f"{strategy}-{devices}-{backend}"
    logs.mkdir(exist_ok=True)
    group = RankGroup(LocalLauncher(logs), numbers if ranks > 1 else [{}])
    try:
        group.ask(worker.load, case, source, place, phase="load", timeout_s=_WAIT_S)
        group.ask(worker.give, items.sha256, items.items, tasks.BUILT_IN["prompts"], phase="load", timeout_s=_WAIT_S)
        yield _Ranks(group, case)
    finally:
        group.kill()


_STRATEGIES = [
    pytest.param("mp", 1, "accelerate", id="mp on one GPU"),
    pytest.param("mp", 2, "accelerate", id="mp on two GPUs", marks=_TWO_GPUS),
    pytest.param("tp", 2, "transformers", id="tp", marks=_TWO_GPUS),
    pytest.param("tp", 2, "deepspeed", id="tp by DeepSpeed", marks=_TWO_GPUS),
    pytest.param("compile", 1, "transformers", id="compile on one GPU"),
    pytest.param("compile", 2, "transformers", id="compile on two GPUs", marks=_TWO_GPUS),
    pytest.param("iok", 1, "deepspeed", id="iok on one GPU", marks=_KERNELS),
    pytest.param("iok", 2, "deepspeed", id="iok on two GPUs", marks=[_TWO_GPUS, _KERNELS]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model and of the logs."""
    return tmp_path_factory.mktemp("generation")


@pytest.fixture(scope="module")
def mp(folder: Path) -> CaseResult:
    """The texts of mp on one GPU."""
    with _started(folder, "mp", 1, "accelerate") as ranks:
        return ranks.generate("on")[0]


@pytest.mark.parametrize(("strategy", "devices", "backend"), _STRATEGIES)
def test_texts_are_right_eagerly_and_as_cuda_graphs(
    folder: Path, mp: CaseResult, strategy: str, devices: int, backend: str
) -> None:
    """Decode steps agree with a forward without a KV cache, the strategy with mp, and every fault is found."""
    with _started(folder, strategy, devices, backend) as ranks:
        for cuda_graphs in ("off", "on"):
            result, reply = ranks.generate(cuda_graphs, mp=mp)
            graphed = cuda_graphs == "on" and (strategy, devices) != ("mp", 2) and strategy != "iok"
            sentence = reply.execution_choice or ""
            assert ("CUDA graphs" in sentence.partition(":")[0]) == graphed, sentence
            assert sentence.startswith("compiled") == (strategy == "compile"), sentence
            assert (reply.compile_s is not None) == (strategy == "compile")
            decision = check_texts(result, mp)
            assert decision is not None
            print(strategy, devices, backend, sentence, decision.check.text)
            assert (decision.fault, decision.check.source) == (None, mp.id), decision.check.text
            for fault in kv_cache_faults.KERNEL_FAULTS if strategy == "iok" else kv_cache_faults.FAULTS:
                broken = check_texts(ranks.generate(cuda_graphs, fault)[0], None)
                assert broken is not None
                print(" ", fault, broken.check.value)
                assert broken.fault == "cache", (fault, cuda_graphs)


@pytest.mark.parametrize(
    ("strategy", "devices", "backend"),
    [one for one in _STRATEGIES if one.values[0] != "iok" and one.id != "mp on two GPUs"],
)
def test_replays_are_the_eager_steps(folder: Path, strategy: str, devices: int, backend: str) -> None:
    """Up to the first token that rounding decides differently, tokens are equal and log-likelihoods agree."""
    with _started(folder, strategy, devices, backend) as ranks:
        eager, graphed = (_generation(ranks.generate(cuda_graphs)[0]) for cuda_graphs in ("off", "on"))
        again = _generation(ranks.generate("on")[0])
    assert (again.tokens, again.loglikelihoods) == (graphed.tokens, graphed.loglikelihoods), "replays are repeatable"
    same: list[tuple[float, float]] = []
    tokens = [decode_tokens(one.tokens) for one in (eager, graphed)]
    values = [decode(one.loglikelihoods) for one in (eager, graphed)]
    for start in range(0, _PROMPTS * _NEW, _NEW):
        for place in range(start, start + _NEW):
            if tokens[0][place] != tokens[1][place]:
                break
            same.append((values[0][place], values[1][place]))
    print(f"{len(same)} of {_PROMPTS * _NEW} tokens before texts part; {sum(eager.step_s)} s, {sum(graphed.step_s)} s")
    assert len(same) > _PROMPTS * _NEW // 2
    found, expected = zip(*same, strict=True)
    assert typical_difference(found, expected) < LOGLIKELIHOOD_TOLERANCES["float16"]


def _generation(result: CaseResult) -> Generation:
    generation = result.launches[0].generation
    assert generation is not None
    return generation
