"""The order of JAX's devices by hosts and by links, from attributes that depend on the platform."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bench.cases.plans import case_of
from pase.machine.jax_devices import as_linked, by_hosts, chip_coords


@dataclass(frozen=True)
class Device:
    """Has the attributes of a JAX device. Other attributes raise an error, as on GPUs."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    coords: tuple[int, ...] | None = None
    slice_index: int | None = None
    local_hardware_id: int | None = None
    core_on_chip: int = 0


def shuffled(devices):
    """The devices in another order, which is the same in every run."""
    out = list(devices)
    random.Random(0).shuffle(out)
    return out


def test_only_tpu_chips_have_coordinates():
    assert chip_coords(Device(0, platform="tpu", coords=(1, 2, 0))) == (1, 2, 0)
    assert chip_coords(Device(0, platform="gpu", coords=(0, 0, 3))) is None
    assert chip_coords(Device(0, platform="cpu")) is None


def test_the_devices_of_a_slice_and_of_a_host_are_neighbours():
    """Two slices of two hosts with two devices each. Ids run against the order of the hosts."""
    devices = [
        Device(7 - n, process_index=n // 2, slice_index=1 - n // 4, local_hardware_id=n % 2) for n in range(8)
    ]
    ordered = by_hosts(shuffled(devices))
    assert [(d.slice_index, d.process_index, d.local_hardware_id) for d in ordered] == [
        (s, p, k) for s in (0, 1) for p in ((2, 3) if s == 0 else (0, 1)) for k in (0, 1)
    ]


def test_without_local_numbers_ids_order_the_devices_of_a_host():
    ordered = by_hosts(shuffled(Device(i, process_index=i % 2) for i in range(6)))
    assert [d.id for d in ordered] == [0, 2, 4, 1, 3, 5]


def test_the_longest_dim_of_a_torus_is_innermost():
    """A 4 × 2 slice: consecutive devices are neighbours along the dim of 4 chips, with two cores on each chip."""
    chips = [
        Device(2 * (4 * y + x) + core, platform="tpu", coords=(x, y, 0), core_on_chip=core)
        for x in range(4)
        for y in range(2)
        for core in range(2)
    ]
    ordered = as_linked(shuffled(chips))
    assert [(d.coords, d.core_on_chip) for d in ordered] == [
        ((x, y, 0), core) for y in range(2) for x in range(4) for core in range(2)
    ]


def test_devices_that_are_not_all_chips_are_ordered_by_hosts():
    mixed = [Device(0, process_index=1, platform="tpu", coords=(0, 0, 0)), Device(1, platform="cpu")]
    assert as_linked(mixed) == by_hosts(mixed) == mixed[::-1]


@pytest.mark.parametrize("shape", [(4, 8, 1), (8, 4, 1), (2, 2, 2)])
def test_chips_stand_as_the_links_join_them(shape):
    chips = [
        SimpleNamespace(id=i, platform="tpu", coords=(x, y, z), core_on_chip=0)
        for i, (z, y, x) in enumerate(itertools.product(*map(range, reversed(shape))))
    ]
    ordered = as_linked(chips)
    longest = max(range(3), key=lambda i: (shape[i], i))
    along = [c.coords[longest] for c in ordered[: shape[longest]]]
    assert along == list(range(shape[longest]))
    assert sorted(c.id for c in ordered) == list(range(len(chips)))


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU device of JAX: it has coords, which are numbers of slice, host and card, but no core on a chip."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    local_hardware_id: int | None = None
    platform: str = "gpu"

    @property
    def core_on_chip(self) -> int:
        raise AttributeError


def test_gpus_stand_by_hosts():
    """First 4 hosts of 8 GPUs, in an order that alternates between hosts; then 2 domains of 2 hosts."""
    cards = [Card(i, i % 4, (0, i % 4, i // 4)) for i in range(32)]
    ordered = as_linked(cards)
    assert [c.process_index for c in ordered] == [h for h in range(4) for _ in range(8)]
    assert [c.id for c in ordered[:8]] == [0, 4, 8, 12, 16, 20, 24, 28]
    numbered = [Card(i, i % 4, (0, 0, 0), local_hardware_id=7 - i // 4) for i in range(32)]
    assert [c.id for c in as_linked(numbered)[:8]] == [28, 24, 20, 16, 12, 8, 4, 0]
    domains = [Card(i, i % 4, (i % 2, 0, 0), slice_index=i % 2) for i in range(8)]
    assert [(c.slice_index, c.process_index) for c in as_linked(domains)] == [
        (s, p) for s in range(2) for p in (s, s, s + 2, s + 2)
    ]


def test_a_plan_has_a_mesh_on_gpus(monkeypatch):
    """The inner axis of a plan's mesh is inside of a host."""
    from pase.backends.emit import shardings_json

    params = {"w": jax.ShapeDtypeStruct((16, 16), "float32")}
    batch = jax.ShapeDtypeStruct((32, 16), "float32")
    case = case_of(lambda p, x: (x @ p["w"]).sum(), params, batch, devices=8)
    cards = np.array([Card(i, i % 2, (0, i % 2, i // 2)) for i in range(8)], dtype=object)
    made = []
    monkeypatch.setattr(jax.sharding, "Mesh", lambda grid, names: made.append(grid))
    plan = case.plan("random1@2x4")
    plan.jax.mesh(cards)
    monkeypatch.setattr(jax, "devices", lambda: list(cards))
    data = {"mesh": {"a": 2, "b": 4}, "parameters": {}, "inputs": {}, "activations": {}}
    shardings_json.jax_shardings(data)
    for grid in made:
        assert [{c.process_index for c in row} for row in grid] == [{0}, {1}]
    assert len(made) == 2


@pytest.mark.gpu_compiler
def test_a_plan_s_mesh_on_hosts_of_compile_only_gpus():
    """XLA's own devices for 4 hosts of 8 GPUs, in another order: the inner axis of the mesh is inside of a host."""
    from jax.experimental import topologies

    from pase.backends.audit.targets import devices_of
    from pase.machine import load

    target = devices_of(load("h100x8"), 32)
    made = topologies.get_topology_desc("", "cuda", target_config=target.config, topology=target.topology)
    assert len({d.process_index for d in made.devices}) == 4
    params = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
    batch = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = case_of(lambda p, x: (x @ p["w"]).sum(), params, batch, devices=32).plan("random1@4x8")
    grid = plan.jax.mesh(shuffled(made.devices)).devices
    assert [{d.process_index for d in row} for row in grid] == [{0}, {1}, {2}, {3}]
