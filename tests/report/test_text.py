"""Numbers and names as text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_llmgpu.report import text

_STYLED = partial(text.printable_lines, styled=True)


@pytest.mark.parametrize(
    ("function", "given", "shown"),
    [
        (text.significant, (10264.3,), "10,260"),
        (text.percent, (0.0312,), "3.1 %"),
        (text.percent, (0.8234, 2), "82.34 %"),
        (text.signed_percent, (0.05,), "+5.0 %"),
        (text.signed_percent, (-0.5, 0), "-50 %"),
        (text.signed_percent, (1e9,), "+1.0e+11 %"),
        (text.slowdown, (0.018,), "1.8 %"),
        (text.slowdown, (0.99,), "99 %"),
        (text.slowdown, (10.0,), "1,000 %"),
        (text.slowdown, (123.0,), "a factor of 124"),
        (text.slowdown, (1e6,), "a factor of 1,000,000 or more"),
        (text.slowdown, (999_000,), "a factor of 999,001"),
        (text.gib, (2**31,), "2.00 GiB"),
        (text.byte_size, (999,), "999 bytes"),
        (text.byte_size, (1000,), "1.00 kB"),
        (text.byte_size, (44_000_000,), "44.00 MB"),
        (text.byte_size, (100_000_000,), "100.0 MB"),
        (text.byte_size, (319_500_000_000,), "319.5 GB"),
        (text.plural, (1, "GPU"), "1 GPU"),
        (text.plural, (2000, "batch"), "2,000 batches"),
        (text.plural, (2, "series"), "2 series"),
        (text.listed, (["a", "b"],), "a, b"),
        (text.listed, (range(5), 2), "0, 1 and 3 more"),
        (text.guess, ("tq", ["mp", "tp", "iok"]), " (did you mean tp?)"),
        (text.guess, ("pp", ["mp", "tp", "iok"]), ""),
        (text.guess_file, ("head.json.gz", ["base.json.gz"]), ""),
        (text.guess_file, ("last.jso", ["last.html", "last.json"]), " (did you mean last.json?)"),
        (text.guess, ("flaot32", ["float16", "float32"]), " (did you mean float32?)"),
        (text.guess, ("float8", ["float16", "float32"]), ""),
        (text.guess, ("nope", ["mp", "openai", "tp"]), ""),
        (text.sentence, ("it is.",), "It is."),
        (text.first_line, (ValueError("a\nb"),), "a"),
        (text.first_line, (KeyError(),), "KeyError"),
        (text.valid, ("caf\udce9",), "caf\\udce9"),
        (text.without_numbers, ("mp-bs8's 2.6 GFLOP, was 45 MFLOP",), "mp-bs#'s #FLOP, was #FLOP"),
        (text.without_numbers, ("float16, +1.5 % in 3 GPUs, 1.2 GiB",), "float16, # % in # GPUs, #B"),
        (text.printable, ("a\x1b]0;b\nc",), "a ]0;b c"),
        (text.one_line, ("a\n\tb\x00\u202ec\ud800 ",), "a b c"),
        (text.one_line, ("x" * 501,), "x" * 499 + "…"),
        (text.printable_lines, ("a\r\x1b[31mb\n ::error::c ##[group]",), "a  [31mb\n \\::error::c #\\#[group]"),
        (_STYLED, ("\x1b[31mred\x1b[0m \x1b[8mhidden",), "\x1b[31mred\x1b[0m  [8mhidden"),
        (text.beginning, ("abc", 3), "abc"),
        (text.beginning, ("abcd\u00e9", 3), "abc... (3 bytes left out)"),
    ],
)
def test_values_are_written_one_way(function: Callable[..., str], given: tuple[Any, ...], shown: str) -> None:
    """Each kind of value has one form."""
    assert function(*given) == shown


def test_blank_lines_of_a_log_are_shown_at_once() -> None:
    """A search that grows with the square of their number would take four minutes."""
    blank = "\n" * 100_000
    assert text.printable_lines(f"{blank}  ::error::a") == f"{blank}  \\::error::a"


def test_the_tail_of_a_log_has_its_last_lines(tmp_path: Path) -> None:
    """Lines are cut, and the first line counts the bytes before the part that was read."""
    log = tmp_path / "log"
    assert text.log_tail(log) == ""
    log.write_text("old\nfirst\nsecond\n")
    assert text.log_tail(log, 4) == "first\nsecond"
    assert text.log_tail(log, most_lines=1) == "second"
    assert text.log_tail(log, most_bytes=7) == "(10 bytes of the log left out)\nsecond"
    log.write_text("x" * 1001)
    assert text.log_tail(log) == "x" * 1000 + "... (1 bytes left out)"
