"""The references of ``plan.jax.check``: the user's function on one device, or another program of the same model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pase.backends.jax.check import JaxSteps
from pase.errors import PaseError
from pase.files.quantities import bytes_text
from pase.frontends.jax.blocks import split_inputs
from pase.frontends.jax.leaves import arrays, combine, value_and_grad
from pase.frontends.registry import Traced
from pase.ir import named, simplify
from pase.machine import Mesh
from pase.memory.account import memory
from pase.plan.gradient_check import GradientDifference, GradientReference
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

    from pase.frontends.jax.frontend import TracedJax

__all__ = ["StepNumbers", "Unsharded", "compared", "rounded_differently", "unsharded_bytes"]

_COPIES = 3
"""Sets of gradients that exist at the same time besides the step's own: the plan's, and the reference's two."""


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What a step returns, leaf by leaf.

    results: those of the user's function, the loss first. gradients: those of the trained leaves.
    """

    results: Sequence[Array]
    gradients: Sequence[Array]


@dataclass(frozen=True, kw_only=True)
class Unsharded:
    """The user's function on one device, with the plan's number of micro-batches.

    fixed: the static leaves of the arguments. batch: the arrays of the whole batch. whole: converts a tree of the
    parameters' structure from the form in which the plan stores it to the user's form.
    """

    traced: TracedJax
    fixed: Tree
    batch: Tree
    device: object
    micro_batches: int
    whole: Callable[[Tree], Tree]
    mean: bool = True
    """Whether the whole batch's loss is the mean of the micro-batches' own."""

    def compared(self, steps: JaxSteps, remarks: list[str]) -> GradientReference | str:
        """Compare it with the steps' gradients at their first point, or return a text that says why it cannot run.

        Adds a remark if the mean loss of the micro-batches is not the loss of the whole batch.
        """
        import jax

        if jax.process_count() > 1:
            return "the unsharded step needs one process that has all arrays"
        needed, free = unsharded_bytes(self.traced), _free_bytes(self.device)
        many = self.micro_batches
        if many > 1 and (self.traced.drawn or not self.mean):
            # The user's function on a micro-batch would draw or divide by other numbers than the step, so it takes the
            # whole batch.
            if self.traced.carried or self.traced.has_aux:
                what = "draw their part of the batch's random numbers" if self.traced.drawn else "share a sum"
                return f"micro-batches {what}, and they return more than the loss"
            needed, many = many * needed, 1
        if needed > free:
            return (
                f"the unsharded step takes {bytes_text(needed)}, but one device has {bytes_text(free)} free"
            )
        if self._fn is None:
            return "the plan has only the model's trace, not its function"
        args = (self._here(self.whole(steps.whole(steps.start))), *self._here(self.batch))
        both = replace(self, micro_batches=many)._both(args, steps.coarsest)
        if isinstance(both, str):
            return both
        mine = StepNumbers(
            results=steps.results, gradients=self._here(jax.tree.leaves(self.whole(steps.gradient_tree)))
        )
        made = compared(steps, self.traced, _kind(many), True, mine, *both)
        if many > 1 and many * needed <= free:
            self._remark(args, made, remarks)
        return made

    def _both(self, args: Tree, coarsest: float) -> tuple[StepNumbers, StepNumbers] | str:
        """(The step's numbers, those with all inputs rounded differently), or a text if memory does not suffice."""
        import jax

        run = jax.jit(self._step).lower(*next(self._micro_batches(args))).compile()
        stats, free = run.memory_analysis(), _free_bytes(self.device)
        if stats is not None and stats.temp_size_in_bytes > free:
            needs = bytes_text(stats.temp_size_in_bytes)
            return f"XLA takes {needs} for the unsharded step, which is more than one device has free"
        return self._numbers(run, args), self._numbers(run, rounded_differently(args, coarsest))

    @cached_property
    def _fn(self) -> Callable[..., Tree] | None:
        """The user's own function, without padding."""
        return self.traced.fn if self.traced.written is None else self.traced.written.fn

    def _here(self, tree: Tree) -> Tree:
        import jax

        return jax.tree.map(lambda x: jax.device_put(jax.numpy.asarray(x), self.device), tree)

    def _step(self, *args: Tree) -> tuple[list[Array], list[Array]]:
        """(What the function returns; gradients), leaf by leaf."""
        import jax

        assert self._fn is not None
        value, grads = value_and_grad(self._fn)(*combine(args, self.fixed))
        return jax.tree.leaves(arrays(value)), jax.tree.leaves(grads)

    def _micro_batches(self, args: Tree) -> Iterator[tuple[Tree, ...]]:
        """The arguments with each micro-batch in turn. A micro-batch consists of every k-th example."""
        import jax

        k = self.micro_batches
        if k == 1:
            yield args
            return
        params, *batch = args
        leaves, tree = jax.tree.flatten(tuple(batch))
        split = split_inputs(self.traced)
        for i in range(k):
            mine = [x[i::k] if on else x for x, on in zip(leaves, split, strict=True)]
            yield params, *jax.tree.unflatten(tree, mine)

    def _numbers(self, run: Callable[..., tuple[list[Array], list[Array]]], args: Tree) -> StepNumbers:
        """The numbers of a step: losses and gradients are means over its micro-batches.

        Each micro-batch starts with the state that the one before it leaves. All results except for the loss are those
        of the last micro-batch.
        """
        import jax
        import jax.numpy as jnp

        k, sums = self.micro_batches, None
        losses: list[Array] = []
        results: list[Array] = []
        state: dict[int, Array] = {}
        for given in self._micro_batches(args):
            leaves, tree = jax.tree.flatten(given)
            for i, x in state.items():
                leaves[i] = x
            results, gradients = run(*jax.tree.unflatten(tree, leaves))
            state = {i: results[j] for i, j in self.traced.carried.items()}
            losses.append(results[0])
            sums = gradients if sums is None else list(map(jnp.add, sums, gradients))
        assert sums is not None
        return StepNumbers(
            results=[sum(losses[1:], losses[0]) / k, *results[1:]], gradients=[g / k for g in sums]
        )

    def _remark(self, args: Tree, made: GradientReference, remarks: list[str]) -> None:
        """Add a remark if the whole batch has another loss."""
        import jax

        whole = float(jax.jit(lambda *a: self._step(*a)[0][0])(*args))
        k = self.micro_batches
        if not abs(whole - made.loss_reference) <= made.loss_allowed:
            remarks.append(
                f"the loss of the whole batch at once is {whole:.6g}, but the mean over {k} micro-batches is "
                f"{made.loss_reference:.6g}: the loss draws random numbers, or it is not a mean over examples"
            )


def _kind(micro_batches: int) -> str:
    return "the unsharded step" + (f" in {micro_batches} micro-batches" if micro_batches > 1 else "")


def unsharded_bytes(traced: Traced) -> float:
    """Bytes on one device of the unsharded step on the traced batch (a micro-batch) and of the compared gradients.

    They are those of the plan's memory model (``pase.memory.account``).
    """
    graph = named(simplify(traced.graph))
    alone = memory(
        graph, Mesh(names=("all",), sizes=(1,)), {n.name: np.full(1, -1, np.int8) for n in graph.nodes}, "sgd"
    )
    return alone.parameters + _COPIES * alone.gradients + alone.activations + alone.buffers


def _free_bytes(device: object) -> float:
    """Free bytes of the device's memory, or of the host's memory if the device reports none."""
    stats = device.memory_stats()  # type: ignore[attr-defined]
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def rounded_differently(args: tuple[Tree, ...], coarsest: float) -> tuple[Tree, ...]:
    """The arguments with every floating-point number moved by one unit in its last place, up or down at random.

    coarsest: the spacing of the coarsest dtype that the program computes in. A number of a finer dtype moves by a unit
    of the coarsest one. Otherwise, a number that the program rounds to eight bits would mostly be rounded as before.
    """
    import jax
    import jax.numpy as jnp

    def moved(x: Array, key: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        bits = jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), x.shape, jnp.uint8)
        up = jnp.where(bits & 1 == 1, 1, -1)
        return (x * (1 + up * max(float(jnp.finfo(x.dtype).eps), coarsest)).astype(x.dtype)).astype(x.dtype)

    leaves, tree = jax.tree.flatten(args)
    keys = [np.array([0, k], np.uint32) for k in range(len(leaves))]
    found = jax.jit(lambda xs, keys: list(map(moved, xs, keys)))(leaves, keys)
    return jax.tree.unflatten(  # type: ignore[no-any-return]
        tree, [jax.device_put(x, was.sharding) for x, was in zip(found, leaves, strict=True)]
    )


