"""MFU, FLOP/s and tokens per device: what is counted, and that layouts keep it."""

from __future__ import annotations

from itertools import islice

import jax
import jax.numpy as jnp
import pytest

import pase
from pase import machine
from pase.commands.compile import summary
from pase.compiler.problem.variants import Variant, graph_of
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.plan.layout import from_json, to_json
from pase.plan.throughput import _before, step_work

D, FF, B = 64, 128, 32


def mlp(params, x):  # type: ignore[no-untyped-def]
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)


PARAMS = {
    "up": jax.ShapeDtypeStruct((D, FF), jnp.float32),
    "down": jax.ShapeDtypeStruct((FF, D), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((B, D), jnp.float32)
H100 = machine.load("h100x8")


def test_products_count_forward_and_backward():
    """The first layer has two products, because its input needs no gradient; the second has three."""
    work = step_work(named(simplify(trace(mlp, PARAMS, BATCH).graph)), H100)
    assert work.flops == (2 + 3) * 2 * B * D * FF
    assert work.at_peak_s == pytest.approx(work.flops / H100.device.peak("float32"))
    assert (work.examples, work.tokens) == (B, None)


def test_recomputation_and_micro_batches_change_nothing():
    traced = trace(mlp, PARAMS, BATCH)
    whole = step_work(graph_of(traced, Variant()), H100)
    assert step_work(graph_of(traced, Variant(accumulate=4)), H100) == whole
    again = trace(jax.checkpoint(mlp), PARAMS, BATCH)
    assert step_work(graph_of(again, Variant()), H100).flops == whole.flops


@pytest.mark.parametrize("causal", [True, False])
def test_a_fused_attention_counts_six_products_half_of_them_if_causal(causal):
    b, s, h, d = 2, 32, 4, 8

    def loss(p, x):  # type: ignore[no-untyped-def]
        q = x * p
        return jnp.sum(jax.nn.dot_product_attention(q, q, q, is_causal=causal, implementation="cudnn"))

    shapes = jax.ShapeDtypeStruct((d,), jnp.float32), jax.ShapeDtypeStruct((b, s, h, d), jnp.float32)
    work = step_work(named(simplify(trace(loss, *shapes).graph)), H100)
    assert work.flops == 6 * 2 * b * h * s * s * d / (2 if causal else 1)


def test_tokens_are_what_is_looked_up_also_where_the_table_is_tied():
    from pase import zoo
    from pase.compiler.resolve import resolve

    for name in ("gpt2", "transformer", "llama3_8b"):
        model = zoo.reduced(name)
        work = step_work(named(simplify(trace(model.loss_fn, model.params, model.batch).graph)), H100)
        tokens = max(t.size for t in jax.tree.leaves(model.batch) if t.dtype == jnp.int32)
        assert work.tokens == tokens, name
    work = step_work(named(simplify(resolve("zoo:alexnet").graph)), H100)
    assert work.tokens is None and work.examples == 128


def test_indices_hashed_many_times_are_followed_once():
    """Each of 24 rounds reads the previous one twice, so there are 2 ** 24 paths back to the batch."""

    def loss(table, ids):  # type: ignore[no-untyped-def]
        for _ in range(24):
            ids = (ids * 3 + jnp.abs(ids)) % 64
        return jnp.mean(table[ids] ** 2)

    shapes = jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.int32)
    graph = named(simplify(trace(loss, *shapes).graph))
    makers = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}
    look_up = next(op for op in makers.values() if op.kind == "gather")
    followed = list(islice(_before(makers, look_up.reads[1].tensor), len(makers) + 1))
    assert 24 < len(followed) == len({id(op) for op in followed})
    assert step_work(graph, H100).tokens == 8 * 4


def test_a_plan_says_it_and_its_layout_keeps_it():
    plan = pase.compile(mlp, PARAMS, BATCH, devices=4, baselines=False)
    assert plan.throughput is not None
    assert plan.throughput.mfu == pytest.approx(plan.work.at_peak_s / 4 / plan.cost)
    assert plan.throughput.examples_per_s_per_device == pytest.approx(B / 4 / plan.cost)
    assert f"speed  {plan.throughput}" in str(plan)
    assert summary(plan)["mfu"] == plan.throughput.mfu and summary(plan)["tokens_per_s_per_device"] is None
    tree = to_json(plan)
    assert from_json(tree).throughput == plan.throughput
    for old in ("work", "throughput"):  # like a layout written before these were kept
        del tree[old]
    assert from_json(tree).throughput is None
    assert pase.compile(mlp, PARAMS, BATCH, devices=4, cost_model="paper").throughput is None


@pytest.mark.parametrize(("dtype", "peak"), [("float32", 494.7e12), ("bfloat16", 989.4e12)])
def test_a_plan_says_which_peak_its_mfu_refers_to(dtype, peak):
    """That of the products' dtype in the machine file; in float32 it is half of what the card does in bfloat16."""
    shapes = [jax.ShapeDtypeStruct((64, 64), dtype)] * 2
    plan = pase.compile(
        lambda p, x: ((x @ p) ** 2).mean(), *shapes, devices=2, machine="h100x8", baselines=False
    )
    assert plan.peak == (dtype, pytest.approx(peak))
    assert f"peak {peak / 1e12:.3g} TFLOP/s ({dtype})" in str(plan)
