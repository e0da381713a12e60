"""Results that are arguments are found through calls, loops and branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pase.frontends.jax.frontend import INLINED
from pase.frontends.jax.unchanged import unchanged

S = jax.ShapeDtypeStruct((4,), jnp.float32)


def looped(x: Any, y: Any) -> Any:
    """A carry that each iteration passes on, one that changes, and a stack of the carry."""
    (same, changed), _ = lax.scan(lambda c, _: ((c[0], c[1] + c[0]), None), (x, y), None, length=3)
    return same, changed


def swapped(x: Any, y: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, c: (c[1], c[0]), (x, y))


def sliced(x: Any, y: Any) -> Any:
    """Slices that are stacked again."""
    return lax.scan(lambda c, s: (c, s), y, x)[1]


def branched(x: Any, y: Any) -> Any:
    return lax.cond(x[0] > 0, lambda a, b: (a, b), lambda a, b: (a, a), x, y)


def until(x: Any, y: Any) -> Any:
    return lax.while_loop(lambda c: c[1][0] < 9, lambda c: (c[0], c[1] + 1), (x, y))


CASES: list[tuple[Callable[..., Any], list[int | None]]] = [
    (lambda x, y: (y, x + y, x), [1, None, 0]),
    (lambda x, y: jax.jit(lambda a, b: (b, a * 2))(x, y), [1, None]),
    (lambda x, y: jax.checkpoint(lambda a: a)(y), [1]),
    (looped, [0, None]),
    (swapped, [None, None]),
    (sliced, [0]),
    (branched, [0, None]),
    (until, [0, None]),
    (lambda x, y: jnp.zeros(4), [None]),
]


@pytest.mark.parametrize(("fn", "wanted"), CASES)
def test_what_is_passed_on_is_found(fn: Callable[..., Any], wanted: list[int | None]) -> None:
    assert unchanged(jax.make_jaxpr(fn)(S, S).jaxpr, INLINED) == wanted
