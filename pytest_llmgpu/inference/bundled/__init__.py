"""What the plugin measures when told nothing: a tiny LLaMA, a task it can do, and architectures for dummy weights.

`dataset` makes the task, `train` the model (with `tokenizer` and `evaluate`); both were run once and their output is
committed beside them. Importing this package costs nothing but `pathlib`.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

from pytest_llmgpu.inference.bundled.presets import PRESETS

__all__ = ["ACCURACY", "DATASET_SHA256", "MODEL_SHA256", "PRESETS", "dataset_path", "loglikelihoods", "model_directory"]

ACCURACY: dict[str, float] = {"acc": 1.0, "acc_norm": 1.0}
"""Accuracies of the bundled model on all bundled items, in float32."""

MODEL_SHA256 = "7d1b739c61e1a153b47fac439aa78afa0d61e8987156b3a05488250da1b72a1b"
"""Hash of model.safetensors."""

DATASET_SHA256 = "d68327657e7a3d8833eefb6326a101dba5a30ca47d2d50506b4dc7de46767ecf"
"""Hash of the dataset's file."""

_HERE = Path(__file__).parent


def model_directory() -> Path:
    """Return the directory of the bundled model and tokenizer, as `from_pretrained` takes it."""
    return _HERE / "model"


def loglikelihoods() -> array[float]:
    """Return the log-likelihood of each ending of the bundled items under the bundled model, in float32."""
    values = array("f")
    values.frombytes((model_directory() / "loglikelihoods.f32").read_bytes())
    if sys.byteorder == "big":
        values.byteswap()
    return values


def dataset_path() -> Path:
    """Return the bundled items, a JSON Lines file in HellaSwag's format."""
    return _HERE / "hellaswag_like.jsonl"
