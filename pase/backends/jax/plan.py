"""What ``plan.jax`` is: one interface, however the plan runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from pase.errors import PaseError
from pase.frontends.jax.contexts import without_mesh
from pase.plan.gradient_lines import CheckLines
from pase.pytree import Tree

if TYPE_CHECKING:
    from pathlib import Path

    from jax import Device as JaxDevice
    from optax import GradientTransformation

    from pase.backends.jax.spmd.lower import Lowering
    from pase.backends.jax.steps.stepper import Stepper
    from pase.local.types import LocalProgram
    from pase.plan.gradient_check import GradientCheck

__all__ = ["Against", "CheckedStep", "JaxPlan"]

Against = Literal["auto", "unsharded", "lowering", "none"]
"""What gradients are compared with, in addition to the slope of the loss: the unsharded step, another lowering of the
plan, or nothing. auto: the unsharded step if one device has the memory for it, otherwise another lowering."""

OnMesh = TypeVar("OnMesh")
"""A JAX mesh, or one for each replica."""
StepOf = TypeVar("StepOf")


@dataclass(kw_only=True)
class CheckedStep:
    """The step of ``train_step(optimizer, check=True)``: step(params, opt_state, *batch).

    Its other attributes are those of the wrapped step. check: (params, *batch) -> the check's result. result: the
    result of the first call; None before it.
    """

    step: Tree
    check: Callable[..., GradientCheck]
    result: GradientCheck | None = None

    def __call__(self, params: Tree, opt_state: Tree, *batch: Tree) -> Tree:
        if self.result is None:
            found = self.check(params, *batch)
            found.raise_if_off()
            self.result = found
        return self.step(params, opt_state, *batch)

    def __getattr__(self, name: str) -> Tree:
        return getattr(self.step, name)


class JaxPlan(ABC, Generic[OnMesh, StepOf]):
    """The plan in JAX, as returned by ``plan.jax``.

    A plan runs as one program (``OneProgramPlan``), as one program in which each rank has its stage (``JaxCircular``),
    in stages (``JaxPipeline``), or as replicas of stages (``JaxReplicas``). ``JaxModulePlan`` and ``StagedModulePlan``
    are the same for functions of Flax NNX modules: there, the first argument is the model.

    mesh: one that ``mesh`` returned, by default that of all of jax.devices(). lowering: as in
    ``pase.backends.jax.spmd.lower``. Methods that a plan cannot have raise PaseError.
    """

    kind: ClassVar[str] = "a plan in stages"
    """What the plan is, for the error of a method that it cannot have."""
    instead: ClassVar[str] = "device_put, init, train_step, value_and_grad, loss or gathered"
    """The methods to use in place of those."""

    @abstractmethod
    def mesh(self, devices: Sequence[JaxDevice] | None = None) -> OnMesh:
        """The plan's jax.sharding.Mesh over ``devices``, by default all of jax.devices(). Stages add a first axis for
        the ranks. Replicas have a mesh each."""

    @abstractmethod
    def device_put(self, params: Tree, *batch: Tree, mesh: OnMesh | None = None) -> tuple[Tree, ...]:
        """(params, *batch), or the first of them, as arrays where the plan stores them.

        Modules are copied, not updated. Parameters keep the pytree of the model, except that stages cut stacks of
        layers, and that each replica has its own copy. With several processes, each process must pass the whole arrays.
        """

    @abstractmethod
    def gathered(self, tree: Tree) -> Tree:
        """A tree of parameters, gradients or an optimizer's state in the form of the model, on the host.

        A checkpoint of it can be read under any plan.
        """

    @abstractmethod
    def init(self, optimizer: GradientTransformation, params: Tree, mesh: OnMesh | None = None) -> Tree:
        """The optimizer's state for the trained leaves of these parameters, where the plan stores it.

        For a module, it has the form of ``optimizer.init(nnx.state(model, nnx.Param))``.
        """

    @abstractmethod
    def loss(self, mesh: OnMesh | None = None, *, lowering: Lowering = "auto") -> Callable[..., Tree]:
        """The user's function under the plan: loss(params, *batch) -> scalar, or (scalar, aux).

        As one program, it takes one micro-batch if the step has several, and returns what the model returns if it is
        not trained. By default it has the annotated lowering, because that one can be differentiated and transformed in
        any way. In stages, it takes the whole batch and cannot be differentiated.
        """

    @abstractmethod
    def value_and_grad(
        self, mesh: OnMesh | None = None, *, lowering: Lowering = "auto"
    ) -> Callable[..., tuple[Tree, Tree]]:
        """f(params, *batch) -> (loss, grads), or ((loss, aux), grads) for a loss function that returns more.

        The gradients are those of the trained leaves, where the plan keeps them. If the step has micro-batches, aux is
        stacked over them, except that values threaded by ``carry`` are those of the last micro-batch. In stages, the
        function cannot be jitted.
        """

    @abstractmethod
    def plain_step(
        self, optimizer: GradientTransformation, mesh: OnMesh | None, donate: bool, lowering: Lowering
    ) -> StepOf:
        """``train_step`` without its check."""

    @abstractmethod
    def checked_along(
        self,
        lines: CheckLines,
        given: tuple[Tree, ...],
        mesh: OnMesh | None,
        lowering: Lowering,
        against: Against,
    ) -> GradientCheck:
        """The result of ``check``. given: (params, *batch)."""

    # What only a plan that runs as one program can have

    @property
    def program(self) -> LocalProgram:
        """The local program: what each device computes, and its collectives."""
        raise self._lacks("program")

    @property
    def specs(self) -> tuple[Tree, ...]:
        """(params, *batch) pytrees of PartitionSpec: how parameters are stored and how the batch arrives."""
        raise self._lacks("specs")

    def in_shardings(self, mesh: OnMesh | None = None) -> tuple[Tree, ...]:
        """(params, *batch) pytrees of NamedSharding: how arguments are stored. For a model, an ``nnx.State`` of them;
        None for modules among the other arguments.

        Pass them to jax.jit(in_shardings=…) together with a function of this plan. Warns if no such function was made,
        because the functions contain the rest of the plan.
        """
        raise self._lacks("in_shardings")

    def gradient_shardings(self, mesh: OnMesh | None = None) -> Tree:
        """A pytree of NamedSharding in the form of gradients: how gradients and optimizer state are kept.

        They may be split further than the parameters. The leaf is None for a parameter that is not trained.
        """
        raise self._lacks("gradient_shardings")

    def state_shardings(self, optimizer: GradientTransformation, mesh: OnMesh | None = None) -> Tree:
        """Shardings of the optimizer's state, in the form that ``init`` returns. State that mirrors a parameter is
        stored like its gradient."""
        raise self._lacks("state_shardings")

    def step(
        self, mesh: OnMesh | None = None, *, donate: bool = True, lowering: Lowering = "auto"
    ) -> Callable[..., Tree]:
        """The model itself, jitted under the plan.

        For mode="step", it is the user's own train step(params, opt_state, *batch); for mode="inference", it is
        f(params, *inputs). Values that the next call takes (a train step's state, or values threaded by ``carry`` such
        as a KV cache) are returned in their input layouts, and donated if ``donate``. The Variables that a module
        writes are updated in it.
        """
        raise self._lacks("step")

    @property
    def apply(self) -> Callable[..., Tree]:
        """apply(params, *inputs) of a model that is not trained, on all of jax.devices().

        Its arguments are not donated; ``step()`` donates the threaded ones.
        """
        raise self._lacks("apply")

    @property
    def prefill(self) -> Stepper:
        """For a ``pase.Generation``: prefill(params, *prompt) -> (token, cache), in the layouts that decode expects.

        It runs on all of jax.devices(). For other devices, use ``generation.part_of``.
        """
        raise self._lacks("prefill")

    @property
    def decode(self) -> Stepper:
        """For a ``pase.Generation``: decode(params, token, cache) -> (token, cache). The cache is donated."""
        raise self._lacks("decode")

    def lower_train_step(
        self, optimizer: GradientTransformation, mesh: OnMesh | None = None, *, lowering: Lowering = "auto"
    ) -> Tree:
        """The train step lowered from shapes alone. Call ``.compile()`` on it to see what XLA makes of the plan.

        With delayed updates it is the first step.
        """
        raise self._lacks("lower_train_step")

    def unpadded(self, params: Tree) -> Tree:
        """Parameters, a model, or a tree of the same structure such as gradients, without the plan's padding."""
        raise self._lacks("unpadded")

    def restore(self, path: str | Path, mesh: OnMesh | None = None) -> Tree:
        """The parameters of an orbax checkpoint (of ``StandardCheckpointer``), read directly into the plan's layouts.
        For a module, the model, from a checkpoint of ``nnx.state(model)``.

        Each device reads its part. Raises PaseError if the checkpoint is missing or belongs to another model.
        """
        raise self._lacks("restore")

    def _lacks(self, name: str) -> PaseError:
        return PaseError(f"{self.kind} has none", where=f"plan.jax.{name}", fix=f"use {self.instead}")

    # Training

    def train_step(
        self,
        optimizer: GradientTransformation,
        mesh: OnMesh | None = None,
        *,
        donate: bool = True,
        lowering: Lowering = "auto",
        check: bool = False,
    ) -> StepOf | CheckedStep:
        """step(params, opt_state, *batch) -> (params, opt_state, loss) for any optax optimizer.

        If the loss function returns more, the last result is (loss, aux). Arguments are moved to where the plan stores
        them; params and opt_state are donated. Leaves of params that are not trained are returned unchanged. Values
        threaded by ``carry`` are returned in the layout that the next call expects. With several processes, every
        process calls the step with global arrays, which ``device_put`` makes.

        If the plan's bucket plan applies gradients in later steps (DeFT's), so does the step, with a warning. The
        opt_state that it returns then also holds the gradients that are not applied yet. In stages, it raises PaseError
        if the optimizer's update of one stage needs arrays of another stage.

        check: at the first call, run ``check`` on its arguments first, and raise PaseError if a gradient is off.
        """
        step = self.plain_step(optimizer, mesh, donate, lowering)
        return (
            CheckedStep(step=step, check=partial(self.check, mesh=mesh, lowering=lowering)) if check else step
        )

    @without_mesh()
    def check(
        self,
        params: Tree,
        *batch: Tree,
        mesh: OnMesh | None = None,
        lowering: Lowering = "auto",
        against: Against = "auto",
        seed: int = 0,
        most_lines: int = 50,
        progress: Callable[[str], None] | None = None,
    ) -> GradientCheck:
        """Check that a step under this plan computes the gradient of the model's loss (``docs/how-to/check.md``).

        Along lines in parameter space that start near the given parameters, the loss must change by the integral of
        the gradient. Both come from the plan's own step, so the check works at any size. In addition, gradients are
        compared with those of another program. print() of the result names each parameter that is off. Neither
        parameters nor batch are changed or donated.

        against: the program to compare gradients with. seed: the random seed of the lines. most_lines: the largest
        number of lines, of eight steps each; parameters that no line reaches are reported as undecided. progress:
        called with a line of text before each part of the work.
        """
        lines = CheckLines(seed=seed, most_lines=most_lines, say=progress)
        return self.checked_along(lines, (params, *batch), mesh, lowering, against)
