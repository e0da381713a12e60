"""What devices receive when parameters go from one plan's layout to another's: bytes, links and time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pase.errors import PaseError
from pase.machine import Machine, Mesh
from pase.machine.meshes import level_ways
from pase.plan.types import Placement, PlanData, TensorPlan

__all__ = ["ParameterReshard", "parameter_reshards"]

Box = tuple[tuple[int, int], ...]
"""Per tensor dim, the index of the first element and the index after the last one."""


@dataclass(frozen=True, kw_only=True)
class ParameterReshard:
    """The reshard of one parameter.

    received: per link level of the machine, innermost first, the most bytes that any device receives. A device receives
        nothing that it already has, and it receives over a level only what no nearer device has.
    """

    parameter: str
    old: Placement
    new: Placement
    received: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The most bytes that one device receives."""
        return sum(self.received)

    def seconds(self, machine: Machine) -> float:
        """Return each level's bytes divided by its bandwidth, one level after the other."""
        return sum(
            n / level.bandwidth_bytes_per_s for n, level in zip(self.received, machine.levels, strict=True)
        )


def parameter_reshards(old: PlanData, new: PlanData, machine: Machine) -> list[ParameterReshard]:
    """Return every parameter of which some device must receive a part, the largest first.

    Both plans must be of one model. Devices have the same numbers in both, so a plan for more devices starts with the
    devices of the other. Only one of the plans may pad dims, because padding consists of zeros that need not be sent.

    Raises PaseError if the parameters differ.
    """
    if missing := sorted(set(old.parameters) ^ set(new.parameters)):
        raise PaseError(
            f"the plans are not of one model: only one of them has a parameter '{missing[0]}'",
            fix="compare two plans of the same model",
        )
    devices = max(old.devices, new.devices)
    ways = level_ways(devices, machine)
    found = []
    for name, t in old.parameters.items():
        to = new.parameters[name]
        own, its = (tuple(p.unpadded or p.shape) for p in (t, to))
        if (own, t.dtype) != (its, to.dtype):
            raise PaseError(
                f"it is {t.dtype}{list(own)} in one plan and {to.dtype}{list(its)} in the other",
                where=f"parameter '{name}'",
                fix="compare two plans of the same model",
            )
        received = _received(t, _boxes(t, old.mesh), _boxes(to, new.mesh), ways)
        if any(received):
            found.append(ParameterReshard(parameter=name, old=t.storage, new=to.storage, received=received))
    return sorted(found, key=lambda m: -m.nbytes)


def _boxes(t: TensorPlan, mesh: Mesh) -> list[Box]:
    """Return, for each device, the part of the tensor that it holds, without padding."""
    size: Mapping[str, int] = mesh.by_name
    out = []
    for place in itertools.product(*map(range, mesh.sizes)):
        at = dict(zip(mesh.names, place, strict=True))
        box = []
        splits = (*t.storage, *((),) * len(t.shape))
        for extent, own, axes in zip(t.shape, t.unpadded or t.shape, splits, strict=False):
            index, parts = 0, 1
            for a in axes:
                index, parts = index * size[a] + at[a], parts * size[a]
            box.append((min(index * extent // parts, own), min((index + 1) * extent // parts, own)))
        out.append(tuple(box))
    return out


def _received(t: TensorPlan, old: Sequence[Box], new: Sequence[Box], ways: Sequence[int]) -> tuple[int, ...]:
    """Return, for each link level, the most bytes of the tensor that one device receives over it.

    The devices below a level together hold the union of their boxes. Layouts split dims evenly, so boxes are either
    equal or disjoint, and the distinct ones are summed.
    """
    from pase.ir.types import itemsize

    most = [0] * len(ways)
    for device, want in enumerate(new):
        have = _overlap({old[device]} if device < len(old) else set(), want)
        below = 1
        for level, w in enumerate(ways):
            below *= w
            first = device // below * below
            reachable = _overlap(set(old[first : first + below]), want)
            most[level] = max(most[level], (reachable - have) * itemsize(t.dtype))
            have = reachable
    return tuple(most)


def _overlap(boxes: set[Box], want: Box) -> int:
    """Return the number of elements of ``want`` in these boxes, which are disjoint."""
    return sum(
        math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(box, want, strict=True))
        for box in boxes
    )
