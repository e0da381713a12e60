"""Memory over the course of a step comes to what a plan counts."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pase
from pase.api import Plan
from pase.plan.step_memory import step_memory


@pytest.mark.parametrize("how", ["", "&remat=0"])
def test_memory_over_the_step_comes_to_what_is_counted(how: str) -> None:
    p = pase.compile(f"zoo:gpt2?layers=3&batch=16{how}", devices=4, mesh="2x2", baselines=False)
    course = step_memory(p)
    assert course is not None
    held, end = course.held, course.times.index(course.forward)
    slack = len(p.nodes)
    kept = {k: sum(n.keeps.get(k, 0) for n in p.nodes) for k in ("activations", "gradients")}
    assert held["activations"][end] == pytest.approx(kept["activations"], abs=slack)
    assert held["gradients"][-1] == pytest.approx(kept["gradients"], abs=slack)
    assert p.memory.gradients <= kept["gradients"] + slack
    assert held["activations"][-1] == pytest.approx(0, abs=slack)
    assert course.times[-1] == pytest.approx(
        p.cost - sum(n.cost.update for n in p.nodes) - sum(x.cost for x in _on_parameters(p)), rel=0.05
    )
    stated = p.memory.total - p.memory.buffers
    assert course.peak == pytest.approx(stated, rel=0.001)
    assert all(a <= b for a, b in pairwise(course.times))


def _on_parameters(p: Plan) -> list[Any]:
    parameters = {n.name for n in p.nodes if n.op == "parameter"}
    return [c for c in p.collectives if c.node in parameters]


def test_each_region_adds_its_own_bytes() -> None:
    """Three recomputed blocks of unequal width: each is there during its own backward, and the peak is the plan's."""
    widths, d = (64, 1024, 256), 128
    names = [f"{side}{i}" for i in range(3) for side in "ab"]
    shapes = {n: (d, widths[int(n[1])]) if n[0] == "a" else (widths[int(n[1])], d) for n in names}
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}

    def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for i in range(3):

            def block(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
                return x + jnp.tanh(jnp.sin(x @ a) * jnp.cos(x @ a)) @ b

            x = jax.checkpoint(block)(x, p[f"a{i}"], p[f"b{i}"])
        return jnp.sum(x**2)

    x = jax.ShapeDtypeStruct((4096, d), jnp.float32)
    p = pase.compile(loss, params, x, devices=1, baselines=False, remat="none", accumulate=1)
    course = step_memory(p)
    assert course is not None
    kept: Counter[int] = Counter()
    for n in p.nodes:
        kept[n.recomputed_in] += n.kept_for_recompute
    assert len({v for region, v in kept.items() if region}) == 3 and not kept[0]
    bumps = [
        round(b - a) for a, b in pairwise(course.held["activations"][course.times.index(course.forward) :])
    ]
    assert all(bumps.count(v) == 1 for region, v in kept.items() if region)
    assert course.peak == pytest.approx(p.memory.total - p.memory.buffers, rel=0.01)
