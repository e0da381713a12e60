"""How a framework runs a stated strategy: its kernels, what it keeps, which communication overlaps with compute.

Each framework is one entry. Every figure is a fact of its code, or a measurement with its source. None is fitted to a
step time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pase.ir import Graph, Node
from pase.ir.precision import weight_products
from pase.plan.step import COMPILED, EAGER, Executor
from pase.registry import Registry
from pase.stated.strategy import Precision

__all__ = [
    "PROGRAMS",
    "AroundAttention",
    "AroundExperts",
    "Buckets",
    "Bytes",
    "Program",
    "Selective",
    "all_but_products",
    "all_but_weight_products",
    "every_other_product",
]

Selective = Callable[[Graph, Node, bool, Mapping[str, int]], float]
"""(graph, a node of a block, True for its products and attention or False for its light ops, the number of products
that precede each product in its block) -> the fraction of its forward work that selective recomputation repeats."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one parameter on the rank that holds it.

    weight, gradient: as stored.
    state: the optimizer's state, including master weights.
    used: bytes of a weight when it is gathered and multiplied.
    summed: bytes of a gradient while it is summed.
    """

    weight: float
    gradient: float
    state: float
    used: float
    summed: float

    @property
    def all(self) -> float:
        return self.weight + self.gradient + self.state


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """How many elements of gradients are summed, and of weights gathered, in one call. A bucket is full with the array
    that brings it to this size.

    least: for few ranks. for_rank: for each rank that shares the weights, if that is more.
    """

    least: float
    for_rank: float = 0.0

    def elements(self, ranks: int) -> float:
        """The elements of a bucket among this many ranks."""
        return max(self.least, self.for_rank * ranks)


@dataclass(frozen=True, kw_only=True)
class AroundAttention:
    """What a program does around its attention kernel.

    forward, backward: the number of passes over an array of the queries' size.
    waits: launches of small kernels in forward for which the device waits.
    """

    forward: float = 0.0
    backward: float = 0.0
    waits: int = 0


@dataclass(frozen=True, kw_only=True)
class AroundExperts:
    """What a program does around the products of a mixture's experts.

    forward, backward: the number of passes over an array of all tokens that are sent to experts, in which a token
        occurs once for each of its experts.
    apart: whether each expert's product is a separate kernel, which the host launches.
    """

    forward: float = 0.0
    backward: float = 0.0
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """How gathers and scatters of tensor parallelism run during the products that they feed, chunk by chunk.

    after: the fraction of a forward's reduce-scatter that runs after its product; None: one rank's chunk.
    units: compute units that reduce-scatters occupy (the other collectives are copies that occupy none).
    summed: whether a reduce-scatter's chunks arrive separately and are added in a separate pass.
    near: whether it runs only among devices of the machine's innermost link, because it writes to their memory.
    """

    after: float | None = None
    units: int = 0
    summed: bool = False
    near: bool = True


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a framework runs a step.

    executor: how ops reach the device.
    attention: the names of its attention kernel in machine files; the first one found is used.
    around: what it does around that kernel.
    experts: what it does around the products of experts.
    regathers: ZeRO-3's weights are gathered again for backward; otherwise they stay gathered.
    prefetches: (forward, backward) whether gathers for the next block overlap with this block's compute.
    copied: bytes of device memory traffic in the program's own buffers, per parameter gathered and per one summed.
    rearranges: what tensor parallelism gathers or scatters is copied, because the sequence is not its first dim.
    metrics_bytes: bytes of device memory traffic per logit after each micro-batch, for logged metrics.
    one_by_one: each weight is gathered and summed separately, not together with the other weights of its block.
    buckets: with whole weights (ZeRO-1 or none), what is summed in one call; None: the weights of a block. Later chunks
        of an interleaved pipeline are a bucket each.
    host_for_rank_s: the host's seconds for each rank's part of such a gather or sum, before or after it.
    stays: weights with fewer elements than this are never split.
    stays_within: what was gathered to recompute a block stays for its backward if fewer elements than this are used in
        between.
    by_weight: a weight and its gradient are gathered only while its own product runs, not while its block runs.
    sums_overlap: gradient sums overlap with backward.
    sums_each: gradient sums run after each micro-batch, not once per step.
    sums_whole: gradient sums are all-reduces, of which ZeRO-1 and 2 keep a shard.
    empty_gradient: bytes of an element of what the program hands to autograd in place of a gradient that a product has
        added to the sum: an array for each shape of a block's weights, which stays.
    adds_apart: a separate kernel adds a gradient to that of earlier micro-batches; otherwise the product does.
    whole_passes: passes over all gradients of the rank, once per step, whatever ZeRO shards.
    sends_overlap: transfers between stages overlap with compute in the interleaved schedule; in others, none do.
    sends_parts: what is replicated over tensor parallelism is sent in parts, one per rank (Narayanan et al. 2021,
        section 4.1).
    context: how keys and values are sent: in a ring that overlaps with attention, or gathered before it; "none" if the
        program has no context parallelism.
    keeps_chosen: everything that selective recomputation does not repeat is kept, whether backward reads it or not.
    exchange: the names of the library, in machine files, by which tokens are sent to experts and back, if it is not the
        machine's own; the first one found is used.
    exchange_overlaps: tokens are sent to experts and back while another micro-batch computes.
    decomposition: what an asynchronous strategy's tensor parallelism does.
    gathered: bytes of an element that tensor parallelism gathers for a product in eight or four bits, in forward and
        in backward; without an entry, it gathers what the product casts.
    zero_in_stages: the highest ZeRO stage that runs with pipeline stages.
    stage_ends: the numbers of layers that embedding and output count as when layers are divided among the stages.
    selective: what selective recomputation repeats.
    logits: the number of float32 copies of the logits that take memory at the loss, in addition to the logits.
    logits_in_parts: the same if tensor parallelism splits the vocabulary; None if it is the same number.
    whole_logits: logits that tensor parallelism splits are gathered, and every rank computes the whole loss.
    sums_unsplit: stages accumulate gradients that are not summed over devices before the last micro-batch.
    fp8_passes: how often a tensor that is cast to fp8 is read for its scale.
    keeps_fp8: what a product reads in fp8 is kept in fp8 for its backward.
    keeps_cast_weights: weights are cast to eight or four bits once for all micro-batches of a step.
    reserve_bytes: device memory that the context, libraries and gaps of the allocator take.
    source: the sources of these figures.
    """

    name: str
    title: str
    executor: Executor
    attention: tuple[str, ...]
    bytes: Bytes
    selective: Selective
    around: AroundAttention = AroundAttention()
    experts: AroundExperts = AroundExperts()
    regathers: bool = True
    prefetches: tuple[bool, bool] = (True, True)
    copied: tuple[float, float] = (0.0, 0.0)
    rearranges: bool = False
    metrics_bytes: float = 0.0
    one_by_one: bool = False
    buckets: Buckets | None = None
    host_for_rank_s: float = 0.0
    stays: float = 0.0
    stays_within: float = math.inf
    by_weight: bool = False
    sums_overlap: bool = True
    sums_each: bool = True
    sums_whole: bool = False
    empty_gradient: float = 0.0
    adds_apart: bool = False
    whole_passes: float = 0.0
    sends_overlap: bool = False
    sends_parts: bool = False
    context: Literal["ring", "gather", "none"] = "ring"
    keeps_chosen: bool = False
    exchange: tuple[str, ...] = ()
    exchange_overlaps: bool = False
    decomposition: Decomposition = Decomposition()
    gathered: Mapping[Precision, tuple[float, float]] = field(default_factory=dict)
    zero_in_stages: int = 3
    stage_ends: tuple[int, int] = (0, 0)
    logits: float = 2.0
    logits_in_parts: float | None = None
    whole_logits: bool = False
    sums_unsplit: bool = False
    fp8_passes: float = 1.0
    keeps_fp8: bool = False
    keeps_cast_weights: bool = False
    reserve_bytes: float = 0.0
    source: str = ""


