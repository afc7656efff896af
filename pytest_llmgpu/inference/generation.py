"""Greedy generation with a static KV cache: a prefill, then one decode step for each further token of a batch.

A step needs nothing from the host: it reads the token, the position and the mask of each row from the device and leaves
the next ones there. So the host can launch all steps without waiting for one of them. End-of-sequence tokens end no
text: every text of a case has equally many tokens, in every launch.

The tensors of the cache are allocated once for a case, so that decode steps can be replayed as CUDA graphs. Each row
has a position of its own, the number of its tokens so far. Prompts are padded on the right, and the slots of the
padding are overwritten by generated tokens before any query attends to them: a token at position p is written to slot
p, and its query attends to the slots up to p. A layer with a sliding window has as many slots as the window: there the
token is written to slot p modulo the window, over the one that left it. Layers with linear attention keep one state of
all tokens, to which padding on the right would belong: for them prompts are padded on the left, with a mask.

In a prefill prompts may share lines in place of padding (`Batch.lines`): masks keep them apart.

The static cache of transformers decides what each layer keeps. It cannot be used itself: its rows share one position,
and its sliding layers count on the host, which a CUDA graph does not repeat, and move all keys at each step.

Shapes: B rows of a batch, S tokens of its longest prompt, V vocabulary, N new tokens, H key and value heads of this
rank, T slots, D size of a head; L lines of C tokens in which a prefill has the prompts, B and S without packing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.inference.batching import Batch, Plan, Request, Requests, plan, rows_of_lines
from pytest_llmgpu.inference.cuda_graphs import Recorder
from pytest_llmgpu.inference.scoring import OnBatch
from pytest_llmgpu.inference.sm_clock import SmClock
from pytest_llmgpu.report.derived import encode
from pytest_llmgpu.report.result import Batches, Generation

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

_WARM_UP_TOKENS = 3
_KINDS = ("full_attention", "sliding_attention", "linear_attention")
"""The layer types of transformers that `StaticCache` serves."""
_CHUNKED = "chunked_attention"
"""The layer type that attends to the tokens of a chunk, served as long as there is one chunk."""


def check(model: torch.nn.Module, config: PretrainedConfig | None) -> None:
    """Refuse what is no causal language model of transformers: ValueError with everything that is missing."""
    missing = [name for name in ("past_key_values", "position_ids", "attention_mask") if not scoring.takes(model, name)]
    lacks = [f"arguments {', '.join(missing)} of forward"] if missing else []
    lacks += ["get_output_embeddings()"] if scoring.output_head(model) is None else []
    lacks += ["Loaded.config"] if config is None else []
    if config is not None and "linear_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        from transformers.cache_utils import Cache

        lacks += [] if hasattr(Cache, "get_conv_state") else ["Cache.get_conv_state in this version of transformers"]
    if lacks:
        remedy = "score it (--llmgpu-workload=score), or use a causal language model of transformers"
        raise ValueError(f"{type(model).__name__} cannot generate text, it has no {', no '.join(lacks)}: {remedy}")


def can_share_lines(config: PretrainedConfig | None) -> bool:
    """Return whether prompts may share lines: tokens know their position by a rotation, and the attention takes a mask.

    Layers with linear attention would go on from one prompt to the next.
    """
    text = config and config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    rotary, takes = getattr(text, "rope_parameters", None), getattr(text, "_attn_implementation", None)
    return bool(rotary) and takes in ("sdpa", "eager") and kinds <= {*_KINDS[:2]}


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
        shape: dict[str, Any] = {"rows": rows, "slots": plan.tokens}
        shape["devices"] = list(dict.fromkeys([*devices, input_device]))
        if not own_kv_cache:
            eager = getattr(model.config.get_text_config(), "_attn_implementation", None) == "eager"
            shape |= {"config": model.config, "mask_dtype": model.dtype if eager else None}
        self._cache: KernelCache | StaticCache = (KernelCache if own_kv_cache else StaticCache)(**shape)
        # What a step reads and writes. The rows that a smaller batch does not have keep old values.
        self._tokens_B = torch.zeros(rows, dtype=torch.int64, device=input_device)
        self._rows_B = torch.arange(rows, device=input_device)
        self._number_1 = torch.zeros(1, dtype=torch.int64, device=input_device)
        self._tokens_NB = torch.zeros(self._new_tokens, rows, dtype=torch.int64, device=input_device)
        self._loglikelihoods_NB = torch.zeros(self._new_tokens, rows, device=input_device)

    def __enter__(self) -> Generator:  # noqa: PYI034 - typing.Self needs Python 3.11
        if self._recorder is None and self._cache.stateful:
            self.prefill(self._plan.batches[0])
        return self

    def __exit__(self, *_: object) -> None:
        self._graphs.clear()
        self._cache.clear()

    def warm_up(self, on_batch: OnBatch = lambda *_: None) -> None:
        """Run the prefill and the first steps of a batch of every shape."""
        for batch in {(batch.rows, batch.width): batch for batch in self._plan.batches}.values():
            latency_s, *_ = self._run(batch, min(_WARM_UP_TOKENS, self._new_tokens))
            on_batch(latency_s, batch.rows, batch.tokens, batch.padded_tokens)

    def generate(self, on_batch: OnBatch = lambda *_: None) -> tuple[Batches, Generation, str | None]:
        """Generate the texts of all prompts.

        Return the batches, without a clock; the texts in the order of the dataset; the reason why there is no clock.
        ValueError if a log-likelihood is not finite.
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
            on_batch(latency_s, batch.rows, batch.tokens, batch.padded_tokens)
        scoring.synchronize(self._devices)
        in_order = [texts[number] for number in sorted(texts)]
        found = Generation(
            prompt_tokens=[len(request.tokens) - 1 for request in self._plan.requests.requests],
            new_tokens=[len(tokens) for tokens, _ in in_order],
            first_token_s=first_token_s,
            step_s=step_s,
            prefill_clock_ghz=clock.ghz([(first, first + 1) for first in firsts]),
            step_clock_ghz=clock.ghz([(first + 1, first + 2) for first in firsts]),
            kv_cache_bytes=self._cache.bytes,
            tokens=encode(chain.from_iterable(tokens for tokens, _ in in_order), "i"),
            loglikelihoods=encode(chain.from_iterable(values for _, values in in_order)),
        )
        return columns, found, clock.why

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
        self, batch: Batch, new_tokens: int, clock: SmClock | None = None, first: int = 0
    ) -> tuple[float, list[float], list[list[int]], list[list[float]]]:
        """Generate the texts of one batch; the devices are idle at both ends.

        Return its latency, the times to the first token and of each step, tokens [B][N], log-likelihoods. A clock gets
        stamps from the number `first` on: before the prefill, after it, and after the steps.
        """
        import torch

        clock, marks, on_gpu = clock or SmClock((), 0), list[Any](), self._device.type == "cuda"

        def mark() -> None:
            """Take the time at which everything that was launched is done, without making the host wait."""
            marks.append(torch.cuda.Event(enable_timing=True) if on_gpu else time.perf_counter())
            if on_gpu:
                marks[-1].record(torch.cuda.current_stream(self._device))

        with torch.inference_mode():
            clock.stamp(first)
            scoring.synchronize(self._devices)
            began_s = time.perf_counter()
            mark()
            self.prefill(batch)
            mark()
            clock.stamp(first + 1)
            with self._head:
                for _ in range(new_tokens - 1):
                    self._launch((batch.rows, 0), batch.rows, lambda: self._step(batch.rows))
                    mark()
            tokens = self._tokens_NB[:new_tokens, : batch.rows].t().tolist()
            loglikelihoods = self._loglikelihoods_NB[:new_tokens, : batch.rows].t().tolist()
            scoring.synchronize(self._devices)
            latency_s = time.perf_counter() - began_s
            clock.stamp(first + 2)
        times_s = [begin.elapsed_time(end) / 1000 if on_gpu else end - begin for begin, end in pairwise(marks)]
        return latency_s, times_s, tokens, loglikelihoods

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
        ids_BS, last_B, arguments = self._cache.prompts(ids.view(batch.rows, batch.width), lengths_B, batch)
        logits_1BV = self._head.forward(ids_BS, last_B, past_key_values=self._cache, **arguments)
        self._cache.start(lengths_B)
        self._choose(logits_1BV[0])

    def _step(self, rows: int) -> None:
        """Read the latest token of each row and choose the next one."""
        arguments = self._cache.arguments(rows, self._device)
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

    stateful = False
    """True if a decode step needs the state that a prefill leaves."""
    prefilling = False
    """True while a forward reads whole prompts: its queries attend to the prompts alone."""

    def start(self, lengths_B: torch.Tensor) -> None:  # noqa: ARG002 - of a subclass
        """End the prefill of prompts with these numbers of tokens."""
        self.prefilling = False

    def clear(self) -> None:
        """Free the memory of all layers."""

    def is_recording_past(self, *_: Any) -> bool:
        """Return False: no state is kept to return to it."""
        return False

    def get_seq_length(self, *_: Any) -> int:
        """Return 0, the number of tokens before a prompt."""
        return 0

    get_query_offset = get_seq_length
    """The position of the first token of a prompt."""

    def get_mask_sizes(self, query_length: int | torch.Tensor, *_: Any) -> tuple[int, int]:
        """Return the number of keys of a prefill and the position of the first one."""
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0


