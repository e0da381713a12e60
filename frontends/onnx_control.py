"""Control flow of ONNX, handled conservatively.

A branch that is known to be taken is inlined. Any other branch, and every loop, is one op that is not split. It costs
as much as the work inside: the most expensive branch, or the body times the number of iterations (one, if unknown).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pase.frontends.onnx_values import OnnxCall
from pase.frontends.registry import Control, lowers_bodies
from pase.frontends.values import Value
from pase.ops import GraphBuilder
from pase.ops.loops import body_flops
from pase.registry import Registry

if TYPE_CHECKING:
    from onnx import GraphProto, ValueInfoProto

    from pase.frontends.from_onnx import OnnxLowering

__all__ = ["CONTROL", "apart_value", "captures"]

CONTROL: Registry[Control] = Registry("ONNX op with bodies")


def apart_value(v: Value) -> Value:
    """The same value for a body that is lowered separately."""
    items = None if v.items is None else tuple(map(apart_value, v.items))
    return Value(shape=v.shape, dtype=v.dtype, settled=v.settled, items=items, _data=v.data)


def captures(n: GraphProto) -> set[str]:
    """What the graphs inside a node may read from the graphs around it."""
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
) -> tuple[list[Value], float, dict[str, Value]]:
    """A body lowered separately: its results, the FLOPs of one iteration, and what it reads from enclosing graphs."""
    inner = low.inner(c)
    inner.b = GraphBuilder(name="body")
    inner.captured = {}
    for t in graph.initializer:  # its weights are the model's
        inner.captured[t.name] = v = low.initializer(t, f"{c.node.name or path}.")
        inner.env[t.name] = apart_value(v)
    if len(graph.input) > len(ins):
        raise c.fail(f"its body takes {len(graph.input)} inputs, but it is given {len(ins)}")
    for v, value in zip(graph.input, ins, strict=False):
        inner.env[v.name] = apart_value(value)
    inner.nodes(graph, "")
    outs = [inner.find(o.name, c.place) for o in graph.output]
    return outs, body_flops(inner.b), inner.captured


def _within(low: OnnxLowering, c: OnnxCall, graph: GraphProto, path: str) -> list[Value | None]:
    """A branch that is taken for certain, inlined."""
    inner = low.inner(c)
    for t in graph.initializer:
        inner.env[t.name] = inner.initializer(t)
    inner.nodes(graph, f"{path}.")
    return [inner.find(o.name, c.place) for o in graph.output]


@lowers_bodies(CONTROL, "If", listed="opaque")
def _if(
    low: OnnxLowering, c: OnnxCall, path: str, declared: Mapping[str, ValueInfoProto]
) -> Sequence[Value | None]:
    """The branch that is taken, if known. Otherwise one op that is not split, priced as the more expensive branch."""
    then, other = c.subgraph("then_branch"), c.subgraph("else_branch")
    cond = c.x().data
    if cond is not None and cond.size == 1:
        return _within(low, c, then if cond.reshape(()) else other, path)
    a, flops_a, reads_a = _apart(low, c, then, [], path)
    b, flops_b, reads_b = _apart(low, c, other, [], path)
    if len(a) != len(b):
        raise c.fail(f"its branches have {len(a)} and {len(b)} outputs")
    outs = [(x if x.elements >= y.elements else y) for x, y in zip(a, b, strict=True)]
    more = list({**reads_a, **reads_b}.values())
    return low.replicate(c, max(flops_a, flops_b, 1.0), {}, [(v.shape, v.dtype) for v in outs], more)


@lowers_bodies(CONTROL, "Loop", listed="opaque")
def _loop(
    low: OnnxLowering, c: OnnxCall, path: str, declared: Mapping[str, ValueInfoProto]
) -> Sequence[Value | None]:
    """Not split; costs the work of its body times the trip count (1 if unknown)."""
    body = c.subgraph("body")
    carried = [c.x(i) for i in range(2, len(c.ins))]
    turns = int(c.number_of(0, 0.0))
    unsettled = [Value(shape=v.shape, dtype=v.dtype) for v in carried]
    lead = [Value(shape=(), dtype="int64"), Value(shape=(), dtype="bool")]
    outs, flops, more = _apart(low, c, body, [*lead, *unsettled], path)
    results = [(v.shape, v.dtype) for v in outs[1 : 1 + len(carried)]]
    for name, v in zip(list(c.node.output)[len(carried) :], outs[1 + len(carried) :], strict=False):
        if turns:
            results.append((c.shape((turns, *v.shape)), v.dtype))
            continue
        told = declared.get(name)
        shape = None if told is None else low.model.shape(told)
        if shape is None:
            raise c.fail(
                f"the number of its iterations is not known, so the shape of '{name}' is not either: declare it"
            )
        results.append((c.shape(shape), v.dtype))
    return low.replicate(c, max(flops, 1.0) * max(turns, 1), {}, results, list(more.values()))


@lowers_bodies(CONTROL, "Scan", listed="opaque")
def _scan(
    low: OnnxLowering, c: OnnxCall, path: str, declared: Mapping[str, ValueInfoProto]
) -> Sequence[Value | None]:
    """Not split; costs the work of its body at every step."""
    body, n = c.subgraph("body"), c.integer("num_scan_inputs")
    first = 1 if c.version < 9 else 0  # sequence lengths come first; and all values had a leading batch dim
    values = [c.x(i) for i in range(first, len(c.ins))]
    if not 0 < n <= len(values):
        raise c.fail(f"it scans {n} inputs, but has only {len(values)}")
    states, scanned = values[:-n], values[-n:]
    axes = c.ints("scan_input_axes") or [first] * n
    out_axes = c.ints("scan_output_axes") or [first] * len(c.node.output)
    if len(axes) != n:
        raise c.fail(f"it has {len(axes)} axes for {n} scanned inputs")
    turns, slices = 0, []
    for v, a in zip(scanned, axes, strict=True):
        axis = c.axis(a, len(v.shape))
        turns = v.shape[axis]
        shape = [s for i, s in enumerate(v.shape) if i != axis and not (first and i == 0)]
        slices.append(Value(shape=tuple(shape), dtype=v.dtype))
    inside = [Value(shape=v.shape[first:], dtype=v.dtype) for v in states]
    outs, flops, more = _apart(low, c, body, [*inside, *slices], path)
    results = [(v.shape, v.dtype) for v in states]
    for v, a in zip(outs[len(states) :], out_axes, strict=False):
        shape = [*([values[0].shape[0]] if first else []), *v.shape]
        shape.insert(c.axis(a, len(shape) + 1), turns)
        results.append((c.shape(shape), v.dtype))
    times = turns * (values[0].shape[0] if first else 1)
    return low.replicate(c, max(flops, 1.0) * max(times, 1), {}, results, list(more.values()))
