from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bundled_model.dataset import Item, evaluation_items, to_json_lines, training_items

from pytest_llmgpu.inference import bundled

if TYPE_CHECKING:
    from bundled_model.evaluate import Score
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

    Loaded = tuple[LlamaForCausalLM, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def items() -> list[Item]:
    """The items of the committed file."""
    return evaluation_items()


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    """Model in float32 and tokenizer, on at most two threads."""
    import torch
    from bundled_model.evaluate import load

    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    yield load(bundled.MODEL_DIRECTORY)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def full_score(loaded: Loaded, items: list[Item]) -> Score:
    """Score of all items with all of their context, in batches of 64."""
    from bundled_model.evaluate import score

    return score(*loaded, items)


def sha256(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_hashes_of_the_weights_and_the_dataset_are_the_registered_ones() -> None:
    """The files are those that baselines were measured with."""
    assert sha256(bundled.MODEL_DIRECTORY / "model.safetensors") == bundled.MODEL_SHA256
    assert sha256(bundled.DATASET_PATH) == bundled.DATASET_SHA256


def test_dataset_is_rebuilt_byte_for_byte() -> None:
    """The generator gives the committed file."""
    assert to_json_lines(evaluation_items()).encode() == bundled.DATASET_PATH.read_bytes()


def test_training_never_sees_an_evaluation_item(items: list[Item]) -> None:
    """No training item has the facts and question of an evaluation item."""
    from bundled_model.train import Settings

    settings = Settings()
    seen = itertools.islice(training_items(settings.seed), settings.steps * settings.rows)
    assert not {item.substance for item in items} & {item.substance for item in seen}


@pytest.mark.slow
def test_accuracy_is_the_registered_one_and_at_least_080(full_score: Score) -> None:
    """The model has the registered accuracy in float32."""
    assert {"acc": full_score.acc, "acc_norm": full_score.acc_norm} == bundled.ACCURACY
    assert min(full_score.acc, full_score.acc_norm) >= 0.80


@pytest.mark.slow
def test_choices_have_a_margin_that_rounding_cannot_cross(full_score: Score) -> None:
    """The smallest margin is a factor of e, so that another dtype or batch size flips no choice."""
    assert min(map(abs, full_score.margins)) > 1


def test_vocabulary_below_the_bytes_is_refused(tmp_path: Path) -> None:
    """A vocabulary that is too small for all bytes is refused."""
    from pytest_llmgpu.inference.bundled import save_tokenizer

    with pytest.raises(ValueError, match=r"vocabulary size 100 .* at least 258"):
        save_tokenizer(["text"], 100, tmp_path)
