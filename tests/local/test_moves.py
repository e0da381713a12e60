"""Reshard steps of a local program, in numpy over all devices and in JAX, against the definition of a layout."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.backends.jax.spmd.collectives import resharded
from pase.errors import PaseError
from pase.hlo.collectives import collectives
from pase.local.exchange import _handed, _matching, exchange, nests
from pase.local.lower import between, layout_of
from pase.local.parts import digits, placement
from pase.local.simulate import part_of, places, whole_of
from pase.local.simulate import resharded as moved_all
from pase.local.types import LocalReshardStep, local_shape
from pase.machine import Mesh
from pase.tables.layouts import PARTIAL, REPLICATED, digit_state

MESHES = [Mesh(names=("a", "b"), sizes=(2, 4)), Mesh(names=("a", "b", "c"), sizes=(2, 2, 2))]
SHAPE = (16, 8)


@st.composite
def states(draw, mesh, partial):
    """A layout. Each axis splits a dim (in the order of the mesh, possibly below a digit that no axis holds), or is
    replicated or partial."""
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
    """The reshard steps between two layouts."""
    return between(layout_of(src), layout_of(dst), mesh)


@st.composite
def cases(draw):
    mesh = draw(st.sampled_from(MESHES))
    src, dst = draw(states(mesh, True)), draw(states(mesh, False))
    x = np.random.default_rng(draw(st.integers(0, 99))).integers(-9, 9, SHAPE).astype(float)
    return mesh, src, dst, x


def held(x, layout, mesh):
    """Parts whose sum over the partial axes is x; the summands differ from device to device."""
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
    after = moved_all(held(x, layout_of(src), mesh), steps, SHAPE, mesh)
    for place in places(mesh):
        want = part_of(x, layout_of(dst), place, mesh)
        assert after[place].shape == local_shape(SHAPE, layout_of(dst), mesh)
        np.testing.assert_array_equal(after[place], want)
    np.testing.assert_array_equal(whole_of(after, SHAPE, layout_of(dst), mesh), x)


@functools.cache
def in_jax(src, dst, mesh):
    """The reshard steps compiled for all devices: takes and returns parts stacked by device."""
    devices = jax.sharding.Mesh(np.array(jax.devices()[: mesh.devices]).reshape(mesh.sizes), mesh.names)
    steps = chain(src, dst, mesh)

    def local(part):
        return resharded(part[0], steps, SHAPE, "sum", mesh)[None]

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
    want = moved_all(parts, chain(src, dst, mesh), SHAPE, mesh)
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
    axes = tuple(n for n, s, t in zip(mesh.names, before, after, strict=True) if s != t)
    move = LocalReshardStep(
        kind="permute" if len(axes) > 1 else "all_to_all", axes=axes, before=before, after=after
    )
    assert not nests(move, shape, mesh)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    parts = {p: part_of(x, before, p, mesh) for p in places(mesh)}
    want = {p: part_of(x, after, p, mesh) for p in places(mesh)}
    in_numpy = moved_all(parts, [move], shape, mesh)
    devices = jax.sharding.Mesh(np.array(jax.devices()[: mesh.devices]).reshape(mesh.sizes), mesh.names)
    spec = jax.sharding.PartitionSpec(mesh.names)
    run = jax.jit(
        jax.shard_map(
            lambda part: resharded(part[0], [move], shape, "sum", mesh)[None],
            mesh=devices,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    stacked = np.stack([parts[p] for p in places(mesh)])
    in_jax = np.asarray(run(stacked))
    for k, p in enumerate(places(mesh)):
        np.testing.assert_array_equal(in_numpy[p], want[p])
        np.testing.assert_array_equal(in_jax[k], want[p])
    sent = [c for c in collectives(run.lower(stacked).compile(), mesh) if c.kind == "permute"]
    assert 0 < sum(c.bytes * c.count for c in sent) <= stacked[0].nbytes


@pytest.mark.parametrize("seed", range(8))
def test_rounds_bring_every_device_what_it_is_to_hold(seed):
    """Random layouts on meshes with ways of 2 and 3, with digits below digits that no axis holds."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(48, 24))

    def layout(mesh):
        out, blocks = [REPLICATED] * len(mesh.sizes), [int(rng.choice([1, 2, 3])), 1]
        for a in rng.permutation(len(mesh.sizes)):
            dim = int(rng.integers(-1, 2))
            wide = blocks[dim] * mesh.sizes[a]
            if dim >= 0 and x.shape[dim] % wide == 0:
                out[a] = digit_state(dim, wide)
                blocks[dim] = wide * int(rng.choice([1, 2])) if x.shape[dim] % (2 * wide) == 0 else wide
        return tuple(out)

    checked = 0
    for _ in range(200):
        sizes = [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (6, 2)][rng.integers(6)]
        mesh = Mesh(names=("a", "b", "c")[: len(sizes)], sizes=sizes)
        for move in chain(layout(mesh), layout(mesh), mesh):
            if move.kind in ("all_to_all", "permute") and not nests(move, x.shape, mesh):
                parts = {p: part_of(x, move.before, p, mesh) for p in places(mesh)}
                for place, got in in_rounds(parts, move, x.shape, mesh).items():
                    np.testing.assert_array_equal(got, part_of(x, move.after, place, mesh))
                checked += 1
    assert checked > 5


