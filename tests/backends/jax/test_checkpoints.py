"""Parameters of a checkpoint are read into a plan's layouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.errors import PaseError

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (32, 16))


def test_parameters_are_restored_into_the_plans_layouts(tmp_path: Any) -> None:
    import orbax.checkpoint as ocp

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((x @ p["w"]) ** 2)

    params = {"w": jax.random.normal(KEY, (16, 64))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", params)
    plan = pase.compile(loss, params, X, devices=8, mesh="2x4", baselines=False)
    found = plan.jax.restore(tmp_path / "saved")
    np.testing.assert_array_equal(found["w"], params["w"])
    assert found["w"].sharding.is_equivalent_to(plan.jax.in_shardings()[0]["w"], 2)
    with pytest.raises(PaseError) as e:
        plan.jax.restore(tmp_path / "missing")
    assert e.value.where == str(tmp_path / "missing") and "'loss'" in e.value.what
