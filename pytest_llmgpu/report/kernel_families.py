"""The family of a kernel by its name: one table for all that groups kernels."""

from __future__ import annotations

import re
from functools import lru_cache

from pytest_llmgpu.report.work import KernelFamily

_FAMILIES: tuple[tuple[KernelFamily, tuple[str, ...]], ...] = (
    # NCCL; torch's symmetric memory.
    ("collective", (r"^nccl", r"(one|two)_shot_all_", r"multimem_all_")),
    # A softmax over the vocabulary is no attention.
    ("other", (r"LogSoftMax", r"softmax_warp_forward<[^()]*, true, (true|false)>", r"^triton_\w*log_softmax")),
    (
        "attention",
        (
            # Flash attention, CUTLASS's memory-efficient attention, cuDNN, FlexAttention.
            *(r"flash_(fwd|attn)", r"flash::", r"[Ff]lash[Aa]tt", r"fmha", r"sdpa", r"[Aa]ttention", r"_attn_fwd"),
            # The softmax between two products, DeepSpeed's as well.
            r"[Ss]oft_?[Mm]ax",
        ),
    ),
    # By what a kernel of torch.compile fuses; a template (`tem`) is a product, so is a sum over products of one row.
    ("GEMM", (r"^triton_tem_", r"^triton_(red|per)_\w*_mul_\w*sum_\w*unsqueeze")),
    ("norm", (r"^triton_(red|per|poi|mix)_\w*(rsqrt|norm|mean)",)),
    ("copy", (r"^triton_poi_\w*fused_(cat|clone|copy|_to_copy|stack|index|embedding)_?\d*$",)),
    ("elementwise", (r"^triton_(poi|red|per|mix|for)_",)),
    (
        "norm",
        (
            *(r"[Ll]ayer_?[Nn]orm", r"rms_?norm", r"RMSNorm", r"GroupNorm", r"RowwiseMoments", r"rsqrt_kernel"),
            r"MeanOps",  # the models of transformers take no mean elsewhere
            r"fused(_residual)?_ln",  # DeepSpeed
        ),
    ),
    # Before GEMM and elementwise: names of copies contain templates of both.
    (
        "copy",
        (
            *(r"^Mem(cpy|set)", r"copy_kernel", r"CatArrayBatchedCopy", r"FillFunctor"),
            *(r"index_?[Ss]elect", r"gather_kernel", r"index_copy"),
            *(r"bias_add_transform", r"transform4d"),  # DeepSpeed
        ),
    ),
    # nvjet: cuBLAS for Hopper and later. splitKreduce adds the parts of a product.
    (
        "GEMM",
        (
            r"nvjet",
            r"(?i)gemm|gemv",
            r"splitK",
            r"cutlass",
            r"xmma",
            r"cublas",
            r"dot_kernel",
            r"_mm_kernel",
            r"matmul",
        ),
    ),
    (
        "elementwise",
        (
            *(r"elementwise", r"pointwise", r"CUDAFunctor", r"BinaryFunctor"),
            # DeepSpeed, csrc/transformer/inference.
            *(r"fused_bias_", r"fused_gate", r"vector_add", r"rotary_pos", r"residual_add", r"gelu", r"silu", r"relu"),
        ),
    ),
)
"""Family and regular expressions; the first that is found in a name decides."""

_TABLE = tuple((family, tuple(map(re.compile, patterns))) for family, patterns in _FAMILIES)

_COLLECTIVES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("all_reduce", r"All_?Reduce|all_reduce"),
        ("all_gather", r"All_?Gather|all_gather"),
        ("reduce_scatter", r"Reduce_?Scatter|reduce_scatter"),
        ("broadcast", r"Broadcast|broadcast"),
        ("all_to_all", r"All_?[Tt]o_?All|all_to_all"),
        ("send_recv", r"SendRecv"),
        ("reduce", r"Reduce_"),
    )
)


@lru_cache(maxsize=4096)
def family_of(name: str) -> KernelFamily:
    """Return the family of a kernel; `other` for a name that the table does not know."""
    return next((family for family, patterns in _TABLE if any(one.search(name) for one in patterns)), "other")


@lru_cache(maxsize=1024)
def collective_of(name: str) -> str:
    """Return the kind of a collective by the name of its kernel; `other` for one that is not known."""
    return next((kind for kind, pattern in _COLLECTIVES if pattern.search(name)), "other")
