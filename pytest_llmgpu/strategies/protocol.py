"""What a strategy is: a check that costs nothing, the number of its processes, and a model that is ready to score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

__all__ = ["Loaded", "Strategy", "Workspace"]


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a strategy keeps for one batch size, outside torch's allocator."""

    tokens_requested: int
    """Tokens of the longest sequence."""
    tokens_granted: int
    """Tokens per sequence that there is room for."""
    workspace_bytes: int


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model as one rank holds it; what `llm.run` hands to the user's function."""

    model: torch.nn.Module
    """Called as `model(input_ids=ids_BS)`, its answer has `.logits`."""
    config: PretrainedConfig
    """transformers' description of the architecture."""
    input_device: torch.device
    """Where input ids are put: where the output head lives, so that logits need not travel."""
    devices: tuple[torch.device, ...]
    """Every device this rank computes on, in the order of the rank's visible devices."""
    rank: int = 0
    """Number of this process, 0 in a strategy of one process."""
    world_size: int = 1
    """Processes of the strategy."""
    recordable: bool = True
    """Whether the decoder's forwards may be replayed as CUDA graphs. A replay runs kernels only: say False where hooks
    or code of one's own inside the decoder have to run at every forward."""
    dispatched: bool = True
    """Whether the model computes with ops of torch alone. False: a library launches kernels past torch's dispatcher,
    and FLOPs cannot be counted."""


class Strategy(Protocol):
    """A way to spread a model over devices.

    The class must import without torch, since `check` and `build` run in pytest's process. One object lives there, and
    one in each rank for as long as its model is loaded.
    """

    name: str
    """As in `--strategy` and in reports."""
    backend: str
    """The library that carries it out unless an option names another; it must import."""

    def check(self, case: Case, source: ModelSource) -> None:
        """Refuse, before anything is started, what cannot work.

        Raises:
            ValueError: With the value that is wrong and what is allowed.
        """
        ...

    def ranks(self, devices: int) -> int:
        """Return how many processes it needs for that many devices: 1 or one each."""
        ...

    def build(self, case: Case, say: Callable[[str], None]) -> None:
        """Do once, before the ranks start, what each of them would else do again: compile an extension.

        Args:
            case: The first case that needs it.
            say: Shows a line while it takes time.

        Raises:
            RuntimeError: It failed, with the reason in one line.
        """
        ...

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the model in a rank, in the dtype and on the devices of the case; `oom` classifies what it raises."""
        ...

    def prepare(self, loaded: Loaded, batch_size: int, tokens: int) -> Workspace | None:
        """Rebuild what depends on the batch size, so that a case costs the same alone and in a sweep.

        Args:
            loaded: What `load` returned.
            batch_size: Sequences of the largest batch.
            tokens: Tokens of the longest sequence, padding included.

        Returns:
            What was set aside; None where the strategy keeps nothing.
        """
        ...
