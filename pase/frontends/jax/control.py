"""Loops and branches of a jaxpr. A loop's body is lowered once and counts times its trip count; branches are weighted
by their probabilities.

Their intermediate values are in ``results`` under their place (``pase.ir.Place``), by which ``backends/jax/gspmd``
finds them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax.rules import _dtype, _shape, _size
from pase.frontends.jax.types import Eqn, Jaxpr, Var
from pase.frontends.jax.versions import is_literal, opened, scan_groups
from pase.frontends.registry import Chances, Control, lowers_bodies
from pase.ir import Place, PlacePart, Tensor, functions
from pase.ir.sizes import is_one
from pase.ops import branches, indexed, loops, nests
from pase.registry import Registry

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import PartitionSpec

    from pase.frontends.jax.frontend import _JaxLowering
    from pase.ops import GraphBuilder

__all__ = ["CONTROL", "AtRunTime", "by_body", "by_platform", "on_every_platform"]

CONTROL: Registry[Control] = Registry("JAX primitive with bodies")
"""Primitive -> the function that lowers its equation: (lowering, equation, prefix of the paths inside)."""


@dataclass
class AtRunTime:
    """What is known only at run time: the trip counts of while loops, and which branches are taken.

    Loops are named while0, while1, … and conditionals cond0, cond1, …, in program order.
    """

    trip_counts: Mapping[str, int] = field(default_factory=dict)
    chances: Chances = field(default_factory=dict)
    loops: list[str] = field(default_factory=list)
    """The loops found so far."""
    conds: list[str] = field(default_factory=list)

    def copy(self) -> AtRunTime:
        """A copy for counting the FLOPs of a body that is lowered later, so that its loops and branches are not counted
        twice."""
        return replace(self, loops=[*self.loops], conds=[*self.conds])

    def trip_count(self, eqn: Eqn, b: GraphBuilder) -> int:
        """A while loop's trip count: given by the user, or found in the program, or else 1 with a remark."""
        name = f"while{len(self.loops)}"
        self.loops.append(name)
        if name in self.trip_counts:
            return self.trip_counts[name]
        known = _known_trip_count(eqn)
        if known is None:
            b.remark(
                "trip_count",
                f"the while loop '{name}' at {b.line} is priced as one iteration, because its "
                f"trip count is not known before it runs; state it with dims={{'{name}': N}}, or --trips {name}=N",
            )
        return 1 if known is None else known

    def next_cond(self) -> str:
        self.conds.append(f"cond{len(self.conds)}")
        return self.conds[-1]

    def chances_of(self, name: str, flops: Sequence[float]) -> tuple[float, ...]:
        """The probabilities that the user gave; otherwise the most expensive branch is always taken."""
        given = self.chances.get(name)
        return branches.chances(flops) if given is None else branches.told(name, given, len(flops))

    def check_chances(self, model: str) -> None:
        """Raises PaseError if the user gave probabilities for a conditional that does not exist."""
        for name in self.chances:
            if name not in self.conds:
                raise PaseError(
                    f"there is no conditional '{name}'",
                    where=f"model '{model}'",
                    fix=f"name one of its conditionals: {', '.join(self.conds) or 'it has none'}",
                )


@lowers_bodies(CONTROL, "scan", listed="loop")
def scan(lower: _JaxLowering, eqn: Eqn, prefix: str) -> None:
    """A scan. Its body is lowered once and counts times the trip count. A carry is one node, so it has one layout."""
    b, p = lower.b, eqn.params
    (jaxpr, values), length = opened(p["jaxpr"]), _size(p["length"])
    nc, nk = scan_groups(eqn)
    inner = lower.inner()
    inner.constants(jaxpr, values)
    at, source = _place(prefix), b.source
    consts, carry, xs = jaxpr.invars[:nc], jaxpr.invars[nc : nc + nk], jaxpr.invars[nc + nk :]
    _loop_copies(lower, inner, consts, eqn.invars[:nc], at, "const")
    carried = _carried(lower, inner, carry, eqn.invars[nc : nc + nk], at)
    stacks: list[Tensor] = []
    for k, value in enumerate(eqn.invars[nc + nk :]):
        b.eqn = at.its("xs", k)
        stacked = lower.of(value)
        if stacked.role == "activation":  # reshard it once, before the loop
            stacked = loops.loop_copy(b, stacked, "loop_xs")
            lower.results[b.eqn] = (stacked.name,)
        stacks.append(stacked)
    with b.region("loop", prefix, times=length):
        for k, (var, stacked) in enumerate(zip(xs, stacks, strict=True)):
            b.eqn = at.its("x", k)
            layer = inner.env[var] = loops.unstack(b, stacked, p["reverse"])
            lower.results[b.eqn] = (layer.name,)
        inner.eqns(jaxpr.eqns, prefix)
        b.source = source
        outs = [inner.read(v) for v in jaxpr.outvars]
        lower.results[at.its("outs")] = tuple("" if t is None else t.name for t in outs)
        ys = []
        for k, (name, out) in enumerate(zip(jaxpr.outvars[nk:], eqn.outvars[nk:], strict=True)):
            b.eqn = at.its("y", k)
            ys.append(loops.stack(b, inner.of(name), length, _shape(out), p["reverse"]))
        _close(lower, outs[:nk], carried)
    lower.write(eqn.outvars, carried + ys)


