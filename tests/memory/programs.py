"""Programs with loops, by framework, as functions of the trip count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pase.frontends import registry
from pase.ir import Graph, named, simplify
from pase.memory.residuals import bytes_by_region

__all__ = ["JAX_LOOPS", "ONNX_LOOPS", "graph_of", "jax_loop", "onnx_loop", "residual_bytes", "spec"]

N = 16
"""The width of all loops."""


def graph_of(model: Any, *args: Any, **options: Any) -> Graph:
    """Return the graph of a model as it is searched. options: those of the trace."""
    return named(simplify(registry.trace(model, *args, **options).graph))


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


JAX_LOOPS: dict[str, Callable[[Any, jax.Array], jax.Array]] = {}
"""name -> a program with a loop, a function of the parameters and an array [turns, 4, N]."""


def _loop(f: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, jax.Array], jax.Array]:
    JAX_LOOPS[f.__name__.strip("_")] = f
    return f


def jax_loop(name: str, turns: int) -> tuple[Any, Any, Any]:
    """Return (loss, parameters, batch) of a program whose loop has this trip count."""
    loop = JAX_LOOPS[name]
    return lambda p, x: jnp.mean(loop(p, x) ** 2), {"r": spec(N, N), "w": spec(N, N)}, spec(turns, 4, N)


def _zero() -> jax.Array:
    return jnp.zeros((4, N))


def _cell(p: Any, c: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(c @ p["r"] + x @ p["w"])


@_loop
def _stacked(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, x: (h := _cell(p, c, x), h), _zero(), x)[1]


@_loop
def _last(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, x: (_cell(p, c, x), None), _zero(), x)[0]


@_loop
def _reverse(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, x: (h := _cell(p, c, x), 2 * h), _zero(), x, reverse=True)[1]


@_loop
def _read_again(p: Any, x: jax.Array) -> jax.Array:
    return _stacked(p, _stacked(p, x))


@_loop
def _bidirectional(p: Any, x: jax.Array) -> jax.Array:
    return jnp.concatenate([_stacked(p, x), _reverse(p, x)], -1)


@_loop
def _nested(p: Any, x: jax.Array) -> jax.Array:  # the iterations are those of the inner loop
    def outer(c: Any, x: Any) -> Any:
        c, ys = jax.lax.scan(lambda c, x: (h := _cell(p, c, x), h), c, x)
        return c, ys

    return jax.lax.scan(outer, _zero(), jnp.stack([x, x, x]))[1]


@_loop
def _nested_outside(p: Any, x: jax.Array) -> jax.Array:  # the iterations are those of the outer loop
    def outer(c: Any, x: Any) -> Any:
        c, ys = jax.lax.scan(lambda c, _: (h := _cell(p, c, x), h), c, None, length=3)
        return c, ys

    return jax.lax.scan(outer, _zero(), x)[1]


@_loop
def _body_again(p: Any, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda c, x: (h := _cell(p, c, x), jnp.sin(h)))
    return jax.lax.scan(body, _zero(), x)[1]


@_loop
def _loop_again(p: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: _stacked(p, jnp.sin(x)))(x)


@_loop
def _chunks(p: Any, x: jax.Array) -> jax.Array:  # a loop over chunks whose body, also a loop, is recomputed
    def chunk(c: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, x: (h := _cell(p, c, x), h), c, x)

    return jax.lax.scan(jax.checkpoint(chunk), _zero(), x.reshape(-1, 2, *x.shape[1:]))[1]


@_loop
def _maps(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.map(lambda x: jnp.tanh(x @ p["w"]), x)


@_loop
def _filled(p: Any, x: jax.Array) -> jax.Array:  # a carry of which each iteration writes a row
    def turn(i: Any, c: Any) -> Any:
        h, out = c
        h = _cell(p, h, x[i])
        return h, out.at[i].set(h)

    return jax.lax.fori_loop(0, x.shape[0], turn, (_zero(), jnp.zeros_like(x)))[1]


@_loop
def _made_before(p: Any, x: jax.Array) -> jax.Array:
    return _stacked(p, jnp.sin(x @ p["w"]))


@_loop
def _branches(p: Any, x: jax.Array) -> jax.Array:
    def body(c: Any, x: Any) -> Any:
        h = jax.lax.cond(x[0, 0] > 0, lambda c: _cell(p, c, x), lambda c: jnp.sin(c), c)
        return h, h

    return jax.lax.scan(body, _zero(), x)[1]


def _recurrent(kind: str, turns: int) -> Any:
    from onnx import TensorProto, helper

    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    shapes = {"w": (1, gates * N, N), "r": (1, gates * N, N), "b": (1, 2 * gates * N)}
    node = helper.make_node(kind, ["x", *shapes], ["y"], hidden_size=N)
    return _onnx([node], shapes, [turns, 4, N], [turns, 1, 4, N], TensorProto.FLOAT)


def _scan(turns: int) -> Any:
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["a"]),
        helper.make_node("Add", ["a", "s"], ["z"]),
        helper.make_node("Tanh", ["z"], ["h1"]),
        helper.make_node("Identity", ["h1"], ["y1"]),
    ]
    row = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, N]) for n in ("h", "s", "h1", "y1")]
    body = helper.make_graph(nodes, "body", row[:2], row[2:])
    first = helper.make_node("ReduceSum", ["x", "axis"], ["h0"], keepdims=0)
    node = helper.make_node("Scan", ["h0", "x"], ["", "y"], num_scan_inputs=1, body=body)
    return _onnx([first, node], {"w": (N, N), "axis": np.array([0])}, [turns, 4, N], [turns, 4, N], 1)


def _onnx(nodes: Any, weights: Any, x: list[int], y: list[int], dtype: int) -> Any:
    from onnx import helper, numpy_helper

    made = [
        numpy_helper.from_array(np.zeros(s, np.float32) if isinstance(s, tuple) else s, k)
        for k, s in weights.items()
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", dtype, x)], [value("y", dtype, y)], made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


ONNX_LOOPS = ("LSTM", "GRU", "RNN", "Scan")


def onnx_loop(kind: str, turns: int) -> Any:
    return _scan(turns) if kind == "Scan" else _recurrent(kind, turns)


def residual_bytes(graph: Graph) -> int:
    """What is kept from forward to backward, and what is inside the recomputed region that holds the most."""
    found = bytes_by_region(graph)
    return found.pop(None, 0) + max(found.values(), default=0)
