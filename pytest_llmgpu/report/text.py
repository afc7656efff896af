"""Numbers and names as text: one function per kind, for every message, table and page.

Of a long text a report keeps a part: a library may write gigabytes, or raise a message of megabytes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MIB, GIB = 2**20, 2**30
"""Bytes in a mebibyte and in a gibibyte."""

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_LARGEST_PLAIN = 1e6

_NUMBER = re.compile(r"(?<![\w.-])[-+]?\d[\d,.]*(?:e[-+]?\d+)?(?: [kKMGT]i?(?=B\b|FLOP\b)|(?!\w))|(?<=-bs)\d+\b")
"""A number with the prefix of its unit, or the batch size of a case; other numbers in names, as in float16, stay."""

FACTORS_FROM = 10.0
"""Slowdowns above this fraction are written as factors."""

_STYLE = re.compile(r"(\x1b\[(?:[0-4]|3[0-7])m)")
"""The styles of this package: colours, bold and dim. A report could hide text by others."""
_COMMAND = re.compile(r"^( *)(?=::)|(?<=#)(?=#\w*\[)", re.MULTILINE)
"""Where a CI system reads a command in the output: `::error::` at the start of a line, `##[error]` anywhere."""

MESSAGE_LETTERS = 2_000
"""Most letters of a message that are kept."""

_LOG_LINES, _LOG_BYTES = 40, 2**18
"""Lines of a log that are kept, of the last bytes, which hold as many lines of several thousand letters."""
_LINE_LETTERS = 1_000

_LONGEST = 500
"""Most letters of a text in one line of an export."""


def significant(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, without exponent and trailing zeros: 10264.3 is `10,260`."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def percent(fraction: float, digits: int = 1) -> str:
    """Return a fraction as a percentage: 0.0312 is `3.1 %`."""
    return f"{100 * fraction:.{digits}f} %"


def signed_percent(change: float, digits: int = 1) -> str:
    """Return a relative change with its sign: 0.05 is `+5.0 %`; beyond a million percent in powers of ten."""
    value = 100 * change
    return f"{value:+.{digits}f} %" if abs(value) < _LARGEST_PLAIN else f"{value:+.1e} %"


def slowdown(fraction: float) -> str:
    """Return a slowdown without an exponent: 0.018 is `1.8 %`, 1.3 is `130 %`, 123.0 is `a factor of 124`."""
    if fraction > FACTORS_FROM:
        return f"a factor of {min(1 + fraction, _LARGEST_PLAIN):,.0f}{' or more' if fraction >= _LARGEST_PLAIN else ''}"
    number = 100 * fraction
    return f"{number:.2g} %" if number < 99.5 else f"{number:,.0f} %"  # noqa: PLR2004 - three digits from here on


def duration(seconds: float) -> str:
    """Return how long something took: 95.2 is `95 s`, 5400 is `90 min`."""
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"  # noqa: PLR2004 - as times of tables


def gib(size_bytes: float, digits: int = 2) -> str:
    """Return a size in GiB: 2**31 is `2.00 GiB`."""
    return f"{size_bytes / GIB:.{digits}f} GiB"


def byte_size(size_bytes: float) -> str:
    """Return a number of bytes sent, in the largest decimal unit that it reaches, with three digits or more."""
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.{2 if size_bytes < 100 * unit else 1}f} {name}"
    return f"{size_bytes:.0f} bytes"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 GPU`, `2 GPUs`, `3 batches`, `2 series`."""
    if count == 1 or noun == "series":
        return f"{count:,} {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def listed(names: Iterable[object], most: int = 12) -> str:
    """Return the first names of a list and how many more there are: `mp-bs1, mp-bs2 and 3 more`."""
    found = [str(name) for name in names]
    return ", ".join(found[:most]) + (f" and {len(found) - most:,} more" if len(found) > most else "")


