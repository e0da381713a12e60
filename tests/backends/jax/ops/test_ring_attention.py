"""Attention over a ring of devices, each with a part of the keys, gives the whole one's numbers."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest

from pase.backends.audit.xla import compare, sharded_step
from tests.backends.jax.ops.attending import (
    EXACT,
    arrays,
    case,
    difference,
    model,
    planned,
)


@pytest.fixture
def float64() -> Any:
    with jax.enable_x64(True):
        yield


RINGS = [
    ("r", {"r": "a"}, "a=8"),
    ("rh", {"r": "a", "h": "b"}, "a=4,b=2"),
    ("br", {"b": "a", "r": "b"}, "a=4,b=2"),
    ("rr", {"r": "ab"}, "a=2,b=4"),
    ("rg", {"r": "b", "g": "a"}, "a=2,b=4"),
]


@pytest.mark.some(3)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("split", "mesh"), [s[1:] for s in RINGS], ids=[s[0] for s in RINGS])
def test_a_ring_is_the_whole(split: dict[str, str], mesh: str, causal: bool) -> None:
    """On 8 devices, parts have an odd number of positions, so they are not redistributed, and have unequal
    work under a causal mask; parts on fewer devices are redistributed."""
    plan = planned(case(causal, "fused"), split, mesh)
    assert "ppermute" in str(jax.make_jaxpr(plan.jax.loss())(*arrays()))
    assert difference(plan, model(causal, None)) < EXACT


@pytest.mark.usefixtures("float64")
def test_a_ring_sends_what_the_plan_says() -> None:
    """Except that XLA does not send the first keys and values again for backward, because nothing is recomputed."""
    plan = planned(case(True, "fused"), {"r": "a", "h": "b"}, "a=4,b=2")
    step = sharded_step(plan, optax.sgd(0.1), *arrays())
    (row,) = (r for r in compare(plan, step.compiled, step.lowering) if r.kind == "permute")
    once = next(c.nbytes for c in plan.collectives if c.kind == "permute")
    assert row.compiled == row.predicted - once > 0
