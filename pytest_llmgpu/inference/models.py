"""The model of `--llmgpu-model`: found, checked and fingerprinted in pytest's process, without torch.

Only a small part of the weights is read, so that 65 GB take as long as 65 MB; `weights` loads them in a rank. What
transformers makes of a config is found out in a child process, `python -m pytest_llmgpu.inference.models`, before any
rank starts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu import processes
from pytest_llmgpu.inference import bundled, quantization
from pytest_llmgpu.report.file import parse_json, read
from pytest_llmgpu.report.text import first_line, guess

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "tokenizer*")
_JSON_BYTES = 2**26
"""The limit of a JSON file; the largest tokenizers have 35 MB."""
_CONFIG_BYTES = 2**22
"""The limit of config.json, which needs some 25 times its size in memory."""
_ATTENTION = re.compile(r"_?attn_implementation(_internal)?")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADER_BYTES = 100_000_000
"""The limit of a header in the format."""
_BLOCK_BYTES = 4096
_BLOCKS = 16
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),  # a tokenizer has one of these
    *("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""The errors of a look-up in JSON of any shape."""

SPLIT_COUNTS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of the feed-forward layers",
}
"""Counts of the decoder that tensor parallelism splits: the names that transformers gives them in every config."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names of the number of experts of a layer in configs."""
_EXPERTS_OF_TORCH = ("eager", "batched_mm", "grouped_mm")
"""The implementations of experts that need no kernel of the hub."""


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a rank needs to load a model."""

    name: str
    """The name of the model: `bundled`, a preset, a hub id, or a directory (relative, else its base name)."""
    directory: str | None
    """The directory of config.json and the weights; None for a preset."""
    config: dict[str, Any]
    """The content of config.json, or the fields of a preset."""
    revision: str | None
    """The commit of a hub model, the fingerprint of a directory, None for a preset."""
    load_format: str
    """The source of the weights: `auto` reads safetensors, `dummy` makes seeded random weights on the device."""
    tokenizer_directory: str
    """The directory of the tokenizer."""
    tokenizer_sha256: str
    """The hash of the tokenizer's files."""
    attention: str | None = None
    """The attention of transformers; None for the one that it chooses itself."""
    experts: str | None = None
    """The implementation of experts in transformers; None for the one that it chooses itself."""
    quantization: str | None = None
    """The quantisation of `--llmgpu-quantization`, or that of the checkpoint, such as `fp8-checkpoint`; None for plain
    weights."""

    @property
    def decoder(self) -> dict[str, Any]:
        """The fields of the config that describe the decoder: those of `text_config` if there is one."""
        return dict(self.config.get("text_config") or self.config)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of transformers."""

    has_plan: bool
    """True if transformers can split the layers over devices by tensor parallelism."""
    has_sdpa: bool = True
    """True if transformers has attention by torch's `scaled_dot_product_attention`, which it then chooses."""
    without: str | None = None
    """An argument that decode steps with a KV cache need and the model does not take; None if it takes all of them."""
    expert_parallel: tuple[str, ...] = ()
    """The values of `--llmgpu-tp-expert-parallel` that this version of transformers has for the model."""
    counts: dict[str, int] = {}
    """Those of `SPLIT_COUNTS` and `EXPERTS` that the decoder has, also where its config leaves them to its class."""
    refusal: str | None = None
    """The reason why the model cannot be loaded; None if its config is no such reason."""


