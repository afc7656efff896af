from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
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
    yield load(bundled.model_directory())
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def full_score(loaded: Loaded, items: list[Item]) -> Score:
    """Score of all items with all of their context, in batches of 64."""
    from bundled_model.evaluate import score

    return score(*loaded, items)


def sha256(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_hash_of_the_weights_is_the_registered_one() -> None:
    """The weights have the registered hash."""
    assert sha256(bundled.model_directory() / "model.safetensors") == bundled.MODEL_SHA256


def test_hash_of_the_dataset_is_the_registered_one() -> None:
    """The items have the registered hash."""
    assert sha256(bundled.dataset_path()) == bundled.DATASET_SHA256


def test_dataset_is_rebuilt_byte_for_byte() -> None:
    """The generator gives the committed file."""
    assert to_json_lines(evaluation_items()).encode() == bundled.dataset_path().read_bytes()


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Paths, hashes and presets need neither torch nor transformers."""
    heavy = {"torch", "transformers", "numpy", "random"}
    program = f"import sys, pytest_llmgpu.inference.bundled; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_model_can_be_split_by_every_strategy() -> None:
    """Heads and vocabulary are multiples of 8, and heads have at least 32 dimensions."""
    config = json.loads((bundled.model_directory() / "config.json").read_text())
    heads = config["num_attention_heads"]
    assert heads % 8 == config["num_key_value_heads"] % 8 == config["vocab_size"] % 8 == 0
    assert config["intermediate_size"] % 8 == 0
    assert config["hidden_size"] // heads >= 32
    assert config["max_position_embeddings"] >= 1024


def test_records_are_hellaswags() -> None:
    """Every line has HellaSwag's fields in HellaSwag's types, and labels are balanced."""
    records = [json.loads(line) for line in bundled.dataset_path().read_text(encoding="utf-8").splitlines()]
    assert len(records) >= 400
    for number, record in enumerate(records):
        assert list(record) == ["ind", "activity_label", "ctx", "endings", "label"]
        assert record["ind"] == number
        assert len(set(record["endings"])) == 4
    assert Counter(record["label"] for record in records) == dict.fromkeys("0123", len(records) // 4)


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


@pytest.mark.parametrize(
    "text",
    [
        "Ünïcödé 漢字 🦙👩‍👩‍👧 \u202e\x00",
        "  two  spaces \t\r\n",
        "".join(map(chr, range(256))),
        "<s> </s> [title] ##",
    ],
)
def test_any_text_survives_the_tokenizer(text: str, loaded: Loaded) -> None:
    """Encoding and decoding give the same text."""
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_sequences_begin_with_bos_as_llamas_do(loaded: Loaded) -> None:
    """The only default special token is one leading bos."""
    _, tokenizer = loaded
    bare = tokenizer("A text", add_special_tokens=False)["input_ids"]
    assert tokenizer("A text")["input_ids"] == [tokenizer.bos_token_id, *bare]


def test_vocabulary_below_the_bytes_is_refused(tmp_path: Path) -> None:
    """A vocabulary that is too small for all bytes is refused."""
    from pytest_llmgpu.inference.bundled import save_tokenizer

    with pytest.raises(ValueError, match=r"vocabulary size 100 .* at least 258"):
        save_tokenizer(["text"], 100, tmp_path)


@pytest.mark.parametrize(("preset", "billions"), [("llama-7b", 6.738), ("llama-30b", 32.529)])
def test_presets_have_the_published_number_of_parameters(preset: str, billions: float) -> None:
    """A preset has the parameters of its architecture."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(bundled.PRESETS[preset]))
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=5e-4)