def guess(name: str, names: Iterable[str], least: float = 0.7) -> str:
    """Return ` (did you mean tp?)` for the most similar name with the same digits; empty if none is very similar."""
    import difflib  # not when pytest loads the plugin

    # Another number is another thing: float8 is no misspelt float32.
    alike = [one for one in names if re.findall(r"\d", one) == re.findall(r"\d", name)]
    if not name[2:]:  # tq is a misspelt tp, and pp none
        alike, least = [one for one in alike if one[:1] == name[:1]], 0.5
    close = difflib.get_close_matches(name, alike, 1, least)
    return f" (did you mean {close[0]}?)" if close else ""


def guess_file(name: str, names: Iterable[str]) -> str:
    """Return the same for a file, which is similar without its suffixes, too: base.json is no misspelt head.json."""
    stem = name.partition(".")[0]
    return guess(name, [one for one in names if guess(stem, [one.partition(".")[0]])])


def capital(text: str) -> str:
    """Return a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """Return a text with a capital at its beginning and one full stop at its end."""
    return capital(text.rstrip(".")) + "."


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or the name of its class if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def valid(text: str) -> str:
    r"""Return text that UTF-8 can encode. A byte of a path that is not UTF-8 is shown by its code: `caf\udce9`."""
    return text.encode("utf-8", "backslashreplace").decode()


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON in which every text, names of fields among them, is changed."""
    if isinstance(value, dict):
        return {change(name): with_texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def without_numbers(text: str) -> str:
    """Return a text that is equal for messages that differ in numbers and batch sizes alone."""
    return _NUMBER.sub("#", text)


def named(text: str, report: str, baseline: object = "") -> str:
    """Return text whose commands have the name of the report, if it has one, and the path of a baseline's file."""
    path = str(baseline).rpartition(":")[2]
    text = text.replace("--to FILE", f"--to {shlex.quote(path)}") if path.endswith((".json", ".json.gz")) else text
    commands = "(llmgpu (?:show|promote|gate --verdicts) |resume=)REPORT"
    return re.sub(commands, lambda at: at[1] + shlex.quote(report or "REPORT"), text)


def printable(text: str) -> str:
    """Return text in which each control character is a space. A report can come from any source."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def one_line(text: str, longest: int = _LONGEST) -> str:
    """Return text as one line without control characters and marks of direction, cut to `longest` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def printable_lines(text: str, *, styled: bool = False) -> str:
    """Return lines of text for a terminal or the log of a CI system. All output passes through here.

    Each control character except the line break is a space, and what a CI system would run as a command is text. The
    styles of this package stay if the lines are `styled`.
    """
    pieces = _STYLE.split(text) if styled else [text]
    pieces[::2] = ["\n".join(map(printable, piece.split("\n"))) for piece in pieces[::2]]
    return _COMMAND.sub(r"\1\\", "".join(pieces))


def beginning(text: str, most_letters: int = MESSAGE_LETTERS) -> str:
    """Return the beginning of a text, with the number of bytes that are left out."""
    if len(text) <= most_letters:
        return text
    left_out_bytes = len(text[most_letters:].encode("utf-8", "surrogatepass"))
    return f"{text[:most_letters]}... ({left_out_bytes:,} bytes left out)"


def log_tail(path: Path, begin_bytes: int = 0, *, most_lines: int = _LOG_LINES, most_bytes: int = _LOG_BYTES) -> str:
    """Return the last lines of a log from `begin_bytes` on, each cut; empty if the log cannot be read.

    If the log is longer than the part that is read, the first line has the number of bytes before that part.
    """
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            skipped_bytes = file.seek(max(begin_bytes, size_bytes - most_bytes)) - begin_bytes
            text = file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""
    lines = [beginning(line, _LINE_LETTERS) for line in text.splitlines()[-most_lines:]]
    return "\n".join([f"({skipped_bytes:,} bytes of the log left out)"] * (skipped_bytes > 0) + lines)
