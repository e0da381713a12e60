"""Costs of collectives: closed forms on small machines, and properties that hold on all machines."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.costmodels import get
from pase.costmodels.analytic import Analytic
from pase.costmodels.collectives import by_library
from pase.errors import PaseError
from pase.machine import Algorithm, CostModel, axis_levels, load, meshes, names
from tests.costmodels.machines import KINDS, axes, flat, kinds, nested, sizes_of_buffers, torus

MACHINES = {name: load(name) for name in names()}
MODELS = {name: Analytic(m) for name, m in MACHINES.items()} | {
    name: Analytic(m)
    for name, m in (("flat", flat()), ("nested", nested()), ("torus", torus(latency_s=1e-6)))
}
models = st.sampled_from(sorted(MODELS))
counts = st.sampled_from([2, 3, 4, 6, 7, 8, 12, 16, 24, 32, 64])


def draw_mesh(data, model, devices=None):
    n = devices or data.draw(counts)
    return data.draw(st.sampled_from(meshes(n, model.machine, 3)))


# -- closed forms --


@pytest.mark.parametrize("ways", [2, 3, 7, 8, 32])
def test_ring_is_its_closed_form_on_a_flat_machine(ways):
    """Patarasuk & Yuan 2009: 2(P-1) steps of n/P bytes."""
    model = Analytic(flat(latency_s=2e-6, bandwidth=1e11, algorithms=("ring",)))
    for n in (1.0, 1e3, 1e6, 1e9):
        half = (ways - 1) * (2e-6 + n / ways / 1e11)
        got = {kind: float(model.collective(kind, axes(ways), 1, n)) for kind in KINDS[:3]}
        assert got["reduce_scatter"] == pytest.approx(half, rel=1e-12)
        assert got["all_gather"] == pytest.approx(half, rel=1e-12)
        assert got["all_reduce"] == pytest.approx(2 * half, rel=1e-12)


def test_small_goes_by_one_shot_middling_by_tree_large_by_ring():
    def s(n, *algorithms):
        return float(Analytic(flat(algorithms=algorithms)).collective("all_reduce", axes(16), 1, n))

    every = ("ring", "tree", "one_shot")
    crossings = []
    for n in np.logspace(1, 10, 40):
        apart = {a: s(n, a) for a in every}
        assert s(n, *every) == pytest.approx(min(apart.values()), rel=1e-12)
        crossings.append(min(apart, key=apart.get))
    assert list(dict.fromkeys(crossings)) == ["one_shot", "tree", "ring"]
    # One step of all bytes to 15 peers; log2(16) steps up and down; 15 steps twice.
    assert s(1e3, "one_shot") == pytest.approx(2e-6 + 15 * 1e3 / 1e11)
    assert s(1e3, "tree") == pytest.approx(2 * 4 * 2e-6 + 2 * 1e3 / 1e11)


def test_all_to_all_and_permute_on_a_flat_machine():
    model = Analytic(flat(latency_s=2e-6, bandwidth=1e11, algorithms=("direct",)))
    assert float(model.collective("all_to_all", axes(8), 1, 8e6)) == pytest.approx(7 * 2e-6 + 7e6 / 1e11)
    assert float(model.collective("permute", axes(8), 1, 8e6)) == pytest.approx(2e-6 + 8e6 / 1e11)


RING = Algorithm(algorithm="ring", protocol="p", launch_s=0.0, step_s=(0.0, 0.0))
DIRECT = Algorithm(algorithm="direct", protocol="p", launch_s=0.0, step_s=(0.0, 0.0))


def test_contention_is_in_the_bandwidth_of_a_level():
    """The bandwidth is what one device gets when all devices communicate.

    There are 4 nodes of 4. Over the outer axis alone, 4 groups cross the nodes at the same time; each device has its
    own bytes and its share of the wire. Over both axes, the 4 devices of a node together carry one tensor across, a
    quarter each.
    """
    model = Analytic(nested(4, inner=1e11, outer=1e10, algorithms=(RING, DIRECT)))
    mesh, n = axes(4, 4), 1e9

    def s(kind, axis_set):
        return float(model.collective(kind, mesh, axis_set, n))

    outer, inner, both = 1, 2, 3
    assert s("all_reduce", inner) == pytest.approx(2 * 3 / 4 * n / 1e11)
    assert s("all_reduce", outer) == pytest.approx(2 * 3 / 4 * n / 1e10)
    # Inside: reduce-scatter and all-gather of n; across: an all-reduce of n/4 (18.75 ms + 37.5 ms). Or 4 pipelined
    # rings through all 16 devices, each with n/4 at 1e10: 2 * 15/16 * n / 4e10 = 46.9 ms.
    assert s("all_reduce", both) == pytest.approx(2 * 15 / 16 * n / 4 / 1e10)
    assert s("reduce_scatter", both) == pytest.approx(15 / 16 * n / 4 / 1e10)
    # 12 of 16 parts leave the node through each device's own share of the wire.
    assert s("all_to_all", both) == pytest.approx(12 / 16 * n / 1e10)
    assert s("permute", both) == pytest.approx(n / 1e10)


def test_level_by_level_takes_fewer_steps_and_more_calls():
    """A tiny tensor takes 2 x 3 + 2 x 3 steps instead of the flat ring's 2 x 15, but 3 launches."""
    ring = Algorithm(algorithm="ring", protocol="p", launch_s=2e-6, step_s=(1e-5, 1e-5))
    model = Analytic(nested(4, algorithms=(ring,)))
    got = float(model.collective("all_reduce", axes(4, 4), 3, 1.0))
    assert got == pytest.approx(3 * 2e-6 + 2 * 3 * 1e-5 + 2 * 3 * 1e-5, rel=1e-4)
    got = float(model.collective("all_gather", axes(4, 4), 3, 1.0))
    assert got == pytest.approx(2 * 2e-6 + 3 * 1e-5 + 3 * 1e-5, rel=1e-4)


