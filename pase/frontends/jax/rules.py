"""One rule per JAX primitive, which gives its loop nest. Elementwise rules use the table ``pase.ir.functions``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.frontends.jax.types import Eqn, Var
from pase.frontends.jax.versions import is_literal, literal_array
from pase.ir import Size, Tensor, functions, parse_size
from pase.ir.functions import FUNCTIONS, Function
from pase.ir.literals import Number, literal
from pase.ir.parameters import Cumulative, Iota, Pad, Slice, Sort
from pase.ir.sizes import is_one, product
from pase.ops import GraphBuilder, indexed, nests, windows
from pase.registry import Registry

if TYPE_CHECKING:
    from jax.lax import GatherScatterMode

__all__ = [
    "BY_OPERAND",
    "RULES",
    "SCATTERS",
    "Elementwise",
    "gather_windows",
    "lowers",
    "moving",
    "pointwise",
    "row_by_row",
    "scatter_windows",
]

JaxRule = Callable[[GraphBuilder, Eqn, Sequence["Tensor | None"]], Sequence[Tensor]]
"""Takes an equation and its operands' tensors (None for a literal), and returns one tensor per result."""

RULES: Registry[JaxRule] = Registry("rule for JAX primitive", package="pase.frontends.jax", prefix="rules")
lowers = RULES.register

_SAME_NAME = (
    "neg abs sign not add sub mul max min and or xor square real imag conj complex eq ne lt le gt ge is_finite floor "
    "ceil round nextafter copy reduce_precision stop_gradient population_count clz mulhi div rem sqrt rsqrt cbrt "
    "integer_pow exp exp2 log log2 log1p expm1 sin cos tan tanh sinh cosh asin acos atan asinh acosh atanh erf erfc "
    "erf_inv pow atan2 lgamma digamma polygamma zeta igamma igammac random_gamma_grad bessel_i0e bessel_i1e clamp "
    "one_minus_square"
)
_OTHER_NAME = {
    "add_any": "add",
    "convert_element_type": "cast",
    "select_n": "select",
    "logistic": "sigmoid",
    "eq_to": "eq",
    "le_to": "le",
    "lt_to": "lt",
    "shift_right_logical": "shift_right_logical",
    "shift_right_arithmetic": "shift_right",
    "shift_left": "shift_left",
    "igamma_grad_a": "igamma_grad",
    "regularized_incomplete_beta": "incomplete_beta",
    **dict.fromkeys(
        (
            "copy_p",
            "sharding_constraint",
            "name",
            "pvary",
            "pcast",
            "reshard",
            "mesh_cast",
            "layout_constraint",
            "relayout",
            "reduced_vary_cast",
            "vary_unreduced_cast",
        ),
        "copy",
    ),
}


@dataclass(frozen=True)
class Elementwise:
    """The rule of a primitive that is one pointwise function. Literal operands become part of the function."""

    function: Function

    def __call__(self, b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
        function = self.function
        if function is functions.DIV and ins[0] is None:
            function = functions.RECIPROCAL
        dtypes = [_dtype(v) for v in eqn.outvars]
        operands = [*_operands(eqn, ins), *_more(eqn)]
        return nests.elementwise(
            b, function, operands, dtypes, name=eqn.primitive.name, shape=_shape(eqn.outvars[0])
        )


for _primitive, _function in {**{p: p for p in _SAME_NAME.split()}, **_OTHER_NAME}.items():
    RULES.add(_primitive, Elementwise(FUNCTIONS[_function]))


def pointwise(eqn: Eqn) -> bool:
    """Whether an equation is one pointwise function: each element of its result depends on one of each operand."""
    return isinstance(RULES.get(eqn.primitive.name), Elementwise)


def row_by_row(eqn: Eqn) -> bool:
    """Whether each row of an equation's result depends on the same row of the operands alone."""
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
    return pointwise(eqn) and len(shapes) == 1


def _shape(var: Var) -> tuple[Size, ...]:
    return tuple(int(s) if isinstance(s, int) else parse_size(str(s)) for s in var.aval.shape)


def draws_by_key(eqn: Eqn) -> bool:
    """Whether an equation on random keys treats each key of an array by itself. JAX's other generators (rbg) draw for a
    whole array of keys by its first key."""
    kinds = {str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)}
    return {k for k in kinds if k.startswith("key<")} == {"key<fry>"}


