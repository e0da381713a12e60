"""Simplifying preserves what is computed: every op once, its points, its order, and the tensors at the boundaries.

This is checked on random programs and on every reduced zoo model.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import networkx as nx
import pytest
from hypothesis import given, settings

from pase import zoo
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, from_text, named, simplify, to_text, verify
from pase.memory.residuals import kept
from tests.ir.graphs import HEAVY, flops, ops, raw, simple, without_carries
from tests.ir.programs import build, programs


def check(before: Graph, after: Graph) -> None:
    """Checks the invariants. Ops that depend on no data may disappear; all others stay, once."""
    verify(after)
    constant = {t.name for t in after.tensors.values() if t.role == "constant"}

    def work(graph: Graph) -> dict[object, float]:
        out: dict[object, float] = {}
        for n in graph.nodes:
            for op in n.ops:
                if op.kind == "copy" and op.name == "copy":
                    continue  # added by simplify
                if op.writes and all(a.tensor in constant for a in op.writes):
                    continue
                # a read may go through a copy, whose name is the original's and a suffix
                reads = tuple(a.tensor.partition("c")[0] for a in op.reads)
                key = (op.name, op.eqn, reads, tuple(a.tensor for a in op.writes))
                assert key not in out, f"{key} twice"
                points = 1
                for d in op.worked:
                    points *= n.space[d].size  # type: ignore[operator]
                out[key] = op.flops_per_point * points * op.times  # type: ignore[operator]
        return out

    assert work(after) == work(before)
    assert flops(after, *HEAVY) == flops(before, *HEAVY) or constant
    assert after.outputs == before.outputs
    assert {(t.name, t.path) for t in after.parameters} == {(t.name, t.path) for t in before.parameters}
    assert {n.ops[0].writes[0].tensor for n in after.nodes if n.kind in ("parameter", "input")} == {
        n.ops[0].writes[0].tensor for n in before.nodes if n.kind in ("parameter", "input")
    }
    flow = without_carries(after)
    assert nx.is_directed_acyclic_graph(flow)
    position = {n.name: i for i, n in enumerate(after.nodes)}
    assert all(position[u] < position[v] for u, v in flow.edges())
    for n in after.nodes:  # ops of a node stand in an order in which they can run
        made: set[str] = set()
        for op in n.ops:
            assert all(a.tensor not in n.internal or a.tensor in made for a in op.reads) or op.kind == "carry"
            made.update(a.tensor for a in op.writes)
    readers: dict[str, set[str]] = {}
    for n in after.nodes:  # several readers in one loop go through one copy
        for op, a in n.reads:
            if (
                after.tensors[a.tensor].elements != 1
                and after.producer[a.tensor].kind not in ("copy", "parameter", "input")
                if a.tensor in after.producer
                else False
            ):
                readers.setdefault(f"{a.tensor} {op.scope}", set()).add(n.name)
    assert all(len(who) == 1 for who in readers.values()), readers


@settings(max_examples=60)
@given(programs)
def test_random_programs(steps: list[tuple[str, int, int]]) -> None:
    loss, params, x = build(steps)
    before = verify(trace(loss, params, x, name="random").graph)
    after = simplify(before)
    check(before, after)
    called = named(after)
    assert len({n.name for n in verify(called).nodes}) == len(after.nodes)
    assert from_text(to_text(called)) == called
    assert all(op.source for op in ops(called) if op.kind in HEAVY)


@pytest.mark.some(7)
@pytest.mark.parametrize("model", zoo.names())
def test_zoo(model: str) -> None:
    check(raw(model), simplify(raw(model)))
    verify(simple(model))


@pytest.mark.some(5)
@pytest.mark.parametrize("model", zoo.names())
def test_no_stray_views(model: str) -> None:
    """Between two nodes, there is no node of views only that just renames or reorders elements."""
    graph = simple(model)
    for n in graph.nodes:
        if n.kind == "view":
            (read, write) = n.ops[0].reads[0].map, n.ops[-1].writes[0].map
            assert sorted(read.dims) != sorted(write.dims), n.name


def compute(graph: Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.kind not in ("parameter", "input")]


def test_a_transformer_layer_is_a_dozen_nodes() -> None:
    """12 unrolled layers of GPT-2 at full size, with attention written out: norms, four projections, two attention
    products, softmax, two feed-forward products, and copies if several ops read the residual stream or a norm."""
    m = zoo.get("gpt2?scan=0&attention=plain")
    before = trace(m.loss_fn, m.params, m.batch).graph
    after = named(simplify(before))
    nodes = compute(after)
    assert len(before.nodes) > 1000 and len(nodes) <= 160
    layer = [n for n in nodes if n.startswith("blocks.5.")]
    assert layer == [
        f"blocks.5.{w}:dot"
        for w in ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "ff.w1", "ff.w2")
    ]
    assert sum(n.startswith("dot@attend") for n in nodes) == 24
    assert sum(n.startswith("reduce@attend") for n in nodes) == 12  # softmax, with its mask and scale


def test_a_looked_up_row_moves_in_its_narrow_type() -> None:
    """A cast after a lookup is a node of its own, even if its readers are light, so that the narrower tensor is
    resharded. The input of a rematerialised region is kept in that dtype, too."""

    def loss(table: jax.Array, tokens: jax.Array) -> jax.Array:
        x = table[tokens].astype("bfloat16")

        @jax.checkpoint
        def normed(x: jax.Array) -> jax.Array:
            wide = x.astype("float32")
            return jnp.tanh(wide / jnp.sqrt((wide**2).mean(-1, keepdims=True)))

        return normed(x).sum()

    shapes = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((16,), "int32")
    graph = named(simplify(trace(loss, *shapes).graph))
    read = {
        t.dtype
        for n in graph.nodes
        if n.kind == "reduce"
        for t in (graph.tensors[a.tensor] for _, a in n.reads)
    }
    assert "bfloat16" in read and "float32" not in read
    wide = [
        t for t in kept(graph) if graph.tensors[t].shape == (16, 32) and graph.tensors[t].dtype == "float32"
    ]
    assert not [t for t in wide if kept(graph)[t].region is None]


def test_fused_projections_keep_their_heads() -> None:
    """After one matmul for q, k and v, the parts of the result cannot be split, but the heads of the scores can."""
    import jax
    import jax.numpy as jnp

    def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        q, k, v = (t.reshape(4, 16, 4, 8) for t in jnp.split(x @ p["qkv"], 3, axis=-1))
        weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
        return jnp.sum(jnp.einsum("bhst,bthk->bshk", weights, v).reshape(4, 16, 32) @ p["out"])

    shape = jax.ShapeDtypeStruct
    params = {"qkv": shape((32, 96), jnp.float32), "out": shape((32, 32), jnp.float32)}
    graph = simplify(trace(loss, params, shape((4, 16, 32), jnp.float32)).graph)
    products = [n for n in graph.nodes if n.kind == "matmul"]
    assert len(products) == 4
    for n in products:
        kinds = {d.size: d.kind for d in n.space}
        assert "replicated" not in kinds.values(), n


def test_an_accuracy_does_not_bind_the_loss() -> None:
    """argmax over the vocabulary must see all of it, but the cross-entropy of the same logits need not."""
    import jax
    import jax.numpy as jnp

    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = jnp.tanh(x @ w)
        nll = -jnp.mean(jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(y, 4096), -1))
        return nll, jnp.mean(jnp.argmax(z, -1) == y)

    shape = jax.ShapeDtypeStruct
    arguments = shape((64, 4096), jnp.float32), shape((8, 64), jnp.float32), shape((8,), jnp.int32)
    graph = simplify(trace(loss, *arguments).graph)
    (softmax,) = [n for n in graph.nodes if any(op.name == "exp" for op in n.ops)]
    assert all(d.kind != "replicated" for d in softmax.space)


def test_cycles_do_not_arise_around_what_cannot_join() -> None:
    """a joins c, and b cannot join a (x + xᵀ). c must then not join b's group, which reads a and feeds c."""
    import jax
    import jax.numpy as jnp

    def loss(p: jax.Array, x: jax.Array) -> jax.Array:
        a = jnp.tanh(x @ p)
        b = a + a.T
        c = b * a + jnp.sin(b.T)
        return jnp.sum(c @ p)

    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    before = trace(loss, shape, shape).graph
    check(before, simplify(before))


