"""Errors that a strategy raises where memory does not suffice."""

from __future__ import annotations

__all__ = ["DeviceMapSpillError", "WorkspaceError"]


class DeviceMapSpillError(RuntimeError):
    """The layers do not fit on the devices: accelerate would put some on the CPU or on disk."""


class WorkspaceError(RuntimeError):
    """A strategy's workspace cannot hold the longest sequence."""

    def __init__(self, tokens_requested: int, tokens_granted: int) -> None:
        """Remember both.

        Args:
            tokens_requested: Tokens of the longest sequence.
            tokens_granted: Tokens there is memory for, 0 for none.
        """
        super().__init__(
            f"the workspace has room for {tokens_granted} tokens, and the longest sequence has {tokens_requested}"
        )
        self.tokens_requested = tokens_requested
        self.tokens_granted = tokens_granted
