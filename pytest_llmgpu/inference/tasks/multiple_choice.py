"""Tasks that choose one of several endings: by log-likelihood (`acc`), and by it per character (`acc_norm`).

A task of this kind is a class with a name, a bundled file and a function from a JSON record to an item.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from pytest_llmgpu.inference import bundled
from pytest_llmgpu.inference.tasks.protocol import Dataset, Item, TextRequest
from pytest_llmgpu.report.derived import encode, proportion_stderr
from pytest_llmgpu.report.file import GZIP, parse_json, read, unpack
from pytest_llmgpu.report.result import Accuracy
from pytest_llmgpu.report.text import guess

_LINE_BYTES = 2**24


class MultipleChoice:
    """Reads records, and chooses the ending with the largest log-likelihood; the first wins a tie."""

    name: str
    """The name of the task."""
    datasets: tuple[str, ...] = ("bundled",)
    """The names of datasets that are not files, for `records`."""

    def item(self, record: Any, place: str, index: int) -> Item:
        """Return the item of one record, with this task's name; it comes from a place such as `items.jsonl:3`.

        ValueError if the record has no such item; the message begins with the place.
        """
        raise NotImplementedError

    def note(self, record: Any) -> str | None:  # noqa: ARG002 - for a subclass
        """Return how the items of a file with such a record differ from the published ones; None if they do not."""
        return None

    def records(self, dataset: str) -> Iterable[tuple[str, Any]]:
        """Return the place and the JSON value of each record of one of `datasets`."""
        assert dataset == "bundled", "a subclass knows its other datasets"
        return read_json_lines(bundled.DATASET_PATH)

    def load(self, dataset: str, *, rootdir: Path, limit: int | None = None) -> Dataset:
        """Load a dataset by its name or path. Lines after the limit are not read (see `protocol.Task`)."""
        name = dataset
        if dataset in self.datasets:
            records = self.records(dataset)
        else:
            path = next((path for path in (Path(dataset), rootdir / dataset) if path.exists()), None)
            if path is None:
                allowed = f"allowed are {', '.join(self.datasets)}, or a JSON Lines file that exists"
                raise ValueError(f"dataset {dataset!r} is unknown{guess(dataset, self.datasets)}: {allowed}")
            if path.is_dir():
                how = f"datasets.load_from_disk({str(path)!r}).to_json('items.jsonl')"
                needed = f"a JSON Lines file is needed (of a split that save_to_disk wrote: {how})"
                raise ValueError(f"dataset {path} is a folder: {needed}")
            records = read_json_lines(path)
            inside = path.resolve().is_relative_to(rootdir.resolve())
            name = path.resolve().relative_to(rootdir.resolve()).as_posix() if inside else path.name
        items: list[Item] = []
        note = None
        for place, record in records:
            items.append(self.item(record, place, len(items)))
            note = note or (None if dataset in self.datasets else self.note(record))
            if len(items) == limit:
                break
        if not items:
            raise ValueError(f"dataset {dataset} is empty: one JSON object per line is needed")
        return Dataset.of(name, items, note)

    def requests(self, item: Item) -> list[TextRequest]:
        """Return one sequence per ending, with one space between the context and the ending."""
        return [TextRequest(item.context, f" {ending}") for ending in item.endings]

    def score(self, items: Sequence[Item], loglikelihoods: Sequence[Sequence[float]]) -> Accuracy:
        """Choose by log-likelihood, and by log-likelihood per character of the ending (see `protocol.Task`)."""
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


def read_json_lines(path: Path) -> Iterable[tuple[str, Any]]:
    """Yield the place (`path:line`) and the value of each line of a JSON Lines file that is not blank.

    ValueError if the file cannot be read, or a line is not JSON in UTF-8.
    """
    try:
        with path.open("rb") as opened:
            file: IO[bytes] = opened
            if opened.peek(2).startswith(GZIP):
                try:
                    file = io.BytesIO(unpack(read(path)))  # decompressed in memory
                except ValueError as error:
                    raise ValueError(f"dataset {path} {error}") from None
            number = 0
            while line := file.readline(_LINE_BYTES + 1):
                number += 1
                if len(line) > _LINE_BYTES:
                    raise ValueError(f"{path}:{number}: the line has more than {_LINE_BYTES:,} bytes, the limit")
                if not line.strip():
                    continue
                try:
                    # Without its line break: the error of an unfinished object would name the next line.
                    record = parse_json(line.rstrip())
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}: one object per line is needed") from error
                yield f"{path}:{number}", record
    except OSError as error:
        raise ValueError(f"dataset {path} cannot be read: {error.strerror}") from error


def _choices(scores: Sequence[Sequence[float]]) -> list[int]:
    return [max(range(len(row)), key=row.__getitem__) for row in scores]
