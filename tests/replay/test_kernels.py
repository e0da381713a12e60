"""What kernels do, by names that real profiles of several libraries, chips and frameworks have."""

from __future__ import annotations

import pytest

from pase.replay.kernels import is_exchange, operation_of, precision_of, work_of
from pase.replay.types import OPERATIONS

WORK = {
    "product": [
        "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x6_tn_align8>(Params)",
        "void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c::GemmKernel>(Params)",
        "Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT64x32x128_MI16x16x1_SN_LDSB1",
        "ampere_sgemm_128x64_nn",
        "void gemmSN_TN_kernel<float, 256, 4, 2, 8, 4, 4, true>(int)",
        "gemm_fusion_dot_27",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)",
        "void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2>>>(Params)",
        "void flash::compute_attn_ws<Flash_fwd_kernel_traits<192, 128>>(int)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "attn_fwd",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
    ],
    "convolution": [
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>(P)",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt64x64x16_wt16x16x4_ws1x1_wr2x2",
        "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28Gridwise",
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4",
    ],
    "norm": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
        "void layer_norm::ln_bwd_kernel<layer_norm::Kernel_traits<__nv_bfloat16>>(BwdParams)",
        "void at::native::batch_norm_backward_kernel<c10::BFloat16, c10::BFloat16, float, int>(int)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(R)",
        "triton_red_fused_native_layer_norm_3",
        "input_reduce_fusion_21",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<CUDAFunctor_add<T>>>",
        "triton_poi_fused_add_mul_7",
        "void at::native::vectorized_elementwise_kernel<4, fbgemm_gpu::_float_to_hfp8_gpu(at::Tensor const&, long)>",
        "rotary_kernel",
        "loop_multiply_fusion_1",
    ],
    "copy": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "memcpy32_post",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3>",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>(P)",
        "batched_transpose_32x16_half",
        "void cuda::per_token_cast_to_fp8_with_channels<__nv_bfloat16, 128, false, 128, false>(int)",
        "__amd_rocclr_copyBuffer.kd",
    ],
    "embedding": [
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2>(T)",
        "void at::native::embedding_backward_feature_kernel<float, float, long>(long const*)",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
    ],
    "other": ["my_kernel", "cuda::expand_to_fused_with_scales_impl(int4 const*, int4*, float const*)"],
}
SENDS = {
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "all_reduce",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs4K)": "all_gather",
    "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, 24>(int4*, float*)": "all_to_all",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)": "all_to_all",
    "void deep_ep::internode_ll::combine<true, false, 7168>(void*)": "all_to_all",
    "void dpsk::ep::internode::notify_dispatch<false, 8>(int const*, long*)": "all_to_all",
    "nvshmemi_barrier_all_on_stream_kernel": "barrier",
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "all_reduce",
    "void (anonymous namespace)::multimem_all_reduce_kernel<float>(float*, unsigned long)": "all_reduce",
    "two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>": "all_reduce",
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)": "all_reduce",
    "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<2>": "reduce_scatter",
    "kuserbuffers_pushrecv": "send_recv",
    "Memcpy PtoP (Device -> Device)": "send_recv",
}


@pytest.mark.parametrize(("work", "name"), [(w, n) for w, names in WORK.items() for n in names])
def test_the_work_of_a_kernel(work: str, name: str) -> None:
    assert work_of(name) == work
    assert operation_of(name) == 0


@pytest.mark.parametrize(("name", "operation"), SENDS.items())
def test_what_a_kernel_sends(name: str, operation: str) -> None:
    assert OPERATIONS[operation_of(name)] == operation


def test_dispatch_and_combine_are_told_from_other_collectives() -> None:
    assert [n for n in SENDS if is_exchange(n)] == [n for n, o in SENDS.items() if o == "all_to_all"]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x256x32", "tf32"),
        (WORK["product"][1], "bf16"),
        (WORK["product"][3], "fp8"),
        (WORK["product"][4], "bf16"),
        ("ampere_sgemm_128x64_nn", "fp32"),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_nn", "fp16"),
        ("nvjet_sm90_tst_128x128_64x6_2x1_v_bz_NNT", ""),
    ],
)
def test_the_precision_of_a_product(name: str, precision: str) -> None:
    assert precision_of(name) == precision