def resolve(
    model: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    load_format: str = "auto",
    texts: Iterable[str],
    rootdir: Path,
) -> ModelSource:
    """Find a model and its tokenizer, and refuse a model that cannot be loaded, before anything starts.

    The arguments are those of the options. A relative path starts from the working directory, else from `rootdir`, to
    which the shown name is relative. The tokenizer of a preset is trained on `texts`. The ValueError has the option,
    the wrong value and the allowed ones, in one line.
    """
    dummy, flag = load_format == "dummy", f"--llmgpu-model={model}"
    try:
        if model in bundled.PRESETS:
            if not dummy:
                raise ValueError(f"model {model} is an architecture without weights: use --llmgpu-load-format=dummy")  # noqa: TRY301 - with the option below
            name, directory, fields, at, from_hub = model, None, bundled.PRESETS[model], None, False
        else:
            name, directory, commit = _locate(model, revision, rootdir, weights=not dummy)
            fields, fingerprint = _read_directory(directory, weights=not dummy)
            at, from_hub = commit or fingerprint, commit is not None
        if revision not in (None, at) and not from_hub:
            own = f", its revision is {at}" if at else ""
            raise ValueError(f"revision {revision!r} is not allowed: {model} is not a model of the hub{own}")  # noqa: TRY301 - as above
        flag = flag if tokenizer in (None, model) else f"--llmgpu-tokenizer={tokenizer}"
        if tokenizer is not None:
            called, tokenizer_directory, _ = _locate(tokenizer, None, rootdir, weights=False)
        else:
            called, tokenizer_directory = name, directory or _preset_tokenizer(texts, fields["vocab_size"])
        _check_vocabulary(tokenizer_directory, fields, called, f"{name}/config.json" if directory else name)
        sha256 = tokenizer_sha256(tokenizer_directory)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    return ModelSource(
        name=name,
        directory=None if directory is None else str(directory),
        config=fields,
        revision=at,
        load_format=load_format,
        tokenizer_directory=str(tokenizer_directory),
        tokenizer_sha256=sha256,
    )


