"""A step that gathers its parameters once, and reduces their gradients once or after each micro-batch.

The whole step is one ``shard_map``. One walk over the jaxpr finds the parameters in the form that their readers need,
and drops everything else. This is the program of the all-gathers; its transpose is the program of the gradient
reductions. Between the two, the walk runs for each micro-batch with the gathered parameters and adds up the unreduced
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pase.backends.jax.spmd.values import Arrivals
from pase.backends.jax.steps.micro_batches import (
    micro_batch_stack,
    stacked_outs,
    threads_of,
    writes_parameters,
)
from pase.errors import PaseError
from pase.frontends.jax.leaves import arrays
from pase.frontends.jax.types import Tree
from pase.frontends.jax.versions import called, without_dead_code

if TYPE_CHECKING:
    import numpy as np
    from jax import Array

    from pase.backends.jax.spmd.lower import Manual

__all__ = ["hoisted_value_and_grad", "no_gradient"]

Gathers = Callable[[dict[int, Tree]], list[Tree]]
"""Gradient carriers -> the parameters in the form that their readers need."""


def hoisted_value_and_grad(manual: Manual) -> Callable[..., Tree]:
    """f(params, *batch) -> (value, gradients): means over the plan's micro-batches, like ``micro_batches.summed``."""
    import jax

    plan, k = manual.plan, manual.plan.accumulate
    if writes_parameters(plan):
        raise PaseError(
            "the loss function writes parameters, so each micro-batch must read them again",
            where=f"once='{plan.hoisted}'",
            fix="compile with once='none'",
        )
    split = [full != part for full, part in zip(*map(plan.input_shapes, (True, False)), strict=True)]
    arrive = jax.tree.leaves(plan._in_shardings(manual.mesh)[1:])
    outs = manual.returns()
    rest = outs[1:] if k == 1 else [jax.sharding.PartitionSpec(None, *s) for s in outs[1:]]
    last = [] if k == 1 else [outs[j] for _, j in threads_of(plan)]
    run = manual.mapped(
        lambda *leaves: _local(manual, leaves, split),
        (outs[0], rest, last, manual.gradient_specs()),
        stacked={len(plan.traced.param_paths) + i for i, on in enumerate(split) if on and k > 1},
    )

    def graded(params: Tree, *batch: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(arrays(batch))
        one = [
            jax.ShapeDtypeStruct((x.shape[0] // k, *x.shape[1:]), x.dtype) if on else x
            for x, on in zip(leaves, split, strict=True)
        ]
        held = plan.checked((params, *jax.tree.unflatten(tree, one)))[: len(plan.traced.param_paths)]
        stacked = [
            micro_batch_stack(x, k, s, manual.mesh) if on else x
            for x, s, on in zip(leaves, arrive, split, strict=True)
        ]
        loss, others, states, grads = run(*held, *stacked)
        value = [loss, *others]
        if k > 1 and plan.traced.has_aux:
            return stacked_outs(plan, value, states), manual.gradients(grads)
        return (loss if k > 1 else manual.value(value)), manual.gradients(grads)

    return graded


def _local(manual: Manual, leaves: Sequence[Array], split: Sequence[bool]) -> Tree:
    """On one device: (loss, other results, results that the next step takes, gradients of the trained leaves)."""
    import jax
    import jax.numpy as jnp

    plan, k, n = manual.plan, manual.plan.accumulate, len(manual.plan.traced.param_paths)
    params, batch = leaves[:n], leaves[n:]
    first = [x[0] if on and k > 1 else x for x, on in zip(batch, split, strict=True)]
    gradient_carriers = manual.gradient_carriers(leaves)
    gathers, tree, wide = _gathers(manual, [*params, *first], gradient_carriers)
    arrived, back = jax.vjp(gathers, gradient_carriers)
    smooth = [bool(w) for w in wide]
    each = plan.hoisted == "gathers" or k == 1  # gradients are reduced over devices after each micro-batch

    def of(mine: Sequence[Array], own: dict[int, Array], micro: Sequence[Array], number: Array) -> Tree:
        held = jax.tree.unflatten(tree, _in_place(mine, smooth, arrived))
        given = Arrivals(numbers=_hoisted_transfers(manual), given=held)
        outs = manual.forward([*params, *micro], own, given, plan.examples(number))
        return outs[0], outs

    def back_to_parameters(grads: Sequence[Array]) -> dict[int, Array]:
        """The gradients of the gathered parameters, reduced to the parameters' storage layouts."""
        iteration = iter(grads)
        whole = [
            next(iteration).astype(x.dtype) if on else no_gradient(x)
            for x, on in zip(arrived, smooth, strict=True)
        ]
        (found,) = back(whole)
        return found  # type: ignore[no-any-return]

    def micro_batch(micro: Sequence[Array], number: Array) -> tuple[list[Array], Tree]:
        mine = [x for x, on in zip(arrived, smooth, strict=True) if on]
        value_and_grad = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)
        (_, outs), (there, own) = value_and_grad(mine, gradient_carriers, micro, number)
        return outs, (jax.tree.map(jnp.add, own, back_to_parameters(there)) if each else (there, own))

    if k == 1:
        outs, total = micro_batch(batch, jnp.int32(0))
        return outs[0], outs[1:], [], [total[i] for i in manual.trained]
    threads = threads_of(plan)

    def body(so_far: Tree, given: Tree) -> Tree:
        (total, loss, states), (number, mine) = so_far, given
        micro = _in_place(mine, split, batch)
        for (i, _), state in zip(threads, states, strict=True):
            micro[i] = state
        outs, grads = micro_batch(micro, number)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        return (total, loss + outs[0], [outs[j] for _, j in threads]), outs[1:]

    own = jax.tree.map(jnp.zeros_like, gradient_carriers)
    there = [jnp.zeros(x.shape, w) for x, w in zip(arrived, wide, strict=True) if w]
    loss = jnp.zeros((), plan.traced.jaxpr.out_avals[0].dtype)
    stacked = [x for x, on in zip(batch, split, strict=True) if on]
    start = (own if each else (there, own), loss, [batch[i] for i, _ in threads])
    end: Tree
    end, rest = jax.lax.scan(body, start, (jnp.arange(k), stacked))
    total, loss, states = end
    if not each:
        there, own = total
        total = jax.tree.map(jnp.add, own, back_to_parameters(there))
    return loss / k, rest, states, [total[i] / k for i in manual.trained]


def _gathers(
    manual: Manual, leaves: Sequence[Array], gradient_carriers: dict[int, Array]
) -> tuple[Gathers, Tree, list[str]]:
    """(the program of the all-gathers, the tree structure of its results, the dtypes in which gradients are added).

    The dtype is empty for a result that has no gradient.
    """
    import jax

    forms: list[Tree] = []

    def finding(own: dict[int, Array]) -> list[Tree]:
        arrivals = Arrivals(numbers=_hoisted_transfers(manual))
        manual.forward(leaves, own, arrivals)
        found, tree = jax.tree.flatten(arrivals.found)
        forms[:] = [tree, jax.tree.leaves(arrivals.wide)]
        return found

    program = without_dead_code(jax.make_jaxpr(finding)(gradient_carriers))

    def gathers(own: dict[int, Array]) -> list[Tree]:
        return called(program)(*jax.tree.leaves(own))

    return gathers, forms[0], forms[1]


def _hoisted_transfers(manual: Manual) -> frozenset[int]:
    return frozenset(k for k, t in enumerate(manual.program.transfers) if t.hoisted)


def _in_place(some: Sequence[Tree], chosen: Sequence[bool], others: Sequence[Tree]) -> list[Tree]:
    """``others``, with ``some`` in place of the chosen entries."""
    iteration = iter(some)
    return [next(iteration) if on else x for x, on in zip(others, chosen, strict=True)]


def no_gradient(x: Array) -> Array | np.ndarray:
    """A gradient of zeros for a value that has no gradient."""
    import jax
    import numpy as np

    if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
        return jax.numpy.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)
