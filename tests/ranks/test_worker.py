from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_model
from support.report_factory import make_case

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.worker import RankState
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
        (Loaded(torch.nn.Identity(), None, _CPU, (_CPU,), world_size=2), "Loaded.world_size is 2, but"),  # type: ignore[arg-type]  # there is no model
    ],
)
def test_a_strategy_that_loads_the_wrong_thing_is_named(returned: object, message: str) -> None:
    """The message has the strategy, what it returned and what is needed."""
    _RETURNED.append(returned)
    source = tiny_model.source({})
    case = make_case(strategy="theirs", device="cpu", devices=1)
    with pytest.raises((TypeError, ValueError), match=f"^strategy theirs: .*{re.escape(message)}"):
        worker.load(RankState(lambda _: None), case, source, f"{__name__}:Returning")
