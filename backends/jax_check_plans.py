"""What ``plan.jax.check`` runs of each kind of plan, and what it compares gradients with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from pase.backends.jax_check import CheckedProgram, JaxSteps, check_of
from pase.backends.jax_values import NotByHand
from pase.files.quantities import bytes_text
from pase.frontends.jax_leaves import arrays, combine, static, value_and_grad
from pase.frontends.jax_types import Jaxpr
from pase.frontends.jax_versions import jaxprs_inside
from pase.frontends.registry import Traced
from pase.ir import named, simplify
from pase.machine import Mesh
from pase.memory.account import memory
from pase.plan.gradient_check import GradientCheck, GradientDifference, GradientReference
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh

    from pase.backends.jax_manual import Lowering
    from pase.backends.to_jax import JaxPlan
    from pase.frontends.from_jax import TracedJax

__all__ = ["Against", "check_plan", "coarsest", "unsharded", "unsharded_bytes"]

Against = Literal["auto", "unsharded", "lowering", "none"]
"""What gradients are compared with, besides the slope of the loss: the unsharded step; another lowering of the plan;
nothing. auto: the unsharded step if one device has the memory for it, else another lowering."""

_WORDS = {"manual": "lowered by hand", "annotated": "lowered by XLA's partitioner"}

_COPIES = 3
"""Gradients that are compared at a time, besides the step's own: the plan's, and the reference's twice."""


def check_plan(
    plan: JaxPlan,
    params: Tree,
    batch: tuple[Tree, ...],
    mesh: JaxMesh,
    ways: Sequence[Lowering],
    against: Against,
    seed: int,
    most_lines: int,
    say: Callable[[str], None] | None,
) -> GradientCheck:
    """Check a plan without stages. ways: lowerings, tried in order."""
    remarks = []
    if plan.delays and ways[0] != "annotated":
        remarks.append(
            "the plan's bucket plan sends or applies gradients in later steps; what was checked is the step that "
            "applies each gradient at once"
        )
    placed, *placed_batch = _placed(plan, params, batch, mesh)
    way, run = _lowered(plan, mesh, ways, (placed, *placed_batch))
    program = _program(plan, run, placed, tuple(placed_batch), _WORDS[way])
    return check_of(
        program,
        plan.traced,
        plan.logical_mesh.devices,
        partial(_reference, plan, mesh, way, against, (params, *batch)),
        remarks,
        seed,
        most_lines,
        say,
    )


def _program(
    plan: JaxPlan,
    run: Callable[..., tuple[Array, Tree]],
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
        one=True,
        lowering=lowering,
        coarsest=coarsest(traced.jaxpr.jaxpr),
    )


def coarsest(jaxpr: Jaxpr) -> float:
    """The spacing of numbers above 1 in the coarsest floating-point dtype of a program."""
    import jax.numpy as jnp

    def dtypes(j: Jaxpr) -> Iterator[np.dtype]:
        for v in (*j.invars, *(v for eqn in j.eqns for v in eqn.outvars)):
            yield v.aval.dtype
        for eqn in j.eqns:
            for inner in jaxprs_inside(eqn):
                yield from dtypes(inner)

    found = {d for d in dtypes(jaxpr) if jnp.issubdtype(d, jnp.inexact)}
    return max(float(jnp.finfo(d).eps) for d in found)


def _placed(plan: JaxPlan, params: Tree, batch: tuple[Tree, ...], mesh: JaxMesh) -> tuple[Tree, ...]:
    """The arrays of both in the plan's layouts. Those that are there already are not copied."""
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
    plan: JaxPlan, mesh: JaxMesh, ways: Sequence[Lowering], args: tuple[Tree, ...]
) -> tuple[Lowering, Callable[..., tuple[Array, Tree]]]:
    """The first lowering that is possible: (which, the compiled step on arrays as placed)."""
    *first, last = ways
    for way in first:
        try:
            return way, _compiled(plan, mesh, way, args)
        except NotByHand as e:
            warnings.warn(e.left, stacklevel=4)
    return last, _compiled(plan, mesh, last, args)


def _compiled(
    plan: JaxPlan, mesh: JaxMesh, way: Lowering, args: tuple[Tree, ...]
) -> Callable[..., tuple[Array, Tree]]:
    """f(params, *batch) -> (loss, gradients), the step without its update."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    with warnings.catch_warnings():
        if plan.delays:  # the check says so itself
            warnings.filterwarnings("ignore", message="the plan's bucket plan is not in this step")
        graded = plan.value_and_grad(mesh, lowering=way)

    def step(params: Tree, *batch: Tree) -> tuple[Array, Tree]:
        value, grads = graded(params, *batch)
        return jax.tree.leaves(value)[0], grads

    jitted = jax.jit(
        step,
        in_shardings=plan._in_shardings(mesh),
        out_shardings=(NamedSharding(mesh, PartitionSpec()), plan.gradient_shardings(mesh)),
    )
    return jitted.lower(*args).compile()  # type: ignore[no-any-return]


def _reference(
    plan: JaxPlan, mesh: JaxMesh, way: Lowering, against: Against, given: tuple[Tree, ...], steps: JaxSteps
) -> GradientReference | str:
    """Gradients at the lines' first point by another program; a text says why there is none."""
    if against == "none":
        return "not asked for"
    fixed, batch = static(given), arrays(given[1:])
    why = "not asked for"
    if against in ("auto", "unsharded"):
        found = unsharded(
            steps, plan.traced, fixed, mesh.devices.flat[0], plan.accumulate, plan.unpadded, batch
        )
        if not isinstance(found, str) or against == "unsharded":
            return found
        why = found
    other = _by_other_lowering(plan, mesh, way, steps)
    return other if not isinstance(other, str) else f"{why}; {other}"


