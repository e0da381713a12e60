"""Lowers control flow of ONNX.

A branch that is known to be taken is inlined. Other branches, and loops with a known trip count, are lowered as for JAX
(``pase.frontends.jax.control``). Any other loop becomes one op that is not split and has the cost of its body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pase.frontends.common.values import Value
from pase.frontends.onnx.values import OnnxCall
from pase.frontends.registry import Control, lowers_bodies
from pase.ir import Scope, Tensor
from pase.ops import GraphBuilder, branches, loops
from pase.ops.loops import body_flops
from pase.registry import Registry

if TYPE_CHECKING:
    from onnx import GraphProto, ValueInfoProto

    from pase.frontends.onnx.frontend import OnnxLowering

__all__ = ["CONTROL", "apart_value", "captures"]

_ENDLESS = 2**31
"""Exporters write a trip count of at least this if the loop is ended by a condition."""

CONTROL: Registry[Control] = Registry("ONNX op with bodies")


def apart_value(v: Value) -> Value:
    """A copy of a value, without its tensor, for a body that is lowered separately."""
    items = None if v.items is None else tuple(map(apart_value, v.items))
    return Value(shape=v.shape, dtype=v.dtype, foldable=v.foldable, items=items, _data=v.data)


def captures(n: GraphProto) -> set[str]:
    """Names of all values that the graphs inside a node read. They include values of enclosing graphs."""
    out: set[str] = set()
    stack = [g for a in n.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs)]
    while stack:
        g = stack.pop()
        out.update(o.name for o in g.output)
        for m in g.node:
            out.update(m.input)
            stack += [x for a in m.attribute for x in (*([a.g] if a.HasField("g") else []), *a.graphs)]
    return out


def _apart(
    low: OnnxLowering, c: OnnxCall, graph: GraphProto, ins: Sequence[Value], path: str
) -> tuple[list[Value], GraphBuilder, dict[str, Value]]:
    """Lower a body separately. Returns its results, its loop nests, and the enclosing graphs' values that it reads."""
    inner = _body(low, c, path, f"{path}.")
    inner.b, inner.captured, inner.apart = GraphBuilder(name="body"), {}, inner
    inner.initializers(graph)
    if len(graph.input) > len(ins):
        raise c.fail(f"its body has {len(graph.input)} inputs, but gets {len(ins)} values")
    for v, value in zip(graph.input, ins, strict=False):
        inner.env[v.name] = apart_value(value)
    inner.nodes(graph, "")
    outs = [inner.find(o.name, c.place) for o in graph.output]
    return outs, inner.b, inner.captured


def _whole(
    low: OnnxLowering,
    c: OnnxCall,
    body: GraphBuilder,
    times: int,
    results: Sequence[tuple[tuple[int, ...], str]],
    reads: Mapping[str, Value],
) -> Sequence[Value]:
    """A loop as one op that is not split. times: its trip count, or 0 if that is not known."""
    flops = body_flops(body)
    low.b.remarks += body.remarks
    low.b.remark(
        "opaque", f"{c.place} is not split: every device does all of its work, {flops:.3g} FLOPs an iteration"
    )
    return low.replicate(c, max(flops, 1.0) * max(times, 1), {}, results, list(reads.values()))


def _even(init: Sequence[Value], outs: Sequence[Value]) -> bool:
    """Whether a loop can be lowered: all values are tensors with elements, and carried values keep shape and dtype."""
    kept = all(v.shape == o.shape and v.dtype == o.dtype for v, o in zip(init, outs, strict=False))
    return kept and all(v.items is None and v.elements and v.dtype != "string" for v in (*init, *outs))