@lowers_bodies(CONTROL, "while", listed="loop")
def while_(lower: _JaxLowering, eqn: Eqn, prefix: str) -> None:
    """A while loop: condition and body count times the trip count. JAX cannot differentiate it, so it has no
    gradient."""
    b, p = lower.b, eqn.params
    at, source = _place(prefix), b.source
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    (cond, of_cond), (body, of_body) = opened(p["cond_jaxpr"]), opened(p["body_jaxpr"])
    trip_count = lower.told.trip_count(eqn, b)
    asks, inner = lower.inner(), lower.inner()
    with (
        nullcontext() if lower.inside else b.without_gradient()
    ):  # inside a custom rule, that rule differentiates the loop
        asks.constants(cond, of_cond)
        inner.constants(body, of_body)
        _loop_copies(lower, asks, cond.invars[:nc], eqn.invars[:nc], at, "ask")
        _loop_copies(lower, inner, body.invars[:nb], eqn.invars[nc : nc + nb], at, "const")
        carried = _carried(lower, inner, body.invars[nb:], eqn.invars[nc + nb :], at)
        asks.write(cond.invars[nc:], carried)
        with b.region("loop", prefix, times=trip_count):
            asks.eqns(cond.eqns, f"{prefix}c.")
            inner.eqns(body.eqns, f"{prefix}b.")
            b.source = source
            goes_on, outs = asks.of(cond.outvars[0]), [inner.read(v) for v in body.outvars]
            if goes_on.shape:
                outs = _held(lower, goes_on, [inner.of(v) for v in body.outvars], carried, at)
            lower.results[at.its("outs")] = tuple("" if t is None else t.name for t in outs)
            _close(lower, outs, carried)
    lower.write(eqn.outvars, carried)


@lowers_bodies(CONTROL, "cond", listed="branches")
def cond(lower: _JaxLowering, eqn: Eqn, prefix: str) -> None:
    """A conditional. Every branch is lowered and weighted by its probability. Without probabilities from the user, the
    most expensive branch is priced as always taken, and the others at almost nothing."""
    b = lower.b
    if by_platform(eqn):
        _one_platform(lower, eqn, prefix)
        return
    here, at, source, line = b.eqn, _place(prefix), b.source, b.line
    opened_bodies = [opened(c) for c in eqn.params["branches"]]
    bodies = [body for body, _ in opened_bodies]
    name = lower.told.next_cond()
    told = lower.told.copy()
    flops = [_flops(lower, body, told) for body in bodies]
    likely = lower.told.chances_of(name, flops)
    if len(bodies) > 1 and eqn.outvars and name not in lower.told.chances:
        b.remark(
            "assumed",
            f"of the {len(bodies)} branches of '{name}' at {line}, number {likely.index(1.0)} "
            f"(from 0), the most expensive, is priced as if it were taken every time; to change this use "
            f"chances={{'{name}': (…)}}, or --chance {name}={','.join('P' * len(bodies))}",
        )
    made: list[list[Tensor]] = []
    for k, ((body, values), chance) in enumerate(zip(opened_bodies, likely, strict=True)):
        inner = lower.inner()
        inner.constants(body, values)
        lower.bind(inner, body.invars, eqn.invars[1:])
        with b.region("branch", f"{prefix}{k}.", chance=chance):
            inner.eqns(body.eqns, f"{prefix}{k}.")
            b.source = source
            results = []
            for j, v in enumerate(body.outvars):
                b.eqn = at.its("out", k, j)
                before = inner.of(v)
                results.append(branches.leave(b, before))
                lower.operands[b.eqn], lower.results[b.eqn] = (before.name,), (results[-1].name,)
            made.append(results)
    b.eqn, index = here, lower.read(eqn.invars[0])
    lower.write(eqn.outvars, [branches.meet(b, index, same) for same in zip(*made, strict=True)])


