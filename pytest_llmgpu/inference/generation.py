"""Greedy generation with a static KV cache: a prefill, then one decode step for each further token of a batch.

A step needs nothing from the host: it reads the token, the position and the mask of each row from the device and leaves
the next ones there. So the host can launch all steps without waiting for one of them. End-of-sequence tokens end no
text: every text of a case has equally many tokens, in every launch.

Shapes: B rows of a batch, S tokens of its longest prompt, V vocabulary, N new tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference import logits, scoring
from pytest_llmgpu.inference.batching import Batch, Plan, Request, Requests, plan
from pytest_llmgpu.inference.cuda_graphs import Recorder
from pytest_llmgpu.inference.kv_cache import KernelCache, StaticCache
from pytest_llmgpu.report.result import Batches

if TYPE_CHECKING:
    import torch

_WARM_UP_TOKENS = 3


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all batches of a plan; prompts are in the order of the dataset."""

    batches: Batches
    """The time and size of each batch."""
    first_token_s: list[float]
    """The time to the first token of each batch."""
    step_s: list[float]
    """The time of each decode step, batch after batch."""
    tokens: list[list[int]]
    """The new tokens [prompts][N]."""
    loglikelihoods: list[list[float]]
    """The log-likelihood of each new token when it was chosen [prompts][N]."""


