"""How each JAX primitive works on padded values. A primitive without a rule runs on unpadded values.

A value records in which dims its padding is zero; elsewhere the padding is any finite value. Rules keep it finite
(functions with poles get a harmless operand there), so that a zero gradient stays zero in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from pase.frontends.jax.padding.walk import PADDED, Fill, PaddedValue, PaddedValues, PaddedWalk
from pase.frontends.jax.rules import RULES, Elementwise
from pase.frontends.jax.types import Aval, Eqn, Var
from pase.frontends.jax.versions import is_literal

__all__: list[str] = []

_FINITE = (
    "mul square max min select clamp abs sign one_minus_square polynomial sigmoid tanh erf erfc sin cos atan asinh "
    "integer_pow quantize"
)
_TAME = frozenset(_FINITE.split())
"""Non-linear functions that are finite, together with their derivatives, for all finite operands."""
_TAME_AT_ZERO = frozenset({"exp", "exp2", "expm1", "log1p", "sinh", "cosh", "asin", "acos", "atanh"})
_SAFE: Mapping[str, float] = {"acosh": 2.0, "zeta": 2.0, "polygamma": 2.0}
"""An operand at which a function and its derivative are finite. All other functions use one half."""
_ODD = (
    "neg abs sign square real imag conj sin tan tanh sinh asin asinh atan atanh expm1 log1p erf floor ceil round cast "
    "copy reduce_precision stop_gradient bitcast"
)
_ZERO_IF_ALL = frozenset({*_ODD.split(), "add", "sub", "max", "min", "or", "xor", "select"})
"""Functions whose result is zero if all operands are zero (for select, all except the first)."""
_ZERO_IF_ANY = frozenset({"mul", "and"})
_ZERO_IF_FIRST = frozenset({"div", "rem", "shift_left", "shift_right"})


def elementwise(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    """A pointwise function."""
    function = RULES[eqn.primitive.name].function  # type: ignore[attr-defined]
    name, rank = function.name, eqn.outvars[0].aval.ndim
    held = []
    for i, (x, v) in enumerate(zip(ins, eqn.invars, strict=True)):
        wide = walk.padded_dims(x, v.aval)
        tame = function.linear or not function.differentiable or name in _TAME
        tame = tame and not (name == "integer_pow" and eqn.params["y"] < 0)
        tame |= (name == "div" and i == 0) or (name in _TAME_AT_ZERO and wide <= x.zero)
        if wide and not tame:
            x = walk.masked(x, v.aval, wide, _SAFE.get(name, 0.5) if _floating(v.aval.dtype) else 1)
        held.append(x)
    outs = walk.bind(eqn, held)
    every = frozenset(range(rank))
    zeros = [every if _is_zero(v) else x.zero for x, v in zip(held, eqn.invars, strict=True)]
    values = zeros[1:] if name == "select" else zeros
    zero: frozenset[int] = frozenset()
    if name in _ZERO_IF_ALL or (name == "integer_pow" and eqn.params["y"] > 0):
        zero = frozenset.intersection(*values)
    elif name in _ZERO_IF_ANY:
        zero = frozenset.union(*values)
    elif name in _ZERO_IF_FIRST:
        zero = values[0]
    return [PaddedValue(outs[0], zero)]


def _is_zero(v: Var) -> bool:
    return is_literal(v) and np.ndim(v.val) == 0 and not np.any(v.val)


def _floating(dtype: np.dtype) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _least(dtype: np.dtype) -> Fill:
    if dtype == np.bool_:
        return False
    return -math.inf if _floating(dtype) else np.iinfo(dtype).min


def _most(dtype: np.dtype) -> Fill:
    if dtype == np.bool_:
        return True
    return math.inf if _floating(dtype) else np.iinfo(dtype).max


_NEUTRAL: Mapping[str, Callable[[np.dtype], Fill]] = {
    "reduce_sum": lambda _: 0,
    "reduce_xor": lambda _: 0,
    "reduce_prod": lambda _: 1,
    "reduce_and": lambda dtype: int(np.asarray(-1).astype(dtype)),
    "reduce_or": lambda _: 0,
    "reduce_max": _least,
    "reduce_min": _most,
    "argmax": _least,
    "argmin": _most,
}
"""Reduction -> the neutral value for padded elements."""


@PADDED.register(*_NEUTRAL)
def _reduce(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    (x,), aval, axes = ins, eqn.invars[0].aval, tuple(eqn.params["axes"])
    across = walk.padded_dims(x, aval) & set(axes)
    if across:  # also if the padding is already neutral, because no gradient may flow back into it
        x = walk.masked(x, aval, across, _NEUTRAL[eqn.primitive.name](aval.dtype))
    left = [d for d in range(aval.ndim) if d not in axes]
    zero = frozenset(k for k, d in enumerate(left) if d in x.zero)
    return [PaddedValue(walk.bind(eqn, [x])[0], zero)]


@PADDED.register("dot_general")
def _dot(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    """A product. Both sides are zero in the padding of a contracted dim, because each side is the other's gradient."""
    contracting, batch = eqn.params["dimension_numbers"]
    x, y = (_zeroed(walk, v, a.aval, dims) for v, a, dims in zip(ins, eqn.invars, contracting, strict=True))
    free = [
        [d for d in range(v.aval.ndim) if d not in (*c, *b)]
        for v, c, b in zip(eqn.invars, contracting, batch, strict=True)
    ]
    zeros = [i in x.zero or j in y.zero for i, j in zip(*batch, strict=True)]
    zeros += [*(d in x.zero for d in free[0]), *(d in y.zero for d in free[1])]
    return [PaddedValue(walk.bind(eqn, [x, y])[0], frozenset(k for k, on in enumerate(zeros) if on))]


