from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import tiny_model
from support.report_factory import make_case

from pytest_llmgpu import processes
from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.models import ModelFacts, ModelSource
from pytest_llmgpu.strategies.tp import TensorParallel

_LLAMA = {"model_type": "llama", "num_attention_heads": 8}
_AWQ = {"quant_method": "awq", "bits": 4}


def _source(folder: Path, **config: Any) -> ModelSource:
    directory = folder / "theirs"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return tiny_model.source(config, directory, load_format="dummy")


def test_a_llama_needs_no_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model and presets start as fast as before."""
    monkeypatch.setattr("subprocess.run", pytest.fail)
    source = _source(tmp_path, **_LLAMA)
    preset = msgspec.structs.replace(source, directory=None, config={})
    assert [models.facts(one) for one in (source, preset)] == [ModelFacts(has_plan=True)] * 2


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the child process, which imports transformers for seconds."""
    monkeypatch.setattr(
        processes, "ask", lambda _, directory, **__: msgspec.json.encode(models.facts_here(directory)).decode()
    )


@pytest.mark.slow
def test_counts_have_the_names_and_defaults_of_transformers(tmp_path: Path) -> None:
    """Heads are found whatever the config calls them, and where it leaves them to its class; and what it lacks."""
    source = _source(tmp_path, model_type="codegen", n_head=3)
    assert models.facts(source) == ModelFacts(has_plan=False, has_sdpa=False, counts={"num_attention_heads": 3})
    case = make_case(strategy="tp", backend="transformers", device="cpu", devices=3)
    with pytest.raises(ValueError, match=r"--llmgpu-model=theirs: .*no tensor-parallel plan .*\(codegen\)"):
        TensorParallel().check(case, source)
    autotp = msgspec.structs.replace(case, backend="deepspeed", dtype="float32")
    TensorParallel().check(autotp, source)
    with pytest.raises(ValueError, match="cannot split the 3 attention heads of theirs"):
        TensorParallel().check(msgspec.structs.replace(autotp, devices=2), source)


@pytest.mark.usefixtures("in_this_process")
def test_a_plan_is_found_behind_the_config_of_a_larger_model(tmp_path: Path) -> None:
    """The decoder of a model of images and text is planned in its own config."""
    text = {"model_type": "gemma3_text", "num_attention_heads": 6}
    found = models.facts(_source(tmp_path, model_type="gemma3", text_config=text))
    assert (found.has_plan, found.counts["num_attention_heads"]) == (True, 6)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("model_type", "without"),
    [("gpt2", None), ("openai-gpt", "past_key_values"), ("mamba", "past_key_values"), ("bloom", "position_ids")],
)
def test_arguments_of_decode_steps_that_a_model_does_not_take_are_found(
    tmp_path: Path, model_type: str, without: str | None
) -> None:
    """Its config has attention heads, and alone does not show that it cannot generate with a static KV cache."""
    assert models.facts(_source(tmp_path, model_type=model_type)).without == without


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "nothing-known"}, "nothing-known"),
        pytest.param(
            {**_LLAMA, "quantization_config": _AWQ},
            "gptqmodel",
            marks=pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is not None, reason="it is installed"),
        ),
    ],
    ids=["unknown architecture", "quantised"],
)
def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    """The message has the model and what is missing."""
    with pytest.raises(ValueError, match=f"^--llmgpu-model=theirs: transformers cannot load it: .*{reason}") as caught:
        models.facts(_source(tmp_path, **config))
    assert "\n" not in str(caught.value)
