"""Prompts: texts that are continued by generation, and not scored."""

from __future__ import annotations

from typing import Any

import msgspec

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
        if isinstance(record, dict) and "prompt" in record:
            return self.prompt(record, place, index)
        return msgspec.structs.replace(super().item(record, place, index), endings=(), label=0)
