"""``plan.jax.check`` for plans in stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.backends.jax.check import CheckedProgram, JaxSteps, check_of
from pase.backends.jax.check_plans import coarsest
from pase.backends.jax.check_reference import Unsharded
from pase.backends.jax.pipeline.arrays import is_cut
from pase.backends.jax.plan import Against
from pase.frontends.jax.leaves import arrays, static
from pase.plan.gradient_check import GradientCheck, GradientReference
from pase.plan.gradient_lines import CheckLines
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.backends.jax.pipeline.placement import StagePlacement

__all__ = ["StagedGradient", "check_stages"]

_ONE_LOWERING = "stages have one lowering"


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedGradient:
    """A step in stages, with what it is checked on.

    graded: f(params, *batch) -> (value, gradients). params, batch: the user's arguments. placed: (params, *batch) where
    the plan stores them. devices, micro_batches: their numbers in the whole step.
    """

    graded: Callable[..., tuple[Tree, Tree]]
    params: Tree
    batch: tuple[Tree, ...]
    placed: tuple[Tree, ...]
    devices: int
    micro_batches: int


def check_stages(
    placement: StagePlacement, step: StagedGradient, against: Against, lines: CheckLines
) -> GradientCheck:
    """Check a plan in stages."""
    import jax

    pipeline = placement.plan
    traced = pipeline.traced

    def run(params: Tree, *batch: Tree) -> tuple[Tree, Tree]:
        value, grads = step.graded(params, *batch)
        return arrays(value), grads

    mine, *given = arrays(step.placed)
    leaves = [
        (path, x)
        for path, x in zip(traced.param_paths, jax.tree.leaves(mine, is_leaf=is_cut), strict=True)
        if jax.numpy.issubdtype(jax.tree.leaves(x)[0].dtype, jax.numpy.inexact)
    ]
    parts = [(i, part) for i, (_, x) in enumerate(leaves) for part in jax.tree.leaves(x)]
    program = CheckedProgram(
        run=run,
        params=mine,
        batch=tuple(given),
        names=tuple(path for path, _ in leaves),
        owners=tuple(i for i, _ in parts),
        own_shapes=tuple(tuple(x.shape) for _, x in parts),
        lowering="in stages",
        coarsest=coarsest(traced.jaxpr.jaxpr),
    )
    fixed, one = static((step.params, *step.batch)), placement.grid.flat[0]

    def reference(steps: JaxSteps) -> GradientReference | str:
        if against == "none":
            return "not asked for"
        if against == "lowering":
            return _ONE_LOWERING
        alone = Unsharded(
            traced=traced,
            fixed=fixed,
            batch=arrays(step.batch),
            device=one,
            micro_batches=step.micro_batches,
            whole=pipeline.gathered,
            mean=pipeline.splits[0].sums.mean,
        )
        found = alone.compared(steps, remarks)
        return f"{found}; {_ONE_LOWERING}" if isinstance(found, str) else found

    remarks: list[str] = []
    return check_of(program, traced, step.devices, reference, remarks, lines)
