"""The model of `--llmgpu-model`: `resolve` finds it in pytest's process without torch, the rest loads it in a rank."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference import bundled, model_files
from pytest_llmgpu.report.text import plural

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.distributed.configuration_utils import DistributedConfig

_LOAD_FORMATS = ("auto", "dummy")


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a rank needs to load a model."""

    name: str
    """The name of the model: `bundled`, a preset, a hub id, or a directory (relative, else its base name)."""
    directory: str | None
    """The directory of config.json and the weights; None for a preset."""
    config: dict[str, Any]
    """The content of config.json, or the fields of `transformers.LlamaConfig` of a preset."""
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


class TokenizerError(ValueError):
    """The tokenizer of a model is missing or does not belong to it."""


def is_preset(model: str) -> bool:
    """Return whether a name is that of a preset: an architecture with random weights."""
    return model in bundled.PRESETS


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

    Args:
        model: `bundled`, a preset, a directory, or a hub id. A relative path starts from the working directory, else
            from `rootdir`.
        revision: The branch, tag or commit of a hub id.
        tokenizer: A directory or hub id; None for the model's own.
        load_format: `auto` or `dummy`.
        texts: The texts that a preset's tokenizer is trained on.
        rootdir: The folder that the shown name is relative to.

    Raises:
        ValueError: The message has the wrong value and the allowed ones, in one line. `TokenizerError` if the tokenizer
            is wrong.
    """
    if load_format not in _LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r} is unknown: allowed are {', '.join(_LOAD_FORMATS)}")
    dummy = load_format == "dummy"
    if is_preset(model):
        if not dummy:
            raise ValueError(f"model {model} is an architecture without weights: use load format dummy")
        name, directory, fields, at, from_hub = model, None, bundled.PRESETS[model], None, False
    else:
        name, directory, commit = model_files.locate(model, revision, rootdir, weights=not dummy)
        fields, from_hub = model_files.config(directory), commit is not None
        if not dummy:
            model_files.check_weights(directory)
        at = commit or model_files.fingerprint(directory, weights=not dummy)
    if revision not in (None, at) and not from_hub:
        own = f", its revision is {at}" if at else ""
        raise ValueError(f"revision {revision!r} is not allowed: {model} is not a model of the hub{own}")
    size = model_files.vocabulary_size(fields)
    try:
        if tokenizer is not None:
            tokenizer_directory = model_files.locate(tokenizer, None, rootdir, weights=False)[1]
        else:
            tokenizer_directory = directory or _preset_tokenizer(texts, size or 0)
        model_files.check_vocabulary(tokenizer_directory, size, name)
        tokenizer_sha256 = model_files.tokenizer_sha256(tokenizer_directory)
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    return ModelSource(
        name=name,
        directory=None if directory is None else str(directory),
        config=fields,
        revision=at,
        load_format=load_format,
        tokenizer_directory=str(tokenizer_directory),
        tokenizer_sha256=tokenizer_sha256,
    )


def _preset_tokenizer(texts: Iterable[str], size: int) -> Path:
    """Return the directory of a tokenizer that is trained on the texts, and kept in the user's cache."""
    from pytest_llmgpu.inference.bundled.tokenizer import save_tokenizer

    known = list(texts)
    key = hashlib.sha256(json.dumps([size, known]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-llmgpu" / "tokenizers"
    directory = cache / key
    if directory.is_dir():
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as folder:
            made = Path(folder) / key
            made.mkdir()
            save_tokenizer(known, size, made)
            made.replace(directory)
    except OSError as error:
        # Another run has made it: a directory cannot replace one that is not empty.
        if directory.is_dir():
            return directory
        raise ValueError(
            f"{cache} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a writable folder"
        ) from error
    return directory


def load_tokenizer(source: ModelSource, *, add_bos: bool | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        source: The source of the model.
        add_bos: Whether the tokenizer puts its beginning-of-sequence token first; None for its own setting.
    """
    from transformers import AutoTokenizer

    _silence_transformers()
    own = {} if add_bos is None else {"add_bos_token": add_bos}
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source.tokenizer_directory, local_files_only=True, trust_remote_code=False, **own
    )
    return tokenizer


def max_length(config: PretrainedConfig | SimpleNamespace) -> int:
    """Return the maximum input length in tokens, as lm-evaluation-harness does; 2048 if the config has none."""
    text = getattr(config, "text_config", None) or config
    lengths = (getattr(text, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((int(length) for length in lengths if length is not None), 2048)


def skeleton(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model without weights: its parameters are on the meta device, its buffers on the CPU."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    _silence_transformers()
    if source.directory is None:
        config: PretrainedConfig = LlamaConfig(**source.config)
    else:
        config = AutoConfig.from_pretrained(source.directory, local_files_only=True, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False, attn_implementation=source.attention
        )
    # init_empty_weights replaces parameters one by one, which unties them.
    model.tie_weights()
    model.eval()
    return model


def checkpoint(
    source: ModelSource,
    dtype: torch.dtype,
    *,
    device_map: Mapping[str, int | str] | None = None,
    distributed_config: DistributedConfig | None = None,
) -> PreTrainedModel:
    """Load a model with its weights from safetensors, each directly on its device.

    Args:
        source: The source of the model.
        dtype: The data type that weights are converted to.
        device_map: Module to device; None with `distributed_config`.
        distributed_config: transformers' description of how weights are sharded over the process group; None with
            `device_map`.

    Raises:
        ValueError: The files lack a weight, which transformers would fill with random numbers.
    """
    from transformers import AutoModelForCausalLM

    _silence_transformers()
    # With output_loading_info it returns a pair, which its annotations do not declare.
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    model, loading = from_pretrained(
        source.directory,
        dtype=dtype,
        attn_implementation=source.attention,
        device_map=None if device_map is None else dict(device_map),
        distributed_config=distributed_config,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ValueError(
            f"model {source.name}: {plural(len(missing), 'weight')} missing in its files, such as {missing[0]}"
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


def materialise(
    model: PreTrainedModel, device_of: Callable[[str], torch.device], *, seed: int, dtype: torch.dtype
) -> None:
    """Fill a skeleton with random weights, each made directly on its device, and move its buffers to their devices.

    A value depends on the seed, on the parameter's name, shape and dtype, and on the kind of device. It does not depend
    on how the model is spread over devices.

    Args:
        model: The model without weights, from `skeleton`.
        device_of: Returns the device of a parameter or buffer by its full name.
        seed: Equal seeds give equal weights.
        dtype: The data type of the weights.
    """
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    std = initializer_range(model)
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            # Tied parameters are one object with several names, and stay one object.
            if empty not in made:
                full = f"{prefix}.{name}"
                values = dummy_tensor(full, empty.shape, std=std, seed=seed, dtype=dtype, device=device_of(full))
                if isinstance(empty, DTensor):
                    # Every rank has made equal values. Without a source rank each keeps its shard of its own values.
                    values = distribute_tensor(values, empty.device_mesh, empty.placements, src_data_rank=None)
                made[empty] = torch.nn.Parameter(values, requires_grad=False)
            module.register_parameter(name, made[empty])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device_of(f"{prefix}.{name}"))  # noqa: SLF001 - keeps it persistent or not


def initializer_range(model: PreTrainedModel) -> float:
    """Return the standard deviation of random weights."""
    return float(getattr(model.config.get_text_config(), "initializer_range", 0.02))


def dummy_tensor(
    name: str, shape: torch.Size, *, std: float, seed: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the values of one parameter: 0 for biases, 1 for weights of norms, else a normal distribution around 0."""
    import torch

    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype, device=device)
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    own = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    generator = torch.Generator(device).manual_seed(own)
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)


def _silence_transformers() -> None:
    """Silence transformers' progress bars and warnings: a rank's log is for failures."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
