"""The executor of a published run: an entry of ``pase.stated.program`` with the differences of its framework.

Each difference has its source next to it; none is fitted to a row.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from bench.published.rows import PublishedRow
from pase.stated.program import (
    PROGRAMS,
    AroundAttention,
    Buckets,
    Bytes,
    Program,
    all_but_products,
    all_but_weight_products,
)

__all__ = ["DEEPSPEED", "is_old", "program_of"]

_EAGER = ("mpt", "nns")
_MEGATRON = ("mbr", "nem", "mlm", "aal", "ll3", "bwl", "dsv", "vtr", "mlp", "smx")


_FUSED_LOSS = frozenset({"token_loss", "cross_entropy"})
_COMPOSER: dict[str, Any] = {
    # Composer's FSDP (composer/distributed/dist_strategy.py): backward_prefetch BACKWARD_POST; FSDP1's flat parameters
    # need no copy out. llm-foundry: loss_fn fused_crossentropy (flash_attn.losses), in place. DecoupledAdamW
    # (composer/optim/decoupled_weight_decay.py) passes over each parameter 22 times where a fused Adam does 7 times;
    # gradient clipping 3 times.
    # metrics_bytes: after each micro-batch the trainer computes cross entropy, perplexity and accuracy of the logits
    # (composer/trainer/trainer.py, _eval_train_metrics; llmfoundry/metrics: the default train metrics). The first two
    # each cast them to float32 under autocast (6 bytes) and take torch's log_softmax, which reads rows as long as these
    # three times and writes them (16); the third reads them.
    # around: flash_attn_fn (llmfoundry/models/layers/attention.py, 2023) unpads queries, keys and values of each layer
    # and pads the result (flash_attn/bert_padding.py). Forward gathers three arrays, zeroes one and writes it by index
    # (6 + 3 passes); backward zeroes and scatters three, gathers one, and joins the gradients of three chunks
    # (9 + 2 + 6). unpad_input waits for the device (nonzero, item): three times a layer, nine launches each.
    "prefetches": (True, False),
    "copied": (0.0, 6.0),
    "logits": 0.0,
    "metrics_bytes": 46.0,
    "around": AroundAttention(forward=9.0, backward=17.0, waits=27),
    "executor": replace(
        PROGRAMS["eager"].executor,
        kernels=PROGRAMS["eager"].executor.kernels | _FUSED_LOSS,
        update_bytes=72.0,
    ),
}
_NARROW_S, _COPY_S = 2.8e-6, 3.8e-6
_DEEPSPEED: dict[str, Any] = {
    # DeepSpeed of spring 2021 gathers one parameter at a time, and waits for the device before each gather, so that
    # none overlaps with compute (runtime/zero/partition_parameters.py; DeepSpeed#1069 and #1188, June 2021).
    # copied: the result is copied twice, by torch.distributed.all_gather into its list, and from there into the
    # parameter (#1188, point 3).
    # host_for_rank_s: each gather and scatter takes a list with a part for each rank. DeepSpeed makes it in a Python
    # loop (_allgather_param, _reduce_scatter_gradient: a Tensor.narrow and get_rank per iteration) after waiting for
    # the device, and PyTorch copies each part by its own kernel (ProcessGroupNCCL.cpp, allgather and reduce_scatter of
    # lists). _NARROW_S: such an iteration as measured on a host without GPU (PyTorch 2.13, median of 60 lists of 384).
    # _COPY_S: a kernel launched after another, NVIDIA's "Getting Started with CUDA Graphs" (quoted from memory).
    # stays, stays_within: stage3_param_persistence_threshold and stage3_max_reuse_distance (runtime/zero/constants.py;
    # stage3.py, get_reuse_distance_in_numel).
    # whole_passes: over shards alone.
    "one_by_one": True,
    "copied": (8.0, 0.0),
    "host_for_rank_s": _NARROW_S + _COPY_S,
    "stays": 1e5,
    "stays_within": 1e9,
    "whole_passes": 0.0,
}
DEEPSPEED = replace(PROGRAMS["megatron_2021"], **_DEEPSPEED)
"""DeepSpeed's ZeRO-3 of spring 2021."""
_AUTOMODEL = Bytes(weight=2, gradient=2, state=4, used=2, summed=4)
"""NeMo Automodel's benchmarks (examples/llm_benchmark): from_config's torch_dtype "auto" is bfloat16
(nemo_automodel/_transformers/auto_model.py), in which torch.optim.Adam also keeps its moments; sums are in float32
(FSDP2's policy in components/distributed/config.py)."""
_SCALING: dict[str, Any] = {
    # Aleph Alpha's own framework, public since 2024 (Aleph-Alpha/scaling@737f855, src/scaling/core and transformer).
    # bytes, sums_whole, whole_passes: optimizer/optimizer.py and allreduce.py all-reduce bfloat16 gradients in float32,
    # under ZeRO-1 too: joined, divided, cast, cast back, copied back, normed (26 bytes of a parameter).
    # update_bytes: parameter_group.py casts a shard's gradients and parameters beside torch's AdamW.
    # whole_logits: lm_head.py gathers logits; losses/cross_entropy.py casts them, and takes torch's loss and an argmax.
    # stage_ends: pipeline_partitioning.py (uniform) counts embedding, norm and output as a layer each.
    # around: attention.py asks the device for the longest sequence before each kernel.
    "attention": ("flash2",),
    "bytes": Bytes(weight=2, gradient=2, state=12, used=2, summed=4),
    "sums_whole": True,
    "whole_passes": 13.0,
    "whole_logits": True,
    "metrics_bytes": 4.0,
    "stage_ends": (1, 2),
    "around": AroundAttention(waits=1),
}
_DEEPSEEK: dict[str, Any] = {
    # DeepSeek-V3 (arXiv 2412.19437): 3.2.1, DualPipe overlaps the exchange of tokens with compute of a micro-batch;
    # 3.3.3, Adam's moments in bfloat16; 3.2.3, norms, up-projections of attention and SwiGLU's product are recomputed.
    "exchange_overlaps": True,
    "bytes": replace(PROGRAMS["megatron"].bytes, state=8.0),
    "selective": all_but_products,
}

