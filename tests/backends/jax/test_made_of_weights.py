"""What is made of weights alone, under FSDP: the compiled step is right and sends exactly the plan's list."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import case_of
from pase.backends.audit.xla import compare, sharded_step, unsharded_step

MADE = {
    "gelu": lambda w: jax.nn.gelu(w),
    "divided by its norm": lambda w: w / jnp.linalg.norm(w, axis=0),
    "standardised": lambda w: (w - w.mean(0)) / jnp.sqrt(w.var(0) + 1e-5),
    "merged": lambda w: w + jnp.sin(w[:, :8]) @ w[:8],
}


@pytest.mark.some(3)
@pytest.mark.parametrize("lowering", ["manual", "annotated"])
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_what_is_made_of_weights_is_split_and_sent_as_planned(made, lowering):
    def loss(p, x):
        for w in p:
            x = jnp.tanh(x @ made(w))
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    p, x = [rng.normal(size=(512, 512)) / 22 for _ in range(2)], rng.normal(size=(64, 512))
    with jax.enable_x64(True):
        case, whole = case_of(loss, p, x), unsharded_step(loss, optax.sgd(0.1), p, x)
        for strategy in ("fsdp", "random1@2x4"):
            plan = case.plan(strategy)
            step = sharded_step(plan, optax.sgd(0.1), p, x, lowering=lowering)
            assert max(whole.differences(step).values()) < 1e-12, strategy
            if lowering == "manual" and strategy == "fsdp":  # XLA merges equal collectives of the other
                rows = compare(plan, step.compiled, lowering)
                assert {r.kind: r.compiled for r in rows} == {r.kind: r.on_cpu for r in rows}, strategy
