"""A plan in stages for a function of Flax NNX modules that writes no Variables.

A model in stages is spread over several groups of devices, with stacks of layers cut between them, so it is not a
module that could be called. ``device_put`` turns a module into a ``StagedModel``, and ``gathered`` turns it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.backends.jax.plan import Against, JaxPlan
from pase.backends.jax.spmd.lower import Lowering
from pase.frontends.jax.modules import ModuleFunction
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Device as JaxDevice
    from optax import GradientTransformation

    from pase.plan.gradient_check import GradientCheck
    from pase.plan.gradient_lines import CheckLines

__all__ = ["StagedModel", "StagedModulePlan"]


@dataclass(frozen=True, eq=False)
class StagedModel:
    """The arrays of a model on the devices of its stages. params: the trained parameters."""

    params: Tree
    state: Tree
    """The other Variables, which are only read."""


@dataclass(frozen=True, kw_only=True)
class StagedModulePlan(JaxPlan[Tree, "Callable[..., tuple[Tree, Tree, Tree]]"]):
    """A plan in stages for a function of Flax NNX modules.

    Its functions take the ``StagedModel`` that ``device_put`` returns in place of the model.
    """

    inner: JaxPlan[Tree, Tree]
    """The plan of the pure function (``pase.frontends.jax.modules``)."""
    modules: ModuleFunction

    def mesh(self, devices: Sequence[JaxDevice] | None = None) -> Tree:
        return self.inner.mesh(devices)

    def device_put(self, *args: Tree, mesh: Tree = None) -> tuple[Tree, ...]:
        """(model as a ``StagedModel``, *batch) where the plan stores them. The model may be one already."""
        model, *batch = args
        if isinstance(model, StagedModel):
            given = (model.params, *batch, model.state)
        else:
            given = tuple(self.modules.open_all(args).arguments)
        params, *batch, state = self.inner.device_put(*given, mesh=mesh)
        return StagedModel(params, state), *batch

    def gathered(self, tree: Tree) -> Tree:
        """A ``StagedModel`` as a module, or another tree such as an optimizer's state with cut stacks joined.

        The arrays are on the host.
        """
        if not isinstance(tree, StagedModel):
            return self.inner.gathered(tree)
        params, state = self.inner.gathered(tree.params), self.inner.gathered(tree.state)
        return self.modules.rebuilt(params, (), self.modules.first(1, params, state))[0]

    def init(self, optimizer: GradientTransformation, model: StagedModel, mesh: Tree = None) -> Tree:
        return self.inner.init(optimizer, model.params, mesh)

    def loss(self, mesh: Tree = None, *, lowering: Lowering = "auto") -> Callable[..., Tree]:
        run = self.inner.loss(mesh, lowering=lowering)
        return lambda model, *batch: self._value(run(model.params, *batch, model.state))

    def value_and_grad(
        self, mesh: Tree = None, *, lowering: Lowering = "auto"
    ) -> Callable[..., tuple[Tree, Tree]]:
        run = self.inner.value_and_grad(mesh, lowering=lowering)

        def graded(model: StagedModel, *batch: Tree) -> tuple[Tree, Tree]:
            value, grads = run(model.params, *batch, model.state)
            return self._value(value), grads

        return graded

    def checked_along(
        self, lines: CheckLines, given: tuple[Tree, ...], mesh: Tree, lowering: Lowering, against: Against
    ) -> GradientCheck:
        model, *batch = given
        return self.inner.checked_along(lines, (model.params, *batch, model.state), mesh, lowering, against)

    def plain_step(
        self, optimizer: GradientTransformation, mesh: Tree, donate: bool, lowering: Lowering
    ) -> Callable[..., tuple[Tree, Tree, Tree]]:
        """step(model, opt_state, *batch) -> (model, opt_state, loss)."""
        run = self.inner.plain_step(optimizer, mesh, donate, lowering)

        def step(model: StagedModel, opt_state: Tree, *batch: Tree) -> tuple[Tree, Tree, Tree]:
            params, opt_state, value = run(model.params, opt_state, *batch, model.state)
            return StagedModel(params, model.state), opt_state, self._value(value)

        return step

    def _value(self, value: Tree) -> Tree:
        return self.modules.returned(value, isinstance(value, tuple))[0]
