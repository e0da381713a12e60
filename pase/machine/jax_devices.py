"""Where JAX's devices are: hosts and links, read from each device's attributes.

Attributes differ by platform. All devices know their process; only TPU devices are chips at places of a torus, with
cores. GPU devices have ``coords`` too, but these are numbers of slice, host and card, and other attributes raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Device as JaxDevice

__all__ = ["as_linked", "by_hosts", "chip_coords"]


def chip_coords(device: JaxDevice) -> tuple[int, ...] | None:
    """A TPU chip's place on its torus; None for other platforms, which have no torus."""
    if device.platform != "tpu" or getattr(device, "coords", None) is None:
        return None
    return tuple(device.coords)


def by_hosts(devices: Sequence[JaxDevice]) -> list[JaxDevice]:
    """The devices of a slice (an NVLink domain) one after the other, in it those of a process, by their local number.

    Inner axes of a mesh over this list lie inside of a host, whatever order JAX or the user has the devices in.
    """

    def place(d: JaxDevice) -> tuple[int, int, int]:
        local = getattr(d, "local_hardware_id", None)
        return (_slice(d), d.process_index, d.id if local is None else local)

    return sorted(devices, key=place)


def as_linked(devices: Sequence[JaxDevice]) -> list[JaxDevice]:
    """The devices in the order of machine files: TPU chips along the slice's longest dim first, others by hosts."""
    at = {id(d): c for d in devices if (c := chip_coords(d)) is not None}
    if not at or len(at) < len(devices):
        return by_hosts(devices)
    extent = [len(set(along)) for along in zip(*at.values(), strict=True)]
    outer_first = sorted(range(len(extent)), key=lambda i: (extent[i], i))

    def place(d: JaxDevice) -> tuple[int, ...]:
        return (_slice(d), *(at[id(d)][i] for i in outer_first), d.core_on_chip)

    return sorted(devices, key=place)


def _slice(device: JaxDevice) -> int:
    return getattr(device, "slice_index", None) or 0
