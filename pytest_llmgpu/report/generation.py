"""The record of what a launch generated, and how fast."""

from __future__ import annotations

import msgspec

from pytest_llmgpu.report.bounds import Count, Elapsed


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of one launch, in the order of the dataset, with their log-likelihoods and times."""

    prompt_tokens: list[Count]
    """Number of tokens of each prompt."""
    new_tokens: list[Count]
    """Number of tokens generated for each prompt. End-of-sequence tokens end no text, so that all are equal."""
    first_token_s: list[Elapsed]
    """For each batch, the time from its start until the first token of each of its texts is chosen. It has the transfer
    of the prompts to the device and the prefill. The slowest rank counts."""
    step_s: list[Elapsed]
    """The time of each decode step, batch after batch: a step chooses one token for every text of its batch. A batch
    has one step less than new tokens. The slowest rank counts."""
    kv_cache_bytes: Count
    """Size of the KV caches of all devices together."""
    kv_cache_formula_bytes: Count | None = None
    """Size of the KV cache by the formula: 2 x layers x KV heads x size of a head x sequences of the largest batch x
    tokens of a sequence x bytes of a number. Null if the config of the model lacks one of these."""
    tokens: str
    """Generated tokens of all prompts, prompt by prompt, as Base64 of little-endian int32."""
    loglikelihoods: str
    """Log-likelihood of each generated token when it was chosen, as Base64 of little-endian float32."""
    prefill_loglikelihoods: str | None = None
    """Log-likelihood of each generated token, computed again in a forward over prompt and text without a KV cache, as
    Base64 of little-endian float32. Null if these forwards, which follow the measurement, failed."""
    reference: str | None = None
    """Key of the case of mp whose texts were scored too; null if there was none in the run."""
    reference_loglikelihoods: str | None = None
    """Log-likelihood of each token of the texts of `reference`, computed by this case in forwards without a KV cache,
    as Base64 of little-endian float32."""
