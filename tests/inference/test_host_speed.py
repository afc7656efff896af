from __future__ import annotations

from typing import Any

import torch

from pytest_llmgpu.inference.host_speed import HostReference


def test_each_layer_runs_op_by_op_and_random_numbers_stay() -> None:
    """Layers are modules of their own, called in each run; a fused layer would take hardly any time of the host."""
    before = torch.get_rng_state()
    reference = HostReference(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    called: list[Any] = []
    layers = [module for module in reference._layers.modules() if isinstance(module, torch.nn.TransformerEncoderLayer)]
    for layer in layers:
        layer.linear1.register_forward_hook(lambda module, *_: called.append(module))
    assert reference.seconds() > 0
    assert called == [layer.linear1 for layer in layers]
    assert len({id(parameter) for parameter in reference._layers.parameters()}) == 12 * 12