def test_all_reduce_can_be_run_as_its_two_halves():
    """In this library, reduce-scatter and all-gather are one-shot while the all-reduce is a ring."""
    shot = Algorithm(
        algorithm="one_shot",
        protocol="p",
        launch_s=0.0,
        step_s=(1e-6,),
        kinds=("reduce_scatter", "all_gather"),
    )
    ring = Algorithm(algorithm="ring", protocol="p", launch_s=0.0, step_s=(1e-6,))
    model = Analytic(replace(flat(), algorithms=(shot, ring)))
    got = float(model.collective("all_reduce", axes(8), 1, 8e5))
    assert got == pytest.approx(2 * (1e-6 + 7e5 / 1e11))


def test_all_to_all_waits_for_as_many_messages_as_it_cannot_keep_in_flight():
    """4 nodes of 4: 3 peers inside and 12 across, with 2 messages at once."""
    direct = Algorithm(algorithm="direct", protocol="p", launch_s=1e-3, step_s=(1e-6, 1e-4), peers_at_once=2)
    model = Analytic(nested(4, algorithms=(direct, RING)))
    got = float(model.collective("all_to_all", axes(4, 4), 3, 1e-3))
    assert got == pytest.approx(1e-3 + 2 * 1e-6 + 6 * 1e-4)


def test_a_send_to_another_node_is_bound_by_its_channels():
    """It is not within the node, nor is anything that no bound is stated for."""
    send = Algorithm(algorithm="direct", protocol="p", launch_s=0.0, step_s=(0.0, 0.0), kinds=("permute",))
    rates = {}
    for bound in (0.0, 1e9):
        model = Analytic(nested(4, algorithms=(replace(send, most_between_bytes_per_s=bound), RING)))
        rates[bound] = [1e9 / float(model.collective("permute", axes(4, 4), a, 1e9)) for a in (1, 2)]
    assert rates[1e9][0] == pytest.approx(1e9)
    assert rates[0.0][0] > 2e9
    assert rates[1e9][1] == rates[0.0][1]