def _turned(
    c: OnnxCall,
    graph: GraphProto,
    path: str,
    trip_count: int,
    lead: Sequence[Value],
    carried: Sequence[Value],
    sliced: Sequence[tuple[Value, int]],
    out_axes: Sequence[int],
) -> list[Value]:
    """Lower the body once as a loop. Returns the carried values, then the stacked results of all iterations.

    lead: the first inputs of each iteration, which hold no data. sliced: (value, the dim along which each iteration
    reads a slice). out_axes: the dims along which results are stacked.
    """
    low, b, at, source = c.low, c.b, c.b.eqn, c.b.source
    inner = _body(low, c, path, f"{path}.")
    inner.initializers(graph)
    _loop_copies(low, c, inner, graph)
    init = [b.carry(c.tensor(v), at.its("carry", k)) for k, v in enumerate(carried)]
    stacks = []
    for k, (v, axis) in enumerate(sliced):
        b.eqn = at.its("xs", k)
        t = c.tensor(c.transpose(v, [axis, *(i for i in range(len(v.shape)) if i != axis)]))
        stacks.append(loops.loop_copy(b, t, "loop_xs") if t.role == "activation" else t)
    with b.region("loop", f"{path}.", times=trip_count):
        slices = []
        for k, t in enumerate(stacks):
            b.eqn = at.its("x", k)
            slices.append(loops.unstack(b, t))
        for named, v in zip(graph.input, [*lead, *map(c.value, (*init, *slices))], strict=True):
            inner.env[named.name] = v
        inner.nodes(graph, f"{path}.")
        b.source = source
        made = []
        for k, out in enumerate(graph.output[len(graph.output) - len(init) - len(out_axes) :]):
            b.eqn = at.its("y", k)
            t = c.tensor(inner.find(out.name, c.place))
            made.append(t if k < len(init) else loops.stack(b, t, trip_count, (trip_count, *t.shape)))
        for before, after in zip(init, made, strict=False):
            if before.name != after.name:
                b.close_carry(before, after)
    b.eqn = at
    results = [c.value(t) for t in init]
    for t, axis in zip(made[len(init) :], out_axes, strict=True):
        rest = list(range(1, len(t.shape)))
        results.append(c.transpose(c.value(t), [*rest[:axis], 0, *rest[axis:]]))
    return results


def _loop_copies(low: OnnxLowering, c: OnnxCall, inner: OnnxLowering, graph: GraphProto) -> None:
    """Copy the values that each iteration reads whole. Their layouts are fixed once, before the loop."""
    b, at = low.b, low.b.eqn
    given = {v.name for v in graph.input}
    outside = [n for n in sorted(captures(c.node) - given) if n in low.env or low._outside(n)]
    for k, name in enumerate([*outside, *inner.env]):
        v = inner.env[name] if name in inner.env else low.find(name, c.place)
        if v.items is not None or v.known is not None or v.elements <= 1 or (v.weight and len(v.shape) < 2):
            continue
        if v.tensor is None and v.make is None:
            continue
        b.eqn = at.its("const", k)
        t = c.tensor(v)
        if t.role != "constant":
            inner.env[name] = c.value(loops.loop_copy(b, t, "loop_const"))
    b.eqn = at


def _body(low: OnnxLowering, c: OnnxCall, path: str, prefix: str) -> OnnxLowering:
    """The lowering for a graph inside a node. prefix: of the paths of the inner graph's nodes."""
    inner = low.inner(c)
    inner.scope = f"{low.scope}{prefix.removeprefix(low.prefix)}"
    inner.owner = f"{low.owner}{c.node.name or path}."
    return inner


def _within(low: OnnxLowering, c: OnnxCall, graph: GraphProto, path: str, part: str = "") -> list[Value]:
    """Lower a branch as part of the enclosing graph. part: the branch's number and a dot, if there are several."""
    inner = _body(low, c, path, f"{path}.{part}")
    if not part:  # the only branch: its weights keep their own names
        inner.owner = low.owner
    inner.initializers(graph)
    inner.nodes(graph, f"{path}.{part}")
    return [inner.find(o.name, c.place) for o in graph.output]