def test_cycles_do_not_arise_around_a_wide_argmax() -> None:
    """e feeds argmax, which may not take e's dim. What depends on both must not join e's node."""
    import jax
    import jax.numpy as jnp

    def loss(p: jax.Array, x: jax.Array) -> jax.Array:
        e = jnp.exp(x @ p)
        best = jnp.argmax(e, -1, keepdims=True) == jnp.arange(1024)
        c = e * best
        return jnp.sum(jnp.sin(c + e))

    shape = jax.ShapeDtypeStruct
    before = trace(loss, shape((16, 1024), jnp.float32), shape((8, 16), jnp.float32)).graph
    check(before, simplify(before))


def test_tensors_that_meet_in_a_number_stay_apart() -> None:
    """A global norm sums over all gradients, and every update reads it. As one node, they would have all combinations
    of their configs. What reads an array besides the number stays joined."""

    def update(grads: list[jax.Array]) -> list[jax.Array]:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads))
        return [jnp.tanh(g) * jnp.minimum(1.0, 1.0 / norm) for g in grads]

    grads = [jax.ShapeDtypeStruct((8 * i, 16), jnp.float32) for i in range(1, 5)]
    before = trace(update, grads, mode="inference").graph
    after = simplify(before)
    check(before, after)
    assert max(len(n.space.dims) for n in after.nodes) == 2

    def scaled(x: jax.Array) -> jax.Array:
        return jnp.exp(x) / jnp.sum(jnp.exp(x))

    whole = simplify(trace(scaled, jax.ShapeDtypeStruct((8, 16), jnp.float32), mode="inference").graph)
    assert sum(n.kind not in ("parameter", "input", "output", "copy") for n in whole.nodes) <= 2


