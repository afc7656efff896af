"""Errors that a strategy raises if the memory does not suffice."""

from __future__ import annotations


class DeviceMapSpillError(RuntimeError):
    """The layers do not fit on the devices: accelerate would put some on the CPU or on disk."""


class WorkspaceError(RuntimeError):
    """The workspace of a strategy cannot hold the longest sequence."""

    def __init__(self, tokens_requested: int, tokens_granted: int) -> None:
        """Describe the shortage.

        Args:
            tokens_requested: Tokens of the longest sequence.
            tokens_granted: Tokens that the memory suffices for; 0 if no workspace fits.
        """
        super().__init__(
            f"the workspace holds {tokens_granted} tokens, but the longest sequence has {tokens_requested}: "
            "use a smaller batch size"
        )
        self.tokens_requested = tokens_requested
        self.tokens_granted = tokens_granted
