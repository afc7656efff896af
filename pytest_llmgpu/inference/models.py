"""What `--llmgpu-model` names: found in pytest's process without torch (`resolve`), loaded in a rank (the rest)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference import bundled, model_files

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.distributed.configuration_utils import DistributedConfig

__all__ = [
    "ModelSource",
    "checkpoint",
    "dummy_tensor",
    "initializer_range",
    "is_preset",
    "load_tokenizer",
    "materialise",
    "max_length",
    "resolve",
    "skeleton",
]

_LOAD_FORMATS = ("auto", "dummy")


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model comes from: all that a rank needs to load it, with nothing left to look up."""

    name: str
    """`bundled`, a preset, a hub id, or the directory (relative to the rootdir, else its basename)."""
    directory: str | None
    """Directory of config.json and the weights; None for a preset."""
    config: dict[str, Any]
    """config.json, or a preset's fields of `transformers.LlamaConfig`."""
    revision: str | None
    """Commit of a hub model, fingerprint of a directory, None for a preset."""
    load_format: str
    """`auto`: safetensors. `dummy`: seeded random weights made on the device."""
    tokenizer_directory: str
    tokenizer_sha256: str


def is_preset(model: str) -> bool:
    """Return whether this names an architecture with random weights rather than a model."""
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
    """Find a model and its tokenizer, and refuse what cannot be loaded before anything is started.

    Args:
        model: `bundled`, a preset, a directory, or a hub id. A relative path counts from the working directory, else
            from `rootdir`.
        revision: Branch, tag or commit of a hub id.
        tokenizer: Directory or hub id, None for the model's own.
        load_format: `auto` or `dummy`.
        texts: What a preset's tokenizer is trained on.
        rootdir: Folder that the shown name is relative to.

    Raises:
        ValueError: With the value that is wrong and what is allowed, in one line.
    """
    if load_format not in _LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r} is unknown: allowed are {', '.join(_LOAD_FORMATS)}")
    dummy = load_format == "dummy"
    if is_preset(model):
        if not dummy:
            raise ValueError(f"model {model} is an architecture without weights: it needs load format dummy")
        name, directory, fields, at, from_hub = model, None, bundled.PRESETS[model], None, False
    else:
        name, directory, commit = model_files.locate(model, revision, rootdir, weights=not dummy)
        fields, from_hub = model_files.config(directory), commit is not None
        if not dummy:
            model_files.check_weights(directory)
        at = commit or model_files.fingerprint(directory, weights=not dummy)
    if revision not in (None, at) and not from_hub:
        raise ValueError(f"revision {revision!r} is for models of the hub: that of {model} is {at}")
    size = model_files.vocabulary_size(fields)
    if tokenizer is not None:
        tokenizer_directory = model_files.locate(tokenizer, None, rootdir, weights=False)[1]
    else:
        tokenizer_directory = directory or _preset_tokenizer(texts, size or 0)
    model_files.check_vocabulary(tokenizer_directory, size, name)
    return ModelSource(
        name=name,
        directory=None if directory is None else str(directory),
        config=fields,
        revision=at,
        load_format=load_format,
        tokenizer_directory=str(tokenizer_directory),
        tokenizer_sha256=model_files.tokenizer_sha256(tokenizer_directory),
    )


def _preset_tokenizer(texts: Iterable[str], size: int) -> Path:
    """Return the directory of a tokenizer trained on these texts, from the user's cache after the first time."""
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
        # Another run was first. A directory cannot replace one that is not empty.
        if directory.is_dir():
            return directory
        raise ValueError(
            f"{cache} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder that can"
        ) from error
    return directory


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer."""
    from transformers import AutoTokenizer

    _quieten()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source.tokenizer_directory, local_files_only=True, trust_remote_code=False
    )
    return tokenizer


def max_length(config: PretrainedConfig) -> int:
    """Return the longest input in tokens, found as lm-evaluation-harness finds it; 2048 where the config names none."""
    text = getattr(config, "text_config", None) or config
    lengths = (getattr(text, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((int(length) for length in lengths if length is not None), 2048)


def skeleton(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model without its weights: parameters on the meta device, buffers real and on the CPU."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    _quieten()
    if source.directory is None:
        config: PretrainedConfig = LlamaConfig(**source.config)
    else:
        config = AutoConfig.from_pretrained(source.directory, local_files_only=True, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    # Moving parameters to meta one by one has cut the ties between them.
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
    """Load the weights from safetensors, each straight to its device.

    Args:
        source: Where they are.
        dtype: What they are converted to.
        device_map: Module to device, or
        distributed_config: how transformers is to shard them over the process group.

    Raises:
        ValueError: The files lack a weight. transformers would fill it with random numbers.
    """
    from transformers import AutoModelForCausalLM

    _quieten()
    # With output_loading_info its answer is a pair, which its annotations do not know.
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    model, loading = from_pretrained(
        source.directory,
        dtype=dtype,
        device_map=None if device_map is None else dict(device_map),
        distributed_config=distributed_config,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ValueError(f"model {source.name} lacks {missing[0]}, one of {len(missing)} weights missing in its files")
    loaded: PreTrainedModel = model.eval()
    return loaded


def materialise(
    model: PreTrainedModel, device_of: Callable[[str], torch.device], *, seed: int, dtype: torch.dtype
) -> None:
    """Give a skeleton random weights, each made directly on its device, and move its buffers there.

    A value depends on the seed, the parameter's name, shape and dtype, and the kind of device: not on how the model
    is spread.

    Args:
        model: As `skeleton` returns it.
        device_of: Full name of a parameter or buffer to its device.
        seed: Equal seeds give equal weights.
        dtype: Of the weights.
    """
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    std = initializer_range(model)
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            # Tied parameters are one object under several names, and stay one.
            if empty not in made:
                full = f"{prefix}.{name}"
                values = dummy_tensor(full, empty.shape, std=std, seed=seed, dtype=dtype, device=device_of(full))
                if isinstance(empty, DTensor):
                    # Without a source rank each keeps its own part of what all of them have made alike.
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
    """Return random values for one parameter: 0 for biases, 1 for the weights of norms, else normal around 0."""
    import torch

    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype, device=device)
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    own = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    generator = torch.Generator(device).manual_seed(own)
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)


def _quieten() -> None:
    """Silence transformers' progress bars and notes: a rank's log is for failures."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
