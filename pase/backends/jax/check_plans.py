"""``plan.jax.check`` for plans without stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pase.backends.jax.check import CheckedProgram, JaxSteps, check_of
from pase.backends.jax.check_reference import StepNumbers, Unsharded, compared, rounded_differently
from pase.backends.jax.plan import Against
from pase.backends.jax.spmd.values import NotManual
from pase.frontends.jax.leaves import arrays, static
from pase.frontends.jax.types import Jaxpr
from pase.frontends.jax.versions import jaxprs_inside
from pase.plan.gradient_check import GradientCheck, GradientReference
from pase.plan.gradient_lines import CheckLines
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax.sharding import Mesh as JaxMesh

    from pase.backends.jax.one_program import OneProgramPlan
    from pase.backends.jax.spmd.lower import Lowering

__all__ = ["check_plan", "coarsest"]

_WORDS = {"manual": "in the manual lowering", "annotated": "in the annotated lowering (XLA's partitioner)"}


def check_plan(
    plan: OneProgramPlan,
    params: Tree,
    batch: tuple[Tree, ...],
    mesh: JaxMesh,
    ways: Sequence[Lowering],
    against: Against,
    lines: CheckLines,
) -> GradientCheck:
    """Check a plan without stages. ways: the lowerings to try, in order."""
    remarks: list[str] = []
    if plan.delays and ways[0] != "annotated":
        remarks.append(
            "the plan's bucket plan sends or applies gradients in later steps, but the checked step applies each "
            "gradient at once"
        )
    placed, *placed_batch = _placed(plan, params, batch, mesh)
    way, run = _lowered(plan, mesh, ways, (placed, *placed_batch))
    program = _program(plan, run, placed, tuple(placed_batch), _WORDS[way])
    return check_of(
        program,
        plan.traced,
        plan.logical_mesh.devices,
        partial(_reference, plan, mesh, way, against, (params, *batch), remarks),
        remarks,
        lines,
    )


def _program(
    plan: OneProgramPlan,
    run: Callable[..., tuple[Tree, Tree]],
    params: Tree,
    batch: tuple[Tree, ...],
    lowering: str,
) -> CheckedProgram:
    import jax

    traced = plan.traced
    leaves = jax.tree.leaves(params)
    mine = [k for k, x in enumerate(leaves) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
    return CheckedProgram(
        run=run,
        params=params,
        batch=batch,
        names=tuple(traced.param_paths[k] for k in mine),
        owners=tuple(range(len(mine))),
        own_shapes=tuple(tuple(traced.unpadded.get(traced.param_paths[k], leaves[k].shape)) for k in mine),
        lowering=lowering,
        coarsest=coarsest(traced.jaxpr.jaxpr),
    )


def coarsest(jaxpr: Jaxpr) -> float:
    """The spacing of numbers just above 1 in the coarsest floating-point dtype of a program."""
    import jax.numpy as jnp

    def dtypes(j: Jaxpr) -> Iterator[np.dtype]:
        for v in (*j.invars, *(v for eqn in j.eqns for v in eqn.outvars)):
            yield v.aval.dtype
        for eqn in j.eqns:
            for inner in jaxprs_inside(eqn):
                yield from dtypes(inner)

    found = {d for d in dtypes(jaxpr) if jnp.issubdtype(d, jnp.inexact)}
    return max(float(jnp.finfo(d).eps) for d in found)


def _placed(plan: OneProgramPlan, params: Tree, batch: tuple[Tree, ...], mesh: JaxMesh) -> tuple[Tree, ...]:
    """The arrays of (params, *batch) in the plan's layouts. If all of them already are, nothing is copied."""
    import jax

    given = arrays(plan.padded((params, *batch)))
    plan.checked(given, full=True)
    wanted = plan._in_shardings(mesh)

    def there(x: Tree, sharding: Tree) -> bool:
        return isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)

    if all(jax.tree.leaves(jax.tree.map(there, given, wanted))):
        return given
    return arrays(plan.device_put(params, *batch, mesh=mesh))


def _lowered(
    plan: OneProgramPlan, mesh: JaxMesh, ways: Sequence[Lowering], args: tuple[Tree, ...]
) -> tuple[Lowering, Callable[..., tuple[Tree, Tree]]]:
    """(The first lowering that is possible, the compiled step on placed arrays)."""
    *first, last = ways
    for way in first:
        try:
            return way, _compiled(plan, mesh, way, args)
        except NotManual as e:
            warnings.warn(e.left, stacklevel=4)
    return last, _compiled(plan, mesh, last, args)


def _compiled(
    plan: OneProgramPlan, mesh: JaxMesh, way: Lowering, args: tuple[Tree, ...]
) -> Callable[..., tuple[Tree, Tree]]:
    """f(params, *batch) -> (results of the user's function, gradients): the step without its update."""
    import jax

    with warnings.catch_warnings():
        if plan.delays:  # the check has its own remark about it
            warnings.filterwarnings("ignore", message="the plan's bucket plan is not in this step")
        graded = plan.value_and_grad(mesh, lowering=way)

    def step(params: Tree, *batch: Tree) -> tuple[Tree, Tree]:
        value, grads = graded(params, *batch)
        return arrays(value), grads

    jitted = jax.jit(
        step,
        in_shardings=plan._in_shardings(mesh),
        out_shardings=(plan._returned(mesh), plan.gradient_shardings(mesh)),
    )
    return jitted.lower(*args).compile()  # type: ignore[no-any-return]


def _reference(
    plan: OneProgramPlan,
    mesh: JaxMesh,
    way: Lowering,
    against: Against,
    given: tuple[Tree, ...],
    remarks: list[str],
    steps: JaxSteps,
) -> GradientReference | str:
    """Another program's gradients at the first point of the lines, or a text that says why there are none."""
    if against == "none":
        return "not asked for"
    why = "not asked for"
    if against in ("auto", "unsharded"):
        alone = Unsharded(
            traced=plan.traced,
            fixed=static(given),
            batch=arrays(given[1:]),
            device=mesh.devices.flat[0],
            micro_batches=plan.accumulate,
            whole=plan.unpadded,
            mean=plan.sums.mean,
        )
        found = alone.compared(steps, remarks)
        if not isinstance(found, str) or against == "unsharded":
            return found
        why = found
    other = _by_other_lowering(plan, mesh, way, steps)
    return other if not isinstance(other, str) else f"{why}; {other}"


def _by_other_lowering(
    plan: OneProgramPlan, mesh: JaxMesh, way: Lowering, steps: JaxSteps
) -> GradientReference | str:
    import jax

    if hasattr(plan, "pipeline"):
        return "the circular schedule has one lowering"
    other: Lowering = "annotated" if way == "manual" else "manual"
    program = steps.program
    args = (steps.whole(steps.start), *program.batch)
    try:
        run = _compiled(replace(plan, hoisted="none", schedule=None), mesh, other, args)
    except NotManual:
        return "this program has no manual lowering"
    both = [run(*args), run(*rounded_differently(args, program.coarsest))]
    (theirs, too) = [StepNumbers(results=jax.tree.leaves(v), gradients=jax.tree.leaves(g)) for v, g in both]
    mine = StepNumbers(results=steps.results, gradients=steps.gradients)
    return compared(steps, plan.traced, f"the plan {_WORDS[other]}", False, mine, theirs, too)