def _zeroed(walk: PaddedWalk, x: PaddedValue, aval: Aval, dims: Collection[int]) -> PaddedValue:
    """The value with zeros in the padding of these dims."""
    loose = (walk.padded_dims(x, aval) & set(dims)) - x.zero
    return walk.masked(x, aval, loose, 0) if loose else x


@PADDED.register("conv_general_dilated")
def _conv(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue] | None:
    """A convolution. Batch and features may be padded; windows slide over unpadded dims."""
    p, dn = eqn.params, eqn.params["dimension_numbers"]
    if p["feature_group_count"] != 1 or p["batch_group_count"] != 1:
        return None
    x, w = (
        walk.cut(v, a.aval, spec[2:])
        for v, a, spec in zip(ins, eqn.invars, (dn.lhs_spec, dn.rhs_spec), strict=True)
    )
    x = _zeroed(walk, x, eqn.invars[0].aval, [dn.lhs_spec[1]])
    w = _zeroed(walk, w, eqn.invars[1].aval, [dn.rhs_spec[1]])
    zero = {dn.out_spec[0]: dn.lhs_spec[0] in x.zero, dn.out_spec[1]: dn.rhs_spec[0] in w.zero}
    return [PaddedValue(walk.bind(eqn, [x, w])[0], frozenset(d for d, on in zero.items() if on))]


