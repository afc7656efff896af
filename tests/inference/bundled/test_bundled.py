from __future__ import annotations

import hashlib
import itertools

import pytest
from bundled_model.dataset import evaluation_items, to_json_lines, training_items
from support import tiny_model

from pytest_llmgpu.inference import bundled, models, weights

_SHA256 = {
    bundled.MODEL_DIRECTORY / "model.safetensors": "7d1b739c61e1a153b47fac439aa78afa0d61e8987156b3a05488250da1b72a1b",
    bundled.DATASET_PATH: "d68327657e7a3d8833eefb6326a101dba5a30ca47d2d50506b4dc7de46767ecf",
}


def test_the_files_are_those_that_baselines_were_measured_with() -> None:
    """Weights and dataset have the registered hashes, and the generator gives the dataset byte for byte."""
    assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in _SHA256} == _SHA256
    assert to_json_lines(evaluation_items()).encode() == bundled.DATASET_PATH.read_bytes()


def test_training_never_sees_an_evaluation_item() -> None:
    """No training item has the facts and question of an evaluation item."""
    from bundled_model import train

    seen = itertools.islice(training_items(train.SEED), train.STEPS * train.ROWS)
    assert not {item.substance for item in evaluation_items()} & {item.substance for item in seen}


@pytest.mark.slow
def test_accuracy_is_the_registered_one_with_a_margin_that_rounding_cannot_cross() -> None:
    """In float32 with all of the context; the smallest margin is a factor of e: no dtype or batch size flips it."""
    from bundled_model.evaluate import load, score

    found = score(*load(bundled.MODEL_DIRECTORY), evaluation_items())
    assert {"acc": found.acc, "acc_norm": found.acc_norm} == bundled.ACCURACY
    assert min(map(abs, found.margins)) > 1


@pytest.mark.parametrize(
    ("preset", "billions", "tokens"),
    [
        ("llama-7b", 6.738, 2048),
        ("llama-13b", 13.016, 2048),
        ("llama-30b", 32.529, 2048),
        ("llama-65b", 65.286, 2048),
        ("llama-3-8b", 8.030, 8192),
        ("qwen3-8b", 8.191, 40_960),
        ("qwen3-30b-a3b", 30.532, 40_960),
        ("mixtral-8x7b", 46.703, 32_768),
        ("gpt-oss-20b", 20.915, 131_072),
        ("gemma-3-12b", 11.766, 131_072),
    ],
)
def test_a_preset_is_the_architecture_of_its_name(preset: str, billions: float, tokens: int) -> None:
    """A preset has the published number of parameters and maximum input length."""
    import torch

    model = weights.skeleton(tiny_model.source(bundled.PRESETS[preset]), torch.float16)
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=5e-4)
    assert models.max_length(model.config) == tokens
