from __future__ import annotations

import re

import pytest

from pytest_llmgpu.report.options import parse


@pytest.mark.parametrize(
    ("metavar", "text", "value"),
    [
        (None, "True", True),
        (None, "false", False),
        ("FRACTION", "0", 0.0),
        ("FRACTION", "1.0", 1.0),
        ("ITEMS", "1", 1),
        ("N[,N]", "8, 1", (1, 8)),
        ("NAME[,NAME]", "tp, mp", ("tp", "mp")),
        ("SECONDS", "0.5", 0.5),
        ("SECONDS", "1/4", 0.25),
        # GiB counts in powers of two, GB in powers of ten.
        ("SIZE", "32GiB", 32 * 2**30),
        ("SIZE", "24GB", 24 * 10**9),
        ("SIZE", "1.5gib", 3 * 2**29),
        ("SIZE", "512 MiB", 2**29),
        ("SIZE", "1MB", 10**6),
        ("SIZE", "1000", 1000),
        ("{auto,cuda}", "cuda", "cuda"),
        ("{auto,cuda}[,...]", "cuda, auto", ("cuda", "auto")),
        ("NAME", "nightly", "nightly"),
        ("MODEL", "a b", "a b"),
    ],
)
def test_a_text_has_the_value_of_its_kind(metavar: str | None, text: str, value: object) -> None:
    """The placeholder in the help decides: batch sizes are sorted, and sizes are as written."""
    assert parse(metavar, False, text) == value


@pytest.mark.parametrize(
    ("metavar", "text", "allowed"),
    [
        (None, "1", "allowed are true and false"),
        *(("FRACTION", text, "a fraction from 0 to 1") for text in ("-0.1", "1.1", "nan", "much")),
        *(("N", text, "a whole number of at least 1") for text in ("0", "-3", "1.5", "")),
        *(("N[,N]", text, "a comma list of different whole numbers of") for text in ("0,1", "1,,2", "", "8,1,8")),
        *(("NAME[,NAME]", text, "a comma list of different strategies") for text in (" ,", "mp,", "tp,mp,tp")),
        ("{none,int8}[,...]", "int8,int8", "allowed are none, int8, each once"),
        *(("SECONDS", text, "seconds above 0 are needed") for text in ("0", "-1", "1/0", "inf", "nan", "soon")),
        *(("SIZE", text, "a size such as 32GiB") for text in ("0GiB", "32 XB", "GiB")),
        ("{float16,float32}", "float-16", "allowed are float16, float32 (did you mean float16?)"),
        ("{none,int8}[,...]", "none,int-8", "allowed are none, int8 (did you mean int8?)"),
        ("NAME", "latest", "name 'latest': means"),
        *(("MODEL", text, "a value is needed") for text in ("", " ")),
    ],
)
def test_a_text_that_is_not_allowed_is_refused_with_what_is(metavar: str | None, text: str, allowed: str) -> None:
    """The message has the allowed values, or the most similar one."""
    with pytest.raises(ValueError, match=re.escape(allowed)):
        parse(metavar, False, text)


def test_an_empty_text_may_be_a_value() -> None:
    """A report that is not written has an empty path, and a run that is kept without a name an empty name."""
    assert parse("PATH", True, "") == parse("NAME", True, "") == ""
