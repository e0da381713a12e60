"""The order of JAX's devices by hosts and by links, from attributes that depend on the platform."""

from __future__ import annotations

import random
from dataclasses import dataclass

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
