"""Finds the machine file of a device by the name that its driver reports."""

from __future__ import annotations

import re
from functools import cache

from pase.machine.load import load, names
from pase.machine.types import Device

__all__ = ["device_named", "machine_named"]

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
def machine_named(name: str) -> str | None:
    """Returns the name of the machine file whose device has this model; None if no file has it.

    name: as a driver or profiler reports it ("NVIDIA H100 80GB HBM3").

    >>> machine_named("NVIDIA H100 80GB HBM3"), machine_named("NVIDIA H800")
    ('h100x8', None)
    """
    wanted = _model(name)
    return next((m for m in names() if wanted & _model(load(m).device.name)), None)


def device_named(name: str) -> Device | None:
    """Returns the device of ``machine_named``.

    >>> device_named("AMD Instinct MI300X VF").name
    'AMD Instinct MI300X 192GB'
    """
    found = machine_named(name)
    return None if found is None else load(found).device
