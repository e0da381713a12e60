"""Convolutions that are split over space: defects of XLA's partitioner, and that pase's strategies avoid them."""

import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.fuzz import xla as xla_fuzz
from pase.api import Plan
from pase.compiler.meshes.plans import plan_of
from pase.compiler.problem.problem import SplitProblem
from pase.frontends.jax.frontend import trace
from pase.machine import mesh_from
from pase.tables.layouts import configs, dim_index

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=DIMENSIONS)


def test_xla_multiplies_the_filters_gradient_where_an_axis_is_idle():
    """The reason for ``pase.tables.layouts.conv_places``. If this test fails, XLA is fixed: remove that rule."""
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


@pytest.mark.some(1)
@pytest.mark.parametrize("filters", [(3, 3, 1, 8), (3, 1, 2, 8), (1, 1, 1, 8)])
def test_an_idle_axis_does_not_multiply_a_grouped_filters_gradient(filters: tuple[int, ...]) -> None:
    """XLA multiplies it, even if only images are split. Here, images or the width are split, and the other axis is
    idle."""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=filters), rng.normal(size=(4, 8, 8, 8))

    def loss(p: Any, x: Any) -> Any:
        made = jax.lax.conv_general_dilated(
            x, p, (1, 1), "SAME", dimension_numbers=DIMENSIONS, feature_group_count=8 // filters[2]
        )
        return jnp.mean(made**2)

    traced = trace(loss, w, x, name="grouped")
    problem, mesh = SplitProblem.of(traced.graph, 4, None, "analytic", "sgd"), mesh_from("2x2", 4)
    node = next(n for n in problem.graph.nodes if n.kind == "conv")
    written = node.main.writes[0].map.walks
    wanted = jax.grad(loss)(w, x)
    for place in (0, 2) if filters[1] == 1 else (0,):
        (dim,) = dim_index(node, written[place].dims)
        chosen = {n.name: np.full(2, -1, np.int8) for n in problem.graph.nodes}
        chosen[node.name] = np.array([dim, -1], np.int8)
        jp = Plan.of(plan_of(problem, chosen, mesh, "grouped", traced)).jax
        _, got = jp.value_and_grad(lowering="annotated")(*jp.device_put(w, x))
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-4, atol=1e-6)


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
    assert over_space  # there are splits over space, and in each of them every axis splits space or the batch
    assert all(s <= space | batch and (c >= 0).all() for s, c in over_space)


@pytest.mark.parametrize("pick", range(4))
def test_gradients_of_space_splits_are_right(model, pick):
    """Splits over space: height and batch, width and batch, height alone, height and width."""
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


@pytest.mark.parametrize(("groups", "channels", "out"), [(4, 8, 16), (8, 8, 16), (2, 8, 8), (8, 8, 8)])
def test_a_grouped_convolution_is_split_by_groups_never_within_one(groups, channels, out):
    """XLA's partitioner aborts the process if channels within a group are split."""

    def loss(p, x):
        made = jax.lax.conv_general_dilated(
            x * p["scale"], p["w"], (1, 1), "SAME", dimension_numbers=DIMENSIONS, feature_group_count=groups
        )
        return jnp.mean(made**2)

    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(3, 3, channels // groups, out)), jnp.float32),
        "scale": jnp.ones(channels),
    }
    batch = jnp.asarray(rng.normal(size=(8, 8, 8, channels)), jnp.float32)
    traced = trace(loss, params, batch, name="grouped")
    problem, mesh = SplitProblem.of(traced.graph, 8, None, "analytic", "sgd"), mesh_from("2x4", 8)
    node = next(n for n in problem.graph.nodes if n.kind == "conv")
    written = node.main.writes[0].map
    group, *within = (dim_index(node, [d])[0] for d in written.walks[-1].dims)
    split = {int(i) for c in configs(node, mesh) for i in c if i >= 0}
    channels_of_x = {dim_index(node, [d])[0] for d in node.main.reads[0].map.walks[-1].dims}
    assert group in split and not split & {*within, *(channels_of_x - {group})}
    # If one axis splits groups and the other images, gradients are correct.
    images = dim_index(node, written.walks[0].dims)[0]
    chosen = {n.name: np.full(2, -1, np.int8) for n in problem.graph.nodes}
    chosen[node.name] = np.array([group, images], np.int8)
    plan = Plan.of(plan_of(problem, chosen, mesh, "grouped", traced))
    _, grads = jax.value_and_grad(loss)(params, batch)
    jp = plan.jax
    placed = jp.device_put(params, batch)
    compiled = jax.jit(jp.value_and_grad(), in_shardings=jp.in_shardings()).lower(*placed).compile()
    _, split_grads = compiled(*placed)
    np.testing.assert_allclose(np.asarray(split_grads["w"]), np.asarray(grads["w"]), rtol=1e-4, atol=1e-6)
    whole = re.findall(r"f32\[8,8,8,\d+\]\S* convolution\(", compiled.as_text())
    assert not whole, "XLA alone computes all images and groups on every device"


_DEPTHWISE = """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

jax.config.update("jax_num_cpu_devices", 4)
by_channel = NamedSharding(
    Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "idle")), PartitionSpec(None, None, None, "x")
)

def made(x, w):
    x, w = (jax.lax.with_sharding_constraint(t, by_channel) for t in (x, w))
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8
    )

shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 8, 8, 8), (1, 1, 1, 8))]
jax.jit(made, out_shardings=by_channel).lower(*shapes).compile()
"""


def test_xla_ends_the_process_at_a_depthwise_convolution_with_an_idle_axis():
    """The reason for ``pase.tables.layouts.depthwise``. If this test fails, XLA is fixed: remove that rule."""
    done = subprocess.run(
        [sys.executable, "-c", _DEPTHWISE],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode < 0, done.stderr[-2000:]  # by a signal


def test_a_depthwise_convolution_split_by_channels_leaves_no_axis_idle_but_beside_images():
    def loss(p, x):
        return jnp.mean(
            jax.lax.conv_general_dilated(
                x, p, (1, 1), "SAME", dimension_numbers=DIMENSIONS, feature_group_count=8
            )
            ** 2
        )

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((3, 3, 1, 16), (8, 8, 8, 8))]
    problem = SplitProblem.of(trace(loss, *shapes, name="depthwise").graph, 8, None, "analytic", "sgd")
    node = next(n for n in problem.graph.nodes if n.kind == "conv")
    written = node.main.writes[0].map.walks
    (images,), (group, _) = (dim_index(node, written[i].dims) for i in (0, -1))
    found = {tuple(int(i) for i in c) for c in configs(node, mesh_from("2x2x2", 8))}
    assert (group, group, group) in found and (group, images, -1) in found
    assert (group, -1, -1) not in found and (-1, group, group) not in found


def test_no_random_convolutions_under_random_splits_end_the_process():
    """A few of the cases of bench/fuzz/xla.py, in a separate process."""
    found = dict(xla_fuzz.rows([0, 3, 5, 62], ["conv"]))
    assert [r["end"] for r in found.values()] == ["compiled"] * 4, found


def test_an_exchange_of_dims_of_one_element_is_taken_by_the_compiler() -> None:
    """A manually lowered case of random matmuls: XLA's verifier refused slices of such dims in different layouts."""
    xla_fuzz.compile_case(493, list(xla_fuzz.KINDS), lowering="manual")