def every_other_product(graph: Graph, node: Node, heavy: bool, before: Mapping[str, int]) -> float:
    """torchtitan's selective recomputation per op. Attention and every other product, starting with the first of a
    block, are kept. All else is recomputed (torchtitan/parallelisms/parallelize_llama.py,
    _apply_ac_to_transformer_block)."""
    if not heavy:
        return 1.0
    if node.kind == "attention":
        return 0.0
    place = before.get(node.name)
    return 0.5 if place is None else float(place % 2)  # half of what is sent to nodes other than products


def core_attention(graph: Graph, node: Node, heavy: bool, before: Mapping[str, int]) -> float:
    """Megatron's selective recomputation repeats the scores and what is computed from them, between the projections. A
    fused attention keeps none of these."""
    between = [n for n in graph.nodes if n.kind == "matmul" and not weight_products(graph, n)]
    if not between or weight_products(graph, node):
        return 0.0
    scores = max(int(graph.tensors[a.tensor].elements) for n in between for op in n.ops for a in op.writes)
    made = [int(graph.tensors[a.tensor].elements) for op in node.ops for a in op.writes]
    return 1.0 if node in between or max(made, default=0) >= scores else 0.0


def all_but_products(graph: Graph, node: Node, heavy: bool, before: Mapping[str, int]) -> float:
    """MaxText's ``minimal_with_context`` keeps the results of products with weights and of attention."""
    return 0.0 if heavy else 1.0


