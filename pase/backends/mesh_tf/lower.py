"""Translates a source's ops to statements of a Mesh-TensorFlow program: the part that all frontends share.

An elementwise op is translated by the function of ``pase.ir.functions`` that its frontend says it computes. For any
other op there is a rule, which takes the program and the op and returns the values of the op's outputs. Rules are built
from the functions in this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pase.backends.mesh_tf.names import MeshTfDim, TensorDims, flat
from pase.backends.mesh_tf.program import MeshTfProgram, MeshTfValue, SourceOp
from pase.errors import PaseError
from pase.ir import functions
from pase.ir.functions import Function

__all__ = [
    "EXPRESSIONS",
    "MeshTfRules",
    "apply",
    "binary",
    "concat",
    "cut",
    "joined",
    "lookup",
    "nests",
    "reduce",
    "refuse",
    "same",
    "select",
    "single",
    "squeezed",
    "unary",
]

MeshTfRule = Callable[[MeshTfProgram, SourceOp], "MeshTfValue | Sequence[MeshTfValue | None]"]


@dataclass(kw_only=True)
class MeshTfRules:
    """The translations of a frontend's ops: names for simple ops, and functions for the others."""

    file: str
    """The file in which to add an op, relative to the package."""
    function: Callable[[str], Function | None]
    """Returns the function that an elementwise op computes exactly; None for any other op."""
    reduce: Mapping[str, str]
    """Reduction -> a Mesh-TF function."""
    views: frozenset[str]
    """Ops that their access maps describe completely: views, which move no element, and products."""
    axes: Callable[[SourceOp], tuple[Sequence[int], bool]]
    """Returns (the dims that an op of ``reduce`` reduces over, whether they are kept)."""
    elementwise: Mapping[str, str] = field(default_factory=dict)
    """Elementwise ops that are no single function of the graph -> as in ``EXPRESSIONS``."""
    rules: dict[str, MeshTfRule] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)
    """Op that Mesh-TF cannot express -> the reason, and what to do instead."""

    def rule(self, *names: str) -> Callable[[MeshTfRule], MeshTfRule]:
        """A decorator that registers a rule for these ops."""

        def register(f: MeshTfRule) -> MeshTfRule:
            self.rules.update(dict.fromkeys(names, f))
            return f

        return register

    def missing(self, name: str) -> str:
        """Why an op has no translation, and what to do."""
        add = f"this op has no Mesh-TensorFlow translation; add one to pase/{self.file}"
        return self.instead.get(name, add)

    def expression(self, name: str) -> str | None:
        """The Mesh-TF or TensorFlow function of an elementwise op."""
        function = self.function(name)
        return self.elementwise.get(name) or (
            EXPRESSIONS.get(function.name) if function is not None else None
        )

    def __contains__(self, name: object) -> bool:
        """Whether the op has a translation."""
        listed = name in self.rules or name in self.reduce or name in self.views
        return listed or (isinstance(name, str) and self.expression(name) is not None)


def apply(rules: MeshTfRules, p: MeshTfProgram, op: SourceOp) -> None:
    """Translate the op and add it to the program."""
    p.heading(op)
    name = op.name
    made: MeshTfValue | Sequence[MeshTfValue | None]
    if name in rules.rules:
        made = rules.rules[name](p, op)
    elif name in rules.reduce:
        made = reduce(p, op, rules.reduce[name], *rules.axes(op))
    elif name in rules.views:
        made = nests(p, op)
    elif (fn := rules.expression(name)) is not None:
        made = elementwise(p, op, fn)
    else:
        raise refuse(op, rules.missing(op.name))
    p.store(op, [made] if isinstance(made, MeshTfValue) else made)


def check_known(rules: MeshTfRules, ops: Sequence[SourceOp]) -> None:
    """Raise one PaseError that lists all ops without a translation."""
    unknown = {op.name: op for op in reversed(ops) if op.name not in rules}
    if unknown:
        refused = (str(refuse(op, rules.missing(name))) for name, op in sorted(unknown.items()))
        raise PaseError("; ".join(refused))