def in_rounds(parts, move, shape, mesh):
    """What each device holds after the rounds of an exchange, in numpy."""
    how, axes = exchange(move, shape, mesh), [mesh.names.index(a) for a in move.axes]
    ways = [mesh.sizes[a] for a in axes]

    def flat(array, cut):
        apart = array.reshape([k for n, c in zip(array.shape, cut, strict=True) for k in (c, n // c)])
        rank = array.ndim
        front = apart.transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
        return front.reshape(np.prod(cut), -1), front.shape[rank:]

    out = {}
    for place in parts:
        me = int(np.ravel_multi_index([place[a] for a in axes], ways))
        came = []
        for r in how.rounds:
            source = next(s for s, t in r.pairs if t == me)
            at = dict(zip(axes, np.unravel_index(source, ways), strict=True))
            sender = tuple(int(at.get(a, n)) for a, n in enumerate(place))
            rows, blocks = flat(parts[sender], how.before)
            came.append(rows[r.units[source]])
        got = np.concatenate(came)[how.order[me]].reshape(*how.after, *blocks)
        rank = len(shape)
        got = got.transpose([i for d in range(rank) for i in (d, rank + d)])
        out[place] = got.reshape([c * n for c, n in zip(how.after, blocks, strict=True)])
    return out


@given(st.integers(2, 6), st.integers(0, 2**20))
def test_what_goes_from_whom_to_whom_is_a_sum_of_permutations(n, seed):
    """For any table with equal sums, everything is sent, and in each round all targets differ."""
    rng = np.random.default_rng(seed)
    left = sum(int(rng.integers(1, 5)) * np.eye(n, dtype=int)[rng.permutation(n)] for _ in range(4))
    while left.any():
        targets, amount = _matching(left)
        assert sorted(targets) == list(range(n)) and amount > 0
        left[range(n), targets] -= amount
        assert left.min() >= 0


def test_of_replicas_each_sends_to_one():
    """If several devices hold an element and several others need it, each of these gets it once."""
    for count in (2, 3):
        had = [np.array([k // count]) for k in range(2 * count)]
        has = [np.array([1 - k // count]) for k in range(2 * count)]
        sent = _handed(had, has, 2)
        assert sorted(k for k, _ in sent) == sorted(k for _, k in sent) == list(range(2 * count))
        assert all(units == [source // count] for (source, _), units in sent.items())


def test_parts_of_different_sizes_are_refused():
    mesh = Mesh(names=("a",), sizes=(2,))
    move = LocalReshardStep(kind="all_to_all", axes=("a",), before=((0, 2),), after=((1, 2),))
    with pytest.raises(PaseError, match="different sizes") as e:
        exchange(replace(move, after=(None,)), (4, 4), mesh)
    assert e.value.where == "all_to_all over a"
