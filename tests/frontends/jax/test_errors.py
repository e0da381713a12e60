"""Each mistake of a user gives one clear message: what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from pase.errors import PaseError
from pase.frontends.jax.frontend import UnknownOp, trace
from pase.ir import simplify, verify

SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


MYSTERY = jax.extend.core.Primitive("mystery")
MYSTERY.def_abstract_eval(lambda a: a)


def by_hand(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(MYSTERY.bind(x) @ w)


def test_unknown_primitive_names_op_and_line() -> None:
    with pytest.raises(UnknownOp) as e:
        trace(by_hand, SQUARE, SQUARE)
    line = by_hand.__code__.co_firstlineno + 1
    assert "'mystery'" in e.value.what
    assert f"{Path(__file__).name}:{line}" in e.value.where and "(by_hand)" in e.value.where
    assert "unknown='replicate'" in e.value.fix and "frontends/jax/rules.py" in e.value.fix


def test_unknown_may_be_replicated() -> None:
    graph = simplify(trace(by_hand, SQUARE, SQUARE, unknown="replicate").graph)
    (remark,) = graph.remarks
    assert remark.kind == "unknown" and "test_errors.py" in remark.where
    (node,) = [n for n in verify(graph).nodes if n.main.name == "mystery"]
    assert {d.kind for d in node.space} == {"replicated"}


def _leaf(x: Any) -> Any:
    return {"a": {"b": x}}


def total(p: Any, *batch: Any) -> Any:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((p, batch)))


@pytest.mark.parametrize(
    ("fn", "params", "message"),
    [
        (lambda p: p * 2, SQUARE, "returns float32[4,4]: pase needs a scalar loss"),
        (lambda p: (), SQUARE, "returns nothing: pase needs a scalar loss"),
        (lambda p: jnp.sum(p > 0), SQUARE, "returns a int32 scalar, but a loss must be floating-point"),
        (lambda p: 1.0, SQUARE, "loss does not depend on any parameter"),
        (lambda p: jnp.sum(jax.lax.stop_gradient(p)), SQUARE, "loss does not depend on any parameter"),
        (total, _leaf("text"), "params['a']['b']: it is str; pass an array"),
        (total, _leaf(object()), "params['a']['b']: it is object; pass an array"),
        (total, _leaf(np.zeros((3, 0))), "params['a']['b']: it has shape (3, 0)"),
        (lambda p: p @ jnp.ones((3, 3)), SQUARE, "JAX cannot trace <lambda> on these shapes"),
        (total, {"a.b": SQUARE, "a": {"b": SQUARE}}, "two parameters have the path 'a.b'"),
    ],
)
def test_bad_input(fn: Callable[..., Any], params: Any, message: str) -> None:
    with pytest.raises(PaseError) as e:
        trace(fn, params)
    assert message in str(e.value)
    assert "\n" not in str(e.value).partition("on these shapes")[0]


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
    assert traced.param_paths == ("params",) and traced.input_paths == ("0",)