def all_but_weight_products(graph: Graph, node: Node, heavy: bool, before: Mapping[str, int]) -> float:
    """MaxText's ``minimal`` (jax.checkpoint_policies.dots_with_no_batch_dims_saveable) keeps the results of products
    with weights, and recomputes attention."""
    return 0.0 if heavy and node.kind != "attention" else 1.0


PROGRAMS = Registry[Program]("executor")


_MIXED = Bytes(weight=4, gradient=4, state=8, used=2, summed=4)
"""float32 parameters, gradients and Adam, bfloat16 products, gradients summed in float32: FSDP2's default in torchtitan
(MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)) and Composer's."""
_MASTERS = Bytes(weight=2, gradient=4, state=12, used=2, summed=4)
"""bfloat16 parameters, float32 gradients, master weights and Adam: 18 bytes per parameter (Megatron-LM, docs on the
distributed optimizer: 18, or 6 + 12/d)."""

_FOREACH_ADAMW = 64.0
"""torch.optim's default AdamW on GPUs (``_multi_tensor_adamw``) passes over float32 arrays 20 times; a fused one passes
7 times. Clipping by the gradients' norm reads them twice and writes them once. Each pass takes 4 bytes."""
_USERBUFFERS = Decomposition(after=0.25, units=16)
"""Transformer Engine's (transformer_engine/pytorch/module/base.py, initialize_ub). Operands of products are exchanged
in a ring of copies. Results are scattered in four chunks that overlap with the products ("pipeline", num_splits), and
in backward during the next product ("bulk"). The last two occupy 16 units (num_sm). NVIDIA/TransformerEngine#1071:
within NVLink only."""
_SYMMETRIC_MEMORY = Decomposition(after=0.0, summed=True)
"""PyTorch's (torch/distributed/_symmetric_memory, _pipelined_produce_and_all2all and _fused_matmul_reduce_scatter): a
rank's own chunk is computed last; the others' are copied into its memory, stacked, and then added."""
_TE_KERNELS = EAGER.kernels | {"rotate", "gated_forward", "feed_forward", "token_loss", "cross_entropy"}
"""Functions of the zoo's models for which Transformer Engine, Apex and Megatron-Core have one kernel."""
_TE_INSIDE = {"silu": "gated_forward"}
"""Megatron-Core's SwiGLU is one kernel, and keeps its operands alone (megatron/core/fusions/fused_bias_swiglu.py)."""