_SIMUMAX: dict[str, Any] = {
    # MooreThreads/SimuMax@4dcaae5, simu_tools/megatron_scripts (run_pretrain_llama3.sh and run_pretrain_deepseekv2.sh):
    # neither --overlap-grad-reduce nor --overlap-param-gather, so gradients are summed in one call after backward and
    # weights gathered after the update (megatron/core/distributed/distributed_data_parallel.py: no buckets without the
    # former). docs/b200/b200_real_repro_guide.md: nothing overlaps.
    "prefetches": (False, False),
    "sums_overlap": False,
    "buckets": Buckets(least=math.inf),
}

_BRIDGE_OVERLAPS: tuple[tuple[str, frozenset[str], frozenset[str], str, str], ...] = (
    ("deepseek-v3", frozenset({"H100"}), frozenset(), "25.11", "25.11"),
    ("qwen3 235b", frozenset({"H100"}), frozenset(), "25.11", ""),
    ("qwen3 235b", frozenset({"B200"}), frozenset(), "25.11", "25.11"),
    ("qwen3 30b", frozenset({"H100"}), frozenset(), "25.11", "25.11"),
    ("gpt-oss 120b", frozenset({"GB200"}), frozenset(), "26.04", ""),
    ("deepseek-v3", frozenset({"GB300", "GB200", "B200"}), frozenset({"MXFP8"}), "26.06", ""),
    ("qwen3 235b", frozenset({"GB300", "GB200"}), frozenset({"MXFP8"}), "26.06", ""),
    ("qwen3 30b", frozenset({"GB300", "GB200", "B300"}), frozenset({"MXFP8"}), "26.06", ""),
    ("gpt-oss 120b", frozenset({"GB300"}), frozenset({"MXFP8"}), "26.06", ""),
)
"""(Model, cards, precisions or all, first and last container) whose recipe in Megatron-Bridge sends tokens to experts
while another micro-batch computes: ``moe_a2a_overlap`` in scripts/performance/configs of v0.2.2 (container 25.11),
v0.3.1 (26.02), v0.4.0 (26.04) and v0.5.0 (26.06), ``overlap_moe_expert_parallel_comm`` in perf_recipes of v0.6.0."""

_MAXTEXT = replace(PROGRAMS["xla"].executor, widens=False)
"""logits_dot_in_fp32 is false in MaxText's src/maxtext/configs/base.yml: logits are cast after their product."""


def is_old(row: PublishedRow) -> bool:
    """Returns whether the row ran Megatron of 2021 or 2022 or a similar framework: unfused attention, no kernels of
    Transformer Engine."""
    return row.source in ("mlm", "alp") and "h100" not in (row.text("gpu") or "").lower()


def _megatron_program(row: PublishedRow) -> Program:
    program = replace(PROGRAMS["megatron"], exchange_overlaps=_overlaps_exchange(row))
    if row.source in ("mbr", "nem", "bwl", "mlp") or "examples/llama" in row.notes:
        # grad_reduce_in_fp32 = False in NeMo's (MLPerf's, too) and Megatron-Bridge's performance recipes;
        # --grad-reduce-in-bf16 in Megatron-LM's examples/llama.
        # average_in_collective there: gradients are not scaled.
        program = replace(program, bytes=replace(program.bytes, gradient=2.0, summed=2.0), whole_passes=2.0)
    if row.source in ("mbr", "bwl") and row.text("precision") == "FP8":
        # fp8_cs in scripts/performance/utils/precision.py: a tensor is read for its scale before it is cast.
        program = replace(program, fp8_passes=1.0)
    if (row.text("precision") or "").upper() == "MXFP8":  # a scale for 32 elements, by rows and by columns
        program = replace(program, gathered={"fp8": (33 / 32, 33 / 16)})
    return program


