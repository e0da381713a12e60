"""Charges of edges and nodes: what is sent, and in which dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pase
from pase.backends.audit.xla import compare
from pase.frontends.jax.frontend import trace
from pase.ir import (
    Access,
    AccessMap,
    Dim,
    Graph,
    IterationSpace,
    Node,
    Op,
    Tensor,
    functions,
    named,
    simplify,
)
from pase.machine import Mesh
from pase.search.check import cost_of
from pase.tables.build import build
from pase.tables.charges import edge_flows, node_charges
from pase.tables.itemize import collectives, local_work, node_costs
from pase.zoo import reduced
from tests.tables.graphs import CPU, HERE, MODEL


def test_sums_of_gradients_in_eight_bits_are_those_of_the_product() -> None:
    """XLA sums the gradient of an fp8 operand in the dtype of the product's result, also through copies of it."""
    low = jnp.float8_e4m3fn

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        a, w = x.astype(low), params["v"].astype(low)
        y = jnp.dot(a, params["u"].astype(low), preferred_element_type=jnp.float32)
        z = jnp.dot(a, w, preferred_element_type=jnp.bfloat16)
        return jnp.mean((y + z + jnp.dot(a, w, preferred_element_type=jnp.float32)) ** 2)

    params = {k: jax.ShapeDtypeStruct((64, 64), "float32") for k in "uv"}
    eight = named(simplify(trace(loss, params, jax.ShapeDtypeStruct((32, 64), "float32")).graph))
    mesh, rng = Mesh(names=("a", "b"), sizes=(2, 2)), np.random.default_rng(0)
    tables, space = build(eight, mesh, MODEL)
    for _ in range(40):
        choice = np.array([rng.integers(len(cfg)) for cfg in space.configs])
        nodes = zip(eight.nodes, space.configs, choice, strict=True)
        strategy = {n.name: cfg[i] for n, cfg, i in nodes}
        work = local_work(eight, mesh, strategy, MODEL, "adam")
        listed = node_costs(work, collectives(eight, mesh, strategy, MODEL))
        np.testing.assert_allclose(cost_of(tables, choice), sum(c.total for c in listed.values()), rtol=1e-12)
    factors = {"copy": set(), "matmul": set()}
    for e in eight.edges:
        for f in edge_flows(eight, e):
            if eight.tensors[e.tensor].itemsize == 1 and f.back:
                factors[e.op.kind].add(f.sum_nbytes // f.nbytes)
    assert factors == {"copy": {4}, "matmul": {2, 4}}


def test_halo_bytes_are_those_that_a_shard_lacks() -> None:
    """A 3-wide filter over 16 rows, stride 1, same padding: each shard lacks a row above and one below."""
    tensors = {
        "x": Tensor(name="x", shape=(16, 5), dtype="float32"),
        "y": Tensor(name="y", shape=(16, 5), dtype="float32"),
    }
    op = Op(
        name="conv",
        kind="conv",
        function=functions.CONV,
        reads=(Access("x", AccessMap.parse("h@3 c")), Access("x", AccessMap.parse("h c"))),
        writes=(Access("y", AccessMap.parse("h c")),),
        differentiable=False,
    )
    space = IterationSpace((Dim(name="h", size=16), Dim(name="c", size=5)))
    node = Node(name="n", space=space, ops=(op,))
    graph = Graph(name="g", tensors=tensors, nodes=(node,))
    for ways in (2, 4):
        mesh = Mesh(names=("a",), sizes=(ways,))
        charges = [
            c for c in node_charges(graph, node, np.array([[0]], dtype=np.int8), mesh) if c.kind == "permute"
        ]
        own = 16 // ways
        needed = {r for r in range(own - 1, 2 * own + 1)} & set(range(16))  # of the second shard
        lacking = len(needed - set(range(own, 2 * own)))
        inner = 2 if ways > 2 else 1
        assert lacking == inner
        # All shards are charged the two rows of the middle shards, which take longest.
        assert [float(c.nbytes[0]) for c in charges] == [2 * 5 * 4]


def test_the_plan_moves_what_the_compiler_will() -> None:
    """A tied table has two readers. The plan's bytes equal those that XLA's CPU pipeline sends."""
    m = reduced("gpt2")
    plans = {
        x: dict(pase.compare(m.loss_fn, m.params, m.batch, devices=4, machine=x, max_axes=1))
        for x in (HERE, CPU)
    }
    for machine, by in plans.items():
        rows = {r.kind: r for r in compare(by["data_parallel"], NOTHING)}
        all_reduce = rows["all_reduce"]
        assert (all_reduce.predicted == all_reduce.on_cpu) == (machine is CPU)


NOTHING = "HloModule nothing\n\nENTRY %main () -> f32[] {\n  ROOT %x = f32[] constant(0)\n}\n"
"""A compiled program without collectives, because the test compares only the plan's own columns."""
