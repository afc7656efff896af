"""tp: every layer's weights are cut over the devices, one process each, and partial results are summed by all-reduce.

By transformers' own plan, or by DeepSpeed's AutoTP. Each rank holds the whole batch and gives the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies import divisibility, process_group
from pytest_llmgpu.strategies.deepspeed import kernels
from pytest_llmgpu.strategies.protocol import Loaded

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["TensorParallel"]

_AUTOTP_CPU_DTYPES = ("float32", "bfloat16")
_CPU_SUMS = "deepspeed_shm_comm"
_ON_CPU = " (a CPU counts as 1: --llmgpu-devices=2 starts two processes on it)"


class TensorParallel:
    """Tensor parallelism: weights stay where they are, activations are summed twice a layer."""

    name = "tp"
    backend = "transformers"

    def check(self, case: Case, source: ModelSource) -> None:
        """Refuse a single device, what cannot be cut evenly, and a dtype that DeepSpeed does not know on a CPU."""
        if case.devices < 2:  # noqa: PLR2004 - one device has nobody to share with
            where = _ON_CPU if case.device == "cpu" else ""
            raise ValueError(f"--llmgpu-devices={case.devices}: strategy tp needs at least 2{where}")
        divisibility.check_divisible(case, source)
        # Its accelerator allows float16 on some CPUs; a refusal that hangs on the machine helps nobody.
        if case.backend == "deepspeed" and case.device == "cpu" and case.dtype not in _AUTOTP_CPU_DTYPES:
            raise ValueError(
                f"--llmgpu-dtype={case.dtype}: DeepSpeed on a CPU knows {' and '.join(_AUTOTP_CPU_DTYPES)}; "
                "--llmgpu-tp-backend=transformers takes the others"
            )

    def ranks(self, devices: int) -> int:
        """Return one process per device."""
        return devices

    def build(self, case: Case, say: Callable[[str], None]) -> None:
        """Say that DeepSpeed will compile its sums for a CPU, where it has not: the ranks do it as they load."""
        if case.backend == "deepspeed" and case.device == "cpu" and not kernels.is_compiled(_CPU_SUMS):
            say("DeepSpeed compiles its all-reduce for CPUs as it loads (once; about a minute) ...")

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load this rank's part of every layer."""
        if case.backend == "deepspeed":
            from pytest_llmgpu.strategies.deepspeed.engine import inject

            return inject(case, source, replace_with_kernel_inject=False)
        import torch

        device, rank, world_size = process_group.join(case)
        model = _planned(case, source, getattr(torch, case.dtype), device)
        return Loaded(
            model=model,
            config=model.config,
            input_device=device,
            devices=(device,),
            rank=rank,
            world_size=world_size,
        )

    def prepare(self, loaded: Loaded, batch_size: int, tokens: int) -> None:
        """Do nothing: no buffer of tp depends on the batch size."""


def _planned(case: Case, source: ModelSource, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model as transformers' plan for its class shards it."""
    from transformers.distributed.configuration_utils import DistributedConfig

    skeleton = models.skeleton(source, dtype)
    if not skeleton.tp_plan:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {type(skeleton).__name__}: "
            "--llmgpu-tp-backend=deepspeed may know how to cut it"
        )
    plan = DistributedConfig(tp_size=case.devices)
    if source.load_format != "dummy":
        return models.checkpoint(source, dtype, distributed_config=plan)
    # What from_pretrained itself calls between building the model and reading its files.
    resolved, _, mesh = type(skeleton).prepare_distribute_model(plan)
    sharded: PreTrainedModel = type(skeleton).maybe_distribute_model(skeleton, resolved, mesh)
    models.materialise(sharded, lambda _: device, seed=case.seed, dtype=dtype)
    sharded.eval()
    return sharded
