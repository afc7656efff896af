"""iok on a CPU: `--strategy=support.emulated_iok:EmulatedInjection`, with the kernels of `emulated_inference`.

LLMGPU_EMULATED_FREE_BYTES is the free memory that cudaMemGetInfo returns in each rank; the default is large.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies.iok import KernelInjection

if TYPE_CHECKING:
    import pytest

FREE_BYTES = "LLMGPU_EMULATED_FREE_BYTES"


class EmulatedInjection(KernelInjection):
    """Kernel injection without a build and without a GPU."""

    def check_machine(self, case: Case) -> None:
        """Accept every machine."""

    def build(self, case: Case, say: Callable[[str], None]) -> None:
        """Do nothing: there is nothing to compile."""

    def open_kernels(self, case: Case) -> None:  # noqa: ARG002 - one op serves every case
        """Give the process emulated kernels."""
        # DeepSpeed reads it on import. Without it DeepSpeed warns that there is no GPU.
        os.environ["DS_ACCELERATOR"] = "cpu"
        from deepspeed import ops
        from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

        from support.emulated_inference import EmulatedInference

        # Without this, ranks on a CPU compile an extension for all-reduces through shared memory.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        free_bytes = os.environ.get(FREE_BYTES)
        BaseOp.inference_module = EmulatedInference(int(free_bytes)) if free_bytes else EmulatedInference()


def reset_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put DeepSpeed into the state of a new process until the test ends: it numbers the layers of a process."""
    for name, value in (("DS_ACCELERATOR", "cpu"), ("LOCAL_SIZE", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    from deepspeed.model_implementations.transformers.ds_transformer import DeepSpeedTransformerInference
    from deepspeed.ops.transformer.inference.ds_attention import DeepSpeedSelfAttention
    from deepspeed.ops.transformer.inference.ds_mlp import DeepSpeedMLP
    from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

    monkeypatch.setattr(DeepSpeedTransformerInference, "layer_id", 0)
    monkeypatch.setattr(DeepSpeedTransformerInference, "workspace", None)
    monkeypatch.setattr(DeepSpeedSelfAttention, "num_layers", 0)
    monkeypatch.setattr(DeepSpeedSelfAttention, "_qkv_buffers", [])
    monkeypatch.setattr(DeepSpeedMLP, "_inter_w_buffers", [])
    monkeypatch.setattr(BaseOp, "inference_module", None)
