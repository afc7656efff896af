"""The speed of the host while eager forwards run: that of a fixed small program of torch beside them.

Small batches wait for the host that launches their kernels, and hosts are shared: the same forwards take up to 1.7
times as long, and the program beside them as well. Its tensors are tiny, and its layers need the caches of a model.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

_LAYERS, _WIDTH, _HEADS = 12, 16, 2
_WARM_UPS = 3


class HostReference:
    """The small program on a device; it takes 0.1 MB there."""

    def __init__(self, device: torch.device) -> None:
        """Prepare it, without a change of torch's random numbers."""
        # With another activation than ReLU or GELU torch does not fuse a layer into one op.
        kind: dict[str, Any] = {"batch_first": True, "norm_first": True, "device": "meta", "dtype": torch.float32}
        layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, 2 * _WIDTH, 0.0, nn.functional.silu, **kind)
        layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False).eval().requires_grad_(False)
        self._layers = layers.to_empty(device=device)
        self._input = torch.zeros(1, _WIDTH, _WIDTH, device=device, dtype=torch.float32)
        for _ in range(_WARM_UPS):
            self.seconds()

    def seconds(self) -> float:
        """Run it on the idle device, and return the time in which the host launched it."""
        with torch.inference_mode():
            began_s = time.perf_counter()
            self._layers(self._input)
            launched_s = time.perf_counter()
        if self._input.is_cuda:
            torch.cuda.synchronize(self._input.device)
        return launched_s - began_s
