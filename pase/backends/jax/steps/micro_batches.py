"""A step with micro-batches: computes loss and gradients one micro-batch at a time and sums them in a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.frontends.jax.leaves import arrays, combine, trained
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import NamedSharding

    from pase.backends.jax.one_program import OneProgramPlan

__all__ = [
    "MicroBatch",
    "micro_batch_stack",
    "stacked_outs",
    "summed",
    "threads_of",
    "writes_parameters",
    "written",
]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The functions of one micro-batch.

    graded: f(params, *batch) -> (value, gradients). If random numbers are drawn for it, it takes the micro-batch's
    number too, as ``micro``, and if it reads sums over the whole batch, these, as ``shares``.
    count: f(params, *batch) -> the micro-batch's own sums over the batch; it takes ``micro``, too.
    """

    graded: Callable[..., Tree]
    count: Callable[..., Mapping[str, Array]] | None = None


def summed(plan: OneProgramPlan, each: MicroBatch, kept: Tree, mesh: JaxMesh) -> Callable[..., Tree]:
    """f(params, *batch) -> (value, gradients): those of the whole batch, from the plan's micro-batches, which run one
    after another. kept: the shardings of the gradients.
    """
    import jax
    import jax.numpy as jnp

    if plan.accumulate == 1:
        return each.graded
    k, arrives = plan.accumulate, jax.tree.leaves(plan._in_shardings(mesh)[1:])
    split = [full != part for full, part in zip(*map(plan.input_shapes, (True, False)), strict=True)]
    threads, n = threads_of(plan), len(plan.traced.param_paths)

    def constrained(grads: Tree) -> Tree:
        return jax.tree.map(jax.lax.with_sharding_constraint, grads, kept)

    def mean(params: Tree, *batch: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(arrays(batch))
        weights, form = jax.tree.flatten(arrays(params))
        stacked = [
            micro_batch_stack(x, k, s, mesh) for x, s, on in zip(leaves, arrives, split, strict=True) if on
        ]

        def arguments(here: Sequence[Array], mine: Sequence[Array], states: Sequence[Array]) -> Tree:
            iteration = iter(mine)
            whole = [*here, *(next(iteration) if on else x for x, on in zip(leaves, split, strict=True))]
            for (i, _), state in zip(threads, states, strict=True):
                whole[n + i] = state
            mine_of = combine(jax.tree.unflatten(form, whole[:n]), params)
            return mine_of, *combine(jax.tree.unflatten(tree, whole[n:]), batch)

        def numbered(number: Array) -> Tree:
            return {"micro": number} if plan.traced.drawn else {}

        def counted(given: Tree) -> Mapping[str, Array]:
            assert each.count is not None
            number, mine = given
            return each.count(*arguments(weights, mine, start), **numbered(number))

        start = [(*weights, *leaves)[n + i] for i, _ in threads]
        known = {}
        if plan.reads_totals:
            known["shares"] = plan.totals(None).of_batch(jax.lax.map(counted, (jnp.arange(k), stacked)))

        def body(so_far: Tree, given: Tree) -> Tree:
            (total, loss, states), (number, mine) = so_far, given
            # Without the barrier, XLA hoists all-gathers of parameters out of the loop and keeps the gathered arrays.
            here, mine = jax.lax.optimization_barrier((weights, mine))
            value, grads = each.graded(*arguments(here, mine, states), **numbered(number), **known)
            total = constrained(jax.tree.map(jnp.add, total, grads))
            outs = jax.tree.leaves(arrays(value))
            return (total, loss + outs[0], [outs[j] for _, j in threads]), outs[1:]

        zeros = constrained(jax.tree.map(jnp.zeros_like, trained(arrays(params))))
        loss = jnp.zeros((), plan.traced.jaxpr.out_avals[0].dtype)
        (grads, loss, states), rest = jax.lax.scan(
            body,
            (zeros, loss, start),
            (jnp.arange(k), stacked),
        )
        loss, grads = jax.tree.map(plan.of_batch, (loss, grads))
        return (stacked_outs(plan, [loss, *rest], states) if plan.traced.has_aux else loss), grads

    return mean


def micro_batch_stack(x: Array, k: int, sharding: NamedSharding, mesh: JaxMesh) -> Array:
    """An array of the batch as k stacked micro-batches."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    # A micro-batch is every k-th example, so each device already has its own part of each micro-batch.
    x = jnp.swapaxes(x.reshape(x.shape[0] // k, k, *x.shape[1:]), 0, 1)
    spec = PartitionSpec(None, *sharding.spec)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def threads_of(plan: OneProgramPlan) -> list[tuple[int, int]]:
    """(leaf of the batch, leaf of the function's result) for each value that a step passes to the next.

    Parameters that the function writes have negative indices, counted back from the batch: -1 is the last parameter.
    """
    n = len(plan.traced.param_paths)
    return [(i - n, j) for i, j in sorted(plan.traced.carried.items())]


def writes_parameters(plan: OneProgramPlan) -> bool:
    """Whether the loss function writes parameters, as modules with spectral norm do."""
    return any(i < 0 for i, _ in threads_of(plan))


def written(plan: OneProgramPlan, params: Tree, value: Tree) -> Tree:
    """The parameters with the values that the loss function wrote. value: what the loss function returned."""
    import jax

    if not writes_parameters(plan):
        return params
    leaves, tree = jax.tree.flatten(arrays(params))
    outs = jax.tree.leaves(arrays(value))
    for i, j in threads_of(plan):
        if i < 0:
            leaves[i] = outs[j]
    return combine(jax.tree.unflatten(tree, leaves), params)


def stacked_outs(plan: OneProgramPlan, outs: Sequence[Tree], states: Sequence[Tree]) -> Tree:
    """(loss, aux), where aux is stacked over micro-batches, except that threaded values are the last ones.

    outs: the result leaves, stacked over micro-batches. states: the last values of the threaded leaves.
    """
    import jax

    last = list(outs)
    for (_, j), state in zip(threads_of(plan), states, strict=True):
        last[j] = state
    return combine(jax.tree.unflatten(plan.traced.out_tree, last), plan.traced.kept_out)
