"""The memory of a rank under a stated strategy, compared with known laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase.stated.program import PROGRAMS
from tests.stated.prices import AHEAD, GRAPH, graph_of, price


def test_recomputation_takes_time_and_saves_memory():
    """This holds if the host is ahead of the device. Otherwise its launches hide the recomputation."""
    none, some, full = (price(f"fsdp=8,remat={r}", program=AHEAD) for r in ("none", "selective", "full"))
    assert none.step_s < some.step_s < full.step_s
    assert none.memory.activations > some.memory.activations > full.memory.activations


def test_selective_recomputation_keeps_every_other_product():
    """torchtitan keeps the first, third, fifth and seventh of a layer's seven products.

    Compiled, it keeps only what backward reads, without the last one, whose result is added to the residual stream.
    """
    wide = graph_of(seq=2048, vocab=1 << 18)  # so that memory is highest at the loss
    programs = (PROGRAMS["eager"], replace(PROGRAMS["compiled"], logits=PROGRAMS["eager"].logits))
    eager, compiled = (price("fsdp=8,remat=selective", program=p, graph=wide).memory for p in programs)
    tokens = 2 * 2048 * 2  # bytes of a rank, in bfloat16
    d, kv, ff = 4096, 1024, 14336
    kept = 4 * tokens * (d + d + kv + d + ff)  # the entry, queries, values, attention's result, gate
    assert compiled.activations == pytest.approx(kept, rel=0.1)
    assert eager.activations - compiled.activations >= 4 * tokens * d


def test_the_last_blocks_backward_has_the_logits_behind_it():
    """What a block recomputes, and its gradients, do not exist at the same time as the logits."""
    sizes = (1024, 1 << 18)
    few, many = (
        price("fsdp=8,remat=full", graph=graph_of(seq=2048, vocab=v), program="eager").memory for v in sizes
    )
    assert few.logits == 0 and many.logits > 0
    assert few.activations > many.activations


def test_stages_keep_whole_gradients_until_the_last_micro_batch():
    """With FSDP2 in a pipeline, weights stay gathered, and unreduced gradients are added in the dtype of their sum."""
    m = price("fsdp=4,pp=2,micro=1", program="eager", examples=16).memory
    assert m.gathered > 4 * m.parameters / 4 * (2 + 4)


def test_what_zero_splits_is_split():
    by_kind = [price(f"dp=8,zero={z}" if z else "dp=8").memory for z in range(4)]
    whole = by_kind[0]
    for z, m in enumerate(by_kind):
        assert m.optimizer == pytest.approx(whole.optimizer / (8 if z >= 1 else 1))
        assert m.gradients == pytest.approx(whole.gradients / (8 if z >= 2 else 1))
        assert m.parameters == pytest.approx(whole.parameters / (8 if z >= 3 else 1))
    elements = sum(t.elements for t in GRAPH.tensors.values() if t.role == "parameter")
    assert whole.parameters == 4 * elements


def test_an_empty_gradient_of_each_shape_of_weight_stays():
    """Transformer Engine hands it to autograd: one for the weights of all blocks, whatever ZeRO splits."""
    megatron = PROGRAMS["megatron"]
    plain = replace(megatron, empty_gradient=0.0)
    block = sum(
        t.elements / 4
        for name, t in GRAPH.tensors.items()
        if t.role == "parameter" and GRAPH.producer[name].name.startswith("blocks")
    )
    for s, ways in (("dp=8,zero=1,micro=1", 1), ("dp=2,tp=4,sp,micro=1", 4)):
        more, less = (price(s, program=p).memory for p in (megatron, plain))
        assert more.gradients - less.gradients == pytest.approx(2 * block / ways, rel=1e-3)
        assert more.total - less.total == pytest.approx(more.gradients - less.gradients)


def test_swiglu_is_one_kernel_that_keeps_its_operands_alone():
    """Separate kernels keep the result of SiLU, too, and pass over the layer's widest arrays more often."""
    one = PROGRAMS["megatron"]
    two = replace(one, executor=replace(one.executor, inside={}))
    joined, apart = (price("dp=8,zero=1", program=p) for p in (one, two))
    assert apart.memory.activations - joined.memory.activations == pytest.approx(4 * 2 * 512 * 14336 * 2)
    assert joined.step_s < apart.step_s
