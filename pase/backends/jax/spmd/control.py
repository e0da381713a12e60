"""Runs loops and branches on one device. ``ManualWalk`` walks the bodies; inputs and outputs have the plan's layouts.

Values that a body reads from outside, carries or stacks are resharded at its border. If the body reads slices of a
stack, the whole stack is resharded at once, before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.spmd.values import Arrivals, Cache, DeviceValue, NotManual, packed, unpacked
from pase.frontends.jax.types import ClosedJaxpr, Eqn, Jaxpr
from pase.frontends.jax.versions import jaxprs_inside, scan_groups, source_line
from pase.ir import Place, PlacePart
from pase.local.reshard import part
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

    from pase.backends.jax.spmd.interpreter import ManualWalk

__all__ = ["in_loop_layout", "manual_cond", "manual_scan", "manual_while", "written_out"]


def _in_loop_layouts(
    walk: ManualWalk, at: Place, of: PlacePart, values: Sequence[DeviceValue], cache: Cache, *which: int
) -> list[DeviceValue]:
    """The values in the layouts that the plan has for a loop or a branch.

    of: which part of the equation's tensors they are (constants, carry, stacks, …). which: the number of the branch
    that returns them.
    """
    return [in_loop_layout(walk, at.its(of, *which, k), h, cache) for k, h in enumerate(values)]


def in_loop_layout(walk: ManualWalk, at: Place, value: DeviceValue, cache: Cache) -> DeviceValue:
    """A value in the layout that the plan has for one tensor of a loop or a branch. at: the place of the tensor."""
    (name,) = walk.traced.results.get(at, (None,))
    op = walk.program.maker.get(name or "")
    if op is None:  # it has one element, or does not depend on data
        return value if name is None else replace(value, tensor=name)
    r = walk.program.result(op.results[0].tensor)
    (wanted,) = op.operands[:1]
    return replace(walk.received(value, wanted, cache), tensor=r.tensor, layout=r.layout)


def _closed(
    walk: ManualWalk, at: Place, carried: Sequence[DeviceValue], made: Sequence[DeviceValue], cache: Cache
) -> list[Array]:
    """The values that a body passes to its next iteration, in the layouts of the carry."""
    out = []
    for k, (before, h) in enumerate(zip(carried, made, strict=True)):
        if before.gradient_carrier is not None:  # the carry's own gradient would be lost
            raise NotManual(
                f"'{before.tensor}' is carried by a loop, but its gradient has another layout than it has; this is a "
                "defect of pase.local"
            )
        takers = walk.program.takers.get(at.its("carry", k), ())
        if takers:
            (wanted,) = takers[0].operands
            h = walk.received(h, wanted, cache)
        elif h.layout is None and before.layout is not None:
            shape = walk.program.result(before.tensor or "").shape
            h = replace(h, array=part(h.array, shape, before.layout, JaxArrays(walk.program.mesh)))
        out.append(h.array)
    return out


def manual_scan(
    walk: ManualWalk, eqn: Eqn, ins: Sequence[DeviceValue], at: Place, cache: Cache
) -> Sequence[DeviceValue]:
    """Run a scan on this device."""
    import jax

    p = eqn.params
    nc, nk = scan_groups(eqn)
    consts = _in_loop_layouts(walk, at, "const", ins[:nc], cache)
    init = _in_loop_layouts(walk, at, "carry", ins[nc : nc + nk], cache)
    stacks = _in_loop_layouts(walk, at, "xs", ins[nc + nk :], cache)
    xs = [_before_slicing(walk, at, k, h, cache) for k, h in enumerate(stacks)]
    stacked: list[DeviceValue] = []
    around = walk.arrivals or Arrivals()
    iterations = [around]

    def body(
        carry: Sequence[Array], x: tuple[Sequence[Tree], Mapping[str, Tree]]
    ) -> tuple[list[Array], Tree]:
        iterations[0] = around.iteration(x[1])
        inner = walk if walk.arrivals is None else replace(walk, arrivals=iterations[0])
        carried = [replace(h, array=a) for h, a in zip(init, carry, strict=True)]
        slices = [_slice(inner, at, k, h, s) for k, (h, s) in enumerate(zip(xs, x[0], strict=True))]
        carried, stacked[:] = _iteration(inner, eqn, at, consts, carried, slices)
        return [h.array for h in carried], ([h.array for h in stacked], iterations[0].found)

    carry, (ys, arrived) = jax.lax.scan(
        body,
        [h.array for h in init],
        (packed(xs), around.stacked(f"in {at.path}")),
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    around.leave(f"in {at.path}", iterations[0], arrived)
    last = [replace(h, array=a) for h, a in zip(init, carry, strict=True)]
    return [*last, *(replace(h, array=y) for h, y in zip(stacked, ys, strict=True))]


def _iteration(
    walk: ManualWalk,
    eqn: Eqn,
    at: Place,
    consts: Sequence[DeviceValue],
    carried: Sequence[DeviceValue],
    slices: Sequence[DeviceValue],
) -> tuple[list[DeviceValue], list[DeviceValue]]:
    """One iteration of a scan: (the carry, results that are stacked)."""
    closed, (_, nk), names = eqn.params["jaxpr"], scan_groups(eqn), walk.traced.results[at]
    inside = Cache(body=f"{at.path}.")
    made = walk.run(closed.jaxpr, closed.consts, [*consts, *carried, *slices], f"{at.path}.", inside)
    stacked = [_stacked(walk, n, h, inside) for n, h in zip(names[nk:], made[nk:], strict=True)]
    arrays = _closed(walk, at, carried, made[:nk], inside)
    return [replace(h, array=a) for h, a in zip(carried, arrays, strict=True)], stacked


def written_out(
    walk: ManualWalk,
    eqn: Eqn,
    at: Place,
    ins: Sequence[DeviceValue],
    carried: Sequence[DeviceValue],
    rows: range,
    cache: Cache,
) -> list[DeviceValue]:
    """Iterations of a scan, written out: the last carry, then the stacked results of these iterations.

    ins: the scan's operands besides its carry. carried: what the iterations begin with. rows: the rows of stacks that
    they read; a stack has all rows, or only these.
    """
    import jax
    import jax.numpy as jnp

    nc, _ = scan_groups(eqn)
    consts = _in_loop_layouts(walk, at, "const", ins[:nc], cache)
    stacks = _in_loop_layouts(walk, at, "xs", ins[nc:], cache)
    xs = [_before_slicing(walk, at, k, h, cache) for k, h in enumerate(stacks)]
    around, made = walk.arrivals or Arrivals(), dict[int, list[DeviceValue]]()
    for row in reversed(rows) if eqn.params["reverse"] else rows:
        key = f"in {at.path} {row - rows.start}"
        mine = around.iteration(around.stacked(key))
        inner = walk if walk.arrivals is None else replace(walk, arrivals=mine)

        def at_row(x: Array, row: int = row) -> Array:
            return x[row if x.shape[0] == eqn.params["length"] else row - rows.start]

        slices = [
            _slice(inner, at, k, h, jax.tree.map(at_row, (h.array, h.gradient_carrier)))
            for k, h in enumerate(xs)
        ]
        carried, made[row] = _iteration(inner, eqn, at, consts, carried, slices)
        around.leave(key, mine, mine.found)
    stacked = [
        replace(parts[0], array=jnp.stack([h.array for h in parts]))
        for parts in zip(*(made[row] for row in rows), strict=True)
    ]
    return [*carried, *stacked]


def _before_slicing(walk: ManualWalk, at: Place, k: int, stack: DeviceValue, cache: Cache) -> DeviceValue:
    """A stack in the layout in which the loop slices it: its first dim is not split."""
    if stack.layout is None:
        return stack
    (name,) = walk.traced.results[at.its("x", k)]
    (wanted,) = walk.program.maker[name].operands
    return walk.received(stack, wanted, cache)


def _slice(walk: ManualWalk, at: Place, k: int, stack: DeviceValue, arrays: Array) -> DeviceValue:
    """The slice of a stack that one iteration reads."""
    (name,) = walk.traced.results[at.its("x", k)]
    array, gradient_carrier = arrays
    if stack.layout is None:
        return DeviceValue(array=array, tensor=name)
    return DeviceValue(
        array=array, tensor=name, layout=walk.program.result(name).layout, gradient_carrier=gradient_carrier
    )


def _stacked(walk: ManualWalk, name: str, value: DeviceValue, cache: Cache) -> DeviceValue:
    """One iteration's part of the stacked result with this name."""
    op = walk.program.maker.get(name)
    if op is None:
        return replace(value, tensor=name)
    array = walk.received(value, op.operands[0], cache).array
    return DeviceValue(array=array, tensor=name, layout=op.results[0].layout)


