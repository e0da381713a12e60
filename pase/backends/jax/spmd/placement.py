"""Finds the body of a traced program in which each message of its local program is sent, and the values it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pase.backends.jax.ops.jaxprs import REMATERIALISED
from pase.backends.jax.spmd.values import Cache, DeviceValue
from pase.frontends.jax.frontend import KEPT_WHOLE, TracedJax, inlined, inner_jaxpr
from pase.frontends.jax.types import Eqn, Jaxpr
from pase.frontends.jax.versions import is_literal, literal_array
from pase.ir import Place
from pase.ir.blocks import Block
from pase.ir.recompute import linear
from pase.local.types import LocalProgram

if TYPE_CHECKING:
    from pase.backends.jax.spmd.interpreter import ManualWalk

__all__ = ["body_of", "given_form", "message_bodies", "waits"]


def message_bodies(
    program: LocalProgram, traced: TracedJax, blocks: Sequence[Block]
) -> Mapping[str | None, Sequence[int]]:
    """Body -> the transfers that its messages carry.

    A body is the model (""), a loop's iteration or a recomputed region. Transfers that are read in other bodies are
    sent there by themselves.
    """
    found: dict[str | None, list[int]] = {}
    for number in dict.fromkeys(p.transfer for m in program.messages for p in m.chunks):
        for body in dict.fromkeys(body_of(traced, blocks, op.op.eqn) for op in program.users(number)):
            found.setdefault(body, []).append(number)
    found.pop(None, None)
    return found


def waits(program: LocalProgram, traced: TracedJax, blocks: Sequence[Block], transfer: int) -> bool:
    """Whether a gradient can wait for a later step, outside of all bodies.

    A gradient from a branch, a while loop or a user's derivative rule cannot. Nor can one that must still pass an op of
    the parameter's node that is not linear: the derivative of this op is taken at the value of its own step.
    """
    op = program.maker[program.transfers[transfer].tensor]
    while op.operands and (op.op.kind == "copy" or op.node in program.parameters):
        if not linear(op.op):
            return False
        op = program.maker[op.operands[0].tensor]
    return all(body_of(traced, blocks, op.op.eqn) is not None for op in program.users(transfer))


def body_of(traced: TracedJax, blocks: Sequence[Block], place: Place) -> str | None:
    """The body that an equation is in; None if it is in a branch, a while loop or a derivative rule."""
    jaxpr, body = traced.jaxpr.jaxpr, ""
    for prefix, number in place.steps():
        body = next(
            (b.region.path for b in blocks if b.prefix == prefix and b.start <= number < b.stop), body
        )
        inside = f"{prefix}{number}."
        if not place.path.startswith(inside):
            return body
        eqn = jaxpr.eqns[number]
        inner = _inner(eqn)
        if inner is None:
            return None
        jaxpr = inner
        if not inlined(eqn) or eqn.primitive.name in REMATERIALISED:
            body = inside
    return body


def _inner(eqn: Eqn) -> Jaxpr | None:
    """The body of a scan or of an inlined call."""
    if eqn.primitive.name == "scan":
        return eqn.params["jaxpr"].jaxpr
    return inner_jaxpr(eqn)[0] if inlined(eqn) else None


def given_form(walk: ManualWalk, tensor: str, cache: Cache) -> DeviceValue | None:
    """A parameter, or a view or cast of it, computed from the values that were passed into a body; None if it is
    computed from more than one value."""
    if tensor in cache.values:
        return cache.values[tensor]
    op = walk.program.maker[tensor]
    eqn = _equation(walk.traced.jaxpr.jaxpr, op.op.eqn)
    if eqn is None or op.node not in walk.program.parameters or len(op.operands) != 1:
        return None
    if (
        eqn.primitive.name in KEPT_WHOLE
    ):  # its code is for whole arrays; the walk runs it with its own derivative rule
        return None
    before = given_form(walk, walk.program.original(op.operands[0].tensor), cache)
    if before is None or sum(not is_literal(v) for v in eqn.invars) != 1:
        return None
    ins = [DeviceValue(array=literal_array(v)) if is_literal(v) else before for v in eqn.invars]
    made = walk.op_on_part(op, eqn, walk.traced.results[op.op.eqn], ins, cache)
    cache.values[tensor] = made[tensor]
    return made[tensor]


def _equation(jaxpr: Jaxpr, place: Place) -> Eqn | None:
    """The equation at a place; None for values that a loop or a call makes in addition to its equations."""
    steps = list(place.steps())
    for i, (_, number) in enumerate(steps):
        eqn = jaxpr.eqns[number]
        inner = _inner(eqn)
        if i == len(steps) - 1:
            return eqn if place.part is None and inner is None else None
        if inner is None:
            return None
        jaxpr = inner
    return None