def test_another_library_runs_what_it_is_for_if_it_is_named():
    """Otherwise the machine's own does."""
    own = Algorithm(
        algorithm="direct", protocol="own", launch_s=2e-3, step_s=(0.0, 0.0), kinds=("all_to_all",)
    )
    fast = replace(own, protocol="other", launch_s=1e-3, named=True)
    machine = nested(4, algorithms=(own, fast, RING))
    for names_, start in (((), 2e-3), (("unknown",), 2e-3), (("unknown", "other"), 1e-3)):
        model = Analytic(by_library(machine, names_))
        assert float(model.collective("all_to_all", axes(4, 4), 3, 1e-3)) == pytest.approx(start)
        assert float(model.collective("all_gather", axes(4, 4), 3, 1e-3)) < 1e-3
    slower = Analytic(by_library(nested(4, algorithms=(fast, replace(own, launch_s=5e-4))), ("other",)))
    assert float(slower.collective("all_to_all", axes(4, 4), 3, 1e-3)) == pytest.approx(1e-3)


def test_a_library_that_hands_tokens_on_sends_them_once_to_each_node():
    """Two of 4 nodes' 4 devices each, drawn at random: a node gets 4 (1 - (3/4)^2) / 2 of the bytes of both copies."""
    sends = Algorithm(
        algorithm="direct", protocol="own", launch_s=0.0, step_s=(0.0, 0.0), kinds=("all_to_all",)
    )
    for once, copies, part in ((False, 2.0, 1.0), (True, 1.0, 1.0), (True, 2.0, 4 * (1 - (3 / 4) ** 2) / 2)):
        machine = nested(4, algorithms=(replace(sends, once=once), RING))
        got = [
            float(Analytic(machine, copies=c).collective("all_to_all", axes(4, 4), 2, 1e9))
            for c in (1.0, copies)
        ]
        assert got[1] == pytest.approx(part * got[0])
    drawn = np.random.default_rng(0).integers(0, 4, (100_000, 2))
    nodes = 1 + np.mean(drawn[:, 0] != drawn[:, 1])
    assert part * 2 == pytest.approx(nodes, rel=1e-2)
    with pytest.raises(ValueError, match=r"at least once in an all-to-all, got 0\.5"):
        Analytic(machine, copies=0.5)


def test_torus_uses_both_dims_at_once_and_closes_rings():
    n = 1e9
    line, ring = Analytic(torus(ways=4)), Analytic(torus(ways=4, wrap_ways=4))
    mesh = axes(4, 4)
    one = 3 / 4 * n / 1e11
    assert float(line.collective("all_gather", mesh, 2, n)) == pytest.approx(one)
    assert float(ring.collective("all_gather", mesh, 2, n)) == pytest.approx(one / 2)
    # Two halves, each first along another dim: 3/4 + 3/16 of half the bytes.
    assert float(line.collective("all_gather", mesh, 3, n)) == pytest.approx(15 / 16 * n / 2 / 1e11)
    # The middle link carries half of the line's tensors to the other half.
    assert float(line.collective("all_to_all", mesh, 2, n)) == pytest.approx(n / 1e11)


def test_interleaved_groups_share_the_links_of_a_torus():
    """16 devices in a line as 4 x 4: neighbours on the outer axis are 4 links apart, and 4 groups use each link."""
    model = Analytic(torus())
    near, far = (float(model.collective("all_gather", axes(4, 4, 4), s, 1e9)) for s in (4, 2))
    assert far == pytest.approx(4 * near)


def test_a_part_of_a_closed_dim_is_a_line():
    """16 devices in a ring as 4 x 4: the inner 4 are neighbours on a line, the outer 4 go all the way around."""
    model = Analytic(torus(wrap_ways=16))
    one = 3 / 4 * 1e9 / 1e11
    inner, outer = (float(model.collective("all_gather", axes(4, 4), s, 1e9)) for s in (2, 1))
    assert inner == pytest.approx(one)
    assert outer == pytest.approx(one * 4 / 2)


def test_tpu_all_gather_of_a_pod_row_is_the_books():
    """How To Scale Your Model: bytes / 9e10 bytes/s (both directions) on a closed axis of 16."""
    v5e = MODELS["tpu_v5e"]
    got = float(v5e.collective("all_gather", axes(16, 16), 2, 1e10))
    assert got == pytest.approx(15 / 16 * 1e10 / 9e10, rel=1e-3)


