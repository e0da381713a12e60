"""What a product with a result wider than its operands costs in backward."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import pase

ROWS, DEPTH, COLUMNS = 8192, 1024, 16384


def loss(params, x, *, wide):
    asked = jnp.float32 if wide else None
    y = jnp.matmul(x, params["w"], preferred_element_type=asked)
    return (y.astype(jnp.float32) ** 2).mean()


def compiled(wide: bool, machine: str = "h100x8"):
    params = {"w": jax.ShapeDtypeStruct((DEPTH, COLUMNS), jnp.bfloat16)}
    batch = jax.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16)
    return pase.compile(partial(loss, wide=wide), params, batch, devices=1, machine=machine, baselines=False)


def test_the_remark_names_the_line_and_what_a_narrow_result_saves() -> None:
    wide, narrow = compiled(True), compiled(False)
    (remark,) = wide.noted
    assert "result in float32 of operands in bfloat16" in remark.what and "test_widened.py" in remark.where
    assert "preferred_element_type" in remark.what and not narrow.noted
    ((back,), (cheap,)) = (
        [w for n in p.nodes for w in n.work if w.kind == "matmul" and w.phase == "backward"]
        for p in (wide, narrow)
    )
    assert (back.dtype, cheap.dtype) == ("float32", "bfloat16")
    assert back.cost > 1.5 * cheap.cost


def test_a_tpu_multiplies_a_wide_gradient_as_fast() -> None:
    """It multiplies float32 in one pass of bfloat16, so there is nothing to say, and no conversion in memory."""
    plan = compiled(True, "tpu_v5e")
    assert not plan.noted
    products = {w.phase: w.cost for n in plan.nodes for w in n.work if w.kind == "matmul"}
    assert products["backward"] == pytest.approx(products["forward"], rel=0.05)
