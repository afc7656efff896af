from __future__ import annotations

import contextlib
import json
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_model

from pytest_llmgpu.inference import weights
from pytest_llmgpu.inference.models import ModelSource

_CPU = torch.device("cpu")
_SMALL: dict[str, Any] = {**tiny_model.SIZES, "num_hidden_layers": 3, "vocab_size": 300}


def _source(directory: Path | None = None, **fields: Any) -> ModelSource:
    return tiny_model.source(_SMALL | fields, directory, name="small")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a random model, alone in its folder but for the config."""
    tiny_model.random_model(**_SMALL).save_pretrained(tmp_path)
    return tmp_path / "model.safetensors"


def _skeleton(source: ModelSource) -> Any:
    return weights.skeleton(source, torch.float32)


def _filled(source: ModelSource, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    model = weights.skeleton(source, dtype)
    weights.materialise(model, lambda _: _CPU, seed=seed)
    return model


def _values(source: ModelSource, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the values of all parameters from a reader."""
    model = weights.skeleton(source, dtype)
    read = weights.reader(model, source, _CPU, seed=seed)
    return {name: read(name, empty) for name, empty in model.named_parameters()}


def _equal(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)


def test_a_skeleton_has_no_weights_but_its_buffers() -> None:
    """Parameters use no memory, and the rotary frequencies are float32."""
    model = weights.skeleton(_source(), torch.float16)
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("meta", torch.float16)}
    assert {(buffer.device.type, buffer.dtype) for buffer in model.buffers()} == {("cpu", torch.float32)}
    assert not model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_values_depend_on_seed_and_name_alone(dtype: torch.dtype) -> None:
    """A reader and `materialise` give the same ones; a layer has them also in a model of fewer layers."""
    values = _values(_source(), dtype, seed=7)
    assert _equal(values, dict(_filled(_source(), dtype, seed=7).named_parameters()))
    assert not _equal(values, _values(_source(), dtype, seed=8))
    fewer = _values(_source(num_hidden_layers=1), dtype, seed=7)
    assert _equal(fewer, {name: values[name] for name in fewer})
    first, second = (values[f"model.layers.{number}.mlp.up_proj.weight"] for number in (0, 1))
    assert not torch.equal(first, second)


def test_dummy_weights_are_spread_as_a_fresh_model_has_them() -> None:
    """Weights are normal with the configured deviation, norms are 1, biases are 0, and no gradient is needed."""
    model = _filled(_source(attention_bias=True, initializer_range=0.1))
    assert float(model.lm_head.weight.std()) == pytest.approx(0.1, rel=0.05)
    assert float(model.lm_head.weight.mean()) == pytest.approx(0, abs=0.005)
    assert bool((model.model.norm.weight == 1).all())
    assert bool((model.model.layers[0].self_attn.q_proj.bias == 0).all())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_values_are_those_that_transformers_reads_in_the_dtype_of_the_model(file: Path) -> None:
    """Another file in the folder is ignored; names of a decoder without its head are converted by transformers."""
    values = load_file(file)
    old = file.with_name("zz_old.safetensors")
    save_file({name: value + 1 for name, value in values.items()}, old)
    right = {name: value.bfloat16() for name, value in values.items()}
    assert _equal(_values(_source(file.parent), torch.bfloat16), right)
    old.unlink()
    save_file({name.removeprefix("model."): value for name, value in values.items()}, file, {"format": "pt"})
    assert _equal(_values(_source(file.parent)), values)


@pytest.mark.parametrize(("named", "option", "runs"), [("eager", None, "sdpa"), ("sdpa", "eager", "eager")])
def test_the_config_of_a_model_does_not_choose_the_attention(
    file: Path, named: str, option: str | None, runs: str
) -> None:
    """The option does: its value is part of the case."""
    config = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps({**config, "_attn_implementation": named}))
    source = msgspec.structs.replace(_source(file.parent), attention=option)
    loaded = weights.checkpoint(source, torch.float32, device_map={"": "cpu"})
    assert {model.config._attn_implementation for model in (loaded, _skeleton(source))} == {runs}


