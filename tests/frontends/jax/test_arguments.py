"""Example arguments are checked, named in errors, and bound to numbers where their sizes are symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pase.errors import PaseError
from pase.frontends.jax.blocks import micro
from pase.frontends.jax.frontend import trace
from pase.frontends.jax.padding.program import padded
from pase.ir import named, simplify, verify
from tests.ir.graphs import at_sizes, canonical, graph_of

SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def _leaf(x: Any) -> Any:
    return {"a": {"b": x}}


def total(p: Any, *batch: Any) -> Any:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((p, batch)))


@pytest.mark.parametrize("size", [float("nan"), 2.5, -1])
def test_sizes_that_are_none(size: Any) -> None:
    class Leaf:
        shape, dtype = (4, size), np.dtype("float32")

    with pytest.raises(PaseError, match=r"whole number|cannot be parallelized") as e:
        trace(total, {"w": Leaf()})
    assert e.value.where == "params['w']" and "(4, " in e.value.what


def test_batch_leaves_are_named_too() -> None:
    with pytest.raises(PaseError, match=r"shape \(0,\)") as e:
        trace(total, {"w": SQUARE}, {"x": np.zeros(0)})
    assert e.value.where == "batch[0]['x']"


def test_one_array_alone_is_called_params() -> None:
    traced = trace(lambda p, x: jnp.sum(x @ p), SQUARE, SQUARE)
    assert traced.param_paths == ("params",) and traced.input_paths == ("x",)


def test_arguments_have_the_names_that_the_function_gives_them() -> None:
    """A plan, a layout file and a constraint call the batch by these names."""
    w, x = {"w": SQUARE}, np.ones((8, 4), np.float32)
    assert trace(lambda p, batch: jnp.sum(batch["x"] @ p["w"]), w, {"x": x}).input_paths == ("batch.x",)
    assert trace(lambda p, *more: jnp.sum(more[0] @ p["w"] + more[1]), w, x, x).input_paths == (
        "more.0",
        "more.1",
    )
    assert trace(jnp.vdot, SQUARE, SQUARE).input_paths == ("b",)
    whole = trace(lambda p, q, x: (p - jnp.sum(x @ q), q), SQUARE, SQUARE, x, mode="step")
    assert (whole.param_paths, whole.input_paths) == (("p", "q"), ("x",))


def test_programs_made_of_the_users_keep_the_names() -> None:
    traced = trace(
        lambda p, x: jnp.mean(x @ p["w"]), {"w": np.ones((4, 31), np.float32)}, np.ones((8, 4), np.float32)
    )
    assert micro(traced, 2).input_paths == padded(traced, {31: 32}).input_paths == ("x",)


@pytest.mark.parametrize(
    ("fn", "params", "message"),
    [
        (total, _leaf("text"), "params['a']['b']: it is str; pass an array"),
        (total, _leaf(object()), "params['a']['b']: it is object; pass an array"),
        (total, _leaf(np.zeros((3, 0))), "params['a']['b']: it has shape (3, 0)"),
    ],
)
def test_bad_input(fn: Callable[..., Any], params: Any, message: str) -> None:
    with pytest.raises(PaseError) as e:
        trace(fn, params)
    assert message in str(e.value)
    assert "\n" not in str(e.value).partition("on these shapes")[0]


BATCH, SEQ = 24, 40


def test_dims_bind_before_tracing() -> None:
    """The jaxpr then has concrete sizes, so that a backend can run it."""
    fn, params, batch = at_sizes("mlp", BATCH, SEQ)
    (b,) = export.symbolic_shape("b")
    loose = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(tuple(b if s == BATCH else s for s in t.shape), t.dtype), batch
    )
    found = trace(fn, params, loose, name="m", dims={"b": BATCH})
    assert canonical(verify(named(simplify(found.graph)))) == canonical(graph_of(fn, params, batch))
    assert all(isinstance(s, int) for v in found.jaxpr.jaxpr.invars for s in v.aval.shape)
    with pytest.raises(PaseError, match="symbolic size 'q'") as e:
        trace(fn, params, loose, name="m", dims={"q": 3})
    assert e.value.where == "model 'm'" and e.value.fix.endswith(": b")
    with pytest.raises(PaseError) as e:
        trace(fn, params, loose, name="m", dims={"b": 0})
    assert e.value.where == "dim b" and "0" in e.value.what
