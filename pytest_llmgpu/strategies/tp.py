"""tp: the weights of every layer are split over the devices, one process each; an all-reduce sums partial results.

The split follows the plan of transformers or DeepSpeed's AutoTP. Each rank has the whole batch and the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference import models, weights
from pytest_llmgpu.inference.models import SPLIT_COUNTS, ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies import process_group
from pytest_llmgpu.strategies.deepspeed import kernels
from pytest_llmgpu.strategies.protocol import Loaded, Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AUTOTP_CPU_DTYPES = ("float32", "bfloat16")
_UNSPLIT = {f"{method}-checkpoint" for method in ("bitsandbytes", "compressed-tensors", "nvfp4", "torchao")}
"""What transformers 5.23 cannot split; an entry goes once a version can."""
_CPU_SUMS = "deepspeed_shm_comm"
_SPREAD = "expert_parallel"
"""The option of a case whose experts are whole, with the way in which tokens reach them."""
_MOST_DEVICES = 64
"""No node has more."""


class TensorParallel(Strategy):
    """Tensor parallelism: weights stay on their device, activations are summed twice per layer."""

    name = "tp"
    backend = "transformers"
    quantizes = True

    def check(self, case: Case, source: ModelSource) -> None:
        """Refuse a single device, an uneven split, a model without a plan, and a dtype that DeepSpeed lacks."""
        if case.devices < 2:  # noqa: PLR2004 - one device has nothing to split
            where = " (on a CPU, --llmgpu-devices=2 starts two processes)" if case.device == "cpu" else ""
            raise ValueError(f"--llmgpu-devices={case.devices}: strategy tp needs at least 2 devices{where}")
        spread, architecture = case.strategy_options.get(_SPREAD), source.config.get("model_type", "llama")
        ways = models.facts(source).expert_parallel if case.backend != "deepspeed" else ()
        has_plan = case.backend == "deepspeed" or models.facts(source).has_plan
        if spread is not None and spread not in ways:
            lacking = f"{case.backend} does not have it for {source.name} ({architecture})"
            allowed = ", ".join(("off", *ways))
            raise ValueError(f"--llmgpu-tp-expert-parallel={spread}: {lacking}: allowed: {allowed}")
        if spread is None and not has_plan:
            options = [*(f"--llmgpu-tp-expert-parallel={way}" for way in ways[:1]), "--llmgpu-tp-backend=deepspeed"]
            remedies = options if case.strategy == "tp" else ["--llmgpu-devices=1"]
            lacking = f"transformers has no tensor-parallel plan for its architecture ({architecture})"
            remedy = f"use {', '.join(remedies)} or another strategy"
            raise ValueError(f"--llmgpu-model={source.name}: {lacking}: {remedy}")
        if case.quantization in _UNSPLIT:
            raise ValueError(f"--llmgpu-model={source.name}: {case.strategy} splits no {case.quantization}: use mp")
        if case.backend == "deepspeed" and case.quantization is not None:
            remedy = "use transformers"
            raise ValueError(f"--llmgpu-tp-backend=deepspeed: it does not split {case.quantization} weights: {remedy}")
        check_divisible(case, source, (*(SPLIT_COUNTS if has_plan else ()), *(models.EXPERTS if spread else ())))
        # DeepSpeed supports float16 on some CPUs. It is refused on all, so that the result does not depend on the CPU.
        if case.backend == "deepspeed" and case.device == "cpu" and case.dtype not in _AUTOTP_CPU_DTYPES:
            known = f"DeepSpeed on a CPU supports {' and '.join(_AUTOTP_CPU_DTYPES)}"
            remedy = "use one of them, or --llmgpu-tp-backend=transformers"
            raise ValueError(f"--llmgpu-dtype={case.dtype}: {known}: {remedy}")

    def ranks(self, devices: int) -> int:
        """Return one process per device."""
        return devices

    def build(self, case: Case, say: Callable[[str], None]) -> None:
        """Show a line if the ranks will compile DeepSpeed's all-reduce for CPUs while they load."""
        if case.backend == "deepspeed" and case.device == "cpu" and not kernels.is_compiled(_CPU_SUMS):
            say("DeepSpeed compiles its all-reduce for CPUs while it loads (once; about a minute) ...")

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the part of every layer that belongs to this rank."""
        if case.backend == "deepspeed":
            from pytest_llmgpu.strategies.deepspeed.engine import inject

            return inject(case, source, replace_with_kernel_inject=False)
        import torch
        from transformers.distributed.configuration_utils import DistributedConfig

        device, rank, world_size = process_group.join(case)
        dtype = getattr(torch, case.dtype)
        skeleton = weights.skeleton(source, dtype, tied=False)  # a plan names the head, which has no name while tied
        spread: Any = case.strategy_options.get(_SPREAD)
        whole = {"enable_expert_parallel": True, "ep_size": case.devices, "ep_implementation": spread} if spread else {}
        # transformers 5.17 has the first of them alone, and 5.18 to 5.22 lack the last.
        whole = {name: value for name, value in whole.items() if name in DistributedConfig.__dataclass_fields__}
        plan = DistributedConfig(tp_size=case.devices, **whole)
        if source.load_format == "dummy":
            # from_pretrained calls the same between building the model and reading its files.
            resolved, _, mesh = type(skeleton).prepare_distribute_model(plan)
            model: PreTrainedModel = type(skeleton).maybe_distribute_model(skeleton, resolved, mesh)
            model.tie_weights()
            weights.materialise(model, lambda _: device, seed=case.seed)
            model.eval()
        else:
            model = weights.checkpoint(source, dtype, distributed_config=plan)
        # To send tokens the host reads the number of each rank, which a replay could not.
        return Loaded(model, model.config, device, (device,), rank, world_size, recordable=spread != "all_to_all")


def check_divisible(case: Case, source: ModelSource, names: Iterable[str] = SPLIT_COUNTS, *, least: int = 2) -> None:
    """Refuse a number of devices that does not divide the counts of the model that tensor parallelism splits.

    These are the fields `names` of the config; a count that neither the config nor its class has is not checked. The
    strategy runs on `least` devices or more. The ValueError has the count and the numbers of devices that divide all.
    """
    fields = source.decoder | models.facts(source).counts
    counts = {name: fields[name] for name in names if isinstance(fields.get(name), int)}
    uneven = next((name for name, count in counts.items() if count % case.devices), None)
    if uneven is None:
        return
    common = math.gcd(*counts.values())
    allowed = ", ".join(str(number) for number in range(least, _MOST_DEVICES + 1) if common % number == 0)
    allowed = allowed or f"no number from {least} to {_MOST_DEVICES}"
    what = f"the {counts[uneven]} {SPLIT_COUNTS.get(uneven, 'experts')} of {source.name} evenly: allowed: {allowed}"
    raise ValueError(f"--llmgpu-devices={case.devices}: strategy {case.strategy} cannot split {what}")