def max_length(config: PretrainedConfig | SimpleNamespace | None) -> int:
    """Return the maximum input length in tokens, as lm-evaluation-harness does; 2048 if the config has none."""
    text = getattr(config, "text_config", None) or config
    lengths = (getattr(text, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((int(length) for length in lengths if length is not None), 2048)


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that transformers reads: a single file, or those of the index."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not whole.exists() and index.exists():
        return [directory / name for name in sorted(_indexed(index))]
    return [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))


def file_hashes(directory: Path, *, weights: bool) -> dict[str, str]:
    """Return name to hash of each file that loading reads; of a safetensors file size, header and 16 blocks count."""
    found = {}
    for path in sorted({path for pattern in _HUB_FILES for path in directory.glob(pattern) if path.is_file()}):
        digest = hashlib.sha256()
        if path.suffix != ".safetensors":
            digest.update(path.read_bytes())
        elif weights:
            _add_weights(digest, path)
        else:
            continue
        found[path.name] = digest.hexdigest()
    return found


def tokenizer_sha256(directory: Path) -> str:
    """Return a hash of the tokenizer's files; ValueError if the directory has no tokenizer."""
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not any(path.name in _TOKENIZER_FILES[:4] for path in files):
        names = ", ".join(_TOKENIZER_FILES[:4])
        raise ValueError(f"{directory} has no tokenizer ({names}): pass one with --llmgpu-tokenizer=DIR")
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_tokenizer(source: ModelSource, *, add_bos: bool | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; `add_bos` puts its beginning-of-sequence token first, None is its own setting."""
    from transformers import AutoTokenizer

    silence_transformers()
    own = {} if add_bos is None else {"add_bos_token": add_bos}
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source.tokenizer_directory, local_files_only=True, trust_remote_code=False, **own
    )
    return tokenizer


def silence_transformers() -> None:
    """Silence transformers' progress bars and warnings: a rank's log is for failures."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def facts(source: ModelSource) -> ModelFacts:
    """Return what transformers makes of a model.

    A LLaMA that is not quantised, such as the bundled model, needs no child process, which takes seconds. ValueError if
    transformers does not know the architecture, or the library of its quantisation is not installed.
    """
    if source.config.get("model_type", "llama") == "llama" and quantization.of_checkpoint(source.config) is None:
        return ModelFacts(has_plan=True)
    found = msgspec.json.decode(_asked(source.directory or json.dumps(source.config)), type=ModelFacts)
    if found.refusal is not None:
        raise ValueError(f"--llmgpu-model={source.name}: transformers cannot load it: {found.refusal}")
    return found


@functools.cache
def _asked(*arguments: str) -> str:
    """Return the JSON that this module prints in a child process."""
    return processes.ask("pytest_llmgpu.inference.models", *arguments, library="transformers")


def implementations(config: PretrainedConfig | None) -> dict[str, str]:
    """Return the implementations that a loaded model has chosen, by `attention` and `experts`."""
    decoder = None if config is None else config.get_text_config()
    names = {"attention": "_attn_implementation"}
    names |= {"experts": "_experts_implementation"} if experts_of(config) else {}
    return {kind: str(chosen) for kind, name in names.items() if (chosen := getattr(decoder, name, None))}


def experts_of(config: PretrainedConfig | None) -> int:
    """Return the number of experts of a layer, 0 for a dense model."""
    decoder = None if config is None else config.get_text_config()
    return int(next((count for name in EXPERTS if (count := getattr(decoder, name, None))), 0))


def check_choices(source: ModelSource, device: str, dtype: str) -> None:
    """Refuse an attention, an implementation of experts or a quantisation that cannot run here, before a rank starts.

    The ValueError has the option, the reason and the names that are possible.
    """
    quantized = source.quantization if source.quantization in quantization.CONFIGS else None
    if source.experts is None and source.attention in (None, "eager") and quantized is None:
        return
    asked = [name or "" for name in (source.attention, source.experts, quantized)]
    if refusal := json.loads(_asked(source.directory or json.dumps(source.config), *asked, device, dtype)):
        raise ValueError(refusal)


def refusal_here(place: str, attention: str, experts: str, quantized: str, device: str, dtype: str) -> str:
    """Return why one of the choices cannot run here, empty if all can. This runs in the child process."""
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.moe import ExpertsInterface

    silence_transformers()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(place))
    except Exception as error:  # noqa: BLE001 - classes of models check their configs in their own ways
        return f"--llmgpu-model: transformers cannot build it: {first_line(error)}"

    def set_attention(name: str) -> None:
        if name.startswith("paged|"):
            raise ValueError("only transformers-cb has a cache of pages, and chooses it itself")
        before = implementations(model.config)
        model.set_attn_implementation(name)
        if name not in before.values() and implementations(model.config) == before:
            raise ValueError("the attention of the model is its own")

    def set_experts(name: str) -> None:
        if "experts" not in implementations(model.config):
            raise ValueError("the model has no experts")
        if name in ExpertsInterface() and name not in _EXPERTS_OF_TORCH and not importlib.util.find_spec("kernels"):
            raise ValueError("the package kernels is not installed")
        model.set_experts_implementation(name)

    names = "eager", *AttentionInterface()
    for flag, wanted, choose, known in (
        ("attention", attention, set_attention, names),
        ("experts", experts, set_experts, ("eager", *ExpertsInterface())),
        ("quantization", quantized, functools.partial(quantization.attempt, device, dtype), quantization.CONFIGS),
    ):
        reason = wanted and _error_of(choose, wanted)
        if reason:
            allowed = ", ".join(name for name in known if not _error_of(choose, name)) or "none"
            return f"--llmgpu-{flag}={wanted}: {reason}: allowed here: {allowed}"
    return ""


def _error_of(choose: Callable[[str], object], name: str) -> str:
    try:
        choose(name)
    except Exception as error:  # noqa: BLE001 - a kernel of the hub may raise anything
        return first_line(error).partition(". ")[0].rstrip(".")
    return ""


def config_of(place: str) -> PretrainedConfig:
    """Return the config of transformers in a directory, or of the fields of a preset, which are JSON."""
    from transformers import AutoConfig

    if place.startswith("{"):
        return AutoConfig.for_model(**{"model_type": "llama", **json.loads(place)})
    config: PretrainedConfig = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    return config


def facts_here(place: str) -> ModelFacts:
    """Return the facts of a model, whose place is that of `config_of`. This runs in the child process."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    try:
        config = config_of(place)
        decoder = config.get_text_config(decoder=True)
        described = getattr(config, "quantization_config", None) or getattr(decoder, "quantization_config", None)
        if described is not None:
            from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

            # transformers loads the models of other methods as if they were not quantised.
            if AutoHfQuantizer.supports_quant_method(described):
                settings = AutoQuantizationConfig.from_dict(described)
                quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
                with contextlib.suppress(RuntimeError, ValueError):  # on the devices, which are those of the ranks
                    quantizer.validate_environment(device_map=None)
    except Exception as error:  # noqa: BLE001 - configs check themselves in their own ways
        return ModelFacts(has_plan=False, refusal=" ".join(str(error).split())[:500])
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)  # noqa: SLF001 - no public look-up
    forward = getattr(model_class, "forward", None)
    taken = () if forward is None else inspect.signature(forward).parameters
    counts = {name: getattr(decoder, name, None) for name in (*SPLIT_COUNTS, *EXPERTS)}
    fields = DistributedConfig.__dataclass_fields__
    ways = ("all_reduce", "all_to_all") if "ep_implementation" in fields else ("all_to_all",)
    ways = ways if "ep_size" in fields else ("all_reduce",)  # 5.23, 5.18 to 5.22, and 5.17
    return ModelFacts(
        # The plan of a class alone splits the output head and no layer.
        has_plan=bool(config.base_model_tp_plan or decoder.base_model_tp_plan),
        has_sdpa=bool(getattr(model_class, "_supports_sdpa", True)),
        expert_parallel=ways if config.base_model_ep_plan or decoder.base_model_ep_plan else (),
        without=next((name for name in ("past_key_values", "position_ids") if taken and name not in taken), None),
        counts={name: count for name, count in counts.items() if isinstance(count, int)},
    )


def _locate(model: str, revision: str | None, rootdir: Path, *, weights: bool) -> tuple[str, Path, str | None]:
    """Find `bundled`, a directory or a hub id. A hub model is downloaded, its weights only if `weights` is true.

    Return the name to show, the directory, and the commit of a hub id, None of anything else. ValueError if the model
    is unknown or cannot be downloaded.
    """
    if model == "bundled":
        return model, bundled.MODEL_DIRECTORY, None
    for path in (Path(model), rootdir / model):
        if path.is_dir():
            for entry in path.iterdir():
                if entry.is_fifo() or entry.is_socket() or entry.is_char_device() or entry.is_block_device():
                    raise ValueError(f"{entry} is a pipe, a socket or a device: a file is needed")
            here, root = path.resolve(), rootdir.resolve()
            shown = here.relative_to(root).as_posix() if here.is_relative_to(root) else here.name
            # A folder with the name of the bundled model, a preset or a hub id must not get its baseline.
            taken = shown in ("bundled", *bundled.PRESETS) or re.fullmatch(_HUB_ID, shown)
            return (f"./{shown}" if taken else shown), here, None
    if not re.fullmatch(_HUB_ID, model):
        names = ["bundled", *bundled.PRESETS]
        allowed = f"allowed are {', '.join(names)}, a directory that exists, or a hub id such as huggyllama/llama-7b"
        raise ValueError(f"model {model!r} is unknown{guess(model, names)}: {allowed}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Subfolders of a repository have the same weights in other formats.
    ignored = ["*/*", *([] if weights else ["*.safetensors"])]
    try:
        found = snapshot_download(model, revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=ignored)
    except (OSError, ValueError, HfHubHTTPError) as error:
        remedy = "check the name, the revision and the network, and set HF_TOKEN if the model has a licence to accept"
        failed = f"its download from the hub failed: {first_line(error)} ({remedy})"
        raise ValueError(f"model {model!r} is not a directory, and {failed}") from error
    return model, Path(found), Path(found).name  # the hub's cache names the folder by the commit


def _read_json(path: Path, limit_bytes: int = _JSON_BYTES) -> Any:
    """Return the JSON value in a file; ValueError in one line."""
    try:
        return parse_json(read(path, limit_bytes))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_directory(directory: Path, *, weights: bool) -> tuple[dict[str, Any], str]:
    """Return the content of config.json, and a hash of it and, with `weights`, of the safetensors files.

    The hash differs between checkpoints: fine-tuning changes every tensor, and each sampled block has many values.
    ValueError if config.json is missing or no JSON object, or a safetensors file is missing or truncated.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ValueError(f"model {directory} has no config.json: write one with transformers' save_pretrained")
    fields = _read_json(path, _CONFIG_BYTES)
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not a JSON object")  # noqa: TRY004 - the file is wrong, not the caller
    _check_config(path, fields)
    digest = hashlib.sha256(path.read_bytes())
    if not weights:
        return fields, digest.hexdigest()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = [path.name for pattern in ("*.bin", "*.pt*") for path in sorted(directory.glob(pattern))]
        found = f"only {', '.join(others[:3])}, which can run code when loaded" if others else "no weights"
        remedy = "convert with transformers' save_pretrained, or use --llmgpu-load-format=dummy for random weights"
        raise ValueError(f"model {directory} has {found}: *.safetensors are needed ({remedy})")
    index = directory / "model.safetensors.index.json"
    if index.exists():
        named = _indexed(index)
        missing = sorted(named - {path.name for path in files})
        if missing:
            raise ValueError(f"model {directory} lacks {missing[0]}: {len(missing)} of {len(named)} files are missing")
    for path in files:
        _add_weights(digest, path)
    return fields, digest.hexdigest()


def _check_config(path: Path, fields: dict[str, Any]) -> None:
    """Refuse a model without layers, and an attention that transformers would load from the hub as code."""
    parts: list[Any] = [fields]
    for part in parts:  # the list grows
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        for name, value in part.items() if isinstance(part, dict) else ():
            if _ATTENTION.fullmatch(name) and value not in (None, "eager", "sdpa"):
                reason = "is not allowed: remove it, since --llmgpu-attention chooses (sdpa or eager)"
                raise ValueError(f"{path}: {name}={value!r:.80} {reason}")
            if name in _LAYERS and part in (fields, fields.get("text_config")) and isinstance(value, int) and value < 1:
                raise ValueError(f"{path}: {name}={value}: at least 1 is needed")


def _indexed(index: Path) -> set[str]:
    """Return the names of the files in an index."""
    fields = _read_json(index)
    names = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index}: weight_map is missing: an object of weights and their files is needed")
    for name in names.values():
        if not isinstance(name, str) or not name or Path(name).name != name or not name.isprintable():
            raise ValueError(f"{index}: {name!r} in weight_map is not the name of a file")
    return set(names.values())


