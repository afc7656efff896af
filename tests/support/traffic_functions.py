"""Functions of the tests of traffic and of work passes, which ranks import by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.inference.batching import Batch, Plan, plan
from pytest_llmgpu.ranks import traffic
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.recording import work
from pytest_llmgpu.recording.work import WorkReply
from pytest_llmgpu.report.result import Collective
from pytest_llmgpu.strategies.protocol import Loaded
from support.request_factory import make_requests

if TYPE_CHECKING:
    import torch

BATCH_SIZE = 4

_libraries: list[torch.library.Library] = []
"""An op exists as long as the library that defines it."""


def make_plan() -> Plan:
    """Return a plan of five batches: the last one is smaller, and rows predict different numbers of tokens."""
    requests = [(tuple((7 * row + place) % 40 for place in range(9 + row)), 1 + row % 5) for row in range(18)]
    return plan(make_requests(requests), BATCH_SIZE)


def of_plan(loaded: Loaded, logits: str = scoring.LEAN) -> list[Collective]:
    """Return the traffic of the plan by `traffic.of_plan`."""
    return traffic.of_plan(loaded, make_plan(), logits=logits)


def of_each_batch(loaded: Loaded, logits: str = scoring.LEAN) -> list[list[Collective]]:
    """Return the traffic of each batch of the plan, counted while the batch is scored."""
    batches = make_plan().batches
    return [
        traffic.count(
            lambda one=batch: scoring.run(  # type: ignore[misc]  # mypy takes a default for no type
                loaded.model, [one], input_device=loaded.input_device, devices=loaded.devices, logits=logits
            ),
            world_size=loaded.world_size,
        )
        for batch in batches
    ]


def of_batch(loaded: Loaded, batch: Batch, logits: str) -> list[Collective]:
    """Return the traffic of a batch by its shape, on a device that computes nothing as well."""
    import torch

    ids_BS = torch.zeros(batch.rows, batch.width, dtype=torch.int64)
    rows_N = torch.zeros(batch.predicted, dtype=torch.int64)
    with scoring.way(loaded.model, logits) as way, torch.inference_mode():
        return traffic.count(lambda: way.forward(ids_BS, rows_N), world_size=loaded.world_size)


def reduce_through_shared_memory(_state: RankState) -> None:
    """Define an op with the name and schema of the one that DeepSpeed compiles for all-reduces on a CPU."""
    import torch
    from deepspeed import comm
    from torch import distributed

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(tensor)
        return tensor

    library = torch.library.Library("deepspeed", "DEF")
    library.define("inference_all_reduce_(Tensor(a!) self) -> Tensor(a!)")
    library.impl("inference_all_reduce_", all_reduce, "CPU")
    _libraries.append(library)
    comm.comm.cdb.shm_vector_kernel_level = 2


def reduce_through_the_group(_state: RankState) -> None:
    """Remove the op again."""
    from deepspeed import comm

    comm.comm.cdb.shm_vector_kernel_level = 0
    _libraries.clear()


def measure(loaded: Loaded) -> WorkReply:
    """Run the work passes of the plan, all of them eagerly."""
    return measure_plan(loaded, make_plan(), lambda *_: None)


def measure_plan(
    loaded: Loaded, plan: Plan, on_batch: scoring.OnBatch, traces: Sequence[str | None] = (None, None)
) -> WorkReply:
    """Run the work passes of a plan, all of them eagerly; `traces` are the files of their two traces."""
    with work.scoring_forward(loaded.model, loaded.input_device, scoring.LEAN) as forward:
        program = work.Program(loaded.devices, loaded.dispatched, loaded.model)
        passes = work.record(program, plan, forward, on_batch=on_batch, trace=traces[0])
        return work.measure(program, plan, passes, forward, on_batch=on_batch, trace=traces[1])
