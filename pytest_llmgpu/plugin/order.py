"""The order of measurements: a model is loaded once, and small batches run before the large ones that may not fit."""

from __future__ import annotations

__all__ = []
