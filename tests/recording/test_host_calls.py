from __future__ import annotations

import gc
import sys
from functools import partial

import torch
from support import tiny_model

from pytest_llmgpu.recording import host_calls


def test_calls_of_a_forward_are_exact() -> None:
    """They are equal for every number of rows above 1, and a hook is one more call of its source file."""
    model = tiny_model.random_model()

    def forward(rows: int) -> None:
        with torch.inference_mode():
            model(input_ids=torch.zeros(rows, 8, dtype=torch.int64), use_cache=False)

    forward(2)
    first = host_calls.count_calls(partial(forward, 2))
    assert host_calls.count_calls(partial(forward, 4)) == first
    assert first.python == sum(first.by_file.values()) > 100
    assert first.c > 100
    assert first.by_file["torch/nn/modules/linear.py"] == 8
    assert first.python_version == f"{sys.version_info.major}.{sys.version_info.minor}"
    handle = model.register_forward_hook(lambda *_: None)
    more = host_calls.count_calls(partial(forward, 2))
    handle.remove()
    assert more.by_file["recording/test_host_calls.py"] == first.by_file["recording/test_host_calls.py"] + 1


def test_the_profiler_and_the_garbage_collector_are_restored() -> None:
    """Calls of C are counted without the one that ends the counting; the collector is off while they are counted."""
    before = sys.getprofile()
    collecting: list[bool] = []
    found = host_calls.count_calls(lambda: collecting.append(gc.isenabled()))
    assert (found.python, found.c, collecting) == (1, 2, [False])
    assert (sys.getprofile(), gc.isenabled()) == (before, True)
