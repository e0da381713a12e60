"""Translates JAX's primitives to Mesh-TensorFlow ops.

The rules come first. ``source_ops`` reads a jaxpr as the list of ops that they translate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pase.backends.mesh_tf import images, lower
from pase.backends.mesh_tf.lower import MeshTfRules, refuse
from pase.backends.mesh_tf.program import Input, MeshTfProgram, MeshTfValue, SourceOp
from pase.errors import PaseError
from pase.frontends.jax.attention import call_of
from pase.frontends.jax.frontend import INLINED, KEPT_WHOLE, TracedJax, inner_jaxpr
from pase.frontends.jax.rules import RULES as JAX_RULES
from pase.frontends.jax.rules import Elementwise
from pase.frontends.jax.types import Eqn, Var
from pase.frontends.jax.versions import is_literal, literal_array, scan_groups, source_line
from pase.ir.functions import Function
from pase.ir.places import NOWHERE, Place

__all__ = ["RULES", "source_ops"]

_ATTENTION = "attention"
"""The name of attention that the user requests as one op, whatever its name in the program."""
_NO_LOOPS = (
    "Mesh-TensorFlow programs have no loops whose trip count depends on data; write it as a lax.scan, or as a "
    "fori_loop with constant bounds, which is unrolled"
)
_MOST_TRIPS = 200
"""The most iterations of a loop that are unrolled."""


def _function(name: str) -> Function | None:
    rule = JAX_RULES.get(name)
    # JAX's op may also round halves away from zero.
    return rule.function if isinstance(rule, Elementwise) and name != "round" else None


RULES = MeshTfRules(
    file="backends/mesh_tf/jax_ops.py",
    instead={
        "while": _NO_LOOPS,
        _ATTENTION: "Mesh-TensorFlow has no fused kernel for it; write it as two products and a softmax (models of the "
        "zoo take attention=plain)",
    },
    function=_function,
    reduce={"reduce_sum": "mtf.reduce_sum", "reduce_max": "mtf.reduce_max", "reduce_min": "mtf.reduce_min"},
    axes=lambda op: (op.attrs["axes"], False),
    views=frozenset({"reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "dot_general"}),
)


@RULES.rule("convert_element_type")
def _cast(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    x = p.arg(op, 0)
    return p.let(f"mtf.cast({x.code}, tf.{op.dtypes[0]})", x.order, x.dims, op.dtypes[0])


@RULES.rule("optimization_barrier")
def _barrier(p: MeshTfProgram, op: SourceOp) -> list[MeshTfValue]:
    return [p.arg(op, k) for k in range(len(op.inputs))]


@RULES.rule("integer_pow")
def _integer_pow(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    x, y = p.arg(op, 0), op.attrs["y"]
    if y < 1:
        code = f"ops.cwise(lambda x: x ** {y}.0, {x.code})"
    else:
        code = f"mtf.square({x.code})" if y == 2 else " * ".join([x.code] * y)
    return p.let(code, x.order, x.dims, x.dtype)


@RULES.rule("select_n")
def _select(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    return lower.select(p, op, 0, 2, 1)


@RULES.rule("slice")
def _slice(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    if any(s != 1 for s in op.attrs["strides"] or ()):
        raise refuse(op, "Mesh-TensorFlow's slices have no strides")
    x = p.arg(op, 0)
    for axis, (a, b) in enumerate(zip(op.attrs["start_indices"], op.attrs["limit_indices"], strict=True)):
        x = lower.cut(p, op, x, axis, int(a), int(b - a))
    return x


@RULES.rule("split")
def _split(p: MeshTfProgram, op: SourceOp) -> list[MeshTfValue | None]:
    x, axis = p.arg(op, 0), op.attrs["axis"]
    ends = np.cumsum(op.attrs["sizes"])
    return [
        lower.cut(p, op, x, axis, int(end - n), int(n))
        for end, n in zip(ends, op.attrs["sizes"], strict=True)
    ]


@RULES.rule("concatenate")
def _concatenate(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    return lower.concat(p, op, [p.arg(op, k) for k in range(len(op.inputs))], op.attrs["dimension"])


@RULES.rule("gather")
def _gather(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    """Translate x[ids] and x[i, ids[i]]."""
    d = op.attrs["dimension_numbers"]
    table, ids = p.arg(op, 0), p.arg(op, 1)
    dims = p.written(op.outputs[0])
    if len(d.start_index_map) != 1 or len(d.collapsed_slice_dims) != 1 or dims is None:
        raise refuse(op, "only gathers that select whole rows by one index can be expressed")
    axis = d.start_index_map[0]
    ids = MeshTfValue(ids.code, ids.order, ids.dims[:-1], ids.dtype)
    return lower.lookup(p, op, table, ids, axis, dims)


@RULES.rule("conv_general_dilated")
def _conv(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    a = op.attrs
    lhs, rhs, out = (tuple(x) for x in a["dimension_numbers"])
    if len(lhs) != 4 or a["feature_group_count"] != 1 or {*a["lhs_dilation"], *a["rhs_dilation"]} != {1}:
        raise refuse(op, "only two-dimensional convolutions without groups and dilation can be expressed")
    x, w = p.arg(op, 0), p.arg(op, 1)
    b, c, h, v = lhs
    x = MeshTfValue(x.code, x.order, tuple(x.dims[i] for i in (b, h, v, c)), x.dtype)
    n, c, h, v = rhs
    w = MeshTfValue(w.code, w.order, tuple(w.dims[i] for i in (h, v, c, n)), w.dtype)
    shape = tuple(op.shapes[0][i] for i in (out[0], out[2], out[3], out[1]))
    y = images.conv2d(p, op, x, w, shape, strides=a["window_strides"], padding=a["padding"])
    made = dict(zip((out[0], out[2], out[3], out[1]), y.dims, strict=True))
    return MeshTfValue(y.code, y.order, tuple(made[i] for i in range(4)), y.dtype)


@RULES.rule("reduce_window_max", "reduce_window_sum")
def _pool(p: MeshTfProgram, op: SourceOp) -> MeshTfValue:
    a = op.attrs
    window, strides, padding = a["window_dimensions"], a["window_strides"], a["padding"]
    dilated = {*(a.get("base_dilation") or (1,)), *(a.get("window_dilation") or (1,))} != {1}
    if len(window) != 4 or window[0] != 1 or window[3] != 1 or dilated or any(sum(q) for q in padding):
        raise refuse(
            op,
            "only pools over rows and columns (NHWC) without padding can be expressed as windowed reductions",
        )
    x = p.arg(op, 0)
    kind = "MAX" if op.name.endswith("max") else "AVG"
    y = images.pool2d(p, op, x, kind, op.shapes[0], window=window[1:3], strides=strides[1:3], padding="VALID")
    if kind == "AVG":  # the sum over a window is its mean times its size
        y = p.let(f"{y.code} * {float(window[1] * window[2])}", y.order, y.dims, y.dtype)
    return y


RULES.rule("pase:same")(lower.same)
RULES.rule("pase:take")(lower.take)
RULES.rule("pase:stack")(lower.stack)


# --- reading a jaxpr as a list of ops


def source_ops(traced: TracedJax, roles: Mapping[str, str]) -> Iterator[SourceOp]:
    """The jaxpr's equations, with calls inlined and scans unrolled. Values that do not depend on data are computed.

    roles: tensor -> its role in the graph.
    """
    walk = _JaxprReader(traced, roles)
    names = [n.ops[0].writes[0].tensor for n in traced.graph.nodes if n.kind in ("parameter", "input")]
    jaxpr = traced.jaxpr.jaxpr
    env: dict[Var, Input] = {}
    for var, name in zip(jaxpr.invars, names, strict=False):
        env[var] = Input(tensor=name, shape=tuple(var.aval.shape), dtype=str(var.aval.dtype))
    for var, value in zip(jaxpr.constvars, traced.jaxpr.consts, strict=True):
        env[var] = _value(np.asarray(value))
    yield from walk.eqns(jaxpr.eqns, env, "")


def _value(array: np.ndarray, tensor: str | None = None) -> Input:
    """An operand whose value is known. tensor: its name in the plan's graph, if it has one."""
    return Input(tensor=tensor, value=array, shape=array.shape, dtype=str(array.dtype))