NCCL_US = {
    ("a100x8", "all_gather", 2): 1790,
    ("a100x8", "all_gather", 8): 2290,
    ("a100x8", "all_reduce", 4): 3764,
    ("h100x8", "all_gather", 2): 1040,
    ("h100x8", "all_gather", 4): 1268,
    ("h100x8", "all_gather", 8): 1399,
    ("h100x8", "reduce_scatter", 8): 1419,
    ("h100x8", "all_reduce", 2): 1686,
    ("h100x8", "all_reduce", 4): 2308,
    ("h100x8", "all_to_all", 8): 1480,
    ("h200x8", "all_to_all", 4): 1262,
    ("b200x8", "all_gather", 8): 761,
    ("b200x8", "all_reduce", 8): 1400,
    ("gb200_nvl72", "all_gather", 4): 705,
}
"""512 MiB on one node by nccl-tests (ai-dynamo/aiconfigurator@095f58a). Of two devices, each copies as much to itself
as it sends."""


@pytest.mark.parametrize(("row", "us"), NCCL_US.items(), ids=str)
def test_large_collectives_of_a_node_as_nccl_runs_them(row, us):
    name, kind, ways = row
    got = float(Analytic(load(name)).collective(kind, axes(ways), 1, 2.0**29))
    assert 1e6 * got == pytest.approx(us, rel=0.15)


def test_a_device_copies_its_own_part():
    free = flat(bandwidth=1e11, latency_s=0.0, algorithms=("ring", "direct"))
    plain, own = Analytic(free), Analytic(replace(free, own_part_bytes_per_s=4e11))
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"):
        for ways in (2, 4, 8):
            more = own.collective(kind, axes(ways), 1, 1e9) - plain.collective(kind, axes(ways), 1, 1e9)
            assert float(more) == pytest.approx(1e9 / ways / 4e11)
    assert own.collective("permute", axes(8), 1, 1e9) == plain.collective("permute", axes(8), 1, 1e9)


def test_a_broadcast_is_a_pipelined_chain_or_a_scatter_and_an_all_gather():
    """A chain sends all bytes once and takes P - 1 hops to fill. A scatter and an all-gather send 2 (P - 1) / P of the
    bytes and take twice the hops."""
    model = Analytic(flat(latency_s=2e-6, bandwidth=1e11, algorithms=("ring",)))
    for n in (1.0, 1e6, 1e9):
        assert float(model.collective("broadcast", axes(8), 1, n)) == pytest.approx(7 * 2e-6 + n / 1e11)
    pair = float(model.collective("broadcast", axes(2), 1, 1e9))
    assert pair == pytest.approx(2e-6 + 1e9 / 1e11)
    # 4 nodes of 4: the 4 devices of a node carry a quarter each across; inside, a device passes on all of it.
    model = Analytic(nested(4, inner=1e11, outer=1e10, algorithms=(RING,)))
    assert float(model.collective("broadcast", axes(4, 4), 3, 1e9)) == pytest.approx(1e9 / 4 / 1e10)
    assert float(model.collective("broadcast", axes(4, 4), 1, 1e9)) == pytest.approx(1e9 / 1e10)


def test_a_switch_that_adds_sends_the_bytes_once_whatever_the_ways():
    shot = Algorithm(algorithm="in_network", protocol="p", launch_s=1e-6, step_s=(2e-5, 0.0))
    model = Analytic(nested(8, inner=1e11, outer=1e10, algorithms=(RING, shot)))
    for ways in (4, 8):
        assert float(model.collective("all_reduce", axes(ways), 1, 1e9)) == pytest.approx(2.1e-5 + 1e-2)
    # Two devices exchange halves at the same rate without the switch's latency.
    assert float(model.collective("all_reduce", axes(2), 1, 1e9)) == pytest.approx(1e-2)
    # Across nodes no switch adds, because step_s is 0 there.
    assert float(model.collective("all_reduce", axes(4, 8), 2, 1e9)) < 1.1e-2
    rings = Analytic(nested(8, inner=1e11, outer=1e10, algorithms=(RING,)))
    across = [float(m.collective("all_reduce", axes(4, 8), 1, 1e9)) for m in (model, rings)]
    assert across[0] == across[1]


