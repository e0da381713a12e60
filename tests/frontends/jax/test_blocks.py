"""Repeated blocks of a traced program, and the program on a part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pase.errors import PaseError
from pase.frontends.jax.blocks import (
    batch_size,
    blocks_of,
    loop_line,
    loops_of,
    micro,
    on_batch,
    one_loop,
    why_no_program,
)
from pase.frontends.jax.frontend import TracedJax, trace
from pase.ir.blocks import Block

W = jax.ShapeDtypeStruct((5, 8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((12, 8), jnp.float32)


def written_out(w: Any, x: Any) -> Any:
    for i in range(5):
        x = jnp.tanh(x @ w[i])
    return jnp.sum(x)


def rolled(
    w: Any, x: Any, body: Callable[..., Any] = lambda h, w: (jnp.tanh(h @ w), None), **options: Any
) -> Any:
    return jnp.sum(lax.scan(body, jnp.sin(x), w, **options)[0])


@jax.jit
def twice(w: Any) -> Any:
    return 2 * w


def traced_of(fn: Callable[..., Any]) -> TracedJax:
    return trace(fn, W, X)


def test_layers_that_are_written_out_are_equal_runs() -> None:
    blocks = blocks_of(traced_of(written_out))
    lengths = {b.stop - b.start for b in blocks}
    assert len(blocks) >= 4 and len(lengths) == 1 and {b.prefix for b in blocks} == {""}
    assert all(a.stop == b.start for a, b in pairwise(blocks))


def test_the_body_of_a_loop_over_layers_is_a_block() -> None:
    assert blocks_of(traced_of(rolled)) == (Block(prefix="1.", start=0, stop=2),)


def test_blocks_that_the_user_rematerialises_are_left_out() -> None:
    def marked(h: Any, w: Any) -> Any:
        return jax.checkpoint(lambda h: jnp.tanh(h @ w))(h), None

    def marked_layers(w: Any, x: Any) -> Any:
        for i in range(5):
            x = jax.checkpoint(lambda h, v: jnp.tanh(h @ v))(x, w[i])
        return jnp.sum(x)

    assert blocks_of(traced_of(lambda w, x: rolled(w, x, marked))) == ()
    assert blocks_of(traced_of(marked_layers)) == () and blocks_of(traced_of(marked_layers), marked=True)


def test_loops_without_a_product_are_no_blocks() -> None:
    light = traced_of(lambda w, x: rolled(w, x, lambda h, w: (jnp.tanh(h) + jnp.sum(w), None)))
    assert blocks_of(light) == () and loops_of(light, 5) == ()


def test_a_loop_is_found_by_its_trip_count() -> None:
    traced = traced_of(rolled)
    assert loops_of(traced, 5) == ("1",) and loops_of(traced, 4) == ()
    assert one_loop(traced, 5) and not one_loop(traced, 4)
    assert "test_blocks.py" in loop_line(traced, 5)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (rolled, ""),
        (lambda w, x: rolled(w, x, reverse=True), "runs in reverse"),
        (
            lambda w, x: sum(map(jnp.sum, lax.scan(lambda h, w: (h @ w, jnp.sum(h)), jnp.sin(x), w))),
            "returns more than its carry",
        ),
        (lambda w, x: jnp.sum(lax.scan(lambda h, w: (h @ w, None), x, w)[0]), "begins with an argument"),
        (lambda w, x: rolled(w, x) + jnp.sum(w**2), "reads stacks"),
        (lambda w, x: rolled(w[::-1], x), "reads stacks"),
        (lambda w, x: rolled(twice(w) + 1, x), ""),
        (lambda w, x: rolled(twice(w), x) + jnp.sum(twice(w)), "reads stacks"),
    ],
)
def test_why_one_program_cannot_run_a_loop(fn: Callable[..., Any], why: str) -> None:
    found = why_no_program(traced_of(fn), 5)
    assert found.startswith(why) and bool(found) == bool(why)


def test_a_micro_batch_has_its_share_of_the_examples() -> None:
    traced = traced_of(rolled)
    assert batch_size(traced) == 12 and micro(traced, 1) is traced
    part = micro(traced, 3)
    assert batch_size(part) == 4 and [a.shape for a in part.jaxpr.in_avals] == [(5, 8, 8), (4, 8)]
    assert batch_size(on_batch(traced, 7)) == 7
    with pytest.raises(PaseError, match="a batch of 12 cannot be divided into 5"):
        micro(traced, 5)