@PADDED.register("transpose")
def _transpose(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    zero = frozenset(k for k, d in enumerate(eqn.params["permutation"]) if d in ins[0].zero)
    return [PaddedValue(walk.bind(eqn, ins)[0], zero)]


@PADDED.register("broadcast_in_dim")
def _broadcast(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    v, out, onto = eqn.invars[0], eqn.outvars[0].aval, eqn.params["broadcast_dimensions"]
    made = walk.bind(eqn, ins, shape=walk.wide(out))[0]
    if _is_zero(v):
        return [PaddedValue(made, frozenset(range(out.ndim)))]
    same = (k for k, d in enumerate(onto) if v.aval.shape[k] == out.shape[d])
    return [PaddedValue(made, frozenset(onto[k] for k in same if k in ins[0].zero))]


@PADDED.register("iota")
def _iota(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    return [PaddedValue(walk.bind(eqn, ins, shape=walk.wide(eqn.outvars[0].aval))[0])]


@PADDED.register("reshape", "squeeze", "expand_dims")
def _reshape(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    """A dim that stays one dim stays padded. A dim that is merged or split is unpadded before and padded again
    after."""
    aval, out = eqn.invars[0].aval, eqn.outvars[0].aval
    kept = dict(_unchanged(aval.shape, out.shape))
    x = walk.cut(ins[0], aval, set(range(aval.ndim)) - set(kept))
    here = {j: x.array.shape[i] for i, j in kept.items()}
    params = {}
    if eqn.primitive.name == "reshape":
        params["new_sizes"] = tuple(here.get(j, n) for j, n in enumerate(out.shape))
    return [
        PaddedValue(walk.bind(eqn, [x], **params)[0], frozenset(j for i, j in kept.items() if i in x.zero))
    ]


def _unchanged(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (dim before, dim after) for the dims that a reshape leaves unchanged.

    >>> list(_unchanged((2, 3, 4), (2, 1, 12))), list(_unchanged((6, 1, 5), (2, 3, 5)))
    ([(0, 0)], [(2, 2)])
    >>> list(_unchanged((0, 3), (3, 0)))  # without elements, extents do not show which dim became which
    []
    """
    if 0 in before:
        return
    i = j = 0
    while i < len(before) and j < len(after):
        if before[i] == after[j]:
            yield i, j
            i, j = i + 1, j + 1
        elif before[i] == 1 or after[j] == 1:
            i, j = i + (before[i] == 1), j + (after[j] == 1)
        else:
            left, right, i, j = before[i], after[j], i + 1, j + 1
            while left != right:
                if left < right:
                    left, i = left * before[i], i + 1
                else:
                    right, j = right * after[j], j + 1


@PADDED.register("gather")
def _gather(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    """A lookup of single elements along a padded dim.

    An index that is out of bounds stays out of bounds, or is clamped if JAX clamps it. Indices that are promised to be
    in bounds are clamped, too.
    """
    import jax
    import jax.numpy as jnp
    from jax.lax import GatherScatterMode as Mode

    p, (v, w) = eqn.params, eqn.invars
    d, mode = p["dimension_numbers"], p["mode"]
    looked_up = [(k, dim) for k, dim in enumerate(d.start_index_map)]
    whole = {i for i, n in enumerate(p["slice_sizes"]) if n == v.aval.shape[i]} - {i for _, i in looked_up}
    kept = whole | {*d.operand_batching_dims}
    if mode in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS) and np.issubdtype(
        w.aval.dtype, np.signedinteger
    ):
        kept |= {dim for _, dim in looked_up if p["slice_sizes"][dim] == 1}
    x = walk.cut(ins[0], v.aval, set(range(v.aval.ndim)) - kept)
    last = w.aval.ndim - 1
    ids = _zeroed(walk, walk.cut(ins[1], w.aval, [last]), w.aval, range(last))
    real = [v.aval.shape[dim] for _, dim in looked_up]
    if any(x.array.shape[dim] != n for (_, dim), n in zip(looked_up, real, strict=True)):
        # If the index dtype cannot represent the last row, no index is behind it.
        last_row = np.minimum(np.subtract(real, 1), np.iinfo(w.aval.dtype).max).astype(w.aval.dtype)
        outside = np.full_like(last_row, -1) if mode == Mode.FILL_OR_DROP else last_row
        within = jax.lax.le(ids.array, jnp.broadcast_to(last_row, ids.array.shape))
        array = jax.lax.select(within, ids.array, jnp.broadcast_to(outside, ids.array.shape))
        ids = PaddedValue(array, ids.zero)
    sizes = tuple(x.array.shape[i] if i in whole else n for i, n in enumerate(p["slice_sizes"]))
    shown = [i for i in range(v.aval.ndim) if i not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
    zero = frozenset(o for o, i in zip(d.offset_dims, shown, strict=True) if i in x.zero and i in whole)
    return [PaddedValue(walk.bind(eqn, [x, ids], slice_sizes=sizes)[0], zero)]


def _ends(eqn: Eqn) -> set[int]:
    """The dims of which a slice takes a part."""
    p, shape = eqn.params, eqn.invars[0].aval.shape
    steps = p["strides"] or (1,) * len(shape)
    parts = zip(p["start_indices"], p["limit_indices"], steps, shape, strict=True)
    return {i for i, (a, b, s, n) in enumerate(parts) if (a, b, s) != (0, n, 1)}


def _differing(eqn: Eqn, sizes: Sequence[int]) -> set[int]:
    return {i for i, (a, b) in enumerate(zip(eqn.invars[0].aval.shape, sizes, strict=True)) if a != b}


_ALONG: dict[str, Callable[[Eqn], set[int]]] = {
    "slice": _ends,
    "pad": lambda e: {i for i, c in enumerate(e.params["padding_config"]) if any(c)},
    "concatenate": lambda e: {e.params["dimension"]},
    "split": lambda e: {e.params["axis"]},
    "rev": lambda e: set(e.params["dimensions"]),
    "sort": lambda e: {e.params["dimension"]},
    "dynamic_slice": lambda e: _differing(e, e.params["slice_sizes"]),
    "dynamic_update_slice": lambda e: _differing(e, e.invars[1].aval.shape),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), lambda e: {e.params["axis"]}),
}
"""Primitive -> the dims along which it works. In all other dims it works element by element."""
_WITH_SIZES = {"slice": "limit_indices", "dynamic_slice": "slice_sizes"}


@PADDED.register(*_ALONG)
def _along(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    """The dims along which the primitive works are unpadded before; the others stay padded."""
    name, along = eqn.primitive.name, _ALONG[eqn.primitive.name](eqn)
    held = [walk.cut(x, v.aval, along) if v.aval.ndim else x for x, v in zip(ins, eqn.invars, strict=True)]
    params: dict[str, tuple[int, ...]] = {}
    if name in _WITH_SIZES:
        given, here = eqn.params[_WITH_SIZES[name]], held[0].array.shape
        params = {_WITH_SIZES[name]: tuple(n if i in along else here[i] for i, n in enumerate(given))}
    arrays = [x for x, v in zip(held, eqn.invars, strict=True) if v.aval.ndim]
    zero = frozenset.intersection(*(x.zero for x in arrays)) - along
    if name == "pad" and not _is_zero(eqn.invars[1]):
        zero = frozenset()
    return [PaddedValue(x, zero) for x in walk.bind(eqn, held, **params)]


@PADDED.register("optimization_barrier")
def _barrier(walk: PaddedWalk, eqn: Eqn, ins: PaddedValues) -> list[PaddedValue]:
    return [PaddedValue(x, held.zero) for x, held in zip(walk.bind(eqn, ins), ins, strict=True)]


for _name, _rule in RULES.items():
    if isinstance(_rule, Elementwise):
        PADDED.add(_name, elementwise)
