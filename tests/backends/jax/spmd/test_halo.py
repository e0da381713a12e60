"""Windows over split dims: halos come from the neighbours, and have exactly the plan's bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import case_of
from pase.backends.audit.xla import compare, sharded_step, unsharded_step
from pase.backends.jax.make import one_program_plan


def images_loss(params, images):
    """A network for images: windows with strides, groups, maxima and means over overlapping windows."""

    def conv(x, w, stride=1, groups=1):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    x = jax.nn.relu(conv(images, params["first"]) + params["bias"])
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    x = jax.nn.softmax(conv(x, params["groups"], groups=4))
    x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 2, 1), (1, 1, 2, 1), "SAME") / 6
    return jnp.mean((conv(x, params["last"], 2).sum((1, 2)) @ params["head"]) ** 2)


def test_a_window_is_padded_further_than_windows_overlap():
    """A part's first window begins in the part before it, and its last rows are in none of its own windows."""

    def loss(params, images):
        numbers = ("NHWC", "HWIO", "NHWC")
        made = jax.lax.conv_general_dilated(
            images, params["w"], (2, 1), [(1, 0), (1, -1)], dimension_numbers=numbers
        )
        return jnp.mean(made**2)

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params, images = (
            {"w": jnp.asarray(rng.normal(size=(2, 1, 1, 2)))},
            jnp.asarray(rng.normal(size=(1, 8, 8, 1))),
        )
        plan = case_of(loss, params, images).plan("random0@4x2")
        assert sum(c.source == c.node and c.kind == "permute" for c in plan.collectives) >= 2
        jp = one_program_plan(plan)
        made = jax.jit(jp.value_and_grad(lowering="manual"))(*jp.device_put(params, images))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
            made,
            jax.value_and_grad(loss)(params, images),
        )


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["random1@2x4", "random2@2x2x2"])
def test_windows_reach_over_the_borders_of_parts(strategy):
    """Random strategies split height and width, alone and together. Halos have exactly the plan's bytes."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        shapes = {
            "first": (5, 3, 4, 8),
            "bias": (8,),
            "groups": (3, 3, 2, 16),
            "last": (3, 3, 16, 8),
            "head": (8, 8),
        }
        params = {k: jnp.asarray(rng.normal(size=s) / 4) for k, s in shapes.items()}
        images = jnp.asarray(rng.normal(size=(8, 32, 16, 4)))
        plan = case_of(images_loss, params, images).plan(strategy)
        assert sum(c.source == c.node and c.kind == "permute" for c in plan.collectives) >= 2
        optimizer = optax.adam(1e-2, eps=1e-3)
        step = sharded_step(plan, optimizer, params, images, lowering="manual")
        assert max(unsharded_step(images_loss, optimizer, params, images).differences(step).values()) < 1e-12
        for row in compare(plan, step.compiled, "manual"):
            assert row.compiled == row.predicted
