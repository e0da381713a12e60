"""The light ops that were measured alone, as programs, and what pase's own rule says that they move.

A kernel of light ops is priced by its bytes. How often a norm's backward, say, reads its operand is a rule of the
product (``pase.tables.work``). If a table here said so again, it could differ from what plans are priced by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pase.ir import simplify
from pase.machine import Mesh
from pase.tables.work import node_work

__all__ = ["PROGRAMS", "bytes_moved"]

_WIDTH = 8
"""The columns of the products before and after the ops, which are not counted."""
_ALONE = Mesh(names=("one",), sizes=(1,))


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
    whole = np.full((1, 1), -1, np.int8)
    return sum(
        float(work.nbytes[0])
        for node in graph.nodes
        if node.kind not in ("matmul", "parameter", "input")
        for work in node_work(graph, node, whole, _ALONE)
        if backward or work.phase == "forward"
    )


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


_Program = Callable[[Any, Any, Any, Any], Any]
PROGRAMS: dict[str, _Program] = {
    "softmax": _softmax,
    "layer norm": _layer_norm,
    "batch norm and relu": _batch_norm_and_relu,
    "cross entropy": _cross_entropy,
}
"""Kind, as the table has it -> program of the operand, a scale and a shift by column, and a label for each row."""
