"""A machine that is faster or slower than its file says, to find what a strategy is worth if a figure is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pase.errors import PaseError
from pase.machine.groups import GroupedMachine
from pase.machine.types import Curve, LinkLevel, Machine

__all__ = ["QUANTITIES", "scaled"]

QUANTITIES = {
    "bandwidth": "bytes/s of every link level, and of measured collectives beyond their smallest size",
    "latency": "seconds per step and per launch of collectives, and measured collectives' time at their smallest size",
    "flops": "FLOP/s of products and of vector work, including measured ones",
    "memory": "bytes/s of device memory, and of its measured curve beyond the smallest size",
}
"""Quantity that can be scaled -> the figures of a machine file that it stands for."""


def scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """Returns the machine with each of these quantities multiplied by its factor. Tables are scaled like figures.

    >>> from pase.machine import load
    >>> m = load("h100x8")
    >>> slow = scaled(m, {"bandwidth": 0.5})
    >>> slow.levels[0].bandwidth_bytes_per_s / m.levels[0].bandwidth_bytes_per_s, slow.device == m.device
    (0.5, True)

    Raises PaseError for an unknown quantity and for a factor that is not above 0. factors: by names of ``QUANTITIES``.
    """
    for name, factor in factors.items():
        if name not in QUANTITIES:
            raise PaseError(f"cannot vary '{name}'", fix=f"vary one of {', '.join(QUANTITIES)}")
        if not 0 < factor < float("inf"):
            raise PaseError(f"it cannot be scaled by {factor:g}", where=name, fix="use a factor above 0")
    links, steps, flops, memory = (factors.get(q, 1.0) for q in ("bandwidth", "latency", "flops", "memory"))
    device = replace(
        machine.device,
        peak_flops={k: v * flops for k, v in machine.device.peak_flops.items()},
        vector_flops=None if machine.device.vector_flops is None else machine.device.vector_flops * flops,
        memory_bandwidth_bytes_per_s=machine.device.memory_bandwidth_bytes_per_s * memory,
        matmul_tables=tuple(
            replace(t, flops_per_s=tuple(f * flops for f in t.flops_per_s))
            for t in machine.device.matmul_tables
        ),
        memory_curve=None
        if machine.device.memory_curve is None
        else _curve(machine.device.memory_curve, 1.0, memory),
    )
    if isinstance(machine, GroupedMachine):
        groups = tuple(replace(g, machine=scaled(g.machine, factors)) for g in machine.groups)
        machine = replace(machine, groups=groups, between=_link(machine.between, steps, links))
    return replace(
        machine,
        device=device,
        levels=tuple(_link(level, steps, links) for level in machine.levels),
        algorithms=tuple(
            replace(
                a,
                launch_s=a.launch_s * steps,
                step_s=tuple(s * steps for s in a.step_s),
                most_bytes_per_s=a.most_bytes_per_s * links,
                most_between_bytes_per_s=a.most_between_bytes_per_s * links,
            )
            for a in machine.algorithms
        ),
        own_part_bytes_per_s=machine.own_part_bytes_per_s * links,
        collectives=tuple(replace(c, curve=_curve(c.curve, steps, links)) for c in machine.collectives),
        paper=None
        if machine.paper is None
        else replace(
            machine.paper,
            flops=machine.paper.flops * flops,
            bandwidth_bytes_per_s=machine.paper.bandwidth_bytes_per_s * links,
        ),
    )


def _link(level: LinkLevel, steps: float, links: float) -> LinkLevel:
    return replace(
        level,
        latency_s=level.latency_s * steps,
        bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * links,
        bandwidth_at_ways={w: b * links for w, b in level.bandwidth_at_ways.items()},
    )


def _curve(curve: Curve, start: float, rate: float) -> Curve:
    """Multiplies the time at the smallest size by ``start``, and divides the time in excess of it by ``rate``."""
    if start == rate == 1.0:
        return curve  # bit for bit the same
    first = curve.seconds[0]
    return replace(curve, seconds=tuple(first * start + (s - first) / rate for s in curve.seconds))
