"""vllm: the offline engine of vLLM, `LLM`, with token ids in and out.

Its scheduler runs in the rank (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): with a process of its own, the prompts of a batch
enter over one or two steps by chance. On one device the model does so as well, on several each has a process of vLLM.
No block of the cache is shared between prompts, and the cache has the size that the case needs, since a fraction of the
memory hides growth. vLLM cannot resize it: another batch size, or the other workload, loads the model again.

Source: vLLM 0.32.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from pytest_llmgpu.engines.protocol import Engine, Texts
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case

_STEP_TOKENS = 16_384
"""Tokens of one forward at most, as in vLLM's own setting for large GPUs."""
_SCORED_TOKENS = 4_096
"""A sequence to score has at most this many tokens, else the model is loaded again before the first batch."""
_BLOCK = 256
"""Tokens; a block has at most as many."""
_UTILIZATION = 0.01
"""vLLM asks for this part of a GPU to be free; 0.92 by default, although the size of the cache is given."""
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Vllm(Engine):
    """Scores by the log-likelihoods of the prompt, and generates greedily."""

    name = "vllm"
    backend = "vllm"
    own_workers = True
    dispatched = False

    def __init__(self) -> None:
        self._llm: Any = None
        self._size = (0, 0, 0)
        self._arguments: dict[str, Any] = {}
        self._token_bytes = self._context = 0

    def check(self, case: Case, source: ModelSource) -> None:
        """Refuse random weights, a count that the devices do not divide, and what only a rank that computes can do."""
        if case.load_format == "dummy":
            remedy = "pass a model with weights"
            raise ValueError(f"--llmgpu-load-format=dummy: {self.name} makes other random weights than mp: {remedy}")
        heads = source.decoder.get("num_attention_heads")
        if heads and heads % case.devices:
            remedy = "choose a divisor"
            raise ValueError(f"--llmgpu-devices={case.devices}: {source.name} has {heads} attention heads: {remedy}")
        if case.devices > 1 and case.gpu_memory_bytes is not None:
            raise ValueError(f"--llmgpu-gpu-memory: {self.name} on {case.devices} GPUs takes no cap: remove the option")

    def start(self, case: Case, source: ModelSource) -> None:
        """Load the model, with a cache for this case.

        ValueError if vLLM has no implementation of the model, or was built for devices that are missing.
        """
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        # vLLM gives each of several workers a NUMA node of its own, and a machine may have one.
        for name, value in {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
            os.environ.setdefault(name, value)
        platform = importlib.import_module("vllm.platforms").current_platform
        if platform.device_type != case.device:
            built = f"the installed vLLM computes on {platform.device_type or 'no device'} here"
            remedy = "install its build for this device (docs/strategies.md)"
            raise ValueError(f"--llmgpu-device={case.device}: {built}: {remedy}")
        # On a CPU a compiler would run at each start, and hide the modules.
        eager = case.device == "cpu" or case.cuda_graphs == "off"
        taken = {"model": str(source.directory), "skip_tokenizer_init": True, "dtype": case.dtype}
        self._arguments = {
            **taken,
            "seed": case.seed,
            "tensor_parallel_size": case.devices,
            "enable_prefix_caching": False,
            "enforce_eager": eager,
            "gpu_memory_utilization": _UTILIZATION,
            "disable_log_stats": False,
        }
        try:
            model = importlib.import_module("vllm").EngineArgs(**taken).create_model_config()
        except ValueError as error:
            # pydantic's errors have the reason in the second line, and all architectures of vLLM after it.
            reason = f"{error}".split("\n")[:2][-1].strip().removeprefix("Value error, ").partition(". ")[0]
            raise ValueError(f"--llmgpu-model={source.name}: vLLM cannot run it: {reason}") from error
        self._context = model.max_model_len
        heads = max(1, model.get_total_num_kv_heads() // case.devices)
        layers, width = model.get_total_num_hidden_layers(), model.get_head_size()
        self._token_bytes = 2 * layers * heads * width * _BYTES[case.dtype]
        # A case that scores has neither.
        self.prepare(case.batch_size, (case.prompt_tokens or 0) + (case.new_tokens or 0), case.new_tokens or 0)

    def prepare(self, batch_size: int, tokens: int, new_tokens: int) -> None:
        """Load the model again if the case needs a cache of another size."""
        tokens = tokens if new_tokens else min(self._context, max(_SCORED_TOKENS, tokens + 1))
        if self._size == (batch_size, tokens, new_tokens):
            return
        self.stop()
        # Scored sequences leave the cache after a forward or two.
        cached = batch_size * (tokens + _BLOCK) if new_tokens else _STEP_TOKENS + tokens + batch_size * _BLOCK
        self._llm = importlib.import_module("vllm").LLM(
            **self._arguments,
            max_model_len=min(self._context, tokens + 1),  # texts are scored with a further one
            max_num_seqs=batch_size,
            max_num_batched_tokens=max(_STEP_TOKENS, tokens),
            # One block holds nothing, and rounding takes another.
            kv_cache_memory_bytes=(cached + 2 * _BLOCK) * self._token_bytes,
        )
        self._size = batch_size, tokens, new_tokens

    def generate(self, token_ids: list[list[int]], new_tokens: int) -> Texts:
        """Return the texts; vLLM has the time of the first token of each, and no time of each further one."""
        began_s = time.monotonic()
        found = self._run(token_ids, max_tokens=new_tokens, ignore_eos=True, logprobs=0)
        tokens = [list(one.outputs[0].token_ids) for one in found]
        return Texts(
            tokens=tokens,
            loglikelihoods=[
                [at[token].logprob for token, at in zip(row, one.outputs[0].logprobs, strict=True)]
                for row, one in zip(tokens, found, strict=True)
            ],
            # The scheduler stamps the end of the forward by the same clock, in this process.
            first_token_s=max(one.metrics.first_token_ts for one in found) - began_s,
        )

    def score(self, token_ids: list[list[int]], from_position: list[int]) -> list[list[float]]:
        """Return the log-likelihoods of the prompts; one more token of each is generated, and left out.

        ValueError if a sequence leaves no room for that token.
        """
        if (longest := max(map(len, token_ids))) >= self._context:
            if self._size[2]:
                raise NotImplementedError  # of generated texts it is a check
            most = f"sequences of up to {self._context - 1} tokens with this model"
            raise ValueError(f"{self.name} scores {most}, and one has {longest}: leave it out of the dataset")
        found = self._run(token_ids, max_tokens=1, prompt_logprobs=0)
        return [
            [one.prompt_logprobs[place][tokens[place]].logprob for place in range(begin, len(tokens))]
            for tokens, begin, one in zip(token_ids, from_position, found, strict=True)
        ]

    def workers(self, function: Callable[..., Any], *args: Any) -> list[Any] | None:
        """Run a function in the workers of vLLM; on one device the rank is the worker."""
        if self._arguments["tensor_parallel_size"] == 1:
            return None
        return list(self._llm.collective_rpc(_in_worker, args=(function, args)))

    def stop(self) -> None:
        """End the processes of vLLM, and free what it holds in this one."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()
            importlib.import_module("vllm.distributed.parallel_state").cleanup_dist_env_and_memory()

    def _run(self, token_ids: list[list[int]], **sampling: Any) -> list[Any]:
        vllm = importlib.import_module("vllm")
        wanted = vllm.SamplingParams(temperature=0, detokenize=False, **sampling)
        return list(self._llm.generate([{"prompt_token_ids": tokens} for tokens in token_ids], wanted, use_tqdm=False))


def _in_worker(worker: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function with the device of a worker."""
    return function(worker.device, *args)
