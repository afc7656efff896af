"""What is measured: the identity of one measurement.

A case is everything that decides a number: two cases with equal keys are the same measurement, whatever the
machine or the day. It holds nothing of what happened (see `result`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

__all__ = ["REFERENCE_STRATEGY", "Case"]

REFERENCE_STRATEGY = "mp"
"""Strategy that the others are compared with."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: a model under a strategy, scoring a dataset at one batch size."""

    strategy: str
    """Name of the strategy: `mp`, `tp`, `iok`, or another's own."""
    backend: str | None = None
    """Library that carries the strategy out: `accelerate` for mp."""
    strategy_options: dict[str, str | int | float | bool | None] = {}
    """Options only this strategy knows, as they were in force."""
    batch_size: int
    """Sequences per forward. A HellaSwag item is 4 sequences."""
    workload: str = "loglikelihood"
    """What a forward is for: log-likelihoods of endings given their contexts.

    `loglikelihood_full_logits`: the same with the logits of every position and a KV cache, as
    lm-evaluation-harness computes them."""
    model: str
    """`bundled`, a preset's name, a hub id, or a directory (relative to the rootdir, else its basename)."""
    revision: str | None = None
    """Commit of a hub model, fingerprint of a directory's files, None for a preset."""
    load_format: str = "auto"
    """`auto`: safetensors. `dummy`: seeded random weights made on the device."""
    seed: int = 0
    """Seed of dummy weights."""
    dtype: str
    """`float32`, `float16` or `bfloat16`."""
    device: str
    """`cuda` or `cpu`."""
    devices: int
    """How many devices the strategy spreads the model over."""
    launcher: str = "local"
    """How the ranks were started."""
    cuda_graphs: str = "auto"
    """Whether CUDA graphs were asked for: `auto`, `on` or `off`."""
    execution: str = "eager"
    """How the forwards ran: `eager`, `cuda_graphs` or `compile`. Where `cuda_graphs` is `auto` this is an answer, known
    once the case has warmed up, and therefore no part of the keys: another choice is still the same measurement."""
    gpu_memory_bytes: int | None = None
    """Cap per device, None for the whole device."""
    dataset: str
    """`bundled`, `hellaswag` or a file (relative to the rootdir, else its basename)."""
    dataset_sha256: str
    """Hash of the items that are scored."""
    tokenizer_sha256: str
    """Hash of the tokenizer's files."""
    limit: int | None = None
    """First items of the dataset that are scored, None for all."""

    @property
    def id(self) -> str:
        """Short name for people and for pytest's ids: `mp-bs8`."""
        return f"{self.strategy}-bs{self.batch_size}"

    @property
    def key(self) -> str:
        """Sha256 over every field but `execution`: equal keys are the same measurement."""
        return _digest(self._without())

    @property
    def series(self) -> str:
        """Sha256 over the key's fields but the batch size: the cases of one series form one curve over batch sizes."""
        return _digest(self._without("batch_size"))

    @property
    def loading(self) -> str:
        """Sha256 over what a rank is told as it loads: cases with the same one share their processes."""
        return _digest(self._without("batch_size", "dataset", "dataset_sha256", "limit"))

    def _without(self, *names: str) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in fields.items() if name not in (*names, "execution")}


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
