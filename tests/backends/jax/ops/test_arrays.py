"""Reshard steps compiled by JAX, against numpy over all devices and the definition of a layout."""

import functools

import jax
import numpy as np
import pytest

from pase.backends.jax.ops.arrays import JaxArrays
from pase.hlo.collectives import collectives
from pase.local.exchange import nests
from pase.local.reshard import resharded
from pase.local.simulate import AllDevices, part_of, places
from pase.local.types import LocalReshardStep
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout
from tests.local.layouts import MESHES, SHAPE, chain, held, moved


@functools.cache
def in_jax(src, dst, mesh):
    """The reshard steps compiled for all devices: takes and returns parts stacked by device."""
    devices = jax.sharding.Mesh(np.array(jax.devices()[: mesh.devices]).reshape(mesh.sizes), mesh.names)
    steps = chain(src, dst, mesh)

    def local(part):
        return resharded(part[0], steps, SHAPE, "sum", JaxArrays(mesh))[None]

    spec = jax.sharding.PartitionSpec(mesh.names)
    return jax.jit(jax.shard_map(local, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False))


@pytest.mark.parametrize("dtype", [np.float32, bool])
@pytest.mark.parametrize("seed", range(6))
def test_jax_moves_as_numpy_does(seed, dtype):
    """Booleans, too: the parts of a look-up in a split mask are summed."""
    rng = np.random.default_rng(seed)
    mesh = MESHES[seed % 2]

    def layout(partial):
        out, blocks = [], [int(rng.choice([1, 2])), 1]
        for ways in mesh.sizes:
            dim = int(rng.integers(-1 - partial, 2))
            fits = dim >= 0 and blocks[dim] * ways <= SHAPE[dim]
            if fits:
                blocks[dim] *= ways
            out.append((dim, blocks[dim]) if fits else "partial" if dim == -2 else None)
        return AxisLayout(out)

    src, dst = layout(1), layout(0)
    x = rng.integers(-9, 9, SHAPE).clip(0 if dtype is bool else -9).astype(dtype)
    parts = held(x, src, mesh).astype(dtype)
    want = moved(parts, chain(src, dst, mesh), SHAPE, mesh)
    got = np.asarray(in_jax(src, dst, mesh)(parts.reshape(-1, *parts.shape[len(mesh.sizes) :])))
    np.testing.assert_array_equal(got.reshape(want.shape), want)


UNNESTED = [
    ((8,), (48, 8), ((0, 8),), ((0, 16),)),
    ((2, 4), (48, 8), ((0, 2), (1, 4)), ((0, 2), (1, 8))),
    ((2, 4), (48, 8), ((0, 2), (0, 8)), ((0, 2), (0, 24))),
    ((4, 2), (80, 4), ((0, 40), (0, 80)), ((0, 4), (0, 80))),
    ((2, 3), (48, 8), ((0, 2), (0, 6)), ((0, 6), (0, 3))),
    ((2, 3), (48, 8), (None, (0, 3)), (None, (0, 48))),
]
"""(mesh sizes, shape, layout before, layout after): an axis gets a part that overlaps with the part that it has."""


@pytest.mark.parametrize(("sizes", "shape", "before", "after"), UNNESTED)
def test_parts_that_do_not_nest_are_sent_once_and_no_more_than_the_plan_says(sizes, shape, before, after):
    mesh = Mesh(names=("a", "b")[: len(sizes)], sizes=sizes)
    before, after = AxisLayout(before), AxisLayout(after)
    axes = tuple(n for n, s, t in zip(mesh.names, before, after, strict=True) if s != t)
    move = LocalReshardStep(
        kind="permute" if len(axes) > 1 else "all_to_all", axes=axes, before=before, after=after
    )
    assert not nests(move, shape, mesh)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    parts = AllDevices(mesh=mesh).each(lambda at: part_of(x, before, at, mesh))
    want = {p: part_of(x, after, p, mesh) for p in places(mesh)}
    in_numpy = moved(parts, [move], shape, mesh)
    devices = jax.sharding.Mesh(np.array(jax.devices()[: mesh.devices]).reshape(mesh.sizes), mesh.names)
    spec = jax.sharding.PartitionSpec(mesh.names)
    run = jax.jit(
        jax.shard_map(
            lambda part: resharded(part[0], [move], shape, "sum", JaxArrays(mesh))[None],
            mesh=devices,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    stacked = parts.reshape(-1, *parts.shape[len(sizes) :])
    in_jax = np.asarray(run(stacked))
    for k, p in enumerate(places(mesh)):
        np.testing.assert_array_equal(in_numpy[p], want[p])
        np.testing.assert_array_equal(in_jax[k], want[p])
    sent = [c for c in collectives(run.lower(stacked).compile(), mesh) if c.kind == "permute"]
    assert 0 < sum(c.bytes * c.count for c in sent) <= stacked[0].nbytes