def program_of(row: PublishedRow) -> Program:
    """Returns the executor of the row's framework."""
    notes, kernel = row.notes, (row.text("attn_kernel") or "").lower()
    if is_old(row):
        return DEEPSPEED if row.text("dp_type") == "zero3" else PROGRAMS["megatron_2021"]
    if row.source == "aal":
        norm = frozenset({"rms_norm"}) if "fused rmsnorm" in notes else frozenset()
        own = replace(
            PROGRAMS["megatron_2021"].executor,
            kernels=PROGRAMS["eager"].executor.kernels - {"rms_norm"} | norm,
            update_bytes=PROGRAMS["eager"].executor.update_bytes + 16,
        )
        return replace(PROGRAMS["megatron_2021"], executor=own, **_SCALING)
    if row.source in _MEGATRON or "megatron" in notes:
        program = _megatron_program(row)
    elif row.source == "mxt" or "maxtext" in notes:
        program = replace(PROGRAMS["xla"], executor=_MAXTEXT)
        if 'remat "minimal"' in notes:
            program = replace(program, selective=all_but_weight_products)
    elif (
        row.source not in _EAGER
        and "eager" not in notes
        and ("compile" in notes or row.text("precision") == "FP8")
    ):
        program = PROGRAMS["compiled"]
        if not _compiles_loss(row):
            eager = PROGRAMS["eager"]
            program = replace(program, logits=eager.logits, logits_in_parts=eager.logits_in_parts)
    else:
        program = PROGRAMS["eager"]
    if row.source == "smx":
        program = replace(program, **_SIMUMAX)
    if "cudnn" in kernel or kernel == "te":
        program = replace(program, attention=("cudnn", "flash2"))
    elif "flash" in kernel and "pallas" not in kernel:
        program = replace(program, attention=("flash2",))
    if row.source == "ttn":
        program = replace(program, around=_repeated_heads(row, program))
    if row.source == "mpt":
        program = replace(program, **_COMPOSER)
    if "deepep" in notes:
        program = replace(program, exchange=("DeepEP",))
    if row.source == "dsv":
        program = replace(program, **_DEEPSEEK)
    if (
        row.source == "ll3"
    ):  # arXiv 2407.21783, 3.3.2: FSDP with stages; weights stay between forward and backward
        program = replace(program, zero_in_stages=2)
    if row.source == "aut":
        program = replace(program, bytes=_AUTOMODEL)
    if program.name == "eager" and row.source == "aut":
        program = replace(
            program, executor=replace(program.executor, kernels=PROGRAMS["megatron"].executor.kernels)
        )
    return program


def _overlaps_exchange(row: PublishedRow) -> bool:
    """Returns whether a row of Megatron-Bridge ran a recipe that sends tokens to experts beside compute."""
    container = re.search(r"container (\d\d\.\d\d)", row.notes)
    if row.source not in ("mbr", "bwl") or container is None:
        return False
    model, card = (row.text("model") or "").lower(), (row.text("gpu") or "").partition("-")[0]
    return any(
        model.startswith(name)
        and card in cards
        and (not precisions or row.text("precision") in precisions)
        and first <= container[1] <= (last or container[1])
        for name, cards, precisions, first, last in _BRIDGE_OVERLAPS
    )


def _repeated_heads(row: PublishedRow, program: Program) -> AroundAttention:
    """Returns the program with repeated keys and values: torchtitan writes them once for each query head before
    attention, and sums their gradients over the group after it (torchtitan/models/llama/model.py, repeat_kv). If
    compiled, the rotation of the keys writes them in this form."""
    heads = row.whole("heads") or 1
    group = heads // (row.whole("kv_heads") or heads)
    if group <= 1:
        return program.around
    passes = 2.0 if program.executor.fused else 2 * (1 + 1 / group)
    return AroundAttention(forward=passes, backward=passes)


def _compiles_loss(row: PublishedRow) -> bool:
    """Returns whether the row compiles its loss: torchtitan does, in the files of its benchmarks from June 2025 on
    (torchtitan/components/loss.py then; its train.py of December 2024: "compiling loss function causes CUDA errors,
    turning off for now")."""
    told = re.search(r"_(20\d{4})_", row.notes)
    return row.source == "ttn" and told is not None and int(told.group(1)) >= 202506
