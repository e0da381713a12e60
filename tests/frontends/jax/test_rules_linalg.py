"""Linear algebra: a batch of matrices may be split, and a matrix not; the FLOPs are those of the textbooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

from pase.frontends.jax.frontend import trace
from tests.frontends.jax.cases import graphs


def test_batches_of_matrices_may_be_split() -> None:
    raw, _ = graphs("fft")
    (fft,) = [n for n in raw.nodes if n.main.name == "fft"]
    assert [d.kind for d in fft.space][:2] == ["parallel", "parallel"]
    assert {d.kind for d in list(fft.space)[2:]} == {"replicated"}
    (svd,) = [n for n in graphs("linalg")[0].nodes if n.main.name == "svd"]
    assert svd.space.dims[0].kind == "parallel" and svd.space.dims[0].size == 8


@pytest.mark.parametrize(
    ("fn", "name", "flops"),
    [
        (jnp.linalg.cholesky, "cholesky", 32**3 / 3),
        (lambda a: jnp.linalg.qr(a)[1], "qr", 4 * 32**3 / 3),
        (lambda a: jnp.linalg.eigvalsh(a), "eigh", 9 * 32**3),
        (lambda a: jnp.fft.fft(a).real, "fft", 5 * math.log2(32) * 32 * 32),
    ],
)
def test_flops_of_a_matrix(fn: Callable[..., Any], name: str, flops: float) -> None:
    """For n rows and n columns, the multiples of n³ that Golub and Van Loan give; for a transform, 5 n log2(n)."""
    square = jax.ShapeDtypeStruct((4, 32, 32), jnp.float32)
    graph = trace(lambda a: fn(a), square, mode="inference").graph
    (node,) = (n for n in graph.nodes if n.main.name == name)
    points = math.prod(node.space[d].size for d in node.main.worked)  # type: ignore[misc]
    assert node.main.flops_per_point * points == pytest.approx(4 * flops)