def test_a_partial_mesh_of_wires_gives_a_pair_one_link():
    """On a DGX-1V, one link of 25 GB/s joins GPUs 0 and 1."""
    got = float(MODELS["v100x8"].collective("all_gather", axes(4, 2), 2, 1e9))
    assert got == pytest.approx(1e9 / 2 / (25e9 * 0.88), rel=0.01)


# -- laws --


@given(models, kinds, sizes_of_buffers, sizes_of_buffers, st.data())
def test_more_bytes_never_cost_less(name, kind, a, b, data):
    model = MODELS[name]
    mesh = draw_mesh(data, model)
    axis_set = data.draw(st.integers(0, (1 << len(mesh.sizes)) - 1))
    low, high = model.collective(kind, mesh, axis_set, sorted([a, b]))
    assert 0 <= low <= high < math.inf


@given(models, kinds, sizes_of_buffers, st.data())
def test_nothing_to_join_or_to_send_is_free(name, kind, n, data):
    model = MODELS[name]
    mesh = draw_mesh(data, model)
    every = np.arange(1 << len(mesh.sizes))
    assert model.collective(kind, mesh, 0, n) == 0
    assert not model.collective(kind, mesh, every, 0.0).any()
    if n > 0:
        assert (model.collective(kind, mesh, every[1:], n) > 0).all()
    assert model.collective(kind, axes(1), 1, n) == 0


@given(models, sizes_of_buffers, st.data())
def test_all_reduce_is_never_more_expensive_than_its_two_halves(name, n, data):
    model = MODELS[name]
    mesh = draw_mesh(data, model)
    every = np.arange(1 << len(mesh.sizes))
    whole, first, second = (model.collective(k, mesh, every, n) for k in KINDS[:3])
    assert (whole <= (first + second) * (1 + 1e-12)).all()


@given(kinds, sizes_of_buffers, st.integers(2, 64), st.integers(2, 64))
def test_more_ways_never_cost_less_on_one_switch(kind, n, a, b):
    for model in (MODELS["flat"], MODELS["cpu_host"]):
        few, many = (float(model.collective(kind, axes(p), 1, n)) for p in sorted([a, b]))
        assert few <= many * (1 + 1e-12)


@given(kinds, sizes_of_buffers, st.integers(1, 32), st.integers(1, 32))
def test_more_nodes_never_cost_less(kind, n, a, b):
    """More ways at the outermost level never cost less. More ways inside can, because more wires leave the node."""
    for name in ("nested", "h100x8", "1080tix8"):
        model = MODELS[name]
        node = model.machine.levels[0].ways
        few, many = (float(model.collective(kind, axes(p, node), 3, n)) for p in sorted([a, b]))
        assert few <= many * (1 + 1e-12)


@given(models, sizes_of_buffers, st.data())
def test_never_worse_than_a_flat_ring_over_the_slowest_level(name, n, data):
    model = MODELS[name]
    machine = model.machine
    mesh = draw_mesh(data, model)
    if any(level.topology == "torus" for level in machine.levels):
        mesh = axes(mesh.devices)  # interleaved groups share links: they have no such bound
    axis_set = data.draw(st.integers(1, (1 << len(mesh.sizes)) - 1))
    ways = mesh.ways(axis_set)
    rates = [
        bandwidth * level.efficiency
        for level in machine.levels
        for bandwidth in (level.bandwidth_bytes_per_s, *level.bandwidth_at_ways.values())
    ]
    rings = [a for a in machine.algorithms if a.algorithm == "ring"] or [
        Algorithm(
            algorithm="ring",
            protocol="p",
            launch_s=0.0,
            step_s=tuple(level.latency_s for level in machine.levels),
        )
    ]
    own = n / ways / machine.own_part_bytes_per_s if machine.own_part_bytes_per_s else 0.0
    bound = own + min(
        a.launch_s + 2 * (ways - 1) * (max(a.step_s) + n / ways / (min(rates) * a.bandwidth_fraction))
        for a in rings
    )
    assert float(model.collective("all_reduce", mesh, axis_set, n)) <= bound * (1 + 1e-12)


