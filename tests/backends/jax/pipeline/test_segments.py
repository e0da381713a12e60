"""A model as a list of segments: each reads what earlier ones made, and blocks come in order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pase.backends.jax.pipeline.segments import SegmentList, StageRows
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


def segments_of(fn: Any, blocks: int = LAYERS) -> tuple[SegmentList, Any]:
    made = SegmentList(traced=trace(fn, PARAMS, S((8, 8), "float32")), blocks=blocks, recomputed=())
    return made, made.segments()


@pytest.mark.parametrize("fn", [looped, reversed_loop, in_a_call])
def test_segments_read_what_was_made_before_and_come_in_the_order_of_blocks(fn: Any) -> None:
    made, segments = segments_of(fn)
    jaxpr = made.traced.jaxpr.jaxpr
    known = {*jaxpr.invars, *made.constants}
    for s in segments:
        for key in s.reads:
            assert key in known or (isinstance(key, StageRows) and key.of in known), key
        known |= set(s.makes)
    assert set(jaxpr.outvars) <= known
    order = [s.block for s in segments]
    assert order == sorted(order) and set(order) == {-1, *range(LAYERS), LAYERS}
    assert Counter(order)[0] >= 1 and all(Counter(order)[k] == 1 for k in range(1, LAYERS))
    assert list(made.reverse.values()) == [fn is reversed_loop]


def test_elementwise_work_on_a_stack_can_run_on_the_rows_of_a_stage() -> None:
    made, segments = segments_of(looped)
    (path,) = made.loops
    scaled = [s for s in segments if s.by_rows is not None]
    rows = [s.by_rows(path) for s in scaled if s.by_rows is not None]
    stack = made.traced.jaxpr.jaxpr.invars[made.traced.param_paths.index("stack")]
    (one,) = (r for r in rows if StageRows(stack, path) in r.reads)
    assert all(isinstance(key, StageRows) and key.loop == path for key in one.makes)


@pytest.mark.parametrize("blocks", [3, 5])
def test_a_model_without_that_many_equal_blocks_is_refused(blocks: int) -> None:
    with pytest.raises(PaseError, match=f"{blocks} equal blocks in a row") as e:
        segments_of(looped, blocks)
    assert "looped" in e.value.where and "scan" in e.value.fix
