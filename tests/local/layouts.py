"""Shared by the tests of reshard steps: meshes, layouts drawn at random, and shards that add up to a tensor."""

import numpy as np
from hypothesis import strategies as st

from pase.local.lower import between
from pase.local.reshard import resharded
from pase.local.simulate import AllDevices, part_of
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout, Digit

MESHES = [Mesh(names=("a", "b"), sizes=(2, 4)), Mesh(names=("a", "b", "c"), sizes=(2, 2, 2))]

SHAPE = (16, 8)


def chain(src, dst, mesh):
    """The reshard steps between two layouts."""
    return between(src, dst, mesh)


def moved(parts, steps, shape, mesh):
    """What all devices hold after these reshard steps."""
    return resharded(parts, steps, shape, "sum", AllDevices(mesh=mesh))


def held(x, layout, mesh):
    """Parts whose sum over the partial axes is x; the summands differ from device to device."""

    def part(place):
        partial = [place[i] for i, s in enumerate(layout) if s == "partial"]
        ways = [mesh.sizes[i] for i, s in enumerate(layout) if s == "partial"]
        rank = int(np.ravel_multi_index(partial, ways)) if ways else 0
        summand = x - sum(range(1, int(np.prod(ways)))) if rank == 0 and ways else np.full_like(x, rank)
        return part_of(summand if ways else x, layout, place, mesh)

    return AllDevices(mesh=mesh).each(part)


@st.composite
def states(draw, mesh, partial):
    """A layout. Each axis splits a dim (in the order of the mesh, possibly below a digit that no axis holds), or is
    replicated or partial."""
    out, blocks = [], [draw(st.sampled_from([1, 2])), 1]
    for ways in mesh.sizes:
        dim = draw(st.sampled_from([None, 0, 1] + ["partial"] * partial))
        if dim is None or dim == "partial":
            out.append(dim)
            continue
        blocks[dim] *= ways
        out.append(Digit(dim, blocks[dim]) if blocks[dim] <= SHAPE[dim] else None)
        if out[-1] is None:
            blocks[dim] //= ways
    return AxisLayout(out)


@st.composite
def cases(draw):
    mesh = draw(st.sampled_from(MESHES))
    src, dst = draw(states(mesh, True)), draw(states(mesh, False))
    x = np.random.default_rng(draw(st.integers(0, 99))).integers(-9, 9, SHAPE).astype(float)
    return mesh, src, dst, x