@given(
    st.sampled_from([*sorted(MODELS), "paper"]),
    kinds,
    st.lists(sizes_of_buffers, min_size=1, max_size=6),
    st.data(),
)
def test_arrays_are_priced_as_their_elements(name, kind, buffers, data):
    model: CostModel = get("paper", MACHINES["1080tix8"]) if name == "paper" else MODELS[name]
    mesh = data.draw(st.sampled_from(meshes(8, MACHINES["h100x8"], 3)))
    every = np.arange(1 << len(mesh.sizes))
    got = model.collective(kind, mesh, every[:, None], np.array(buffers)[None, :])
    assert got.shape == (len(every), len(buffers))
    assert got.dtype == np.float64
    for s in every:
        for j, n in enumerate(buffers):
            assert got[s, j] == model.collective(kind, mesh, int(s), n)


@given(models, kinds, sizes_of_buffers, st.floats(1.0, 4.0), st.data())
def test_no_jump_where_one_algorithm_takes_over_from_another(name, kind, n, more, data):
    """The minimum of lines is concave in the bytes: more bytes cost at most proportionally more."""
    model = MODELS[name]
    mesh = draw_mesh(data, model)
    every = np.arange(1 << len(mesh.sizes))
    few, many = (model.collective(kind, mesh, every, x) for x in (n, n * more))
    assert (many <= few * more * (1 + 1e-9)).all()


@given(models, kinds, sizes_of_buffers, st.data())
def test_no_faster_than_the_bytes_that_must_enter_a_device_and_a_node(name, kind, n, data):
    """For any algorithm, each device must receive a minimum of bytes, and so must the devices of a node together."""
    machine = MODELS[name].machine
    if any(level.topology == "torus" for level in machine.levels):
        return
    mesh = draw_mesh(data, MODELS[name])
    axis_set = data.draw(st.integers(1, (1 << len(mesh.sizes)) - 1))
    rows = [r for i, r in enumerate(axis_levels(mesh, machine)) if axis_set >> i & 1]
    ways = [math.prod(r[level] for r in rows) for level in range(len(machine.levels))]
    total = math.prod(ways)
    added = any(a.algorithm == "in_network" for a in machine.algorithms)
    enters = {
        "all_reduce": 1.0 if added else 2 * (total - 1) / total,
        "reduce_scatter": (total - 1) / total,
        "all_gather": (total - 1) / total,
        "all_to_all": (total - 1) / total,
        "permute": 1.0,
        "broadcast": 1.0,
    }
    best = [
        max(level.bandwidth_bytes_per_s, *level.bandwidth_at_ways.values(), 0.0) * level.efficiency
        for level in machine.levels
    ]
    if total == 1:
        return
    fastest = max(b for b, w in zip(best, ways, strict=True) if w > 1)
    got = float(MODELS[name].collective(kind, mesh, axis_set, n))
    assert got >= enters[kind] * n / fastest * (1 - 1e-9)
    if ways[-1] > 1 and kind in ("all_gather", "reduce_scatter"):
        # Everything except its own share crosses into each outermost unit, over the wires of all its devices.
        part = (ways[-1] - 1) / ways[-1] / math.prod(ways[:-1])
        assert got >= part * n / best[-1] * (1 - 1e-9)


@settings(max_examples=30)
@given(kinds, sizes_of_buffers, st.data())
def test_axis_order_within_a_switch_changes_no_price(kind, n, data):
    """``meshes(distinct=True)`` depends on this."""
    model = MODELS["h100x8"]
    a, b = data.draw(st.sampled_from([(2, 4), (4, 2), (2, 2)]))
    there, back = axes(4, a, b), axes(4, b, a)
    sets = np.arange(8)
    swapped = (sets & 1) | (sets & 2) << 1 | (sets & 4) >> 1
    assert (model.collective(kind, there, sets, n) == model.collective(kind, back, swapped, n)).all()


# -- refusals --


def test_axis_sets_outside_of_the_mesh_are_refused():
    with pytest.raises(ValueError, match=r"axis sets of mesh \('x', 'y'\) must be in 0\.\.3"):
        MODELS["flat"].collective("all_reduce", axes(2, 2), 4, 1.0)


def test_a_machine_whose_algorithms_serve_no_all_to_all_says_so():
    model = Analytic(flat(algorithms=("ring",)))
    with pytest.raises(PaseError, match=r"machine flat: .* all_to_all"):
        model.collective("all_to_all", axes(4), 1, 1.0)
