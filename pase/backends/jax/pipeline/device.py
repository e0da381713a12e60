"""One stage on one device of its rank: its outputs and gradients, as the local program of its strategy computes them.

Everything here runs inside a ``shard_map`` over the rank's mesh. Activations cross in the layout in which their stage
makes them, and the receiving stage reshards them; gradients cross back in the same way. So each stage's collectives are
those of its own local program, and those between two layouts of what crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.ops.draws import Examples
from pase.backends.jax.pipeline.segments import StageKey
from pase.backends.jax.pipeline.stages import Stage
from pase.backends.jax.spmd.collectives import JaxArrays
from pase.backends.jax.spmd.interpreter import ManualWalk
from pase.backends.jax.spmd.lower import Manual, gradient_carrier
from pase.backends.jax.spmd.values import Arrivals, Cache, DeviceValue, NotManual
from pase.backends.jax.steps.hoisted import no_gradient
from pase.frontends.jax.blocks import split_inputs
from pase.frontends.jax.versions import called, without_dead_code
from pase.local.lower import between
from pase.local.reshard import part, resharded
from pase.local.types import Layout, LocalProgram, LocalResult, local_shape
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

    from pase.machine import Mesh

__all__ = ["DeviceStage", "HeldArray", "StepGathers"]


@dataclass(frozen=True)
class HeldArray:
    """An array as a device holds it. shape: of the whole array. gradient: the layout of its gradient."""

    shape: tuple[int, ...]
    layout: Layout
    gradient: Layout

    @classmethod
    def of(cls, program: LocalProgram, tensor: str | None, shape: Sequence[int]) -> HeldArray:
        """The tensor as a program makes it. What no op makes is whole on every device."""
        if tensor not in program.maker:
            whole = (None,) * len(program.mesh.names)
            return cls(tuple(shape), whole, whole)
        r = program.result(tensor or "")
        return cls(tuple(shape), r.layout, r.gradient)

    def local(self, mesh: Mesh, *, gradient: bool = False) -> tuple[int, ...]:
        """The shape on one device."""
        return local_shape(self.shape, self.gradient if gradient else self.layout, mesh)


@dataclass(frozen=True, kw_only=True)
class StepGathers:
    """The all-gathers that run once per step.

    run: from gradient carriers to the weights in the form that their readers need. form: the tree structure of these.
    sums: for each, the dtype in which its gradients are added; "" if it has none.
    """

    run: Callable[[dict[int, Array]], list[Array]]
    form: Tree
    sums: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceStage:
    """A stage on one device.

    manual: the model on one micro-batch under the stage's strategy. program: its local program, in which stacks have
    the stage's rows. stored, arrives: its weights and batch leaves in the program of the stage that stores them, or for
    which they arrive. hoisted: whether weights are gathered, and their gradients reduced, once per step. micro_batches:
    how many the stage runs. first, every: the number of the first one in the whole step, and how many that step has.
    """

    stage: Stage
    manual: Manual
    program: LocalProgram
    stored: tuple[HeldArray, ...]
    arrives: tuple[HeldArray, ...]
    before: tuple[HeldArray, ...]
    """What enters, as the previous stage makes it."""
    after: tuple[HeldArray, ...]
    """What leaves, as the next stage reads it; empty for the last stage."""
    hoisted: bool
    micro_batches: int
    first: int
    every: int

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def last(self) -> bool:
        return not self.after

    @cached_property
    def _walk(self) -> ManualWalk:
        plan = self.manual.plan
        return ManualWalk(
            program=self.program,
            traced=plan.traced,
            blocks=plan.blocks,
            kept=plan.kept_results,
            devices=self.manual.mesh,
        )

    @cached_property
    def weights(self) -> tuple[LocalResult, ...]:
        """The weights in the stage's own layouts."""
        names = self.manual.plan.leaf_names()
        return tuple(self.program.result(names[w.leaf]) for w in self.stage.weights)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The positions of the weights that have gradients."""
        leaves = set(self.manual.trained)
        return tuple(i for i, w in enumerate(self.stage.weights) if w.leaf in leaves)

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

    @property
    def cotangents(self) -> tuple[HeldArray, ...]:
        """The outputs that have a gradient, as the next stage returns it."""
        return tuple(h for h, on in zip(self.after, self.returned, strict=True) if on) if self.after else ()

    def moved(self, x: Array, have: Layout, want: Layout, shape: tuple[int, ...]) -> Array:
        return resharded(x, between(have, want, self.mesh), shape, "sum", JaxArrays(self.mesh))

    def gradients(
        self,
        weights: Sequence[Array],
        batch: Sequence[Array],
        micro: Array,
        entered: Sequence[Array],
        cotangents: Sequence[Array],
    ) -> tuple[list[Array], list[Array | None], list[Array]]:
        """(outputs, gradients of what enters, gradients to add up).

        entered, cotangents: in the layouts of the stages that made them. The gradients to add up are those of the
        gathered weights, if these are gathered once per step, then those of the gradient carriers.
        """
        import jax

        own, inputs = self.carriers(weights), self.batch(batch, micro)
        examples = Examples(first=self.first + micro, step=self.every) if self._draws else None
        gathers = self.gathers(weights) if self.hoisted else None
        arrived = [] if gathers is None else gathers.run(own)
        smooth = [] if gathers is None else [bool(s) for s in gathers.sums]
        into = [
            self.moved(x, have.layout, want.layout, want.shape)
            for x, have, want in zip(entered, self.before, self.enters, strict=True)
        ]
        ends = list(map(self._gradient_of_entered, self.stage.enters, into, self.enters))

        def of(
            there: list[Array], own: dict[int, Array], ends: list[Array | None]
        ) -> tuple[list[Array], list[Array]]:
            arrivals = None
            if gathers is not None:
                given = iter(there)
                held = [next(given) if on else x for x, on in zip(arrived, smooth, strict=True)]
                arrivals = self._arrivals(jax.tree.unflatten(gathers.form, held))
            walk = replace(self._walk, arrivals=arrivals, examples=examples)
            values = self._run(
                walk,
                weights,
                own,
                inputs,
                [
                    self._entering(*pair)
                    for pair in zip(self.stage.enters, into, ends, self.enters, strict=True)
                ],
            )
            ways = [
                h.array if h.gradient_carrier is None else h.gradient_carrier
                for h, on in zip(values, self.returned, strict=True)
                if on
            ]
            return ways, [h.array for h in values]

        mine = [x for x, on in zip(arrived, smooth, strict=True) if on]
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

    def finished(self, weights: Sequence[Array], sums: Sequence[Array]) -> list[Array]:
        """The mean gradients of the trained weights where they are updated, from the sums over all micro-batches."""
        import jax
        import jax.numpy as jnp

        own = self.carriers(weights)
        given = iter(sums)
        if self.hoisted:
            gathers = self.gathers(weights)
            arrived, back = jax.vjp(gathers.run, own)
            whole = [
                next(given).astype(x.dtype) if s else no_gradient(x)
                for x, s in zip(arrived, gathers.sums, strict=True)
            ]
            (reduced,) = back(whole)
            total = {i: g + reduced[i] for i, g in zip(own, given, strict=True)}
        else:
            total = dict(zip(own, given, strict=True))
        return [
            self.moved(
                jnp.asarray(total[i] / self.micro_batches),
                self.weights[i].gradient,
                self.stored[i].gradient,
                self.weights[i].shape,
            )
            for i in self.trained
        ]

    def sums(self, weights: Sequence[Array]) -> list[Array]:
        """Zeros to which the gradients of micro-batches are added."""
        import jax.numpy as jnp

        own = self.carriers(weights)
        there: list[Array] = []
        if self.hoisted:
            gathers = self.gathers(weights)
            found = gathers.run(own)
            there = [jnp.zeros(x.shape, s) for x, s in zip(found, gathers.sums, strict=True) if s]
        return [*there, *map(jnp.zeros_like, own.values())]

    @property
    def _draws(self) -> bool:
        return bool(self.manual.plan.traced.drawn)

    def _own(self, weights: Sequence[Array]) -> list[Array]:
        """The weights in the stage's own layouts."""
        return [
            self.moved(x, have.layout, r.layout, r.shape)
            for x, have, r in zip(weights, self.stored, self.weights, strict=True)
        ]

    def carriers(self, weights: Sequence[Array]) -> dict[int, Array]:
        """Position of a trained weight -> the array at which its gradient is taken (``Manual.gradient_carriers``)."""
        own = self._own(weights)
        return {i: gradient_carrier(own[i], self.weights[i], self.mesh) for i in self.trained}

    def batch(self, batch: Sequence[Array], micro: Array) -> list[Array]:
        """A micro-batch in the stage's own layouts: every k-th example, so that each device already has its own."""
        import jax

        traced, m, out = self.manual.plan.traced, self.micro_batches, []
        divided = split_inputs(traced) if m > 1 else [False] * len(traced.input_paths)
        n, names = len(traced.param_paths), self.manual.plan.leaf_names()
        for i, x, have in zip(self.stage.batch, batch, self.arrives, strict=True):
            mine = x
            if divided[i]:
                mine = x.reshape(x.shape[0] // m, m, *x.shape[1:])
                mine = jax.lax.dynamic_index_in_dim(mine, micro, 1, keepdims=False)
            want = HeldArray.of(self.program, names[n + i], traced.jaxpr.in_avals[n + i].shape)
            out.append(self.moved(mine, have.layout, want.layout, want.shape))
        return out

    def _gradient_of_entered(self, key: StageKey, x: Array, held: HeldArray) -> Array | None:
        """The array at which the gradient of an entering activation is taken; None if it has none."""
        import jax.numpy as jnp

        if not self.comes_back(key):
            return None
        wanted = held.local(self.mesh, gradient=True)
        return x if wanted == x.shape else jnp.zeros(wanted, x.dtype)

    def _entering(self, key: StageKey, x: Array, end: Array | None, held: HeldArray) -> DeviceValue:
        name = self.stage.names.get(key)
        if name not in self.program.maker:
            return DeviceValue(array=x, tensor=name)
        if end is not None and end.shape == x.shape:
            return DeviceValue(array=end, tensor=name, layout=held.layout)
        return DeviceValue(array=x, tensor=name, layout=held.layout, gradient_carrier=end)

    def _arrivals(self, given: Tree) -> Arrivals:
        numbers = frozenset(k for k, t in enumerate(self.program.transfers) if t.hoisted)
        return Arrivals(numbers=numbers, given=given, optional=True)

    def gathers(self, weights: Sequence[Array]) -> StepGathers:
        """The all-gathers of the weights, which one walk finds."""
        import jax
        import jax.numpy as jnp

        form: list[Tree] = []
        traced, n = self.manual.plan.traced, len(self.manual.plan.traced.param_paths)
        names = self.manual.plan.leaf_names()

        def finding(own: dict[int, Array]) -> list[Array]:
            arrivals = self._arrivals(None)
            example = jnp.int32(0)
            walk = replace(
                self._walk,
                arrivals=arrivals,
                examples=Examples(first=example, step=self.every) if self._draws else None,
            )
            avals = [traced.jaxpr.in_avals[n + i] for i in self.stage.batch]
            held = [
                HeldArray.of(self.program, names[n + i], a.shape)
                for i, a in zip(self.stage.batch, avals, strict=True)
            ]
            batch = [jnp.zeros(h.local(self.mesh), a.dtype) for h, a in zip(held, avals, strict=True)]
            ends = [
                jnp.zeros(h.local(self.mesh), self.stage.avals[key].dtype)
                for key, h in zip(self.stage.enters, self.enters, strict=True)
            ]
            entered = [
                self._entering(key, x, None, h)
                for key, x, h in zip(self.stage.enters, ends, self.enters, strict=True)
            ]
            self._run(walk, weights, own, batch, entered)
            found, tree = jax.tree.flatten(arrivals.found)
            form[:] = [tree, jax.tree.leaves(arrivals.wide)]
            return found

        program = without_dead_code(jax.make_jaxpr(finding)(self.carriers(weights)))

        def run(own: dict[int, Array]) -> list[Array]:
            return called(program)(*jax.tree.leaves(own))

        return StepGathers(run=run, form=form[0], sums=tuple(form[1]))

    def _run(
        self,
        walk: ManualWalk,
        weights: Sequence[Array],
        own: dict[int, Array],
        batch: Sequence[Array],
        entered: Sequence[DeviceValue],
    ) -> list[DeviceValue]:
        """The stage's outputs, in the layouts in which they leave. own: the gradient carriers of the weights."""
        traced, names, cache = self.manual.plan.traced, self.manual.plan.leaf_names(), Cache(body="")
        given = []
        for i, (x, w, r) in enumerate(zip(self._own(weights), self.stage.weights, self.weights, strict=True)):
            carrier, apart = own.get(i), r.layout != r.gradient
            array = x if carrier is None or apart else carrier
            given.append(walk.leaf(array, names[w.leaf], carrier if apart else None))
        n = len(traced.param_paths)
        given += [walk.input(x, names[n + i]) for x, i in zip(batch, self.stage.batch, strict=True)]
        outs = self.stage.run(walk, [*given, *entered], cache)
        if self.last:
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
