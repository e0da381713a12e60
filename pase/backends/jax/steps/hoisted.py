"""A step that gathers its parameters once, and reduces their gradients once or after each micro-batch.

The whole step is one ``shard_map``. One walk over the jaxpr finds the parameters in the form that their readers need,
and drops everything else. This is the program of the all-gathers; its transpose is the program of the gradient
reductions. Between the two, the walk runs for each micro-batch with the gathered parameters and adds up the unreduced
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
    from jax import Array

    from pase.backends.jax.ops.totals import Totals
    from pase.backends.jax.spmd.lower import Manual
    from pase.local.types import LocalProgram

__all__ = ["StepGathers", "hoisted_value_and_grad", "step_gathers"]


@dataclass(frozen=True, kw_only=True)
class StepGathers:
    """The all-gathers of parameters that run once per step.

    run: from parameters and gradient carriers to the parameters in the form that their readers need. form: the tree
    structure of these. numbers: the transfers that they replace. sums: for each, the dtype in which its gradients are
    added; "" if it has none. optional: as in ``Arrivals``.
    """

    run: Callable[[Tree, dict[int, Array]], list[Array]]
    form: Tree
    numbers: frozenset[int]
    sums: tuple[str, ...]
    optional: bool

    def arrivals(self, arrived: Sequence[Array]) -> Arrivals:
        """What a walk receives. arrived: the results of ``run``."""
        import jax

        given = jax.tree.unflatten(self.form, arrived)
        return Arrivals(numbers=self.numbers, given=given, optional=self.optional)

    def smooth(self, arrived: Sequence[Array]) -> list[Array]:
        """Those of the results that have a gradient."""
        return [x for x, s in zip(arrived, self.sums, strict=True) if s]

    def whole(self, arrived: Sequence[Array], smooth: Sequence[Array]) -> list[Array]:
        """The results of ``run``, with others in place of those that have a gradient."""
        return _in_place(smooth, list(map(bool, self.sums)), arrived)

    def zeros(self, arrived: Sequence[Array]) -> list[Array]:
        """The sums of gradients before the first micro-batch."""
        import jax.numpy as jnp

        return [jnp.zeros(x.shape, s) for x, s in zip(arrived, self.sums, strict=True) if s]

    def gradients(self, arrived: Sequence[Array], sums: Sequence[Array]) -> list[Tree]:
        """The gradients of the results of ``run``. sums: of those that have one."""
        summed = self.whole(list(map(_no_gradient, arrived)), sums)
        return [g.astype(x.dtype) if s else g for g, x, s in zip(summed, arrived, self.sums, strict=True)]


def step_gathers(
    program: LocalProgram,
    find: Callable[[Arrivals, Tree, dict[int, Array]], object],
    parameters: Tree,
    carriers: dict[int, Array],
    *,
    optional: bool = False,
) -> StepGathers:
    """The all-gathers that a walk over a local program finds.

    find: runs the walk, from the arrivals to fill, parameters and gradient carriers. parameters, carriers: these, or
    their shapes.
    """
    import jax

    forms: list[Tree] = []
    numbers = frozenset(k for k, t in enumerate(program.transfers) if t.hoisted)

    def finding(parameters: Tree, own: dict[int, Array]) -> list[Array]:
        arrivals = Arrivals(numbers=numbers, optional=optional)
        find(arrivals, parameters, own)
        found, tree = jax.tree.flatten(arrivals.found)
        forms[:] = [tree, jax.tree.leaves(arrivals.wide)]
        return found

    run = called(without_dead_code(jax.make_jaxpr(finding)(parameters, carriers)))
    return StepGathers(
        run=lambda *given: run(*jax.tree.leaves(given)),
        form=forms[0],
        numbers=numbers,
        sums=tuple(forms[1]),
        optional=optional,
    )


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
    gathers = step_gathers(
        manual.program,
        lambda arrivals, held, own: manual.forward([*held, *first], own, arrivals),
        params,
        gradient_carriers,
    )
    arrived, back = jax.vjp(partial(gathers.run, params), gradient_carriers)
    each = plan.hoisted == "gathers" or k == 1  # gradients are reduced over devices after each micro-batch

    def of(mine: Sequence[Array], own: dict[int, Array], micro: Sequence[Array], number: Array) -> Tree:
        given = gathers.arrivals(gathers.whole(arrived, mine))
        outs = manual.forward([*params, *micro], own, given, plan.examples(number), totals)
        return outs[0], outs

    def back_to_parameters(grads: Sequence[Array]) -> dict[int, Array]:
        """The gradients of the gathered parameters, reduced to the parameters' storage layouts."""
        (found,) = back(gathers.gradients(arrived, grads))
        return found  # type: ignore[no-any-return]

    def micro_batch(micro: Sequence[Array], number: Array) -> tuple[list[Array], Tree]:
        value_and_grad = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)
        (_, outs), (there, own) = value_and_grad(gathers.smooth(arrived), gradient_carriers, micro, number)
        return outs, (jax.tree.map(jnp.add, own, back_to_parameters(there)) if each else (there, own))

    stacked = [x for x, on in zip(batch, split, strict=True) if on]
    totals = _totals(manual, params, batch, split) if plan.reads_totals else None
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
    loss = jnp.zeros((), plan.traced.jaxpr.out_avals[0].dtype)
    start = (own if each else (gathers.zeros(arrived), own), loss, [batch[i] for i, _ in threads])
    end: Tree
    end, rest = jax.lax.scan(body, start, (jnp.arange(k), stacked))
    total, loss, states = end
    if not each:
        there, own = total
        total = jax.tree.map(jnp.add, own, back_to_parameters(there))
    return plan.of_batch(loss), rest, states, [plan.of_batch(total[i]) for i in manual.trained]


def _totals(manual: Manual, params: Sequence[Array], batch: Sequence[Array], split: Sequence[bool]) -> Totals:
    """A device's shares of the sums over the whole batch."""
    import jax

    def counted(given: Tree) -> Tree:
        number, mine = given
        return manual.counted([*params, *_in_place(mine, split, batch)], number)

    stacked = [x for x, on in zip(batch, split, strict=True) if on]
    shares = jax.lax.map(counted, (jax.numpy.arange(manual.plan.accumulate), stacked))
    return manual.plan.totals(manual.plan.totals(None).of_batch(shares))


def _in_place(some: Sequence[Tree], chosen: Sequence[bool], others: Sequence[Tree]) -> list[Tree]:
    """``others``, with ``some`` in place of the chosen entries."""
    iteration = iter(some)
    return [next(iteration) if on else x for x, on in zip(others, chosen, strict=True)]


def _no_gradient(x: Array) -> Tree:
    """A gradient of zeros for a value that has no gradient."""
    import jax
    import numpy as np

    if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
        return jax.numpy.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)
