"""Bounds of the figures in a report: the decoder checks them, and the JSON Schema publishes them.

The upper bounds are far above every real value. They keep sums of figures finite.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

_LARGEST_INT = 2**63 - 1
_LARGEST_S = 1e12  # 30,000 years

Count = Annotated[int, Meta(ge=0, le=_LARGEST_INT)]
"""A count, an index or a size in bytes."""

Positive = Annotated[int, Meta(ge=1, le=_LARGEST_INT)]
"""A count of something that must be there."""

Amount = Annotated[float, Meta(ge=0, lt=2.0**63)]
"""A quantity that is never negative, such as a rate or an energy."""

LARGEST = 2.0**63
"""Every number is below it."""
Number = Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]
"""A number of any sign."""

Fraction = Annotated[float, Meta(ge=0, le=1)]
"""A part of a whole."""

Seconds = Annotated[float, Meta(ge=0, lt=_LARGEST_S)]
"""A duration in seconds."""

Elapsed = Annotated[float, Meta(gt=0, lt=_LARGEST_S)]
"""A measured duration in seconds, which no clock reports as 0."""

Moment = Annotated[float, Meta(gt=-_LARGEST_S, lt=_LARGEST_S)]
"""A time in seconds before or after a start."""

Reasons = Annotated[dict[str, str], Meta(description="Field name mapped to the reason why its value is null.")]
"""The `why` of a record."""
