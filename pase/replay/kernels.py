"""What a device op does, by the name of its kernel: the kind of work, the precision of a product, what it sends.

The one table of kernel names. The rules are words that libraries use in all of their names, so that kernels of other
shapes, chips and versions are recognized, too. A name that no rule fits is "other".
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, get_args

from pase.replay.types import OPERATIONS

__all__ = [
    "SINGLE",
    "WORKS",
    "KernelWork",
    "before_arguments",
    "collective_operation",
    "is_exchange",
    "operation_of",
    "plain_name",
    "precision_of",
    "work_of",
]

KernelWork = Literal[
    "product",
    "convolution",
    "attention",
    "norm",
    "elementwise",
    "copy",
    "embedding",
    "optimizer",
    "other",
]
"""The kinds of work on a device, except communication. norm: norms, softmax and other reductions, sorts and scans.
copy: copies, casts, fills and changes of layout. embedding: gathers and scatters by index."""
WORKS: tuple[KernelWork, ...] = get_args(KernelWork)

_RULES: tuple[tuple[KernelWork, str], ...] = (
    ("optimizer", r"adam(?!ax)|\bsgd|lamb_|lars_|adagrad|rmsprop|multi_tensor|foreach|_amp_|unscale"),
    ("copy", r"nchwtonhwc|nhwctonchw|transpose|permute|catarray|im2col|col2im|im2d2col|im3d2col"),
    ("attention", r"flash|fmha|sdpa|attn|attention|mha_|bwd_kernel_d[kq]|softmax_?pv"),
    (
        "convolution",
        r"conv(?!ert)|fprop|dgrad|wgrad|winograd|igemm_(fwd|bwd|wrw)|implicit_?gemm|miopensp3|sp3asm",
    ),
    # Quantizing is a cast, also where the kernel's name says for which product it is.
    ("copy", r"(?<!no)cast|quantize|convert_fusion|wrapped_convert"),
    (
        "product",
        r"(?<!fb)gemm|gemv|matmul|nvjet|xmma|cijk_|cutlass|tensorop|splitk|wgmma|dot_kernel|\bdot\b|custom_ampere|"
        r"_mm_|_bmm|triton_tem_",
    ),
    (
        "embedding",
        r"embedding|indexselect|index_select|indexing_backward|index_elementwise|index_put|gather|scatter|take_along|"
        r"indexfunc",
    ),
    (
        "copy",
        r"copy|memcpy|memset|concat|fillfunctor|wrapped_(copy|slice|pad|broadcast)|subtensorop|"
        r"tensortransform|slice_fusion|(copy|pad|broadcast|iota)_fusion|arange|tri[ul]_",
    ),
    (
        "norm",
        r"norm|softmax|reduce|welford|\bbn_|rowwisemoments|argm(ax|in)|top_?k|sort|scan|cumsum|histogram|"
        r"triton_(red|per)_|nll_?loss|cross_?entropy|pool",
    ),
    (
        "elementwise",
        r"elementwise|pointwise|triton_poi_|relu|gelu|silu|swiglu|sigmoid|tanh|dropout|rotary|rope|functor|"
        r"distribution|philox|threefry|loop_\w*fusion|^fusion(_\d+)?$|wrapped_",
    ),
)
"""In this order; the first rule that fits counts. A template's arguments are part of a name."""
_WORK = tuple((work, re.compile(rule, re.IGNORECASE)) for work, rule in _RULES)

_PRECISIONS: tuple[tuple[str, str], ...] = (
    ("fp8", r"fp8|e4m3|e5m2|_f8|qmma"),
    ("fp4", r"fp4|e2m1|nvf4"),
    ("int8", r"int8|_i8|imma|s8s8"),
    ("bf16", r"bf16|bfloat16|_BBS_|_B_BS_|_BSS_"),
    ("fp16", r"fp16|f16|half|h?16816|s884|h884|_HHS_|_HSS_|_H_HS_|hgemm"),
    ("tf32", r"tf32"),
    ("fp64", r"fp64|f64|dgemm|double"),
    ("fp32", r"sgemm|simt|ffma|f32f32_f32f32|_SB_|_S_B_"),
)
SINGLE = ("fp32", "tf32", "32-bit")
"""The precisions of float32 products: with all bits of the factors (no matrix units), with TF32, and one of the two, if
the trace does not say which."""
_PRECISION = tuple((name, re.compile(rule, re.IGNORECASE)) for name, rule in _PRECISIONS)

