"""Numbers and names as text."""

from __future__ import annotations

import pytest

from pytest_llmgpu.report import text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.percent(0.0312), "3.1 %"),
        (text.percent(0.8234, 2), "82.34 %"),
        (text.signed_percent(0.05), "+5.0 %"),
        (text.signed_percent(-0.5, 0), "-50 %"),
        (text.signed_percent(1e9), "+1.0e+11 %"),
        (text.gib(2**31), "2.00 GiB"),
        (text.byte_size(999), "999 bytes"),
        (text.byte_size(44_000_000), "44.00 MB"),
        (text.byte_size(319_500_000_000), "319.5 GB"),
        (text.plural(1, "GPU"), "1 GPU"),
        (text.plural(2000, "batch"), "2,000 batches"),
        (text.listed(["a", "b"]), "a, b"),
        (text.listed(range(5), most=2), "0, 1 and 3 more"),
        (text.guess("flaot32", ["float16", "float32"]), " (did you mean float32?)"),
        (text.guess("float8", ["float16", "float32"]), ""),
        (text.without_numbers("mp-bs8's 2.6 GFLOP, was 45 MFLOP"), "mp-bs#'s #FLOP, was #FLOP"),
        (text.without_numbers("float16, +1.5 % in 3 GPUs, 1.2 GiB"), "float16, # % in # GPUs, #B"),
        (text.printable("a\x1b]0;b\nc"), "a ]0;b c"),
    ],
)
def test_values_are_written_one_way(shown: str, expected: str) -> None:
    """Each kind of value has one form."""
    assert shown == expected
