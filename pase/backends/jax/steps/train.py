"""The parts that all train steps under a plan share: layouts of arguments and results, and the optimizer's update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.steps.micro_batches import written
from pase.backends.jax.steps.stepper import Stepper, with_static
from pase.frontends.jax.leaves import arrays, combine, trained, untrained
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax.sharding import Mesh as JaxMesh
    from optax import GradientTransformation

    from pase.backends.jax.one_program import OneProgramPlan

__all__ = ["Training"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """An optimizer under a plan, on a JAX mesh. donate: whether the step may overwrite parameters and states."""

    plan: OneProgramPlan
    optimizer: GradientTransformation
    mesh: JaxMesh
    donate: bool

    @cached_property
    def _updated_as(self) -> Tree:
        return self.plan.gradient_shardings(self.mesh)

    def plain(self, graded: Callable[..., Tree]) -> Stepper:
        """The step that applies its own gradients. graded: f(params, *batch) -> (value, gradients)."""
        import jax

        def step(params: Tree, opt_state: Tree, *batch: Tree) -> Tree:
            value, grads = graded(params, *batch)
            params = written(self.plan, params, value)
            return *self.updated(params, opt_state, grads, jax.tree.leaves(arrays(value))[0]), arrays(value)

        return self.stepper(step)

    def updated(self, params: Tree, opt_state: Tree, grads: Tree, loss: Tree = None) -> tuple[Tree, Tree]:
        """(parameters, optimizer state) after one update.

        loss: of the step, for optimizers that read it (``reduce_on_plateau``); None where the step does not have it.
        Each device updates the part whose state it has. The output layouts of ``stepper`` then gather the parameters.
        """
        import jax
        import optax

        def kept(tree: Tree) -> Tree:
            if self.mesh.size == 1:
                return tree
            return jax.tree.map(jax.lax.with_sharding_constraint, tree, self._updated_as)

        mine = kept(trained(params))
        optimizer = optax.with_extra_args_support(self.optimizer)
        takes = inspect.signature(optimizer.update).parameters.values()
        reads = any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in takes)  # optax.contrib.sam does not
        read = {"value": loss} if reads and loss is not None else {}
        updates, opt_state = optimizer.update(grads, opt_state, mine, **read)
        return combine(kept(optax.apply_updates(mine, updates)), untrained(params)), opt_state

    def shardings(self) -> tuple[Tree, Tree]:
        """(shardings of the parameters, shardings of the optimizer's state)."""
        stored = self.plan._in_shardings(self.mesh)[0]
        return stored, self.plan.state_shardings(self.optimizer, self.mesh)

    def stepper(
        self,
        run: Callable[..., Tree],
        held: Sequence[Tree] = (),
        left: Sequence[Tree] = (),
        overwrites: bool = False,
    ) -> Stepper:
        """A jitted step(params, opt_state, *held, *batch) -> (params, opt_state, *left, value).

        held, left: the shardings of further arguments and results. overwrites: whether the step may also overwrite
        these arguments.
        """
        arrive = self.plan._in_shardings(self.mesh)[1:]
        stored, state = self.shardings()
        fixed = with_static(self.plan.traced.kept[0])
        fixed_out = with_static(self.plan.traced.kept_out if self.plan.traced.has_aux else ())

        def whole(out: Tree) -> Tree:
            params, *others, value = out
            return fixed(params), *others, fixed_out(value)

        def padded(args: tuple[Tree, ...]) -> tuple[Tree, ...]:
            beside = args[1 : 2 + len(held)]
            params, *batch = self.plan.padded((args[0], *args[2 + len(held) :]))
            return params, *beside, *batch

        return Stepper(
            run=run,
            in_shardings=(stored, state, *held, *arrive),
            out_shardings=(stored, state, *left, self.plan._returned(self.mesh)),
            donate=tuple(range(2 + overwrites * len(held))) if self.donate else (),
            whole=whole,
            padded=padded if self.plan.traced.padding else tuple,
        )