_EXCHANGE = re.compile(
    r"\b(?:deep|dpsk)?_?ep::|deep_ep|(?:internode|intranode)(?:_ll)?::|low_latency_(?:dispatch|combine)|"
    r"\b(?:moe|expert|token)_?\w*(?:dispatch|combine)\w*_(?:a2a|all_?to_?all|nvshmem)",
    re.IGNORECASE,
)
"""Kernels that send tokens to their experts and back: DeepEP and its like."""
_TRANSPORT = re.compile(
    r"nccl|rccl|nvshmem|rocshmem|mscclpp|userbuffers|\bub_|multimem|symm_?mem|symmetric_memory|"
    r"(?:one|two)_?shot_all_?(?:reduce|gather)|(?:one|two)shotall|cross_device_reduce|custom_?all_?reduce|"
    r"quick_?all_?reduce|allreduce(?:_?fusion)?_?kernel|lamport",
    re.IGNORECASE,
)
"""Kernels of libraries that send between devices, and all-reduces over peer memory (symmetric memory, multicast)."""
_PEER = re.compile(r"memcpy ?p(?:eer)?to?p|peer.?to.?peer|memcpypeer", re.IGNORECASE)
"""Copies from device to device: collectives that copy engines carry out."""
_FUNCTOR = re.compile(r"\w*[Ff]unctor\w*|\w+_kernel_cuda\b|(?:cutlass|ampere|sm\d+)_\w+")
_WORDS = (
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("collectivepermute", "permute"),
    ("collectivebroadcast", "broadcast"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("barrier", "barrier"),
)
_KERNEL_WORDS = (
    ("crossdevicereduce", "all_reduce"),
    ("rrrs", "reduce_scatter"),  # user buffers: "_rr_rs"
    ("fcollect", "all_gather"),
    ("push", "send_recv"),
    ("signal", "barrier"),
    ("sync", "barrier"),
)
"""Words that mean a collective in names of kernels only."""


@lru_cache(maxsize=1 << 16)
def work_of(kernel: str) -> KernelWork:
    """Returns the kind of work of a kernel that does not communicate.

    >>> work_of("nvjet_sm90_tst_128x128_64x6_2x1_v_bz_NNT"), work_of("Cijk_Ailk_Bljk_BBS_BH_MT256x128x64")
    ('product', 'product')
    >>> work_of("loop_add_fusion_4"), work_of("memcpy128"), work_of("anything")
    ('elementwise', 'copy', 'other')
    """
    return next((work for work, rule in _WORK if rule.search(kernel)), "other")


@lru_cache(maxsize=1 << 16)
def precision_of(kernel: str) -> str:
    """Returns the precision of a product, from the name of its kernel; "" if the name does not have it.

    >>> precision_of("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x256x32"), precision_of("nvjet_sm90_tst_128")
    ('tf32', '')
    """
    return next((name for name, rule in _PRECISION if rule.search(kernel)), "")


def is_exchange(name: str) -> bool:
    """Whether a kernel sends tokens to their experts or back (dispatch and combine).

    >>> is_exchange("void deep_ep::internode::combine<false, 8>(int4*)"), is_exchange("combine_kernel")
    (True, False)
    """
    return bool(_EXCHANGE.search(name))


def plain_name(name: str) -> str:
    """Returns a kernel's name without what C++ adds to it, but with the functor. Other names stay as they are.

    >>> plain_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, A>(int, A)")
    'vectorized_elementwise_kernel of CUDAFunctor_add'
    >>> plain_name("void cutlass::Kernel2<cutlass_80_simt_sgemm_128>(Params)"), plain_name("aten::mm")
    ('Kernel2 of cutlass_80_simt_sgemm_128', 'aten::mm')
    """
    if not name.startswith(("void ", "ncclDevKernel")):
        return name
    head, _, template = before_arguments(name).removeprefix("void ").partition("<")
    functor = _FUNCTOR.search(template)
    return head.rpartition("::")[2] + (f" of {functor[0]}" if functor else "")


def before_arguments(name: str) -> str:
    """Returns a kernel's name up to its arguments.

    >>> before_arguments("void (anonymous namespace)::multimem_all_reduce_kernel<float>(float*, unsigned long)")
    'void multimem_all_reduce_kernel<float>'
    """
    return name.replace("(anonymous namespace)::", "").partition("(")[0]


@lru_cache(maxsize=1 << 16)
def operation_of(name: str) -> int:
    """Returns the index in OPERATIONS of what a kernel or a copy sends to other devices; 0 if it sends nothing.

    A dispatch or combine of tokens counts as an all-to-all; a kernel of a communication library whose name does not
    have the collective, as send_recv.

    >>> OPERATIONS[operation_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)")]
    'reduce_scatter'
    >>> OPERATIONS[operation_of("void deep_ep::intranode::dispatch<8, 768>(int4*)")], operation_of("ampere_sgemm")
    ('all_to_all', 0)
    """
    if is_exchange(name):
        return OPERATIONS.index("all_to_all")
    if _PEER.search(name):
        return OPERATIONS.index("send_recv")
    found = _TRANSPORT.search(name)
    if found is None:
        return 0
    text = before_arguments(name)
    flat = re.sub(r"[^a-z]", "", text.lower())
    for word, operation in _KERNEL_WORDS:
        if word in flat:
            return OPERATIONS.index(operation)
    return collective_operation(text) or OPERATIONS.index("send_recv")


def collective_operation(text: str) -> int:
    """Returns the index in OPERATIONS of an NCCL kernel, an annotation or an HLO op; 0 if it is not a collective.

    >>> OPERATIONS[collective_operation("_reduce_scatter_base")], collective_operation("gemm")
    ('reduce_scatter', 0)
    """
    flat = re.sub(r"[^a-z]", "", text.lower())
    for word, operation in _WORDS:
        if word in flat:
            return OPERATIONS.index(operation)
    if "reduce" in flat:
        return OPERATIONS.index("reduce")
    return OPERATIONS.index("send_recv") if flat in ("send", "recv", "ncclsend", "ncclrecv") else 0