def refuse(op: SourceOp, why: str, fix: str = "") -> PaseError:
    """An error that says why an op cannot be translated."""
    return PaseError(f"the op cannot be in a Mesh-TensorFlow program: {why}", where=op.where, fix=fix)


# --- elementwise

EXPRESSIONS: Mapping[str, str] = {
    **{f: f"mtf.{f}" for f in ("exp", "log", "tanh", "sqrt", "rsqrt", "square", "abs", "sign", "sin", "cos")},
    **{f: f"mtf.{f}" for f in ("reciprocal", "stop_gradient", "add", "sub", "mod")},
    **{f: f"tf.math.{f}" for f in ("erf", "erfc", "expm1", "log1p", "pow", "floor", "ceil", "round")},
    **{f: f"tf.math.{f}" for f in ("tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh")},
    **{f: f"tf.math.{f}" for f in ("atan2", "is_finite", "is_nan", "is_inf")},
    **{"neg": "mtf.negative", "sigmoid": "mtf.sigmoid", "copy": "same", "rem": "tf.truncatemod"},
    **{"mul": "mtf.multiply", "div": "mtf.divide", "max": "mtf.maximum", "min": "mtf.minimum"},
    **{"eq": "mtf.equal", "ne": "mtf.not_equal", "lt": "mtf.less", "le": "mtf.less_equal"},
    **{"gt": "mtf.greater", "ge": "mtf.greater_equal"},
    **dict.fromkeys(("and", "all_of"), "mtf.logical_and"),
    **dict.fromkeys(("or", "any_of"), "mtf.logical_or"),
    **dict.fromkeys(("not", "is_false"), "mtf.logical_not"),
}
"""Function of ``pase.ir.functions`` -> a Mesh-TF function, a TensorFlow function that runs on slices ("tf.…"), or
"same" if nothing is computed."""


def elementwise(p: MeshTfProgram, op: SourceOp, fn: str) -> MeshTfValue:
    """Translate an elementwise op. fn: as in ``EXPRESSIONS``."""
    given = op.inputs[0].dtype
    if fn.startswith("mtf.logical_") and given != "bool":
        raise refuse(op, f"it works on the bits of {given}, and Mesh-TensorFlow has only logical functions")
    if fn in ("mtf.divide", "mtf.reciprocal") and "int" in given:
        raise refuse(op, "Mesh-TensorFlow divides by multiplication, which gives other integers")
    return binary(p, op, fn) if len(op.inputs) > 1 else unary(p, op, fn)


def call(fn: str, *args: str, dtype: str = "") -> str:
    """Code that calls a function. mtf functions are called directly; TensorFlow functions run on slices."""
    if not fn.startswith("tf."):
        return f"{fn}({', '.join(args)})"
    return f"ops.cwise({', '.join((fn, *args))}{f', dtype=tf.{dtype}' if dtype else ''})"


def unary(p: MeshTfProgram, op: SourceOp, fn: str) -> MeshTfValue:
    """Translate an elementwise op of one operand. fn: as for ``call``; "same" if the op does nothing here."""
    x = p.arg(op, 0)
    if fn == "same":
        return x
    return p.let(call(fn, x.code, dtype=_dtype(fn, op)), x.order, x.dims, op.dtypes[0])


_INFIX = {"mtf.add": "+", "mtf.sub": "-", "mtf.multiply": "*", "mtf.divide": "/"}


