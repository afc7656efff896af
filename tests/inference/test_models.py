from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_model
from support.tiny_model import write_model

from pytest_llmgpu.inference import models, weights
from pytest_llmgpu.inference.bundled import PRESETS

CPU = torch.device("cpu")
TEXTS = ["a man sits on a roof", "he starts pulling up roofing", "the lady stands and lifts the weight"]
SMALL: dict[str, object] = {**tiny_model.SIZES, "vocab_size": 300}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of a tiny model, which tests must not change."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_model(directory)
    return directory


@pytest.fixture
def directory(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model to break."""
    return shutil.copytree(written, tmp_path / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's cache out of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _resolve(model: str | Path, rootdir: Path, **options: Any) -> models.ModelSource:
    return models.resolve(str(model), texts=TEXTS, rootdir=rootdir, **options)


def _dummy(**fields: Any) -> models.ModelSource:
    return tiny_model.source(SMALL | fields)


def _filled(source: models.ModelSource, seed: int = 0, dtype: Any = torch.float32) -> Any:
    model = weights.skeleton(source, dtype)
    weights.materialise(model, lambda _: CPU, seed=seed, dtype=dtype)
    return model


def test_resolving_needs_no_torch(written: Path) -> None:
    """A model is found without the libraries that run it."""
    code = (
        "import sys; from pathlib import Path; from pytest_llmgpu.inference import models;"
        f"models.resolve({str(written)!r}, texts=(), rootdir=Path());"
        "print([name for name in ('torch', 'transformers', 'accelerate', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_directory_is_found_and_named_relative_to_the_rootdir(written: Path, tmp_path: Path) -> None:
    """The name is the same on every machine, and the source pickles."""
    source = _resolve(written, written.parent)
    assert (source.name, source.directory, source.tokenizer_directory) == ("tiny", str(written), str(written))
    assert source.config["vocab_size"] == 300
    assert pickle.loads(pickle.dumps(source)) == source
    assert _resolve("tiny", written.parent) == source
    (tmp_path / "deep").mkdir()
    assert _resolve(written, tmp_path / "deep").name == "tiny"


def test_the_revision_of_a_directory_tells_checkpoints_apart(directory: Path) -> None:
    """Copies have equal fingerprints; other weights of the same shape or another configuration do not."""
    original = _resolve(directory, directory.parent).revision
    copy = shutil.copytree(directory, directory.with_name("copy"))
    assert _resolve(copy, directory.parent).revision == original
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    assert _resolve(copy, directory.parent).revision != original
    config = json.loads((directory / "config.json").read_text()) | {"rope_theta": 5.0}
    (directory / "config.json").write_text(json.dumps(config))
    assert _resolve(directory, directory.parent).revision != original


def test_the_hash_of_each_file_shows_which_one_differs(directory: Path) -> None:
    """Weights are sampled; without weights only the other files have a hash."""
    before = models.file_hashes(directory, weights=True)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(before)
    assert set(before) - set(models.file_hashes(directory, weights=False)) == {"model.safetensors"}
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    after = models.file_hashes(directory, weights=True)
    assert [name for name in before if before[name] != after[name]] == ["model.safetensors"]


def _remove(name: str) -> Any:
    return lambda directory: (directory / name).unlink()


def _write(name: str, content: bytes) -> Any:
    return lambda directory: (directory / name).write_bytes(content)


def _only_bin(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _cut_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _index(content: bytes) -> Any:
    return _write("model.safetensors.index.json", content)


def _header(content: bytes) -> Any:
    return _write("model.safetensors", len(content).to_bytes(8, "little") + content + bytes(64))


_DEEP = b"[" * 100_000


def _shard_missing(directory: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove("config.json"), "has no config.json"),
        (_write("config.json", b"{"), "config.json cannot be read"),
        (_write("config.json", b"[]"), "is not a JSON object"),
        (_remove("model.safetensors"), "has no weights: .*safetensors are needed"),
        (_only_bin, r"has only pytorch_model.bin, which can run code.*save_pretrained"),
        (_cut_short, r"has \d+ bytes instead of \d+"),
        (_write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (_write("model.safetensors", b"not at all"), "is not a safetensors file"),
        (_write("model.safetensors", b"\x02" + b"\0" * 7 + b"{}"), "is not a safetensors file"),
        (_shard_missing, r"lacks model-00002-of-00002.safetensors: 1 of 2"),
        (_write("config.json", _DEEP), "config.json cannot be read: the JSON is nested too deeply"),
        (_index(b"{}"), "index.json: weight_map is missing"),
        (_index(b'{"weight_map": [1]}'), "index.json: weight_map is missing"),
        (_index(b'{"weight_map": {"a": 1}}'), "index.json: 1 in weight_map is not the name of a file"),
        (_index(b'{"weight_map": {"a": "\\n::error::x"}}'), "error::x' in weight_map is not the name of a file"),
        (_index(b'{"weight_map": {"a": "../b"}}'), "'../b' in weight_map is not the name of a file"),
        (_index(_DEEP), "index.json cannot be read: the JSON is nested too deeply"),
        (_header(b'{"a": {"data_offsets": [0, "x"]}}'), "is not a safetensors file"),
        (_header(b'{"a": {"data_offsets": [0, Infinity]}}'), "is not a safetensors file"),
        (_header(_DEEP), "is not a safetensors file"),
        (_write("tokenizer.json", _DEEP), "tokenizer.json cannot be read: the JSON is nested too deeply"),
        (_write("tokenizer.json", b'{"model": {"vocab": {"a": Infinity}}}'), "is not a tokenizer"),
        (_remove("tokenizer.json"), "has no tokenizer"),
        (_write("tokenizer.json", b'{"model": {}}'), "is not a tokenizer"),
    ],
)
def test_a_directory_that_cannot_be_loaded_is_refused(directory: Path, damage: Any, message: str) -> None:
    """A damaged directory is refused in one line with what to do."""
    damage(directory)
    with pytest.raises(ValueError, match=message) as caught:
        _resolve(directory, directory.parent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("bundle", {}, r"model 'bundle' is unknown \(did you mean bundled\?\): allowed are bundled, llama-7b"),
        ("lama-7b", {}, "did you mean llama-7b"),
        ("/no/such/model", {}, "model '/no/such/model' is unknown: allowed"),
        ("llama-7b", {}, "llama-7b is an architecture without weights: use load format dummy"),
        ("bundled", {"load_format": "gguf"}, "load format 'gguf' is unknown: allowed are auto, dummy"),
        (
            "llama-7b",
            {"load_format": "dummy", "revision": "main"},
            "revision 'main' is not allowed: .* is not a model of the hub",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, model: str, options: dict[str, Any], message: str) -> None:
    """The message names the value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        _resolve(model, tmp_path, **options)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(directory: Path) -> None:
    """A token id outside the vocabulary is refused, since it would crash a GPU process."""
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": 260}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"tokenizer tiny has token 2.., and model tiny has a vocabulary of 260"):
        _resolve(directory, directory.parent, load_format="dummy")


def test_a_hub_model_is_its_commit(written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only safetensors and small files are downloaded, and the commit is the revision."""
    commit = shutil.copytree(written, tmp_path / "snapshots" / "0123abcd")
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(commit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    source = _resolve("someone/tiny", tmp_path, revision="main")
    assert (source.name, source.revision, source.directory) == ("someone/tiny", "0123abcd", str(commit))
    assert (asked["repository"], asked["revision"]) == ("someone/tiny", "main")
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])
    _resolve("someone/tiny", tmp_path, load_format="dummy")
    assert "*.safetensors" in asked["ignore_patterns"]


def test_a_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message has the first line of the hub's error."""

    def snapshot_download(*_: Any, **__: Any) -> str:
        raise ConnectionError("Cannot reach the hub\nlong story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"'models/tiny' is not a directory, and .*: Cannot reach the hub ") as caught:
        _resolve("models/tiny", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def small_preset(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a preset that is trained for and built in no time."""
    monkeypatch.setitem(PRESETS, "small", SMALL)
    return "small"


def test_a_presets_tokenizer_is_trained_once_and_kept(small_preset: str, tmp_path: Path, cache: Path) -> None:
    """Equal texts give the cached tokenizer, and other texts give another."""
    first = _resolve(small_preset, tmp_path, load_format="dummy")
    trained = Path(first.tokenizer_directory)
    assert trained.is_relative_to(cache / "pytest-llmgpu")
    assert (first.directory, first.revision, first.config) == (None, None, SMALL)
    (trained / "tokenizer.json").touch()
    before = (trained / "tokenizer.json").stat().st_mtime_ns
    assert _resolve(small_preset, tmp_path, load_format="dummy") == first
    assert (trained / "tokenizer.json").stat().st_mtime_ns == before
    shutil.rmtree(cache)
    assert _resolve(small_preset, tmp_path, load_format="dummy") == first
    other = models.resolve(small_preset, texts=["else"], rootdir=tmp_path, load_format="dummy")
    assert other.tokenizer_sha256 != first.tokenizer_sha256


@pytest.mark.parametrize(
    ("preset", "billions", "tokens"),
    [
        ("llama-7b", 6.738, 2048),
        ("llama-13b", 13.016, 2048),
        ("llama-30b", 32.529, 2048),
        ("llama-65b", 65.286, 2048),
        ("llama-3-8b", 8.030, 8192),
    ],
)
def test_a_preset_is_the_architecture_of_its_name(preset: str, billions: float, tokens: int, tmp_path: Path) -> None:
    """A preset has the published number of parameters and maximum input length."""
    source = _resolve(preset, tmp_path, load_format="dummy")
    model = weights.skeleton(source, torch.float16)
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=5e-4)
    assert models.max_length(model.config) == tokens


def test_a_cache_that_cannot_be_written_is_named(small_preset: str, tmp_path: Path, cache: Path) -> None:
    """The message names the variable that sets the folder."""
    cache.write_text("a file in its place")
    with pytest.raises(ValueError, match=r"cannot be written .*set XDG_CACHE_HOME"):
        _resolve(small_preset, tmp_path, load_format="dummy")


def test_a_skeleton_has_no_weights_but_its_buffers() -> None:
    """Parameters use no memory, and the rotary frequencies are float32."""
    model = weights.skeleton(_dummy(), torch.float16)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert {(buffer.device.type, buffer.dtype) for buffer in model.buffers()} == {("cpu", torch.float32)}
    assert not model.training


def test_dummy_weights_depend_on_seed_name_and_shape_alone() -> None:
    """Weights depend on the name and the seed, and not on the number of layers."""
    whole, fewer, other = _filled(_dummy()), _filled(_dummy(num_hidden_layers=1)), _filled(_dummy(), seed=1)
    weights, expected = dict(fewer.named_parameters()), dict(whole.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    assert not torch.equal(other.lm_head.weight, whole.lm_head.weight)
    layer = whole.model.layers
    assert not torch.equal(layer[0].mlp.up_proj.weight, layer[1].mlp.up_proj.weight)


def test_dummy_weights_are_spread_as_a_fresh_model_has_them() -> None:
    """Weights are normal with the configured deviation, norms are 1, biases are 0, and no gradient is needed."""
    model = _filled(_dummy(attention_bias=True, initializer_range=0.1))
    assert float(model.lm_head.weight.std()) == pytest.approx(0.1, rel=0.05)
    assert float(model.lm_head.weight.mean()) == pytest.approx(0, abs=0.005)
    assert bool((model.model.norm.weight == 1).all())
    assert bool((model.model.layers[0].self_attn.q_proj.bias == 0).all())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_longest_input_is_found_where_the_text_model_has_it() -> None:
    """A nested text configuration comes first, and the default is lm-evaluation-harness's 2048."""
    from types import SimpleNamespace as Config

    text: Any = Config(text_config=Config(max_position_embeddings=512), max_position_embeddings=77)
    plain: Any = Config(n_positions=1024)
    nothing: Any = Config()
    assert [models.max_length(config) for config in (text, plain, nothing)] == [512, 1024, 2048]


@pytest.mark.parametrize("name", ["bundled", "llama-7b", "huggyllama/llama-7b"])
def test_a_folder_called_like_something_known_is_told_from_it(name: str, written: Path, tmp_path: Path) -> None:
    """A folder with the name of a known model does not get its baseline."""
    copied = tmp_path / name
    copied.mkdir(parents=True)
    for file in written.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    assert _resolve(copied, tmp_path).name == f"./{name}"


@pytest.mark.parametrize("text_config", [[], "x", 1, None, {"vocab_size": "many"}])
def test_a_text_configuration_of_another_type_has_no_vocabulary(directory: Path, text_config: Any) -> None:
    """The class of the model then refuses it or has a default."""
    (directory / "config.json").write_text(json.dumps({"text_config": text_config}))
    assert _resolve(directory, directory.parent).config == {"text_config": text_config}
