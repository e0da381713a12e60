"""Translates the ops of a plan's graph to statements of a Mesh-TensorFlow program, by the functions that they compute.

A rule takes the program, the node and the op, and returns the op's result. ``EXPRESSIONS`` has the elementwise
functions. ``walk`` has the rule of each kind of op.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from pase.backends.mesh_tf.names import MeshTfDim, TensorDims, flat
from pase.backends.mesh_tf.program import MeshTfProgram, MeshTfValue, number
from pase.errors import PaseError
from pase.ir import Node, Op
from pase.ir.literals import Number
from pase.ir.parameters import Concatenate, EqualPart, Pad, Slice, Take

__all__ = [
    "EXPRESSIONS",
    "REDUCTIONS",
    "ROLES",
    "call",
    "concat",
    "copy",
    "elementwise",
    "looked_up",
    "lookup",
    "pick",
    "product",
    "reduce",
    "refuse",
    "squeezed",
    "view",
]


def refuse(op: Op, why: str, fix: str = "") -> PaseError:
    """An error that says why an op cannot be translated."""
    return PaseError(
        f"the op cannot be in a Mesh-TensorFlow program: {why}",
        where=f"'{op.name}' at {op.source or op.eqn or 'an unknown line'}",
        fix=fix,
    )


# --- elementwise

EXPRESSIONS: Mapping[str, str] = {
    **{f: f"mtf.{f}" for f in ("exp", "log", "tanh", "sqrt", "rsqrt", "square", "abs", "sign", "sin", "cos")},
    **{f: f"mtf.{f}" for f in ("reciprocal", "stop_gradient", "add", "sub", "mod")},
    **{f: f"tf.math.{f}" for f in ("erf", "erfc", "expm1", "log1p", "pow", "floor", "ceil", "round")},
    **{f: f"tf.math.{f}" for f in ("tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh")},
    **{f: f"tf.math.{f}" for f in ("atan2", "is_finite", "is_nan", "is_inf")},
    **{"neg": "mtf.negative", "sigmoid": "mtf.sigmoid", "copy": "same", "rem": "tf.truncatemod"},
    **{"mul": "mtf.multiply", "div": "mtf.divide", "max": "mtf.maximum", "min": "mtf.minimum"},
    **{"div_no_nan": "tf.math.divide_no_nan", "floor_div": "tf.math.floordiv"},
    **{"eq": "mtf.equal", "ne": "mtf.not_equal", "lt": "mtf.less", "le": "mtf.less_equal"},
    **{"gt": "mtf.greater", "ge": "mtf.greater_equal"},
    **dict.fromkeys(("and", "all_of"), "mtf.logical_and"),
    **dict.fromkeys(("or", "any_of"), "mtf.logical_or"),
    **dict.fromkeys(("not", "is_false"), "mtf.logical_not"),
}
"""Function of ``pase.ir.functions`` -> a Mesh-TF function, a TensorFlow function that runs on slices ("tf.…"), or
"same" if nothing is computed."""

_INFIX = {"mtf.add": "+", "mtf.sub": "-", "mtf.multiply": "*", "mtf.divide": "/"}
ROLES = ("cast", "integer_pow", "clamp", "where", "select")
"""Functions whose operands have roles: see ``_by_role``."""
MeshTfOperand: TypeAlias = "MeshTfValue | Number"


def call(fn: str, *args: str, dtype: str = "") -> str:
    """Code that calls a function. mtf functions are called directly; TensorFlow functions run on slices."""
    if not fn.startswith("tf."):
        return f"{fn}({', '.join(args)})"
    return f"ops.cwise({', '.join((fn, *args))}{f', dtype=tf.{dtype}' if dtype else ''})"


def elementwise(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """Translate an elementwise op. Its operands, tensors and numbers, broadcast by the names of their dims."""
    reads = iter([p.read(node, a) for a in op.reads])
    parts: list[MeshTfOperand] = [next(reads) if n is None else n for n in op.numbers or ()]
    dims, dtype = p.dims(node, op.writes[0]), p.names.graph.tensors[op.writes[0].tensor].dtype
    name = op.function.name
    made: MeshTfOperand
    if name in ROLES:
        made = _by_role(p, op, parts, dtype)
    elif len(parts) == 1:
        made = _unary(p, EXPRESSIONS[name], parts[0], dtype)
    else:
        fn = EXPRESSIONS["div" if name == "reciprocal" else name]
        made = functools.reduce(lambda x, y: _binary(p, fn, x, y, dtype), parts)
    assert isinstance(made, MeshTfValue)
    if made.dtype != dtype:
        made = p.let(f"mtf.cast({made.code}, tf.{dtype})", made.order, made.dims, dtype)
    if set(made.order) != set(flat(dims)):  # no operand has some of the result's dims
        return p.let(f"mtf.broadcast({made.code}, {p.shape(flat(dims))})", flat(dims), dims, dtype)
    return replace(made, dims=dims)


def _result_dtype(fn: str, given: str, dtype: str) -> str:
    """The dtype of what a function makes of operands of a dtype. dtype: that of the op's result."""
    logical = fn.startswith("mtf.logical_") or fn in [
        EXPRESSIONS[f] for f in ("eq", "ne", "lt", "le", "gt", "ge")
    ]
    return "bool" if logical else dtype if fn.startswith("tf.") else given