def binary(p: MeshTfProgram, op: SourceOp, fn: str) -> MeshTfValue:
    """Translate a binary op, whose operands broadcast as in numpy.

    Mesh-TF broadcasts by the names of dims, so dims of size 1 do not occur. A known number becomes a literal.
    """
    left, right = p.scalar(op, 0), p.scalar(op, 1)
    rank = len(op.shapes[0])
    infix = _INFIX.get(fn)
    if (left is not None and right is None) or (right is not None and left is None):
        x = p.arg(op, 1 if left is not None else 0)
        if infix is not None and not (left is not None and infix == "/"):
            code = f"{left} {infix} {x.code}" if left is not None else f"{x.code} {infix} {right}"
        elif fn == "mtf.divide":
            code = f"{left} * mtf.reciprocal({x.code})" if left != "1.0" else f"mtf.reciprocal({x.code})"
        else:
            literal = f"mtf.constant(mesh, {left or right}, shape={p.shape(x.order)}, dtype=tf.{x.dtype})"
            code = call(
                fn, *((literal, x.code) if left is not None else (x.code, literal)), dtype=_dtype(fn, op)
            )
        return p.let(code, x.order, _aligned(x.dims, rank), op.dtypes[0])
    x, y = p.arg(op, 0), p.arg(op, 1)
    dims = joined(op, (x, y))
    order = (
        x.order if set(y.order) <= set(x.order) else y.order if set(x.order) <= set(y.order) else flat(dims)
    )
    if infix is not None and set(order) in (set(x.order), set(y.order)) and x.order == order:
        return p.let(f"{x.code} {infix} {y.code}", order, dims, op.dtypes[0])
    if fn.startswith("tf."):
        by_rank = sorted((x, y), key=lambda v: -len(v.order))
        order = (*by_rank[0].order, *(d for d in by_rank[1].order if d not in by_rank[0].order))
        return p.let(call(fn, x.code, y.code, dtype=_dtype(fn, op)), order, dims, op.dtypes[0])
    return p.let(f"{fn}({x.code}, {y.code}, output_shape={p.shape(order)})", order, dims, op.dtypes[0])


def _dtype(fn: str, op: SourceOp) -> str:
    """The result's dtype, as ``call`` needs it: "" if it is that of the operands."""
    return "" if op.inputs[0].dtype == op.dtypes[0] else op.dtypes[0]


def _aligned(dims: TensorDims, rank: int) -> TensorDims:
    """The dims of an operand, with leading dims of size 1 (which have no Mesh-TF dim) up to the result's rank."""
    return ((),) * (rank - len(dims)) + dims


def joined(op: SourceOp, operands: Sequence[MeshTfValue]) -> TensorDims:
    """The dims of a result whose operands broadcast as in numpy.

    Raises PaseError if operands have different dims at one position: Mesh-TF would compute their outer product.
    """
    rank = len(op.shapes[0])
    dims: TensorDims = ((),) * rank
    for x in operands:
        pairs = list(zip(dims, _aligned(x.dims, rank), strict=True))
        if any(g and h and g != h for g, h in pairs):
            raise refuse(op, "its operands do not have the same dims where they meet")
        dims = tuple(g or h for g, h in pairs)
    return dims


def select(p: MeshTfProgram, op: SourceOp, condition: int, yes: int, no: int) -> MeshTfValue:
    """Translate a selection (``where``). All three operands broadcast."""
    parts = [p.arg(op, k) for k in (condition, yes, no)]
    dims = joined(op, parts)
    order: tuple[MeshTfDim, ...] = ()
    for x in sorted(parts, key=lambda v: -len(v.order)):
        order += tuple(d for d in x.order if d not in order)
    return p.let(f"ops.where({', '.join(x.code for x in parts)})", order, dims, op.dtypes[0])


