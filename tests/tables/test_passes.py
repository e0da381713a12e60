"""How often light ops read their operands: batch norms, softmax over short and long rows, layer norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.frontends.jax.frontend import from_jax, trace
from pase.ir.simplify import simplify
from pase.machine import Mesh
from pase.tables.work import CompilerHabits, node_work

MESH = Mesh(names=("a",), sizes=(1,))


def reads(function, *shape: int) -> float:
    """The bytes that forward reads, as multiples of the input's. No node reads the result, so it is not written."""
    scalar, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((), shape))
    graph = simplify(from_jax(lambda p, x: (p, function(x)), scalar, x))
    moved = 0.0
    for node in graph.nodes:
        cfg = np.full((1, 1), -1)
        moved += sum(
            w.times * float(w.nbytes[0]) for w in node_work(graph, node, cfg, MESH) if w.phase == "forward"
        )
    return moved / (4 * np.prod(shape))


def batch_norm(x):
    mean = x.mean((0, 1, 2))
    away = x - mean
    return away * jax.lax.rsqrt((away * away).mean((0, 1, 2)) + 1e-5)


def layer_norm(x):
    away = x - x.mean(-1, keepdims=True)
    return away * jax.lax.rsqrt((away * away).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    ("function", "shape", "wanted"),
    [
        (lambda x: x * 2 + 1, (64, 1024), 1),
        (batch_norm, (8, 16, 16, 64), 3),  # for the mean, the variance and the result
        (layer_norm, (64, 1024), 1),
        (layer_norm, (64, 65536), 3),
        (lambda x: jax.nn.softmax(x), (64, 1024), 1),
        (lambda x: jax.nn.softmax(x), (64, 65536), 3),
        (lambda x: jnp.sum(x * x), (64, 1024), 1),
    ],
)
def test_reads_of_the_input(function, shape, wanted):
    assert reads(function, *shape) == pytest.approx(wanted, rel=0.01)


def _layer(y, p):
    y = y - y.mean(-1, keepdims=True)
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * p[0] + p[1]


def _root(y, p):
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * p[0]


def _fast(y, p):
    """Flax's layer norm: the scale multiplies what is left of the variance."""
    mean, squares = y.mean(-1, keepdims=True), (y * y).mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.maximum(squares - mean * mean, 0) + 1e-6) * p[0]
    return (y - mean) * scale + p[1]


@pytest.mark.parametrize(
    ("norm", "dtype", "forward", "backward"),
    [
        (_layer, "bfloat16", 4, 18),
        (_layer, "float32", 8, 28),
        (_root, "bfloat16", 4, 10),
        (_root, "float32", 8, 20),
        (_fast, "bfloat16", 6, 12),
        (_fast, "float32", 12, 24),
    ],
)
def test_norms_move_what_xla_for_an_h100_moves(norm, dtype, forward, backward):
    """Bytes an element, counted in the program that JAX 0.10.2 compiles of 16,384 rows of 768: a checkpointed norm in
    front of a product, without the products."""

    def loss(p, x):
        y = norm((x @ p["before"]).astype("float32"), p["norm"]).astype(dtype)
        return ((y @ p["behind"]).astype("float32") ** 2).sum()

    rows, width = 1024, 768
    weight, vector = jax.ShapeDtypeStruct((width, width), dtype), jax.ShapeDtypeStruct((width,), "float32")
    params = {"before": weight, "behind": weight, "norm": (vector, vector)}
    graph = simplify(trace(loss, params, jax.ShapeDtypeStruct((rows, width), dtype)).graph)
    (node,) = (n for n in graph.nodes if any(op.function.name == "rsqrt" for op in n.ops))

    def moved(habits: CompilerHabits) -> list[float]:
        work = node_work(graph, node, np.full((1, 1), -1, np.int8), MESH, habits=habits)
        found = {w.phase: float(w.nbytes[0]) / rows / width for w in work if w.kind == "memory"}
        return [found["forward"], found["backward"]]

    assert moved(CompilerHabits()) == pytest.approx([forward, backward], rel=0.002)
    size = 4 if dtype == "float32" else 2
    assert moved(CompilerHabits(splits_norms=False)) == pytest.approx([2 * size, 5 * size], rel=0.002)
    assert moved(CompilerHabits(sums_apart=False)) == pytest.approx([2 * size, 4 * size], rel=0.002)
