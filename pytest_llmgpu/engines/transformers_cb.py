"""transformers-cb: continuous batching of transformers, with its paged KV cache and its own CUDA graphs.

The requests of a batch are queued before the loop starts, so that every call computes the same forwards; transformers'
`generate_batch` starts its loop first, and the first forwards then have as many prompts as have arrived by chance.
Blocks are not shared between prompts with an equal begin, and the cache has the size that the case needs: by default it
takes the memory that is free, which hides growth.

Source: transformers 5.17 and 5.23, `generation/continuous_batching`.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from pytest_llmgpu.engines.protocol import Engine, Texts
from pytest_llmgpu.inference import weights
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case

_BLOCK = 256  # tokens, the default
_MOST_BATCH_TOKENS = 16_384
_RESULT_S = 1.0


class ContinuousBatching(Engine):
    """Generates by `init_continuous_batching` of a causal language model of transformers."""

    name = "transformers-cb"
    backend = "transformers"
    own_attention = False

    def __init__(self) -> None:
        self._model: Any = None
        self._manager: Any = None
        self._graphs: bool | None = None

    def check(self, case: Case, source: ModelSource) -> None:
        """Refuse several GPUs, and scoring, which it does not offer."""
        if not case.generates:
            remedy = "use the fixture prompts, or pass --llmgpu-workload=generate"
            raise ValueError(f"--strategy={self.name}: it computes no log-likelihoods of given texts: {remedy}")
        if case.devices > 1:
            raise ValueError(f"--llmgpu-devices={case.devices}: {self.name} of {source.name} runs on 1 device here")

    def start(self, case: Case, source: ModelSource) -> None:
        """Load the model as mp does on one device."""
        import torch

        dtype = getattr(torch, case.dtype)
        device = torch.device("cuda", 0) if case.device == "cuda" else torch.device("cpu")
        if source.load_format == "dummy":
            self._model = weights.skeleton(source, dtype)
            weights.materialise(self._model, lambda _: device, seed=case.seed)
        else:
            self._model = weights.checkpoint(source, dtype, device_map={"": str(device)})
        self._graphs = False if case.cuda_graphs == "off" else None

    def prepare(self, batch_size: int, tokens: int, new_tokens: int) -> None:
        """Make a cache of the size of the case in place of the one before, and record CUDA graphs."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.stop()
        generation = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(
            num_blocks=batch_size * (-(-tokens // _BLOCK) + 1),
            max_batch_tokens=min(_MOST_BATCH_TOKENS, batch_size * tokens),
            max_requests_per_batch=batch_size,
            allow_block_sharing=False,
            use_cuda_graph=self._graphs,
            return_logprobs=True,
        )
        self._manager = self._model.init_continuous_batching(generation, continuous_batching_config=batching)
        self._manager.warmup()

    def idle(self) -> None:
        """End the loop of the call before, which ends by itself a moment after its last token."""
        if self._manager.is_running():
            self._manager.stop(block=True, keep_for_next_session=True)
        # As `start` does, which comes after the requests here: a loop that has ended takes none.
        self._manager.background_thread_status.clear()
        self._manager.switch_to_cb_friendly_attn(self._model)

    def generate(self, token_ids: list[list[int]], new_tokens: int) -> Texts:
        """Queue the prompts, start the loop, and wait for all texts; RuntimeError if one failed, or the loop ended."""
        manager, began_s = self._manager, time.perf_counter()
        numbers = manager.add_requests(token_ids, max_new_tokens=new_tokens, record_timestamps=True)
        manager.start()
        found: dict[str, Any] = {}
        while len(found) < len(numbers):
            result = manager.get_result(timeout=_RESULT_S)
            if result is None and not manager.is_running():
                raise RuntimeError(f"the loop of {self.name} ended: its error is in the log of the rank")
            if result is not None and result.error is not None:
                raise RuntimeError(f"{self.name}: {result.error}")
            if result is not None and result.is_finished():
                found[result.request_id] = result
        texts = [found[number] for number in numbers]
        # A step ends when the last text has its token.
        ends_s = [began_s, *map(max, zip(*(text.timestamps for text in texts), strict=True))]
        first_token_s, *step_s = [later - earlier for earlier, later in pairwise(ends_s)]
        return Texts(
            tokens=[text.generated_tokens for text in texts],
            loglikelihoods=[text.logprobs for text in texts],
            first_token_s=first_token_s,
            step_s=step_s,
        )

    def stop(self) -> None:
        """End the loop and free the cache."""
        if self._manager is not None:
            if self._manager.is_running():
                self._manager.stop(block=True)
            self._model.destroy_cached_continuous_batching_manager()
            self._manager = None
