"""HellaSwag: choose the ending that follows from a context; `acc` and `acc_norm`.

Items come from the bundled dataset, from JSON Lines in HellaSwag's format, or from the hub. Prompts are those of
lm-evaluation-harness 0.4.13 (`lm_eval/tasks/hellaswag/utils.py`): accuracies compare with published ones.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec

from pytest_llmgpu.inference import bundled
from pytest_llmgpu.report.derived import encode, proportion_stderr
from pytest_llmgpu.report.result import Accuracy

__all__ = ["Dataset", "Item", "accuracy", "load"]

_HUB = "Rowan/hellaswag"


class Item(msgspec.Struct, frozen=True):
    """One question: a context, the endings to choose from, and which of them is right."""

    id: str
    """The record's `ind`, else its place in the dataset, counted from 0."""
    context: str
    """The prompt as the model reads it. One space goes between it and an ending."""
    endings: tuple[str, ...]
    """At least two, none of them empty."""
    label: int
    """Index of the right ending."""


class Dataset(msgspec.Struct, frozen=True):
    """The items that are scored, in order."""

    name: str
    """`bundled`, `hellaswag` or the file (relative to the rootdir, else its basename)."""
    items: tuple[Item, ...]
    sha256: str
    """Hash of the items: of what is scored, not of the file it came from."""

    @classmethod
    def of(cls, name: str, items: Sequence[Item]) -> Dataset:
        """Return items as a dataset, with their hash."""
        return cls(name=name, items=tuple(items), sha256=hashlib.sha256(msgspec.json.encode(items)).hexdigest())

    def __len__(self) -> int:
        """Return how many items there are."""
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in order."""
        return iter(self.items)

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, place: int | slice) -> Item | tuple[Item, ...]:
        """Return an item, or those of a slice."""
        return self.items[place]

    def texts(self) -> Iterator[str]:
        """Yield every context and ending, for a tokenizer to be trained on."""
        for item in self.items:
            yield item.context
            yield from item.endings


def load(dataset: str, *, rootdir: Path, limit: int | None = None) -> Dataset:
    """Load a dataset by its name or path.

    Args:
        dataset: `bundled`; `hellaswag`, the validation split on the hub; or a JSON Lines file. A relative path counts
            from the working directory, else from `rootdir`.
        rootdir: Folder that the shown name is relative to.
        limit: First items to keep, None for all. Lines after them are not read.

    Raises:
        ValueError: Unknown name; unreadable, empty or malformed file (with its line number); hub out of reach.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit} is not allowed: a number of items, at least 1")
    name = dataset
    if dataset == "bundled":
        items = _read(bundled.dataset_path(), limit)
    elif dataset == "hellaswag":
        items = _from_hub(limit)
    else:
        path = next((path for path in (Path(dataset), rootdir / dataset) if path.exists()), None)
        if path is None:
            close = difflib.get_close_matches(dataset, ("bundled", "hellaswag"), n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                f"dataset {dataset!r} is unknown{hint}: "
                "allowed are bundled, hellaswag, or a JSON Lines file that exists"
            )
        items = _read(path, limit)
        inside = path.resolve().is_relative_to(rootdir.resolve())
        name = path.resolve().relative_to(rootdir.resolve()).as_posix() if inside else path.name
    return Dataset.of(name, items)


def accuracy(items: Sequence[Item], loglikelihoods: Sequence[Sequence[float]]) -> Accuracy:
    """Choose by log-likelihood, and by log-likelihood per character of the ending; the first wins a tie.

    Args:
        items: [items], as they were scored.
        loglikelihoods: [items][endings].
    """
    per_character = [
        [value / len(ending) for value, ending in zip(row, item.endings, strict=True)]
        for item, row in zip(items, loglikelihoods, strict=True)
    ]
    predictions, predictions_norm = _choices(loglikelihoods), _choices(per_character)
    acc, acc_norm = (
        sum(choice == item.label for choice, item in zip(choices, items, strict=True)) / len(items)
        for choices in (predictions, predictions_norm)
    )
    return Accuracy(
        acc=acc,
        acc_norm=acc_norm,
        items=len(items),
        predictions=predictions,
        predictions_norm=predictions_norm,
        loglikelihoods=encode(value for row in loglikelihoods for value in row),
        stderr=proportion_stderr(acc_norm, len(items)),
        labels=[item.label for item in items],
    )


