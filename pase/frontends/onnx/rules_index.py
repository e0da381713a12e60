"""Rules for ONNX's lookups, scatters, sorts and cumulative sums, and for ops whose output size depends on the data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.common.slicing import check_places, take, take_along
from pase.frontends.common.values import Value
from pase.frontends.onnx.rules import lowers, nothing
from pase.frontends.onnx.values import OnnxCall
from pase.ir import functions
from pase.ir.functions import FUNCTIONS
from pase.ir.parameters import Cumulative
from pase.ops import indexed, nests

__all__: list[str] = []


@lowers("Gather")
def _gather(c: OnnxCall) -> Value:
    return take(c, c.x(0), c.x(1), c.integer("axis"))


@lowers("GatherElements")
def _gather_elements(c: OnnxCall) -> Value:
    return take_along(c, c.x(0), c.x(1), c.integer("axis"))


@lowers("GatherND")
def _gather_nd(c: OnnxCall) -> Value:
    x, ids, batch = c.x(0), c.x(1), c.integer("batch_dims")
    k = ids.shape[-1] if ids.shape else 0
    if not 0 <= batch < max(len(ids.shape), 1) or not 0 < k <= len(x.shape) - batch:
        raise c.fail(
            f"its {batch} batch dims do not fit indices of shape {list(ids.shape)} and data of shape {list(x.shape)}"
        )
    if ids.shape[:batch] != x.shape[:batch]:
        raise c.fail(
            f"the batch dims of its indices {list(ids.shape)} and of its data {list(x.shape)} differ"
        )
    check_places(c, ids, *x.shape[batch : batch + k])
    found = list(range(batch, batch + k))
    n = len(ids.shape) - 1
    shape = c.shape((*ids.shape[:-1], *x.shape[batch + k :]))
    if math.prod(shape) == 0:
        return nothing(shape, x.dtype)
    return c.value(
        indexed.gather(
            c.b,
            "gather",
            c.tensor(x),
            c.tensor(ids),
            shape,
            indexed.IndexedDims(
                window=list(range(n, len(shape))),
                dropped=found,
                indexed=found,
                x_batch=list(range(batch)),
                ids_batch=list(range(batch)),
            ),
        )
    )


@lowers("ScatterElements", "Scatter")
def _scatter_elements(c: OnnxCall) -> Value:
    x, ids, updates = c.x(0), c.x(1), c.x(2)
    rank = len(x.shape)
    axis = c.axis(c.integer("axis"), rank)
    if ids.shape != updates.shape or len(ids.shape) != rank:
        raise c.fail(
            f"its updates {list(updates.shape)} at indices {list(ids.shape)} do not fit data {list(x.shape)}"
        )
    check_places(c, ids, x.shape[axis])
    kept = [i != axis and ids.shape[i] == x.shape[i] for i in range(rank)]
    return c.value(nests.restrict(c.b, "scatter", c.tensors(x, updates, ids), x.shape, kept))


@lowers("ScatterND")
def _scatter_nd(c: OnnxCall) -> Value:
    x, ids, updates = c.x(0), c.x(1), c.x(2)
    k = ids.shape[-1] if ids.shape else 0
    n = len(ids.shape) - 1
    if not 0 < k <= len(x.shape) or updates.shape != (*ids.shape[:-1], *x.shape[k:]):
        raise c.fail(
            f"its updates {list(updates.shape)} at indices {list(ids.shape)} do not fit data {list(x.shape)}"
        )
    if updates.elements == 0:
        return x
    check_places(c, ids, *x.shape[:k])
    found = list(range(k))
    how = c.text("reduction", "none")
    with c.b.undetermined(unless=how in ("none", "add")):
        made = indexed.scatter(
            c.b,
            "scatter",
            c.tensor(x),
            c.tensor(ids),
            c.tensor(updates),
            indexed.IndexedDims(window=list(range(n, len(updates.shape))), dropped=found, indexed=found),
            combines=how != "none",
        )
    return c.value(made)


@lowers("TensorScatter")
def _tensor_scatter(c: OnnxCall) -> Value:
    """Writes into a key-value cache. The dim along which it writes may not be split."""
    x, update = c.x(0), c.x(1)
    axis = c.axis(c.integer("axis", -2), len(x.shape))
    if len(update.shape) != len(x.shape):
        raise c.fail(f"its updates of shape {list(update.shape)} do not fit data of shape {list(x.shape)}")
    kept = [i != axis and update.shape[i] == x.shape[i] for i in range(len(x.shape))]
    return c.value(nests.restrict(c.b, "dynamic_update_slice", c.tensors(x, update), x.shape, kept))


@lowers("TopK")
def _top_k(c: OnnxCall) -> Sequence[Value]:
    x = c.x()
    axis = c.axis(c.integer("axis", -1), len(x.shape))
    k = c.integer("k") if c.version < 10 else c.ints_of(1, "k")[0]
    if not 0 <= k <= x.shape[axis]:
        raise c.fail(f"its k is {k}, but the dim has {x.shape[axis]} elements")
    shape = c.shape([k if i == axis else s for i, s in enumerate(x.shape)])
    if math.prod(shape) == 0:
        return [nothing(shape, x.dtype), nothing(shape, "int64")]
    made = nests.sequential(c.b, functions.TOP_K, [c.tensor(x)], axis, [(shape, x.dtype), (shape, "int64")])
    return [c.value(t) for t in made]


@lowers("CumSum", "CumProd")
def _cumulative(c: OnnxCall) -> Value:
    x = c.x()
    axis, function = c.axis(c.ints_of(1, "axis")[0], len(x.shape)), FUNCTIONS[c.op.lower()]
    parameters = Cumulative(
        axis=axis, reverse=bool(c.integer("reverse")), exclusive=bool(c.integer("exclusive"))
    )
    made = nests.sequential(c.b, function, [c.tensor(x)], axis, [(x.shape, x.dtype)], parameters=parameters)
    return c.value(made[0])


@lowers("OneHot")
def _one_hot(c: OnnxCall) -> Value:
    ids, depth, values = c.x(0), c.ints_of(1, "depth")[0], c.x(2)
    rank = len(ids.shape) + 1
    axis = c.axis(c.integer("axis", -1), rank)
    shape = c.shape((*ids.shape[:axis], depth, *ids.shape[axis:]))
    if math.prod(shape) == 0:
        return nothing(shape, values.dtype)
    lead = c.tensor(c.reshape(ids, (*ids.shape[:axis], 1, *ids.shape[axis:])))
    (out,) = nests.elementwise(
        c.b, functions.EQUAL, [lead, None], [values.dtype], name="one_hot", shape=shape
    )
    return c.value(out)


# Ops whose output size depends on the data. Their results have the largest possible size.


def _whole(
    c: OnnxCall, values: Sequence[Value], outs: Sequence[tuple[Sequence[int], str]], flops: float
) -> list[Value]:
    filled = [(c.shape(s), d) for s, d in outs]
    reads = [c.tensor(v) for v in values if v.elements and not v.literal]
    made = iter(nests.opaque(c.b, c.op.lower(), reads, [o for o in filled if 0 not in o[0]], flops=flops))
    return [nothing(s, d) if 0 in s else c.value(next(made)) for s, d in filled]


@lowers("NonZero")
def _non_zero(c: OnnxCall) -> list[Value]:
    x = c.x()
    return _whole(c, [x], [((max(len(x.shape), 1), x.elements), "int64")], 2.0 * x.elements)


@lowers("Compress")
def _compress(c: OnnxCall) -> list[Value]:
    x, condition = c.x(0), c.x(1)
    if not c.has("axis"):
        return _whole(
            c, [x, condition], [((min(x.elements, condition.elements),), x.dtype)], float(x.elements)
        )
    axis = c.axis(c.integer("axis"), len(x.shape))
    n = min(x.shape[axis], condition.elements)
    shape = [n if i == axis else s for i, s in enumerate(x.shape)]
    kept = [i != axis for i in range(len(shape))]
    return [c.value(nests.restrict(c.b, "compress", [c.tensor(x)], c.shape(shape), kept))]


@lowers("Unique")
def _unique(c: OnnxCall) -> list[Value]:
    x = c.x()
    n = x.shape[c.axis(c.integer("axis"), len(x.shape))] if c.has("axis") else x.elements
    whole = x.shape if c.has("axis") else (n,)
    work = 20.0 * x.elements
    return _whole(c, [x], [(whole, x.dtype), ((n,), "int64"), ((n,), "int64"), ((n,), "int64")], work)


@lowers("NonMaxSuppression")
def _suppress(c: OnnxCall) -> list[Value]:
    boxes, scores = c.x(0), c.x(1)
    if len(boxes.shape) != 3 or len(scores.shape) != 3:
        raise c.fail(f"its boxes {list(boxes.shape)} do not fit its scores {list(scores.shape)}")
    n, classes, found = scores.shape
    most = min(int(c.number_of(2, float(found))) if c.opt(2) is not None else 0, found)
    work = 10.0 * float(n) * classes * found * max(most, 1)
    return _whole(c, [boxes, scores], [((n * classes * most, 3), "int64")], work)


@lowers("Multinomial")
def _multinomial(c: OnnxCall) -> list[Value]:
    x = c.x()
    shape = (x.shape[0], c.integer("sample_size", 1))
    made = nests.sequential(
        c.b, functions.RANDOM, [c.tensor(x)], 1, [(c.shape(shape), "int32")], name="multinomial"
    )
    return [c.value(t) for t in made]
