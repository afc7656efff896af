"""The directory of a model: its place, its checks, and its fingerprint.

Nothing is loaded here, and only a small part of the weights is read, so that 65 GB take as long as 65 MB.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from pytest_llmgpu.inference import bundled
from pytest_llmgpu.report.file import parse_json, read
from pytest_llmgpu.report.text import first_line, guess

_HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "tokenizer*")

_JSON_BYTES = 2**26
"""The limit of a JSON file; the largest tokenizers have 35 MB."""
_HEADER_BYTES = 100_000_000
"""The limit of a header in the format."""
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
    """Find `bundled`, a directory or a hub id. A hub model is downloaded, its weights only if `weights` is true.

    Returns:
        The name to show, the directory, and the commit of a hub id; None for the commit of anything else.

    Raises:
        ValueError: The model is unknown or cannot be downloaded.
    """
    if model == "bundled":
        return model, bundled.model_directory(), None
    for path in (Path(model), rootdir / model):
        if path.is_dir():
            here, root = path.resolve(), rootdir.resolve()
            shown = here.relative_to(root).as_posix() if here.is_relative_to(root) else here.name
            # A folder with the name of the bundled model, a preset or a hub id must not get its baseline.
            taken = shown in ("bundled", *bundled.PRESETS) or re.fullmatch(_HUB_ID, shown)
            return (f"./{shown}" if taken else shown), here, None
    if re.fullmatch(_HUB_ID, model):
        directory = _from_hub(model, revision, weights=weights)
        return model, directory, directory.name
    names = ["bundled", *bundled.PRESETS]
    raise ValueError(
        f"model {model!r} is unknown{guess(model, names)}: allowed are {', '.join(names)}, a directory that exists, "
        "or a hub id such as huggyllama/llama-7b"
    )


def _from_hub(model: str, revision: str | None, *, weights: bool) -> Path:
    """Return the directory of a hub model in the hub's cache; its name is the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # Subfolders of a repository have the same weights in other formats.
    ignored = ["*/*", *([] if weights else ["*.safetensors"])]
    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=list(_HUB_FILES), ignore_patterns=ignored)
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = first_line(error)
        raise ValueError(
            f"model {model!r} is not a directory, and its download from the hub failed: {reason} "
            "(check the name, the revision and the network, and set HF_TOKEN if the model has a licence to accept)"
        ) from error


def config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
        ValueError: The file is missing, cannot be read, or is not a JSON object.
    """
    path = directory / "config.json"
    try:
        fields = _read_json(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"model {directory} has no config.json: write one with transformers' save_pretrained"
        ) from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is not a JSON object")  # noqa: TRY004 - the file is wrong, not the caller
    return fields


def _read_json(path: Path) -> Any:
    """Return the JSON value in a file; FileNotFoundError or ValueError in one line."""
    try:
        return parse_json(read(path, _JSON_BYTES))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def vocabulary_size(fields: dict[str, Any]) -> int | None:
    """Return the vocabulary size in a config.json; None if it has none, so that the default of its class applies."""
    text = fields.get("text_config")
    size = fields.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def is_quantized(fields: dict[str, Any]) -> bool:
    """Return whether a config.json describes quantised weights."""
    text = fields.get("text_config")
    return any(isinstance(part, dict) and part.get("quantization_config") for part in (fields, text))


def check_weights(directory: Path) -> None:
    """Refuse a directory without complete safetensors files.

    Raises:
        ValueError: The weights have another format, a file of the index is missing, or a file is truncated.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in directory.glob("*.bin")) + sorted(
            path.name for path in directory.glob("*.pt*")
        )
        found = f"only {', '.join(others[:3])}, which can run code when loaded" if others else "no weights"
        raise ValueError(
            f"model {directory} has {found}: *.safetensors are needed (convert with "
            "transformers' save_pretrained, or use load format dummy for random weights)"
        )
    index = directory / "model.safetensors.index.json"
    if index.exists():
        named = _indexed(index)
        missing = sorted(named - {path.name for path in files})
        if missing:
            raise ValueError(f"model {directory} lacks {missing[0]}: {len(missing)} of {len(named)} files are missing")
    for path in files:
        _header(path)


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that transformers reads: a single file, or those of the index."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not whole.exists() and index.exists():
        return [directory / name for name in sorted(_indexed(index))]
    return [whole] if whole.exists() else sorted(directory.glob("*.safetensors"))


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


def fingerprint(directory: Path, *, weights: bool) -> str:
    """Return a hash that differs between checkpoints, without reading whole files.

    It covers config.json and, with `weights`, the name, size, header and 16 blocks of each safetensors file.
    Fine-tuning changes every tensor, and each block has many values.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")) if weights else ():
        _add_weights(digest, path)
    return digest.hexdigest()


def file_hashes(directory: Path, *, weights: bool) -> dict[str, str]:
    """Return name to hash of each file that loading reads; a safetensors file is sampled as for `fingerprint`."""
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


def _add_weights(digest: hashlib._Hash, path: Path) -> None:
    """Add the name, the size, the header and 16 blocks of a safetensors file to a hash."""
    size = path.stat().st_size
    digest.update(f"\0{path.name}\0{size}\0".encode())
    digest.update(_header(path))
    with path.open("rb") as file:
        for block in range(_BLOCKS):
            file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))


def _header(path: Path) -> bytes:
    """Return the JSON header of a safetensors file, after a check that the file is as long as its last offset requires.

    Source: https://github.com/huggingface/safetensors#format
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
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} is not a safetensors file, or is truncated: copy or download it again") from error
    if size != 8 + length + end:
        raise ValueError(f"{path} has {size} bytes instead of {8 + length + end}: copy or download it again")
    return header


def tokenizer_sha256(directory: Path) -> str:
    """Return a hash of the tokenizer's files.

    Raises:
        ValueError: The directory has no tokenizer.
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
    """Return the largest token id of tokenizer.json; None without that file.

    Raises:
        ValueError: The file is not a tokenizer.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        fields = _read_json(path)
        vocabulary = fields["model"]["vocab"]
        # A list of [text, score] is a unigram model, whose ids are the positions in the list.
        ids = list(range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values())
        return int(max(ids + [token["id"] for token in fields.get("added_tokens", [])]))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} is not a tokenizer: {error!r}") from error


def check_vocabulary(tokenizer_directory: Path, size: int | None, model: str) -> None:
    """Refuse a tokenizer with ids outside the model's vocabulary: on a GPU such an id crashes the process.

    Raises:
        ValueError: The message has the largest id and the size of the vocabulary.
    """
    largest = _largest_token(tokenizer_directory)
    if size is not None and largest is not None and largest >= size:
        raise ValueError(
            f"tokenizer {tokenizer_directory.name} has token {largest}, and model {model} has a vocabulary of {size}: "
            "choose the tokenizer of this model"
        )
