"""Fail on words that STYLE replaces, in the strings, docstrings, comments, pages and Markdown of the project.

`python .ci/words.py` prints a line for each place. The message, the docstring or the page should use the word that
stands beside it here.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_INSTEAD = {
    r"told": "reported, stated",
    r"anew": "again",
    r"reckon(?:s|ed|ing)?": "compute, count",
    r"for want of": "because there is no",
    r"held against": "compared with",
    r"yardsticks?": "reference",
    r"sure[rl]y?": "statistically significant, certain",
}
_WORDS = re.compile(rf"\b({'|'.join(_INSTEAD)})\b", re.IGNORECASE)
_TEXTS = (".md", ".html", ".js", ".toml", ".ini", ".sh", ".yml")
_SKIPPED = (
    "benchmarks/paper/results/",
    ".ci/words.py",
    "tests/bundled_model/dataset.py",  # sentences of the bundled items, which the model was trained on
    "tests/data/",
    "tests/report/test_schema.py",  # looks for the same words in the published descriptions
)
_GIT = shutil.which("git") or "git"
_PAST = re.compile(r"(?m)^## (?!Unreleased)")
"""Where the past entries of the change log begin."""


def _pieces(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the text of a file in pieces with the line on which each begins."""
    if path.suffix not in {".py", *_TEXTS}:
        return
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in kinds:
                yield token.start[0], token.string
    else:
        yield 1, _PAST.split(source)[0] if path.name == "CHANGELOG.md" else source


def main() -> int:
    """Print each place and return 1 where there is one."""
    listed = subprocess.run([_GIT, "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [
        f"{name}:{line + text[: match.start()].count(chr(10))}: {match.group()}"
        for name in listed
        if not name.startswith(_SKIPPED) and Path(name).is_file()
        for line, text in _pieces(Path(name))
        for match in _WORDS.finditer(text)
    ]
    print("\n".join(found) or "no word of the list")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