def _dtype(var: Var) -> str:
    text = str(var.aval.dtype)
    return "key" if text.startswith("key<") else text


def _operands(eqn: Eqn, ins: Sequence[Tensor | None]) -> list[Tensor | Number | None]:
    """The operands of an elementwise equation: tensors and numbers. None for a number that is not known when the
    program is traced, such as a symbolic size."""
    return [t if t is not None else _number(v) for t, v in zip(ins, eqn.invars, strict=True)]


def _number(v: Var) -> Number | None:
    """The number of a literal; None for a variable."""
    known = is_literal(v) and product(_shape(v)) == 1 and _dtype(v) != "key"
    return literal(literal_array(v)) if known else None  # type: ignore[arg-type]


_PARAMETERS = {"integer_pow": ("y",), "reduce_precision": ("exponent_bits", "mantissa_bits")}
"""Primitive -> the parameters that are further operands of its function."""


def _more(eqn: Eqn) -> list[Number | None]:
    if eqn.primitive.name == "round" and eqn.params["rounding_method"] != 1:  # halves away from zero
        return [None]
    return [eqn.params[p] for p in _PARAMETERS.get(eqn.primitive.name, ())]


def _tensors(ins: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in ins if t is not None]


def _operand(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None], i: int = 0) -> Tensor:
    """Operand i; a literal becomes a constant."""
    t = ins[i]
    v = eqn.invars[i]
    return t if t is not None else b.constant(_shape(v), _dtype(v), _number(v))