@lowers_bodies(CONTROL, "If", listed="branches")
def _if(
    low: OnnxLowering, c: OnnxCall, path: str, declared: Mapping[str, ValueInfoProto]
) -> Sequence[Value | None]:
    """The branch that is taken, if known. Otherwise both, with the more expensive one priced as always taken."""
    graphs = c.subgraph("then_branch"), c.subgraph("else_branch")
    asked = c.x()
    if asked.elements != 1:
        raise c.fail(f"its condition has shape {list(asked.shape)}, but must be one bool")
    if asked.data is not None:
        return list(_within(low, c, graphs[0 if asked.data.reshape(()) else 1], path))
    if len(graphs[0].output) != len(graphs[1].output):
        raise c.fail(
            f"its branches have {len(graphs[0].output)} and {len(graphs[1].output)} outputs, but must have equally many"
        )
    b, at, source = low.b, low.b.eqn, low.b.source
    index = c.tensor(c.reshape(asked, ()))
    made: list[list[Value]] = []
    first = len(b.nodes)
    for k, graph in enumerate(graphs):
        with b.region("branch", f"{path}.{k}."):
            made.append(_within(low, c, graph, path, f"{k}."))
            b.source = source
            for j, v in enumerate(made[k]):
                b.eqn = at.its("out", k, j)
                made[k][j] = _left(c, v)
    regions = [Scope("branch", f"{path}.{k}.") for k in range(2)]
    likely = branches.chances([body_flops(b, first, scope) for scope in regions])
    for scope, chance in zip(regions, likely, strict=True):
        b.weigh(first, scope, chance)
    taken = likely.index(1.0)
    names = ("then_branch", "else_branch")
    b.remark(
        "assumed",
        f"of the branches of {c.place}, {names[taken]}, the more expensive one, is priced as if it were taken every "
        f"time",
    )
    b.eqn = at
    return [_met(c, index, same, taken, k) for k, same in enumerate(zip(*made, strict=True))]


def _left(c: OnnxCall, v: Value) -> Value:
    """A result of a branch, as a value outside of the branch."""
    if v.items is not None:
        return replace(v, items=tuple(_left(c, i) for i in v.items))
    if v.elements == 0 or (v.known is not None and not v.weight):
        return v
    return c.value(branches.leave(c.b, c.tensor(v)))


def _met(c: OnnxCall, index: Tensor, same: Sequence[Value], taken: int, k: int) -> Value:
    """Result k of the branches. If its shapes differ, its readers are priced for the branch that is priced as taken."""
    it = same[taken]
    if it.items is not None:
        others = [v.items or () for v in same]
        if any(len(o) != len(it.items) for o in others):
            raise c.fail(
                f"its branches return sequences of {len(others[0])} and {len(others[1])} tensors in output {k}, but "
                f"the lengths must be equal"
            )
        return replace(it, items=tuple(_met(c, index, s, taken, k) for s in zip(*others, strict=True)))
    if any(v.dtype != it.dtype for v in same):
        raise c.fail(
            f"its branches return {same[0].dtype} and {same[1].dtype} in output {k}, but the dtypes must be equal"
        )
    if any(v.shape != it.shape for v in same):
        shapes = " and ".join(str(list(v.shape)) for v in same)
        c.b.remark(
            "unknown",
            f"the branches of {c.place} return shapes {shapes} in output {k}: the readers of this output are priced "
            f"for {list(it.shape)}",
        )
        same = [it]
    if it.elements == 0:
        return it
    first = same[0].known
    if first is not None and all(v.known is not None and np.array_equal(first, v.known) for v in same):
        return it
    return c.value(branches.meet(c.b, index, c.tensors(*same)))


