from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import rank_functions, tiny_model
from support.report_factory import known, make_case

from pytest_llmgpu.inference import models, quantization, weights
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.recording.work import model_size
from pytest_llmgpu.report.options import Options

_SMALL: dict[str, Any] = {**tiny_model.SIZES, "vocab_size": 300}
_DECODER = 2 * (4 * 32 * 32 + 3 * 32 * 48)
"""Numbers in the linear layers of the decoder."""
_IDS = torch.arange(24).view(2, 12)


def _loaded(source: ModelSource) -> Any:
    """Return a model as strategy mp loads it on a CPU."""
    if source.directory is not None:
        return weights.checkpoint(source, torch.float32)
    model = weights.skeleton(source, torch.float32)
    place = torch.device("cpu")
    weights.materialise(model, lambda _: place, seed=0)
    return model


@torch.inference_mode()
def _logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=_IDS).logits
    return found


def test_every_name_of_the_option_is_one_of_torchao_and_the_reverse() -> None:
    """Plain weights come first."""
    names = ",".join(quantization.CONFIGS)
    assert Options.__dataclass_fields__["quantization"].metadata["metavar"] == f"{{{names}}}[,...]"


@pytest.mark.parametrize(
    ("name", "row_bytes", "error"), [("int8", 5, 2e-2), ("int8-dynamic", 5, 5e-2), ("fp8-weight", 4, 0.1)]
)
def test_random_weights_a_checkpoint_and_a_quantised_checkpoint_are_the_same(
    name: str, row_bytes: int, error: float, tmp_path: Path
) -> None:
    """Linear layers of the decoder take a byte a number, and a scale (of int8 also a zero) a row; others are plain."""
    pytest.importorskip("torchao")
    plain = _loaded(tiny_model.source(_SMALL))
    plain.save_pretrained(tmp_path / "plain")
    quantised = _loaded(tiny_model.source(_SMALL, quantization=name))
    quantised.save_pretrained(tmp_path / "quantised")
    right, found = _logits(plain), _logits(quantised)
    assert 0 < float((found - right).norm() / right.norm()) < error
    assert torch.equal(quantised.lm_head.weight, plain.lm_head.weight)
    right_size = _DECODER + 2 * (4 * 32 + 2 * 48 + 32) * row_bytes + (2 * 2 + 1) * 32 * 4
    for directory, kind in ((None, name), ("plain", name), ("quantised", None)):
        given = None if directory is None else tmp_path / directory
        model = _loaded(tiny_model.source(_SMALL, given, quantization=kind or "torchao-checkpoint"))
        assert torch.equal(_logits(model), found), directory
        stored = quantization.stored(model, 1)
        assert stored is not None
        size = model_size(weights.skeleton(tiny_model.source(_SMALL), torch.float32), 4, stored)
        assert not isinstance(size, str)
        assert size.weights_bytes == sum(size for _, size in stored.values()) == right_size
        (text,) = quantization.describe(stored).values()
        assert text.startswith(f"{type(model.model.layers[0].mlp.up_proj.weight).__name__} 9")
    fields = json.loads((tmp_path / "quantised" / "config.json").read_text())
    assert quantization.of_checkpoint(fields) == "torchao-checkpoint"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8-checkpoint"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4-checkpoint"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes-checkpoint"),
    ],
)
def test_the_method_of_a_checkpoint_is_its_quantisation(fields: dict[str, Any], found: str | None) -> None:
    """An option has no such name, so that both cannot be mistaken for one case."""
    assert quantization.of_checkpoint(fields) == found


def test_each_name_is_tried_on_the_device() -> None:
    """A CPU computes no products in fp8, and torch's packing of four bits is for GPUs."""
    pytest.importorskip("torchao")
    place = json.dumps(_SMALL)
    for name, kept in (("int4", ", int8, int8-dynamic, fp8-weight$"), ("int8", None)):
        found = models.refusal_here(place, "", "", name, "cpu", "bfloat16")
        assert (
            found == ""
            if kept is None
            else re.match(f"--llmgpu-quantization=int4: .*: allowed here: none{kept}", found)
        )


@pytest.mark.parametrize(("name", "row_bytes"), [("int8", 5), ("int8-dynamic", 5), ("fp8-weight", 4)])
def test_two_ranks_have_the_bytes_of_both(
    gloo_pair: RankGroup, bundled: ModelSource, name: str, row_bytes: int
) -> None:
    """Each quantises its part; where columns are split, a row has a scale on each rank. Norms are on both, once."""
    pytest.importorskip("torchao")
    source = msgspec.structs.replace(bundled, load_format="dummy", quantization=name)
    case = make_case(strategy="tp", backend="transformers", model="bundled", dtype="float32", device="cpu", devices=2)
    case = msgspec.structs.replace(case, load_format="dummy", quantization=name)
    gloo_pair.ask(worker.load, case, source, "pytest_llmgpu.strategies.tp:TensorParallel", phase="load", timeout_s=300)
    right = known(quantization.stored(_loaded(source), 1))
    rows = source.config["hidden_size"]
    for found in gloo_pair.ask(worker.call, rank_functions.quantised, (), phase="forward", timeout_s=300):
        added = {one: size - right[one][1] for one, (_, size) in found.items()}
        assert {one: kind for one, (kind, _) in found.items()} == {one: kind for one, (kind, _) in right.items()}
        ends = ("o_proj.weight", "down_proj.weight")
        assert added == {one: rows * row_bytes if one.endswith(ends) else 0 for one in right}


def test_weights_that_stayed_plain_are_refused() -> None:
    """Torchao leaves a weight whose shape does not allow the quantisation, without an error."""
    model = _loaded(tiny_model.source(_SMALL))
    assert quantization.stored(model, 1) is None
    model.hf_quantizer = "of transformers"
    vars(model.model.layers[1].mlp.up_proj)["_hf_quantized_needs_local_tp"] = True  # transformers quantises it
    with pytest.raises(
        ValueError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight \(48 x 32\) was not quantised: choose"
    ):
        quantization.stored(model, 1)


class _WithScales(torch.nn.Linear):
    """A layer whose scales are an attribute of its weights and are saved with them, as those of bitsandbytes."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(48)


def test_scales_beside_the_parameters_are_counted() -> None:
    """Buffers that are saved are those of GPTQ; weights that are in no tensor of the model have no size."""
    source = tiny_model.source(_SMALL)
    model, right = _loaded(source), weights.skeleton(source, torch.float32)
    model.hf_quantizer = "of transformers"
    plain = sum(size for _, size in (quantization.stored(model, 1) or {}).values())
    mlp = model.model.layers[0].mlp
    mlp.up_proj = _WithScales(32, 48, bias=False)
    mlp.down_proj.register_buffer("qzeros", torch.zeros(10, dtype=torch.int32))
    found = quantization.stored(model, 1) or {}
    assert sum(size for _, size in found.values()) == plain + 4 * (48 + 10)
    few = model_size(right, 4, {"x.weight": ("uint8", _DECODER // 5)})
    assert isinstance(few, str), "less than two bits a weight"
    assert "too few" in few