@pytest.mark.parametrize(
    ("made", "apart"),
    [
        (lambda w, g: jax.nn.gelu(w), True),
        (lambda w, g: g * w / jnp.linalg.norm(w, axis=0), True),
        (lambda w, g: (w - w.mean(0)) / jnp.sqrt(w.var(0) + 1e-5), True),
        (lambda w, g: jax.nn.gelu(w.T).T.astype(jnp.bfloat16), True),
        (lambda w, g: w + w[:, :4] @ jnp.tanh(w[:4] * w[4:8]), True),
        (lambda w, g: 2 * w.reshape(32, 64).T, False),
        (lambda w, g: w.astype(jnp.bfloat16), False),
    ],
)
def test_what_is_made_of_weights_alone_is_a_node_of_its_own(
    made: Callable[[jax.Array, jax.Array], jax.Array], apart: bool
) -> None:
    """So that it can be made as the weights are stored. In the product's node, its gradient would be summed whole. What
    a gradient passes before it is summed (views, casts, scales) stays with its readers."""

    def loss(p: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x) @ made(*p))

    w, g, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (32,), (8, 64)))
    before = trace(loss, (w, g), x).graph
    check(before, after := simplify(before))
    product = [n for n in after.nodes if n.kind == "matmul"][-1]
    makers = {after.producer[a.tensor] for _, a in product.reads}
    makers |= {after.producer[n.ops[0].reads[0].tensor] for n in makers if n.kind == "copy"}
    assert any(n.kind == "parameter" for n in makers) != apart
