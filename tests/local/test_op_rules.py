"""Ops along whole dims, from their parameters: results and gradients are JAX's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.ir import Tensor
from pase.ir.functions import FUNCTIONS
from pase.ir.parameters import Concatenate, Cumulative, EqualPart, Pad, Parameters, Slice, Sort, Take
from pase.local.op_rules import rule_of
from pase.ops import GraphBuilder, nests

X = np.random.default_rng(0).normal(size=(3, 6, 4))
Y = np.random.default_rng(1).normal(size=(3, 2, 4))


def compared(
    op_of: Callable[[GraphBuilder, list[Tensor]], Any], in_jax: Callable[..., Any], *arrays: np.ndarray
) -> None:
    """The last op that a function of a builder and tensors makes gives JAX's results and gradients."""
    b = GraphBuilder("g")
    op_of(b, [b.input(f"x{i}", a.shape, "float64") for i, a in enumerate(arrays)])
    with jax.enable_x64(True):
        wanted, pulled = jax.vjp(in_jax, *map(jnp.asarray, arrays))
        g = np.random.default_rng(2).normal(size=wanted.shape)
        grads = pulled(jnp.asarray(g))
    rule = rule_of(b.nodes[-1].ops[0], arrays[0].shape, wanted.shape)
    assert rule is not None
    np.testing.assert_allclose(rule.made(arrays), wanted, rtol=1e-12)
    for ours, theirs in zip(rule.pulled(arrays, g), grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def restricted(shape: Sequence[int], parameters: Parameters) -> Callable[[GraphBuilder, list[Tensor]], Any]:
    return lambda b, xs: nests.restrict(b, "op", xs, shape, [False] * 3, parameters)


@pytest.mark.parametrize(
    ("start", "step", "picks"),
    [
        ((0, 2, 0), (1, 1, 1), np.s_[:, 2:5]),
        ((0, 5, 3), (1, -1, -2), np.s_[:, ::-1, 3::-2]),
        ((2, 1, 0), (1, 2, 1), np.s_[2:3, 1::2]),
        ((0, 4, 0), (1, -2, 1), np.s_[:, 4::-2]),
    ],
)
def test_a_slice(start: tuple[int, ...], step: tuple[int, ...], picks: Any) -> None:
    compared(restricted(X[picks].shape, Slice(start=start, step=step)), lambda x: x[picks], X)


@pytest.mark.parametrize(
    "config",
    [
        ((0, 0, 0), (2, 1, 0), (0, 0, 0)),
        ((0, 0, 0), (-1, -2, 0), (1, 0, 0)),
        ((1, 1, 2), (0, 3, 1), (0, 0, 0)),
        ((0, 0, 0), (-3, 1, 2), (-1, -2, 1)),
    ],
)
def test_a_padding(config: Any) -> None:
    before, _, interior = zip(*config, strict=True)
    shape = jax.lax.pad(X, np.float32(0), config).shape
    pad = Pad(before=before, interior=interior, value=-1.5)
    compared(restricted(shape, pad), lambda x: jax.lax.pad(x, jnp.asarray(-1.5, x.dtype), config), X)


@pytest.mark.some(5)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_a_running_reduction(name: str, reverse: bool) -> None:
    p = Cumulative(axis=1, reverse=reverse, exclusive=False)
    compared(
        lambda b, xs: nests.sequential(b, FUNCTIONS[name], xs, 1, [(X.shape, "float64")], parameters=p),
        lambda x: getattr(jax.lax, name)(x, axis=1, reverse=reverse),
        X,
    )


def test_a_running_sum_without_the_element_itself() -> None:
    p = Cumulative(axis=2, reverse=False, exclusive=True)
    compared(
        lambda b, xs: nests.sequential(b, FUNCTIONS["cumsum"], xs, 2, [(X.shape, "float64")], parameters=p),
        lambda x: jnp.cumsum(x, 2) - x,
        X,
    )


@pytest.mark.parametrize("descending", [False, True])
def test_a_sort(descending: bool) -> None:
    p = Sort(axis=1, descending=descending)
    tied = np.round(X, 1)
    for name, in_jax in (("sort", jnp.sort), ("argsort", jnp.argsort)):
        b = GraphBuilder("g")
        x = b.input("x", X.shape, "float64")
        nests.sequential(b, FUNCTIONS[name], [x], 1, [(X.shape, "float64")], parameters=p)
        rule = rule_of(b.nodes[-1].ops[0], X.shape, X.shape)
        assert rule is not None
        wanted = in_jax(tied.astype("float32"), axis=1, stable=True, descending=descending)
        np.testing.assert_allclose(rule.made([tied]), wanted, rtol=1e-6)
    sort = Sort(axis=1, descending=descending)
    compared(
        lambda b, xs: nests.sequential(b, FUNCTIONS["sort"], xs, 1, [(X.shape, "float64")], parameters=sort),
        lambda x: jnp.sort(x, 1, descending=descending),
        X,
    )


def test_a_concatenation() -> None:
    compared(lambda b, xs: nests.concat(b, xs, 1), lambda *xs: jnp.concatenate(xs, 1), X, Y, X)
    b = GraphBuilder("g")
    nests.concat(b, [b.input("x", (2, 3), "float32"), b.input("y", (2, 5), "float32")], 1)
    assert b.nodes[-1].ops[0].parameters == Concatenate(axis=1)


def test_one_of_equal_parts() -> None:
    compared(lambda b, xs: nests.part(b, "split", xs[0], 1, 3, 2), lambda x: x[:, 4:], X)
    b = GraphBuilder("g")
    nests.part(b, "split", b.input("x", (3, 6, 4), "float64"), 1, 3, 1)
    op = b.nodes[-1].ops[0]
    assert op.parameters == EqualPart(axis=1, index=1, count=3)
    rule = rule_of(op, (3, 6, 4), (3, 2, 4))
    assert rule is not None  # a device's half of each part
    half = X.reshape(3, 3, 2, 4)[:, :, :1].reshape(3, 3, 4)
    np.testing.assert_array_equal(rule.made([half]), X[:, 2:3])


def test_chosen_elements() -> None:
    """The gradients of an element that is taken twice are added."""
    compared(
        restricted((3, 4, 4), Take(axis=1, index=(5, 0, 0, 2))), lambda x: x[:, jnp.array([5, 0, 0, 2])], X
    )


def test_a_reshape_whose_dims_do_not_nest() -> None:
    compared(lambda b, xs: nests.reshape(b, xs[0], (4, 18)), lambda x: x.reshape(4, 18), X)


def test_an_op_without_parameters_has_no_rule() -> None:
    b = GraphBuilder("g")
    nests.restrict(b, "roll", [b.input("x", (4,), "float32")], (4,), [False])
    assert rule_of(b.nodes[-1].ops[0], (4,), (4,)) is None