def by_platform(eqn: Eqn) -> bool:
    """Whether the platform determines the branch (jax.lax.platform_dependent)."""
    return eqn.params.get("branches_platforms") is not None


def on_every_platform(eqn: Eqn) -> tuple[Jaxpr, Sequence[Array]] | None:
    """The branch that every device takes, and its constants. The other branches are for the inside of a Mosaic kernel
    (``jnp.diagonal`` has one). None if the equation is no such conditional."""
    platforms = eqn.params.get("branches_platforms") or ()
    default = [k for k, names in enumerate(platforms) if names is None]
    if not default or any(name != "mosaic" for names in platforms for name in names or ()):
        return None
    return opened(eqn.params["branches"][default[0]])


def _one_platform(lower: _JaxLowering, eqn: Eqn, prefix: str) -> None:
    """Lowers code that was written for several platforms. If all devices take one branch, it is lowered like a call.
    Otherwise the branch with the most FLOPs is priced, and a backend keeps the equation whole."""
    inner = lower.inner()
    if (taken := on_every_platform(eqn)) is not None:
        jaxpr, values = taken
        inner.constants(jaxpr, values)
        lower.bind(inner, jaxpr.invars, eqn.invars[1:])
        inner.eqns(jaxpr.eqns, prefix)
        lower.write(eqn.outvars, [inner.of(v) for v in jaxpr.outvars])
        return
    branches_of = map(opened, eqn.params["branches"])
    body, values = max(branches_of, key=lambda j: _flops(lower, j[0], lower.told.copy()))
    inner.constants(body, values)
    lower.bind(inner, body.invars, eqn.invars[1:])
    inner.inside = lower.inside or lower.b.eqn.path
    inner.eqns(body.eqns, prefix)
    lower.write(eqn.outvars, [inner.of(v) for v in body.outvars])


@lowers_bodies(CONTROL, "custom_linear_solve", listed="opaque")
def custom_linear_solve(lower: _JaxLowering, eqn: Eqn, prefix: str) -> None:
    """A linear solve. It is not split, and costs the work of its solver. A backend keeps it whole."""
    by_body(lower, eqn, eqn.params["jaxprs"].solve.jaxpr)


def by_body(lower: _JaxLowering, eqn: Eqn, body: Jaxpr) -> None:
    """An op that is not split and costs the work of its body, a jaxpr. A backend keeps it whole."""
    flops = _flops(lower, body, lower.told)
    lower.b.remark(
        "opaque",
        f"the {eqn.primitive.name} at {lower.b.line} is not split: every device computes all of "
        f"its {flops:.3g} FLOPs",
    )
    lower.replicate(eqn, flops)


@lowers_bodies(CONTROL, "shard_map", listed="manual")
def shard_map(lower: _JaxLowering, eqn: Eqn, prefix: str) -> None:
    """A body for one device of the user's mesh. Its specs determine how tensors are split. A backend keeps it whole."""
    b, p = lower.b, eqn.params
    axes = {name: int(size) for name, size in p["mesh"].shape.items()}

    def split(spec: PartitionSpec) -> list[tuple[str, ...]]:
        return [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]

    inputs = [(lower.of(v), split(s)) for v, s in zip(eqn.invars, p["in_specs"], strict=True)]
    outs = [(_shape(v), _dtype(v), split(s)) for v, s in zip(eqn.outvars, p["out_specs"], strict=True)]
    flops = _flops(lower, opened(p["jaxpr"])[0], lower.told.copy())
    b.remark(
        "unknown",
        f"for the shard_map at {b.line}, work and layouts are priced, but not the collectives inside it",
    )
    lower.write(eqn.outvars, indexed.manual(b, "shard_map", inputs, outs, axes, flops=flops))


