"""Functions of the tests of work passes, which ranks import by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.inference.batching import Plan
from pytest_llmgpu.ranks import work
from pytest_llmgpu.ranks.work import WorkReply
from pytest_llmgpu.strategies.protocol import Loaded
from support.traffic_functions import make_plan


def measure(loaded: Loaded) -> WorkReply:
    """Run the work passes of the plan, all of them eagerly."""
    return measure_plan(loaded, make_plan(), lambda *_: None)


def measure_plan(loaded: Loaded, plan: Plan, on_batch: work.BatchReport) -> WorkReply:
    """Run the work passes of a plan, all of them eagerly."""
    with work.scoring_forward(loaded, scoring.LEAN) as forward:
        passes = work.record(loaded, plan, forward, on_batch=on_batch)
        return work.measure(loaded, plan, passes, forward, on_batch=on_batch)


def flops_of_modules(loaded: Loaded) -> dict[str, int]:
    """Return the FLOPs of each leaf module with weights in a forward of 2 rows of 8 tokens, counted on its own."""
    import torch

    model: Any = loaded.model
    found: Counter[str] = Counter()

    def counted(name: str, original: Any) -> Any:
        def forward(*arguments: Any, **named: Any) -> Any:
            answers: list[Any] = []
            found[name] += work.count_ops(lambda: answers.append(original(*arguments, **named))).flops
            return answers[0]

        return forward

    leaves = {name: module for name, module in model.named_modules() if not [*module.children()]}
    originals = {name: module.forward for name, module in leaves.items()}
    for name, module in leaves.items():
        module.forward = counted(name, originals[name])
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros(2, 8, dtype=torch.int64), use_cache=False)
    finally:
        for name, module in leaves.items():
            module.forward = originals[name]
    return dict(found)
