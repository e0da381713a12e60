"""How often light ops read their operands: batch norms, softmax over short and long rows, layer norms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def moved_by_light_ops(function, weight, rows: int, dtype: str) -> dict[str, float]:
    """Phase -> the bytes that light ops move for each element of a product's result, which the function reads."""

    def loss(p, x, labels):
        return function(x @ p["before"], p, labels)

    size = weight[1]
    params = {
        "before": jax.ShapeDtypeStruct(weight, dtype),
        "behind": jax.ShapeDtypeStruct((size, 8), dtype),
    }
    x, labels = jax.ShapeDtypeStruct((rows, weight[0]), dtype), jax.ShapeDtypeStruct((rows,), "int32")
    graph = simplify(trace(loss, params, x, labels).graph)
    found = {"forward": 0.0, "backward": 0.0}
    for node in graph.nodes:
        for w in node_work(graph, node, np.full((1, 1), -1, np.int8), MESH):
            if w.kind == "memory" and w.phase != "update":
                found[w.phase] += float(w.nbytes[0]) / rows / size
    return found


@pytest.mark.parametrize("columns", [50257, 512])
@pytest.mark.parametrize(("dtype", "backward"), [("float32", 8), ("bfloat16", 12)])
def test_a_cross_entropy_moves_what_xla_for_an_h100_moves(dtype, backward, columns):
    """Forward reads the logits for the maximum and for the sum, each in a kernel of its own. The maximum only keeps the
    exponentials in range, so backward reads them once, and writes the gradient. Labels are looked up in them: of a cast
    that only a look-up reads, one element a row is computed. Of bfloat16 logits, gradients of the look-ups are an array
    in float32."""

    def loss(logits, p, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), labels).mean()

    moved = moved_by_light_ops(loss, (8, columns), 256, dtype)
    size = 4 if dtype == "float32" else 2
    assert moved["forward"] == pytest.approx(2 * size, rel=0.02)
    assert moved["backward"] == pytest.approx(backward, rel=0.02)


def test_a_product_reads_what_light_ops_made_for_it():
    """An activation function between two products reads the first one's result and writes its own."""

    def loss(h, p, labels):
        return ((jax.nn.relu(h) @ p["behind"]).astype("float32") ** 2).sum()

    assert moved_by_light_ops(loss, (8, 4096), 1024, "bfloat16")["forward"] == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize(("order", "forward"), [((0, 1, 2), 0), ((0, 2, 1), 4)])
def test_a_product_reads_a_reshaped_array_where_it_is(order, forward):
    """A transposed one is written first."""

    def loss(h, p, labels):
        parts = h.reshape(1024, 16, 256).transpose(order).reshape(1024, 4096)
        return ((parts @ p["behind"]).astype("float32") ** 2).sum()

    assert moved_by_light_ops(loss, (8, 4096), 1024, "bfloat16")["forward"] == pytest.approx(forward, abs=0.1)
