"""Meshes: parsing, factorizations that fit the links, ways by level."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.machine import Device, LinkLevel, Machine, Mesh, axis_levels, level_ways, load, mesh_from, meshes


def machine(*ways: int) -> Machine:
    """Link levels with these ways. The last may be 0."""
    return Machine(
        name="test",
        device=Device(
            name="d", peak_flops={"float32": 1e12}, memory_bytes=1, memory_bandwidth_bytes_per_s=1e12
        ),
        levels=tuple(
            LinkLevel(name=f"l{i}", ways=w, latency_s=1e-6 * (i + 1), bandwidth_bytes_per_s=1e11 / 2**i)
            for i, w in enumerate(ways)
        ),
        sources={},
    )


def sizes(found: list[Mesh]) -> list[tuple[int, ...]]:
    return [m.sizes for m in found]


def test_a_node_is_filled_before_a_second_one_is_taken():
    h100 = load("h100x8")
    assert {d: level_ways(d, h100) for d in (1, 4, 7, 8, 12, 24, 32, 100, 11)} == {
        1: (1, 1),
        4: (4, 1),
        7: (7, 1),
        8: (8, 1),
        12: (6, 2),
        24: (8, 3),
        32: (8, 4),
        100: (5, 20),
        11: (1, 11),
    }


def test_a_tpu_slice_has_the_shape_it_is_sold_in():
    v5e = load("tpu_v5e")
    assert level_ways(32, v5e) == (8, 4, 1)
    assert level_ways(64, v5e) == (8, 8, 1)
    assert level_ways(512, v5e) == (16, 16, 2)


def test_devices_that_do_not_fit_are_refused():
    with pytest.raises(PaseError, match=r"16 devices .* 17"):
        level_ways(17, machine(4, 4))
    with pytest.raises(PaseError, match="got 0") as e:
        level_ways(0, machine(4, 0))
    assert e.value.where == "devices"


def test_meshes_of_32_on_nodes_of_8():
    # 4x4x2 is 4x2x4 with two axes of one switch swapped: it has the same configs at the same costs.
    assert sizes(meshes(32, machine(8, 0))) == [
        (32,),
        (2, 16),
        (4, 8),
        (8, 4),
        (16, 2),
        (2, 2, 8),
        (2, 4, 4),
        (2, 8, 2),
        (4, 2, 4),
        (8, 2, 2),
        (2, 2, 2, 2, 2),
    ]
    assert (4, 4, 2) in sizes(meshes(32, machine(8, 0), distinct=False))
    # On a torus, neighbours on the outer of two axes in a dim are further apart, so both meshes are kept.
    assert {(4, 4, 2), (4, 2, 4)} <= set(sizes(meshes(32, load("tpu_v5e"))))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (1, [(1,)]),
        (7, [(7,)]),
        (11, [(11,)]),
        (6, [(6,), (2, 3)]),
        (12, [(12,), (2, 6), (4, 3), (6, 2), (2, 2, 3)]),
        # 3 of the 8 devices of a node are no whole part of it, so 8x3 and 4x6 are left out.
        (24, [(24,), (3, 8), (6, 4), (12, 2), (3, 2, 4), (6, 2, 2), (3, 2, 2, 2)]),
    ],
)
def test_counts_that_are_no_power_of_two(devices, expected):
    assert sizes(meshes(devices, machine(8, 0))) == expected


def test_the_prime_mesh_only_where_it_is_affordable():
    h100 = machine(8, 0)
    assert (2,) * 6 in sizes(meshes(64, h100))
    assert (2,) * 7 not in sizes(meshes(128, h100))
    assert (2,) * 7 in sizes(meshes(128, h100, max_prime_axes=7))


def test_the_hierarchy_is_there_however_few_axes_are_asked_for():
    three = machine(2, 4, 0)
    assert (5, 4, 2) in sizes(meshes(40, three, 1, max_prime_axes=0))
    assert sizes(meshes(40, three, 1, max_prime_axes=0)) == [(40,), (5, 4, 2)]


@given(
    devices=st.integers(1, 200),
    inner=st.integers(1, 8),
    middle=st.integers(1, 4),
    max_axes=st.integers(1, 4),
)
def test_meshes_hold_all_devices_and_fit_the_links(devices, inner, middle, max_axes):
    m = machine(inner, middle, 0)
    ways = level_ways(devices, m)
    assert math.prod(ways) == devices
    found = meshes(devices, m, max_axes, max_prime_axes=5)
    assert len(set(found)) == len(found)
    assert (devices,) in sizes(found)
    for mesh in found:
        assert mesh.devices == devices
        rows = axis_levels(mesh, m)
        assert [math.prod(row) for row in rows] == list(mesh.sizes)
        assert [math.prod(col) for col in zip(*rows, strict=True)] == list(ways)


@given(devices=st.integers(1, 60), inner=st.integers(1, 8), data=st.data())
def test_ways_by_level_are_those_counted_device_by_device(devices, inner, data):
    """The group of device 0 along an axis, by node: the number of nodes, and the number of devices in each."""
    m = machine(inner, 0)
    mesh = data.draw(st.sampled_from(meshes(devices, m, 3, distinct=False)))
    per_node = level_ways(devices, m)[0]
    for axis, (within, across) in enumerate(axis_levels(mesh, m)):
        members = [mesh.strides[axis] * i for i in range(mesh.sizes[axis])]
        nodes = {d // per_node for d in members}
        assert across == len(nodes)
        assert within == len(members) // len(nodes)


def test_an_axis_across_a_node_at_odds_is_priced_across():
    # With 8 per node, groups of 3 neighbours straddle nodes, so the whole axis counts as across.
    assert axis_levels(Mesh(names=("x", "y"), sizes=(8, 3)), machine(8, 0)) == ((1, 8), (1, 3))


def test_mesh_from_reads_sizes_or_names():
    assert mesh_from("4x8", 32) == Mesh(names=("x", "y"), sizes=(4, 8))
    assert mesh_from(" 4 × 8 ", 32) == Mesh(names=("x", "y"), sizes=(4, 8))
    assert mesh_from("32", 32) == Mesh(names=("x",), sizes=(32,))
    assert mesh_from("data = 4, model_2=8", 32) == Mesh(names=("data", "model_2"), sizes=(4, 8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x8", "4 x 8 = 32 devices, but 64"),
        ("7", "7 devices, but 64"),
        ("", "cannot be read"),
        ("4,8", "cannot be read"),
        ("4x-8", "cannot be read"),
        ("data=4,8", "cannot be read"),
        ("data=8,data=8", "twice"),
        ("0x64", "size 0"),
    ],
)
def test_mesh_from_says_what_is_wrong(text, message):
    with pytest.raises(PaseError) as e:
        mesh_from(text, 64)
    assert e.value.where == f"mesh '{text}'" and message in e.value.what
