"""Lowers While and If.

A loop with a known trip count is lowered as its body times that count, like JAX's scan. Any other loop, and any branch
that depends on data, becomes one op that is not split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError
from pase.frontends.common.values import Value, known
from pase.frontends.registry import Control, lowers_bodies
from pase.frontends.tf.graph import TfBody, TfNode
from pase.frontends.tf.known import constant, evaluate
from pase.frontends.tf.values import (
    Handle,
    TensorList,
    TfCall,
    TfValue,
    elements,
    tensor_of,
    value_of,
    whole,
)
from pase.ir import Place, Tensor
from pase.ir.sizes import is_one
from pase.ops import GraphBuilder, loops, nests
from pase.registry import Registry

if TYPE_CHECKING:
    from pase.frontends.tf.lower import TfLowering

__all__ = ["REGIONS", "trip_count"]

REGIONS: Registry[Control] = Registry("TensorFlow op with bodies")

_MOST_TRIPS = 20_000


@lowers_bodies(REGIONS, "While", "StatelessWhile", listed="loop")
def _while(lower: TfLowering, node: TfNode, ins: Sequence[TfValue], path: str) -> list[TfValue]:
    condition, body = _bodies(lower, node)
    if not len(body.outputs) == len(body.args) == len(ins) == len(condition.args):
        raise PaseError(
            f"it has {len(ins)} values, but its body has {len(body.args)} arguments and {len(body.outputs)} results, "
            f"and its condition {len(condition.args)} arguments",
            where=f"TensorFlow op '{node.op}' at {path}",
        )
    loop = _Loop.of(condition, body, ins)
    if loop.times is None:
        return _region(lower, node, ins, path, [body])
    if loop.times == 0:
        return list(ins)
    made = _unrolled_by_count(lower, loop, node, ins, path)
    return made if made is not None else _region(lower, node, ins, path, [body])


@lowers_bodies(REGIONS, "If", "StatelessIf", "Case", "StatelessCase", listed="branch")
def _if(lower: TfLowering, node: TfNode, ins: Sequence[TfValue], path: str) -> list[TfValue]:
    """A branch that is known to be taken is inlined. Otherwise, the most expensive branch is priced, unsplit."""
    branches = _bodies(lower, node)
    c = TfCall(builder=lower.b, node=node, ins=ins)
    choice = c.known(0)
    if choice is not None and choice.size == 1:
        k = int(choice.reshape(()))
        k = (0 if k else 1) if node.op.endswith("If") else min(max(k, 0), len(branches) - 1)
        return lower.body(branches[k], ins[1:], f"{path}/")
    return _region(lower, node, ins[1:], path, branches, [ins[0]])


def _bodies(lower: TfLowering, node: TfNode) -> list[TfBody]:
    return [lower.graph.body(name) for name in lower.graph.called(node)]


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """A loop whose variables are divided into invariant ones, counters with known values, and carried ones.

    times: the trip count, or None if it is not known. invariant: indices of the variables that the body passes through.
    """

    body: TfBody
    times: int | None
    invariant: frozenset[int]
    last: Mapping[int, np.ndarray]
    """Index of a counter -> its value after the loop."""

    @classmethod
    def of(cls, condition: TfBody, body: TfBody, ins: Sequence[TfValue]) -> _Loop:
        invariant = frozenset(k for k, ref in enumerate(body.outputs) if _origin(body, ref) == body.args[k])
        first = {k: v.known for k, v in enumerate(ins) if isinstance(v, Value) and v.known is not None}
        times, last = trip_count(condition, body, first, invariant)
        return cls(body=body, times=times, invariant=invariant, last=last)


def _origin(body: TfBody, ref: str) -> str:
    """The tensor that a reference stands for, after skipping Identity nodes."""
    by_name = {n.name: n for n in body.nodes}
    while True:
        name, _, k = ref.rpartition(":")
        node = by_name.get(name)
        if node is None or node.op not in ("Identity", "IdentityN") or int(k) >= len(node.inputs):
            return ref
        ref = node.inputs[int(k)]


def trip_count(
    condition: TfBody, body: TfBody, first: Mapping[int, np.ndarray], invariant: frozenset[int]
) -> tuple[int | None, dict[int, np.ndarray]]:
    """(trip count, counter -> last value) of a loop, found by running only the loop's counters.

    first: loop variable -> its value before the loop, if that is known. invariant: variables that the body passes
    through. The trip count is None if it depends on data or is more than 20,000.
    """
    now = dict(first)
    counters = {k for k in now if k not in invariant}
    while True:  # remove variables that are computed from unknown variables, until none is left
        after = {
            k: _value(body, body.outputs[k], {i: now[i] for i in now if i in counters or i in invariant})
            for k in counters
        }
        lost = {k for k, v in after.items() if v is None or v.shape != now[k].shape}
        if not lost:
            break
        counters -= lost
    now = {k: v for k, v in now.items() if k in counters or k in invariant}
    count = 0
    while True:
        go = _value(condition, condition.outputs[0], now)
        if go is None or go.size != 1 or count > _MOST_TRIPS:
            return None, {}
        if not go.reshape(()):
            return count, {k: now[k] for k in counters}
        after = {k: _value(body, body.outputs[k], now) for k in counters}
        if any(v is None for v in after.values()):
            return None, {}
        now |= {k: v for k, v in after.items() if v is not None}
        count += 1


def _value(body: TfBody, ref: str, args: Mapping[int, np.ndarray]) -> np.ndarray | None:
    """The value of a tensor of a body, computed from known values of some arguments; None if it is not known."""
    env: dict[str, np.ndarray | None] = {body.args[k]: v for k, v in args.items()}
    by_name = {n.name: n for n in body.nodes}
    stack = [ref]
    while stack:
        top = stack[-1]
        if top in env:
            stack.pop()
            continue
        node = by_name.get(top.rpartition(":")[0])
        if node is None:  # an argument of unknown value
            env[top] = None
            continue
        waiting = [r for r in node.inputs if r not in env]
        if waiting:
            stack += waiting
            continue
        values = [env[r] for r in node.inputs]
        if node.op == "Const":
            shape = [d.size for d in node.attr["value"].tensor.tensor_shape.dim]
            small = all(s >= 0 for s in shape) and elements(shape) <= 64
            made = [constant(node, node.attr["value"].tensor, shape)] if small else None
        elif not values or any(v is None for v in values):
            made = None
        else:
            made = evaluate(node, [v for v in values if v is not None])  # type: ignore[assignment]
        k = int(top.rpartition(":")[2])
        env[top] = made[k] if made is not None and k < len(made) else None
    return env[ref]


def _unrolled_by_count(
    lower: TfLowering, loop: _Loop, node: TfNode, ins: Sequence[TfValue], path: str
) -> list[TfValue] | None:
    """The body, lowered once and counted trip-count times.

    None if the loop changes a list of which elements were set one by one before.
    """
    b, body = lower.b, loop.body
    assert loop.times is not None
    source = b.source
    read = {r for n in body.nodes for r in n.inputs}
    args: list[TfValue] = []
    carried: dict[int, Tensor] = {}
    for k, (ref, v) in enumerate(zip(body.args, ins, strict=True)):
        if k in loop.last:
            args.append(value_of(b.constant(loop.last[k].shape, str(loop.last[k].dtype))))
        elif isinstance(v, TensorList):
            if v.parts and k not in loop.invariant:
                return None
            args.append(_loop_copy_list(lower, v, path, k) if ref in read else v)
        elif k in loop.invariant:
            args.append(_loop_copy(lower, v, path, k) if ref in read else v)
        elif isinstance(v, Value):
            init = v.tensor or b.constant(v.shape, v.dtype, contents=v.known)
            carried[k] = b.carry(init, Place(path).its("carry", k))
            lower.results[b.eqn] = (carried[k].name,)
            args.append(value_of(carried[k]))
        else:
            args.append(v)
    with b.region("loop", path, times=loop.times):
        outs = [whole(v) for v in lower.body(body, args, f"{path}/")]
        b.source = source
        names = [tensor_of(v) if isinstance(v, Value) else None for v in outs]
        lower.results[Place(path).its("outs")] = tuple("" if t is None else t.name for t in names)
        after: list[TfValue] = []
        for k, (v, before) in enumerate(zip(outs, ins, strict=True)):
            b.eqn = Place(path).its("y", k)
            if k in loop.invariant:
                after.append(before)
            elif k in loop.last:
                after.append(known(loop.last[k]))
            elif k in carried:
                after.append(value_of(_closed(lower, carried[k], v, path)))
            elif isinstance(v, TensorList) and isinstance(before, TensorList):
                filled = _filled(b, v, before, loop.times)
                if filled is None:
                    raise PaseError(
                        "a list of tensors is both read and written in the loop",
                        where=f"TensorFlow op '{node.op}' at {path}",
                        fix="use one list to read and another one to write",
                    )
                after.append(filled)
            else:
                after.append(v)
    return [_last(lower, v, path, k) for k, v in enumerate(after)]


def _loop_copy(lower: TfLowering, v: TfValue, path: str, k: int) -> TfValue:
    """A value that every iteration reads, in one layout for all iterations."""
    x = None if isinstance(v, TensorList) else tensor_of(v)
    if x is None or x.role == "constant" or all(map(is_one, x.shape)):
        return v
    lower.b.eqn = Place(path).its("const", k)
    made = loops.loop_copy(lower.b, x, "loop_const")
    lower.results[lower.b.eqn] = (made.name,)
    return Handle(made) if isinstance(v, Handle) else value_of(made)


def _loop_copy_list(lower: TfLowering, v: TensorList, path: str, k: int) -> TensorList:
    if v.stacked is None or v.stacked.role != "activation":
        return v
    lower.b.eqn = Place(path).its("xs", k)
    made = loops.loop_copy(lower.b, v.stacked, "loop_xs")
    lower.results[lower.b.eqn] = (made.name,)
    return replace(v, stacked=made)


def _closed(lower: TfLowering, carried: Tensor, value: TfValue, path: str) -> Tensor:
    if isinstance(value, Value) and value.known is not None:
        return carried
    made = value.tensor if isinstance(value, Value) else None
    if made is None or made.shape != carried.shape:
        shape = getattr(value, "shape", "no tensor")
        raise PaseError(
            f"a carried value has shape {carried.shape} before an iteration and {shape} after it",
            where=f"the loop at {path}",
            fix="keep the shapes of carried values constant",
        )
    if made.name != carried.name:
        lower.b.close_carry(carried, made)
    return carried


def _filled(b: GraphBuilder, v: TensorList, before: TensorList, times: int) -> TensorList | None:
    """A list after a loop: stacked if the body sets it at the loop's counter. None if that is not possible.

    If the body sets it at a fixed index, the list has the element of the last iteration (see ``_last``).
    """
    if v.stacked is not before.stacked:
        return None
    if not v.parts:
        return v
    if any(n >= 0 for n, _ in v.parts):
        return v
    ((_, x),) = v.parts
    length = before.length if before.length is not None else times
    if length < times:
        return None
    if length > times:
        length = times
    made = loops.stack(b, x, length, (length, *x.shape))
    return replace(v, stacked=made, parts=(), length=length)


def _last(lower: TfLowering, v: TfValue, path: str, k: int) -> TfValue:
    """A value after the last iteration. Elements of lists become separate tensors for readers after the loop."""
    if not isinstance(v, TensorList) or not v.parts:
        return v
    lower.b.eqn = Place(path).its("last", k)
    return replace(v, parts=tuple((n, loops.loop_copy(lower.b, x, "loop_last")) for n, x in v.parts))


def _region(
    lower: TfLowering,
    node: TfNode,
    ins: Sequence[TfValue],
    path: str,
    bodies: Sequence[TfBody],
    more: Sequence[TfValue] = (),
) -> list[TfValue]:
    """Bodies as one op that is not split and has the FLOPs of the most expensive body. more: further operands."""
    b = lower.b
    eqn, source = b.eqn, b.source
    flops = 0.0
    outs: list[TfValue] = []
    for body in bodies:
        scratch = GraphBuilder(name="body")
        inner = replace(lower, b=scratch, operands={}, results={}, reshaped={})
        args = [_stand_in(scratch, v) for v in ins]
        made = [whole(v) for v in inner.body(body, args, f"{path}/")]
        outs = outs or made
        flops = max(flops, loops.body_flops(scratch))
    b.eqn, b.source = eqn, source
    xs = [t for v in (*more, *ins) for t in _tensors(v)]
    shapes: list[tuple[tuple[int, ...], str]] = []
    where: list[tuple[int, int]] = []
    result: list[TfValue] = list(outs)
    for k, v in enumerate(outs):
        for t in _tensors(v) if not isinstance(v, Handle) else []:
            where.append((k, len(shapes)))
            shapes.append((t.shape, t.dtype))  # type: ignore[arg-type]
    loop = node.op.endswith("While")
    once = "as one iteration, because its trip count is not known" if loop else "at its most expensive branch"
    b.remark("trip_count" if loop else "opaque", f"'{node.op}' at {path} is not split, and is priced {once}")
    tensors = nests.opaque(b, node.op, xs, shapes, flops=flops)
    for k, at in where:
        v = outs[k]
        if isinstance(v, TensorList):
            length = v.length or 1
            stack = (
                tensors[at]
                if v.stacked is not None
                else nests.broadcast(
                    b,
                    nests.reshape(b, tensors[at], (1, *tensors[at].shape)),
                    (length, *tensors[at].shape),
                    range(len(tensors[at].shape) + 1),
                )
            )
            result[k] = replace(v, stacked=stack, parts=())
        else:
            result[k] = value_of(tensors[at])
    return [
        value_of(b.constant(v.shape, v.dtype, contents=v.known))
        if isinstance(v, Value) and v.known is not None
        else v
        for v in result
    ]


def _stand_in(b: GraphBuilder, v: TfValue) -> TfValue:
    """A value of the same kind for a body that is lowered in a graph of its own, only to count its FLOPs."""
    match v:
        case Value() if v.known is None or v.known.ndim == 0 or v.known.size > 64:
            return value_of(b.constant(v.shape, v.dtype))
        case Handle(t):
            return Handle(b.constant(t.shape, t.dtype))
        case TensorList(stacked=t):
            return replace(v, stacked=None if t is None else b.constant(t.shape, t.dtype), parts=())
    return v


def _tensors(v: TfValue) -> list[Tensor]:
    """The tensor of a value, as a list; empty if the value has none."""
    t = tensor_of(v)
    return [t] if t is not None else [x for _, x in v.parts][:1] if isinstance(v, TensorList) else []
