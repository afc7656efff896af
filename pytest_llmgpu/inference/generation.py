"""Greedy generation with a static KV cache: a prefill, then one decode step for each further token of a batch.

A step needs nothing from the host: it reads the token, the position and the mask of each row from the device and leaves
the next ones there. So the host can launch all steps without waiting for one of them. End-of-sequence tokens end no
text: every text of a case has equally many tokens, in every launch.

The tensors of the cache are allocated once for a case, so that decode steps can be replayed as CUDA graphs. Each row
has a position of its own, the number of its tokens so far. Prompts are padded on the right, and the slots of the
padding are overwritten by generated tokens before any query attends to them: a token at position p is written to slot
p, and its query attends to the slots up to p.

Shapes: B rows of a batch, S tokens of its longest prompt, V vocabulary, N new tokens, H key and value heads of this
rank, T slots, D size of a head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.inference.batching import Batch, Plan, Request, Requests, plan
from pytest_llmgpu.inference.cuda_graphs import Recorder
from pytest_llmgpu.inference.scoring import OnBatch
from pytest_llmgpu.inference.sm_clock import SmClock
from pytest_llmgpu.report.result import Batches

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

_WARM_UP_TOKENS = 3
_ATTENTION = ("full_attention", "sliding_attention")


def check(model: torch.nn.Module, config: PretrainedConfig | None) -> None:
    """Refuse a module that is no causal language model of transformers, before anything is measured.

    Raises:
        ValueError: The message has everything that is missing.
    """
    missing = [name for name in ("past_key_values", "position_ids", "attention_mask") if not scoring.takes(model, name)]
    lacks = [f"arguments {', '.join(missing)} of forward"] if missing else []
    lacks += ["get_output_embeddings()"] if scoring.output_head(model) is None else []
    lacks += ["Loaded.config"] if config is None else []
    if lacks:
        raise ValueError(
            f"{type(model).__name__} cannot generate text, it has no {', no '.join(lacks)}: score it "
            "(--llmgpu-workload=score), or use a causal language model of transformers"
        )


class Generated(scoring.Scores, frozen=True, kw_only=True):
    """The results of all batches of a plan.

    There is no clock in `batches`, and `loglikelihoods` are those of each new token when it was chosen [prompts][N].
    """

    first_token_s: list[float]
    """The time to the first token of each batch."""
    step_s: list[float]
    """The time of each decode step, batch after batch."""
    prefill_clock_ghz: list[list[float]] | None
    """[GPUs][batches] The mean SM clock of the prefills; None with its reason in `why_no_clock`."""
    step_clock_ghz: list[list[float]] | None
    """[GPUs][batches] The mean SM clock of the decode steps."""
    tokens: list[list[int]]
    """The new tokens [prompts][N], in the order of the dataset."""


class Generator(AbstractContextManager["Generator"]):
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
        """Make a generator for the batches of a plan, which are page-locked here for a CUDA device.

        The input ids and the logits are on the input device, the model is on `devices`, in eval mode. Forwards of up to
        `recorded_tokens` tokens are recorded as CUDA graphs; 0 is for none. With `own_kv_cache` the kernels of the
        model keep keys and values themselves.
        """
        import torch

        plan.pin(input_device)
        self._plan, self._device, self._devices = plan, input_device, devices
        self._new_tokens = plan.requests.new_tokens
        self._recorded_tokens = recorded_tokens
        self._recorder = Recorder(input_device) if recorded_tokens else None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """Graphs of prefills by rows and tokens of a row, and of decode steps by rows and 0."""
        self._packed: dict[tuple[int, int], torch.Tensor] = {}
        """The input of prefills by rows and tokens of a row."""
        rows = max(batch.rows for batch in plan.batches)
        self._head = scoring.EndingHead(model)
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

    def __exit__(self, *_: object) -> None:
        self._graphs.clear()
        self._cache.clear()

    @property
    def kv_cache_bytes(self) -> int:
        """The size of the KV cache of this rank."""
        return self._cache.bytes

    def warm_up(self, on_batch: OnBatch | None = None) -> None:
        """Run the prefill and the first steps of a batch of every shape."""
        for batch in {(batch.rows, batch.width): batch for batch in self._plan.batches}.values():
            latency_s, *_ = self._run(batch, min(_WARM_UP_TOKENS, self._new_tokens))
            if on_batch is not None:
                on_batch(latency_s, batch.rows, batch.tokens, batch.padded_tokens)

    def generate(self, on_batch: OnBatch | None = None) -> Generated:
        """Generate the texts of all prompts.

        Raises:
            ValueError: A log-likelihood is not finite.
        """
        columns = Batches()
        first_token_s: list[float] = []
        step_s: list[float] = []
        texts: dict[int, tuple[list[int], list[float]]] = {}
        # Three stamps for each batch: before its prefill, before its decode steps and after them.
        clock = SmClock(self._devices or (self._device,), 3 * len(self._plan.batches))
        firsts = range(0, 3 * len(self._plan.batches), 3)
        for first, batch in zip(firsts, self._plan.batches, strict=True):
            latency_s, times_s, tokens, loglikelihoods = self._run(batch, self._new_tokens, clock, first)
            values = chain.from_iterable(loglikelihoods)
            scoring.add_batch(columns, batch, latency_s, values, of=len(self._plan.batches))
            texts.update(zip(batch.requests, zip(tokens, loglikelihoods, strict=True), strict=True))
            first_token_s.append(times_s[0])
            step_s += times_s[1:]
            if on_batch is not None:
                on_batch(latency_s, batch.rows, batch.tokens, batch.padded_tokens)
        scoring.synchronize(self._devices)
        in_order = [texts[number] for number in sorted(texts)]
        return Generated(
            batches=columns,
            first_token_s=first_token_s,
            step_s=step_s,
            prefill_clock_ghz=clock.ghz([(first, first + 1) for first in firsts]),
            step_clock_ghz=clock.ghz([(first + 1, first + 2) for first in firsts]),
            why_no_clock=clock.why,
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

    def _run(
        self, batch: Batch, new_tokens: int, sm_clock: SmClock | None = None, first: int = 0
    ) -> tuple[float, list[float], list[list[int]], list[list[float]]]:
        """Generate the texts of one batch; the devices are idle at both ends.

        A clock gets stamps from the number `first` on: before the prefill, after it, and after the steps.

        Returns:
            Its latency in seconds, the times to the first token and of each step, tokens [B][N], log-likelihoods.
        """
        import torch

        sm_clock = sm_clock or SmClock((), 0)
        with torch.inference_mode():
            sm_clock.stamp(first)
            scoring.synchronize(self._devices)
            began_s = time.perf_counter()
            clock = _Clock(self._device)
            clock.mark()
            self.prefill(batch)
            clock.mark()
            sm_clock.stamp(first + 1)
            with self._head:
                for _ in range(new_tokens - 1):
                    self._launch((batch.rows, 0), batch.rows, lambda: self._step(batch.rows))
                    clock.mark()
            tokens = self._tokens_NB[:new_tokens, : batch.rows].t().tolist()
            loglikelihoods = self._loglikelihoods_NB[:new_tokens, : batch.rows].t().tolist()
            scoring.synchronize(self._devices)
            latency_s = time.perf_counter() - began_s
            sm_clock.stamp(first + 2)
        return latency_s, clock.times_s(), tokens, loglikelihoods

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
        ids_BS, last_B, arguments = self._cache.prompts(
            ids.view(batch.rows, batch.width), lengths_B, padded=batch.tokens < batch.padded_tokens
        )
        logits_1BV = self._head.forward(ids_BS, last_B, past_key_values=self._cache, **arguments)
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

    Half of the batch size of the case is used: prompts and texts together are longer than the prompts alone, and the
    case must not run out of memory here.
    """
    import torch

    length = len(texts[0])
    pairs = zip(prompts.requests, texts, strict=True)
    both = tuple(Request(tokens=(*request.tokens[:-1], *text), ending=length) for request, text in pairs)
    requests = msgspec.structs.replace(prompts, requests=both, max_length=prompts.max_length + length, new_tokens=0)
    answers: dict[int, list[float]] = {}
    with scoring.EndingHead(model) as head, torch.inference_mode():
        for batch in plan(requests, max(1, batch_size // 2)).batches:
            scoring.synchronize(devices)
            answers.update(zip(batch.requests, scoring.of_tokens(head, batch, input_device).tolist(), strict=True))
    return [answers[number] for number in range(len(texts))]


class _Cache:
    """What the models of transformers ask in a prefill. Decode steps have their positions and masks as arguments."""

    prefilling = False
    """True while a forward reads whole prompts: its queries attend to the prompts alone."""

    def start(self, lengths_B: torch.Tensor) -> None:  # noqa: ARG002 - of a subclass
        """End the prefill of prompts with these numbers of tokens."""
        self.prefilling = False

    def clear(self) -> None:
        """Free the memory of all layers."""

    def get_seq_length(self, *_: Any) -> int:
        """Return 0, the number of tokens before a prompt."""
        return 0

    def get_query_offset(self, *_: Any) -> int:
        """Return 0, the position of the first token of a prompt."""
        return 0

    def get_mask_sizes(self, query_length: int | torch.Tensor, *_: Any) -> tuple[int, int]:
        """Return the number of keys of a prefill and the position of the first one."""
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0


class LayerCache(_Cache):
    """The keys and values of one layer. All its layers look alike to torch.compile, which compiles one for all."""

    def __init__(
        self, keys_BHTD: torch.Tensor, values_BHTD: torch.Tensor, *, numbers: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Keep the tensors of a layer, all on its device; `numbers` are 0, 1, 2 and so on."""
        self.keys, self.values = keys_BHTD, values_BHTD
        self._numbers, self._positions = numbers, positions

    def update(
        self, key_BHSD: torch.Tensor, value_BHSD: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values and return those that their queries attend to (called by transformers)."""
        rows, tokens = key_BHSD.shape[0], key_BHSD.shape[2]
        if self.prefilling:
            self.keys[:rows, :, :tokens].copy_(key_BHSD)
            self.values[:rows, :, :tokens].copy_(value_BHSD)
            return key_BHSD, value_BHSD
        keys, values = self.keys[:rows], self.values[:rows]
        places = self._numbers[:rows], slice(None), self._positions[:rows]
        keys[places], values[places] = key_BHSD[:, :, 0], value_BHSD[:, :, 0]
        return keys, values


class StaticCache(_Cache):
    """The keys and values of all layers, in the interface that the models of transformers call.

    Each layer allocates its part at its first prefill, with the heads that this rank computes, on the layer's device.
    """

    def __init__(self, *, rows: int, slots: int, devices: Sequence[torch.device]) -> None:
        """Make a cache for the rows of the largest batch; slots are the tokens of the longest row with the new ones."""
        import torch

        self.layers: dict[int, LayerCache] = {}
        """The part of each layer that has read a prompt."""
        self._rows, self._slots = rows, slots
        # On every device: a copy from one device to another in each layer would be traffic.
        self._positions = {device: torch.zeros(rows, dtype=torch.int64, device=device) for device in devices}
        self._numbers = {device: torch.arange(max(rows, slots), device=device) for device in devices}

    @property
    def bytes(self) -> int:
        """The size of all keys and values."""
        return sum(part.nbytes for layer in self.layers.values() for part in (layer.keys, layer.values))

    @property
    def state(self) -> list[torch.Tensor]:
        """The tensors that a decode step changes, besides the slots that it writes."""
        return list(self._positions.values())

    def prompts(
        self,
        ids_BS: torch.Tensor,
        lengths_B: torch.Tensor,
        *,
        padded: bool,  # noqa: ARG002 - rows of any length have positions of their own
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Begin a prefill; return its input ids, the row of [B * S] of each last token, and further arguments: none.

        Prompts are padded on the right; `padded` is true if they have different lengths.
        """
        for cache in (self, *self.layers.values()):
            cache.prefilling = True
        rows, width = ids_BS.shape
        return ids_BS, self._numbers[ids_BS.device][:rows] * width + lengths_B - 1, {}

    def start(self, lengths_B: torch.Tensor) -> None:  # noqa: D102
        for cache in (self, *self.layers.values()):
            cache.prefilling = False
        for positions in self._positions.values():
            positions[: len(lengths_B)].copy_(lengths_B)

    def rewind(self) -> None:
        """Move every row to the last position."""
        for positions in self._positions.values():
            positions.fill_(self._slots - 1)

    def advance(self) -> None:
        """Move every row to its next position."""
        for positions in self._positions.values():
            positions.add_(1)

    def clear(self) -> None:  # noqa: D102
        self.layers.clear()

    def arguments(self, rows: int, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        """Return the arguments of a decode step: the position of each row and its mask.

        With a dtype the mask is added to the scores; None is for a mask of truth values.
        """
        import torch

        positions_B1 = self._positions[device][:rows, None]
        mask_BT = self._numbers[device][: self._slots] <= positions_B1
        if dtype is not None:
            mask_BT = torch.zeros_like(mask_BT, dtype=dtype).masked_fill_(~mask_BT, torch.finfo(dtype).min)
        return {"position_ids": positions_B1, "attention_mask": mask_BT[:, None, None]}

    def update(
        self, key_BHSD: torch.Tensor, value_BHSD: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a layer and return those that its queries attend to (called by transformers)."""
        if layer_idx not in self.layers:
            heads, device = key_BHSD.shape[1], key_BHSD.device
            # A query attends to no slot that was not written, but a masked score of NaN would be NaN.
            keys, values = (
                part.new_zeros(self._rows, heads, self._slots, part.shape[-1]) for part in (key_BHSD, value_BHSD)
            )
            layer = LayerCache(keys, values, numbers=self._numbers[device], positions=self._positions[device])
            self.layers[layer_idx], layer.prefilling = layer, self.prefilling
        return self.layers[layer_idx].update(key_BHSD, value_BHSD)


class KernelCache(_Cache):
    """The lengths of texts whose keys and values the kernels of a strategy keep themselves, at one position for all.

    Prompts are padded on the left, so that all rows end at the same position, and a mask hides the padding. Rotary
    embeddings depend on distances alone, so that the padding changes no number.
    """

    bytes = 0
    """The kernels have the keys and values in a workspace."""

    def __init__(self, *, rows: int, slots: int, devices: Sequence[torch.device]) -> None:
        import torch

        self.length = 0
        """The number of tokens of each row so far, with padding; 0 where the kernels must forget them."""
        self.state: list[torch.Tensor] = []
        self._numbers = torch.arange(max(rows, slots), device=devices[-1])
        self._padding_B: torch.Tensor | None = None

    def prompts(
        self, ids_BS: torch.Tensor, lengths_B: torch.Tensor, *, padded: bool
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return the ids padded on the left, the row of each last token, and a mask (see `StaticCache.prompts`)."""
        self.prefilling = True
        rows, width = ids_BS.shape
        last_B = (self._numbers[:rows] + 1) * width - 1
        self.length, self._padding_B = width, width - lengths_B if padded else None
        if self._padding_B is None:
            return ids_BS, last_B, {}
        places_BS = (self._numbers[:width] - self._padding_B[:, None]).clamp(min=0)
        return ids_BS.gather(1, places_BS), last_B, {"attention_mask": self._mask(width).expand(-1, -1, width, -1)}

    def advance(self) -> None:
        """Count the token of a step."""
        self.length += 1

    def rewind(self) -> None:
        """Let the next step begin new texts."""
        self.length, self._padding_B = 0, None

    def arguments(self, rows: int, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:  # noqa: ARG002
        """Return the mask of a decode step (see `StaticCache.arguments`); none without padding."""
        return {} if self._padding_B is None else {"attention_mask": self._mask(self.length + 1)}

    def _mask(self, columns: int) -> torch.Tensor:
        """Return the mask [B, 1, 1, columns], which is true where there is no padding."""
        assert self._padding_B is not None
        return (self._numbers[:columns] >= self._padding_B[:, None])[:, None, None]


def formula_bytes(config: Any, *, rows: int, slots: int, number_bytes: int) -> int | None:
    """Return the size of the cache of all ranks together by the formula; None if the config lacks a part of it.

    Models with latent attention have keys and values of other sizes: the formula is not theirs. The largest batch has
    `rows`, and the longest row `slots` tokens, generated ones included.
    """
    text = config.get_text_config()
    layers, heads = (getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not isinstance(layers, int) or not isinstance(heads, int) or getattr(text, "kv_lora_rank", None):
        return None
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    one_head = getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False)
    key_value_heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or heads
    if one_head:  # of Falcon, whose config has the other heads all the same
        key_value_heads = 1
    total: int = 2 * layers * key_value_heads * size * rows * slots * number_bytes
    return total


def reason_against(fields: Mapping[str, Any], slots: int) -> str | None:
    """Return why a decoder with this config cannot generate with this cache, in words that follow its name, or None."""
    others = [name for name in fields.get("layer_types") or () if name not in _ATTENTION]
    others += [name for name in fields if name.startswith("mamba_")]
    if others:
        return f"has layers without a KV cache ({others[0]})"
    if fields.get("alibi"):
        return "computes its positions from a mask (alibi), which a static KV cache does not have"
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if isinstance(window, int) and window < slots:
        return f"attends to the last {window} tokens only, and {slots} are needed"
    return None