def _check_alike(walk: ManualWalk, eqn: Eqn, run: Callable[..., Tree], *given: Tree) -> None:
    """Refuse a permute that other stages of one program may not reach: XLA's permutes wait for all devices, so the step
    would never end. Its other collectives wait for the devices that they name.

    run: a branch, or a loop's iteration or condition, of the arguments ``given``.
    """
    import jax

    def permutes(jaxpr: Jaxpr) -> bool:
        return any(e.primitive.name == "ppermute" or any(map(permutes, jaxprs_inside(e))) for e in jaxpr.eqns)

    others = set(walk.devices.axis_names) - set(walk.program.mesh.names)
    if others and permutes(jax.make_jaxpr(run)(*given).jaxpr):
        raise walk.refusal(eqn, "its stages may take different branches, in which devices send to each other")


def manual_while(
    walk: ManualWalk, eqn: Eqn, ins: Sequence[DeviceValue], at: Place, cache: Cache
) -> Sequence[DeviceValue]:
    """Run a while loop on this device. All devices run the same number of iterations.

    Under vmap (the condition has one result per example), the loop runs as long as any example on any device continues.
    Examples that have ended keep their values.
    """
    import jax

    p = eqn.params
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    cond, body = p["cond_jaxpr"], p["body_jaxpr"]
    asks = _in_loop_layouts(walk, at, "ask", ins[:nc], cache)
    consts = _in_loop_layouts(walk, at, "const", ins[nc : nc + nb], cache)
    init = _in_loop_layouts(walk, at, "carry", ins[nc + nb :], cache)
    walk = walk.within(f"the while loop at {source_line(eqn)}")
    each = bool(cond.out_avals[0].shape)

    def turned(carry: Sequence[Array]) -> list[DeviceValue]:
        return [replace(h, array=a) for h, a in zip(init, carry, strict=True)]

    def asked(carry: Sequence[Array]) -> DeviceValue:
        return walk.run(cond.jaxpr, cond.consts, [*asks, *turned(carry)], f"{at.path}.c.", Cache())[0]

    def goes_on(carry: Sequence[Array]) -> Array:
        answer = asked(carry)
        axes = tuple(
            name
            for name, state in zip(walk.program.mesh.names, answer.layout or (), strict=False)
            if state is not None
        )
        here = answer.array.any() if each else answer.array
        return jax.lax.pmax(here.astype("int32"), axes) > 0 if axes else here

    def iteration(carry: Sequence[Array]) -> list[Array]:
        inside = Cache()
        before = turned(carry)
        made = walk.run(body.jaxpr, body.consts, [*consts, *before], f"{at.path}.b.", inside)
        if each:
            on = asked(carry)
            made = [
                _held(walk, at.its("y", k), on, *both, inside)
                for k, both in enumerate(zip(made, before, strict=True))
            ]
        return _closed(walk, at, init, made, inside)

    first = [h.array for h in init]
    for part_of_loop in (goes_on, iteration):
        _check_alike(walk, eqn, part_of_loop, first)
    return turned(jax.lax.while_loop(goes_on, iteration, first))


