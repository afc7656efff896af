"""Prompts: texts that a model continues, from a dataset's contexts or from JSON Lines with the field `prompt`."""

from __future__ import annotations

from typing import Any

from pytest_llmgpu.inference.tasks import PROMPTS
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.inference.tasks.protocol import Item


class Prompts(HellaSwag):
    """Items without endings: the contexts of HellaSwag's records, or the texts of records with a `prompt`."""

    name = PROMPTS

    def item(self, record: Any, place: str, index: int) -> Item:
        """Return the prompt of one record."""
        if isinstance(record, dict) and not record.keys() & {"ctx", "ctx_a", "prompt"}:
            raise ValueError(f"{place}: prompt is missing: text is needed, or the fields of HellaSwag")
        if not isinstance(record, dict) or "prompt" not in record:
            found = super().item(record, place, index)
            return Item(id=found.id, context=found.context, endings=(), label=0, task=self.name)
        prompt = record["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            kind = "an empty text" if isinstance(prompt, str) else type(prompt).__name__
            raise ValueError(f"{place}: prompt is {kind}: text is needed")
        return Item(id=str(record.get("id", index)), context=prompt, endings=(), label=0, task=self.name)
