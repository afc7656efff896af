from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import tiny_model

from pytest_llmgpu.inference.tasks.hellaswag import Prompts
from pytest_llmgpu.inference.tasks.protocol import Dataset


def _load(folder: Path, *records: Any) -> Dataset:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Prompts().load("prompts.jsonl", rootdir=folder)


def test_prompts_are_texts_of_json_lines_or_the_contexts_of_a_dataset(tmp_path: Path) -> None:
    """A text is not changed, and its id is kept or the number of the line; HellaSwag scores endings after a context."""
    found = _load(tmp_path, {"prompt": "  Once [x] "}, {"prompt": "Twice", "id": "b"})
    assert [(item.id, item.context, item.endings) for item in found] == [("0", "  Once [x] ", ()), ("b", "Twice", ())]
    tiny_model.write_dataset(tmp_path / "items.jsonl")
    found = Prompts().load("items.jsonl", rootdir=tmp_path, limit=2)
    assert found[1].context == "Counting: Someone counts to 1 and says the number 1. Then they"
    assert (found.task, found[1].endings) == ("prompts", ())
    assert len(Prompts().load("bundled", rootdir=tmp_path)) > 100


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, r"prompts.jsonl:1: prompt is missing"),
        ({"prompt": 3}, r"prompts.jsonl:1: prompt must be text, not int"),
        ([], r"prompts.jsonl:1: list instead of a JSON object"),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, record: Any, message: str) -> None:
    """The message has the file, the line and what is needed."""
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, record)
