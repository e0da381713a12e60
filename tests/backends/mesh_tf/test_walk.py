"""A graph's ops as a Mesh-TensorFlow program: loops are written out, and what cannot be expressed is named at once."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import pase
from bench.cases.plans import case_of
from pase.backends.emit import mesh_tf
from pase.backends.mesh_tf.names import Names
from pase.backends.mesh_tf.program import MeshTfProgram
from pase.backends.mesh_tf.walk import translate
from pase.errors import PaseError
from pase.ir import from_text
from pase.machine import Mesh
from tests.backends.mesh_tf.results import assert_steps_are_tensorflows, needs_mesh_tf, worker


def translated(*ops: str, dtype: str = "float32") -> MeshTfProgram:
    """The program of ops on a tensor ``x``, the last of which makes the output ``y``. ``z`` is between them."""
    roles = {"x": "input", "c": "constant", "z": "activation", "z2": "activation", "y": "activation"}
    tensors = "".join(f"tensor {t} {dtype}[8] {role}\n" for t, role in roles.items())
    body = "".join(f"  {op}\n" for op in ops)
    graph = from_text(
        f"graph g\n{tensors}outputs y\n\nnode in.x (b=8)\n  input input -> x[b] | eqn=x\n\nnode n (b=8)\n{body}"
    )
    p = MeshTfProgram(
        Names(graph, Mesh(names=("x",), sizes=(2,)), {"in.x": {"b": ("x",)}, "n": {"b": ("x",)}})
    )
    leaf = graph.node["in.x"]
    dims = p.dims(leaf, leaf.ops[0].writes[0])
    p.values["x"] = p.let("x", dims[0], dims, dtype)
    translate(p)
    return p


def test_every_op_without_a_translation_is_listed_once() -> None:
    """With the first place of each, and with what to do if that is known."""
    with pytest.raises(PaseError) as e:
        translated(
            'elementwise lgamma x[b] -> z[b] | source="model.py:4"',
            'elementwise digamma z[b] -> z2[b] | source="model.py:5"',
            'elementwise lgamma z2[b] -> y[b] | source="model.py:6"',
        )
    said = str(e.value)
    assert said.count("'lgamma' at model.py:4") == 1 and "model.py:6" not in said and "lower.py" in said
    assert said.count("'digamma' at model.py:5") == 1


def test_what_no_output_reads_is_not_translated() -> None:
    p = translated("elementwise lgamma x[b] -> z[b]", "elementwise exp x[b] -> y[b]")
    assert [line for line in p.lines if "mtf.exp" in line] and "z" not in p.values


@pytest.mark.parametrize(("name", "dtype"), [("and", "int32"), ("not", "uint8"), ("div", "int32")])
def test_a_function_that_is_another_one_of_integers_is_refused(name: str, dtype: str) -> None:
    """Mesh-TF's functions are logical, and it divides by multiplication."""
    reads = "x[b]" if name == "not" else "x[b], x[b]"
    with pytest.raises(PaseError, match=dtype if name != "div" else "other integers"):
        translated(f"elementwise {name} {reads} -> y[b]", dtype=dtype)


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("elementwise exp x[b] -> y[b] | literals=?", "does not determine"),
        ("opaque Fft x[b] -> y[b]", "depends on data, or has no"),
        ("elementwise add x[b], c[b] -> y[b]", "constant whose value"),
    ],
)
def test_what_the_graph_does_not_determine_is_refused(op: str, why: str) -> None:
    with pytest.raises(PaseError, match=why):
        translated(op)


def test_what_has_no_translation_is_named() -> None:
    def loss(w, x):  # type: ignore[no-untyped-def]
        return jnp.sort(x @ w).sum()

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 8), (8, 8))]
    plan = case_of(loss, *shapes).plan("random0@2x2x2")
    with pytest.raises(PaseError, match=r"'sort' at .*test_walk\.py:\d+"):
        mesh_tf.program(plan)  # type: ignore[arg-type]


def test_what_jax_programs_cannot_have_is_said_at_once_with_what_to_do() -> None:
    def loss(w, x):  # type: ignore[no-untyped-def]
        def turn(h, row):  # type: ignore[no-untyped-def]
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


def turn_of(h, w):  # type: ignore[no-untyped-def]
    return jnp.tanh(h @ w), None


def test_a_derivative_rule_of_the_user_s_is_refused() -> None:
    """Mesh-TensorFlow would differentiate what the call computes, and not run its rule."""

    @jax.custom_vjp
    def straight(x):  # type: ignore[no-untyped-def]
        return jnp.round(x)

    straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g,))
    shapes = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2
    plan = pase.compile(lambda w, x: straight(x @ w).sum(), *shapes, devices=2, baselines=False)
    with pytest.raises(PaseError, match="without the derivative rule"):
        mesh_tf.program(plan)


@needs_mesh_tf
def test_a_scan_is_written_out_turn_by_turn() -> None:
    """Forward and in reverse, with carries that are exchanged, and stacked results: loss and gradients equal JAX's."""
    for step in worker()["scans"]:
        assert step["layout"], "nothing is split"
        assert step["loss"] == pytest.approx(step["wanted"], rel=1e-6)
        assert step["gradient_error"] <= 2e-6


@needs_mesh_tf
def test_what_tensorflow_models_cannot_have_is_named() -> None:
    said = worker()["refused"]
    assert re.search("'Cumsum' at .*running", said["cumulative"])
    assert re.search(r"'\w*While' at .*until.*depends on data", said["until"])


@needs_mesh_tf
@pytest.mark.parametrize("model", ["lstm", "parts"])
def test_a_step_is_tensorflow_s(model: str) -> None:
    """A loop over lists of tensors; and ops that take, join and pad parts of tensors."""
    assert_steps_are_tensorflows(model)