def same(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    """A value under another name: a loop carry, an element put into a list, or the result of a call."""
    given = op.inputs[0]
    if given.value is not None:
        return p.constant(given.value, p.written(op.outputs[0]), given.dtype)
    return p.held(op, given.tensor)


def pick(p: MeshTfProgram, op: SourceOp, x: MeshTfValue, axis: int, k: int) -> MeshTfValue:
    """x at index k of a tensor dim, which the result lacks."""
    part = cut(p, op, x, axis, k, 1)
    return replace(part, dims=(*part.dims[:axis], *part.dims[axis + 1 :]))


def take(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    """Translate the selection of one element from a list (such as a TensorList) that is held as one stacked tensor."""
    return pick(p, op, p.held(op, op.inputs[0].tensor), 0, int(op.attrs["index"]))


def stack(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    """Stack all elements of a list into one tensor. Some may be constants, such as the first carry of a loop."""
    like = next(p.held(op, i.tensor) for i in op.inputs if i.value is None)
    xs = [
        p.held(op, i.tensor) if i.value is None else p.constant(i.value, like.dims, like.dtype)
        for i in op.inputs
    ]
    return concat(p, op, [replace(x, dims=((), *x.dims)) for x in xs], 0)


# --- ops that their access maps describe


def nests(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    """Translate an op by its frontend's loop nests: views, and products summed over the dims that the result lacks."""
    made: MeshTfValue | None = None
    for node, nest in p.nests(op):
        xs = [p.read(op, node, a) for a in nest.reads]
        (write,) = nest.writes
        dims = p.dims(node, write)
        if nest.kind == "view":
            made = p.viewed(xs[0], dims)
        elif nest.kind == "matmul" or nest.function is functions.SUM:
            code = f"mtf.einsum([{', '.join(x.code for x in xs)}], output_shape={p.shape(flat(dims))})"
            made = p.let(code, flat(dims), dims, op.dtypes[0])
        else:
            raise refuse(op, f"its loop nest '{nest.name}' is neither a view nor a product")
        p.keep(write.tensor, made)
    if made is None:  # the op moves and computes nothing
        made = _omitted(p, op)
    return made


def _omitted(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    """The result of an op for which the plan's graph has no loop nest: the operand itself, or the operand with other
    dims of size 1. Raises PaseError if the op does more than that."""
    x = p.arg(op, 0)
    (shape, *_), reorders = op.shapes, op.name.lower() == "transpose"
    if x.shape == shape and not reorders:
        return x
    kept = [g for g in x.dims if g]
    if reorders or [math.prod(d.size for d in g) for g in kept] != [n for n in shape if n > 1]:
        raise refuse(op, "the plan's graph does not contain its result")
    groups = iter(kept)
    return replace(x, dims=tuple(() if n == 1 else next(groups) for n in shape))


def reduce(p: MeshTfProgram, op: SourceOp, fn: str, axes: Sequence[int], keep: bool) -> MeshTfValue:
    """Translate a reduction over tensor dims. keep: whether they are kept, with size 1."""
    x = p.arg(op, 0)
    dims = tuple(() if i in axes else g for i, g in enumerate(x.dims) if keep or i not in axes)
    order = tuple(d for d in x.order if d in set(flat(dims)))
    if len(order) == len(x.order):
        return replace(x, dims=dims)
    return p.let(f"{fn}({x.code}, output_shape={p.shape(order)})", order, dims, x.dtype)


# --- parts of tensors


def single(p: MeshTfProgram, op: SourceOp, x: MeshTfValue, axis: int) -> tuple[MeshTfValue, MeshTfDim]:
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


def cut(p: MeshTfProgram, op: SourceOp, x: MeshTfValue, axis: int, begin: int, size: int) -> MeshTfValue:
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
        x, part = single(p, op, x, axis)
        rest = ()
    sliced = MeshTfDim(part.base, size, None)
    code = f'mtf.slice({x.code}, {begin}, {size}, "{p.names.name(part)}")'
    order = tuple(sliced if d == part else d for d in x.order)
    dims = tuple((sliced, *rest) if i == axis else g for i, g in enumerate(x.dims))
    p.dim(sliced)
    return squeezed(p, p.let(code, order, dims, x.dtype))


def concat(p: MeshTfProgram, op: SourceOp, xs: Sequence[MeshTfValue], axis: int) -> MeshTfValue:
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


def lookup(
    p: MeshTfProgram, op: SourceOp, table: MeshTfValue, ids: MeshTfValue, axis: int, dims: TensorDims
) -> MeshTfValue:
    """Look up rows of ``table`` along ``axis`` by index. dims: the dims of the result."""
    over = table.dims[axis]
    code = f"ops.lookup({table.code}, {ids.code}, {p.shape(over)}, {p.shape(flat(dims))})"
    return p.let(code, flat(dims), dims, table.dtype)
