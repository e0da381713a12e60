"""How often light ops read their operands: batch norms, softmax over short and long rows, layer norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.frontends.jax.frontend import from_jax
from pase.ir.simplify import simplify
from pase.machine import Mesh
from pase.tables.work import node_work

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
