"""The family of a kernel by its name: one table for all that groups kernels."""

from __future__ import annotations

import re
from functools import lru_cache

from pytest_llmgpu.report.work import KernelFamily

_FAMILIES: tuple[tuple[KernelFamily, str], ...] = (
    # NCCL; torch's symmetric memory; copies between GPUs, which wait for the other one and for a link that slept.
    ("collective", r"^nccl|(one|two)_shot_all_|multimem_all_|^Memcpy PtoP"),
    # A softmax over the vocabulary is no attention.
    ("other", r"LogSoftMax|softmax_warp_forward<[^()]*, true, (true|false)>|^triton_\w*log_softmax"),
    # Flash attention, CUTLASS's memory-efficient attention, cuDNN, FlexAttention.
    ("attention", r"flash_(fwd|attn)|flash::|[Ff]lash[Aa]tt|fmha|sdpa|[Aa]ttention|_attn_fwd"),
    # The softmax between two products, DeepSpeed's as well.
    ("attention", r"[Ss]oft_?[Mm]ax"),
    # By what a kernel of torch.compile fuses; a template (`tem`) is a product, so is a sum over products of one row.
    ("GEMM", r"^triton_tem_|^triton_(red|per)_\w*_mul_\w*sum_\w*unsqueeze"),
    ("norm", r"^triton_(red|per|poi|mix)_\w*(rsqrt|norm|mean)"),
    ("copy", r"^triton_poi_\w*fused_(cat|clone|copy|_to_copy|stack|index|embedding)_?\d*$"),
    ("elementwise", r"^triton_(poi|red|per|mix|for)_"),
    # MeanOps: the models of transformers take no mean elsewhere. fused_ln: DeepSpeed.
    ("norm", r"[Ll]ayer_?[Nn]orm|rms_?norm|RMSNorm|GroupNorm|RowwiseMoments|rsqrt_kernel|MeanOps|fused(_residual)?_ln"),
    # Before GEMM and elementwise: names of copies contain templates of both. The last two are of DeepSpeed.
    ("copy", r"^Mem(cpy|set)|copy_kernel|CatArrayBatchedCopy|FillFunctor|index_?[Ss]elect|gather_kernel|index_copy"),
    ("copy", r"bias_add_transform|transform4d"),
    # nvjet: cuBLAS for Hopper and later. splitKreduce adds the parts of a product.
    ("GEMM", r"nvjet|(?i:gemm|gemv)|splitK|cutlass|xmma|cublas|dot_kernel|_mm_kernel|matmul"),
    ("elementwise", r"elementwise|pointwise|CUDAFunctor|BinaryFunctor"),
    # DeepSpeed, csrc/transformer/inference.
    ("elementwise", r"fused_bias_|fused_gate|vector_add|rotary_pos|residual_add|gelu|silu|relu"),
)
"""Family and regular expression; the first one that is found in a name decides."""

_COLLECTIVES = (
    ("all_reduce", r"All_?Reduce|all_reduce"),
    ("all_gather", r"All_?Gather|all_gather"),
    ("reduce_scatter", r"Reduce_?Scatter|reduce_scatter"),
    ("broadcast", r"Broadcast|broadcast"),
    ("all_to_all", r"All_?[Tt]o_?All|all_to_all"),
    ("send_recv", r"SendRecv"),
    ("peer_copy", r"^Memcpy PtoP"),
    ("reduce", r"Reduce_"),
)


@lru_cache(maxsize=4096)
def family_of(name: str) -> KernelFamily:
    """Return the family of a kernel; `other` for a name that the table does not know."""
    return next((family for family, pattern in _FAMILIES if re.search(pattern, name)), "other")


@lru_cache(maxsize=1024)
def collective_of(name: str) -> str:
    """Return the kind of a collective by the name of its kernel; `other` for one that is not known."""
    return next((kind for kind, pattern in _COLLECTIVES if re.search(pattern, name)), "other")
