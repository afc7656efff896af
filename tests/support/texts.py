"""Generated texts as lists."""

from __future__ import annotations

from typing import NamedTuple

from pytest_llmgpu.inference.generation import Generator
from pytest_llmgpu.report.derived import decode
from pytest_llmgpu.report.result import Batches, Generation


class Texts(NamedTuple):
    """The texts of a generator, with their batches and their record."""

    batches: Batches
    record: Generation
    tokens: list[list[int]]
    loglikelihoods: list[list[float]]


def generated(generator: Generator) -> Texts:
    """Generate the texts of all prompts; every text has as many tokens."""
    batches, record, _ = generator.generate()
    length, tokens, values = record.new_tokens[0], decode(record.tokens, "i"), decode(record.loglikelihoods)
    starts = range(0, len(tokens), length)
    rows = [list(tokens[start : start + length]) for start in starts]
    return Texts(batches, record, rows, [list(values[start : start + length]) for start in starts])
