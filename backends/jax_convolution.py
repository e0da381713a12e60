"""A plan's grouped convolutions at run time: each device computes its own examples and groups, under shard_map.

XLA's partitioner (jaxlib 0.10.2) splits a grouped convolution only if each group has one channel in and one out. It
gathers the operands of any other, images included, and every device computes the whole convolution: eight times the
work on eight devices. Images and groups do not exchange data, so the plan's split is written out here. If several
devices read one part of the weights, its gradient is summed over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pase.frontends.jax_types import Eqn
from pase.plan.accesses import Digits, EquationLayouts
from pase.tables.layouts import contiguous_axes

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import PartitionSpec

__all__ = ["of_plan", "spec_of"]


def of_plan(
    eqn: Eqn,
    reads: Sequence[str | None],
    makes: Sequence[str],
    layouts: EquationLayouts,
    mesh: JaxMesh,
) -> Callable[..., Array] | None:
    """The equation as a function of its operands, split as in the plan.

    None if XLA is to split it: it has no groups of several channels, or its windows, or channels within a group, are
    split. reads, makes: names of its operands and results.
    """
    if len(set(reads)) != 2:
        return None
    groups, numbers = eqn.params["feature_group_count"], eqn.params["dimension_numbers"]
    filters = numbers.rhs_spec
    shape = eqn.invars[1].aval.shape
    depthwise = (shape[filters[1]], shape[filters[0]]) == (1, groups)
    if groups == 1 or depthwise or eqn.params["batch_group_count"] != 1:
        return None
    x, w = (layouts.reads.get(name or "") for name in reads)
    out = layouts.writes.get(makes[0])
    if x is None or w is None or out is None:
        return None
    batch, by_group = (
        (numbers.lhs_spec[0], None, numbers.out_spec[0]),
        (
            numbers.lhs_spec[1],
            filters[0],
            numbers.out_spec[1],
        ),
    )
    parts, sizes = 1, dict(mesh.shape)
    for axis, digits in zip(sizes, zip(x, w, out, strict=True), strict=True):
        dims = tuple(None if d is None else d[0] for d in digits)
        if dims == by_group:
            parts *= sizes[axis]
        elif dims not in (batch, (None, None, None)):
            return None
    specs = [spec_of(digits, sizes) for digits in (x, w, out)]
    if groups % parts or any(s is None for s in specs) or all(d is None for d in out):
        return None
    return _mapped(eqn, groups // parts, [s for s in specs if s is not None], mesh)


def _mapped(eqn: Eqn, groups: int, specs: Sequence[PartitionSpec], mesh: JaxMesh) -> Callable[..., Array]:
    import jax

    def part(x: Array, w: Array) -> Array:
        return eqn.primitive.bind(x, w, **{**eqn.params, "feature_group_count": groups})

    return jax.shard_map(part, mesh=mesh, in_specs=tuple(specs[:2]), out_specs=specs[2], check_vma=False)


def spec_of(digits: Digits, sizes: Mapping[str, int]) -> PartitionSpec | None:
    """A layout as a PartitionSpec; None if an axis selects parts that are not contiguous."""
    from jax.sharding import PartitionSpec

    names, last = tuple(sizes), max((d[0] for d in digits if d is not None), default=-1)
    parts = []
    for dim in range(last + 1):
        held = ((d[1], axis) for axis, d in enumerate(digits) if d is not None and d[0] == dim)
        axes = contiguous_axes(held, tuple(sizes.values()))
        if axes is None:
            return None
        parts.append(tuple(names[a] for a in axes))
    return PartitionSpec(*parts)