class _JaxprReader:
    """Reads a jaxpr as a list of ops, in the names of the plan's graph.

    In its methods, ``inside`` is the path of the call around the equations that is one op in the plan's graph, so that
    the values inside have no names there; "" outside of such calls.
    """

    def __init__(self, traced: TracedJax, roles: Mapping[str, str]):
        self.traced, self.roles, self.fresh, self.line = traced, roles, 0, NOWHERE

    def eqns(
        self, eqns: Sequence[Eqn], env: dict[Var, Input], prefix: str, inside: str = ""
    ) -> Iterator[SourceOp]:
        """The ops of these equations. env: variable -> its value; results are added to it."""

        def read(var: Var) -> Input:
            return _value(np.asarray(literal_array(var))) if is_literal(var) else env[var]

        for i, eqn in enumerate(eqns):
            at = Place(inside or f"{prefix}{i}")
            # The equations of a cached inner jaxpr have no source lines.
            self.line = source_line(eqn) or self.line
            name = _ATTENTION if call_of(eqn) else eqn.primitive.name
            ins = [read(v) for v in eqn.invars]
            if name in INLINED:
                jaxpr, consts = inner_jaxpr(eqn)
                inner = dict(zip(jaxpr.constvars, (_value(np.asarray(c)) for c in consts), strict=True))
                inner.update(zip(jaxpr.invars, ins, strict=True))
                yield from self.eqns(
                    jaxpr.eqns, inner, f"{prefix}{i}.", inside or (at.path if name in KEPT_WHOLE else "")
                )
                made = [
                    _value(np.asarray(literal_array(v))) if is_literal(v) else inner[v] for v in jaxpr.outvars
                ]
                if name in KEPT_WHOLE and not inside:
                    yield from self._returned(eqn, made, at)
                    made = [
                        self._named(v, t) for v, t in zip(eqn.outvars, self.traced.results[at], strict=True)
                    ]
                env.update(zip(eqn.outvars, made, strict=True))
                continue
            if name == "scan":
                made = []
                yield from self.scan(eqn, ins, f"{prefix}{i}.", at, inside, made)
                env.update(zip(eqn.outvars, made, strict=True))
                continue
            if all(x.value is not None for x in ins):
                env.update(zip(eqn.outvars, self._evaluated(eqn, ins, at, inside), strict=True))
                continue
            names = list(self.traced.results.get(at, ())) if not inside else []
            if not names:
                names = [self._new_name(v) for v in eqn.outvars]
            op = SourceOp(
                at=at,
                name=name,
                label=str(self.line),
                inputs=tuple(ins),
                outputs=tuple(names),
                shapes=tuple(tuple(v.aval.shape) for v in eqn.outvars),
                dtypes=tuple(str(v.aval.dtype) for v in eqn.outvars),
                attrs=eqn.params,
            )
            for v, t in zip(eqn.outvars, names, strict=True):
                env[v] = Input(tensor=t, shape=tuple(v.aval.shape), dtype=str(v.aval.dtype))
            yield op

    def scan(
        self, eqn: Eqn, ins: Sequence[Input], prefix: str, at: Place, inside: str, out: list[Input]
    ) -> Iterator[SourceOp]:
        """Unroll the iterations. Appends the loop's results to ``out``.

        The plan's graph has a single body. Each iteration therefore sets values of the same names again, and a value
        that is needed after the next iteration must first get another name.
        """
        closed, length = eqn.params["jaxpr"], int(eqn.params["length"])
        body, (nc, nk) = closed.jaxpr, scan_groups(eqn)
        if length > _MOST_TRIPS:
            raise PaseError(
                f"a Mesh-TensorFlow program would have {length} iterations of it, but at most {_MOST_TRIPS} are "
                f"unrolled",
                where=f"'scan' at {self.line or 'an unknown line'}",
            )
        consts, carry, stacks = [*ins[:nc]], [*ins[nc : nc + nk]], [*ins[nc + nk :]]
        for part, values in (("const", consts), ("xs", stacks)):
            for k in range(len(values)):
                yield from self._rename(values, k, self._loop_name(at.its(part, k), inside))  # type: ignore[arg-type]
        ys: list[list[Input]] = [[] for _ in body.outvars[nk:]]
        for iteration in range(length):
            index = length - 1 - iteration if eqn.params["reverse"] else iteration
            yield from self._renamed_apart(carry)
            for k in range(nk):
                yield from self._rename(carry, k, self._loop_name(at.its("carry", k), inside))
            env = dict(zip(body.constvars, (_value(np.asarray(c)) for c in closed.consts), strict=True))
            env.update(zip(body.invars[: nc + nk], (*consts, *carry), strict=True))
            for k, (var, stacked) in enumerate(zip(body.invars[nc + nk :], stacks, strict=True)):
                if stacked.value is not None:
                    env[var] = _value(stacked.value[index])
                    continue
                slice_at = at.its("x", k)
                env[var] = self._named(var, self._loop_name(slice_at, inside) or self._new_name(var))
                yield self._pase_op("take", slice_at, [stacked], env[var], index=index)
            yield from self.eqns(body.eqns, env, prefix, inside)
            results = [
                _value(np.asarray(literal_array(v))) if is_literal(v) else env[v] for v in body.outvars
            ]
            carry = results[:nk]
            for rows, y in zip(ys, results[nk:], strict=True):
                rows.append(y)
                # The next iteration sets the same name again.
                yield from self._renamed_for_good(rows, len(rows) - 1)
        yield from self._renamed_apart(carry)
        for k in range(nk):
            yield from self._rename(carry, k, self._loop_name(at.its("carry", k), inside))
        out += carry
        for k, rows in enumerate(ys):
            yield from self._stacked(eqn, rows[::-1] if eqn.params["reverse"] else rows, k, at, inside, out)

    def _stacked(
        self, eqn: Eqn, rows: list[Input], k: int, at: Place, inside: str, out: list[Input]
    ) -> Iterator[SourceOp]:
        """Stack one result of all iterations into one tensor, which is appended to ``out``. k: the result's index."""
        if all(y.value is not None for y in rows):
            out.append(_value(np.stack([y.value for y in rows if y.value is not None])))
            return
        names = () if inside else self.traced.results.get(at, ())
        var = eqn.outvars[len(out)]
        out.append(self._named(var, names[len(out)] if names and names[len(out)] else self._new_name(var)))
        yield self._pase_op("stack", at.its("y", k), rows, out[-1])

    def _loop_name(self, at: Place, inside: str) -> str:
        """The name in the plan's graph of a value that enters or leaves a loop's body; empty if it has none."""
        return "" if inside else next(iter(self.traced.results.get(at, ())), "")

    def _pase_op(
        self, name: str, at: Place | None, given: Sequence[Input], made: Input, **attrs: object
    ) -> SourceOp:
        """An op that only pase has (``same``, ``take`` or ``stack``): given -> made."""
        assert made.tensor is not None
        return SourceOp(
            at=at,
            name=f"pase:{name}",
            label=str(at or self.line),
            inputs=tuple(given),
            outputs=(made.tensor,),
            shapes=(made.shape,),
            dtypes=(made.dtype,),
            attrs=attrs,
        )

    def _rename(self, values: list[Input], k: int, name: str) -> Iterator[SourceOp]:
        """Give values[k] this name, under which the plan's loop reads it. Nothing happens if the name is empty."""
        if name and values[k].tensor != name:
            given, values[k] = values[k], Input(tensor=name, shape=values[k].shape, dtype=values[k].dtype)
            yield self._pase_op("same", None, [given], values[k])

    def _renamed_for_good(self, values: list[Input], k: int) -> Iterator[SourceOp]:
        """Give values[k] a new name, which nothing sets again."""
        if values[k].value is None:
            self.fresh += 1
            yield from self._rename(values, k, f"{values[k].tensor}@{self.fresh}")

    def _renamed_apart(self, values: list[Input]) -> Iterator[SourceOp]:
        """Give each value a new name before several are renamed, because one may have the name that another gets."""
        for k in range(len(values)):
            if len(values) > 1:
                yield from self._renamed_for_good(values, k)

    def _named(self, var: Var, tensor: str) -> Input:
        """The variable's value as a tensor of this name."""
        return Input(tensor=tensor, shape=tuple(var.aval.shape), dtype=str(var.aval.dtype))

    def _returned(self, eqn: Eqn, made: Sequence[Input], at: Place) -> Iterator[SourceOp]:
        """Give the results of a call that is one op in the graph the names that they have in the graph."""
        for var, value, name in zip(eqn.outvars, made, self.traced.results[at], strict=True):
            yield self._pase_op("same", None, [value], self._named(var, name))

    def _new_name(self, var: Var) -> str:
        """A name for a value that has none in the graph, because it is inside a call that is one op there."""
        self.fresh += 1
        return f"inner{self.fresh}"

    def _evaluated(self, eqn: Eqn, ins: Sequence[Input], at: Place, inside: str) -> list[Input]:
        """The results of an equation whose operands are all known."""
        out = eqn.primitive.bind(*(x.value for x in ins), **eqn.params)
        made = out if eqn.primitive.multiple_results else [out]
        names = () if inside else self.traced.results.get(at, ())
        return [_value(np.asarray(a), names[k] if k < len(names) else None) for k, a in enumerate(made)]
