"""Ops that were measured alone, as programs, and the work that pase's own rule finds in them.

How often a norm's backward reads its operand, or which product the gradient of a convolution is, are rules of the
product (``pase.tables.work``). If a table here said so again, it could differ from what plans are priced by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pase.ir import simplify
from pase.machine import Mesh
from pase.tables.work import Work, node_work

__all__ = ["PROGRAMS", "bytes_moved", "convolution"]

_WIDTH = 8
"""The columns of the products before and after the ops, which are not counted."""
_MESH, _WHOLE = Mesh(names=("one",), sizes=(1,)), np.full((1, 1), -1, np.int8)


def bytes_moved(kind: str, dtype: str, shape: tuple[int, ...], backward: bool) -> float:
    """Returns the bytes that XLA's kernels of these ops move by pase's rule.

    kind: one of ``PROGRAMS``. shape: of the operand; the last dim is the row, or the channels. backward: whether
    gradients are computed, too.
    """
    import jax

    from pase.frontends.jax.frontend import trace

    def among_products(p: dict[str, Any], x: Any, labels: Any) -> Any:
        made = PROGRAMS[kind](x @ p["before"], p["scale"], p["shift"], labels)
        return made if made.ndim == 0 else (made @ p["after"]).astype("float32").sum()

    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    columns = shape[-1]
    params = {
        "before": array(_WIDTH, columns),
        "after": array(columns, _WIDTH),
        "scale": array(columns),
        "shift": array(columns),
    }
    labels = jax.ShapeDtypeStruct(shape[:-1], "int32")
    graph = simplify(trace(among_products, params, array(*shape[:-1], _WIDTH), labels).graph)
    return sum(
        float(work.nbytes[0])
        for node in graph.nodes
        if node.kind not in ("matmul", "parameter", "input")
        for work in node_work(graph, node, _WHOLE, _MESH)
        if backward or work.phase == "forward"
    )


def convolution(dtype: str, shape: Sequence[int], what: str) -> Work:
    """Returns the work of a convolution or of one of its gradients.

    shape: images, side, channels in and out, side of the filter, stride. what: "forward", or "gradient of the input" or
    "of the filter".
    """
    import jax

    from pase.frontends.jax.frontend import trace

    images, side, channels_in, channels_out, window, stride = shape

    def loss(p: dict[str, Any], x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x @ p["before"], p["filter"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y.astype("float32").sum()

    params = {
        "before": jax.ShapeDtypeStruct((_WIDTH, channels_in), dtype),
        "filter": jax.ShapeDtypeStruct((window, window, channels_in, channels_out), dtype),
    }
    graph = simplify(trace(loss, params, jax.ShapeDtypeStruct((images, side, side, _WIDTH), dtype)).graph)
    (node,) = (n for n in graph.nodes if n.kind == "conv")
    order = ("forward", "gradient of the input", "gradient of the filter")
    return [w for w in node_work(graph, node, _WHOLE, _MESH) if w.kind == "conv"][order.index(what)]


def _softmax(x: Any, scale: Any, shift: Any, labels: Any) -> Any:
    import jax

    return jax.nn.softmax(x, axis=-1)


def _layer_norm(x: Any, scale: Any, shift: Any, labels: Any) -> Any:
    import jax

    wide = x.astype("float32")
    centred = wide - wide.mean(-1, keepdims=True)
    spread = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return (centred * spread * scale + shift).astype(x.dtype)


def _batch_norm_and_relu(x: Any, scale: Any, shift: Any, labels: Any) -> Any:
    import jax

    wide, rows = x.astype("float32"), tuple(range(x.ndim - 1))
    centred = wide - wide.mean(rows, keepdims=True)
    spread = jax.lax.rsqrt((centred**2).mean(rows, keepdims=True) + 1e-5)
    return jax.nn.relu((centred * spread * scale + shift).astype(x.dtype))


def _cross_entropy(x: Any, scale: Any, shift: Any, labels: Any) -> Any:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(x.astype("float32"), labels).mean()


_LightProgram = Callable[[Any, Any, Any, Any], Any]
PROGRAMS: dict[str, _LightProgram] = {
    "softmax": _softmax,
    "layer norm": _layer_norm,
    "batch norm and relu": _batch_norm_and_relu,
    "cross entropy": _cross_entropy,
}
"""Kind, as the table has it -> program of the operand, a scale and a shift by column, and a label for each row."""
