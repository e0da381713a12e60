"""Where JAX's devices are: hosts and links, read from each device's attributes.

Attributes depend on the platform. All devices have a process. Only TPU devices are chips with coordinates on a torus,
and with cores. GPU devices have ``coords``, too, but these are the numbers of slice, host and card, and other
attributes raise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Device as JaxDevice

__all__ = ["as_linked", "by_hosts", "chip_coords"]


def chip_coords(device: JaxDevice) -> tuple[int, ...] | None:
    """A TPU chip's coordinates on its torus. None on other platforms, which have no torus."""
    if device.platform != "tpu" or getattr(device, "coords", None) is None:
        return None
    return tuple(device.coords)


def by_hosts(devices: Sequence[JaxDevice]) -> list[JaxDevice]:
    """Sorts devices by slice (an NVLink domain), then by process, then by local number.

    The inner axes of a mesh over this list are then inside a host, in whatever order JAX or the user lists the devices.
    """

    def place(d: JaxDevice) -> tuple[int, int, int]:
        local = getattr(d, "local_hardware_id", None)
        return (_slice(d), d.process_index, d.id if local is None else local)

    return sorted(devices, key=place)


def as_linked(devices: Sequence[JaxDevice]) -> list[JaxDevice]:
    """Sorts devices as machine files order them: TPU chips along the slice's longest dim first, others by host."""
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
