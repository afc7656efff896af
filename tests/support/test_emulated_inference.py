"""The memory of the emulated kernels; that their numbers are right is a test of strategy iok."""

from __future__ import annotations

import pytest

from support.emulated_inference import EmulatedInference, free_bytes_granting, granted_tokens

_GIB = 2**30


@pytest.mark.parametrize(
    ("layers", "heads", "hidden", "tp", "free_gib"),
    [(32, 32, 4096, 1, 0.56), (40, 40, 5120, 1, 0.79), (60, 52, 6656, 2, 0.78), (80, 64, 8192, 4, 0.69)],
    ids=["7b", "13b", "33b", "65b"],
)
def test_23_tokens_are_granted_where_the_study_got_them(
    layers: int, heads: int, hidden: int, tp: int, free_gib: float
) -> None:
    """Batch size 32 in float16: the free memory that explains the study's drop from 82 % to 26 %."""
    shape = {"layers": layers, "heads": heads, "hidden": hidden, "batch": 32, "tp": tp}
    near = [granted_tokens(int(gib * _GIB), **shape) for gib in (free_gib - 0.005, free_gib + 0.005)]
    assert near[0] <= 23 <= near[1]
    least = free_bytes_granting(23, **shape)
    assert (granted_tokens(least - 1, **shape), granted_tokens(least, **shape)) == (22, 23)


def test_a_workspace_that_is_large_enough_is_kept() -> None:
    """It grows and never shrinks; but the size that it grows from is that of the last demand."""
    op = EmulatedInference()

    def allocated(batch: int) -> int:
        op.allocate_workspace_fp32(128, 4, 1, batch, 2, 1, False, 0, 64, 1)
        assert op.batch_size == batch
        return op.workspace_bytes

    largest = allocated(4)
    assert allocated(2) == largest
    assert 0 < allocated(3) < largest
