"""HellaSwag: choose the ending that follows from a context; and prompts, which are continued and not scored.

Prompts are those of lm-evaluation-harness 0.4.13 (`lm_eval/tasks/hellaswag/utils.py`), so accuracies can be compared
with published ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from pytest_llmgpu.inference.tasks import PROMPTS
from pytest_llmgpu.inference.tasks.multiple_choice import MultipleChoice
from pytest_llmgpu.inference.tasks.protocol import Item
from pytest_llmgpu.report.text import first_line

_HUB = "Rowan/hellaswag"


class HellaSwag(MultipleChoice):
    """Items from the bundled dataset, from the validation split on the hub, or from JSON Lines in its format."""

    name = "hellaswag"
    datasets = ("bundled", "hellaswag")

    def records(self, dataset: str) -> Iterable[tuple[str, Any]]:
        """Return the records of the bundled dataset or of the hub."""
        if dataset != "hellaswag":
            return super().records(dataset)
        import datasets
        from huggingface_hub.errors import HfHubHTTPError

        try:
            records = datasets.load_dataset(_HUB, split="validation")
        # A failed connection is an OSError to datasets, a missing cache of an offline machine a ValueError or OSError.
        except (OSError, ValueError, HfHubHTTPError) as error:
            remedy = "allow this machine to reach the hub, or pass a JSON Lines file of its validation split"
            failed = f"cannot be downloaded: {first_line(error)} ({remedy})"
            raise ValueError(f"dataset hellaswag ({_HUB}) {failed}") from error
        return ((f"{_HUB}:{number}", record) for number, record in enumerate(records))

    def note(self, record: Any) -> str | None:
        """Return that the context has other letters than lm-evaluation-harness's if it is one text."""
        if "ctx" not in record or ("ctx_a" in record and "ctx_b" in record):
            return None
        return "items have ctx without ctx_a and ctx_b: lm-evaluation-harness capitalises ctx_b, so its prompts differ"

    def item(self, record: Any, place: str, index: int) -> Item:
        """Return the prompt and the endings of one record; of one with a `prompt` alone an item without endings."""
        if not isinstance(record, dict):
            raise ValueError(f"{place}: {type(record).__name__} instead of a JSON object")  # noqa: TRY004 - the file is wrong, not the caller
        if "prompt" in record and "endings" not in record:
            prompt = _text(record, "prompt", place)
            if not prompt.strip():
                raise ValueError(f"{place}: prompt is an empty text: text is needed")
            return Item(id=str(record.get("id", index)), context=prompt, endings=(), label=0, task=self.name)
        if "ctx_a" in record and "ctx_b" in record:
            # str.capitalize also lowers every other letter. The published accuracies are of prompts made this way.
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
        cleaned = tuple(map(preprocess, endings))
        activity = f"{_text(record, 'activity_label', place)}: " if "activity_label" in record else ""
        if "" in cleaned:
            raise ValueError(f"{place}: ending {cleaned.index('')} is empty: it has no characters to score")
        return Item(
            id=str(record.get("ind", index)),
            context=preprocess(f"{activity}{context}"),
            endings=cleaned,
            label=_label(record, len(endings), place),
            task=self.name,
        )


class Prompts(HellaSwag):
    """Items without endings: the contexts of HellaSwag's records, or the texts of records with a `prompt`."""

    name = PROMPTS

    def item(self, record: Any, place: str, index: int) -> Item:
        """Return the prompt of one record."""
        if isinstance(record, dict) and not record.keys() & {"ctx", "ctx_a", "prompt"}:
            raise ValueError(f"{place}: prompt is missing: text is needed, or the fields of HellaSwag")
        if isinstance(record, dict) and "prompt" in record:
            record = {name: value for name, value in record.items() if name != "endings"}
        return msgspec.structs.replace(super().item(record, place, index), endings=(), label=0)


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
    if re.fullmatch("[0-9]+", str(label)) and int(str(label)) < endings:
        return int(str(label))
    found = "is missing" if label is None else f"{label!r} is not allowed"
    split = " (HellaSwag's test split has no labels, its validation split has)" if label == "" else ""
    raise ValueError(f"{place}: label {found}: 0 to {endings - 1}, the index of the right ending, is needed{split}")


def preprocess(text: str) -> str:
    """Return the text as lm-evaluation-harness cleans it; brackets are left over from WikiHow."""
    lines = []
    for line in text.strip().replace(" [title]", ". ").split("\n"):
        # As `re.sub(r"\[.*?\]", "", line)` does, in linear time: after the last `]` there is no match.
        head, bracket, rest = line.rpartition("]")
        lines.append(re.sub(r"\[[^\]]*\]", "", head + bracket) + rest)
    return "\n".join(lines).replace("  ", " ")
