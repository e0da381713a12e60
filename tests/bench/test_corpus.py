"""FLOPs of a few programs of the corpus beside XLA's own count; the bench compares all of them."""

from __future__ import annotations

import pytest

from bench.cases.plans import case_of
from bench.programs.catalog import load
from bench.programs.child import flops

PROGRAMS = (
    "equinox.conv_net",
    "equinox.mlp",
    "linen.einsum",
    "losses.huber_loss",
    "losses.triplet",
    "nnx.attention",
    "plain.batch_statistics_under_vmap",
    "plain.branch",
    "plain.sparse_matrix",
)
"""Without loops, whose bodies XLA counts once."""


@pytest.mark.some(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_flops_are_xlas(name: str) -> None:
    """But for what XLA counts apart (exp and the like) or simplifies away: up to a quarter in programs this small."""
    fn, *args = load()[name]()
    found = flops(fn, args, case_of(fn, *args, name=name).problem.graph)
    assert 0.9 < found["flops"] < 1.25
