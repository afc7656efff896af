"""The texts that tests compare."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.prose import ProseFiles

TEXTS = {"test_a.py::test_two": ["1"], "test_a.py::test_two#2": ["2", "3"], "test_b.py::test_id[x#2]": ["4"]}


def test_every_kept_text_is_compared(prose_files: ProseFiles) -> None:
    """The texts of tests that are gone, or no longer compare texts, are dropped by `--update-prose`."""
    assert prose_files.update or prose_files.dropped() == {}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file with texts of tests of which `test_c.py` was removed."""
    folder = tmp_path / "gate"
    folder.mkdir()
    for name in ("test_a.py", "test_b.py"):
        (folder / name).touch()
    path = folder / "prose.json"
    path.write_text(json.dumps(TEXTS | {"test_c.py::test_one": ["5"], "test_a.py::test_renamed": ["6"]}))
    return path


def _item(path: Path, test: str, *fixtures: str) -> Any:
    file, _, name = test.partition("::")
    return SimpleNamespace(path=path.parent / file, name=name, fixturenames=fixtures)


def test_a_text_is_dropped_when_its_test_is_gone_or_compares_no_more(path: Path) -> None:
    """Files that were not collected are left as they are."""
    files = ProseFiles(update=False, tests=path.parents[1])
    files.collected([_item(path, "test_a.py::test_two"), _item(path, "test_a.py::test_new", "prose")])
    removed = ["test_c.py::test_one", "test_a.py::test_renamed"]
    assert files.dropped() == {path: ["test_a.py::test_two", "test_a.py::test_two#2", *removed]}


def test_an_update_writes_what_was_compared_and_keeps_what_did_not_run(path: Path) -> None:
    """Texts of tests that were left out by -k stay."""
    files = ProseFiles(update=True, tests=path.parents[1])
    two, other = _item(path, "test_a.py::test_two", "prose"), _item(path, "test_b.py::test_id[x#2]", "prose")
    files.collected([two, other])
    assert files.of(two) == "new\ntext"
    files.write()
    assert json.loads(path.read_text()) == {
        "test_a.py::test_two": ["new", "text"],
        "test_b.py::test_id[x#2]": ["4"],
    }


def test_a_test_that_compares_fewer_texts_fails(path: Path) -> None:
    """A comparison that was removed or is not reached is found."""
    files = ProseFiles(update=False, tests=path.parents[1])
    texts = files.of(_item(path, "test_a.py::test_two", "prose"))
    assert texts == "1"
    with pytest.raises(AssertionError, match="compares 1 of 2 texts"):
        texts.finish()
    assert texts == "2\n3"
    texts.finish()
