from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from pytest_llmgpu.inference import weights
from pytest_llmgpu.inference.models import ModelSource

_CPU = torch.device("cpu")
_SMALL: dict[str, Any] = {**tiny_model.SIZES, "num_hidden_layers": 3, "vocab_size": 300}


def _source(directory: Path | None = None, **fields: Any) -> ModelSource:
    return tiny_model.source(_SMALL | fields, directory, name="small")


@pytest.fixture
def written(tmp_path: Path) -> ModelSource:
    """A random model in one file."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_SMALL)).save_pretrained(tmp_path)
    return _source(tmp_path)


def _empty(source: ModelSource, dtype: torch.dtype = torch.float32) -> Any:
    return weights.skeleton(source, dtype)


def _values(source: ModelSource, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the values of all parameters from a reader."""
    model = _empty(source, dtype)
    read = weights.reader(model, source, _CPU, seed=seed)
    return {name: read(name, empty) for name, empty in model.named_parameters()}


def _equal(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_values_are_those_of_a_model_filled_at_once(dtype: torch.dtype) -> None:
    """Random values depend on name, shape, dtype and seed."""
    source = _source(initializer_range=0.3)
    whole = _empty(source, dtype)
    weights.materialise(whole, lambda _: _CPU, seed=7, dtype=dtype)
    values = _values(source, dtype, seed=7)
    assert _equal(values, dict(whole.named_parameters()))
    assert not _equal(values, _values(source, dtype, seed=8))


def test_values_of_files_come_in_the_dtype_of_the_model(written: ModelSource) -> None:
    """Each value is read whole when it is requested."""
    assert written.directory is not None
    stored = load_file(Path(written.directory) / "model.safetensors")
    assert _equal(_values(written, torch.bfloat16), {name: value.bfloat16() for name, value in stored.items()})


def test_other_files_in_the_folder_are_not_the_model(written: ModelSource) -> None:
    """Files in the folder that transformers does not read are ignored."""
    right = _values(written)
    assert written.directory is not None
    folder = Path(written.directory)
    old = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(old, folder / "zz_old.safetensors", {"format": "pt"})
    assert _equal(_values(written), right)


def _rename(written: ModelSource, names: dict[str, str]) -> None:
    assert written.directory is not None
    path = Path(written.directory) / "model.safetensors"
    save_file({names.get(name, name): value for name, value in load_file(path).items()}, path, {"format": "pt"})


def test_files_with_other_names_are_read_by_transformers(written: ModelSource) -> None:
    """Transformers converts files with other names, here of a decoder without its head."""
    right = _values(written)
    _rename(written, {name: name.removeprefix("model.") for name in right})
    assert _equal(_values(written), right)


def test_files_that_lack_a_value_are_refused(written: ModelSource) -> None:
    """A missing value is an error and no random value."""
    _rename(written, {"model.norm.weight": "nobody.knows.weight"})
    with pytest.raises(ValueError, match=r"model small: 1 weight missing in its files, such as model\.norm\.weight"):
        _values(written)


class _Pair(torch.nn.Module):
    """A model of two layers with a shared weight, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class _Moved(torch.Tensor):
    """A tensor that remembers where it was sent."""

    sent: tuple[torch.device, ...] = ()

    def to(self, *where: Any, **_: Any) -> Any:
        moved = torch.zeros(3).as_subclass(_Moved)
        moved.sent = where
        return moved


def test_a_filled_module_keeps_what_is_tied_and_moves_its_buffers() -> None:
    """A tied parameter is read once, and a buffer that is not saved stays so."""
    pair = _Pair()
    pair.table = torch.arange(3.0).as_subclass(_Moved)
    asked: list[str] = []

    def read(name: str, empty: torch.nn.Parameter) -> torch.Tensor:
        asked.append(name)
        return torch.full(empty.shape, float(len(asked)))

    weights.fill(pair, "layers.0", read, lambda _: _CPU)
    assert asked == ["layers.0.first.weight", "layers.0.first.bias", "layers.0.second.bias"]
    assert pair.first.weight is pair.second.weight
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in pair.parameters())
    assert pair.second.bias.tolist() == [3.0, 3.0]
    assert pair.table.sent == (_CPU,)
    assert "table" not in pair.state_dict()


def _is_empty(module: torch.nn.Module) -> bool:
    return all(parameter.is_meta for parameter in module.parameters())


def _is_full(module: torch.nn.Module) -> bool:
    return not any(parameter.is_meta for parameter in module.parameters())


def _in_turn(model: Any, source: ModelSource, on_layer: Any = lambda _: None) -> Any:
    return weights.filled_in_turn(model, weights.reader(model, source, _CPU, seed=0), _CPU, on_layer)


def test_layers_are_filled_one_at_a_time_as_they_are_come_to() -> None:
    """A layer is filled when the iteration reaches it, and everything else at the start."""
    source = _source()
    model = _empty(source)
    seen: list[torch.nn.Module] = []
    with _in_turn(model, source, seen.append):
        assert _is_full(model.lm_head)
        assert _is_full(model.model.embed_tokens)
        assert _is_full(model.model.norm)
        layers = list(model.model.layers)
        assert all(map(_is_empty, layers))
        for number, (name, layer) in enumerate(model.model.layers.named_children()):
            assert (name, layer) == (str(number), layers[number])
            assert seen == layers[: number + 1], "called after the layer is filled and before it is replaced"
            assert all(map(_is_full, layers[: number + 1]))
            assert all(map(_is_empty, layers[number + 1 :]))
    whole = _empty(source)
    weights.materialise(whole, lambda _: _CPU, seed=0, dtype=torch.float32)
    assert _equal(dict(model.named_parameters()), dict(whole.named_parameters()))


def test_a_layer_that_is_replaced_is_not_kept() -> None:
    """At most one whole layer is in memory at a time."""
    source = _source()
    model = _empty(source)
    gone: list[weakref.ref[torch.nn.Module]] = []
    with _in_turn(model, source):
        for name, layer in model.model.layers.named_children():
            assert all(earlier() is None for earlier in gone)
            gone.append(weakref.ref(layer))
            model.model.layers._modules[name] = torch.nn.Identity()
            del layer
    assert len(gone) == 3


@pytest.mark.parametrize("error", [None, KeyError("a library's own")], ids=["ends", "fails"])
def test_afterwards_the_layers_are_an_ordinary_list(error: Exception | None) -> None:
    """The list of layers is restored after a failure, and layers that were not reached stay empty."""
    source = _source()
    model = _empty(source)
    with contextlib.suppress(KeyError), _in_turn(model, source):
        next(iter(model.model.layers.named_children()))
        if error is not None:
            raise error
    assert type(model.model.layers) is torch.nn.ModuleList
    list(model.model.layers.named_children())
    assert _is_full(model.model.layers[0])
    assert _is_empty(model.model.layers[2])


def test_lists_inside_a_layer_are_part_of_it() -> None:
    """A layer with experts is filled whole, and iterating over its experts is unchanged."""
    source = _source()
    model = _empty(source)
    for layer in model.model.layers:
        with torch.device("meta"):
            layer.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    asked: list[str] = []

    def read(name: str, empty: torch.nn.Parameter) -> torch.Tensor:
        asked.append(name)
        return torch.zeros(empty.shape)

    with weights.filled_in_turn(model, read, _CPU, lambda _: None):
        assert not any("experts" in name for name in asked)
        for _, layer in model.model.layers.named_children():
            assert type(layer.experts) is torch.nn.ModuleList
            assert _is_full(layer.experts)
            list(layer.experts.named_children())
    assert asked.count("model.layers.1.experts.0.weight") == 1
    assert len(asked) == len(set(asked)) == len(list(model.named_parameters()))
