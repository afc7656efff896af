"""Write a dataset in HellaSwag's format with sequences of equal length, to measure forwards of one width.

Its texts are words that are one token each for a preset's tokenizer, which is trained on them. Prints the width.

    python benchmarks/overhead/fixed_width.py out.jsonl --width 104 --items 64
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from pytest_llmgpu.inference import batching, models
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag

_ENDING_WORDS = 12
_WORDS = [a + b for a in ("ba", "de", "fi", "go", "hu", "ka", "le", "mi") for b in ("ron", "set", "tal", "vim", "lop")]


def write(path: Path, context_words: int, items: int) -> None:
    """Write items with contexts of the given number of words."""
    draw = random.Random(0)  # noqa: S311 - a benchmark's words
    records = [
        {
            "ind": number,
            "activity_label": "Counting",
            "ctx": " ".join(draw.choices(_WORDS, k=context_words)),
            "endings": [" ".join(draw.choices(_WORDS, k=_ENDING_WORDS)) for _ in range(4)],
            "label": str(number % 4),
        }
        for number in range(items)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def widths(path: Path) -> set[int]:
    """Return the widths of the batches at batch size 1 under llama-7b's tokenizer, which the other presets share."""
    dataset = HellaSwag().load(str(path), rootdir=path.parent, limit=None)
    source = models.resolve("llama-7b", load_format="dummy", texts=dataset.texts(), rootdir=path.parent)
    requests = batching.encode(HellaSwag(), dataset.items, models.load_tokenizer(source), longest := 2048)
    assert longest == requests.max_length
    return {batch.width for batch in batching.plan(requests, 1).batches}


def main() -> None:
    """Write the dataset with one word more each time, until its width is the requested one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--width", type=int, default=104, metavar="TOKENS")
    parser.add_argument("--items", type=int, default=64)
    arguments = parser.parse_args()
    for context_words in range(arguments.width - _ENDING_WORDS - 10, arguments.width):
        write(arguments.path, context_words, arguments.items)
        found = widths(arguments.path)
        if found == {arguments.width}:
            print(json.dumps({"path": str(arguments.path), "items": arguments.items, "width": arguments.width}))
            return
    raise SystemExit(f"no number of words gives {arguments.width} tokens; the last gave {sorted(found)}")


if __name__ == "__main__":
    main()
