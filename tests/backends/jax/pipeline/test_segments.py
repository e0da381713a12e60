"""A model as a list of segments: each reads what earlier ones made, and blocks come in order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pase.backends.jax.pipeline.segments import SegmentList
from pase.errors import PaseError
from pase.frontends.jax.frontend import trace

LAYERS = 4
S = jax.ShapeDtypeStruct
PARAMS = {"first": S((8, 8), "float32"), "stack": S((LAYERS, 8, 8), "float32")}


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w), None


def looped(params: Any, x: Any) -> Any:
    h = jax.lax.scan(layer, x @ params["first"], params["stack"] * 0.5)[0]
    return jnp.mean(h**2)


def reversed_loop(params: Any, x: Any) -> Any:
    h = jax.lax.scan(layer, x @ params["first"], params["stack"], reverse=True)[0]
    return jnp.mean(h**2)


def in_a_call(params: Any, x: Any) -> Any:
    return jax.jit(looped)(params, x)


def segments_of(fn: Any, cuts: tuple[int, ...] = (1,) * LAYERS) -> tuple[SegmentList, Any]:
    made = SegmentList(traced=trace(fn, PARAMS, S((8, 8), "float32")), cuts=cuts, recomputed=())
    return made, made.segments()


@pytest.mark.parametrize("fn", [looped, reversed_loop, in_a_call])
def test_segments_read_what_was_made_before_and_come_in_the_order_of_blocks(fn: Any) -> None:
    made, segments = segments_of(fn)
    jaxpr = made.traced.jaxpr.jaxpr
    known = {*jaxpr.invars, *made.constants}
    for s in segments:
        for key in s.reads:
            assert key in known, key
        known |= set(s.makes)
    assert set(jaxpr.outvars) <= known
    order = [s.block for s in segments]
    assert order == sorted(order) and set(order) == {-1, *range(LAYERS), LAYERS}
    assert Counter(order)[0] >= 1 and all(Counter(order)[k] == 1 for k in range(1, LAYERS))
    (path,) = made.loops
    rows = [made.rows[path, stage] for stage in range(LAYERS)]
    ordered = [(k, k + 1) for k in range(LAYERS)]
    assert rows == (ordered[::-1] if fn is reversed_loop else ordered)


def test_the_iterations_of_a_stage_are_one_segment() -> None:
    made, segments = segments_of(looped, (1, 3))
    stack = made.traced.jaxpr.jaxpr.invars[made.traced.param_paths.index("stack")]
    loops = [s for s in segments if s.loop]
    assert [s.block for s in loops] == [0, 1] and all(len(s.stacks) == 1 for s in loops)
    (scaled,) = (s for s in segments if stack in s.reads)
    assert scaled.row_by_row and scaled.makes == loops[0].stacks == loops[1].stacks


@pytest.mark.parametrize("blocks", [3, 5])
def test_a_model_without_that_many_equal_blocks_is_refused(blocks: int) -> None:
    with pytest.raises(PaseError, match=f"{blocks} equal blocks in a row") as e:
        segments_of(looped, (1,) * blocks)
    assert "looped" in e.value.where and "scan" in e.value.fix