def _unary(p: MeshTfProgram, fn: str, x: MeshTfOperand, dtype: str) -> MeshTfValue:
    assert isinstance(x, MeshTfValue)
    if fn == "same":
        return x
    made = _result_dtype(fn, x.dtype, dtype)
    return p.let(call(fn, x.code, dtype=made if made != x.dtype else ""), x.order, x.dims, made)


def _together(*parts: MeshTfOperand) -> tuple[MeshTfDim, ...]:
    """The dims of a result, from the operand with the most dims on."""
    order: tuple[MeshTfDim, ...] = ()
    for x in sorted((x for x in parts if isinstance(x, MeshTfValue)), key=lambda v: -len(v.order)):
        order += tuple(d for d in x.order if d not in order)
    return order


def _binary(p: MeshTfProgram, fn: str, x: MeshTfOperand, y: MeshTfOperand, dtype: str) -> MeshTfValue:
    """A function of two operands. A number becomes a literal."""
    order = _together(x, y)
    value = x if isinstance(x, MeshTfValue) else y
    assert isinstance(value, MeshTfValue)
    made = _result_dtype(fn, value.dtype, dtype)
    infix = _INFIX.get(fn)

    def let(code: str) -> MeshTfValue:
        return p.let(code, order, tuple((d,) for d in order), made)

    if not (isinstance(x, MeshTfValue) and isinstance(y, MeshTfValue)):
        if fn == "mtf.maximum" and (x == 0.0 or y == 0.0) and "float" in value.dtype:
            return let(f"mtf.relu({value.code})")
        if fn == "mtf.divide" and value is y:
            return let(f"mtf.reciprocal({y.code})" + (f" * {number(x)}" if x != 1.0 else ""))
        literal = number(y if value is x else x)
        if infix is None:
            literal = f"mtf.constant(mesh, {literal}, shape={p.shape(value.order)}, dtype=tf.{value.dtype})"
        both = (value.code, literal) if value is x else (literal, value.code)
        code = (
            f" {infix} ".join(both) if infix else call(fn, *both, dtype=made if made != value.dtype else "")
        )
        return let(code)
    if fn.startswith("tf."):
        return let(call(fn, x.code, y.code, dtype=made if made != value.dtype else ""))
    if infix is not None and x.order == order:
        return let(f"{x.code} {infix} {y.code}")
    return let(f"{fn}({x.code}, {y.code}, output_shape={p.shape(order)})")


def _by_role(p: MeshTfProgram, op: Op, parts: Sequence[MeshTfOperand], dtype: str) -> MeshTfValue:
    """A function whose operands have roles (``pase.ir.functions``)."""
    name, order = op.function.name, _together(*parts)
    dims = tuple((d,) for d in order)
    if name == "cast":
        (x,) = parts
        assert isinstance(x, MeshTfValue)
        return p.let(f"mtf.cast({x.code}, tf.{dtype})", order, dims, dtype)
    if name == "integer_pow":
        x, y = parts
        assert isinstance(x, MeshTfValue) and isinstance(y, int)
        if y < 1:
            code = f"ops.cwise(lambda x: x ** {y}.0, {x.code})"
        else:
            code = f"mtf.square({x.code})" if y == 2 else " * ".join([x.code] * y)
        return p.let(code, order, dims, x.dtype)
    if name == "clamp":
        low, x, high = parts
        if not isinstance(low, MeshTfValue) and not isinstance(high, MeshTfValue):
            assert isinstance(x, MeshTfValue)
            code = f"ops.cwise(lambda x: tf.clip_by_value(x, {number(low)}, {number(high)}), {x.code})"
            return p.let(code, order, dims, dtype)
        return _binary(p, "mtf.minimum", _binary(p, "mtf.maximum", x, low, dtype), high, dtype)
    condition, *values = parts if name == "where" else (parts[0], *reversed(parts[1:]))
    codes = [
        x.code
        if isinstance(x, MeshTfValue)
        else f"mtf.constant(mesh, {number(x)}, shape=[], dtype=tf.{dtype})"
        for x in (condition, *values)
    ]
    return p.let(f"ops.where({', '.join(codes)})", order, dims, dtype)


