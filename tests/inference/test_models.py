from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support import tiny_model
from support.report_factory import make_case

from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.bundled import PRESETS
from pytest_llmgpu.inference.models import ModelFacts, ModelSource
from pytest_llmgpu.strategies.tp import TensorParallel

TEXTS = ["a man sits on a roof", "he starts pulling up roofing", "the lady stands and lifts the weight"]


@pytest.fixture
def directory(model: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model to break."""
    return shutil.copytree(model, tmp_path / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's cache out of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _resolve(model: str | Path, rootdir: Path, **options: Any) -> ModelSource:
    return models.resolve(str(model), texts=TEXTS, rootdir=rootdir, **options)


@pytest.mark.parametrize(
    ("preset", "attention", "experts", "refusal"),
    [
        ("llama-7b", "sdpa", "", ""),
        ("llama-7b", "sdpae", "", "attention=sdpae: .* is not supported: allowed here: eager,.* sdpa"),
        ("llama-7b", "", "eager", "experts=eager: the model has no experts: allowed here: none"),
        ("gpt-oss-20b", "sdpa", "", "attention=sdpa: .* not support .*: allowed here: eager"),
        ("gpt-oss-20b", "", "sonicmoe", "experts=sonicmoe: the package kernels .*: allowed here: eager, batched_mm"),
        ("gpt-oss-20b", "eager", "batched_mm", ""),
        ("llama-7b", "paged|sdpa", "", r"attention=paged\|sdpa: only transformers-cb .*: allowed here: eager,.* sdpa$"),
    ],
)
def test_a_choice_that_cannot_run_here_is_refused(preset: str, attention: str, experts: str, refusal: str) -> None:
    """The line names what can; what transformers makes of a preset is that of its architecture."""
    if experts == "sonicmoe" and find_spec("kernels"):
        pytest.skip("kernels is installed")
    place = json.dumps(PRESETS[preset])
    found = models.refusal_here(place, attention, experts, "", "cpu", "float32")
    assert re.match(f"--llmgpu-{refusal}", found) if refusal else not found
    facts = models.facts_here(place)
    assert facts.has_plan is facts.has_sdpa is (preset == "llama-7b")


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"model_type": "bloom"}, "--llmgpu-attention=nonsense: the attention of the model is its own: .*: eager$"),
        ({"model_type": "lfm2_moe", "num_hidden_layers": 2, "layer_types": []}, "--llmgpu-model: .* cannot build it: "),
    ],
)
def test_a_model_that_takes_no_choice_is_refused(config: dict[str, Any], refusal: str) -> None:
    """Transformers ignores an attention that the code of a model does not look up."""
    assert re.match(refusal, models.refusal_here(json.dumps(config), "nonsense", "", "", "cpu", "float32"))


def test_resolving_needs_no_torch(model: Path) -> None:
    """A model is found without the libraries that run it."""
    code = (
        "import sys; from pathlib import Path; from pytest_llmgpu.inference import models;"
        f"models.resolve({str(model)!r}, texts=(), rootdir=Path());"
        "print([name for name in ('torch', 'transformers', 'accelerate', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_directory_is_found_and_named_relative_to_the_rootdir(model: Path, tmp_path: Path) -> None:
    """The name is the same on every machine, and the source pickles."""
    source = _resolve(model, model.parent)
    assert (source.name, source.directory, source.tokenizer_directory) == ("tiny", str(model), str(model))
    assert source.config["vocab_size"] == 300
    assert pickle.loads(pickle.dumps(source)) == source
    assert _resolve("tiny", model.parent) == source
    (tmp_path / "deep").mkdir()
    assert _resolve(model, tmp_path / "deep").name == "tiny"
    for name in ("bundled", "llama-7b", "huggyllama/llama-7b"):  # a known model's name would give it its baseline
        assert _resolve(shutil.copytree(model, tmp_path / name), tmp_path).name == f"./{name}"


def test_checkpoints_are_told_apart_and_so_are_their_files(directory: Path) -> None:
    """Only copies have equal revisions; the hash of each file shows which one differs."""
    original, hashes = _resolve(directory, directory.parent).revision, models.file_hashes(directory, weights=True)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(hashes)
    assert set(hashes) - set(models.file_hashes(directory, weights=False)) == {"model.safetensors"}
    copy = shutil.copytree(directory, directory.with_name("copy"))
    assert _resolve(copy, directory.parent).revision == original
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert _resolve(copy, directory.parent).revision != original
    others = models.file_hashes(copy, weights=True)
    assert [name for name in hashes if hashes[name] != others[name]] == ["model.safetensors"]
    (directory / "config.json").write_bytes((copy / "config.json").read_bytes() + b"\n")
    assert _resolve(directory, directory.parent).revision != original


def _safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(64)


_DEEP = b"[" * 100_000
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({_CONFIG: None}, "has no config.json"),
        ({_CONFIG: b"{"}, "config.json cannot be read"),
        ({_CONFIG: b"[]"}, "is not a JSON object"),
        ({_CONFIG: _DEEP}, "config.json cannot be read: the JSON is nested too deeply"),
        ({_CONFIG: b'{"a": "' + bytes(2**22) + b'"}'}, "is larger than 4,194,304 bytes"),
        ({_CONFIG: b'{"num_hidden_layers": -1}'}, "config.json: num_hidden_layers=-1: at least 1 is needed"),
        ({_CONFIG: b'{"text_config": {"n_layer": 0}}'}, "config.json: n_layer=0: at least 1 is needed"),
        ({_CONFIG: b'{"_attn_implementation": "a/kernel"}'}, "_attn_implementation='a/kernel' is not allowed: remove"),
        ({_CONFIG: b'{"b": [{"attn_implementation": {"": "eager"}}]}'}, "attn_implementation=.* is not allowed"),
        ({_WEIGHTS: None}, "has no weights: .*safetensors are needed"),
        ({_WEIGHTS: None, "pytorch_model.bin": b""}, "has only pytorch_model.bin, which can run code"),
        ({_WEIGHTS: b"version https://git-lfs.github.com/spec/v1\n"}, "git lfs pull"),
        ({_WEIGHTS: b"not at all"}, "is not a safetensors file"),
        ({_WEIGHTS: b"\x02" + b"\0" * 7 + b"{}"}, "is not a safetensors file"),
        ({_WEIGHTS: _safetensors(b'{"a": {"data_offsets": [0, 65]}}')}, "has 104 bytes instead of 105"),
        ({_WEIGHTS: _safetensors(b'{"a": {"data_offsets": [0, Infinity]}}')}, "is not a safetensors file"),
        ({_WEIGHTS: _safetensors(_DEEP)}, "is not a safetensors file"),
        ({_INDEX: json.dumps({"weight_map": {"a": _WEIGHTS, "b": _SECOND}}).encode()}, f"lacks {_SECOND}: 1 of 2"),
        ({_INDEX: b"{}"}, "index.json: weight_map is missing"),
        ({_INDEX: b'{"weight_map": [1]}'}, "index.json: weight_map is missing"),
        ({_INDEX: b'{"weight_map": {"a": 1}}'}, "index.json: 1 in weight_map is not the name of a file"),
        ({_INDEX: b'{"weight_map": {"a": "\\n::error::x"}}'}, "error::x' in weight_map is not the name of a file"),
        ({_INDEX: b'{"weight_map": {"a": "../b"}}'}, "'../b' in weight_map is not the name of a file"),
        ({_TOKENIZER: None}, r"has no tokenizer \(.*\): pass one with --llmgpu-tokenizer=DIR"),
        ({_TOKENIZER: b'{"model": {}}'}, "is not a tokenizer"),
        ({_TOKENIZER: b'{"model": {"vocab": {"a": Infinity}}}'}, "is not a tokenizer"),
        # A token id outside the vocabulary would crash a GPU process.
        (
            {_TOKENIZER: b'{"model": {"vocab": {"a": 300}}}'},
            "the tokenizer tiny has token 300, and tiny/config.json a vocab_size of 300",
        ),
        ({_TOKENIZER: b'{"model": {"vocab": [["a", 0]]}, "added_tokens": [{"id": 300}]}'}, "has token 300"),
        ({_CONFIG: b'{"text_config": {"vocab_size": 260}}'}, "tiny/config.json a vocab_size of 260"),
    ],
)
def test_a_broken_directory_is_refused(directory: Path, files: dict[str, bytes | None], message: str) -> None:
    """A damaged directory is refused in one line with what to do."""
    for name, content in files.items():
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        _resolve(directory, directory.parent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [_CONFIG, _WEIGHTS, _TOKENIZER, "generation_config.json"])
def test_a_pipe_is_refused_and_not_read(directory: Path, name: str) -> None:
    """Reading it would wait for somebody who writes to it."""
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(ValueError, match=f"{name} is a pipe, a socket or a device: a file is needed"):
        _resolve(directory, directory.parent)


def test_a_tokenizer_is_named_as_it_was_chosen(directory: Path) -> None:
    """The folder of the bundled one is `model`."""
    with pytest.raises(
        ValueError, match=r"the tokenizer bundled has token \d+, and tiny/config.json a vocab_size of 300:"
    ):
        _resolve(directory, directory.parent, tokenizer="bundled")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("bundle", {}, r"model 'bundle' is unknown \(did you mean bundled\?\): allowed are bundled, llama-7b"),
        ("lama-7b", {}, "did you mean llama-7b"),
        ("/no/such/model", {}, "model '/no/such/model' is unknown: allowed"),
        ("llama-7b", {}, "llama-7b is an architecture without weights: use --llmgpu-load-format=dummy"),
        ("llama-7b", {"load_format": "dummy", "revision": "main"}, "'main' is not allowed: .* no.* model of the hub"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, model: str, options: dict[str, Any], message: str) -> None:
    """The message names the value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        _resolve(model, tmp_path, **options)


def test_a_hub_model_is_its_commit(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only safetensors and small files are downloaded; a hub out of reach is one line with the first of its error."""
    commit = shutil.copytree(model, tmp_path / "snapshots" / "0123abcd")
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        if repository != "someone/tiny":
            raise ConnectionError("Cannot reach the hub\nlong story")
        asked.update(options)
        return str(commit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    source = _resolve("someone/tiny", tmp_path, revision="main")
    assert (source.name, source.revision, source.directory) == ("someone/tiny", "0123abcd", str(commit))
    assert asked["revision"] == "main"
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])
    _resolve("someone/tiny", tmp_path, load_format="dummy")
    assert "*.safetensors" in asked["ignore_patterns"]
    with pytest.raises(
        ValueError,
        match=r"^--llmgpu-model=models/tiny: model 'models/tiny' is not a directory, .*: Cannot reach the hub \(.*$",
    ):
        _resolve("models/tiny", tmp_path)


def test_a_presets_tokenizer_is_trained_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal texts give the cached tokenizer, others another; a cache that cannot be written is an error."""
    monkeypatch.setitem(PRESETS, "small", {"vocab_size": 300})
    first = _resolve("small", tmp_path, load_format="dummy")
    trained = Path(first.tokenizer_directory)
    assert trained.is_relative_to(cache / "pytest-llmgpu")
    assert (first.directory, first.revision, first.config) == (None, None, PRESETS["small"])
    (trained / "kept").touch()
    assert _resolve("small", tmp_path, load_format="dummy") == first
    assert (trained / "kept").exists()
    shutil.rmtree(cache)
    assert _resolve("small", tmp_path, load_format="dummy") == first
    other = models.resolve("small", texts=["else"], rootdir=tmp_path, load_format="dummy")
    assert other.tokenizer_sha256 != first.tokenizer_sha256
    shutil.rmtree(cache)
    cache.write_text("a file in its place")
    with pytest.raises(ValueError, match=r"cannot be written .*set XDG_CACHE_HOME"):
        _resolve("small", tmp_path, load_format="dummy")


def test_the_longest_input_is_found_where_the_text_model_has_it() -> None:
    """A nested text configuration comes first, and the default is lm-evaluation-harness's 2048."""
    text = SimpleNamespace(text_config=SimpleNamespace(max_position_embeddings=512), max_position_embeddings=77)
    plain, nothing = SimpleNamespace(n_positions=1024), SimpleNamespace()
    assert [models.max_length(config) for config in (text, plain, nothing)] == [512, 1024, 2048]


@pytest.mark.parametrize("text_config", [[], "x", 1, None, {"vocab_size": "many"}])
def test_a_text_configuration_of_another_type_has_no_vocabulary(directory: Path, text_config: Any) -> None:
    """The class of the model then refuses it or has a default."""
    (directory / "config.json").write_text(json.dumps({"text_config": text_config}))
    assert _resolve(directory, directory.parent).config == {"text_config": text_config}


def test_a_llama_needs_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model and presets start as fast as before."""
    monkeypatch.setattr("subprocess.run", pytest.fail)
    sources = tiny_model.source({"model_type": "llama"}, Path("theirs")), tiny_model.source({})
    assert [models.facts(source) for source in sources] == [ModelFacts(has_plan=True)] * 2


@pytest.mark.slow
def test_counts_have_the_names_and_defaults_of_transformers(tmp_path: Path) -> None:
    """Heads are found whatever the config calls them, and where it leaves them to its class; and what it lacks."""
    config = {"model_type": "codegen", "n_head": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = tiny_model.source(config, tmp_path, name="theirs", load_format="dummy")
    assert models.facts(source) == ModelFacts(has_plan=False, has_sdpa=False, counts={"num_attention_heads": 3})
    case = make_case(strategy="tp", backend="transformers", device="cpu", devices=3)
    with pytest.raises(ValueError, match=r"--llmgpu-model=theirs: .*no tensor-parallel plan .*\(codegen\)"):
        TensorParallel().check(case, source)
    autotp = msgspec.structs.replace(case, backend="deepspeed", dtype="float32")
    TensorParallel().check(autotp, source)
    with pytest.raises(ValueError, match="cannot split the 3 attention heads of theirs"):
        TensorParallel().check(msgspec.structs.replace(autotp, devices=2), source)


_IMAGES = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_attention_heads": 6}}
_AWQ = {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}
_no_gptqmodel = pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="the library is installed")


@pytest.mark.parametrize(
    ("config", "fact", "found"),
    [
        # What a model does not take can be no argument of a decode step; its config has attention heads all the same.
        ({"model_type": "gpt2"}, "without", "None"),
        ({"model_type": "openai-gpt"}, "without", "past_key_values"),
        ({"model_type": "mamba"}, "without", "past_key_values"),
        ({"model_type": "bloom"}, "without", "position_ids"),
        # The decoder of a model of images and text is planned in its own config.
        (_IMAGES, "has_plan", "True"),
        (_IMAGES, "counts", r".*'num_attention_heads': 6\b.*"),
        (_IMAGES, "expert_parallel", r"\(\)"),
        ({"model_type": "qwen3_moe"}, "expert_parallel", ".*'all_reduce'.*"),
        ({"model_type": "qwen3_moe"}, "counts", r".*'num_experts': 128\b.*"),
        ({"model_type": "nothing-known"}, "refusal", ".*nothing-known.*"),
        ({"model_type": "mamba2", "hidden_size": 32}, "refusal", ".*Inconsistent configuration: .*"),
        pytest.param(_AWQ, "refusal", ".*gptqmodel.*", marks=_no_gptqmodel),
    ],
)
def test_facts_are_those_of_transformers(tmp_path: Path, config: dict[str, Any], fact: str, found: str) -> None:
    """A refusal is one line with the name of what is missing."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert re.fullmatch(found, str(getattr(models.facts_here(str(tmp_path)), fact)))