def _by_other_lowering(
    plan: JaxPlan, mesh: JaxMesh, way: Lowering, steps: JaxSteps
) -> GradientReference | str:
    import jax

    if hasattr(plan, "pipeline"):
        return "the circular schedule has one lowering"
    other: Lowering = "annotated" if way == "manual" else "manual"
    program = steps.program
    args = (steps.whole(steps.start), *program.batch)
    try:
        run = _compiled(replace(plan, once="none", schedule=None), mesh, other, args)
    except NotByHand:
        return "this program cannot be lowered by hand"
    rounded = _rounded_differently(args, 0)
    values = [run(*args), run(*rounded)]
    losses, (theirs, too) = [loss for loss, _ in values], [jax.tree.leaves(g) for _, g in values]
    return _compared(steps, f"the plan {_WORDS[other]}", False, losses, steps.gradients, theirs, too)


def unsharded(
    steps: JaxSteps,
    traced: TracedJax,
    fixed: Tree,
    device: object,
    accumulate: int,
    whole: Callable[[Tree], Tree],
    batch: Tree,
) -> GradientReference | str:
    """The gradients of the user's function on one device, if it has the memory; else why not. whole: of a tree like
    parameters as the plan stores it, as the user has it."""
    import jax

    if jax.process_count() > 1:
        return "the unsharded step needs one process that has all arrays"
    needed, free = unsharded_bytes(traced, accumulate), _free_bytes(device)
    if needed > free:
        return f"the unsharded step takes {bytes_text(needed)}, one device has {bytes_text(free)} free"

    def on_one(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: jax.device_put(jax.numpy.asarray(x), device), tree)

    fn = traced.fn if traced.written is None else traced.written.fn
    if fn is None:
        return "the plan has the model's trace, not its function"
    graded = value_and_grad(fn)

    def step(*args: Tree) -> tuple[Array, list[Array]]:
        (loss, _), grads = graded(*combine(args, fixed))
        return loss, jax.tree.leaves(grads)

    args = on_one((whole(steps.whole(steps.start)), *batch))
    compiled = jax.jit(step).lower(*args).compile()
    stats = compiled.memory_analysis()
    if stats is not None and stats.temp_size_in_bytes > _free_bytes(device):
        return f"XLA takes {bytes_text(stats.temp_size_in_bytes)} for the unsharded step, more than one device has free"
    (loss, grads), (loss_too, grads_too) = compiled(*args), compiled(*_rounded_differently(args, 0))
    mine = jax.tree.leaves(whole(steps.gradient_tree))
    return _compared(steps, "the unsharded step", True, (loss, loss_too), on_one(mine), grads, grads_too)


def unsharded_bytes(traced: Traced, accumulate: int) -> float:
    """What the unsharded step and the compared gradients take on one device, by the plan's own account."""
    graph = named(simplify(traced.graph))
    alone = memory(
        graph, Mesh(names=("all",), sizes=(1,)), {n.name: np.full(1, -1, np.int8) for n in graph.nodes}, "sgd"
    )
    return alone.parameters + _COPIES * alone.gradients + accumulate * (alone.activations + alone.buffers)


def _free_bytes(device: object) -> float:
    """Of the device's memory; of the host's for host devices."""
    stats = device.memory_stats()  # type: ignore[attr-defined]
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _rounded_differently(args: tuple[Tree, ...], seed: int) -> tuple[Tree, ...]:
    """The arguments with every floating-point number moved by one unit in its last place, up or down at random."""
    import jax
    import jax.numpy as jnp

    def moved(x: Array, k: int) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        key = jax.random.fold_in(jax.random.key(seed), k)
        up = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 1, -1)
        return (x * (1 + up * jnp.finfo(x.dtype).eps).astype(x.dtype)).astype(x.dtype)

    leaves, tree = jax.tree.flatten(args)
    jitted = jax.jit(moved, static_argnums=1)
    return jax.tree.unflatten(  # type: ignore[no-any-return]
        tree, [jax.device_put(jitted(x, k), x.sharding) for k, x in enumerate(leaves)]
    )


def _compared(
    steps: JaxSteps,
    kind: str,
    exact: bool,
    losses: Sequence[Array],
    mine: Sequence[Array],
    theirs: Sequence[Array],
    rounded: Sequence[Array],
) -> GradientReference:
    """Gradients parameter by parameter. losses, theirs, rounded: the reference's, also with inputs rounded
    differently."""
    import jax
    import jax.numpy as jnp

    def apart(g: Array, r: Array, other: Array) -> tuple[Array, Array, Array]:
        return tuple(jnp.max(jnp.abs(x), initial=0) for x in (g - r, r, other - r))  # type: ignore[return-value]

    compare = jax.jit(apart)
    differences = [
        GradientDifference(
            name=name,
            difference=float(off[0]),
            largest=float(off[1]),
            noise=float(off[2]),
            eps=float(jnp.finfo(r.dtype).eps),
        )
        for name, g, r, other in zip(steps.names, mine, theirs, rounded, strict=True)
        for off in [compare(g, r, other)]
    ]
    there, too = map(float, losses)
    return GradientReference(
        kind=kind,
        exact=exact,
        loss=steps.loss,
        loss_reference=there,
        loss_allowed=16 * abs(too - there) + 32 * float(jnp.finfo(losses[0].dtype).eps) * abs(there),
        differences=tuple(differences),
    )
