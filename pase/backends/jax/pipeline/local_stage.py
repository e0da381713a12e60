"""A stage's local program on one device: what the stage makes of its weights, its examples and what enters.

Everything here runs inside of a ``shard_map``. Both ways of running stages are built on it: a program for each stage
(``device``), and one program for all stages (``circular``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.ops.draws import Examples
from pase.backends.jax.ops.totals import Totals
from pase.backends.jax.pipeline.segments import StageKey
from pase.backends.jax.pipeline.stages import Stage
from pase.backends.jax.spmd.lower import Manual
from pase.backends.jax.spmd.values import Arrivals, Cache, DeviceValue, NotManual
from pase.backends.jax.steps.hoisted import StepGathers, step_gathers
from pase.errors import PaseError
from pase.frontends.jax.blocks import split_inputs
from pase.frontends.jax.versions import DependsOnShapes, only_needed
from pase.local.reshard import part
from pase.local.types import LocalProgram, LocalResult
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from jax import Array, ShapeDtypeStruct

    from pase.machine import Mesh

__all__ = ["HeldArray", "LocalStage", "check_lowering", "refusals", "stage_gathers"]


def check_lowering(lowering: str) -> None:
    """Raise PaseError if another lowering than that of stages is asked for."""
    if lowering not in ("auto", "manual"):
        raise PaseError(
            "stages are lowered manually",
            where=f"lowering='{lowering}'",
            fix="leave out lowering=, or compile with pipeline='none'",
        )


@contextmanager
def refusals() -> Iterator[None]:
    """Says of a stage that cannot be lowered manually what else there is: stages have no other lowering."""
    try:
        yield
    except NotManual as e:
        raise PaseError(
            f"it cannot be run in stages: {e.what}", where=e.where, fix="compile with pipeline='none'"
        ) from e


@dataclass(frozen=True)
class HeldArray:
    """An array as a device holds it. shape: of the whole array. gradient: the layout of its gradient."""

    shape: tuple[int, ...]
    layout: AxisLayout
    gradient: AxisLayout

    @classmethod
    def of(cls, program: LocalProgram, tensor: str | None, shape: Sequence[int]) -> HeldArray:
        """The tensor as a program makes it. What no op makes is whole on every device."""
        if tensor not in program.maker:
            whole = AxisLayout.whole(program.mesh)
            return cls(tuple(shape), whole, whole)
        r = program.result(tensor or "")
        return cls(tuple(shape), r.layout, r.gradient)

    def local(self, mesh: Mesh, *, gradient: bool = False) -> tuple[int, ...]:
        """The shape on one device."""
        return (self.gradient if gradient else self.layout).local_shape(self.shape, mesh)


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalStage:
    """A stage on one device.

    manual: the model on one micro-batch under the stage's strategy, in which stacks have the stage's rows. last:
    whether the stage returns the results of the model. micro_batches: how many the stage runs. first, every: the number
    of the first one in the whole step, and how many that step has.
    """

    stage: Stage
    manual: Manual
    last: bool
    micro_batches: int
    first: int
    every: int

    @property
    def program(self) -> LocalProgram:
        return self.manual.program

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @cached_property
    def names(self) -> Sequence[str]:
        """The tensors of the model's leaves."""
        return self.manual.plan.leaf_names()

    @cached_property
    def weights(self) -> Mapping[int, LocalResult]:
        """Leaf -> the weight in the stage's own layouts."""
        return {w.leaf: self.program.result(self.names[w.leaf]) for w in self.stage.weights}

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The leaves of the weights that have gradients."""
        leaves = set(self.manual.trained)
        return tuple(i for i in self.weights if i in leaves)

    def held(self, key: StageKey) -> HeldArray:
        """A value as this stage makes it."""
        return HeldArray.of(self.program, self.stage.names.get(key), self.stage.avals[key].shape)

    @cached_property
    def enters(self) -> tuple[HeldArray, ...]:
        return tuple(map(self.held, self.stage.enters))

    @cached_property
    def leaves(self) -> tuple[HeldArray, ...]:
        """What leaves; empty for the last stage."""
        return () if self.last else tuple(map(self.held, self.stage.leaves))

    def comes_back(self, key: StageKey) -> bool:
        """Whether the gradient of an activation is sent to the previous stage."""
        tensor = self.manual.plan.traced.graph.tensors.get(self.stage.names.get(key) or "")
        return tensor is not None and tensor.needs_grad

    @cached_property
    def returned(self) -> tuple[bool, ...]:
        """Which of the stage's outputs have a gradient."""
        if self.last:
            return tuple(j == 0 for j in range(len(self.stage.leaves)))
        return tuple(map(self.comes_back, self.stage.leaves))

    @cached_property
    def arrives(self) -> tuple[HeldArray, ...]:
        """The leaves of one micro-batch in the stage's own layouts."""
        avals, n = self.manual.plan.traced.jaxpr.in_avals, len(self.manual.plan.traced.param_paths)
        return tuple(
            HeldArray.of(self.program, self.names[n + i], avals[n + i].shape) for i in self.stage.batch
        )

    def examples(self, micro: Array) -> Examples | None:
        """Those of a micro-batch, if random numbers are drawn for them."""
        draws = bool(self.manual.plan.traced.drawn)
        return Examples(first=self.first + micro, step=self.every) if draws else None

    def micro_batch(self, batch: Sequence[Array], micro: Array) -> list[Array]:
        """The leaves of a micro-batch: every k-th example, so that each device already has its own."""
        import jax

        m = self.micro_batches
        divided = split_inputs(self.manual.plan.traced)

        def of(x: Array, on: bool) -> Array:
            if not on or m == 1:
                return x
            mine = x.reshape(x.shape[0] // m, m, *x.shape[1:])
            return jax.lax.dynamic_index_in_dim(mine, micro, 1, keepdims=False)

        return [of(x, divided[i]) for i, x in zip(self.stage.batch, batch, strict=True)]

    def entering(self, key: StageKey, x: Array, gradient_carrier: Array | None = None) -> DeviceValue:
        """An activation that enters."""
        name = self.stage.names.get(key)
        if name not in self.program.maker:
            return DeviceValue(array=x, tensor=name)
        layout = self.program.result(name or "").layout
        return DeviceValue(array=x, tensor=name, layout=layout, gradient_carrier=gradient_carrier)

    def run(
        self,
        weights: Mapping[int, Array],
        carriers: Mapping[int, Array],
        batch: Sequence[Array],
        entered: Sequence[DeviceValue],
        examples: Examples | None,
        arrivals: Arrivals | None,
        totals: Totals | None = None,
    ) -> list[DeviceValue]:
        """The stage's outputs, in the layouts in which they leave.

        weights, carriers: leaf -> the weight in its own layout, and its gradient carrier if it has a gradient. totals:
        the sums over the whole batch, if the model reads any.
        """
        walk, cache, given = (
            replace(self.manual.walk, arrivals=arrivals, examples=examples, totals=totals),
            Cache(body=""),
            [],
        )
        for i, r in self.weights.items():
            carrier, apart = carriers.get(i), r.layout != r.gradient
            array = weights[i] if carrier is None or apart else carrier
            given.append(walk.leaf(array, self.names[i], carrier if apart else None))
        n = len(self.manual.plan.traced.param_paths)
        given += [walk.input(x, self.names[n + i]) for x, i in zip(batch, self.stage.batch, strict=True)]
        outs = self.stage.run(walk, [*given, *entered], cache)
        if self.last:
            outs = self.manual.own(outs, totals)
            return [
                DeviceValue(array=self.manual.out(walk, h, self.manual.end(j), cache, differentiated=j == 0))
                for j, h in enumerate(outs)
            ]
        return [self._leaving(h, held) for h, held in zip(outs, self.leaves, strict=True)]

    def _leaving(self, value: DeviceValue, held: HeldArray) -> DeviceValue:
        """A value in the layout in which the next stage expects it."""
        import jax
        import jax.numpy as jnp

        if value.layout is None:
            # A literal would not become a variable of the jaxpr without an equation that makes it.
            array = jax.lax.optimization_barrier(jnp.asarray(value.array))
            return replace(value, array=part(array, held.shape, held.layout, JaxArrays(self.mesh)))
        if value.layout != held.layout:
            raise NotManual(
                f"'{value.tensor}' leaves its stage as {value.layout} but is {held.layout} in the plan; this is a "
                "defect of pase.local"
            )
        return value

    def shares(self, batch: Callable[[Array], list[Array]]) -> dict[str, Array]:
        """Sum over the whole batch that the stage makes -> a device's share of it (``Totals``).

        batch: from the number of a micro-batch to its leaves, in the stage's own layouts.
        """
        import jax

        plan = self.manual.plan
        if not plan.sums.totals:
            return {}
        weights, entered = self.shapes

        def counted(micro: Array) -> dict[str, Array]:
            def counting(weights: Mapping[int, Array], entered: Sequence[Array]) -> dict[str, Array]:
                totals, here = plan.totals(None), map(self.entering, self.stage.enters, entered)
                self.run(weights, {}, batch(micro), list(here), self.examples(micro), None, totals)
                return totals.found

            return only_needed(counting, weights, entered)  # type: ignore[no-any-return]

        try:
            found = jax.lax.map(counted, jax.numpy.arange(self.micro_batches))
        except DependsOnShapes:
            raise NotManual(
                "a sum over the batch that the loss reads depends on what another stage makes"
            ) from None
        return plan.totals(None).of_batch(found)

    def totals(self, shares: Mapping[str, Array]) -> Totals | None:
        """What the stage reads of the whole batch. shares: as the method of this name returns them."""
        plan = self.manual.plan
        return plan.totals(shares) if plan.reads_totals else None

    @cached_property
    def shapes(self) -> tuple[dict[int, ShapeDtypeStruct], list[ShapeDtypeStruct]]:
        """(leaf -> the weight in its own layout, what enters), on one device."""
        import jax

        avals = self.manual.plan.traced.jaxpr.in_avals
        weights = {
            i: jax.ShapeDtypeStruct(r.layout.local_shape(r.shape, self.mesh), avals[i].dtype)
            for i, r in self.weights.items()
        }
        entered = [
            jax.ShapeDtypeStruct(h.local(self.mesh), self.stage.avals[key].dtype)
            for key, h in zip(self.stage.enters, self.enters, strict=True)
        ]
        return weights, entered

    def find(self, arrivals: Arrivals, weights: Mapping[int, Array], carriers: Mapping[int, Array]) -> None:
        """Run the stage on zeros, so that the arrivals find what it gathers of its weights."""
        import jax.numpy as jnp

        avals, n = self.manual.plan.traced.jaxpr.in_avals, len(self.manual.plan.traced.param_paths)
        batch = [
            jnp.zeros(h.local(self.mesh), avals[n + i].dtype)
            for i, h in zip(self.stage.batch, self.arrives, strict=True)
        ]
        entered = [
            self.entering(key, jnp.zeros(s.shape, s.dtype))
            for key, s in zip(self.stage.enters, self.shapes[1], strict=True)
        ]
        self.run(weights, carriers, batch, entered, self.examples(jnp.int32(0)), arrivals)


def stage_gathers(stages: Sequence[LocalStage], weights: Tree, carriers: Tree) -> StepGathers:
    """The all-gathers of the weights of stages that share a local program, as far as they can run once per step.

    weights, carriers: as for ``LocalStage.run``, or their shapes.
    """

    def find(arrivals: Arrivals, weights: Tree, carriers: dict[int, Array]) -> None:
        for stage in stages:
            stage.find(arrivals, weights, carriers)

    return step_gathers(stages[0].program, find, weights, carriers, optional=True)