def _choices(scores: Sequence[Sequence[float]]) -> list[int]:
    return [max(range(len(row)), key=row.__getitem__) for row in scores]


def _read(path: Path, limit: int | None) -> list[Item]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"dataset {path} cannot be read: {error.strerror}") from error
    records = ((f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())
    items = _items(((place, _parse(line, place)) for place, line in records), limit)
    if not items:
        raise ValueError(f"dataset {path} is empty: one JSON object per line is needed")
    return items


def _parse(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: byte {error.start + 1} is not UTF-8: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: not JSON ({error.msg}, column {error.colno}): one object per line is needed"
        ) from error


def _from_hub(limit: int | None) -> list[Item]:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        records = datasets.load_dataset(_HUB, split="validation")
    # A failed connection is an OSError to datasets, a missing cache of an offline machine a ValueError or OSError.
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"dataset hellaswag ({_HUB}) cannot be had: {reason} "
            "(allow this machine to reach the hub, or pass a JSON Lines file of its validation split)"
        ) from error
    return _items(((f"{_HUB}:{number}", record) for number, record in enumerate(records)), limit)


def _items(records: Iterable[tuple[str, Any]], limit: int | None) -> list[Item]:
    items: list[Item] = []
    for place, record in records:
        items.append(_item(record, place, len(items)))
        if len(items) == limit:
            break
    return items


def _item(record: Any, place: str, index: int) -> Item:
    """Build the prompt and the endings of one record, or say what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError(f"{place}: {type(record).__name__} instead of a JSON object")  # noqa: TRY004 - the file is wrong, not the caller
    if "ctx_a" in record and "ctx_b" in record:
        # str.capitalize also lowers every other letter. The published accuracies are of prompts made so.
        context = f"{_text(record, 'ctx_a', place)} {_text(record, 'ctx_b', place).capitalize()}"
    else:
        context = _text(record, "ctx", place)
    if "endings" not in record:
        raise ValueError(f"{place}: endings is missing: a list of strings is needed")
    endings = record["endings"]
    if not isinstance(endings, list) or not all(isinstance(ending, str) for ending in endings):
        raise ValueError(f"{place}: endings must be a list of strings")
    if len(endings) <= 1:
        raise ValueError(f"{place}: there are fewer than two endings to choose from")
    cleaned = tuple(map(_preprocess, endings))
    if "" in cleaned:
        raise ValueError(f"{place}: ending {cleaned.index('')} is empty: it has no characters to score")
    return Item(
        id=str(record.get("ind", index)),
        context=_preprocess(f"{_text(record, 'activity_label', place)}: {context}"),
        endings=cleaned,
        label=_label(record, len(endings), place),
    )


def _text(record: dict[str, Any], field: str, place: str) -> str:
    if field not in record:
        raise ValueError(f"{place}: {field} is missing: text is needed")
    value = record[field]
    if not isinstance(value, str):
        found = "null" if value is None else type(value).__name__
        raise ValueError(f"{place}: {field} must be text, not {found}")  # noqa: TRY004 - as above
    return value


def _label(record: dict[str, Any], endings: int, place: str) -> int:
    label = record.get("label")
    needed = f"0 to {endings - 1}, the index of the right ending, is needed"
    if label is None:
        raise ValueError(f"{place}: label is missing: {needed}")
    if label == "":
        raise ValueError(
            f"{place}: label is empty: {needed} (HellaSwag's test split has no labels, its validation split has)"
        )
    if not re.fullmatch("-?[0-9]+", str(label)):
        raise ValueError(f"{place}: label {label!r} is not a whole number: {needed}")
    if not 0 <= int(label) < endings:
        raise ValueError(f"{place}: label {label!r} is out of range 0 to {endings - 1}: the index of the right ending")
    return int(label)


def _preprocess(text: str) -> str:
    """Return the text as lm-evaluation-harness cleans it; brackets are left over from WikiHow."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