def test_files_that_lack_a_value_are_refused(file: Path) -> None:
    """A missing value is an error and no random value."""
    values = load_file(file)
    values["nobody.knows.weight"] = values.pop("model.norm.weight")
    save_file(values, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model small: 1 weight missing in its files, such as model\.norm\.weight"):
        _values(_source(file.parent))


class _Asked(list[str]):
    """A reader that keeps the names in order; the values of a parameter are its place in it, from 1."""

    def __call__(self, name: str, empty: torch.nn.Parameter) -> torch.Tensor:
        self.append(name)
        return torch.full(empty.shape, float(len(self)))


def test_a_filled_module_keeps_what_is_tied_and_moves_its_buffers() -> None:
    """A tied parameter is read once, and a buffer that is not saved stays so."""
    model = _skeleton(_source(tie_word_embeddings=True))
    devices = {name: torch.device("meta") for name, _ in model.named_buffers()}
    asked = _Asked()
    weights.fill(model, "", asked, devices.__getitem__)
    assert asked == [name for name, _ in model.named_parameters()]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert _is_full(model)
    assert bool((model.model.norm.weight == len(asked)).all())
    assert all(buffer.is_meta for buffer in model.buffers())
    assert "model.rotary_emb.inv_freq" not in model.state_dict()


def _is_empty(module: torch.nn.Module) -> bool:
    return all(parameter.is_meta for parameter in module.parameters())


def _is_full(*modules: torch.nn.Module) -> bool:
    return not any(parameter.is_meta for module in modules for parameter in module.parameters())


def _in_turn(model: Any, on_layer: Any = lambda _: None) -> Any:
    return weights.filled_in_turn(model, weights.reader(model, _source(), _CPU, seed=0), _CPU, on_layer)


def test_layers_are_filled_one_at_a_time_as_they_are_come_to() -> None:
    """A layer is filled when the iteration reaches it, and everything else at the start."""
    model = _skeleton(_source())
    seen: list[torch.nn.Module] = []
    with _in_turn(model, seen.append):
        assert _is_full(model.lm_head, model.model.embed_tokens, model.model.norm)
        layers = list(model.model.layers)
        assert all(map(_is_empty, layers))
        for number, (name, layer) in enumerate(model.model.layers.named_children()):
            assert (name, layer) == (str(number), layers[number])
            assert seen == layers[: number + 1], "called after the layer is filled and before it is replaced"
            assert _is_full(*layers[: number + 1])
            assert all(map(_is_empty, layers[number + 1 :]))
    assert _equal(dict(model.named_parameters()), dict(_filled(_source()).named_parameters()))


def test_a_layer_that_is_replaced_is_not_kept() -> None:
    """At most one whole layer is in memory at a time."""
    model = _skeleton(_source())
    gone: list[weakref.ref[torch.nn.Module]] = []
    with _in_turn(model):
        for name, layer in model.model.layers.named_children():
            assert all(earlier() is None for earlier in gone)
            gone.append(weakref.ref(layer))
            model.model.layers._modules[name] = torch.nn.Identity()
            del layer
    assert len(gone) == 3


def test_after_a_failure_the_layers_are_an_ordinary_list() -> None:
    """The list of layers is restored, and layers that were not reached stay empty."""
    model = _skeleton(_source())
    with contextlib.suppress(KeyError), _in_turn(model):
        next(iter(model.model.layers.named_children()))
        raise KeyError("a library's own")
    assert type(model.model.layers) is torch.nn.ModuleList
    list(model.model.layers.named_children())
    assert [_is_full(layer) for layer in model.model.layers] == [True, False, False]


def test_lists_inside_a_layer_are_part_of_it() -> None:
    """A layer with experts is filled whole, and iterating over its experts is unchanged."""
    model = _skeleton(_source())
    for layer in model.model.layers:
        with torch.device("meta"):
            layer.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    asked = _Asked()
    with weights.filled_in_turn(model, asked, _CPU, lambda _: None):
        assert not any("experts" in name for name in asked)
        for _, layer in model.model.layers.named_children():
            assert type(layer.experts) is torch.nn.ModuleList
            assert _is_full(layer.experts)
            list(layer.experts.named_children())
    assert asked.count("model.layers.1.experts.0.weight") == 1
    assert len(asked) == len(set(asked)) == len(list(model.named_parameters()))
