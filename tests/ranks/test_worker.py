from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import tiny_model
from support.report_factory import known, make_case

from pytest_llmgpu.inference import models, tasks
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.ranks import memory, worker
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report import derived
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import Loaded

_CPU = torch.device("cpu")
_RETURNED: list[Any] = []


class Returning(LayerParallel):
    """A strategy of a user whose `load` returns anything."""

    def load(self, case: Case, source: ModelSource) -> Loaded:  # noqa: ARG002 - there is no model
        """Return what the test wants."""
        loaded: Loaded = _RETURNED[-1]
        return loaded


def test_the_first_rank_of_a_node_reads_the_files_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a node are read once; a tokenizer that is missing has no hash."""
    (tmp_path / "config.json").write_text("{}")
    source = tiny_model.source({}, tmp_path, tokenizer_directory=str(tmp_path))
    state = RankState(lambda _: None)
    assert set(worker.file_hashes(state, source) or ()) == {"config.json"}
    (tmp_path / "tokenizer.json").write_text("{}")
    assert set(worker.file_hashes(state, source) or ()) == {"config.json", "tokenizer.json", "tokenizer"}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert worker.file_hashes(state, source) is None


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "load returned None, a Loaded is needed"),
        (torch.nn.Identity(), "load returned Identity, a Loaded is needed"),
        (Loaded("model", None, _CPU, (_CPU,)), "Loaded.model is str, a torch.nn.Module is needed"),  # type: ignore[arg-type]  # the error
        (Loaded(torch.nn.Identity(), None, _CPU, (_CPU,), world_size=2), "Loaded.world_size is 2, but"),
    ],
)
def test_a_strategy_that_loads_the_wrong_thing_is_named(returned: object, message: str) -> None:
    """The message has the strategy, what it returned and what is needed."""
    _RETURNED.append(returned)
    source = tiny_model.source({})
    case = make_case(strategy="theirs", device="cpu", devices=1)
    with pytest.raises((TypeError, ValueError), match=f"^strategy theirs: .*{re.escape(message)}"):
        worker.load(RankState(lambda _: None), case, source, f"{__name__}:Returning")


@pytest.fixture
def state(tmp_path: Path, model: Path) -> RankState:
    """A rank with the tiny model and its six items."""
    tiny_model.write_dataset(tmp_path / "items.jsonl")
    dataset = HellaSwag().load(str(tmp_path / "items.jsonl"), rootdir=tmp_path)
    source = models.resolve(str(model), texts=dataset.texts(), rootdir=tmp_path)
    made = RankState(lambda _: None)
    case = make_case(dtype="float32", device="cpu", devices=1, dataset_sha256=dataset.sha256)
    worker.load(made, case, source, "pytest_llmgpu.strategies.mp:LayerParallel")
    worker.give(made, dataset.sha256, dataset.items, tasks.BUILT_IN["hellaswag"])
    return made


def test_every_case_of_a_sweep_begins_with_a_reset(state: RankState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each case, larger or smaller than the one before, caches are emptied and the workspace is rebuilt."""
    events: list[object] = []
    monkeypatch.setattr(memory, "reset", lambda _: events.append("reset"))
    monkeypatch.setattr(LayerParallel, "prepare", lambda *arguments: events.append(arguments[2]))
    for batch_size in (2, 8, 2):
        events.clear()
        launch = worker.score(state, msgspec.structs.replace(state.case, batch_size=batch_size))
        assert launch.batches.sequences == [batch_size] * (tiny_model.SEQUENCES // batch_size)
        assert known(launch.accuracy).items == tiny_model.ITEMS
        assert events == ["reset", batch_size]


def test_a_case_that_generates_has_texts_and_the_work_of_both_halves(state: RankState, tmp_path: Path) -> None:
    """Forwards without a KV cache find the same log-likelihoods; traces have the ops in the ranges of the modules."""
    case = msgspec.structs.replace(state.case, workload="generate", prompt_tokens=5, new_tokens=3, batch_size=4)
    texts = known(worker.score(state, case).generation)
    assert (texts.prompt_tokens, texts.new_tokens) == ([5] * 6, [3] * 6)
    assert (len(texts.first_token_s), len(texts.step_s)) == (2, 2 * 2)
    # Keys and values of one layer of 32 numbers, for 4 rows of 8 tokens.
    assert texts.kv_cache_bytes == texts.kv_cache_formula_bytes == 2 * 32 * (4 * 8) * 4
    chosen, again = map(derived.decode, (texts.loglikelihoods, known(texts.prefill_loglikelihoods)))
    assert list(again) == pytest.approx(list(chosen), rel=1e-4)
    assert worker.account(state) == ([], [])
    worker.warm_up(state, case)
    worker.measure(state)
    worker.record_work(state, str(tmp_path / "case"))
    replies = worker.run_eager_passes(state, str(tmp_path / "case"))
    flops = [reply.work.flops_by_module or {} for reply in replies]
    # The smallest batch: 2 rows of one token, then of 5.
    assert [modules["layers.*.mlp.down_proj"] for modules in flops] == [2 * 32 * 48 * 2, 2 * 32 * 48 * 2 * 5]
    paths = [str(tmp_path / f"case-rank0-{half}-modules.json.gz") for half in ("decode", "prefill")]
    assert [reply.traces for reply in replies] == [[path] for path in paths]
    for path in paths:
        names = {event.get("name") for event in json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]}
        assert {"llmgpu:layers.*.mlp.down_proj", "aten::mm"} <= names
