"""Circular stages whose gradients are reduced over the data-parallel devices once per step, not in each micro-batch.

XLA reduces the gradient of a weight where it is computed. Here, each group of devices with its own examples (an
unreduced group) keeps a separate sum. A stage runs on the examples of one group, under ``vmap`` over the groups, and
the groups' sums are added after the last micro-batch. As with micro-batches, this requires that the loss is a mean over
the examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.backends.jax.plan import JaxPlan
from pase.frontends.jax.blocks import batch_size, micro
from pase.ir import named, simplify
from pase.ir.blocks import rematerialised

if TYPE_CHECKING:
    from jax import Array

    from pase.frontends.jax.frontend import TracedJax
    from pase.plan.pipeline import PipelinePlan

__all__ = ["UnreducedGroups", "first_examples", "unreduced_groups"]

_BATCH = "b"
"""The name of the batch's first dim (``pase.ir.names.named``)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnreducedGroups:
    """The unreduced groups of a pipeline.

    axes: the mesh axes over which only the batch is split. many: the number of groups. split: the model on the examples
    of one group.
    """

    axes: tuple[str, ...]
    many: int
    split: JaxPlan


def unreduced_groups(p: PipelinePlan, split: JaxPlan) -> UnreducedGroups | None:
    """The unreduced groups of a pipeline of equal stages.

    Returns None if it reduces gradients in each micro-batch, or if no axis splits only the batch. split: the model on
    one micro-batch.
    """
    traced = split.traced
    if p.micro_batches == 1 or traced.has_aux or any(s.weights == "each" for s in p.stages):
        return None
    mesh = split.logical_mesh
    axes = tuple(a for a in mesh.names if _splits_batch(split, a))
    many = math.prod(mesh.sizes[mesh.names.index(a)] for a in axes)
    if many == 1 or batch_size(traced) % many:
        return None
    small = replace(split, traced=micro(traced, many), unreduced_axes=frozenset(axes))
    return UnreducedGroups(axes=axes, many=many, split=small)


def first_examples(
    traced: TracedJax, micro_batches: int, groups: UnreducedGroups | None, number: Array
) -> list[Array]:
    """The first example of the micro-batch with this number; with unreduced groups, the first one of each group. Empty
    if no random numbers are drawn for examples.

    traced: the model on the examples of one micro-batch, or of one group of it. micro_batches: those of the step. A
    micro-batch consists of every k-th example, and a group has consecutive ones of these.
    """
    import jax.numpy as jnp

    if not traced.drawn:
        return []
    if groups is None:
        return [number]
    return [number + micro_batches * batch_size(traced) * jnp.arange(groups.many)]


def _splits_batch(split: JaxPlan, axis: str) -> bool:
    """Whether the axis splits the batch and no other dim of a computation. Stored parameters may be split over it."""
    graph = named(simplify(rematerialised(split.traced.graph, split.blocks)))
    stored = {n.name for n in graph.nodes if n.kind == "parameter"}
    computed = [dims for name, dims in split.strategy.items() if name not in stored]
    return any(axis in dims.get(_BATCH, ()) for dims in computed) and not any(
        axis in axes for dims in computed for dim, axes in dims.items() if dim != _BATCH
    )
