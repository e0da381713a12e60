"""``plan.jax`` for functions of Flax NNX modules: the methods take and return the user's modules.

Modules are updated in place, as by ``nnx.jit``: a step writes the new parameters and the new values of all other
Variables into the module that it was given. It also returns that module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from pase.backends.jax.checkpoints import restored
from pase.backends.jax.one_program import OneProgramPlan
from pase.backends.jax.plan import Against, JaxPlan
from pase.backends.jax.spmd.lower import Lowering
from pase.backends.jax.steps.stepper import global_array, host_arrays
from pase.errors import PaseError
from pase.frontends.jax.frontend import TracedJax
from pase.frontends.jax.leaves import trained
from pase.frontends.jax.modules import Advanced, ModuleFunction, has_modules, without_variables
from pase.machine import Mesh
from pase.pytree import Tree

if TYPE_CHECKING:
    from pathlib import Path

    from jax import Device as JaxDevice
    from jax.sharding import Mesh as JaxMesh
    from optax import GradientTransformation

    from pase.backends.jax.steps.delayed import DelayedStepper
    from pase.backends.jax.steps.stepper import Stepper
    from pase.local.types import LocalProgram
    from pase.plan.gradient_check import GradientCheck
    from pase.plan.gradient_lines import CheckLines

__all__ = ["JaxModulePlan", "ModuleStepper"]


@dataclass(frozen=True, kw_only=True)
class JaxModulePlan(JaxPlan["JaxMesh", "ModuleStepper"]):
    """A plan in JAX that runs as one program, for a function of Flax NNX modules.

    Gradients are those of the ``nnx.Param`` Variables of the first argument, in the form that ``nnx.value_and_grad``
    returns.
    """

    kind: ClassVar[str] = "a plan for a function of Flax NNX modules"
    instead: ClassVar[str] = "in_shardings, step or apply"
    inner: OneProgramPlan
    """The plan of the pure function (``pase.frontends.jax.modules``)."""
    modules: ModuleFunction

    @property
    def traced(self) -> TracedJax:
        return self.inner.traced

    @property
    def logical_mesh(self) -> Mesh:
        return self.inner.logical_mesh

    @property
    def program(self) -> LocalProgram:
        return self.inner.program

    def mesh(self, devices: Sequence[JaxDevice] | None = None) -> JaxMesh:
        return self.inner.mesh(devices)

    def in_shardings(self, mesh: JaxMesh | None = None) -> tuple[Tree, ...]:
        params, *batch, state = self.inner.in_shardings(mesh)
        return self.modules.as_states(params, state), *batch

    def gradient_shardings(self, mesh: JaxMesh | None = None) -> Tree:
        return self.modules.with_variables(self.inner.gradient_shardings(mesh))

    def state_shardings(self, optimizer: GradientTransformation, mesh: JaxMesh | None = None) -> Tree:
        return self._as_made(optimizer, self.inner.state_shardings(_transformation(optimizer), mesh))

    def device_put(self, *args: Tree, mesh: JaxMesh | None = None) -> tuple[Tree, ...]:
        import jax

        opened = self.modules.open(*args)
        if self.traced.padding:
            if len(args) < len(self.modules.frames):
                raise PaseError(
                    f"the plan has padded dims, so it must place all {len(self.modules.frames)} arguments at once, not "
                    f"{len(args)}",
                    where="plan.jax.device_put",
                    fix="call device_put(model, *batch)",
                )
            params, *batch, state = self.inner.device_put(*opened.arguments, mesh=mesh)
            return self.modules.rebuilt(params, batch, state)
        where, *_, held = self.inner._in_shardings(mesh)
        params, *batch = self.inner.device_put(opened.params, *opened.batch, mesh=mesh)
        state = jax.tree.map(global_array, opened.state, self.modules.first(len(args), where, held))
        return self.modules.rebuilt(params, batch, state)

    def init(self, optimizer: GradientTransformation, model: Tree, mesh: JaxMesh | None = None) -> Tree:
        opened = self.modules.open(model)
        return self._as_made(optimizer, self.inner.init(_transformation(optimizer), opened.params, mesh))

    def _as_made(self, optimizer: GradientTransformation, state: Tree) -> Tree:
        """The optimizer's state in the form that the optimizer makes from Variables."""
        import jax

        params = self.modules.with_variables(trained(self.inner._shapes()[0]))
        form = jax.tree.structure(jax.eval_shape(optimizer.init, params))
        return jax.tree.unflatten(form, jax.tree.leaves(state))

    def loss(self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto") -> Callable[..., Tree]:
        run = self.inner.loss(mesh, lowering=lowering)
        return lambda *args: self._advanced(args, run)

    def _advanced(self, args: Sequence[Tree], run: Callable[..., Tree]) -> Tree:
        """Run the pure function, update the modules, and return the user's results. run: the pure function."""
        opened = self.modules.open_all(args)
        out, advanced = self.modules.returned(run(*opened.arguments), self.traced.has_aux)
        self.modules.update(opened.modules, advanced)
        return out

    def value_and_grad(
        self, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto"
    ) -> Callable[..., tuple[Tree, Tree]]:
        run = self.inner.value_and_grad(mesh, lowering=lowering)

        def graded(*args: Tree) -> tuple[Tree, Tree]:
            opened = self.modules.open_all(args)
            value, grads = run(*opened.arguments)
            out, advanced = self.modules.returned(value, self.traced.has_aux)
            self.modules.update(opened.modules, advanced)
            return out, self.modules.with_variables(grads)

        return graded

    def checked_along(
        self,
        lines: CheckLines,
        given: tuple[Tree, ...],
        mesh: JaxMesh | None,
        lowering: Lowering,
        against: Against,
    ) -> GradientCheck:
        """Every step of the check starts with the module's current state, including its random streams, and does not
        change it."""
        arguments = tuple(self.modules.open_all(given).arguments)
        return self.inner.checked_along(lines, arguments, mesh, lowering, against)

    def plain_step(
        self, optimizer: GradientTransformation, mesh: JaxMesh | None, donate: bool, lowering: Lowering
    ) -> ModuleStepper:
        """step(model, opt_state, *batch) -> (model, opt_state, loss).

        The model is updated in place and returned. Other modules among the arguments are updated in place too. The
        previous arrays of all modules are donated, as is opt_state.
        """
        step = self.inner.plain_step(_transformation(optimizer), mesh, donate, lowering)
        return ModuleStepper(plan=self, inner=step)

    def lower_train_step(
        self, optimizer: GradientTransformation, mesh: JaxMesh | None = None, *, lowering: Lowering = "auto"
    ) -> Tree:
        return self.inner.lower_train_step(_transformation(optimizer), mesh, lowering=lowering)

    def step(
        self, mesh: JaxMesh | None = None, *, donate: bool = True, lowering: Lowering = "auto"
    ) -> Callable[..., Tree]:
        run = self.inner.step(mesh, donate=donate, lowering=lowering)
        return lambda *args: self._advanced(args, run)

    @cached_property
    def apply(self) -> Callable[..., Tree]:
        return self.step(donate=False)

    def unpadded(self, model: Tree) -> Tree:
        if not has_modules(model):
            return self.modules.with_variables(self.inner.unpadded(without_variables(model)))
        opened = self.modules.open(model)
        return self.modules.rebuilt(self.inner.unpadded(opened.params), (), opened.state)[0]

    def gathered(self, tree: Tree) -> Tree:
        if not has_modules(tree):
            return self.inner.gathered(tree)
        opened = self.modules.open(tree)
        params, state = self.inner.gathered(opened.params), host_arrays(opened.state)
        return self.modules.rebuilt(params, (), state)[0]

    def restore(self, path: str | Path, mesh: JaxMesh | None = None) -> Tree:
        (where, *_, held), (params, *_, state) = self.inner._in_shardings(mesh), self.inner._shapes()
        shapes, shardings = self.modules.as_states(params, state), self.modules.as_states(where, held)
        name = self.traced.graph.name
        return self.modules.of_states(
            restored(path, shapes, shardings, name, "nnx.state(model) of this model")
        )


def _transformation(optimizer: GradientTransformation) -> GradientTransformation:
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise PaseError(
            f"it must be an optax transformation, not {type(optimizer).__name__}",
            where="optimizer",
            fix="for nnx.Optimizer(model, tx, wrt=nnx.Param), give tx; to keep the nnx.Optimizer, write the step with "
            "plan.jax.value_and_grad()",
        )
    return optimizer


@dataclass(frozen=True, kw_only=True)
class ModuleStepper:
    """A jitted train step on modules. ``JaxModulePlan.plain_step`` describes its arguments and results."""

    plan: JaxModulePlan
    inner: Stepper | DelayedStepper
    """The step on arrays."""

    def __call__(self, model: Tree, opt_state: Tree, *batch: Tree) -> tuple[Tree, Tree, Tree]:
        import jax

        if hasattr(opt_state, "tx") and hasattr(opt_state, "opt_state"):
            raise PaseError(
                "it is Flax's nnx.Optimizer, but the step takes the state of an optax transformation",
                where="the optimizer's state",
                fix="start with plan.jax.init(tx, model); to keep the Optimizer, write the step with "
                "plan.jax.value_and_grad()",
            )
        modules = self.plan.modules
        opened = modules.open_all((model, *batch))
        given = without_variables(opt_state)
        params, state, value = self.inner(opened.params, given, *opened.batch, opened.state)
        out, advanced = modules.returned(value, self.plan.traced.has_aux)
        held = None if advanced is None else advanced.state
        modules.update(opened.modules, Advanced(state=held, params=params))
        forms: tuple[Tree, Tree] = jax.tree.structure(given), jax.tree.structure(state)
        if forms[0] == forms[1]:
            state = jax.tree.unflatten(jax.tree.structure(opt_state), jax.tree.leaves(state))
        (updated,) = modules.closed(opened.modules, params)
        return updated, state, out

    def lower(self, model: Tree, opt_state: Tree, *batch: Tree) -> Tree:
        """Lower the step for arrays or shapes without running it. Call ``.compile()`` on the result to compile it."""
        opened = self.plan.modules.open_all((model, *batch))
        return self.inner.lower(opened.params, without_variables(opt_state), *opened.batch, opened.state)
