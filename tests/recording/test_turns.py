"""Passes in a worker: the same ops as in a rank, however the batches are run, and an error where it happens."""

from __future__ import annotations

import pytest
import torch
from support import traffic_functions
from support.report_factory import known

from pytest_llmgpu.inference.batching import Plan
from pytest_llmgpu.recording import turns
from pytest_llmgpu.recording.work import WorkReply

_CPU = torch.device("cpu")


class _Model(torch.nn.Module):
    """Adds as often as a batch has rows."""

    def forward(self, rows: int) -> None:
        for _ in range(rows):
            torch.ones(1) + 1


def _passes(plan: Plan, *, eager: bool) -> tuple[list[int], WorkReply]:
    """Run passes as a worker does: each batch in this thread, under what the passes have set up."""
    model, wanted = _Model(), []
    found = turns.start(_CPU, plan, None, dispatched=False, eager=eager)
    while isinstance(found, int):
        wanted.append(found)
        model(plan.batches[found].rows)
        found = turns.go_on(_CPU)
    return wanted, found


def test_ops_of_the_main_thread_are_counted_and_calls_of_the_host_are_not() -> None:
    """On a CPU the first passes run no batch; then the middle batch is run once."""
    plan = traffic_functions.make_plan()
    wanted, reply = _passes(plan, eager=False)
    assert wanted == []
    wanted, reply = _passes(plan, eager=True)
    assert wanted == reply.eager_batches == [3]
    assert (reply.work.ops or {})["aten::add"] == plan.batches[3].rows
    assert known(reply.work.ops_by_module)["model"] == {"aten::add": 4, "aten::ones": 4}
    assert (reply.work.flops, reply.work.host_calls) == (None, None)
    assert {"flops", "host_calls"} <= reply.work.why.keys()


def test_an_error_of_the_passes_is_raised_in_the_main_thread() -> None:
    """A plan without batches has no middle one."""
    empty = Plan(requests=traffic_functions.make_plan().requests, batches=[], sha256="")
    turns.start(_CPU, empty, None)
    with pytest.raises(IndexError):
        turns.start(_CPU, empty, None, eager=True)