@lowers_bodies(CONTROL, "Loop", listed="loop")
def _loop(
    low: OnnxLowering, c: OnnxCall, path: str, declared: Mapping[str, ValueInfoProto]
) -> Sequence[Value | None]:
    """The body times the trip count. One op that is not split if the trip count is unknown or carried shapes change."""
    body = c.subgraph("body")
    carried = [c.x(i) for i in range(2, len(c.ins))]
    trip_count = int(c.number_of(0, 0.0))
    if not 0 < trip_count < _ENDLESS:
        trip_count = 0
        low.b.remark(
            "trip_count",
            f"{c.place} is priced as one iteration, because its trip count is not known before it runs; give it a "
            f"constant trip count",
        )
    unsettled = [Value(shape=v.shape, dtype=v.dtype) for v in carried]
    lead = [Value(shape=(), dtype="int64"), Value(shape=(), dtype="bool")]
    outs, apart, more = _apart(low, c, body, [*lead, *unsettled], path)
    if trip_count and _even(carried, outs[1:]) and len(body.input) == 2 + len(carried):
        if outs[0].tensor is not None and outs[0].tensor.role != "constant":
            low.b.remark(
                "assumed", f"{c.place} is priced as {trip_count} iterations, its largest possible number"
            )
        stacked = [0] * (len(outs) - 1 - len(carried))
        return list(_turned(c, body, path, trip_count, lead, carried, [], stacked))
    results = [(v.shape, v.dtype) for v in outs[1 : 1 + len(carried)]]
    for name, v in zip(list(c.node.output)[len(carried) :], outs[1 + len(carried) :], strict=False):
        if trip_count:
            results.append((c.shape((trip_count, *v.shape)), v.dtype))
            continue
        told = declared.get(name)
        shape = None if told is None else low.model.shape(told)
        if shape is None:
            raise c.fail(
                f"its trip count is not known, and therefore neither is the shape of '{name}'",
                fix="declare the shape in the file (value_info)",
            )
        results.append((c.shape(shape), v.dtype))
    return _whole(low, c, apart, trip_count, results, more)


@lowers_bodies(CONTROL, "Scan", listed="loop")
def _scan(
    low: OnnxLowering, c: OnnxCall, path: str, declared: Mapping[str, ValueInfoProto]
) -> Sequence[Value | None]:
    """The body times the length of what is scanned."""
    body, n = c.subgraph("body"), c.integer("num_scan_inputs")
    first = (
        1 if c.version < 9 else 0
    )  # before opset 9, sequence lengths come first and all values have a batch dim
    values = [c.x(i) for i in range(first, len(c.ins))]
    if not 0 < n <= len(values):
        raise c.fail(f"num_scan_inputs is {n}, but it has {len(values)} inputs")
    states, scanned = values[:-n], values[-n:]
    axes = c.ints("scan_input_axes") or [first] * n
    out_axes = c.ints("scan_output_axes") or [first] * len(c.node.output)
    if len(axes) != n:
        raise c.fail(f"scan_input_axes has {len(axes)} axes for {n} scanned inputs")
    trip_count, slices = 0, []
    for v, a in zip(scanned, axes, strict=True):
        axis = c.axis(a, len(v.shape))
        trip_count = v.shape[axis]
        shape = [s for i, s in enumerate(v.shape) if i != axis and not (first and i == 0)]
        slices.append(Value(shape=tuple(shape), dtype=v.dtype))
    inside = [Value(shape=v.shape[first:], dtype=v.dtype) for v in states]
    outs, apart, more = _apart(low, c, body, [*inside, *slices], path)
    if (
        not first
        and trip_count
        and _even([*states, *scanned], [*outs[: len(states)], *scanned, *outs[len(states) :]])
    ):
        along = [(v, c.axis(a, len(v.shape))) for v, a in zip(scanned, axes, strict=True)]
        made = outs[len(states) :]
        stacked = [c.axis(a, len(v.shape) + 1) for v, a in zip(made, out_axes, strict=False)]
        return list(_turned(c, body, path, trip_count, [], states, along, stacked))
    results = [(v.shape, v.dtype) for v in states]
    for v, a in zip(outs[len(states) :], out_axes, strict=False):
        shape = [*([values[0].shape[0]] if first else []), *v.shape]
        shape.insert(c.axis(a, len(shape) + 1), trip_count)
        results.append((c.shape(shape), v.dtype))
    times = trip_count * (values[0].shape[0] if first else 1)
    return _whole(low, c, apart, times, results, more)
