"""Tasks: what is asked of the model, and what counts as right."""

from __future__ import annotations

__all__: list[str] = []
