"""What ``plan.jax`` of a trained model has, however the plan runs: a train step, and the check of its gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from pase.frontends.jax.contexts import without_mesh
from pase.plan.gradient_lines import CheckLines
from pase.pytree import Tree

if TYPE_CHECKING:
    from optax import GradientTransformation

    from pase.backends.jax.spmd.lower import Lowering
    from pase.plan.gradient_check import GradientCheck

__all__ = ["Against", "CheckedStep", "JaxTraining"]

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


class JaxTraining(ABC, Generic[OnMesh, StepOf]):
    """A plan in JAX: without stages (``JaxPlan``), in stages (``JaxPipeline``), as replicas (``JaxReplicas``), or one
    of these for a function of Flax NNX modules."""

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
