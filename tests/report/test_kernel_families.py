from __future__ import annotations

import pytest

from pytest_llmgpu.report.kernel_families import collective_of, family_of

_VECTORIZED = "void at::native::vectorized_elementwise_kernel<4, "
_UNROLLED = "void at::native::unrolled_elementwise_kernel<"
_REDUCE = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
_NAMES = {
    "GEMM": (
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn_align8>(Params)",
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel",
        "volta_sgemm_128x64_tn",
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false>(cublasGemmSmallNParams)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __half, __half>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __half, __half, float, __half, true, false, false>(Params)",
        "triton_tem_fused_mm_3",
        "triton_red_fused__to_copy_add_index_put_mean_mul_pow_rsqrt_select_slice_sum_transpose_unsqueeze_view_2",
    ),
    "attention": (
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Params)",
        "fmha_cutlassF_f16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<half_t>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128_4x1x1_cga1x1x1_kernel0_0",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, float const*)",
        "void attn_softmax_v2<__half, 8>(__half*, __half*, __half*, float, bool, bool)",
        "triton_tem_fused_flex_attention_0",
    ),
    "norm": (
        f"{_REDUCE}at::native::MeanOps<float, float, float, float>, unsigned int, float, 4, 4> >(Params)",
        f"{_VECTORIZED}at::native::rsqrt_kernel_cuda(at::TensorIteratorBase&)::{{lambda()#1}} >",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>(int)",
        "void pre_rms_norm<__half, 2, 1, 1024, 1>(__half*, __half*, __half const*, __half const*, float, int)",
        "void fused_residual_ln<__half, 1, 2, 512, 1, false>(__half*, __half const*, __half const*)",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
    ),
    "elementwise": (
        f"{_VECTORIZED}at::native::CUDAFunctor_add<c10::Half>, std::array<char*, 3ul> >(int, Functor, std::array)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<NegFunctor> >(int, Functor)",
        "void fused_bias_residual<__half>(__half*, __half const*, __half const*, __half const*)",
        "void vector_add_kernel<__half>(__half*, __half const*, __half const*, float, int)",
        "void apply_rotary_pos_half<__half, 64>(__half*, __half*, unsigned int, unsigned int)",
        "triton_poi_fused_mul_silu_4",
    ),
    "copy": (
        "Memcpy DtoH (Device -> Pinned)",
        "Memset (Device)",
        f"{_UNROLLED}at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda()#3}}, 1, StoreWithCast>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4, 64, 64>(Params)",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::Half, long, unsigned int, 2, 2, -2, true>",
        f"{_VECTORIZED}at::native::FillFunctor<int>, std::array<char*, 1ul> >(int, at::native::FillFunctor<int>)",
        "void bias_add_transform_0213<__half>(__half*, __half*, __half*, __half const*, __half const*, int, int)",
        "triton_poi_fused_cat_7",
    ),
    "collective": (
        "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "Memcpy PtoP (Device -> Device)",
        "void c10d::symmetric_memory::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**)",
    ),
    "other": (
        "void at::native::cunn_SoftMaxForward<8, float, float, float, LogSoftMaxForwardEpilogue>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*, float const*)",
        f"{_REDUCE}at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float> > > >(Params)",
        "my_kernel",
        "",
    ),
}


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family, names in _NAMES.items() for name in names],
    ids=lambda text: text[:60],
)
def test_a_kernel_has_the_family_of_its_name(family: str, name: str) -> None:
    """The names are those that libraries give their kernels today; a name that is not known is `other`."""
    assert family_of(name) == family


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("Memcpy PtoP (Device -> Device)", "peer_copy"),
        ("ncclDevKernel_Reduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
        ("void c10d::symmetric_memory::two_shot_all_reduce_kernel<c10::BFloat16>(Params)", "all_reduce"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "other"),
    ],
)
def test_a_collective_is_known_by_its_kernel(name: str, collective: str) -> None:
    """Its calls are joined over the ranks by this name."""
    assert family_of(name) == "collective"
    assert collective_of(name) == collective