def compared(
    steps: JaxSteps,
    traced: TracedJax,
    kind: str,
    exact: bool,
    mine: StepNumbers,
    theirs: StepNumbers,
    rounded: StepNumbers,
) -> GradientReference:
    """Compare gradients parameter by parameter, and the state that the step leaves.

    mine: the numbers of the checked step. theirs: those of the reference. rounded: those of the reference with inputs
    rounded differently.
    """
    paths = (*traced.param_paths, *traced.input_paths)

    def state(of: StepNumbers) -> list[Array]:
        return [of.results[j] for j in traced.carried.values()]

    there, too = (float(n.results[0]) for n in (theirs, rounded))
    eps = float(np.finfo(theirs.results[0].dtype).eps)
    return GradientReference(
        kind=kind,
        exact=exact,
        loss=steps.loss,
        loss_reference=there,
        loss_allowed=16 * abs(too - there) + 32 * eps * abs(there),
        differences=_differences(steps.names, mine.gradients, theirs.gradients, rounded.gradients),
        state=_differences([paths[i] for i in traced.carried], *map(state, (mine, theirs, rounded))),
    )


def _differences(
    names: Sequence[str], mine: Sequence[Array], theirs: Sequence[Array], rounded: Sequence[Array]
) -> tuple[GradientDifference, ...]:
    import jax
    import jax.numpy as jnp

    def numbers(x: Array) -> Array:
        """The array as floating-point numbers, so that integers, booleans and random keys can be compared too."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)

    @jax.jit
    def apart(g: Array, r: Array, other: Array) -> list[Array]:
        g, r, other = numbers(g), numbers(r), numbers(other)
        return [jnp.max(jnp.abs(x), initial=0) for x in (g - r, r, other - r)]

    out = []
    for name, g, r, other in zip(names, mine, theirs, rounded, strict=True):
        if g.ndim != r.ndim:
            raise PaseError(
                f"its gradient has shape {g.shape} under the plan, but {r.shape} in the reference",
                where=f"'{name}'",
                fix="please report it with the plan (plan.save)",
            )
        unpadded = g[tuple(slice(n) for n in r.shape)] if g.shape != r.shape else g
        off, largest, noise = map(float, apart(jax.device_put(unpadded, r.sharding), r, other))
        inexact = jnp.issubdtype(r.dtype, jnp.inexact)
        eps = float(jnp.finfo(r.dtype).eps) if inexact else 0.0
        out.append(GradientDifference(name=name, difference=off, largest=largest, noise=noise, eps=eps))
    return tuple(out)
