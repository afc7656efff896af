"""The contract of a task: load its items, make the requests of an item, score the answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from pytest_llmgpu.report.case import DEFAULT_TASK
from pytest_llmgpu.report.result import Accuracy


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One question: a context, the endings to choose from, and the index of the right one.

    A dataset's hash is over its items as JSON, and fields with their default values are left out: a new field with a
    default keeps the hashes of datasets that reports hold.
    """

    id: str
    """The name of the item in its dataset, such as the record's `ind` or its place, counted from 0."""
    context: str
    """The prompt as the model reads it, without the ending."""
    endings: tuple[str, ...]
    """The endings to choose from: at least two, none of them empty. A prompt that is only continued has none."""
    label: int
    """The index of the right ending; 0 where there is none."""
    task: str = DEFAULT_TASK
    """The name of the task that makes the requests of this item and scores the answers."""


class Dataset(msgspec.Struct, frozen=True):
    """The items that are scored, in order."""

    name: str
    """`bundled`, a name that the task knows, or the file (relative to the rootdir, else its basename)."""
    items: tuple[Item, ...]
    """At least one item, all of one task."""
    sha256: str
    """The hash of the items, not of the file that they come from."""
    note: str | None = None
    """A remark for the user on how these items differ from the published ones; None if there is none."""

    @classmethod
    def of(cls, name: str, items: Sequence[Item], note: str | None = None) -> Dataset:
        """Return items as a dataset, with their hash; ValueError if they belong to several tasks, or there are none."""
        tasks = sorted({item.task for item in items})
        if len(tasks) != 1:
            raise ValueError(f"dataset {name} has items of {' and '.join(tasks) or 'no task'}: one task is needed")
        sha256 = hashlib.sha256(msgspec.json.encode(items)).hexdigest()
        return cls(name=name, items=tuple(items), sha256=sha256, note=note)

    @property
    def task(self) -> str:
        """The name of the task that the items belong to."""
        return self.items[0].task

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __getitem__(self, place: int | slice) -> Any:
        return self.items[place]

    def texts(self) -> Iterator[str]:
        """Yield every context and ending: the texts that a preset's tokenizer is trained on."""
        for item in self.items:
            yield item.context
            yield from item.endings


class TextRequest(NamedTuple):
    """One sequence of a forward, as text."""

    context: str
    """The text that is given."""
    continuation: str
    """The text whose log-likelihood is computed, with the space before it where the task has one."""


class Task(Protocol):
    """A set of questions with right answers. `multiple_choice.MultipleChoice` does most of it.

    The class is made without arguments, in pytest's process and in every rank: it must import there without torch and
    without the test suite.
    """

    name: str
    """The name by which it is registered: also the name of its fixture, and of the task in a report."""

    def load(self, dataset: str, *, rootdir: Path, limit: int | None = None) -> Dataset:
        """Load the items of a dataset; each has this task's name.

        Args:
            dataset: The value of `--llmgpu-dataset`: `bundled` by default, another name, or a path.
            rootdir: A relative path is searched in the working directory first, then in this folder.
            limit: Keep only so many of the first items; None for all.

        Raises:
            ValueError: The dataset cannot be loaded; in one line with the value and what is allowed.
        """

    def requests(self, item: Item) -> Sequence[TextRequest]:
        """Return the sequences that are scored for one item, such as one per ending."""

    def score(self, items: Sequence[Item], loglikelihoods: Sequence[Sequence[float]]) -> Accuracy:
        """Return the answers of the model and how many are right.

        Args:
            items: The scored items [items].
            loglikelihoods: The log-likelihood of each request [items][requests].
        """