class LayerCache(_Cache):
    """The keys and values of one layer. All its layers look alike to torch.compile, which compiles one for all."""

    columns: tuple[torch.Tensor, torch.Tensor] | None = None
    """In a prefill, the line [B, 1] and its column [B, T] that belong into each slot; None where these are the row and
    the slot's number."""

    def __init__(
        self, keys_BHTD: torch.Tensor, values_BHTD: torch.Tensor, *, numbers: torch.Tensor, places: torch.Tensor
    ) -> None:
        """Keep the tensors of a layer, all on its device.

        `numbers` are 0, 1, 2 and so on, and `places` the slots of the tokens of a decode step.
        """
        self.keys, self.values = keys_BHTD, values_BHTD
        self._numbers, self._places = numbers, places

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that the layer keeps."""
        return [self.keys, self.values]

    def update(
        self, key_BHSD: torch.Tensor, value_BHSD: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values and return those that their queries attend to (called by transformers)."""
        rows, tokens = key_BHSD.shape[0], key_BHSD.shape[2]
        if self.prefilling and self.columns is not None:
            lines_B1, columns_BT = self.columns
            for kept, part in ((self.keys, key_BHSD), (self.values, value_BHSD)):
                part_BTHD = part[lines_B1, :, columns_BT]
                kept[: len(columns_BT), :, : columns_BT.shape[1]].copy_(part_BTHD.transpose(1, 2))
            return key_BHSD, value_BHSD
        if self.prefilling:
            self.keys[:rows, :, :tokens].copy_(key_BHSD)
            self.values[:rows, :, :tokens].copy_(value_BHSD)
            return key_BHSD, value_BHSD
        keys, values = self.keys[:rows], self.values[:rows]
        places = self._numbers[:rows], slice(None), self._places[:rows]
        keys[places], values[places] = key_BHSD[:, :, 0], value_BHSD[:, :, 0]
        return keys, values


