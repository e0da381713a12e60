"""Seconds and bytes of a stage are those of a step without stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.compiler.meshes.baselines import price_baselines
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant, graph_of
from pase.compiler.resolve import traced_model
from pase.compiler.stages.costs import CostKind, part_costs, products_of_weights
from pase.compiler.stages.menu import MIDDLE, ONLY, StageSplit
from pase.compiler.stages.places import places_of
from pase.frontends.jax.blocks import blocks_of
from pase.frontends.jax.frontend import trace
from pase.ir import simplify
from pase.machine import mesh_from
from pase.memory.account import memory
from pase.tables.itemize import collectives, local_work
from pase.tables.work import node_work
from tests.compiler.stages.staged import SCANNED, tables_of


@pytest.mark.some(1)
@pytest.mark.parametrize("machine", ["2080tix8", "v100x8", "h100x8"])
def test_one_stage_with_one_micro_batch_costs_what_the_step_without_stages_does(machine):
    """This holds for every baseline's strategy, up to rounding if nothing overlaps.

    With overlap, a stage costs no less, and at most as much more as its coarser units explain: the gathers of the first
    block and what is before it, or the compute of the last block and what is after it. For sums, the same holds in
    reverse order.
    """
    model = "zoo:gpt2?layers=4&batch=4&seq=32&vocab=2048&remat=0&scan=1"
    traced, _ = traced_model(model, None, (), CompileOptions(devices=4))
    blocks, variant = blocks_of(traced), Variant(accumulate=1, blocks=())  # type: ignore[arg-type]
    problem = SplitProblem.of(traced.graph, 4, machine, "analytic", "adam", "parameters")
    graph, slow = graph_of(traced, variant), problem.pricing.occupied
    places = places_of(graph, blocks).in_one_stage
    methods, _ = price_baselines(problem)
    assert slow is not None and {"zero2", "megatron_sp_fsdp_2x2"} <= {b.name for b in methods}
    for b in methods:
        parts = part_costs(graph, places, b.mesh, b.strategy, problem.model, "adam", "hoisted")
        step, added = (
            StageSplit(
                role=ONLY, variant=variant, weights="hoisted", configs=b.strategy, parts=parts, slow=part
            )
            for part in (slow, 1.0)
        )
        work = [w for of in local_work(graph, b.mesh, b.strategy, problem.model).values() for w in of]
        moved = collectives(graph, b.mesh, b.strategy, problem.model)
        of_parameters = sum(c.cost for c in moved if graph.producer[c.tensor].kind == "parameter")
        at = np.array([1.0, places.blocks, 1.0])
        whole = sum(w.cost for w in work) + sum(c.cost for c in moved)
        assert added.step_s(places.blocks, 1) == pytest.approx(whole)
        assert added.by_unit(CostKind.BEFORE, CostKind.SUMS) @ at == pytest.approx(of_parameters)
        for phase, names in (
            ("forward", (CostKind.FORWARD,)),
            ("backward", (CostKind.INPUT, CostKind.WEIGHT)),
            ("update", (CostKind.AFTER,)),
        ):
            assert step.by_unit(*names) @ at == pytest.approx(sum(w.cost for w in work if w.phase == phase))
        coarse = 0.0
        for sent, names in (
            (CostKind.BEFORE, (CostKind.FORWARD,)),
            (CostKind.SUMS, (CostKind.INPUT, CostKind.WEIGHT)),
        ):
            sends, works = step.by_unit(sent), step.by_unit(*names)
            coarse += max(sends[0] + sends[1], works[1] + works[2]) if sends.any() else 0.0
        more = step.step_s(places.blocks, 1) - problem.pricing.cost(b.mesh, b.strategy)
        assert -1e-9 * whole <= more <= coarse + 1e-9 * whole


@pytest.mark.parametrize("again", [False, True])
def test_the_bytes_of_a_stage_are_the_accounts(again):
    """For the whole model with one micro-batch in flight, they equal the account of a plan without stages."""
    t = tables_of(SCANNED, 4, "each", again)
    split = t.cheapest(ONLY, 8)
    account = memory(t.graph, t.mesh, split.configs)
    assert split.nbytes(8, 1) - split.buffers + max(p.inner for p in split.parts.values()) == pytest.approx(
        account.total - account.buffers, rel=1e-3
    )


def test_once_a_step_holds_whole_sums_of_gradients():
    each, once = (tables_of(SCANNED, 4, w) for w in ("each", "hoisted"))
    configs = once.cheapest(MIDDLE, 4).configs
    a, b = (
        part_costs(t.graph, t.places, t.mesh, configs, t.model, "adam", t.weights)["block"]
        for t in (each, once)
    )
    assert (
        b[CostKind.SUMS] > a[CostKind.SUMS] == 0
        and b[CostKind.WEIGHT] == a[CostKind.WEIGHT]
        and b[CostKind.WEIGHT_SENT] <= a[CostKind.WEIGHT_SENT]
    )
    assert (
        b[CostKind.FORWARD] == a[CostKind.FORWARD]
        and b[CostKind.FORWARD_SENT] <= a[CostKind.FORWARD_SENT]
        and b[CostKind.AFTER] <= a[CostKind.AFTER] <= b[CostKind.AFTER] + b[CostKind.BEFORE]
    )
    assert b.memory["gradients"] > 0 and a[CostKind.KEPT] == b[CostKind.KEPT]


def test_weights_that_are_gathered_each_time_are_gathered_again_in_backward():
    """Where backward needs them: products whose other factor has a gradient. This was priced once. Recomputed blocks
    gathered twice before."""
    problem = SplitProblem.of(
        traced_model(SCANNED, None, (), CompileOptions(devices=4))[0].graph, 4, "h100x8", "analytic", "adam"
    )
    fsdp = next(b for b in price_baselines(problem)[0] if b.name == "fsdp")

    def parts(weights, again=False):
        of = tables_of(SCANNED, 4, weights, again)
        return part_costs(of.graph, of.places, fsdp.mesh, fsdp.strategy, of.model, "adam", weights)

    each, once, recomputed = parts("each"), parts("hoisted"), parts("each", True)["block"]
    assert (
        each["block"][CostKind.INPUT_SENT]
        == each["block"][CostKind.FORWARD_SENT]
        > once["block"][CostKind.INPUT_SENT]
        == 0
    )
    assert (
        0 < recomputed[CostKind.RECOMPUTE_SENT] <= recomputed[CostKind.FORWARD_SENT]
        and recomputed[CostKind.INPUT_SENT] == 0
    )
    assert (
        each["first"][CostKind.FORWARD_SENT] > each["first"][CostKind.INPUT_SENT] == 0
    )  # the gradient of a look-up needs no table


def test_products_of_a_derivative_rule_are_counted_where_they_run() -> None:
    """Each product of a node's backward takes one item, also those of a rule that the program states."""

    @jax.custom_vjp
    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    product.defvjp(
        lambda w, x: (x @ w, (w, x)),
        lambda given, g: (given[1].T @ jnp.tanh(g), jnp.tanh(g @ given[0].T)),
    )

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(product(w, jnp.tanh(x @ w)))

    w, x = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((8, 16), "float32")
    graph = simplify(trace(loss, w, x).graph)
    mesh, backward = mesh_from("2", 2), 0
    for n in graph.nodes:
        work = node_work(graph, n, np.full((1, 1), -1, np.int8), mesh)
        products = [w for w in work if w.phase == "backward" and w.kind in ("matmul", "conv")]
        assert len([*products_of_weights(graph, n)]) == len(products), n.name
        backward += len(products)
    assert any(op.backward for n in graph.nodes for op in n.ops) and backward == 3
