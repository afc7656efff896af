"""Texts that tests compare, kept in one file per package: `tests/<package>/prose.json`.

`pytest tests --update-prose` rewrites them; what changed is then read in the diff. Tests elsewhere assert verdicts and
figures, so that a message can be changed without touching them. A kept text that no test compares any more is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]


class ProseFiles:
    """The files that tests of this run read or, under `--update-prose`, rewrite."""

    def __init__(self, *, update: bool, tests: Path = _TESTS) -> None:
        """Start without having read any; `tests` is the folder of the packages' folders."""
        self.update = update
        self._tests = tests
        self._kept: dict[Path, dict[str, list[str]]] = {}
        self._seen: dict[Path, dict[str, list[str]]] = {}
        self._comparing: dict[Path, set[str]] = {}

    def collected(self, items: Iterable[pytest.Item]) -> None:
        """Keep which tests compare texts. The items are all those of their files."""
        for item in items:
            names = self._comparing.setdefault(item.path, set())
            if "prose" in getattr(item, "fixturenames", ()):
                names.add(item.name)

    def of(self, node: pytest.Item) -> Prose:
        """Return the texts of a test."""
        package, *rest = node.path.relative_to(self._tests).parts
        path = self._tests / package / "prose.json"
        kept, key = self._read(path), f"{'/'.join(rest)}::{node.name}"
        own = {name: kept[name] for name in kept if _test_of(name) == key}
        if self.update:
            for name in own:
                del kept[name]
        return Prose(key, own, self._seen.setdefault(path, {}), update=self.update)

    def dropped(self) -> dict[Path, list[str]]:
        """Return the kept texts that no test compares: the test is gone, or it no longer uses the fixture."""
        found: dict[Path, list[str]] = {}
        for path in {self._tests / file.relative_to(self._tests).parts[0] / "prose.json" for file in self._comparing}:
            for name in self._read(path):
                file, _, test = _test_of(name).partition("::")
                comparing = self._comparing.get(path.parent / file)
                gone = not (path.parent / file).exists() if comparing is None else test not in comparing
                if gone:
                    found.setdefault(path, []).append(name)
        return found

    def write(self) -> None:
        """Rewrite the files: the texts that tests of this run compared, and those of tests that did not run."""
        for path, names in self.dropped().items():
            for name in names:
                del self._kept[path][name]
        for path, kept in self._kept.items():
            texts = dict(sorted({**kept, **self._seen.get(path, {})}.items()))
            if texts or path.exists():
                path.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _read(self, path: Path) -> dict[str, list[str]]:
        if path not in self._kept:
            self._kept[path] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return self._kept[path]


def _test_of(name: str) -> str:
    """Return the test of a text's name: `#2` and so on count the texts of one test."""
    return re.sub(r"#\d+$", "", name)


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

    def finish(self) -> None:
        """Refuse kept texts that the test did not compare."""
        kept = 0 if self._update else len(self._kept)
        assert self._count >= kept, (
            f"{self._key} compares {self._count} of {kept} texts; run pytest with --update-prose"
        )

    def __repr__(self) -> str:
        """Show the kept text in pytest's comparison."""
        return repr(getattr(self, "expected", ""))
