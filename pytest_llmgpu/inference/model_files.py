"""A model's directory: where it is, whether it can be loaded, and which one it is.

Nothing is loaded here, and of the weights little is read: 65 GB cost no more than 65 MB.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pytest_llmgpu.inference import bundled

__all__ = [
    "check_vocabulary",
    "check_weights",
    "config",
    "fingerprint",
    "locate",
    "tokenizer_sha256",
    "vocabulary_size",
]

_HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "tokenizer*")

_BLOCK_BYTES = 4096
_BLOCKS = 16
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def locate(model: str, revision: str | None, rootdir: Path, *, weights: bool) -> tuple[str, Path, str | None]:
    """Find `bundled`, a directory or a hub id, which is downloaded: the weights only where they are wanted.

    Returns:
        The name to show, the directory and, of a hub id, the commit.

    Raises:
        ValueError: It is none of these, or cannot be had.
    """
    if model == "bundled":
        return model, bundled.model_directory(), None
    for path in (Path(model), rootdir / model):
        if path.is_dir():
            here, root = path.resolve(), rootdir.resolve()
            shown = here.relative_to(root).as_posix() if here.is_relative_to(root) else here.name
            # A folder that is called like the bundled model, a preset or a hub id must not get their baseline.
            taken = shown in ("bundled", *bundled.PRESETS) or re.fullmatch(_HUB_ID, shown)
            return (f"./{shown}" if taken else shown), here, None
    if re.fullmatch(_HUB_ID, model):
        directory = _from_hub(model, revision, weights=weights)
        return model, directory, directory.name
    names = ["bundled", *bundled.PRESETS]
    close = difflib.get_close_matches(model, names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(
        f"model {model!r} is unknown{hint}: allowed are {', '.join(names)}, a directory that exists, or a hub id "
        "such as huggyllama/llama-7b"
    )


def _from_hub(model: str, revision: str | None, *, weights: bool) -> Path:
    """Return the directory of a hub model in the hub's cache; its name is the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Folders of a repository hold the same weights in other formats.
    ignored = ["*/*", *([] if weights else ["*.safetensors"])]
    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=ignored)
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"model {model!r} is no directory, and cannot be had from the hub: {reason} "
            "(check the name and revision, the network, and HF_TOKEN if its licence must be accepted)"
        ) from error


def config(directory: Path) -> dict[str, Any]:
    """Return config.json.

    Raises:
        ValueError: It is missing, unreadable or no JSON object.
    """
    path = directory / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"model {directory} has no config.json: transformers' save_pretrained writes one") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object")  # noqa: TRY004 - the file is wrong, not the caller
    return fields


def vocabulary_size(fields: dict[str, Any]) -> int | None:
    """Return the rows of the embedding that a config.json names; None where it leaves them to its class's default."""
    size = fields.get("vocab_size", (fields.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def check_weights(directory: Path) -> None:
    """Refuse a directory without complete safetensors files.

    Raises:
        ValueError: Only other formats, a file that the index names is missing, a file is cut short or no safetensors.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in directory.glob("*.bin")) + sorted(
            path.name for path in directory.glob("*.pt*")
        )
        found = f"only {', '.join(others[:3])}, which can run code when it is read" if others else "no weights"
        raise ValueError(
            f"model {directory} has {found}: *.safetensors are needed (convert with "
            "transformers' save_pretrained, or use load format dummy for random weights)"
        )
    index = directory / "model.safetensors.index.json"
    if index.exists():
        named = set(json.loads(index.read_bytes())["weight_map"].values())
        missing = sorted(named - {path.name for path in files})
        if missing:
            raise ValueError(f"model {directory} lacks {missing[0]} ({len(missing)} of {len(named)} files are missing)")
    for path in files:
        _header(path)


def weight_files(directory: Path) -> list[Path]:
    """Return the files that transformers reads, one or those of the index: others in the folder are not the model's."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not whole.exists() and index.exists():
        return [directory / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    return [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))


def fingerprint(directory: Path, *, weights: bool) -> str:
    """Return a hash that tells checkpoints apart without reading them whole.

    It is over config.json and, with `weights`, each safetensors file's name, size, header and 16 blocks spread over it:
    fine-tuning moves every tensor a little, and each block is many values.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")) if weights else ():
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        digest.update(_header(path))
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    """Return the JSON header of a safetensors file, whose last offset says how long the file must be.

    Source: https://github.com/huggingface/safetensors#format
    """
    with path.open("rb") as file:
        start = file.read(8)
        size, length = path.stat().st_size, int.from_bytes(start, "little")
        if start.startswith(b"version"):
            raise ValueError(f"{path} is a pointer of Git LFS, not the weights: git lfs pull gets them")
        header = file.read(length) if length < size else b""
    try:
        tensors = json.loads(header)
        end = max(entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file, or is cut short") from error
    if size != 8 + length + end:
        raise ValueError(f"{path} is {size} bytes, its header says {8 + length + end}: copy or download it anew")
    return header


def tokenizer_sha256(directory: Path) -> str:
    """Return a hash of the tokenizer's files.

    Raises:
        ValueError: There are none.
    """
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not any(path.name in _TOKENIZER_FILES[:4] for path in files):
        raise ValueError(
            f"{directory} has no tokenizer ({', '.join(_TOKENIZER_FILES[:4])}): pass one with the tokenizer option"
        )
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _largest_token(directory: Path) -> int | None:
    """Return the largest id that tokenizer.json can give; None without that file.

    Raises:
        ValueError: The file is not a tokenizer.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_bytes())
        vocabulary = fields["model"]["vocab"]
        # A list of [text, score] is a unigram model, where ids are places.
        ids = list(range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values())
        return int(max(ids + [token["id"] for token in fields.get("added_tokens", [])]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no tokenizer: {error!r}") from error


def check_vocabulary(tokenizer_directory: Path, size: int | None, model: str) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for: on a GPU such an id kills the process mid-run.

    Raises:
        ValueError: With the largest id and the size of the vocabulary.
    """
    largest = _largest_token(tokenizer_directory)
    if size is not None and largest is not None and largest >= size:
        raise ValueError(
            f"tokenizer {tokenizer_directory.name} has token {largest}, model {model} has a vocabulary of {size}: "
            "a tokenizer made for this model is needed"
        )
