"""Rules for lists of tensors: TensorArray, as it appears in version 2 control flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pase.frontends.common.values import known
from pase.frontends.tf.rules_shape import pack, take
from pase.frontends.tf.values import TensorList, TfCall, TfResult
from pase.ir import Tensor
from pase.ops import loops, nests
from pase.registry import Registry

__all__ = ["LISTS"]

LISTS: Registry[Callable[[TfCall], Sequence[TfResult]]] = Registry("rule for TensorFlow list op")
_list = LISTS.register


def _operand(c: TfCall, i: int = 0) -> TensorList:
    v = c.operand(i)
    if not isinstance(v, TensorList):
        raise c.fail(f"operand {i} is not a list of tensors")
    return v


def _element(c: TfCall, i: int) -> tuple[int, ...] | None:
    """The shape of a list's elements in operand i; None if it is not known."""
    shape = c.known(i)
    if shape is None or shape.ndim != 1 or (shape < 0).any():
        return None
    return tuple(int(s) for s in shape)


@_list("TensorListReserve", "EmptyTensorList")
def _reserve(c: TfCall) -> Sequence[TfResult]:
    n = c.known(1) if c.node.op == "TensorListReserve" else None
    length = int(n.reshape(())) if n is not None and n.size == 1 else None
    return [TensorList(length=length, element=_element(c, 0), dtype=c.type("element_dtype"))]


@_list("TensorListFromTensor")
def _from_tensor(c: TfCall) -> Sequence[TfResult]:
    x = c.x(0)
    if not x.shape:
        raise c.fail("its operand is a scalar, which is not a stack of tensors")
    n, *element = c.shape_of(0)
    return [TensorList(length=n, element=tuple(element), dtype=x.dtype, stacked=x)]


@_list("TensorListStack")
def _stack(c: TfCall) -> Sequence[TfResult]:
    return [stacked(c, _operand(c))]


def stacked(c: TfCall, a: TensorList) -> Tensor:
    """The elements of a list, stacked as one tensor."""
    if a.stacked is not None:
        return a.stacked
    parts = dict(a.parts)
    if not parts:
        if a.element is None or a.length is None:
            raise c.fail("its list is empty, and the shape of the list is not known")
        return c.b.constant(c.shape((a.length, *a.element)), a.dtype)
    first = next(iter(parts.values()))
    n = a.length if a.length is not None else max(parts) + 1
    if n > 10_000 or not all(0 <= k < n for k in parts):
        raise c.fail(
            f"its list of {n} tensors is too long, or is set at elements out of range: {sorted(parts)[:5]}"
        )
    rest = None if len(parts) == n else c.b.constant(first.shape, first.dtype)
    return pack(c, [parts.get(k) or rest for k in range(n)], 0)  # type: ignore[misc]


@_list("TensorListGetItem")
def _get(c: TfCall) -> Sequence[TfResult]:
    """An element with a known index is a slice. With any other index, it is one iteration's slice of the stack."""
    a = _operand(c)
    n = None if c.known(1) is None else c.number(1, "index")
    if n in dict(a.parts):
        return [dict(a.parts)[n]]
    whole = stacked(c, a)
    if n is not None:
        if a.length is not None and not 0 <= n < a.length:
            raise c.fail(f"it reads element {n} of a list of {a.length}")
        return [take(c, whole, 0, n)]
    return [loops.unstack(c.b, whole)]


@_list("TensorListSetItem")
def _set(c: TfCall) -> Sequence[TfResult]:
    """Elements that are set at a known index are kept separately. An element set at a loop's counter gets index -1.

    The loop then stacks it.
    """
    a, at, x = _operand(c), c.known(1), c.x(2)
    if a.stacked is not None:
        kept = [False, *[True] * (len(a.stacked.shape) - 1)]
        one = nests.reshape(c.b, x, (1, *x.shape))
        made = nests.restrict(c.b, "set_item", [a.stacked, one], a.stacked.shape, kept)
        return [replace(a, stacked=made)]
    n = -1 if at is None else c.number(1, "index")
    if at is not None and (n < 0 or (a.length is not None and n >= a.length)):
        raise c.fail(f"it sets element {n} of a list of {a.length}")
    element = tuple(int(s) for s in x.shape if isinstance(s, int))
    parts = (*[p for p in a.parts if p[0] != n], (n, x))
    return [replace(a, parts=parts, element=element, dtype=x.dtype)]


@_list("TensorListPushBack")
def _push(c: TfCall) -> Sequence[TfResult]:
    a, x = _operand(c), c.x(1)
    if a.stacked is not None or any(k < 0 for k, _ in a.parts):
        raise c.fail(
            "its list grows in a loop, and so has no static shape",
            fix="create the list with a fixed size and set its elements by index",
        )
    return [replace(a, parts=(*a.parts, (len(a.parts), x)), length=None)]


@_list("TensorListLength")
def _length(c: TfCall) -> Sequence[TfResult]:
    a = _operand(c)
    n = a.length if a.length is not None else len(a.parts)
    return [known(np.array(n, np.int32))]


@_list("TensorListElementShape")
def _element_shape(c: TfCall) -> Sequence[TfResult]:
    a = _operand(c)
    if a.element is None:
        return [known(np.array(-1, c.type("shape_type")))]
    return [known(np.array(a.element, c.type("shape_type")))]


@_list("TensorListGather")
def _gather(c: TfCall) -> Sequence[TfResult]:
    """Some elements, or all elements in another order."""
    whole, ids = stacked(c, _operand(c)), c.shape_of(1)
    n = ids[0] if ids else 1
    kept = [False, *[True] * (len(whole.shape) - 1)]
    return [nests.restrict(c.b, "gather", [whole], (n, *whole.shape[1:]), kept)]


@_list("TensorListConcatV2", "TensorListConcat")
def _concat(c: TfCall) -> Sequence[TfResult]:
    whole = stacked(c, _operand(c))
    n, m, *rest = whole.shape
    lengths = np.full(int(n), int(m), np.int64)  # type: ignore[arg-type]
    return [nests.reshape(c.b, whole, (n * m, *rest)), known(lengths)]  # type: ignore[operator]
