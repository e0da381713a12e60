"""The annotated lowering for JAX: the user's function with a plan's sharding constraints.

The function itself is not rewritten. Its jaxpr is walked again, equation by equation, in the same way as the frontend
walked it, and ``with_sharding_constraint`` is applied at the places that the plan's ``constraints`` list. Calls with
their own derivative rule are kept whole. Loops, branches and recomputed regions are rebuilt around their constrained
bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from pase.backends.jax.ops import attention, convolution, fourier
from pase.backends.jax.ops.draws import Examples, drawn
from pase.backends.jax.ops.jaxprs import noted, places_only, unmerged
from pase.backends.jax.ops.totals import Totals
from pase.backends.jax.ops.walk import JaxprWalk
from pase.frontends.jax.attention import call_of
from pase.frontends.jax.rules import SCATTERS
from pase.frontends.jax.types import ClosedJaxpr, Eqn
from pase.frontends.jax.versions import evaluate, scan_groups, source_line
from pase.ir import Place, PlacePart
from pase.plan.accesses import Reading
from pase.plan.constraints import Route
from pase.tables.axis_layout import Placement

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh

    from pase.backends.jax.one_program import OneProgramPlan

__all__ = ["AnnotatedWalk"]

Copies: TypeAlias = "dict[str, Array]"
"""The name of a shared copy -> its value."""
_SPLIT_BY_PLAN = {"conv_general_dilated": convolution.of_plan, "fft": fourier.of_plan}
"""Primitive -> the function that splits it as in the plan, for primitives that XLA's partitioner handles badly."""


def _steps_back(read: Placement, kept: Placement) -> tuple[Placement, ...]:
    """The layouts through which a gradient passes, from the layout in which its value was read to the one of storage.

    If a reduce-scatter over one axis also changes the order or the dim of other axes, XLA may confuse the order of the
    devices, so that rows end up in the wrong places (JAX 0.10.2: 9 of 245 such reshards on a 2x2x2 mesh). So the
    reduce-scatter comes first, with the other axes unchanged. If an axis changes its dim, an all-reduce comes first.
    """
    stays = all(set(r) <= set(k) for r, k in zip(read, kept, strict=True))
    first = (
        tuple((*r, *(a for a in k if a not in r)) for r, k in zip(read, kept, strict=True)) if stays else read
    )
    new = [a for k in kept for a in k if all(a not in r for r in read)]
    if first == kept or (len(new) == 1 and _without(kept, new[0]) == read):
        return (kept,)
    return (first, kept)


def _without(placement: Placement, axis: str) -> Placement:
    return tuple(tuple(a for a in dim if a != axis) for dim in placement)


