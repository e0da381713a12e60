"""Finds the machine file of a device by the name that its driver reports."""

from __future__ import annotations

import re
from functools import cache

from pase.machine.load import load, names
from pase.machine.types import Device

__all__ = ["device_named"]

_SIZE = re.compile(r"^\d+(gb|gib|g)$")


def _model(name: str) -> set[str]:
    """The words of a device's name with digits, except the size of its memory.

    >>> _model("NVIDIA H100 80GB HBM3")
    {'h100'}
    """
    words = re.split(r"[\s\-]+", name.lower())
    return {
        w
        for w in words
        if any(c.isdigit() for c in w) and not _SIZE.match(w) and not w.startswith(("hbm", "sxm"))
    }


@cache
def device_named(name: str) -> Device | None:
    """Returns the device of the machine file with this model; None if no file has it.

    name: as a driver or profiler reports it ("NVIDIA H100 80GB HBM3").

    >>> device_named("AMD Instinct MI300X VF").name, device_named("NVIDIA H800")
    ('AMD Instinct MI300X 192GB', None)
    """
    wanted = _model(name)
    for machine in names():
        device = load(machine).device
        if wanted & _model(device.name):
            return device
    return None
