"""Stages whose gradients are reduced over the data-parallel devices once per step, not in each micro-batch.

XLA reduces the gradient of a weight where it is computed. Here, each group of devices with its own examples (an
unreduced group) keeps a separate sum. A stage runs on the examples of one group, under ``vmap`` over the groups, and
the groups' sums are added after the last micro-batch. As with micro-batches, this requires that the loss is a mean over
the examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.backends.jax.pipeline.stages import Stage, stages_of
from pase.backends.jax.plan import JaxPlan
from pase.frontends.jax.blocks import batch_size, micro
from pase.ir import named, simplify
from pase.ir.blocks import rematerialised

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import NamedSharding

    from pase.frontends.jax.frontend import TracedJax
    from pase.ir.cut_points import UnitChain
    from pase.plan.pipeline import PipelinePlan

__all__ = ["UnreducedGroups", "first_examples", "unreduced_groups"]

_BATCH = "b"
"""The name of the batch's first dim (``pase.ir.names.named``)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnreducedGroups:
    """The unreduced groups of a pipeline.

    axes: the mesh axes over which only the batch is split. many: the number of groups. splits, stages: those of the
    pipeline for the examples of one group.
    """

    axes: tuple[str, ...]
    many: int
    splits: tuple[JaxPlan, ...]
    stages: tuple[Stage, ...]

    def stacked(self, sharding: NamedSharding) -> NamedSharding:
        """The sharding of an array with a leading dim of groups, each part of which has the given sharding."""
        from jax.sharding import NamedSharding, PartitionSpec

        spec = self.of_group(sharding).spec
        return NamedSharding(sharding.mesh, PartitionSpec(self.axes, *spec))

    def of_group(self, sharding: NamedSharding) -> NamedSharding:
        """The sharding without the axes of the groups."""
        from jax.sharding import NamedSharding, PartitionSpec

        spec = [tuple(a for a in _tuple(axes) if a not in self.axes) for axes in sharding.spec]
        return NamedSharding(sharding.mesh, PartitionSpec(*(axes or None for axes in spec)))


def unreduced_groups(
    p: PipelinePlan, of: Sequence[JaxPlan], chain: UnitChain | None
) -> UnreducedGroups | None:
    """The unreduced groups of a pipeline.

    Returns None if it reduces gradients in each micro-batch, or if no axis splits only the batch. of: the model under
    each of the pipeline's strategies. chain: the units between which the model is cut, unless it is cut between equal
    blocks.
    """
    traced = of[0].traced
    if p.micro_batches == 1 or traced.has_aux or any(s.weights == "each" for s in p.stages):
        return None
    mesh = of[0].logical_mesh
    used = {s.strategy for s in p.stages}
    axes = tuple(a for a in mesh.names if all(_splits_batch(of[i], a) for i in used))
    many = math.prod(mesh.sizes[mesh.names.index(a)] for a in axes)
    if many == 1 or batch_size(traced) % many:
        return None
    small = micro(traced, many)
    splits = tuple(replace(s, traced=small, unreduced_axes=frozenset(axes)) for s in of)
    recomputed = [b for s in splits for b in s.blocks]
    stages = stages_of(small, splits[0].leaf_names(), p.cuts, recomputed, chain)
    return UnreducedGroups(axes=axes, many=many, splits=splits, stages=stages)


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


def _tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