@dataclass(frozen=True, kw_only=True)
class AnnotatedWalk(JaxprWalk["Array", Copies]):
    """The walk that applies the constraints. A value is an array; in a body, it remembers the copies made so far."""

    plan: OneProgramPlan
    mesh: JaxMesh
    in_branch: bool = False
    """Whether this walk is inside of a branch of a conditional."""

    @classmethod
    def of(
        cls,
        plan: OneProgramPlan,
        mesh: JaxMesh,
        examples: Examples | None = None,
        totals: Totals | None = None,
    ) -> AnnotatedWalk:
        """A walk over the plan's program. examples, totals: as in ``JaxprWalk``."""
        return cls(
            plan=plan,
            mesh=mesh,
            traced=plan.traced,
            blocks=plan.blocks,
            kept=plan.kept_results,
            examples=examples,
            totals=totals,
        )

    def constant(self, array: Array) -> Array:
        return array

    def changed(self, value: Array, change: Callable[[Array], Array]) -> Array:
        return change(value)

    def packed(self, values: Sequence[Array]) -> list[Array]:
        return list(values)

    def unpacked(self, values: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        return list(arrays)

    def inside(self, path: str) -> Copies:
        return {}

    def located(self, eqn: Eqn, at: Place) -> AbstractContextManager[None]:
        return noted(eqn)

    def _through(self, value: Array, placements: Sequence[Placement]) -> Array:
        import jax

        # XLA refuses branches whose results have different shardings. The results include the residuals and gradients
        # that backward needs. A result behind a barrier has no sharding.
        barrier = jax.lax.optimization_barrier if self.in_branch and placements else lambda x: x
        value = barrier(value)
        for placement in placements:
            value = jax.lax.with_sharding_constraint(value, self.plan.sharding(placement, self.mesh))
        return barrier(value)

    def _resharded(self, value: Array, route: Route) -> Array:
        """The value, constrained to the layouts of a route one after the other."""
        if route.gradient is None:
            return self._through(value, route.layouts)
        return self._gathered(value, route.layouts, route.gradient)

    def defined(self, value: Array, tensor: str | None) -> Array:
        return self._resharded(value, self.plan.constraints.define.get(tensor or "", Route()))

    def _read(self, value: Array, at: Place, tensor: str | None, copies: Copies) -> Array:
        """The value as an equation reads it: in its layout, and from the shared copy if the equation reads one."""
        if tensor in self.plan.slices:
            value = self.defined(value, tensor)
        if tensor is None:
            return value
        key = Reading(at, tensor)
        copy = self.plan.copies.get(key)
        if copy is not None:
            if copy not in copies:
                copies[copy] = self.defined(value, copy)
            value, key = copies[copy], Reading(at, copy)
        return self._resharded(value, self.plan.constraints.read.get(key, Route()))

    def _gathered(self, value: Array, through: Sequence[Placement], straight: Placement) -> Array:
        """The value, constrained to the layouts ``through`` one after the other.

        straight: the storage layout. The gradient goes there directly, not back through the same layouts.
        """
        import jax

        @jax.custom_vjp
        def gathered(x: Array) -> Array:
            return self._through(x, through)

        back = _steps_back(through[-1] if through else straight, straight)
        gathered.defvjp(lambda x: (gathered(x), None), lambda _, g: (self._through(g, back),))
        return gathered(value)

    def single(self, eqn: Eqn, ins: Sequence[Array], at: Place, state: Copies) -> Sequence[Array]:
        traced, name = self.traced, eqn.primitive.name
        names = traced.operands[at]
        ins = [self._read(x, at, t, state) for x, t in zip(ins, names, strict=True)]
        kernel = self._kernel(eqn, at)
        if name in SCATTERS:
            ins[0] = unmerged(ins[0])
        if name == "dot_general":
            ins = self._as_split(ins, names, at)
        if self.totals is not None:
            ins = self.totals.operands(eqn, traced.results[at], ins)
        draw = traced.drawn.get(at)
        outs: Sequence[Array]
        if places_only(eqn):
            outs = ins
        elif draw is not None and self.examples is not None:
            outs = drawn(eqn, ins, draw, self.examples)
        else:
            outs = evaluate(eqn, ins, self.info) if kernel is None else [kernel(*ins)]
        return self._known(at, [self.defined(x, t) for x, t in zip(outs, traced.results[at], strict=True)])

    def _known(self, at: Place, outs: Sequence[Array]) -> Sequence[Array]:
        """What readers of an equation's results read: the whole batch's sums, if the micro-batches share them."""
        return outs if self.totals is None else list(map(self.totals.read, self.traced.results[at], outs))

    def _as_split(self, ins: Sequence[Array], names: Sequence[str | None], at: Place) -> list[Array]:
        """The operands of a matmul, constrained to the plan's layouts, even if they already have them.

        XLA propagates its own choice of layouts to values without a constraint, and computes wrong results of matmuls
        whose operands are then split along other dims than the result (JAX 0.10.2: 1 of 400 random programs). Gradients
        are not constrained.
        """
        import jax

        layouts, axes = self.plan.accesses.get(at), self.plan.logical_mesh
        if layouts is None or len(set(names)) < len(names):
            return list(ins)
        sizes = axes.by_name

        def constrained(x: Array, name: str | None) -> Array:
            digits = layouts.reads.get(name or "")
            split = None if digits is None else convolution.placement_of(digits, sizes)
            if split is None:
                return x
            there = jax.custom_jvp(lambda x: self._through(x, (split,)))
            there.defjvp(lambda xs, tangents: (there(*xs), *tangents))
            return there(x)

        return list(map(constrained, ins, names))

    def _kernel(self, eqn: Eqn, at: Place) -> Callable[..., Array] | None:
        """The plan's split of what XLA cannot split: an attention kernel, a grouped convolution or a Fourier transform.

        None if XLA splits the equation.
        """
        call, traced, layouts = call_of(eqn), self.traced, self.plan.accesses.get(at)
        if call is None:
            of_plan = _SPLIT_BY_PLAN.get(eqn.primitive.name)
            if of_plan is None or layouts is None:
                return None
            names = traced.operands[at], traced.results[at]
            return of_plan(eqn, *names, layouts, self.plan.logical_mesh, self.mesh)
        return attention.of_plan(
            call,
            traced.operands[at],
            [v.aval for v in eqn.invars],
            layouts,
            self.plan.logical_mesh,
            self.mesh,
            source_line(eqn),
        )

    def _in_loop_layouts(
        self,
        at: Place,
        part: PlacePart,
        values: Sequence[Array],
        names: Sequence[str | None],
        copies: Copies,
        *which: int,
    ) -> list[Array]:
        """The values in the layouts that the plan has for a loop or a branch.

        part: which part of the equation's tensors they are (constants, carry, stacks, …). which: the number of the
        branch that returns them.
        """
        results = self.traced.results

        def of(k: int, value: Array, name: str | None) -> Array:
            here = at.its(part, *which, k)
            value = self._read(value, here, name, copies)
            return self.defined(value, results[here][0]) if here in results else value

        return [of(k, *pair) for k, pair in enumerate(zip(values, names, strict=True))]

    def scan(self, eqn: Eqn, ins: Sequence[Array], at: Place, state: Copies) -> Sequence[Array]:
        import jax

        p, results, closed = eqn.params, self.traced.results, eqn.params["jaxpr"]
        nc, nk = scan_groups(eqn)
        names, outs = self.traced.operands[at], results[at.its("outs")]
        consts = self._in_loop_layouts(at, "const", ins[:nc], names[:nc], state)
        init = self._in_loop_layouts(at, "carry", ins[nc : nc + nk], names[nc : nc + nk], state)
        xs = self._in_loop_layouts(at, "xs", ins[nc + nk :], names[nc + nk :], state)

        def body(carry: Sequence[Array], x: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            inside: Copies = {}
            carry = self._in_loop_layouts(at, "carry", carry, [None] * nk, inside)
            made = self.run(closed.jaxpr, closed.consts, [*consts, *carry, *x], f"{at.path}.", inside)
            carried = self._in_loop_layouts(at, "carry", made[:nk], outs[:nk], inside)
            return carried, self._in_loop_layouts(at, "y", made[nk:], outs[nk:], inside)

        carry, ys = jax.lax.scan(body, init, xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
        return self._known(at, [self.defined(x, t) for x, t in zip([*carry, *ys], results[at], strict=True)])

    def loop(self, eqn: Eqn, ins: Sequence[Array], at: Place, state: Copies) -> Sequence[Array]:
        import jax

        p, results = eqn.params, self.traced.results
        nc, nb = p["cond_nconsts"], p["body_nconsts"]
        cond, body = p["cond_jaxpr"], p["body_jaxpr"]
        names, outs = self.traced.operands[at], results[at.its("outs")]
        asks = self._in_loop_layouts(at, "ask", ins[:nc], names[:nc], state)
        consts = self._in_loop_layouts(at, "const", ins[nc : nc + nb], names[nc : nc + nb], state)
        init = self._in_loop_layouts(at, "carry", ins[nc + nb :], names[nc + nb :], state)

        each = bool(cond.out_avals[0].shape)  # under vmap, the condition has one result per example

        def asked(carry: Sequence[Array]) -> Array:
            return self.run(cond.jaxpr, cond.consts, [*asks, *carry], f"{at.path}.c.", {})[0]

        def goes_on(carry: Sequence[Array]) -> Array:
            return asked(carry).any() if each else asked(carry)

        def iteration(carry: Sequence[Array]) -> list[Array]:
            inside: Copies = {}
            carry = self._in_loop_layouts(at, "carry", carry, [None] * len(carry), inside)
            made = self.run(body.jaxpr, body.consts, [*consts, *carry], f"{at.path}.b.", inside)
            if each:
                on = asked(carry)
                made = [
                    self._held(at.its("y", k), on, *both, inside)
                    for k, both in enumerate(zip(made, carry, strict=True))
                ]
            return self._in_loop_layouts(at, "carry", made, outs, inside)

        carry = jax.lax.while_loop(goes_on, iteration, init)
        return self._known(at, [self.defined(x, t) for x, t in zip(carry, results[at], strict=True)])

    def _held(self, at: Place, on: Array, new: Array, before: Array, copies: Copies) -> Array:
        """A loop's value after an iteration, under vmap: examples that have ended keep the value from before.

        on: a flag per example, whether it continues. new, before: the values after and before the iteration.
        """
        import jax
        import jax.numpy as jnp

        traced = self.traced
        read = zip((on, new, before), traced.operands[at], strict=True)
        on, new, before = (self._read(x, at, t, copies) for x, t in read)
        on = jax.lax.broadcast_in_dim(on, new.shape, range(on.ndim))
        return self.defined(jnp.where(on, new, before), traced.results[at][0])

    def branches(self, eqn: Eqn, ins: Sequence[Array], at: Place, state: Copies) -> Sequence[Array]:
        import jax

        traced = self.traced
        index, *operands = ins

        walk = replace(self, in_branch=True)

        def branch(k: int, closed: ClosedJaxpr) -> Callable[..., list[Array]]:
            def run(*args: Array) -> list[Array]:
                inside: Copies = {}
                outs = walk.run(closed.jaxpr, closed.consts, args, f"{at.path}.{k}.", inside)
                keys = [at.its("out", k, j) for j in range(len(outs))]
                names = [traced.operands[key][0] for key in keys]
                outs = walk._in_loop_layouts(at, "out", outs, names, inside, k)
                left = [traced.results[key][0] for key in keys]
                return [walk._read(x, at, t, inside) for x, t in zip(outs, left, strict=True)]

            return run

        branches = [branch(k, closed) for k, closed in enumerate(eqn.params["branches"])]
        made = jax.lax.switch(index, branches, *operands)
        return [self.defined(x, t) for x, t in zip(made, traced.results[at], strict=True)]