def _add_weights(digest: hashlib._Hash, path: Path) -> None:
    """Add the name, the size, the header and 16 blocks of a safetensors file to a hash.

    ValueError if it has no such header, or is not as long as the last offset in that requires. Source:
    https://github.com/huggingface/safetensors#format
    """
    with path.open("rb") as file:
        start = file.read(8)
        size, length = path.stat().st_size, int.from_bytes(start, "little")
        if start.startswith(b"version"):
            raise ValueError(f"{path} is a pointer of Git LFS, not the weights: run git lfs pull")
        header = file.read(length) if length < min(size, _HEADER_BYTES) else b""
        try:
            tensors = parse_json(header)
            end = max(int(entry["data_offsets"][1]) for name, entry in tensors.items() if name != "__metadata__")
        except _UNREADABLE as error:
            raise ValueError(f"{path} is not a safetensors file, or is truncated: copy or download it again") from error
        if size != 8 + length + end:
            raise ValueError(f"{path} has {size} bytes instead of {8 + length + end}: copy or download it again")
        digest.update(f"\0{path.name}\0{size}\0".encode())
        digest.update(header)
        for block in range(_BLOCKS):
            file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))


def _check_vocabulary(directory: Path, config: dict[str, Any], name: str, model: str) -> None:
    """Refuse a tokenizer with ids outside the model's vocabulary: on a GPU such an id crashes the process."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return
    try:
        fields = _read_json(path)
        vocabulary = fields["model"]["vocab"]
        # A list of [text, score] is a unigram model, whose ids are the positions in the list.
        ids = list(range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values())
        largest = int(max(ids + [token["id"] for token in fields.get("added_tokens", [])]))
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not a tokenizer: {error!r}") from error
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    if isinstance(size, int) and largest >= size:  # without a size the default of its class applies
        remedy = "choose the tokenizer of this model by --llmgpu-tokenizer=DIR"
        raise ValueError(f"the tokenizer {name} has token {largest}, and {model} a vocab_size of {size}: {remedy}")


def _preset_tokenizer(texts: Iterable[str], size: int) -> Path:
    """Return the directory of a tokenizer that is trained on the texts, and kept in the user's cache."""
    known = list(texts)
    key = hashlib.sha256(json.dumps([size, known]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-llmgpu" / "tokenizers"
    directory = cache / key
    try:
        if not directory.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as folder:
                made = Path(folder) / key
                made.mkdir()
                bundled.save_tokenizer(known, size, made)
                made.replace(directory)
    except OSError as error:
        if not directory.is_dir():  # else another run has made it: a directory replaces none that is not empty
            remedy = "set XDG_CACHE_HOME to a writable folder"
            raise ValueError(f"{cache} cannot be written ({error.strerror}): {remedy}") from error
    return directory


if __name__ == "__main__":
    asked = sys.argv[1:]
    print(msgspec.json.encode(refusal_here(*asked) if len(asked) > 1 else facts_here(*asked)).decode())
