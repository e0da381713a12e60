"""Layers that frameworks have as one op do the work of JAX's versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pase.frontends.jax.frontend import trace
from pase.ir import Graph, Tensor, verify
from pase.ops import GraphBuilder, composites

SHAPE = (4, 6, 8)


def _norm(x: Any) -> Any:
    y = x - jnp.mean(x, -1, keepdims=True)
    return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)


def _rms(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)


CASES: dict[str, tuple[Callable[[GraphBuilder, Tensor], Tensor], Callable[..., Any]]] = {
    "softmax": (lambda b, x: composites.softmax(b, x, [2]), lambda x: jax.nn.softmax(x, -1)),
    "log_softmax": (lambda b, x: composites.log_softmax(b, x, [2]), lambda x: jax.nn.log_softmax(x, -1)),
    "mean": (lambda b, x: composites.mean(b, x, [1, 2]), lambda x: jnp.mean(x, (1, 2), keepdims=True)),
    "rms norm": (lambda b, x: composites.rms_normalize(b, x, [2], 1e-5)[0], _rms),
}


def work(graph: Graph) -> Counter[tuple[str, float]]:
    """The work by function, in FLOPs."""
    out = Counter[tuple[str, float]]()
    for n in graph.nodes:
        for op in n.ops:
            if op.kind in ("elementwise", "reduce") and op.flops_per_point:
                points = 1.0
                for d in op.worked:
                    points *= float(n.space[d].size)  # type: ignore[arg-type]
                out[op.function.name, op.flops_per_point * points] += 1
    return out


@pytest.mark.parametrize("name", CASES)
def test_work_is_that_of_jax(name: str) -> None:
    make, in_jax = CASES[name]
    b = GraphBuilder("g")
    out = make(b, b.input("x", SHAPE, "float32"))
    theirs = work(trace(in_jax, jax.ShapeDtypeStruct(SHAPE, jnp.float32), mode="inference").graph)
    if "softmax" in name:
        del theirs["max", 24.0]  # of each row's maximum and minus infinity
    assert work(verify(b.finish([out]))) == theirs


def test_statistics_of_a_normalization_keep_the_reduced_dims() -> None:
    b = GraphBuilder("g")
    made = composites.normalize(b, b.input("x", SHAPE, "float32"), [1, 2], 1e-5)
    assert made.value.shape == SHAPE
    assert made.mean.shape == made.variance.shape == made.inverse.shape == (4, 1, 1)
    again = composites.rescale(b, b.input("y", SHAPE, "float32"), made.mean, made.variance, 1e-5)
    scaled = composites.scale_and_shift(b, again, b.parameter("s", (8,), "float32"), None)
    assert again.shape == scaled.shape == SHAPE
    assert composites.scale_and_shift(b, scaled, None, None) is scaled


def test_no_gradient_flows_through_a_maximum() -> None:
    b = GraphBuilder("g")
    x = b.parameter("x", SHAPE, "float32")
    composites.shifted(b, x, [2])
    stopped, difference = (
        next(o for n in b.nodes for o in n.ops if o.name == k) for k in ("stop_gradient", "sub")
    )
    assert not b.tensors[stopped.writes[0].tensor].needs_grad
    assert b.tensors[difference.writes[0].tensor].needs_grad


@pytest.mark.parametrize("of_logits", [True, False])
def test_classes_of_a_cross_entropy_may_be_split(of_logits: bool) -> None:
    """The label's probability is looked up, and shards of the classes are summed."""
    b = GraphBuilder("g")
    x, labels = b.parameter("x", SHAPE, "float32"), b.input("labels", SHAPE[:2], "int32")
    out = (composites.cross_entropy_of_logits if of_logits else composites.cross_entropy)(b, x, labels)
    graph = verify(b.finish([out]))
    (lookup,) = (n for n in graph.nodes if n.kind == "gather")
    assert out.shape == SHAPE[:2] and [d.kind for d in lookup.space if d.size == 8] == ["reduction"]
