"""The contract of a strategy: a check without cost, the number of processes, and a model that is ready to score.

The errors are those that a strategy raises if the memory does not suffice.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from pytest_llmgpu.inference.compiled_layers import CompiledLayers


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a strategy reserves for one batch size, outside torch's allocator."""

    tokens_requested: int
    """The longest sequence has this many tokens."""
    tokens_granted: int
    """The workspace holds this many tokens per sequence."""
    workspace_bytes: int
    """The workspace takes this many bytes."""
    kv_cache_bytes: int | None = None
    """The part of the workspace for keys and values takes this many bytes; None if it has none."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A loaded model in one rank; `llm.run` passes it to the function of the user."""

    model: torch.nn.Module
    """To score, any module: it is called as `model(input_ids=ids_BS)` and returns the logits [B, S, V], or an object
    with them as `.logits`. Where it has `get_output_embeddings()`, as models of transformers have, logits are computed
    for the tokens of endings alone, and `use_cache=False` is passed where its forward takes it. To generate text, a
    causal language model of transformers."""
    config: PretrainedConfig | None
    """This is the config of transformers. None for a module without one: sequences then have up to 2,048 tokens, there
    is no `bound`, and no text is generated."""
    input_device: torch.device
    """Input ids are copied to this device: the one of the output head, so that logits need no copy."""
    devices: tuple[torch.device, ...]
    """This rank computes on these devices, in the order of its visible devices."""
    rank: int = 0
    """This is the number of the process, 0 for a strategy of one process."""
    world_size: int = 1
    """The strategy has this many processes."""
    recordable: bool = True
    """If true, the forwards of the decoder may be replayed as CUDA graphs. A replay runs kernels only: set it to False
    if hooks or Python code inside the decoder have to run in every forward."""
    own_kv_cache: bool = False
    """True if the layers keep keys and values themselves while text is generated, at one position for all rows of a
    batch. They are called with a `generation.KernelCache` as `past_key_values`."""
    dispatched: bool = True
    """True if the model computes with ops of torch alone. False: a library launches kernels past torch's dispatcher,
    and FLOPs cannot be counted."""
    compiled: CompiledLayers | None = None
    """These layers are compiled at the first forward of each shape; None if nothing is. Batches are then padded to few
    shapes. Only the forwards of a case are compiled: passes that count, and functions of the user, run eagerly."""

    @property
    def placed(self) -> dict[str, Any]:
        """The devices, as functions that run batches take them."""
        return {"input_device": self.input_device, "devices": self.devices}


class DeviceMapSpillError(RuntimeError):
    """The layers do not fit on the devices: accelerate would put some on the CPU or on disk."""


class WorkspaceError(RuntimeError):
    """The workspace of a strategy cannot hold the longest sequence."""

    def __init__(self, tokens_requested: int, tokens_granted: int) -> None:
        held = f"the workspace holds {tokens_granted} tokens"
        super().__init__(f"{held}, but the longest sequence has {tokens_requested}: use a smaller batch size")
        self.tokens_requested = tokens_requested
        self.tokens_granted = tokens_granted
        """The memory suffices for this many tokens; 0 if no workspace fits."""


class Strategy(Protocol):
    """A way to spread a model over devices.

    The class must import without torch, since `check` and `build` run in the process of pytest. There is one object in
    that process, and one in each rank while its model is loaded. A class that derives from this one may leave out
    `check`, `build` and `prepare`, which then do nothing.
    """

    name: str
    """`--strategy` and reports use this name."""
    backend: str
    """This library must import; it runs the model unless an option names another one."""
    quantizes: bool = False
    """True if `load` quantises the weights as `source.quantization` names it; False refuses --llmgpu-quantization."""

    def check(self, case: Case, source: ModelSource) -> None:  # noqa: ARG002 - not needed
        """Refuse a case that cannot work, before a process starts.

        Raises:
            ValueError: The message has the wrong value and the allowed ones.
        """
        return

    @abstractmethod
    def ranks(self, devices: int) -> int:
        """Return the number of processes for a number of devices: 1, or one per device."""

    def build(self, case: Case, say: Callable[[str], None]) -> None:  # noqa: ARG002 - not needed
        """Do the work that all ranks need once, before they start, such as compiling an extension.

        Args:
            case: The first case of the strategy.
            say: Shows a line of progress.

        Raises:
            RuntimeError: The work failed; the message is one line.
        """
        return

    @abstractmethod
    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the model in a rank, in the dtype and on the devices of the case."""

    def prepare(self, loaded: Loaded, batch_size: int, tokens: int) -> Workspace | None:  # noqa: ARG002 - not needed
        """Rebuild the buffers that depend on the batch size, so that a case takes the same memory alone and in a sweep.

        Args:
            loaded: The result of `load`.
            batch_size: Sequences of the largest batch.
            tokens: Tokens of the longest sequence, padding included.

        Returns:
            The reserved memory; None if the strategy reserves none.
        """
        return None
