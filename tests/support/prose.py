"""Texts that tests compare, kept in one file per package: `tests/<package>/prose.json`.

`pytest tests --update-prose` rewrites them; what changed is then read in the diff. Tests elsewhere assert verdicts and
figures, so that a message can be changed without touching them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

__all__ = ["Prose", "ProseFiles"]

_TESTS = Path(__file__).parents[1]


class ProseFiles:
    """The files that tests of this run read or, under `--update-prose`, rewrite."""

    def __init__(self, *, update: bool) -> None:
        """Start without having read any."""
        self.update = update
        self._kept: dict[Path, dict[str, list[str]]] = {}
        self._seen: dict[Path, dict[str, list[str]]] = {}

    def of(self, node: pytest.Item) -> Prose:
        """Return the texts of a test; those that it no longer compares are dropped when the file is rewritten."""
        package, *rest = node.path.relative_to(_TESTS).parts
        path = _TESTS / package / "prose.json"
        if path not in self._kept:
            self._kept[path] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        key = f"{'/'.join(rest)}::{node.name}"
        for name in [name for name in self._kept[path] if name == key or name.startswith(f"{key}#")]:
            if self.update:
                del self._kept[path][name]
        return Prose(key, self._kept[path], self._seen.setdefault(path, {}), update=self.update)

    def write(self) -> None:
        """Rewrite the files: the texts that tests of this run compared, and those of test files that still exist."""
        for path, seen in self._seen.items():
            kept = {
                name: lines
                for name, lines in self._kept[path].items()
                if (path.parent / name.partition("::")[0]).exists()
            }
            texts = dict(sorted({**kept, **seen}.items()))
            path.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class Prose:
    """The kept texts of one test: `assert prose == text`."""

    __hash__ = None  # type: ignore[assignment]  # it is compared, never kept

    def __init__(self, key: str, kept: dict[str, list[str]], seen: dict[str, list[str]], *, update: bool) -> None:
        """Start at the test's first text."""
        self._key, self._kept, self._seen, self._update = key, kept, seen, update
        self._count = 0

    def __eq__(self, text: object) -> bool:
        """Compare the test's next text; under `--update-prose` keep it."""
        lines = str(text).split("\n")
        self._count += 1
        name = self._key if self._count == 1 else f"{self._key}#{self._count}"
        self._seen[name] = lines
        self.expected = "\n".join(self._kept.get(name, ["no text is kept; run pytest with --update-prose"]))
        return self._update or self._kept.get(name) == lines

    def __repr__(self) -> str:
        """Show the kept text in pytest's comparison."""
        return repr(getattr(self, "expected", ""))
