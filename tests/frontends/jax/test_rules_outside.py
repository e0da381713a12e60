"""Primitives beyond plain array code: what is priced, and the remark if that is not everything."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pase
from pase.errors import PaseError
from pase.frontends.jax.frontend import UnknownOp, trace
from pase.frontends.jax.rules_outside import KERNELS
from tests.frontends.jax.cases import W

S = jax.ShapeDtypeStruct
X = S((64, 32), jnp.float32)


def _double(x: Any, out: Any) -> None:
    out[...] = 2 * x[...]


def kernel(p: Any, x: Any, **options: Any) -> Any:
    call = pl.pallas_call(_double, out_shape=S(x.shape, x.dtype), name="double", **options)
    return jnp.sum(jax.lax.stop_gradient(call(x)) @ p)


def test_a_kernel_without_a_cost_asks_for_one() -> None:
    with pytest.raises(UnknownOp, match="kernel 'double'") as e:
        trace(kernel, W, X)
    assert "test_rules_outside.py" in e.value.where
    assert "pase.register_kernel('double', FLOPS)" in e.value.fix


def test_a_kernel_without_a_cost_is_replicated_on_request() -> None:
    """It runs whole on every device, and a remark says that it is not priced."""
    graph = trace(kernel, W, X, unknown="replicate").graph
    (dims,) = (n.space.dims for n in graph.nodes if n.ops[0].name == "pallas_call")
    assert all(d.kind == "replicated" for d in dims)
    (remark,) = graph.remarks
    assert "no rule for 'pallas_call'" in remark.what


def test_a_kernel_costs_what_is_said() -> None:
    def flops(*given: Any, **options: Any) -> float:
        graph = trace(lambda p, x: kernel(p, x, **options), W, X).graph
        return next(n.ops[0].flops_per_point for n in graph.nodes if n.ops[0].name == "double")

    estimate = pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=1)
    assert flops(cost_estimate=estimate) == 77
    pase.register_kernel("double", 123)
    try:
        assert flops(cost_estimate=estimate) == 123
        with pytest.raises(ValueError, match="Pallas kernel 'double' is registered twice"):
            pase.register_kernel("double", 124)
    finally:
        KERNELS.remove("double")
    with pytest.raises(PaseError, match="positive") as e:
        pase.register_kernel("double", 0)
    assert e.value.where == "kernel 'double'"


def test_a_callback_says_what_is_not_priced() -> None:
    def fn(p: Any, x: Any) -> Any:
        return jnp.sum(jax.pure_callback(np.sort, S(x.shape, x.dtype), x) @ p)

    assert "pure_callback at" in str(trace(fn, W, X).graph.remarks)


def test_zeros_between_inputs_are_no_work() -> None:
    """A transposed convolution of stride 2 reads an element of its input in one of four places."""

    def fn(w: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.conv_transpose(x, w, (2, 2), "SAME"))

    graph = trace(fn, S((4, 4, 8, 16), jnp.float32), S((8, 8, 8, 8), jnp.float32)).graph
    (conv,) = [n for n in graph.nodes if n.kind == "conv"]
    assert conv.ops[0].flops_per_point == 2.0 / 4


def _solved(a: Any, b: Any) -> Any:
    return jnp.linalg.solve(a, b), a @ a @ a


def test_a_primitive_of_a_library_costs_what_its_own_code_costs() -> None:
    """Lineax and Equinox implement primitives in JAX code, which JAX inlines when it compiles them. They are not split,
    and a remark says this."""
    solve = jax.extend.core.Primitive("solved_by_a_library")
    solve.multiple_results = True
    solve.def_impl(_solved)
    solve.def_abstract_eval(lambda a, b: (b, a))
    square, right = S((32, 32), jnp.float32), S((32, 4), jnp.float32)

    def flops(fn: Any) -> float:
        graph = trace(fn, square, right, mode="inference").graph
        assert "solved_by_a_library at" in str(graph.remarks) and "is not split" in str(graph.remarks)
        ops = [op for n in graph.nodes for op in n.ops if op.kind not in ("parameter", "input")]
        return sum(op.flops_per_point for op in ops if op.name == "solved_by_a_library")

    assert flops(lambda a, b: solve.bind(a, b)) >= 2 * 2 * 32**3


def test_a_primitive_without_code_or_rule_is_refused() -> None:
    bare = jax.extend.core.Primitive("bare")
    bare.def_abstract_eval(lambda x: x)
    with pytest.raises(UnknownOp, match=r"test_rules_outside\.py.*'bare'"):
        trace(lambda p, x: bare.bind(x) @ p, W, X, mode="inference")