# --- ops that their access maps describe


def reduce(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """Translate a reduction over the dims that the result lacks."""
    x, dims = p.read(node, op.reads[0]), p.dims(node, op.writes[0])
    order = tuple(d for d in x.order if d in set(flat(dims)))
    if len(order) == len(x.order):
        return replace(x, dims=dims)
    return p.let(
        f"{REDUCTIONS[op.function.name]}({x.code}, output_shape={p.shape(order)})", order, dims, x.dtype
    )


REDUCTIONS = {
    "reduce_sum": "mtf.reduce_sum",
    "reduce_max": "mtf.reduce_max",
    "reduce_min": "mtf.reduce_min",
    "reduce_and": "mtf.reduce_all",
    "reduce_or": "mtf.reduce_any",
}
"""Function -> the Mesh-TF function of a reduction."""


def product(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """Translate a product, which is summed over the dims that the result lacks."""
    xs = [p.read(node, a) for a in op.factors]
    dims, dtype = p.dims(node, op.writes[0]), p.names.graph.tensors[op.writes[0].tensor].dtype
    code = f"mtf.einsum([{', '.join(x.code for x in xs)}], output_shape={p.shape(flat(dims))})"
    if xs[0].dtype != dtype:
        code = f"mtf.cast({code}, tf.{dtype})"
    return p.let(code, flat(dims), dims, dtype)


def view(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """Translate an op that only moves elements."""
    xs, dims = [p.read(node, a) for a in op.reads], p.dims(node, op.writes[0])
    x = xs[0]
    match op.parameters:
        case Slice(start=starts):
            sizes = p.names.graph.tensors[op.writes[0].tensor].shape
            for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                x = cut(p, x, axis, start, int(size))  # type: ignore[call-overload]
        case EqualPart(axis=axis, index=index, count=count):
            size = x.shape[axis] // count
            x = cut(p, x, axis, index * size, size)
        case Take(axis=axis, index=places):
            x = concat(p, [cut(p, x, axis, k, 1) for k in places], axis)
        case Concatenate(axis=axis):
            x = concat(p, xs, axis)
        case Pad():
            x = padded(p, x, op.parameters, p.names.graph.tensors[op.writes[0].tensor].shape)
        case _:
            return p.viewed(x, dims)
    return p.to(x, dims)


def copy(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """Translate a copy for several readers."""
    return p.viewed(p.read(node, op.reads[0]), p.dims(node, op.writes[0]))


# --- parts of tensors


def single(p: MeshTfProgram, x: MeshTfValue, axis: int) -> tuple[MeshTfValue, MeshTfDim]:
    """(the value with tensor dim ``axis`` as one unsplit dim, this dim). The dim is added if it has size 1."""
    group = x.dims[axis]
    if len(group) == 1 and group[0].axis is None:
        return x, group[0]
    extent = x.shape[axis]
    new = p.names.fresh(extent)
    dims = (*x.dims[:axis], (new,), *x.dims[axis + 1 :])
    if extent > 1:
        return p.to(x, dims), new
    order = flat(dims)
    x = p.ordered(x, flat(x.dims))
    return p.let(f"mtf.reshape({x.code}, {p.shape(order)})", order, dims, x.dtype), new


def squeezed(p: MeshTfProgram, x: MeshTfValue) -> MeshTfValue:
    """The value without dims of size 1."""
    dims = tuple(tuple(d for d in g if d.size > 1) for g in x.dims)
    if flat(dims) == flat(x.dims):
        return x
    order = tuple(d for d in x.order if d.size > 1)
    return p.let(f"mtf.reshape({x.code}, {p.shape(order)})", order, dims, x.dtype)


def cut(p: MeshTfProgram, x: MeshTfValue, axis: int, begin: int, size: int) -> MeshTfValue:
    """Slice elements begin … begin + size of one tensor dim.

    If the dim consists of several Mesh-TF dims, the first of them is unsplit, and the slice consists of whole elements
    of it, only that one is sliced. Otherwise the tensor dim first becomes one unsplit Mesh-TF dim.
    """
    extent = x.shape[axis]
    if begin == 0 and size == extent:
        return x
    group = x.dims[axis]
    inner = int(np.prod([d.size for d in group[1:]], dtype=np.int64))
    if len(group) > 1 and group[0].axis is None and begin % inner == 0 and size % inner == 0:
        part, rest = group[0], group[1:]
        begin, size = begin // inner, size // inner
    else:
        x, part = single(p, x, axis)
        rest = ()
    sliced = MeshTfDim(part.base, size, None)
    code = f'mtf.slice({x.code}, {begin}, {size}, "{p.names.name(part)}")'
    order = tuple(sliced if d == part else d for d in x.order)
    dims = tuple((sliced, *rest) if i == axis else g for i, g in enumerate(x.dims))
    p.dim(sliced)
    return squeezed(p, p.let(code, order, dims, x.dtype))


def pick(p: MeshTfProgram, x: MeshTfValue, k: int) -> MeshTfValue:
    """x at index k of its first dim, which the result lacks."""
    part = cut(p, x, 0, k, 1)
    return replace(part, dims=part.dims[1:])


def concat(p: MeshTfProgram, xs: Sequence[MeshTfValue], axis: int) -> MeshTfValue:
    """Concatenate along a tensor dim that is not split."""
    if len(xs) == 1:
        return xs[0]
    operands: list[MeshTfValue] = []
    first_dims: TensorDims | None = None
    base = p.names.fresh(1).base
    for x in xs:
        part = MeshTfDim(base, x.shape[axis])
        rest = x.dims if first_dims is None else first_dims
        first_dims = rest
        dims = (*rest[:axis], (part,), *rest[axis + 1 :])
        if x.shape[axis] > 1:
            y = p.to(x, dims)
        else:
            x = p.to(x, (*rest[:axis], (), *rest[axis + 1 :]))
            x = p.ordered(x, flat(x.dims))
            y = p.let(f"mtf.reshape({x.code}, {p.shape(flat(dims))})", flat(dims), dims, x.dtype)
        operands.append(p.ordered(y, flat(dims)))
    assert first_dims is not None
    joined = MeshTfDim(base, sum(x.shape[axis] for x in xs))
    dims = (*first_dims[:axis], (joined,), *first_dims[axis + 1 :])
    code = f'mtf.concat([{", ".join(y.code for y in operands)}], "{p.names.name(joined)}")'
    return p.let(code, flat(dims), dims, xs[0].dtype)


def padded(p: MeshTfProgram, x: MeshTfValue, pad: Pad, shape: Sequence[object]) -> MeshTfValue:
    """Zeros around a tensor. shape: of the result."""
    for axis, (low, size) in enumerate(zip(pad.before, shape, strict=True)):
        high = int(size) - low - x.shape[axis]  # type: ignore[call-overload]
        if not low and not high:
            continue
        x, part = single(p, x, axis)
        wide = replace(part, size=part.size + low + high)
        p.dim(wide)
        dims = tuple((wide,) if i == axis else g for i, g in enumerate(x.dims))
        order = tuple(wide if d == part else d for d in x.order)
        x = p.let(f'mtf.pad({x.code}, [{low}, {high}], "{p.names.name(part)}")', order, dims, x.dtype)
    return x


def lookup(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """Look up single elements of one dim of a table by index. The dim may be split."""
    table, ids = (p.read(node, a) for a in op.reads)
    axis, dims = looked_up(op), p.dims(node, op.writes[0])
    assert axis is not None
    code = f"ops.lookup({table.code}, {ids.code}, {p.shape(table.dims[axis])}, {p.shape(flat(dims))})"
    if not table.dims[axis]:  # a dim of one element
        return p.viewed(replace(table, dims=(*table.dims[:axis], *table.dims[axis + 1 :])), dims)
    return p.let(code, flat(dims), dims, table.dtype)


def looked_up(op: Op) -> int | None:
    """The dim of the table that the index selects from; None if the op does not look up single elements of one dim."""
    table, ids, made = op.reads[0], op.reads[1], op.writes[0]
    others = {d for a in (ids, made) for d in a.map.dims}
    found = [i for i, w in enumerate(table.map.walks) if w.dims and not set(w.dims) & others]
    whole = set(made.map.dims) <= {*table.map.dims, *ids.map.dims} and set(ids.map.dims) <= set(made.map.dims)
    return found[0] if len(found) == 1 and whole else None
