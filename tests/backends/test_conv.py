"""Convolutions split over space: XLA's defect, and that no strategy of ours meets it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pase.api import Plan
from pase.compiler.plans import plan_of
from pase.compiler.problem import SplitProblem
from pase.frontends.from_jax import trace
from pase.machine import mesh_from
from pase.tables.layouts import configs

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=DIMENSIONS)


def test_xla_multiplies_the_filters_gradient_where_an_axis_is_idle():
    """Why ``pase.tables.layouts.conv_places`` is there. If this fails, XLA is mended: take that rule out."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    over_height = NamedSharding(mesh, PartitionSpec(None, "x"))  # y is idle
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 8, 8, 3)).astype("f"), rng.normal(size=(3, 3, 3, 4)).astype("f")

    def loss(w, x, place):
        return jnp.sum(place(conv(place(x), w)) ** 2)

    whole = jax.grad(loss)(w, x, lambda v: v)
    split = jax.jit(
        jax.grad(lambda w, x: loss(w, x, lambda v: jax.lax.with_sharding_constraint(v, over_height)))
    )(w, x)
    np.testing.assert_allclose(np.asarray(split), 4 * np.asarray(whole), rtol=1e-4)


@pytest.fixture(scope="module")
def model():
    """One convolution and a loss: (traced, problem, params, batch)."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 3, 4, 8)), jnp.float32)}
    batch = jnp.asarray(rng.normal(size=(8, 16, 16, 4)), jnp.float32)
    traced = trace(lambda p, x: jnp.mean(conv(x, p["w"]) ** 2), params, batch, name="conv")
    return traced, SplitProblem.of(traced.graph, 8, None, "analytic", "sgd"), params, batch


def test_splits_over_space_leave_no_axis_idle(model):
    _, problem, *_ = model
    node = next(n for n in problem.graph.nodes if n.kind == "conv")
    dims = [d.name for d in node.space]
    splits = [{dims[i] for i in c if i >= 0} for c in configs(node, mesh_from("2x4", 8))]
    out = node.main.writes[0].map.walks
    space, batch = {out[1].dims[0], out[2].dims[0]}, {out[0].dims[0]}
    over_space = [
        (s, c) for s, c in zip(splits, configs(node, mesh_from("2x4", 8)), strict=True) if s & space
    ]
    assert over_space  # space is split, where every axis splits space or the batch
    assert all(s <= space | batch and (c >= 0).all() for s, c in over_space)


@pytest.mark.parametrize("pick", range(4))
def test_gradients_of_space_splits_are_right(model, pick):
    """Of the splits over space that are left, one each of height and width with batch, height alone, both."""
    traced, problem, params, batch = model
    mesh = mesh_from("2x4", 8)
    node = next(n for n in problem.graph.nodes if n.kind == "conv")
    out = node.main.writes[0].map.walks
    height, width, images = (
        next(i for i, d in enumerate(node.space) if d.name == out[k].dims[0]) for k in (1, 2, 0)
    )
    wanted = [(images, height), (width, images), (height, height), (height, width)][pick]
    chosen = {n.name: np.full(2, -1, np.int8) for n in problem.graph.nodes}
    chosen[node.name] = np.array(wanted, np.int8)
    assert any((c == chosen[node.name]).all() for c in configs(node, mesh))
    plan = Plan.of(plan_of(problem, chosen, mesh, "conv", traced))
    loss, grads = jax.value_and_grad(lambda p, x: jnp.mean(conv(x, p["w"]) ** 2))(params, batch)
    jp = plan.jax
    split_loss, split = jax.jit(jp.value_and_grad(), in_shardings=jp.in_shardings())(
        *jp.device_put(params, batch)
    )
    assert float(split_loss) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(np.asarray(split["w"]), np.asarray(grads["w"]), rtol=1e-4, atol=1e-6)
