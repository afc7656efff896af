"""A static KV cache: its tensors are allocated once for a case, so that decode steps can be replayed as CUDA graphs.

Each row has a position of its own, the number of its tokens so far. Prompts are padded on the right, and the slots of
the padding are overwritten by generated tokens before any query attends to them: a token at position p is written to
slot p, and its query attends to the slots up to p.

Shapes: B rows, H key and value heads of this rank, S tokens of a prompt, T slots, D size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ATTENTION = ("full_attention", "sliding_attention")


class _Cache:
    """What the models of transformers ask in a prefill. Decode steps have their positions and masks as arguments."""

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
        self.prefilling = False
        """True while a forward reads whole prompts: its queries attend to the prompts alone."""

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
        """Make a cache without layers.

        Args:
            rows: Rows of the largest batch.
            slots: Tokens of the longest row, generated ones included.
            devices: The devices of the model.
        """
        import torch

        self.layers: dict[int, LayerCache] = {}
        """The part of each layer that has read a prompt."""
        self.prefilling = False
        self._rows, self._slots = rows, slots
        # On every device: a copy from one device to another in each layer would be traffic.
        self._positions = {device: torch.zeros(rows, dtype=torch.int64, device=device) for device in devices}
        self._numbers = {device: torch.arange(max(rows, slots), device=device) for device in devices}

    @property
    def bytes(self) -> int:
        """The size of all keys and values."""
        return sum(part.nbytes for layer in self.layers.values() for part in (layer.keys, layer.values))

    @property
    def prefilling(self) -> bool:
        """True while a forward reads whole prompts: its queries attend to the prompts alone."""
        return self._prefilling

    @prefilling.setter
    def prefilling(self, value: bool) -> None:
        self._prefilling = value
        for layer in self.layers.values():
            layer.prefilling = value

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
        """Return the input ids of a prefill, the row of [B * S] of each last token, and further arguments: none.

        Args:
            ids_BS: The prompts, padded on the right.
            lengths_B: The number of tokens of each prompt.
            padded: Whether prompts have different lengths.
        """
        rows, width = ids_BS.shape
        return ids_BS, self._numbers[ids_BS.device][:rows] * width + lengths_B - 1, {}

    def start(self, lengths_B: torch.Tensor) -> None:
        """Begin a batch whose prompts have these numbers of tokens, after their prefill."""
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

    def clear(self) -> None:
        """Free the memory of all layers."""
        self.layers.clear()

    def arguments(self, rows: int, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        """Return the arguments of a decode step: the position of each row and its mask.

        Args:
            rows: Rows of the batch.
            device: The device of the input ids.
            dtype: The dtype of a mask that is added to the scores; None for a mask of truth values.
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
        """Make a cache; the arguments are those of `StaticCache`."""
        import torch

        self.prefilling = False
        """True while a forward reads whole prompts."""
        self.length = 0
        """The number of tokens of each row so far, with padding; 0 where the kernels must forget them."""
        self.state: list[torch.Tensor] = []
        self._numbers = torch.arange(max(rows, slots), device=devices[-1])
        self._padding_B: torch.Tensor | None = None

    def prompts(
        self, ids_BS: torch.Tensor, lengths_B: torch.Tensor, *, padded: bool
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return the ids padded on the left, the row of each last token, and a mask (see `StaticCache.prompts`)."""
        rows, width = ids_BS.shape
        last_B = (self._numbers[:rows] + 1) * width - 1
        self.length, self._padding_B = width, width - lengths_B if padded else None
        if self._padding_B is None:
            return ids_BS, last_B, {}
        places_BS = (self._numbers[:width] - self._padding_B[:, None]).clamp(min=0)
        return ids_BS.gather(1, places_BS), last_B, {"attention_mask": self._mask(width).expand(-1, -1, width, -1)}

    def start(self, lengths_B: torch.Tensor) -> None:
        """Do nothing: `prompts` has begun the batch."""

    def advance(self) -> None:
        """Count the token of a step."""
        self.length += 1

    def rewind(self) -> None:
        """Let the next step begin new texts."""
        self.length, self._padding_B = 0, None

    def clear(self) -> None:
        """Do nothing: the workspace belongs to the strategy."""

    def arguments(self, rows: int, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:  # noqa: ARG002
        """Return the mask of a decode step (see `StaticCache.arguments`); none without padding."""
        return {} if self._padding_B is None else {"attention_mask": self._mask(self.length + 1)}

    def _mask(self, columns: int) -> torch.Tensor:
        """Return the mask [B, 1, 1, columns], which is true where there is no padding."""
        assert self._padding_B is not None
        return (self._numbers[:columns] >= self._padding_B[:, None])[:, None, None]


def formula_bytes(config: Any, *, rows: int, slots: int, number_bytes: int) -> int | None:
    """Return the size of the cache of all ranks together by the formula; None if the config lacks a part of it.

    Models with latent attention have keys and values of other sizes: the formula is not theirs.

    Args:
        config: The config of transformers.
        rows: Rows of the largest batch.
        slots: Tokens of the longest row, generated ones included.
        number_bytes: Size of one number.
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
    """Return why a model cannot generate with this cache, in words that follow its name; None if it can.

    Args:
        fields: The config of the decoder.
        slots: Tokens of the longest row, generated ones included.
    """
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
