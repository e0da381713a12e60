"""One stage on one device of its rank: its outputs and gradients, as the local program of its strategy computes them.

Everything here runs inside a ``shard_map`` over the rank's mesh. Activations cross in the layout in which their stage
makes them, and the receiving stage reshards them; gradients cross back in the same way. So each stage's collectives are
those of its own local program, and those between two layouts of what crosses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.pipeline.local_stage import HeldArray, LocalStage, stage_gathers
from pase.backends.jax.pipeline.segments import StageKey
from pase.backends.jax.spmd.lower import gradient_carrier
from pase.backends.jax.spmd.values import NotManual
from pase.backends.jax.steps.hoisted import StepGathers
from pase.local.lower import between
from pase.local.reshard import resharded
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from jax import Array

__all__ = ["DeviceStage"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceStage(LocalStage):
    """A stage on one device, which a program of its own runs.

    stored, given: its weights and batch leaves in the program of the stage that stores them, or for which they arrive.
    hoisted: whether weights are gathered, and their gradients reduced, once per step.
    """

    stored: tuple[HeldArray, ...]
    given: tuple[HeldArray, ...]
    before: tuple[HeldArray, ...]
    """What enters, as the previous stage makes it."""
    after: tuple[HeldArray, ...]
    """What leaves, as the next stage reads it; empty for the last stage."""
    hoisted: bool

    @property
    def cotangents(self) -> tuple[HeldArray, ...]:
        """The outputs that have a gradient, as the next stage returns it."""
        return tuple(h for h, on in zip(self.after, self.returned, strict=True) if on) if self.after else ()

    def moved(self, x: Array, have: AxisLayout, want: AxisLayout, shape: tuple[int, ...]) -> Array:
        return resharded(x, between(have, want, self.mesh), shape, "sum", JaxArrays(self.mesh))

    def gradients(
        self,
        weights: Sequence[Array],
        batch: Sequence[Array],
        micro: Array,
        entered: Sequence[Array],
        cotangents: Sequence[Array],
        shares: Mapping[str, Array],
    ) -> tuple[list[Array], list[Array | None], list[Array]]:
        """(outputs, gradients of what enters, gradients to add up).

        entered, cotangents: in the layouts of the stages that made them. shares: what ``count`` returns. The gradients
        to add up are those of the gathered weights, if these are gathered once per step, then those of the gradient
        carriers.
        """
        import jax

        held = self.own(weights)
        own, inputs, examples = self.carriers(held), self.batch(batch, micro), self.examples(micro)
        gathers = self.gathers
        arrived = [] if gathers is None else gathers.run(held, own)
        into = [
            self.moved(x, have.layout, want.layout, want.shape)
            for x, have, want in zip(entered, self.before, self.enters, strict=True)
        ]
        ends = list(map(self._gradient_of_entered, self.stage.enters, into, self.enters))

        def of(
            there: list[Array], own: dict[int, Array], ends: list[Array | None]
        ) -> tuple[list[Array], list[Array]]:
            arrivals = None if gathers is None else gathers.arrivals(gathers.whole(arrived, there))
            entering = [
                self.entering(key, x, end) if end is None or end.shape != x.shape else self.entering(key, end)
                for key, x, end in zip(self.stage.enters, into, ends, strict=True)
            ]
            values = self.run(held, own, inputs, entering, examples, arrivals, self.totals(shares))
            ways = [
                h.array if h.gradient_carrier is None else h.gradient_carrier
                for h, on in zip(values, self.returned, strict=True)
                if on
            ]
            return ways, [h.array for h in values]

        mine = [] if gathers is None else gathers.smooth(arrived)
        ways, pull, outs = jax.vjp(of, mine, own, ends, has_aux=True)
        if not self.last:
            pairs = [(n, h) for n, h, on in zip(self.after, self.leaves, self.returned, strict=True) if on]
            cotangents = [
                self.moved(g, n.gradient, h.gradient, h.shape)
                for g, (n, h) in zip(cotangents, pairs, strict=True)
            ]
        for way, g in zip(ways, cotangents, strict=True):
            if way.shape != g.shape:
                raise NotManual(
                    f"the gradient of an activation is {g.shape} but the activation {way.shape}; this is a defect of "
                    "pase.local"
                )
        there, back, into_entered = pull(cotangents)
        return outs, into_entered, [*there, *back.values()]

    def count(self, batch: Sequence[Array]) -> dict[str, Array]:
        """``shares``. batch: all micro-batches, where their leaves arrive."""
        return self.shares(partial(self.batch, batch))

    def finished(self, weights: Sequence[Array], sums: Sequence[Array]) -> list[Array]:
        """The gradients of the whole batch's loss by the trained weights, where these are updated. sums: over all
        micro-batches."""
        import jax
        import jax.numpy as jnp

        held = self.own(weights)
        own = self.carriers(held)
        first = len(sums) - len(own)
        total = dict(zip(own, sums[first:], strict=True))
        if self.gathers is not None:
            arrived, back = jax.vjp(partial(self.gathers.run, held), own)
            (reduced,) = back(self.gathers.gradients(arrived, sums[:first]))
            total = {i: g + reduced[i] for i, g in total.items()}
        stored = {w.leaf: h for w, h in zip(self.stage.weights, self.stored, strict=True)}
        return [
            self.moved(
                jnp.asarray(self.manual.plan.of_batch(total[i])),
                self.weights[i].gradient,
                stored[i].gradient,
                self.weights[i].shape,
            )
            for i in self.trained
        ]

    def sums(self, weights: Sequence[Array]) -> list[Array]:
        """Zeros to which the gradients of micro-batches are added."""
        import jax.numpy as jnp

        held = self.own(weights)
        own = self.carriers(held)
        there = [] if self.gathers is None else self.gathers.zeros(self.gathers.run(held, own))
        return [*there, *map(jnp.zeros_like, own.values())]

    def own(self, weights: Sequence[Array]) -> dict[int, Array]:
        """Leaf -> the weight in the stage's own layout. weights: where they are stored."""
        return {
            i: self.moved(x, have.layout, r.layout, r.shape)
            for x, have, (i, r) in zip(weights, self.stored, self.weights.items(), strict=True)
        }

    def carriers(self, own: dict[int, Array]) -> dict[int, Array]:
        """Leaf of a trained weight -> the array at which its gradient is taken (``Manual.gradient_carriers``)."""
        return {i: gradient_carrier(own[i], self.weights[i], self.mesh) for i in self.trained}

    @cached_property
    def gathers(self) -> StepGathers | None:
        """The all-gathers that run once per step; None if weights are gathered in each micro-batch."""
        import jax

        if not self.hoisted:
            return None
        weights, _ = self.shapes
        return stage_gathers([self], weights, jax.eval_shape(self.carriers, weights))

    def batch(self, batch: Sequence[Array], micro: Array) -> list[Array]:
        """A micro-batch in the stage's own layouts."""
        return [
            self.moved(x, have.layout, want.layout, want.shape)
            for x, have, want in zip(self.micro_batch(batch, micro), self.given, self.arrives, strict=True)
        ]

    def _gradient_of_entered(self, key: StageKey, x: Array, held: HeldArray) -> Array | None:
        """The array at which the gradient of an entering activation is taken; None if it has none."""
        import jax.numpy as jnp

        if not self.comes_back(key):
            return None
        wanted = held.local(self.mesh, gradient=True)
        return x if wanted == x.shape else jnp.zeros(wanted, x.dtype)
