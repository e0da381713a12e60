"""Runs Fourier transforms on operands whose dims are in memory in the order of the shape.

XLA for CPUs (jaxlib 0.10.2) may give an fft an operand whose dims are in another order in memory. Its runtime then
refuses to run the program (RET_CHECK in fft_thunk.cc). The order is asked for here, of the operand and of the result:
the transpose of the transform reads the gradient of the result. All batch dims (those that are not transformed) are
merged into one besides. In the annotated lowering, they may be split over different axes, so merging them would send
data. So each device merges its own part, under ``shard_map``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pase.backends.jax.ops.convolution import spec_of
from pase.frontends.jax.types import Eqn
from pase.machine import Mesh
from pase.plan.accesses import EquationLayouts

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh

__all__ = ["of_plan", "transformed"]


def transformed(eqn: Eqn, x: Array) -> Array:
    """The fft of an array, or of a part of it along batch dims, computed with merged batch dims."""
    batch = x.shape[: x.ndim - len(eqn.params["fft_lengths"])]
    if batch:
        x = x.reshape(-1, *x.shape[len(batch) :])
    out = _in_order(eqn.primitive.bind(_in_order(x), **eqn.params))
    return out.reshape(*batch, *out.shape[1:]) if batch else out


def _in_order(x: Array) -> Array:
    """The array with its dims in memory in the order of its shape, on CPUs."""
    import jax
    from jax.experimental.layout import Layout, with_layout_constraint

    wanted = Layout(major_to_minor=tuple(range(x.ndim)))
    return jax.lax.platform_dependent(x, cpu=lambda x: with_layout_constraint(x, wanted), default=lambda x: x)


def of_plan(
    eqn: Eqn,
    reads: Sequence[str | None],
    makes: Sequence[str],
    layouts: EquationLayouts,
    axes: Mesh,
    mesh: JaxMesh,
) -> Callable[..., Array] | None:
    """The equation as a function of its operand, split as in the plan; None to let XLA split it, if the plan has no
    layout for it or a part is not contiguous.

    reads, makes: the names of its operand and result. axes: the plan's mesh, which the layouts refer to. mesh: JAX's
    mesh.
    """
    import jax

    read, made = layouts.reads.get(reads[0] or ""), layouts.writes.get(makes[0])
    if read is None or made is None:
        return None
    sizes = axes.by_name
    before, after = spec_of(read, sizes), spec_of(made, sizes)
    if before is None or after is None:
        return None

    def part(x: Array) -> Array:
        return transformed(eqn, x)

    return jax.shard_map(part, mesh=mesh, in_specs=(before,), out_specs=after, check_vma=False)