class _BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of one batch and their times."""

    latency_s: float
    times_s: list[float]
    """The time to the first token, then the time of each decode step."""
    tokens: list[list[int]]
    """The new tokens [B][N]."""
    loglikelihoods: list[list[float]]
    """Their log-likelihoods [B][N]."""


class Generator:
    """A context manager that generates texts; the KV cache is allocated at the first batch and freed at the end."""

    def __init__(
        self,
        model: Any,
        plan: Plan,
        *,
        input_device: torch.device,
        devices: Sequence[torch.device],
        recorded_tokens: int = 0,
        own_kv_cache: bool = False,
    ) -> None:
        """Make a generator for the batches of a plan.

        Args:
            model: A causal language model of transformers, in eval mode.
            plan: The batches; they are page-locked here if the input device is a CUDA device.
            input_device: The device of the input ids, on which the logits are.
            devices: All devices of the model.
            recorded_tokens: Forwards of up to this many tokens are recorded as CUDA graphs; 0 for none.
            own_kv_cache: The kernels of the model keep keys and values themselves.
        """
        import torch

        if input_device.type == "cuda":
            plan.pin()
        self._model, self._plan, self._device, self._devices = model, plan, input_device, devices
        self._new_tokens = plan.requests.new_tokens
        self._recorded_tokens = recorded_tokens
        self._recorder = Recorder(input_device) if recorded_tokens else None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """Graphs of prefills by rows and tokens of a row, and of decode steps by rows and 0."""
        self._packed: dict[tuple[int, int], torch.Tensor] = {}
        """The input of prefills by rows and tokens of a row."""
        rows = max(batch.rows for batch in plan.batches)
        self._head = logits.EndingHead(model)
        cache_class = KernelCache if own_kv_cache else StaticCache
        self._cache: KernelCache | StaticCache = cache_class(
            rows=rows, slots=plan.tokens, devices=list(dict.fromkeys([*devices, input_device]))
        )
        eager = getattr(model.config.get_text_config(), "_attn_implementation", None) == "eager"
        self._mask_dtype = model.dtype if eager else None
        # What a step reads and writes. The rows that a smaller batch does not have keep old values.
        self._tokens_B = torch.zeros(rows, dtype=torch.int64, device=input_device)
        self._rows_B = torch.arange(rows, device=input_device)
        self._number_1 = torch.zeros(1, dtype=torch.int64, device=input_device)
        self._tokens_NB = torch.zeros(self._new_tokens, rows, dtype=torch.int64, device=input_device)
        self._loglikelihoods_NB = torch.zeros(self._new_tokens, rows, device=input_device)

    def __enter__(self) -> Generator:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._graphs.clear()
        self._cache.clear()

    @property
    def kv_cache_bytes(self) -> int:
        """The size of the KV cache of this rank."""
        return self._cache.bytes

    def warm_up(self, on_batch: Callable[[float, int, int, int], None] | None = None) -> None:
        """Run the prefill and the first steps of a batch of every shape."""
        for batch in {(batch.rows, batch.width): batch for batch in self._plan.batches}.values():
            result = self._run(batch, min(_WARM_UP_TOKENS, self._new_tokens))
            if on_batch is not None:
                on_batch(result.latency_s, batch.rows, batch.tokens, batch.padded_tokens)

    def generate(self, on_batch: Callable[[float, int, int, int], None] | None = None) -> Generated:
        """Generate the texts of all prompts.

        Args:
            on_batch: Called after each batch, outside its measured time, with its latency in seconds, rows, tokens of
                the prompts and these with padding.

        Raises:
            ValueError: A log-likelihood is not finite.
        """
        columns = Batches()
        first_token_s: list[float] = []
        step_s: list[float] = []
        texts: dict[int, tuple[list[int], list[float]]] = {}
        for number, batch in enumerate(self._plan.batches, start=1):
            result = self._run(batch, self._new_tokens)
            if not all(math.isfinite(value) for row in result.loglikelihoods for value in row):
                raise ValueError(
                    f"batch {number} of {len(self._plan.batches)} ({batch.rows} rows of {batch.width} tokens): a "
                    "log-likelihood is not finite: the logits overflow or are NaN: try another dtype, or check the "
                    "checkpoint"
                )
            texts.update(zip(batch.requests, zip(result.tokens, result.loglikelihoods, strict=True), strict=True))
            row = (batch.rows, batch.tokens, batch.padded_tokens)
            columns.latency_s.append(result.latency_s)
            for column, value in zip((columns.sequences, columns.tokens, columns.padded_tokens), row, strict=True):
                column.append(value)
            first_token_s.append(result.times_s[0])
            step_s += result.times_s[1:]
            if on_batch is not None:
                on_batch(result.latency_s, *row)
        in_order = [texts[number] for number in sorted(texts)]
        return Generated(
            batches=columns,
            first_token_s=first_token_s,
            step_s=step_s,
            tokens=[tokens for tokens, _ in in_order],
            loglikelihoods=[values for _, values in in_order],
        )

    def prefill(self, batch: Batch) -> None:
        """Launch the prefill of a batch of the plan."""
        import torch

        shape = batch.rows, batch.width
        if shape not in self._packed:
            self._packed[shape] = torch.empty_like(batch.packed, device=self._device)
        self._packed[shape].copy_(batch.packed, non_blocking=True)
        with self._head, torch.inference_mode():
            self._launch(shape, batch.padded_tokens, lambda: self._prefill(batch))

    def step(self, batch: Batch) -> None:
        """Launch the last decode step of a batch, for a measurement of the step itself: its token has no meaning.

        Two fills before it make the step repeatable.
        """
        import torch

        with self._head, torch.inference_mode():
            self._number_1.zero_()
            self._cache.rewind()
            self._launch((batch.rows, 0), batch.rows, lambda: self._step(batch.rows))

    def _run(self, batch: Batch, new_tokens: int) -> _BatchResult:
        """Generate the texts of one batch; the devices are idle at both ends."""
        import torch

        with torch.inference_mode():
            scoring.synchronize(self._devices)
            began_s = time.perf_counter()
            clock = _Clock(self._device)
            clock.mark()
            self.prefill(batch)
            clock.mark()
            with self._head:
                for _ in range(new_tokens - 1):
                    self._launch((batch.rows, 0), batch.rows, lambda: self._step(batch.rows))
                    clock.mark()
            tokens = self._tokens_NB[:new_tokens, : batch.rows].t().tolist()
            loglikelihoods = self._loglikelihoods_NB[:new_tokens, : batch.rows].t().tolist()
            scoring.synchronize(self._devices)
            latency_s = time.perf_counter() - began_s
        return _BatchResult(latency_s=latency_s, times_s=clock.times_s(), tokens=tokens, loglikelihoods=loglikelihoods)

    def _launch(self, key: tuple[int, int], tokens: int, run: Callable[[], None]) -> None:
        """Run a forward of this many tokens, or replay it."""
        if self._recorder is None or tokens > self._recorded_tokens:
            run()
            return
        if key not in self._graphs:
            state = [self._tokens_B, self._number_1, *self._cache.state]
            before = [tensor.clone() for tensor in state]
            self._recorder.rehearse(run)
            self._graphs[key] = self._recorder.record(run)
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        self._graphs[key].replay()

    def _prefill(self, batch: Batch) -> None:
        """Read the prompts of a batch and choose the first token of each row."""
        ids, last_B, _, _ = self._packed[batch.rows, batch.width].split(batch.sizes)
        self._number_1.zero_()
        lengths_B = last_B - self._rows_B[: batch.rows] * batch.width + 1
        self._cache.prefilling = True
        ids_BS, last_B, arguments = self._cache.prompts(
            ids.view(batch.rows, batch.width), lengths_B, padded=batch.tokens < batch.padded_tokens
        )
        logits_1BV = self._head.forward(ids_BS, last_B, past_key_values=self._cache, **arguments)
        self._cache.prefilling = False
        self._cache.start(lengths_B)
        self._choose(logits_1BV[0])

    def _step(self, rows: int) -> None:
        """Read the latest token of each row and choose the next one."""
        arguments = self._cache.arguments(rows, self._device, self._mask_dtype)
        logits_1BV = self._head.forward(
            self._tokens_B[:rows, None], self._rows_B[:rows], past_key_values=self._cache, **arguments
        )
        self._cache.advance()
        self._choose(logits_1BV[0])

    def _choose(self, logits_BV: torch.Tensor) -> None:
        """Keep the token with the largest logit of each row, with its log-likelihood."""
        rows = len(logits_BV)
        best_B, tokens_B = logits_BV.max(dim=-1)
        loglikelihoods_B = best_B.float() - logits_BV.float().logsumexp(dim=-1)
        self._tokens_B[:rows].copy_(tokens_B)
        self._tokens_NB[:, :rows].index_copy_(0, self._number_1, tokens_B[None])
        self._loglikelihoods_NB[:, :rows].index_copy_(0, self._number_1, loglikelihoods_B[None])
        self._number_1.add_(1)


class _Clock:
    """Takes times without making the host wait: on a GPU by events, on a CPU by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Take the time at which the device has done everything that was launched before."""
        import torch

        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def times_s(self) -> list[float]:
        """Return the seconds between the marks; the device must be idle."""
        if self._device.type != "cuda":
            return [later - earlier for earlier, later in pairwise(self._marks)]
        return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(self._marks)]


def score_texts(
    model: torch.nn.Module,
    prompts: Requests,
    texts: Sequence[Sequence[int]],
    batch_size: int,
    *,
    input_device: torch.device,
    devices: Sequence[torch.device],
) -> list[list[float]]:
    """Return the log-likelihood of each token of given texts after their prompts [prompts][N], without a KV cache.

    Args:
        model: The model of the texts, or another one that is to agree with it.
        prompts: The prompts, as `batching.encode_prompts` returns them.
        texts: A text for each prompt, as tokens.
        batch_size: The batch size of the case. Half of it is used: prompts and texts together have more tokens in a
            forward than the prompts alone, and the case must not run out of memory here.
        input_device: The device of the input ids.
        devices: All devices of the model.
    """
    length = len(texts[0])
    requests = Requests(
        item_ids=prompts.item_ids,
        endings=prompts.endings,
        requests=tuple(
            Request(tokens=(*request.tokens[:-1], *text), ending=length)
            for request, text in zip(prompts.requests, texts, strict=True)
        ),
        max_length=prompts.max_length + length,
    )
    found = scoring.run_tokens(
        model, plan(requests, max(1, batch_size // 2)).batches, input_device=input_device, devices=devices
    )
    return [found[number] for number in range(len(texts))]
