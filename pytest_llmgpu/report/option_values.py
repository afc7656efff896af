"""The values of options: one function per kind of value, which raises ValueError with the allowed values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from pytest_llmgpu.report.text import guess

LATEST = "latest"
"""Name of the report that was measured last. No report can be saved under it."""

LONGEST_NAME = 80
"""Letters of the name of a report or a machine, far below the limits of file systems."""

_NAME = re.compile(rf"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")
_UNITS = {"": 1, "B": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def names(text: str) -> tuple[str, ...]:
    """Return the names of a comma list, each once."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("a comma list of strategies is needed")
    return tuple(dict.fromkeys(names))


def one_of(*allowed: str, **old_names: str) -> Callable[[str], str]:
    """Return a function that accepts these words only, and returns for an old name the word that replaced it."""

    def parse(text: str) -> str:
        word = old_names.get(text, text)
        if word not in allowed:
            raise ValueError(f"allowed are {', '.join(allowed)}{guess(text, allowed)}")
        return word

    return parse


def whole(text: str) -> int:
    """Return a whole number of at least 1."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise ValueError("a whole number of at least 1 is needed")
    return int(text)


def positive(text: str) -> float:
    """Return a number greater than 0."""
    if not 0 < (value := _number(text)) < math.inf:
        raise ValueError("a number greater than 0 is needed, such as 0.5")
    return value


def switch(text: str) -> bool:
    """Return the value of `true` or `false`."""
    if text.lower() not in ("true", "false"):
        raise ValueError("allowed are true and false")
    return text.lower() == "true"


def batch_sizes(text: str) -> tuple[int, ...]:
    """Return the batch sizes of a comma list, ascending, each once."""
    try:
        sizes = {whole(part.strip()) for part in text.split(",")}
    except ValueError:
        raise ValueError("a comma list of whole numbers of at least 1 is needed, such as 1,2,4") from None
    return tuple(sorted(sizes))


def seconds(text: str) -> float:
    """Return seconds; a fraction such as 1/6 is allowed."""
    above, _, below = text.partition("/")
    if not 0 < (value := _number(above) / (_number(below or "1") or math.nan)) < math.inf:
        raise ValueError("seconds above 0 are needed, such as 0.5 or 1/6")
    return value


def fraction(text: str) -> float:
    """Return a number from 0 to 1."""
    if not 0 <= (value := _number(text)) <= 1:
        raise ValueError("a fraction from 0 to 1 is needed, such as 0.82")
    return value


def memory_size(text: str) -> int:
    """Return the number of bytes of a size such as 32GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise ValueError("a size such as 32GiB, 24GB or 8192MiB is needed")
    return round(float(match[1]) * unit)


def text(text: str) -> str:
    """Return a text that is not empty."""
    if not text.strip():
        raise ValueError("a value is needed")
    return text


def cluster(text: str) -> str:
    """Return the address of a Ray cluster."""
    match = re.fullmatch(r"[^\s/]+:([0-9]{1,5})", text)
    if text != "auto" and not (match and 1 <= int(match[1]) < 2**16):
        raise ValueError("auto, or host and port such as 10.0.0.1:6379, is needed")
    return text


def save_name(text: str) -> str:
    """Return a name for a report in the store; an empty text is no name."""
    if text:
        check_name(text)
    return text


def check_name(name: str) -> None:
    """Check that a report can be saved under `name`.

    Raises:
        ValueError: the name is not allowed, or it has another meaning.
    """
    if not _NAME.fullmatch(name) or name.endswith((".json", ".json.gz")):
        raise ValueError(
            f"name {name!r}: allowed are at most {LONGEST_NAME} letters, digits, '.', '_' and '-', with at least one "
            "letter and without '.json' at the end"
        )
    if name == LATEST:
        raise ValueError(f"name {name!r}: means the newest report of the store; choose another name")


def check_name_is_free(name: str) -> None:
    """Check that a report would be found by `name`. It is called before a run: a file may appear meanwhile.

    Raises:
        ValueError: the name is that of a file or a folder here.
    """
    if Path(name).exists():
        raise ValueError(f"name {name!r}: is a file or folder here, which the name would refer to; choose another name")


def _number(text: str) -> float:
    """Return a number; NaN for a text that is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
