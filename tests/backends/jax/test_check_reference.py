"""The unsharded step that ``plan.jax.check`` compares with: where it runs, its rounding, its micro-batches."""

from __future__ import annotations

from unittest.mock import patch

import jax.numpy as jnp
import pytest
from flax import nnx

import pase
from bench.audit.check_faults import planted, state_fault
from bench.cases.plans import case_of
from pase.errors import PaseError
from tests.backends.jax.checked import BATCH, PARAMS, D, F, random_plan


@pytest.fixture(scope="module")
def plan():
    return random_plan()


def test_the_unsharded_step_is_run_where_it_fits(plan):
    with patch("pase.backends.jax.check_reference._free_bytes", lambda device: 100.0):
        found = plan.check(PARAMS, BATCH, against="unsharded", most_lines=0)
    assert found.reference is None and "one device has 100 B free" in found.no_reference


def test_products_of_bfloat16_round_by_more_than_their_parameters_do():
    """The reference's own rounding is that of the dtype in which the program computes."""

    def narrow(p, batch):
        h = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ p["w1"].astype(jnp.bfloat16))
        return jnp.mean((h @ p["w2"].astype(jnp.bfloat16) - batch["y"]) ** 2)

    params = {k: PARAMS[k] for k in ("w1", "w2")}
    found = case_of(narrow, params, BATCH).plan("random1@2x4").jax.check(params, BATCH, most_lines=0)
    assert not found.by("off") and max(p.difference for p in found.parameters) > 1e-4, str(found)


class Drops(nnx.Module):
    """Draws random numbers, and counts its calls."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.w1, self.w2 = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)
        self.dropout, self.calls = nnx.Dropout(0.5, rngs=rngs), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.w2(self.dropout(jnp.tanh(self.w1(x))))


def test_state_and_random_numbers_in_micro_batches():
    """The reference runs micro-batches too. The whole batch would draw other numbers and count one call."""
    plan = pase.compile(
        lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
        Drops(),
        BATCH,
        devices=4,
        accumulate=2,
        memory_limit="none",
        baselines=False,
    )
    found = plan.jax.check(Drops(), BATCH, most_lines=0)
    assert found.reference.kind == "the unsharded step in 2 micro-batches" and found.reference.loss_agrees
    assert found.verdict == "agrees" and len(found.reference.state) >= 2, str(found)
    assert "2 micro-batches" in found.remarks[0]
    with planted(state_fault):
        off = plan.jax.check(Drops(), BATCH, most_lines=0)
    assert off.verdict == "off" and not off.by("off") and "OFF state" in str(off)
    with pytest.raises(PaseError, match="state"):
        off.raise_if_off()
