"""Moves of a local program, in numpy over all devices and in JAX, against the definition of a layout."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.backends.jax_moves import moved
from pase.errors import PaseError
from pase.local.lower import between, layout_of
from pase.local.parts import digits, placement
from pase.local.simulate import moved_all, part_of, places, whole_of
from pase.local.types import local_shape
from pase.machine import Mesh
from pase.tables.layouts import PARTIAL, REPLICATED, digit_state

MESHES = [Mesh(names=("a", "b"), sizes=(2, 4)), Mesh(names=("a", "b", "c"), sizes=(2, 2, 2))]
SHAPE = (16, 8)


@st.composite
def states(draw, mesh, partial):
    """A layout: axes on dims of the tensor, each dim split in the order of the mesh, below a digit of a merged dim or
    not; or partial."""
    out, blocks = [], [draw(st.sampled_from([1, 2])), 1]
    for ways in mesh.sizes:
        dim = draw(st.sampled_from([None, 0, 1] + ["partial"] * partial))
        if dim is None or dim == "partial":
            out.append(REPLICATED if dim is None else PARTIAL)
            continue
        blocks[dim] *= ways
        out.append(digit_state(dim, blocks[dim]) if blocks[dim] <= SHAPE[dim] else REPLICATED)
        if out[-1] == REPLICATED:
            blocks[dim] //= ways
    return tuple(out)


def chain(src, dst, mesh):
    """The plan's moves between two layouts."""
    return between(layout_of(src), layout_of(dst), mesh)


@st.composite
def cases(draw):
    mesh = draw(st.sampled_from(MESHES))
    src, dst = draw(states(mesh, True)), draw(states(mesh, False))
    x = np.random.default_rng(draw(st.integers(0, 99))).integers(-9, 9, SHAPE).astype(float)
    return mesh, src, dst, x


def held(x, layout, mesh):
    """Parts whose sum over the partial axes is x, and differs from device to device there."""
    out = {}
    for place in places(mesh):
        partial = [place[i] for i, s in enumerate(layout) if s == "partial"]
        ways = [mesh.sizes[i] for i, s in enumerate(layout) if s == "partial"]
        rank = int(np.ravel_multi_index(partial, ways)) if ways else 0
        summand = x - sum(range(1, int(np.prod(ways)))) if rank == 0 and ways else np.full_like(x, rank)
        out[place] = part_of(summand if ways else x, layout, place, mesh)
    return out


@given(cases())
def test_moves_bring_every_device_what_it_is_to_hold(case):
    mesh, src, dst, x = case
    steps = chain(src, dst, mesh)
    try:
        after = moved_all(held(x, layout_of(src), mesh), steps, SHAPE, mesh)
    except PaseError as e:
        assert "whole digits" in str(e) or "nest" in str(e) or "axis" in str(e)
        return
    for place in places(mesh):
        want = part_of(x, layout_of(dst), place, mesh)
        assert after[place].shape == local_shape(SHAPE, layout_of(dst), mesh)
        np.testing.assert_array_equal(after[place], want)
    np.testing.assert_array_equal(whole_of(after, SHAPE, layout_of(dst), mesh), x)


@functools.cache
def in_jax(src, dst, mesh):
    """The moves compiled for all devices, from parts stacked by device to parts stacked by device."""
    devices = jax.sharding.Mesh(np.array(jax.devices()[: mesh.devices]).reshape(mesh.sizes), mesh.names)
    steps = chain(src, dst, mesh)

    def local(part):
        return moved(part[0], steps, SHAPE, "sum", mesh)[None]

    spec = jax.sharding.PartitionSpec(mesh.names)
    return jax.jit(jax.shard_map(local, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False))


@pytest.mark.parametrize("seed", range(12))
def test_jax_moves_as_numpy_does(seed):
    rng = np.random.default_rng(seed)
    mesh = MESHES[seed % 2]

    def layout(partial):
        out, blocks = [], [int(rng.choice([1, 2])), 1]
        for ways in mesh.sizes:
            dim = int(rng.integers(-1 - partial, 2))
            fits = dim >= 0 and blocks[dim] * ways <= SHAPE[dim]
            if fits:
                blocks[dim] *= ways
            out.append(digit_state(dim, blocks[dim]) if fits else PARTIAL if dim == -2 else REPLICATED)
        return tuple(out)

    src, dst = layout(1), layout(0)
    x = rng.integers(-9, 9, SHAPE).astype(np.float32)
    parts = held(x, layout_of(src), mesh)
    try:
        want = moved_all(parts, chain(src, dst, mesh), SHAPE, mesh)
    except PaseError:
        return
    got = in_jax(src, dst, mesh)(np.stack([parts[p] for p in places(mesh)]).astype(np.float32))
    np.testing.assert_array_equal(np.asarray(got), np.stack([want[p] for p in places(mesh)]))


def test_digits_that_cut_across_each_other_are_refused():
    mesh = Mesh(names=("a", "b"), sizes=(2, 3))
    with pytest.raises(PaseError, match="goes to another axis"):
        digits((6,), ((0, 2), None), (None, (0, 3)), mesh)


def test_a_minor_digit_has_no_placement():
    mesh = MESHES[0]
    assert placement((None, (0, 8)), 2, mesh) is None
    assert placement(((1, 2), (1, 8)), 2, mesh) == ((), ("a", "b"))