def _place(prefix: str) -> Place:
    """The place of an equation, by the prefix of the equations inside of it.

    In a call with a custom derivative rule, ops have the call's place, but what enters and leaves a loop has a place of
    its own: there may be several loops, and a backend may walk them.
    """
    return Place(prefix.removesuffix("."))


def _loop_copies(
    lower: _JaxLowering,
    inner: _JaxLowering,
    names: Sequence[Var],
    values: Sequence[Var],
    at: Place,
    part: PlacePart,
) -> None:
    """Copies what a loop's body reads from outside, so that it is resharded once, before the loop."""
    for k, (var, value) in enumerate(zip(names, values, strict=True)):
        tensor = inner.env[var] = lower.of(value)
        if tensor.role != "constant" and not all(map(is_one, tensor.shape)):
            lower.b.eqn = at.its(part, k)
            tensor = inner.env[var] = loops.loop_copy(lower.b, tensor, "loop_const")
            lower.results[lower.b.eqn] = (tensor.name,)


def _carried(
    lower: _JaxLowering, inner: _JaxLowering, names: Sequence[Var], values: Sequence[Var], at: Place
) -> list[Tensor]:
    out: list[Tensor] = []
    for k, (var, value) in enumerate(zip(names, values, strict=True)):
        inside = inner.env[var] = lower.b.carry(lower.of(value), at.its("carry", k))
        lower.results[lower.b.eqn] = (inside.name,)
        out.append(inside)
    return out


def _held(
    lower: _JaxLowering, goes_on: Tensor, made: Sequence[Tensor], carried: Sequence[Tensor], at: Place
) -> list[Tensor | None]:
    """In a while loop under vmap, each example stops at its own iteration and keeps its values from then on."""
    out: list[Tensor | None] = []
    for k, (new, before) in enumerate(zip(made, carried, strict=True)):
        here = lower.b.eqn = at.its("y", k)
        wide = nests.broadcast(lower.b, goes_on, before.shape, range(len(goes_on.shape)))
        (kept,) = nests.elementwise(
            lower.b,
            functions.WHERE,
            [wide, new, before],
            [before.dtype],
            name="select_n",
            shape=before.shape,
        )
        lower.operands[here], lower.results[here] = (goes_on.name, new.name, before.name), (kept.name,)
        out.append(kept)
    return out


def _close(lower: _JaxLowering, outs: Sequence[Tensor | None], carried: Sequence[Tensor]) -> None:
    for tensor, t in zip(outs, carried, strict=True):
        if tensor is not None and tensor.name != t.name:
            lower.b.close_carry(t, tensor)


def _flops(lower: _JaxLowering, jaxpr: Jaxpr, told: AtRunTime) -> float:
    """The FLOPs of a single body."""
    inner = lower.alone(told)
    for var in (*jaxpr.constvars, *jaxpr.invars):
        inner.env[var] = inner.b.constant(_shape(var), _dtype(var))
    inner.eqns(jaxpr.eqns, "")
    return loops.body_flops(inner.b)


def _known_trip_count(eqn: Eqn) -> int | None:
    """The trip count of ``for i in range(LOW, HIGH)`` with two known numbers, written as a while loop; else None."""
    p = eqn.params
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    cond, body = p["cond_jaxpr"].jaxpr, p["body_jaxpr"].jaxpr
    init = eqn.invars[nc + nb :]
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt" or cond.outvars != cond.eqns[0].outvars:
        return None

    def before(var: Var) -> Var | None:
        """The value before the loop of a variable that the condition reads, if the body does not change it."""
        if is_literal(var):
            return var
        k = cond.invars.index(var)
        return (
            eqn.invars[k]
            if k < nc
            else init[k - nc]
            if body.outvars[k - nc] is body.invars[nb + k - nc]
            else None
        )

    counter, limit = cond.eqns[0].invars
    k = -1 if is_literal(counter) else cond.invars.index(counter) - nc
    high = before(limit)
    low = init[k] if k >= 0 else None
    if low is None or high is None or not is_literal(low) or not is_literal(high):
        return None
    step = next((e for e in body.eqns if body.outvars[k] in e.outvars), None)
    if step is None or step.primitive.name != "add" or step.invars[0] is not body.invars[nb + k]:
        return None
    by = step.invars[1]
    if not is_literal(by) or by.val != 1:
        return None
    return max(int(high.val) - int(low.val), 1)