class StateCache(_Cache):
    """The states of one layer with linear attention: of its convolution and of its recurrence."""

    def __init__(self, most_rows: int) -> None:
        self.conv: torch.Tensor | None = None
        self.recurrent: torch.Tensor | None = None
        self.rows, self._most_rows = 0, most_rows

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that the layer keeps."""
        return [part for part in (self.conv, self.recurrent) if part is not None]

    def get_conv_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """Return the state that a decode step updates in place; None in a prefill (all are called by transformers)."""
        return None if self.prefilling or self.conv is None else self.conv[: self.rows]

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """Return the state before a decode step; None in a prefill."""
        return None if self.prefilling or self.recurrent is None else self.recurrent[: self.rows]

    def update_conv_state(self, inputs_BCS: torch.Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> torch.Tensor:
        """Keep the last inputs of a prefill, as many as the kernel has, and return all of them."""
        import torch

        inputs_BCS = torch.nn.functional.pad(inputs_BCS, (max(conv_kernel_size - inputs_BCS.shape[-1], 0), 0))
        if self.conv is None:
            self.conv = inputs_BCS.new_zeros(self._most_rows, inputs_BCS.shape[1], conv_kernel_size)
        self.conv[: self.rows].copy_(inputs_BCS[..., -conv_kernel_size:])
        return inputs_BCS

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Keep the state after a forward."""
        if self.recurrent is None:
            self.recurrent = state.new_zeros(self._most_rows, *state.shape[1:])
        return self.recurrent[: self.rows].copy_(state)


