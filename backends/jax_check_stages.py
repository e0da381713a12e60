"""``plan.jax.check`` of a pipelined plan: its stages run as in a step, and its parameters lie on several meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pase.backends.jax_check import CheckedProgram, JaxSteps, check_of
from pase.backends.jax_check_plans import Against, coarsest, unsharded
from pase.backends.jax_stage_arrays import is_cut
from pase.frontends.jax_leaves import arrays, static
from pase.plan.gradient_check import GradientCheck, GradientReference
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

    from pase.backends.jax_stage_homes import StageHomes

__all__ = ["check_stages"]

_ONE_LOWERING = "stages have one lowering"


def check_stages(
    homes: StageHomes,
    graded: Callable[..., tuple[Tree, Tree]],
    params: Tree,
    batch: tuple[Tree, ...],
    placed: tuple[Tree, ...],
    devices: int,
    micro_batches: int,
    against: Against,
    seed: int,
    most_lines: int,
    say: Callable[[str], None] | None,
) -> GradientCheck:
    """Check a plan in stages. graded: f(params, *batch) -> (value, gradients). params, batch: as the user has them;
    placed: both where the plan stores them. devices, micro_batches: of the whole step."""
    import jax

    pipeline = homes.plan
    traced = pipeline.traced

    def run(params: Tree, *batch: Tree) -> tuple[Array, Tree]:
        value, grads = graded(params, *batch)
        return jax.tree.leaves(value)[0], grads

    mine, *given = arrays(placed)
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
        one=False,
        lowering="in stages",
        coarsest=coarsest(traced.jaxpr.jaxpr),
    )
    fixed, one = static((params, *batch)), homes.grid.flat[0]

    def reference(steps: JaxSteps) -> GradientReference | str:
        if against == "none":
            return "not asked for"
        if against == "lowering":
            return _ONE_LOWERING
        whole = arrays(batch)
        found = unsharded(steps, traced, fixed, one, micro_batches, pipeline.gathered, whole)
        return f"{found}; {_ONE_LOWERING}" if isinstance(found, str) else found

    return check_of(program, traced, devices, reference, (), seed, most_lines, say)
