"""The logits of a batch that are computed, and the log-probabilities that are selected from them.

Shapes: B rows of a batch, S tokens of its longest row, N predicted tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LEAN, FULL_LOGITS = "loglikelihood", "loglikelihood_full_logits"

WORKLOADS = {"lean": LEAN, "harness": FULL_LOGITS}
"""The value of `--llmgpu-scoring` to the value of `Case.workload`."""

_MOST_BYTES = 64 * 2**20


class EndingHead:
    """A context manager in which the output head gets only the hidden states that predict a token of an ending.

    A hook replaces the head's input [B, S, H] by its rows [1, N, H] just before the head. All other steps of the
    forward run unchanged, also those after the head: scaling and capping of logits, heads split over devices,
    accelerate's hooks. The tensor [B, S, V] never exists.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]  # every transformers model has it
        if head is None:
            raise ValueError(f"{type(model).__name__} has no output head: a causal language model is needed")
        self._model = model
        self._head: torch.nn.Module = head
        self.rows_N: torch.Tensor | None = None
        """The rows of [B * S, H] whose logits the next forward computes."""

    def __enter__(self) -> EndingHead:  # noqa: PYI034 - typing.Self needs Python 3.11
        # Before all other hooks, because tensor parallelism replicates the head's input in a hook.
        self._handle = self._head.register_forward_pre_hook(self._gather, prepend=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.remove()

    def forward(self, ids_BS: torch.Tensor, rows_N: torch.Tensor, **cached: Any) -> torch.Tensor:
        """Return the logits [1, N, V] of the given rows of the hidden states.

        Args:
            ids_BS: The input ids.
            rows_N: The rows of [B * S].
            cached: Further arguments of the model, for a forward with a KV cache.
        """
        self.rows_N = rows_N
        # No attention mask: with padding on the right and causal attention, no scored token depends on the padding.
        logits_1NV: torch.Tensor = self._model(input_ids=ids_BS, use_cache=bool(cached), **cached).logits
        if logits_1NV.shape[:2] != (1, len(rows_N)):
            raise ValueError(
                f"{type(self._model).__name__} does not call its output head: its logits have shape {logits_1NV.shape}"
            )
        return logits_1NV

    def log_probabilities(self, ids_BS: torch.Tensor, rows_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """Return the float32 log-probability [N] of the target of each row."""
        return log_probabilities(self.forward(ids_BS, rows_N)[0], targets_N)

    def _gather(self, _head: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        assert self.rows_N is not None
        hidden_BSH, *others = inputs
        # The devices differ only if the last layer and the head are on different ones, as with tied embeddings.
        rows_N = self.rows_N.to(hidden_BSH.device, non_blocking=True)
        return hidden_BSH.flatten(0, 1).index_select(0, rows_N).unsqueeze(0), *others


class FullLogits:
    """A context manager that scores as lm-evaluation-harness 0.4.13 does, with the same memory use.

    The model computes the logits of every position and keeps its KV cache until the forward ends (`HFLM._model_call`
    does not change the model's `use_cache`). Their log-softmax exists at the same time, in the model's dtype. The
    selected values are summed in float32, whereas the harness sums in the model's dtype; this needs no more memory and
    gives fewer ties. Strategy iok always has its KV cache in its workspace, so only its logits differ.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __enter__(self) -> FullLogits:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing, since `__enter__` changes nothing."""

    def forward(self, ids_BS: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - all rows are computed
        """Return the logits [B, S, V] of every position."""
        logits_BSV: torch.Tensor = self._model(input_ids=ids_BS, use_cache=True).logits
        if logits_BSV.shape[:2] != ids_BS.shape:
            raise ValueError(
                f"{type(self._model).__name__} does not return the logits of every position: their shape is "
                f"{logits_BSV.shape}"
            )
        return logits_BSV

    def log_probabilities(self, ids_BS: torch.Tensor, rows_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """Return the log-probability [N] of the target of each row, rounded to the model's dtype, as float32."""
        import torch

        logp_BSV = torch.log_softmax(self.forward(ids_BS, rows_N), dim=-1)
        return logp_BSV.flatten(0, 1)[rows_N, targets_N].float()


Way = EndingHead | FullLogits


def way(model: torch.nn.Module, workload: str) -> Way:
    """Return the context manager of a `Case.workload`; enter it before the first forward."""
    if workload not in WORKLOADS.values():
        raise ValueError(f"workload {workload!r} is not allowed: allowed are {', '.join(WORKLOADS.values())}")
    return FullLogits(model) if workload == FULL_LOGITS else EndingHead(model)


def log_probabilities(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, *, most_bytes: int = _MOST_BYTES
) -> torch.Tensor:
    """Return the float32 log-probability [N] of each row's target.

    Args:
        logits_NV: They may be overwritten.
        targets_N: The token of each row.
        most_bytes: The maximum size of the float32 log-probabilities that exist at one time.
    """
    import torch

    if logits_NV.dtype == torch.float32 and logits_NV.device.type == "cpu":
        # In place takes half the time, and is safe: ATen's vec_log_softmax_lastdim writes a row after its sum is known.
        torch.log_softmax(logits_NV, dim=-1, out=logits_NV)
        return logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    rows = max(1, most_bytes // (4 * logits_NV.shape[-1]))
    picked = [
        torch.log_softmax(logits_nV, dim=-1, dtype=torch.float32).gather(1, targets_n.unsqueeze(1)).squeeze(1)
        for logits_nV, targets_n in zip(logits_NV.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.cat(picked)
