"""The contract of an engine: token ids in, token ids and log-likelihoods out, so that all engines get the same tokens.

An engine spreads, batches and runs a model by itself. It is measured in one process of this package, a rank, and may
start further ones.
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
    """The new tokens of each prompt [B][N], without the prompt. An end-of-sequence token ends no text. None where only
    their times are known, with the right number of tokens."""
    loglikelihoods: Sequence[Sequence[float]] | None = None
    """The log-likelihood of each new token [B][N]."""
    first_token_s: float | None = None
    """The seconds from the call until each prompt has its first token."""
    step_s: Sequence[float] = ()
    """The seconds of each further token [N - 1]: until every prompt has it."""


@runtime_checkable
class Engine(Protocol):
    """Something that scores or generates token ids.

    The class must import without torch, since `check` runs in the process of pytest. There is one object in that
    process, and one in the rank from `start` to `stop`. A class that derives from this one may leave out all but
    `name`, `backend` and what it can do: `score`, `generate` or both.
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
    """True if each of several devices, also of a CPU, has a process that the engine starts (see `workers`); else it has
    one device on a CPU."""
    dispatched: bool = True
    """False if kernels are launched past torch's dispatcher, where FLOPs cannot be counted. `start` may set it."""
    elsewhere: str | None = None
    """The reason why kernels, ops and memory are not seen in the rank; None for an engine that computes in it."""

    def ranks(self, devices: int) -> int:  # noqa: ARG002 - an engine starts its further processes itself
        """Return the number of processes that this package starts: 1."""
        return 1

    def build(self, case: Case, say: Callable[[str], None]) -> None:  # noqa: ARG002 - not needed
        """Do work that is needed once, before the rank starts (see `strategies.protocol.Strategy.build`)."""
        return

    def check(self, case: Case, source: ModelSource) -> None:  # noqa: ARG002 - not needed
        """Refuse a case that cannot work, before a process starts.

        Raises:
            ValueError: The message has the wrong value and the allowed ones.
        """
        return

    @abstractmethod
    def start(self, case: Case, source: ModelSource) -> None:
        """Load the model in the rank, in the dtype and on the devices of the case."""
        ...

    def release(self) -> None:
        """Free what depends on the case before: the peaks of memory are reset after it."""
        return

    def prepare(self, batch_size: int, tokens: int, new_tokens: int) -> None:  # noqa: ARG002 - not needed
        """Reserve what depends on the case, so that it takes the same memory alone and in a sweep.

        Args:
            batch_size: Sequences of the largest batch.
            tokens: Tokens of the longest sequence, with those that are generated.
            new_tokens: Tokens that are generated for each prompt; 0 for scoring.
        """
        return

    def idle(self) -> None:
        """Wait until nothing of the call before runs: the clock of the next batch starts then."""
        return

    def generate(self, token_ids: list[list[int]], new_tokens: int) -> Texts | list[list[int]]:
        """Continue each prompt greedily by `new_tokens` tokens, past end-of-sequence tokens, in one batch."""
        raise NotImplementedError

    def score(self, token_ids: list[list[int]], from_position: list[int]) -> list[list[float]] | None:
        """Return the log-likelihood of each token of a sequence from a position on, given the tokens before it.

        None where the sequences were read and log-likelihoods cannot be known.
        """
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
