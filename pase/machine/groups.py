"""Machines with several kinds of devices: groups of equal devices, and the link between the groups."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta

from pase.errors import PaseError
from pase.files.codec import AtLeastOne
from pase.machine.types import Device, LinkLevel, Machine

__all__ = ["GROUPS_SCHEMA", "GroupedMachine", "GroupsFile", "MachineGroup", "grouped"]

GroupsVersion = Literal["pase.machine-groups/1"]
GROUPS_SCHEMA: GroupsVersion = "pase.machine-groups/1"


@dataclass(frozen=True, kw_only=True)
class MachineGroup:
    """A group of equal devices in a machine with several kinds.

    name: the name of the kind, with a number if the kind occurs twice.
    count: the number of devices.
    machine: the devices, and the links between them.
    """

    name: str
    count: int
    machine: Machine


@dataclass(frozen=True, kw_only=True)
class GroupedMachine(Machine):
    """Groups of devices.

    Its own device and levels describe a program that treats all devices alike: such a program waits for the slowest
    device, can use as much memory as the smallest device has, and communicates over the link between the groups.

    between: the link that joins the groups. Its bandwidth is per device and direction when all devices communicate.
    """

    groups: tuple[MachineGroup, ...]
    between: LinkLevel

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """The sha256 of everything that affects costs in any group."""
        plain = Machine(**{name: getattr(self, name) for name in Machine.__dataclass_fields__})
        told = [plain.digest, *(f"{g.count} {g.machine.digest}" for g in self.groups)]
        return hashlib.sha256("\n".join(told).encode()).hexdigest()

    @property
    def devices(self) -> int:
        return sum(g.count for g in self.groups)

    def crossing(self, inner: int) -> Machine:
        """A machine of units of ``inner`` devices, which are joined only by the link between the groups."""
        inside = replace(self.levels[0], ways=inner, bandwidth_at_ways={})
        return Machine(
            name=self.name,
            device=self.device,
            levels=(inside, self.between),
            sources={},
            bucket_bytes=self.bucket_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class KindForm:
    """A group in a file.

    kind: a machine's name, or the path of its file relative to this file.
    count: the number of devices.
    """

    kind: str
    count: AtLeastOne


@dataclass(frozen=True, kw_only=True)
class GroupsFile:
    """A machine of groups, as in its file. sources: as in other machine files."""

    schema: GroupsVersion
    name: str
    groups: Annotated[tuple[KindForm, ...], Meta(min_length=2)]
    between: LinkLevel
    title: str = ""
    sources: dict[str, str] = field(default_factory=dict)


def grouped(
    name: str,
    kinds: Sequence[tuple[Machine, int]],
    between: LinkLevel,
    sources: dict[str, str],
    title: str = "",
) -> GroupedMachine:
    """The machine that consists of these kinds, given as (machine, number of devices), in the given order.

    Raises PaseError if a kind itself consists of groups, or has no room for its devices.
    """
    from pase.machine.meshes import level_ways

    groups = list[MachineGroup]()
    for i, (kind, count) in enumerate(kinds):
        if isinstance(kind, GroupedMachine):
            raise PaseError(
                f"group {i} ('{kind.name}') is itself a machine of groups",
                where=f"machine '{name}'",
                fix="list its groups in this file instead",
            )
        level_ways(count, kind)  # raises PaseError if the kind has no room for so many devices
        twice = sum(k.name == kind.name for k, _ in kinds) > 1
        groups.append(
            MachineGroup(name=f"{kind.name}#{i}" if twice else kind.name, count=count, machine=kind)
        )
    slow = min((g.machine for g in groups), key=_speed)
    unit = math.gcd(*(g.count for g in groups))
    levels, left = list[LinkLevel](), unit
    for level in slow.levels:
        ways = math.gcd(level.ways, left) if level.ways else left
        if ways > 1 or not levels:
            levels.append(replace(level, ways=ways))
        left //= ways
    if left > 1:
        levels[-1] = replace(levels[-1], ways=levels[-1].ways * left)
    return GroupedMachine(
        name=name,
        title=title,
        device=_smallest(slow.device, [g.machine.device for g in groups]),
        levels=(*levels, replace(between, ways=0)),
        sources=sources,
        bucket_bytes=slow.bucket_bytes,
        sums_readers=slow.sums_readers,
        fuses_products=slow.fuses_products,
        collective_units=slow.collective_units,
        overlaps=all(g.machine.overlaps for g in groups),
        sums_alone=any(g.machine.sums_alone for g in groups),
        lone_gather_bytes=max(g.machine.lone_gather_bytes for g in groups),
        groups=tuple(groups),
        between=replace(between, ways=0),
    )


def _speed(machine: Machine) -> float:
    """The FLOP/s that large products reach in the fastest dtype with at least 16 bits."""
    d = machine.device
    wide = [t for t in d.peak_flops if not t.startswith(("float8", "int"))] or list(d.peak_flops)
    return max(d.peak_flops[t] * d.reached("matmul", t) for t in wide)


def _smallest(slow: Device, every: Sequence[Device]) -> Device:
    """The slow device, with the memory of the smallest device."""
    least = min(every, key=lambda d: d.usable_bytes)
    return replace(slow, memory_bytes=least.memory_bytes, reserved_bytes=least.reserved_bytes)