class StaticCache(_Cache):
    """The keys, values and states of all layers, in the interface that the models of transformers call.

    Each layer allocates its part at its first prefill, with the heads that this rank computes, on the layer's device.
    """

    def __init__(
        self,
        *,
        rows: int,
        slots: int,
        devices: Sequence[torch.device],
        config: PretrainedConfig,
        mask_dtype: torch.dtype | None,
    ) -> None:
        """Make a cache for the rows of the largest batch; slots are the tokens of the longest row with the new ones.

        With a dtype masks are added to the scores; None is for masks of truth values.
        """
        import torch

        self.layers: dict[int, LayerCache | StateCache] = {}
        """The part of each layer that has read a prompt."""
        self._rows, self._slots, self._now, self._mask_dtype = rows, slots, rows, mask_dtype
        kept = _kept(config, slots)
        self._sizes = [size for _, size in kept]
        # The models with layers of several kinds take a mask for each kind, others one mask for all.
        self._kinds: dict[str, int] = {}
        for kind, size in kept:
            self._kinds[kind] = max(size, self._kinds.get(kind, 0))
        self.stateful = "linear_attention" in self._kinds
        # On every device: a copy from one device to another in each layer would be traffic.
        self._positions = {device: torch.zeros(rows, dtype=torch.int64, device=device) for device in devices}
        self._numbers = {device: torch.arange(max(rows, slots), device=device) for device in devices}
        self._places = {
            (device, size): positions if size == slots else positions.clone()
            for device, positions in self._positions.items()
            for size in dict.fromkeys([slots, *filter(None, self._sizes)])
        }
        self._columns: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """What the layers with so many slots have as `columns`."""

    @property
    def bytes(self) -> int:
        """The size of all keys, values and states."""
        return sum(part.nbytes for layer in self.layers.values() for part in layer.tensors)

    @property
    def state(self) -> list[torch.Tensor]:
        """The tensors that a decode step changes, besides the slots that it writes."""
        states = [layer.tensors for layer in self.layers.values() if isinstance(layer, StateCache)]
        return [*self._places.values(), *chain.from_iterable(states)]

    def prompts(
        self, ids_BS: torch.Tensor, lengths_B: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Begin a prefill; return its input ids, the row of [B * S] of each last token, and further arguments.

        Prompts are padded on the right. With linear attention they are returned padded on the left, also where there is
        no padding: a batch of the same shape may have some.
        """
        import torch

        rows, width = ids_BS.shape
        columns_S = self._numbers[ids_BS.device][:width]
        lines_B, firsts_B = self._numbers[ids_BS.device][:rows], torch.zeros_like(lengths_B)
        arguments: dict[str, Any] = {}
        if self.stateful:
            firsts_B = width - lengths_B
        elif batch.lines is not None:
            ids_BS, lines_B, firsts_B, arguments = self._share_lines(ids_BS, lengths_B, *batch.lines)
        self._columns.clear()
        for device, size in self._places:
            if self.stateful or batch.lines is not None or width > size:
                # The slot of a window has the last token whose position is the slot's number modulo the window.
                last_B1, slots_T = lengths_B.to(device)[:, None] - 1, self._numbers[device][: min(size, width)]
                columns_BT = last_B1 - (last_B1 - slots_T).remainder(size) + firsts_B.to(device)[:, None]
                self._columns[device, size] = lines_B.to(device)[:, None], columns_BT.clamp(0, ids_BS.shape[1] - 1)
        self._begin(rows, prefilling=True)
        last_B = lines_B * ids_BS.shape[1] + firsts_B + lengths_B - 1
        if not self.stateful:
            return ids_BS, last_B, arguments
        places_BS = columns_S - firsts_B[:, None]
        real_BS = places_BS >= 0
        # A row of padding attends to padding: a softmax of nothing is NaN, and linear attention multiplies by 0.
        mask_BSS = (columns_S <= columns_S[:, None]) & (real_BS[:, None] | ~real_BS[:, :, None])
        masks = {"full_attention": self._mask(mask_BSS[:, None]), "linear_attention": real_BS}
        arguments = {"position_ids": places_BS.clamp(min=0), "attention_mask": masks}
        return ids_BS.gather(1, places_BS.remainder(width)), last_B, arguments

    def start(self, lengths_B: torch.Tensor) -> None:  # noqa: D102
        self._begin(len(lengths_B), prefilling=False)
        for positions in self._positions.values():
            positions[: len(lengths_B)].copy_(lengths_B)
        self._place()

    def rewind(self) -> None:
        """Move every row to the last position."""
        for positions in self._positions.values():
            positions.fill_(self._slots - 1)
        self._place()

    def advance(self) -> None:
        """Move every row to its next position."""
        for positions in self._positions.values():
            positions.add_(1)
        self._place()

    def clear(self) -> None:  # noqa: D102
        self.layers.clear()

    def arguments(self, rows: int, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a decode step: the position of each row, and its mask or those of mixed layers."""
        self._begin(rows, prefilling=False)
        positions_B1 = self._positions[device][:rows, None]
        masks = {kind: (self._numbers[device][:size] <= positions_B1)[:, None] for kind, size in self._kinds.items()}
        return self._arguments(positions_B1, masks)

    def _share_lines(
        self, ids_BS: torch.Tensor, lengths_B: torch.Tensor, lines: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return the ids [L, C] of prompts that share lines, the line and first column of each, and their arguments."""
        import torch

        rows_LN = rows_of_lines(self._numbers[ids_BS.device][: len(ids_BS)], lines)
        ends_LN = lengths_B[rows_LN].cumsum(1)
        firsts_LN = ends_LN - lengths_B[rows_LN]
        columns_C = torch.arange(length, device=ids_BS.device)
        numbers_LC = (columns_C[:, None] >= ends_LN[:, None]).sum(-1).clamp(max=rows_LN.shape[1] - 1)
        rows_LC, places_LC = rows_LN.gather(1, numbers_LC), columns_C - firsts_LN.gather(1, numbers_LC)
        lines_B, firsts_B = torch.empty_like(lengths_B), torch.empty_like(lengths_B)
        lines_L1 = self._numbers[ids_BS.device][:lines, None]
        lines_B[rows_LN], firsts_B[rows_LN] = lines_L1.expand_as(rows_LN), firsts_LN
        distances_CC = columns_C[:, None] - columns_C  # those of a prompt are those of its line
        alike_LCC = (rows_LC[:, :, None] == rows_LC[:, None]) & (distances_CC >= 0)
        masks = {kind: alike_LCC & (distances_CC < size) for kind, size in self._kinds.items()}
        places_LC = places_LC.clamp(max=ids_BS.shape[1] - 1)  # behind the last prompt of a line
        return ids_BS[rows_LC, places_LC], lines_B, firsts_B, self._arguments(places_LC, masks)

    def _arguments(self, positions_BS: torch.Tensor, masks: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return positions and masks [B, S, T] as models take them: those of layers without slots are None."""
        taken = {kind: self._mask(mask[:, None]) if self._kinds[kind] else None for kind, mask in masks.items()}
        return {"position_ids": positions_BS, "attention_mask": taken if len(taken) > 1 else taken.popitem()[1]}

    def update(
        self, key_BHSD: torch.Tensor, value_BHSD: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a layer and return those that its queries attend to (called by transformers)."""
        layer = self.layers.get(layer_idx)
        if layer is None:
            heads, device, size = key_BHSD.shape[1], key_BHSD.device, self._sizes[layer_idx]
            # A query attends to no slot that was not written, but a masked score of NaN would be NaN.
            keys, values = (part.new_zeros(self._rows, heads, size, part.shape[-1]) for part in (key_BHSD, value_BHSD))
            layer = LayerCache(keys, values, numbers=self._numbers[device], places=self._places[device, size])
            self.layers[layer_idx] = layer
            self._begin(self._now, prefilling=self.prefilling)
        assert isinstance(layer, LayerCache)
        return layer.update(key_BHSD, value_BHSD)

    def get_conv_state(self, layer_idx: int, *_: Any, **named: Any) -> torch.Tensor | None:
        """Return a state of a layer with linear attention (these five are called by transformers)."""
        return self._state(layer_idx, **named).get_conv_state()

    def get_recurrent_state(self, layer_idx: int, *_: Any, **named: Any) -> torch.Tensor | None:
        """See `get_conv_state`."""
        return self._state(layer_idx, **named).get_recurrent_state()

    def update_conv_state(self, inputs_BCS: torch.Tensor, layer_idx: int, **named: Any) -> torch.Tensor:
        """See `get_conv_state`."""
        return self._state(layer_idx, **named).update_conv_state(inputs_BCS, **named)

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, **named: Any) -> torch.Tensor:
        """See `get_conv_state`."""
        return self._state(layer_idx, **named).update_recurrent_state(state)

    def _state(self, layer_idx: int, state_idx: int = 0, **_: Any) -> StateCache:
        if state_idx:
            raise ValueError(f"layer {layer_idx} has several states, and one is served: score the model")
        if layer_idx not in self.layers:
            self.layers[layer_idx] = StateCache(self._rows)
            self._begin(self._now, prefilling=self.prefilling)
        layer = self.layers[layer_idx]
        assert isinstance(layer, StateCache)
        return layer

    def _begin(self, rows: int, *, prefilling: bool) -> None:
        """Set what the layers of a forward of this many rows do."""
        self._now, self.prefilling = rows, prefilling
        for layer in self.layers.values():
            layer.prefilling = prefilling
            if isinstance(layer, StateCache):
                layer.rows = rows
            elif prefilling:
                layer.columns = self._columns.get((layer.keys.device, layer.keys.shape[2]))

    def _place(self) -> None:
        """Set the slots of windows that the next step writes."""
        for (device, size), places in self._places.items():
            if size < self._slots:
                places.copy_(self._positions[device].remainder(size))

    def _mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Return a mask of truth values as the attention takes it."""
        import torch

        if self._mask_dtype is None:
            return mask
        return torch.zeros_like(mask, dtype=self._mask_dtype).masked_fill_(~mask, torch.finfo(self._mask_dtype).min)


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
        self, ids_BS: torch.Tensor, lengths_B: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return the ids padded on the left, the row of each last token, and a mask (see `StaticCache.prompts`)."""
        self.prefilling = True
        rows, width = ids_BS.shape
        last_B = (self._numbers[:rows] + 1) * width - 1
        self.length, self._padding_B = width, width - lengths_B if batch.tokens < batch.padded_tokens else None
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

    def arguments(self, rows: int, device: torch.device) -> dict[str, Any]:  # noqa: ARG002
        """Return the mask of a decode step (see `StaticCache.arguments`); none without padding."""
        return {} if self._padding_B is None else {"attention_mask": self._mask(self.length + 1)}

    def _mask(self, columns: int) -> torch.Tensor:
        """Return the mask [B, 1, 1, columns], which is true where there is no padding."""
        assert self._padding_B is not None
        return (self._numbers[:columns] >= self._padding_B[:, None])[:, None, None]


def _kept(config: PretrainedConfig, slots: int) -> list[tuple[str, int]]:
    """Return the kind of each layer and the tokens that transformers' static cache keeps for it.

    These are 0 for a state, and for a layer that reads the keys and values of another one. ValueError if the cache does
    not serve a kind of layer.
    """
    import transformers

    text = config.get_text_config()
    layers = transformers.StaticCache(config=config, max_cache_len=slots)
    named = dict(enumerate(getattr(text, "layer_types", None) or ()))
    # Up to the end of its first chunk a layer attends to all tokens.
    served = {*_KINDS, *[_CHUNKED] * (slots <= (getattr(text, "attention_chunk_size", None) or 0))}
    if other := next((kind for kind in named.values() if kind not in served), None):
        raise ValueError(f"text of {slots} tokens is not generated with layers of the kind {other}: score the model")
    kept = []
    ways = zip(layers.is_linear, layers.is_sliding, layers.layers, strict=True)
    for number, (is_linear, is_sliding, layer) in enumerate(ways):
        kind = _KINDS[2] if is_linear else _KINDS[int(is_sliding)]
        kind = _CHUNKED if named.get(number) == _CHUNKED else kind
        kept.append((kind, 0 if is_linear else getattr(layer, "max_cache_len", 0)))
    return kept


def formula_bytes(config: Any, *, rows: int, slots: int, number_bytes: int) -> int | None:
    """Return the size of the cache of all ranks together by the formula; None if the config lacks a part of it.

    The largest batch has `rows`, and the longest row `slots` tokens, generated ones included. States of linear
    attention are in float32, those of its convolution in the dtype of the model.
    """
    text = config.get_text_config()
    layers, heads = (getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not isinstance(layers, int) or not isinstance(heads, int):
        return None
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    one_head = getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False)
    key_value_heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or heads
    if one_head:  # of Falcon, whose config has the other heads all the same
        key_value_heads = 1
    width = 2 * key_value_heads * size
    if getattr(text, "kv_lora_rank", None):  # latent attention keeps what its keys and values are made of
        width = text.kv_lora_rank + text.qk_rope_head_dim
    kept = _kept(config, slots)
    total: int = sum(size for _, size in kept) * width * number_bytes
    if (states := sum(kind == "linear_attention" for kind, _ in kept)) > 0:
        names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")
        numbers: list[Any] = [getattr(text, f"linear_{name}", None) for name in names]
        if None in numbers:
            return None
        key_heads, key_size, value_heads, value_size, kernel = numbers
        values = value_heads * value_size
        total += states * (2 * key_heads * key_size + values) * kernel * number_bytes
        total += states * values * key_size * 4
    return rows * total


def reason_against(fields: Mapping[str, Any]) -> str | None:
    """Return why a decoder with this config cannot generate with this cache, in words that follow its name, or None."""
    others = [name for name in fields.get("layer_types") or () if name not in _KINDS]
    others += [name for name in fields if name.startswith("mamba_")]
    if others:
        return f"has layers that keep neither keys and values nor a state that this package serves ({others[0]})"
    if fields.get("model_type") == "minimax":
        return "has a KV cache of its own, which takes no other"
    if fields.get("alibi"):
        return "computes its positions from a mask (alibi), which a static KV cache does not have"
    return None
