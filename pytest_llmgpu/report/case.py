"""The identity of one measurement.

A case holds every setting that influences the figures. Two cases with equal keys are the same measurement on every
machine and day. The figures themselves are in `result`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection
from typing import Any

import msgspec

from pytest_llmgpu.report.bounds import Count, Positive

REFERENCE_STRATEGY = "mp"
"""Strategy that other strategies are compared with."""

SCORE, GENERATE = "score", "generate"
"""Values of `Case.workload`."""

_SCORINGS = {"loglikelihood": "lean", "loglikelihood_full_logits": "harness"}
"""The scoring of a workload that has the name of stored reports."""

_WEIGHTS_ALONE = [f"{method}-checkpoint" for method in ("awq", "bitsandbytes", "gptq", "mxfp4")]
PLAIN_INPUTS = (None, "int8", "int4", "fp8-weight", *_WEIGHTS_ALONE)
"""Values of `Case.quantization` whose products have inputs of the case's dtype; others quantise them, too."""

DEFAULT_TASK = "hellaswag"
"""Task of a case or an item that names none."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: a model under a strategy, which scores a dataset, or generates text, at one batch size."""

    strategy: str
    """Name of the strategy: `mp`, `tp`, `iok`, `compile`, or a registered one."""
    backend: str | None = None
    """Library that implements the strategy, such as `accelerate` for mp."""
    strategy_options: dict[str, str | int | float | bool | None] = {}
    """Values of the options that only this strategy has."""
    batch_size: Positive
    """Sequences per forward. The task decides how many sequences an item has: in HellaSwag 4."""
    workload: str = SCORE
    """Computation of the case. `score` computes log-likelihoods of endings given their contexts. `generate` continues
    each prompt greedily by `new_tokens` tokens."""
    scoring: str = "lean"
    """Logits that a case which scores computes: `lean` only those where an ending is predicted, `harness` those of
    every position with a KV cache, as lm-evaluation-harness does."""
    model: str
    """Model: `bundled`, a preset, a hub id, or a directory relative to the rootdir. Of a directory outside the rootdir
    only the base name is kept."""
    revision: str | None = None
    """Commit of a hub model, or fingerprint of the files of a directory; null for a preset."""
    load_format: str = "auto"
    """Source of the weights: `auto` reads safetensors, `dummy` makes seeded random weights on the device."""
    seed: int = 0
    """Random seed of dummy weights."""
    dtype: str
    """Data type of weights and activations: `float32`, `float16` or `bfloat16`."""
    device: str
    """Kind of device: `cuda` or `cpu`."""
    devices: Positive
    """Number of devices that the model is spread over."""
    launcher: str = "local"
    """Launcher that started the ranks: `local`, or `env` for torchrun, Slurm and Ray. It is not part of the keys."""
    nodes: Positive = 1
    """Number of nodes that the ranks run on."""
    cuda_graphs: str = "auto"
    """Requested use of CUDA graphs: `auto`, `on` or `off`."""
    execution: str = "eager"
    """Execution of the forwards: `eager`, `cuda_graphs` or `compile`. If `cuda_graphs` is `auto`, the batches decide,
    and forwards that cannot be recorded run eagerly. It is therefore not part of the keys: a case with another
    execution is the same measurement."""
    gpu_memory_bytes: Count | None = None
    """Memory cap per device; null for the whole device."""
    dataset: str
    """Dataset: `bundled`, `hellaswag`, or a file relative to the rootdir. Of a file outside the rootdir only the base
    name is kept."""
    dataset_sha256: str
    """SHA-256 of the items that are scored."""
    tokenizer_sha256: str
    """SHA-256 of the files of the tokenizer."""
    add_bos: bool | None = None
    """Whether texts begin with the beginning-of-sequence token; null for the setting of the tokenizer itself."""
    limit: Count | None = None
    """Number of items scored, from the start of the dataset; null for all items."""
    task: str = DEFAULT_TASK
    """Name of the task whose items are scored."""
    attention: str | None = None
    """Attention of transformers; null for the one that transformers itself chooses, which is `sdpa` if the architecture
    has it, else `eager`. It is also null where `--llmgpu-attention` names that one."""
    experts: str | None = None
    """Implementation of experts in transformers; null for its own choice, also where the option names `grouped_mm`."""
    quantization: str | None = None
    """Quantisation of the weights: a name of `--llmgpu-quantization`, or the method of a checkpoint that is quantised,
    such as `fp8-checkpoint`; null for plain weights."""
    prompt_tokens: Positive | None = None
    """Number of tokens that are kept of each prompt, the last ones; null for a case that scores."""
    new_tokens: Positive | None = None
    """Number of tokens generated for each prompt; null for a case that scores."""

    def __post_init__(self) -> None:
        """Replace the workload of a stored report by its present name."""
        if self.workload in _SCORINGS:
            msgspec.structs.force_setattr(self, "scoring", _SCORINGS[self.workload])
            msgspec.structs.force_setattr(self, "workload", SCORE)

    @property
    def generates(self) -> bool:
        """True if the case generates text; False if it scores."""
        return self.workload == GENERATE

    @property
    def id(self) -> str:
        """Short name: `mp-bs8`; of a case that generates with quantised weights `mp-int8-generate-bs8`."""
        words = (self.strategy, self.quantization, GENERATE if self.generates else None, f"bs{self.batch_size}")
        return "-".join(filter(None, words))

    @property
    def key(self) -> str:
        """SHA-256 over the fields that differ from their defaults, except `execution` and `launcher`.

        A new field therefore changes no key, and the default of a field must stay as it is.
        """
        return self._digest()

    @property
    def series(self) -> str:
        """SHA-256 over the fields of the key except the batch size: a series is one curve over batch sizes."""
        return self._digest("batch_size")

    @property
    def loading(self) -> str:
        """SHA-256 over the fields that loading a model depends on: cases with an equal value share their processes."""
        data = ("dataset", "dataset_sha256", "limit", "task")
        return self._digest("batch_size", "workload", "scoring", "prompt_tokens", "new_tokens", *data)

    def _digest(self, *left_out: str) -> str:
        fields = {
            name: value
            for name, default in _DEFAULTS.items()
            if name not in left_out and (value := getattr(self, name)) != default
        }
        try:
            data = msgspec.json.encode(fields, order="sorted")
        except UnicodeEncodeError:  # a path that is not valid UTF-8: json escapes it
            data = json.dumps(fields, sort_keys=True).encode()
        return hashlib.sha256(data).hexdigest()


_DEFAULTS: dict[str, Any] = {
    field.name: field.default_factory() if callable(field.default_factory) else field.default
    for field in msgspec.structs.fields(Case)
    if field.name not in {"execution", "launcher"}
}
"""Each field of a key with its default; a field without one has `NODEFAULT`, which equals no value."""


def next_id(used: Collection[str], case: Case) -> str:
    """Return the id for the next result of a case, which is not in use: `mp-bs8`, then `mp-bs8#2`."""
    names = itertools.chain([case.id], (f"{case.id}#{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in used)
