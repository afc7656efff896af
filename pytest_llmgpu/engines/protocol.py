"""The contract of an engine: token ids in, token ids and log-likelihoods out, so that all engines get the same tokens.

An engine spreads, batches and runs a model by itself, in one rank, and may start further processes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case


class Texts(msgspec.Struct, frozen=True, kw_only=True):
    """The texts that an engine generated for the prompts of one batch. Only `tokens` are needed."""

    tokens: Sequence[Sequence[int]] | None
    """The new tokens of each prompt [B][N]. An end-of-sequence token ends no text. None where only times are known."""
    loglikelihoods: Sequence[Sequence[float]] | None = None
    """The log-likelihood of each new token [B][N]."""
    first_token_s: float | None = None
    """The seconds from the call until each prompt has its first token."""
    step_s: Sequence[float] = ()
    """The seconds of each further token [N - 1]: until every prompt has it."""


@runtime_checkable
class Engine(Protocol):
    """Something that scores or generates token ids.

    The class must import without torch: there is an object in the process of pytest, for `check`, and one in the rank
    from `start` to `stop`. A derived class needs `name`, `backend`, `start`, and `score`, `generate` or both.
    """

    name: str
    """`--strategy` and reports use this name."""
    backend: str
    """This library must import."""
    own_attention: bool = True
    """False if `--llmgpu-attention` chooses the attention."""
    options: tuple[str, ...] = ()
    """The options of pytest-llmgpu that a case of it has in `strategy_options`."""
    own_workers: bool = False
    """True if the engine starts a process for each of several devices, also of a CPU (see `workers`)."""
    dispatched: bool = True
    """False if kernels are launched past torch's dispatcher, where FLOPs cannot be counted."""
    elsewhere: str | None = None
    """The reason why kernels, ops and memory are not seen in the rank; None for an engine that computes in it."""

    def ranks(self, devices: int) -> int:  # noqa: ARG002 - an engine starts its further processes itself
        """Return the number of processes that this package starts."""
        return 1

    def check(self, case: Case, source: ModelSource) -> None:  # noqa: ARG002 - not needed
        """Refuse a case that cannot work, before a process starts: ValueError with what is wrong and allowed."""
        return

    @abstractmethod
    def start(self, case: Case, source: ModelSource) -> None:
        """Load the model in the rank, in the dtype and on the devices of the case."""

    def prepare(self, batch_size: int, tokens: int, new_tokens: int) -> None:  # noqa: ARG002 - not needed
        """Free what the case before needed, and reserve for batches of this size, so that no case depends on others.

        `tokens` are those of the longest sequence, with the `new_tokens` of each prompt; 0 for scoring.
        """
        return

    def idle(self) -> None:
        """Wait until nothing of the call before runs: the clock of the next batch starts then."""
        return

    def generate(self, token_ids: list[list[int]], new_tokens: int) -> Texts | list[list[int]]:
        """Continue each prompt greedily by `new_tokens` tokens, past end-of-sequence tokens, in one batch."""
        raise NotImplementedError

    def score(self, token_ids: list[list[int]], from_position: list[int]) -> list[list[float]] | None:
        """Return the log-likelihood of each token from a position on; None for sequences that are read only."""
        raise NotImplementedError

    def workers(self, function: Callable[..., Any], *args: Any) -> list[Any] | None:  # noqa: ARG002 - not needed
        """Run `function(device, *args)` in the main thread of each process that computes, and return the answers.

        The function is found by its name, and the device is a `torch.device`. None: the rank computes.
        """
        return None

    def counters(self) -> dict[str, float]:
        """Return counters of the engine, such as preemptions: what each grows by in a case is a figure of the case."""
        return {}

    def stop(self) -> None:
        """End what `start` started."""
        return