def _held(
    walk: ManualWalk, at: Place, on: DeviceValue, new: DeviceValue, before: DeviceValue, cache: Cache
) -> DeviceValue:
    """A loop's value after an iteration, under vmap: examples that have ended keep the value from before.

    on: a flag per example, whether it continues. new, before: the values after and before the iteration.
    """
    import jax

    program = walk.program
    (name,) = walk.traced.results[at]
    op, result = program.maker[name], program.result(name)
    wide = program.original(op.operands[0].tensor)
    if wide != on.tensor:  # the plan broadcasts the flags to the value's shape
        (flags,) = walk.as_read(program.maker[wide], [on], cache)
        r = program.result(wide)
        here = r.layout.local_shape(r.shape, program.mesh)
        array = jax.lax.broadcast_in_dim(flags.array, here, range(flags.array.ndim))
        on = DeviceValue(array=array, tensor=wide, layout=r.layout)
    array = jax.lax.select(*(h.array for h in walk.as_read(op, (on, new, before), cache)))
    return DeviceValue(array=array, tensor=name, layout=result.layout)


def manual_cond(
    walk: ManualWalk, eqn: Eqn, ins: Sequence[DeviceValue], at: Place, cache: Cache
) -> Sequence[DeviceValue]:
    """Run a conditional on this device. Every branch reshards its results to the layout in which all of them return."""
    import jax

    names = walk.traced.results[at]
    index, *operands = ins
    meets = [walk.program.maker[n] for n in names if n in walk.program.maker]
    if len(meets) < len(names):
        raise walk.refusal(eqn, "a branch returns a value that depends on no data")

    def branch(k: int, closed: ClosedJaxpr) -> Callable[..., list[Array]]:
        def run(*arrays: Tree) -> list[Array]:
            inside = Cache()
            outs = walk.run(
                closed.jaxpr, closed.consts, unpacked(operands, arrays), f"{at.path}.{k}.", inside
            )
            left = _in_loop_layouts(walk, at, "out", outs, inside, k)
            return [walk.as_read(m, [h], inside)[0].array for m, h in zip(meets, left, strict=True)]

        return run

    for m in meets[:1]:
        (index,) = walk.as_read(m, [index], cache)
    walk = walk.within(f"a branch at {source_line(eqn)}")
    branches = [branch(k, closed) for k, closed in enumerate(eqn.params["branches"])]
    for each in branches:
        _check_alike(walk, eqn, each, *packed(operands))
    made = jax.lax.switch(index.array, branches, *packed(operands))
    return [
        DeviceValue(array=x, tensor=n, layout=walk.program.result(n).layout)
        for x, n in zip(made, names, strict=True)
    ]
