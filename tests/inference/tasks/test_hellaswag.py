from __future__ import annotations

import base64
import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from support import tiny_model

from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag, Prompts, preprocess
from pytest_llmgpu.inference.tasks.protocol import Item

RECORD: dict[str, Any] = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx": "A man is sitting on a roof. he",
    "endings": ["is using wrap.", "is ripping tiles off.", "is holding a cube.", "starts pulling up."],
    "label": "3",
}


def _write(tmp_path: Path, *records: Any) -> str:
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_a_record_becomes_prompt_endings_and_label(tmp_path: Path) -> None:
    """The prompt is the activity, a colon and the context; without an activity the context alone."""
    plain = {name: value for name, value in RECORD.items() if name != "activity_label"}
    first, second = HellaSwag().load(_write(tmp_path, RECORD, plain), rootdir=tmp_path).items
    assert first == Item("24", "Roof shingle removal: A man is sitting on a roof. he", tuple(RECORD["endings"]), 3)
    assert second == Item("24", "A man is sitting on a roof. he", tuple(RECORD["endings"]), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": ""}, "label '' is not allowed: 0 to 3.*validation split"),
        ({"label": ...}, "label is missing: 0 to 3"),
        ({"label": 4}, "label 4 is not allowed: 0 to 3"),
        ({"label": -1}, "label -1 is not allowed"),
        ({"label": True}, "label True is not allowed"),
        ({"label": "x"}, "label 'x' is not allowed: 0 to 3"),
        ({"endings": ["only one"], "label": "0"}, "fewer than two endings"),
        ({"endings": "a string"}, "endings must be a list of strings"),
        ({"endings": ["a", 2]}, "endings must be a list of strings"),
        ({"endings": ["a", " [step] "]}, "ending 1 is empty"),
        ({"endings": ...}, "endings is missing: a list of strings is needed"),
        ({"ctx": ...}, "ctx is missing: text is needed"),
        ({"prompt": " ", "ctx": ..., "endings": ...}, "prompt is an empty text: text is needed"),
        ({"ctx": None}, "ctx must be text, not null"),
        ({"ctx": 3}, "ctx must be text, not int"),
        ({"activity_label": 3}, "activity_label must be text, not int"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """The error has the file, the line, the reason and what is needed."""
    record = {name: value for name, value in (RECORD | changes).items() if value is not ...}
    path = _write(tmp_path, RECORD, record)
    with pytest.raises(ValueError, match=rf"items\.jsonl:2: .*{message}") as caught:
        HellaSwag().load(path, rootdir=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        (HellaSwag, b'{"ind": 1,\n', ":1: not JSON"),
        (HellaSwag, b"[1]\n", ":1: list instead of a JSON object"),
        (HellaSwag, b"\n\n\xff\xfe\n", ":3: byte 1 is not UTF-8"),
        (HellaSwag, b"\n \n", "is empty: one JSON object per line"),
        (Prompts, b"[]", ":1: list instead of a JSON object"),
        (Prompts, b'{"text": "a"}', ":1: prompt is missing"),
        (Prompts, b'{"prompt": 3}', ":1: prompt must be text, not int"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, task: type[HellaSwag], content: bytes, message: str) -> None:
    """A file that is not JSON Lines, or has other fields, is refused in one line."""
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        task().load(str(tmp_path / "bad.jsonl"), rootdir=tmp_path)


def test_prompts_are_texts_of_json_lines_or_the_contexts_of_a_dataset(tmp_path: Path) -> None:
    """A text is not changed, and its id is kept or the number of the line; HellaSwag scores endings after a context."""
    both = {**RECORD, "prompt": "Thrice"}
    path = _write(tmp_path, {"prompt": "  Once [x] "}, {"prompt": "Twice", "id": "b"}, both)
    found = [(item.id, item.context, item.endings) for item in Prompts().load(path, rootdir=tmp_path)]
    assert found == [("0", "  Once [x] ", ()), ("b", "Twice", ()), ("2", "Thrice", ())]
    tiny_model.write_dataset(tmp_path / "items.jsonl")
    dataset = Prompts().load("items.jsonl", rootdir=tmp_path, limit=2)
    assert dataset[1].context == "Counting: Someone counts to 1 and says the number 1. Then they"
    assert (dataset.task, dataset[1].endings) == ("prompts", ())
    assert len(Prompts().load("bundled", rootdir=tmp_path)) > 100


def test_a_folder_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in the message makes a file that is read of a folder of save_to_disk."""
    import datasets

    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_list([RECORD]).save_to_disk("saved")
    with pytest.raises(ValueError, match=r"^dataset saved is a folder: a JSON Lines file is needed .*\)$") as caught:
        HellaSwag().load("saved", rootdir=tmp_path)
    eval(str(caught.value).partition("wrote: ")[2].removesuffix(")"), {"datasets": datasets})
    assert HellaSwag().load("items.jsonl", rootdir=tmp_path).items[0].id == "24"


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    """The items are those of the file that was compressed; a broken one is refused with its name."""
    plain = HellaSwag().load(_write(tmp_path, RECORD, RECORD), rootdir=tmp_path)
    path = tmp_path / "items.jsonl.gz"
    path.write_bytes(gzip.compress((tmp_path / "items.jsonl").read_bytes()))
    packed = HellaSwag().load("items.jsonl.gz", rootdir=tmp_path)
    assert (packed.name, packed.sha256) == ("items.jsonl.gz", plain.sha256)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"items\.jsonl\.gz cannot be decompressed"):
        HellaSwag().load("items.jsonl.gz", rootdir=tmp_path)


def test_an_unknown_dataset_is_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    """An unknown name is refused with the allowed names and the closest one."""
    with pytest.raises(ValueError, match="'piqa' is unknown: allowed are bundled, hellaswag, or a JSON Lines"):
        HellaSwag().load("piqa", rootdir=tmp_path)
    with pytest.raises(ValueError, match=r"'hellaswg' is unknown \(did you mean hellaswag\?\): allowed are"):
        HellaSwag().load("hellaswg", rootdir=tmp_path)


def test_a_limit_keeps_the_first_items_and_reads_no_further(tmp_path: Path) -> None:
    """Lines after the limit are not read."""
    path = _write(tmp_path, RECORD, RECORD | {"ind": 25}, {"broken": True})
    assert [item.id for item in HellaSwag().load(path, rootdir=tmp_path, limit=2).items] == ["24", "25"]


def test_the_hash_is_of_the_items_not_of_the_file(tmp_path: Path) -> None:
    """The hash depends on the items, and not on blank lines or other fields."""
    plain = HellaSwag().load(_write(tmp_path, RECORD), rootdir=tmp_path).sha256
    (tmp_path / "same.jsonl").write_text("\n" + json.dumps(RECORD | {"split": "val"}) + "\r\n\n")
    assert HellaSwag().load(str(tmp_path / "same.jsonl"), rootdir=tmp_path).sha256 == plain
    other = RECORD | {"endings": [*RECORD["endings"][:3], "another."]}
    assert HellaSwag().load(_write(tmp_path, other), rootdir=tmp_path).sha256 != plain


def test_a_file_is_shown_relative_to_the_rootdir_else_by_its_name(tmp_path: Path) -> None:
    """A dataset's name has no absolute path."""
    (tmp_path / "data").mkdir()
    path = _write(tmp_path / "data", RECORD)
    assert HellaSwag().load(path, rootdir=tmp_path).name == "data/items.jsonl"
    assert HellaSwag().load("data/items.jsonl", rootdir=tmp_path).name == "data/items.jsonl"
    (tmp_path / "elsewhere").mkdir()
    assert HellaSwag().load(path, rootdir=tmp_path / "elsewhere").name == "items.jsonl"


@pytest.mark.slow
def test_the_hub_dataset_is_its_validation_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is labelled. Without a network the error is one line with what to pass instead."""
    hub = {("Rowan/hellaswag", "validation"): [RECORD]}
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: hub[name, split])
    dataset = HellaSwag().load("hellaswag", rootdir=tmp_path)
    assert (dataset.name, len(dataset.items)) == ("hellaswag", 1)

    def out_of_reach(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub\nand a long story")

    monkeypatch.setattr("datasets.load_dataset", out_of_reach)
    with pytest.raises(ValueError, match=r"^dataset hellaswag .*Couldn't reach the hub .*pass a JSON Lines file.*$"):
        HellaSwag().load("hellaswag", rootdir=tmp_path)


def test_acc_goes_by_loglikelihood_and_acc_norm_by_character() -> None:
    """Characters are counted, not bytes. The base64 in a report is little-endian float32 in the order of the items."""
    items = [Item("0", "c", ("aa", "b" * 8), 0), Item("1", "c", ("aa", "bb"), 1), Item("2", "c", ("ñé", "bbb"), 1)]
    accuracy = HellaSwag().score(items, [[-4.0, -8.0], [-3.0, -2.0], [-3.1, -4.0]])
    assert (accuracy.predictions, accuracy.predictions_norm) == ([0, 1, 0], [1, 1, 1])
    assert [accuracy.acc, accuracy.acc_norm] == pytest.approx([2 / 3, 2 / 3])
    assert accuracy.stderr == pytest.approx((2 / 3 * 1 / 3 / 2) ** 0.5)
    decoded = struct.unpack("<6f", base64.b64decode(accuracy.loglikelihoods))
    assert decoded == pytest.approx((-4.0, -8.0, -3.0, -2.0, -3.1, -4.0), rel=1e-7)


def test_brackets_that_do_not_close_take_linear_time() -> None:
    """An ending of several megabytes is read at once."""
    assert preprocess("[a" * 2_000_000) == "[a" * 2_000_000
    assert preprocess("[a" * 1_000_000 + "]" + "[a" * 1_000_000) == "[a" * 1_000_000


def test_a_line_of_many_megabytes_is_refused(tmp_path: Path) -> None:
    """A file without line breaks is not read completely."""
    path = tmp_path / "items.jsonl"
    with path.open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(ValueError, match=r"items.jsonl:1: the line has more than 16,777,216 bytes"):
        HellaSwag().load(str(path), rootdir=tmp_path)