@lowers("dot_general")
def _dot_general(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    contracting, batch = eqn.params["dimension_numbers"]
    x, y = _operand(b, eqn, ins, 0), _operand(b, eqn, ins, 1)
    return [nests.contract(b, x, y, contracting, batch, _dtype(eqn.outvars[0]))]


@lowers("polynomial")
def _polynomial(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Horner's rule: one product and one sum for each coefficient except the highest."""
    out, terms = eqn.outvars[0], len(ins) - 2
    return nests.elementwise(
        b, FUNCTIONS["polynomial"], _operands(eqn, ins), [_dtype(out)], flops=2.0 * terms, shape=_shape(out)
    )


@lowers("conv_general_dilated")
def _conv(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    p = eqn.params
    dn = p["dimension_numbers"]
    if p["batch_group_count"] != 1:  # the gradient of a filter, which the user took explicitly
        out, w = _shape(eqn.outvars[0]), _shape(eqn.invars[1])
        points = product([*out, *(w[i] for i in dn.rhs_spec[1:])])
        return _opaque(b, eqn, ins, flops=2.0 * float(points))  # type: ignore[arg-type]

    def triple(spec: Sequence[int]) -> tuple[int, int, Sequence[int]]:
        return spec[0], spec[1], spec[2:]

    return [
        windows.conv(
            b,
            _operand(b, eqn, ins, 0),
            _operand(b, eqn, ins, 1),
            _shape(eqn.outvars[0]),
            _dtype(eqn.outvars[0]),
            windows.ConvDims(x=triple(dn.lhs_spec), w=triple(dn.rhs_spec), out=triple(dn.out_spec)),
            windows.Sliding(
                strides=p["window_strides"],
                dilation=p["rhs_dilation"],
                padding=[before for before, _ in p["padding"]],
                input_dilation=p["lhs_dilation"],
            ),
            groups=p["feature_group_count"],
        )
    ]


def _opaque(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None], flops: float = 0.0) -> Sequence[Tensor]:
    outs = [(_shape(v), _dtype(v)) for v in eqn.outvars]
    return nests.opaque(b, eqn.primitive.name, _tensors(ins), outs, flops=flops)


@lowers("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
def _reduce(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    function = FUNCTIONS[eqn.primitive.name]
    return nests.reduce(b, function, [_operand(b, eqn, ins)], eqn.params["axes"], [_dtype(eqn.outvars[0])])


@lowers("argmax", "argmin")
def _argreduce(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    return nests.reduce(
        b,
        FUNCTIONS[eqn.primitive.name],
        [_operand(b, eqn, ins)],
        eqn.params["axes"],
        [_dtype(eqn.outvars[0])],
        combines=False,
    )


@lowers("reduce")
def _general_reduce(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    values = [_operand(b, eqn, ins, i) for i in range(len(eqn.outvars))]
    dtypes = [_dtype(v) for v in eqn.outvars]
    return nests.reduce(b, FUNCTIONS["reduce"], values, eqn.params["dimensions"], dtypes, combines=False)


@lowers("broadcast_in_dim")
def _broadcast(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    shape = _shape(eqn.outvars[0])
    if ins[0] is None:
        return [b.constant(shape, _dtype(eqn.outvars[0]), _number(eqn.invars[0]))]
    return [nests.broadcast(b, ins[0], shape, eqn.params["broadcast_dimensions"])]


@lowers("reshape", "squeeze", "expand_dims")
def _reshape(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    return [nests.reshape(b, _operand(b, eqn, ins), _shape(eqn.outvars[0]))]


@lowers("bitcast_convert_type")
def _bitcast(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    x, shape = _operand(b, eqn, ins), _shape(eqn.outvars[0])
    if len(x.shape) == len(shape):
        return nests.elementwise(
            b, FUNCTIONS["bitcast"], [x], [_dtype(eqn.outvars[0])], name="bitcast_convert_type", shape=shape
        )
    return _opaque(b, eqn, ins)


@lowers("transpose")
def _transpose(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    return [nests.transpose(b, _operand(b, eqn, ins), eqn.params["permutation"])]


@lowers("concatenate")
def _concatenate(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    inputs = [_operand(b, eqn, ins, i) for i in range(len(ins))]
    return [nests.concat(b, inputs, eqn.params["dimension"])]


@lowers("stack", "unstack")
def _stack(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A stack or unstack. The stacking dim may not be split."""
    stacks = eqn.primitive.name == "stack"
    axis, wide = eqn.params["axis"], _shape(eqn.outvars[0] if stacks else eqn.invars[0])
    one = [*wide[:axis], 1, *wide[axis + 1 :]]
    if stacks:
        return [
            nests.concat(b, [nests.reshape(b, _operand(b, eqn, ins, i), one) for i in range(len(ins))], axis)
        ]
    kept = [i != axis for i in range(len(wide))]
    x = _operand(b, eqn, ins)
    out: list[Tensor] = []
    for i, v in enumerate(eqn.outvars):
        row = nests.restrict(b, "unstack", [x], one, kept, _from(x, axis, i))
        out.append(nests.reshape(b, row, _shape(v)))
    return out


def _from(x: Tensor, axis: int, start: Size) -> Slice | None:
    """The parameters of a slice of one dim. None if its start is symbolic."""
    if not isinstance(start, int):
        return None
    rank = len(x.shape)
    return Slice(start=tuple(start if i == axis else 0 for i in range(rank)), step=(1,) * rank)


@lowers("tile")
def _tile(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    x, reps = _operand(b, eqn, ins), eqn.params["reps"]
    return [nests.restrict(b, "tile", [x], _shape(eqn.outvars[0]), [r == 1 for r in reps])]


def _kept(a: Sequence[Size], b: Sequence[Size]) -> list[bool]:
    return [x == y for x, y in zip(a, b, strict=True)]


@lowers("slice", "pad", "dynamic_slice")
def _slice(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    x, shape = _operand(b, eqn, ins), _shape(eqn.outvars[0])
    others = [t for t in ins[1:] if t is not None]
    kept = _kept(x.shape, shape)
    if (
        eqn.primitive.name == "pad"
    ):  # cutting and adding equally many elements preserves the size but not the elements
        kept = [k and not any(c) for k, c in zip(kept, eqn.params["padding_config"], strict=True)]
    parameters = _parameters(eqn, x, shape)
    if b.frozen and eqn.primitive.name == "dynamic_slice":  # with a gradient, that has the operand's size
        return [nests.taken(b, "dynamic_slice", [x, *others], shape, kept, parameters)]
    return [nests.restrict(b, eqn.primitive.name, [x, *others], shape, kept, parameters)]


def _parameters(eqn: Eqn, x: Tensor, shape: Sequence[Size]) -> Slice | Pad | None:
    """The parameters of a slice or a padding. None if sizes are symbolic, or an index or a value is a tensor."""
    numbers = [_number(v) for v in eqn.invars[1:]]
    if None in numbers or not all(isinstance(s, int) for s in (*x.shape, *shape)):
        return None
    p = eqn.params
    if eqn.primitive.name == "pad":
        before, _, interior = zip(*p["padding_config"], strict=True) if x.shape else ((), (), ())
        return Pad(before=before, interior=interior, value=numbers[0])  # type: ignore[arg-type]
    if eqn.primitive.name == "slice":
        return Slice(start=tuple(p["start_indices"]), step=tuple(p["strides"] or (1,) * len(shape)))
    starts = (max(0, min(int(n), s - t)) for n, s, t in zip(numbers, x.shape, shape, strict=True))  # type: ignore
    return Slice(start=tuple(starts), step=(1,) * len(shape))


@lowers("dynamic_update_slice")
def _update(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """An update. It runs in place if nothing has a gradient, because the old values are then not kept."""
    x, update = _operand(b, eqn, ins, 0), _operand(b, eqn, ins, 1)
    inputs = [x, update, *(t for t in ins[2:] if t is not None)]
    kept = _kept(x.shape, update.shape)
    if b.frozen:
        return [nests.put(b, "dynamic_update_slice", inputs, x.shape, kept)]
    return [nests.restrict(b, "dynamic_update_slice", inputs, x.shape, kept)]


@lowers("rev")
def _rev(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    x, turned = _operand(b, eqn, ins), eqn.params["dimensions"]
    parameters = None
    if all(isinstance(s, int) for s in x.shape):
        ends = tuple(int(s) - 1 if i in turned else 0 for i, s in enumerate(x.shape))  # type: ignore[call-overload]
        parameters = Slice(start=ends, step=tuple(-1 if i in turned else 1 for i in range(len(ends))))
    kept = [i not in turned for i in range(len(x.shape))]
    return [nests.restrict(b, "rev", [x], x.shape, kept, parameters)]


@lowers("split")
def _split(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    x, axis = _operand(b, eqn, ins), eqn.params["axis"]
    kept = [i != axis for i in range(len(x.shape))]
    out: list[Tensor] = []
    at: Size = 0
    for v in eqn.outvars:
        out.append(nests.restrict(b, "split", [x], _shape(v), kept, _from(x, axis, at)))
        at = at + _shape(v)[axis]  # type: ignore[operator]
    return out


@lowers("reduce_window_max", "reduce_window_min", "reduce_window_sum")
def _pool(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    p = eqn.params
    if any(d != 1 for d in p["base_dilation"]):
        return _opaque(b, eqn, ins)
    return [
        windows.window_reduce(
            b,
            FUNCTIONS[eqn.primitive.name],
            _operand(b, eqn, ins),
            _shape(eqn.outvars[0]),
            p["window_dimensions"],
            windows.Sliding(
                strides=p["window_strides"],
                padding=[before for before, _ in p["padding"]],
                dilation=p["window_dilation"],
            ),
        )
    ]


@lowers("reduce_window")
def _general_pool(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    if len(eqn.outvars) != 1:
        return _opaque(b, eqn, ins)
    return _pool(b, eqn, ins)


def moving(
    dims: Sequence[int], windows: Mapping[int, Size], shape: Sequence[Size], mode: GatherScatterMode
) -> list[int]:
    """The indexed dims of a gather or scatter along which its windows lie at several places.

    ``jax.vmap`` of a dynamic slice or update indexes every dim. Where a window is as long as the dim and is kept within
    it, the index says nothing.
    """
    import jax

    modes = jax.lax.GatherScatterMode
    kept = mode in (modes.CLIP, modes.PROMISE_IN_BOUNDS)
    return [d for d in dims if not (kept and windows.get(d) == shape[d])]


def gather_windows(eqn: Eqn) -> dict[int, Size]:
    """Dim of a gather's operand -> how much of it is read at once."""
    return {i: _size(n) for i, n in enumerate(eqn.params["slice_sizes"])}


def scatter_windows(eqn: Eqn) -> dict[int, Size]:
    """Dim of a scatter's operand -> how much of it is written at once."""
    d, (x, _, updates) = eqn.params["dimension_numbers"], eqn.invars
    batch = (*d.inserted_window_dims, *d.operand_batching_dims)
    kept = [i for i in range(len(_shape(x))) if i not in batch]
    sizes = {i: _shape(updates)[u] for i, u in zip(kept, d.update_window_dims, strict=True)}
    return dict.fromkeys(batch, 1) | sizes


@lowers("gather")
def _gather(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    p = eqn.params
    d = p["dimension_numbers"]
    x, ids, shape = _operand(b, eqn, ins, 0), _operand(b, eqn, ins, 1), _shape(eqn.outvars[0])
    if all(is_one(x.shape[i]) for i in d.start_index_map) and product(shape) == product(x.shape):
        return [nests.reshape(b, x, shape)]  # x[:, 0] of a dim of one element
    return [
        indexed.gather(
            b,
            "gather",
            x,
            ids,
            shape,
            indexed.IndexedDims(
                window=d.offset_dims,
                dropped=d.collapsed_slice_dims,
                indexed=moving(d.start_index_map, gather_windows(eqn), x.shape, p["mode"]),
                x_batch=d.operand_batching_dims,
                ids_batch=d.start_indices_batching_dims,
            ),
        )
    ]


SCATTERS = (
    "scatter",
    *(f"scatter{between}{how}" for how in ("add", "mul", "min", "max", "sub") for between in "-_"),
)
"""Scattered updates. Depending on its version, JAX writes their names with a hyphen or with an underscore."""


@lowers(*SCATTERS)
def _scatter(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    d = eqn.params["dimension_numbers"]
    x, ids, updates = (_operand(b, eqn, ins, i) for i in range(3))
    function = FUNCTIONS.get(eqn.primitive.name.replace("-", "_"))
    with b.undetermined(unless=function is not None):  # a difference is priced as a sum
        made = indexed.scatter(
            b,
            eqn.primitive.name,
            x,
            ids,
            updates,
            indexed.IndexedDims(
                window=d.update_window_dims,
                dropped=d.inserted_window_dims,
                indexed=moving(
                    d.scatter_dims_to_operand_dims, scatter_windows(eqn), x.shape, eqn.params["mode"]
                ),
                x_batch=d.operand_batching_dims,
                ids_batch=d.scatter_indices_batching_dims,
            ),
            combines=eqn.primitive.name != "scatter",
            function=function,
        )
    return [made]


@lowers("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    x = _operand(b, eqn, ins)
    axis, name = eqn.params["axis"], eqn.primitive.name
    parameters = Cumulative(axis=axis, reverse=bool(eqn.params["reverse"]), exclusive=False)
    return nests.sequential(b, FUNCTIONS[name], [x], axis, [(x.shape, x.dtype)], parameters=parameters)


@lowers("sort")
def _sort(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    inputs = [_operand(b, eqn, ins, i) for i in range(len(ins))]
    outs = [(t.shape, t.dtype) for t in inputs]
    axis = eqn.params["dimension"]
    parameters = Sort(axis=axis, descending=False) if len(inputs) == 1 else None
    return nests.sequential(b, functions.SORT, inputs, axis, outs, parameters=parameters)


@lowers("top_k", "approx_top_k")
def _top_k(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    x = _operand(b, eqn, ins)
    outs = [(_shape(v), _dtype(v)) for v in eqn.outvars]
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(x.shape)
    return nests.sequential(b, functions.TOP_K, [x], axis, outs)


@lowers("iota")
def _iota(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    parameters = Iota(axis=eqn.params["dimension"], start=0, step=1)
    out = eqn.outvars[0]
    return [nests.generate(b, functions.IOTA, _shape(out), _dtype(out), parameters=parameters)]


@lowers("random_bits", "rng_uniform")
def _random(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Each of an array of keys, as under jax.vmap, draws a row of its own."""
    keys, name = _tensors(ins), eqn.primitive.name
    by_row = draws_by_key(eqn)
    return [
        nests.generate(b, functions.RANDOM, _shape(v), _dtype(v), keys, name=name, by_row=by_row)
        for v in eqn.outvars
    ]


@lowers("debug_callback", "debug_print")
def _debug(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Printing costs nothing and does not affect any layout."""
    return []


@lowers("random_seed", "random_wrap", "random_unwrap", "random_split", "random_fold_in", "random_clone")
def _keys(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Arithmetic on an array of keys, each by itself, as under jax.vmap. A single key is not split."""
    (out,), name = eqn.outvars, eqn.primitive.name
    last = {"random_split": len(eqn.params.get("shape", ())), "random_unwrap": 1}.get(name, 0)
    lead = _shape(out)[: len(_shape(out)) - last]
    if not lead or not draws_by_key(eqn):
        return _small(b, eqn, ins)
    of_each = [t for t in _tensors(ins) if tuple(t.shape[: len(lead)]) == tuple(lead)]
    whole = [t for t in _tensors(ins) if t not in of_each]
    return nests.batched(b, name, of_each, [(_shape(out), _dtype(out))], len(lead), flops=0.0, whole=whole)


@lowers(
    "rng_bit_generator",
    "threefry2x32",
    "empty",
    "empty2",
    "create_token",
    "platform_index",
)
def _small(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Arithmetic on keys: small, and replicated on every device."""
    outs = [(_shape(v), _dtype(v)) for v in eqn.outvars]
    return nests.opaque(b, eqn.primitive.name, _tensors(ins), outs, differentiable=False)


BY_OPERAND = ("optimization_barrier", "device_put", "psum", "psum_invariant", "pmax", "pmin")
"""Primitives that take any number of operands and return one result per operand."""


@lowers(*BY_OPERAND[:2])
def _barrier(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    out: list[Tensor] = []
    for i, v in enumerate(eqn.outvars):
        x = _operand(b, eqn, ins, i)
        out += nests.elementwise(b, functions.COPY, [x], [_dtype(v)], name=eqn.primitive.name, shape=x.shape)
    return out


@lowers("select_and_scatter_add", "select_and_scatter", "select_and_gather_add", "random_gamma")
def _conservative(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    return _opaque(b, eqn, ins, flops=10.0 * _count(_shape(eqn.invars[0])))


def _count(shape: Sequence[Size]) -> float:
    """The number of elements. A symbolic size counts as 1024; the result is only used for a conservative cost."""
    return float(math.prod(s if isinstance(s, int) else 1024 for s in shape))


def _size(x: object) -> Size:
    return int(x) if isinstance(x, int) else parse_size(str(x))