for _p in (
    Program(
        name="eager",
        title="PyTorch, kernel by kernel, FSDP",
        executor=replace(
            EAGER,
            waits=False,
            collective_s=0.0,
            kernels=EAGER.kernels - {"rms_norm"},
            update_bytes=_FOREACH_ADAMW,
        ),
        attention=("flash2",),
        bytes=_MIXED,
        selective=every_other_product,
        copied=(4.0, 6.0),
        rearranges=True,
        decomposition=_SYMMETRIC_MEMORY,
        adds_apart=True,
        keeps_chosen=True,
        logits=3.0,
        logits_in_parts=4.0,
        sums_unsplit=True,
        reserve_bytes=1e9,
        source="copied: FSDP2 copies what was gathered out of its buffer, and gradients into theirs in float32 "
        "(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). kernels: torch's own and flash-attn 2; an RMS "
        "norm consists of separate ops (torchtitan/models/norms.py of 2024; torch.nn.RMSNorm before 2.8). rearranges: "
        "torch/distributed/_functional_collectives.py joins chunks if the dim is not the first. FSDP prefetches "
        "the next block's gather and sums gradients in a separate stream (torch.distributed.fsdp). keeps_chosen: "
        "torch.utils.checkpoint keeps the results that a policy saves. logits: cross_entropy's float32 operand, its "
        "log softmax and, in backward, a gradient of each; the allocator cannot reuse the bfloat16 logits' block. "
        "logits_in_parts: torch/distributed/tensor/parallel/loss.py makes one more. sums_unsplit: stages keep "
        "unreduced gradients in the dtype of their sum, and add to them (torch/distributed/fsdp/_fully_shard/"
        "_fsdp_param.py).",
    ),
    Program(
        name="compiled",
        title="PyTorch, torch.compile of each block, FSDP",
        executor=replace(
            COMPILED, widens=False, splits_norms=False, overlapped=True, update_bytes=_FOREACH_ADAMW
        ),
        attention=("flash2",),
        bytes=_MIXED,
        selective=every_other_product,
        copied=(4.0, 6.0),
        rearranges=True,
        decomposition=_SYMMETRIC_MEMORY,
        adds_apart=True,
        logits=0.5,
        sums_unsplit=True,
        reserve_bytes=1e9,
        source="copied, rearranges: as in eager. logits: the compiled loss reads bfloat16 logits and writes their "
        "gradient in bfloat16 (torchtitan/components/loss.py). Light ops run inside fusions; attention is a "
        "library's kernel (flash-attn 2 in torch.nn.functional.scaled_dot_product_attention)",
    ),
    Program(
        name="xla",
        title="a JAX program, compiled by XLA",
        executor=replace(COMPILED, overlapped=True),
        attention=("flash2",),
        bytes=_MIXED,
        selective=all_but_products,
        logits=1.0,
        by_weight=True,
        decomposition=Decomposition(near=False),
        reserve_bytes=1e9,
        source="by_weight: XLA's partitioner gathers a weight for the product that reads it, and scatters its gradient "
        "after the product that makes it (docs/evidence/communication.md); it has no separate buffers to copy to and "
        "from",
    ),
    Program(
        name="megatron",
        title="Megatron-Core with Transformer Engine",
        executor=replace(
            EAGER, waits=False, collective_s=0.0, kernels=_TE_KERNELS, inside=_TE_INSIDE, traffic={}
        ),
        attention=("cudnn", "flash2"),
        bytes=_MASTERS,
        selective=core_attention,
        regathers=True,
        sums_each=False,
        sends_overlap=True,
        sends_parts=True,
        buckets=Buckets(least=40e6, for_rank=1e6),
        decomposition=_USERBUFFERS,
        gathered={"fp8": (1.0, 1.0), "nvfp4": (9 / 16, 9 / 8)},
        zero_in_stages=1,
        whole_passes=4.0,
        empty_gradient=2.0,
        experts=AroundExperts(forward=5.0, backward=5.0, apart=True),
        logits=1.0,
        fp8_passes=0.0,
        keeps_fp8=True,
        keeps_cast_weights=True,
        reserve_bytes=2e9,
        source="fused kernels of Transformer Engine and Apex; --overlap-grad-reduce, --overlap-param-gather, "
        "interleaved sends overlap with compute; buckets: megatron/core/distributed/distributed_data_parallel.py "
        "(bucket_size, and that chunks other than the first have none); delayed scaling reads no separate maximum. "
        "experts: "
        "megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher: tokens are written in "
        "their experts' order (permute), and sorted before and after the experts' products (sort_chunks_by_idxs: "
        "read and written each time); the weighted sum at the end is the model's own. Backward has equal traffic. "
        "apart: GroupedLinear calls cuBLAS for one expert after the other (transformer_engine/common/gemm/"
        "cublaslt_gemm.cu, nvte_multi_tensor_gemm), gate and up in one. "
        "zero_in_stages: its FSDP runs with tensor, expert and context parallelism only (Megatron-LM#1455, and "
        "--use-torch-fsdp2 asserts one stage). whole_passes: megatron/core/distributed/param_and_grad_buffer.py zeroes "
        "the buffer of gradients, reads it for the check, and scales it (read and written). Products add to it "
        "(gradient_accumulation_fusion). empty_gradient: transformer_engine/pytorch/module/base.py, get_dummy_wgrad. "
        "gathered: transformer_engine/pytorch/module/layernorm_linear.py and linear.py cast before they gather "
        "(gather_along_first_dim), in four bits with a scale for 16 elements, and in backward by rows and by columns. "
        "keeps_cast_weights: there, is_first_microbatch",
    ),
    Program(
        name="megatron_2021",
        title="Megatron-LM of 2021 and 2022",
        executor=replace(EAGER, waits=False, update_bytes=32.0, traffic={}),
        attention=(),
        bytes=Bytes(weight=2, gradient=2, state=12, used=2, summed=2),
        selective=core_attention,
        prefetches=(False, False),
        sends_parts=True,
        sums_overlap=False,
        sums_each=False,
        buckets=Buckets(least=math.inf),
        adds_apart=True,
        whole_passes=6.0,
        decomposition=_USERBUFFERS,
        zero_in_stages=1,
        context="none",
        logits=2.0,
        reserve_bytes=2e9,
        source="as EAGER, with Apex's norms, which take the time of their traffic; update_bytes: "
        "megatron/optimizer/optimizer.py copies, checks and clips gradients; local DDP "
        "sums them after backward, in one call (megatron/model/distributed.py); gradients of float16 stay in float16 "
        "until then (megatron/arguments.py: accumulate_allreduce_grads_in_fp32 is for bfloat16). zero_in_stages: "
        "deepspeed/runtime/pipe/engine.py refuses ZeRO-2 and 3. context: Megatron-Core has it since 0.5. adds_apart: "
        "float16 gradients are added by autograd or the hook of megatron/model/distributed.py (fused into products in "
        "float32 from 2022-02, in float16 from 2022-09). whole_passes: there, allreduce_gradients joins gradients, "
        "divides them and copies them back",
    ),
):
    PROGRAMS.add(_p.name, _p)
