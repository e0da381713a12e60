"""JAX programs in Mesh-TensorFlow: scans are written out, and what cannot be expressed is named."""

import jax
import jax.numpy as jnp
import pytest

import pase
from bench.cases.plans import case_of
from pase.backends.emit import mesh_tf
from pase.errors import PaseError
from tests.backends.mesh_tf.results import needs_mesh_tf, worker


def test_what_has_no_translation_is_named():
    def loss(w, x):
        return jnp.sort(x @ w).sum()

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 8), (8, 8))]
    plan = case_of(loss, *shapes).plan("random0@2x2x2")
    with pytest.raises(PaseError, match=r"'sort' at .*test_jax_ops\.py:\d+"):
        mesh_tf.program(plan)


def test_what_jax_programs_cannot_have_is_said_at_once_with_what_to_do():
    def loss(w, x):
        def turn(h, row):
            return jnp.tanh(h @ row), None

        until = jax.lax.while_loop(lambda h: jax.lax.stop_gradient(h).sum() < 3, lambda h: h + 1, x)
        return jnp.cumsum(jax.lax.scan(turn, x, w)[0]).mean() + jax.lax.stop_gradient(until).mean()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 8, 8), (4, 8))]
    plan = pase.compile(loss, *shapes, devices=2, baselines=False)
    with pytest.raises(PaseError, match=r"'cumsum' at .*; 'while' at .* lax\.scan"):
        mesh_tf.program(plan)
    long = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((300, 8, 8), (4, 8))]
    plan = pase.compile(lambda w, x: jax.lax.scan(turn_of, x, w)[0].mean(), *long, devices=2, baselines=False)
    with pytest.raises(PaseError, match="300 iterations"):
        mesh_tf.program(plan)


def turn_of(h, w):
    return jnp.tanh(h @ w), None


@needs_mesh_tf
def test_a_scan_is_written_out_turn_by_turn():
    """Forward and in reverse, with carries that are exchanged, and stacked results: loss and gradients equal JAX's."""
    for step in worker()["scans"]:
        assert step["layout"], "nothing is split"
        assert step["loss"] == pytest.approx(step["wanted"], rel=1e-6)
        assert step["gradient_error"] <= 2e-6
