"""Runs a plan's grouped convolutions: each device computes its own examples and groups, under ``shard_map``.

XLA's partitioner (jaxlib 0.10.2) gathers the operands of a grouped convolution, including the images, and every device
computes the whole result: eight times the work on eight devices. It does split the convolution if each group has one
input and one output channel. But for any grouped convolution, it multiplies the filter's gradient by the size of each
mesh axis that splits nothing while another axis splits images. Images and groups do not exchange data, so this module
implements the plan's split itself. If several devices read one part of the weights, its gradient is summed over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax.types import Eqn
from pase.frontends.jax.versions import source_line
from pase.machine import Mesh
from pase.plan.accesses import EquationLayouts
from pase.tables.axis_layout import AxisLayout, Placement

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import PartitionSpec

__all__ = ["of_plan", "placement_of", "spec_of"]


def of_plan(
    eqn: Eqn,
    reads: Sequence[str | None],
    makes: Sequence[str],
    layouts: EquationLayouts,
    axes: Mesh,
    mesh: JaxMesh,
) -> Callable[..., Array] | None:
    """The equation as a function of its operands, split as in the plan.

    None to let XLA split it, if the convolution has no groups, if its windows are split, or if nothing is. reads,
    makes: the names of its operands and results. axes: the plan's mesh, which the layouts refer to. mesh: JAX's mesh;
    it may have more axes, such as that of stages. Raises PaseError if XLA would compute a wrong gradient.
    """
    if len(set(reads)) != 2:
        return None
    groups, numbers = eqn.params["feature_group_count"], eqn.params["dimension_numbers"]
    if groups == 1 or eqn.params["batch_group_count"] != 1:
        return None
    x, w = (layouts.reads.get(name or "") for name in reads)
    out = layouts.writes.get(makes[0])
    if x is None or w is None or out is None or all(d is None for d in out):
        return None
    by_group = numbers.lhs_spec[1], numbers.rhs_spec[0], numbers.out_spec[1]
    parts, idle, mapped, sizes = 1, False, True, axes.by_name
    for axis, digits in zip(sizes, zip(x, w, out, strict=True), strict=True):
        dims = tuple(None if d is None else d[0] for d in digits)
        if dims == by_group:
            parts *= sizes[axis]
        elif dims == (None, None, None):
            idle = idle or sizes[axis] > 1
        else:
            mapped = mapped and dims in _apart(eqn)
    specs = [spec for digits in (x, w, out) if (spec := spec_of(digits, sizes)) is not None]
    if mapped and len(specs) == 3 and groups % parts == 0:
        return _mapped(eqn, groups // parts, specs, mesh)
    if idle:
        raise PaseError(
            f"the grouped convolution is split over {x} and leaves a mesh axis idle, so XLA's partitioner would "
            f"multiply the gradient of its filter",
            where=f"'{eqn.primitive.name}' at {source_line(eqn) or 'an unknown line'}",
            fix="use lowering='manual', or another mesh",
        )
    return None


def _apart(eqn: Eqn) -> list[tuple[int, None, int]]:
    """The dims along which results do not share elements of the operand, as (operand's dim, None for the filter,
    result's dim): images, and spatial dims along which the filter has one element."""
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    filters = eqn.invars[1].aval.shape
    found = [(numbers.lhs_spec[0], None, numbers.out_spec[0])]
    moved = zip(p["window_strides"], p["padding"], p["lhs_dilation"], strict=True)
    for k, how in enumerate(moved, 2):
        if filters[numbers.rhs_spec[k]] == 1 and how == (1, (0, 0), 1):
            found.append((numbers.lhs_spec[k], None, numbers.out_spec[k]))
    return found


def _mapped(eqn: Eqn, groups: int, specs: Sequence[PartitionSpec], mesh: JaxMesh) -> Callable[..., Array]:
    import jax

    def part(x: Array, w: Array) -> Array:
        return eqn.primitive.bind(x, w, **{**eqn.params, "feature_group_count": groups})

    return jax.shard_map(part, mesh=mesh, in_specs=tuple(specs[:2]), out_specs=specs[2], check_vma=False)


def spec_of(layout: AxisLayout, sizes: Mapping[str, int]) -> PartitionSpec | None:
    """A layout as a PartitionSpec; None if an axis selects parts that are not contiguous."""
    from jax.sharding import PartitionSpec

    found = placement_of(layout, sizes)
    return None if found is None else PartitionSpec(*found)


def placement_of(layout: AxisLayout, sizes: Mapping[str, int]) -> Placement | None:
    """A layout as the axes of each dim, up to the last dim that is split; None if an axis selects parts that are not
    contiguous."""
    last = max((digit.dim for _, digit in layout.digits), default=-1)
    return layout.placement(last + 1, Mesh(names=tuple(sizes), sizes=tuple(sizes.values())))
