"""The arrangement of a pipeline's ranks on a machine of several groups of devices. Each rank is in one group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from pase import costmodels
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.errors import PaseError
from pase.machine import CostModel, GroupedMachine, Machine, Mesh, mesh_from, meshes
from pase.tables.decompose import slowed

__all__ = ["Arrangement", "RankGroup", "arrangements", "groups_of", "rank_meshes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankGroup:
    """A group of equal devices.

    number: the number of the machine's group.
    limit: bytes on a device; infinite without a limit.
    slow: the fraction of a device that collectives occupy while they overlap with compute; 1 if nothing overlaps.
    """

    number: int
    name: str
    devices: int
    machine: Machine
    model: CostModel
    limit: float
    slow: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrangement:
    """The device group of each rank. between: prices what ranks of different groups send each other."""

    ranks: tuple[RankGroup, ...]
    between: CostModel | None = None

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Each group once, in the order of their ranks."""
        return tuple({s.number: s for s in self.ranks}.values())

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(s.number for s in self.ranks)

    @property
    def limits(self) -> np.ndarray:
        return np.array([s.limit for s in self.ranks])


def groups_of(problem: SplitProblem, options: CompileOptions) -> list[RankGroup]:
    """Return the machine's groups; a machine of equal devices is one. Raises PaseError unless all devices are used."""
    machine = problem.machine
    if not isinstance(machine, GroupedMachine):
        limit = options.limit_bytes(machine)
        return [
            RankGroup(
                number=0,
                name=machine.name,
                devices=problem.devices,
                machine=machine,
                model=problem.model,
                limit=np.inf if limit is None else limit,
                slow=_slow(problem, machine),
            )
        ]
    if problem.devices != machine.devices:
        told = " + ".join(f"{g.count} {g.name}" for g in machine.groups)
        raise PaseError(
            f"it has {machine.devices} devices ({told}), not {problem.devices}",
            where=f"machine '{machine.name}'",
            fix=f"set devices={machine.devices}, or change the counts of its groups",
        )
    limits = [options.limit_bytes(g.machine) for g in machine.groups]
    return [
        RankGroup(
            number=i,
            name=g.name,
            devices=g.count,
            machine=g.machine,
            model=costmodels.get(problem.model.name, g.machine),
            limit=np.inf if limit is None else limit,
            slow=_slow(problem, g.machine),
        )
        for i, (g, limit) in enumerate(zip(machine.groups, limits, strict=True))
    ]


def _slow(problem: SplitProblem, machine: Machine) -> float:
    return slowed(machine) if problem.overlap == "parameters" else 1.0


def arrangements(problem: SplitProblem, groups: list[RankGroup], ranks: int) -> Iterator[Arrangement]:
    """Yield every order of the groups, with the ranks of a group in a row; nothing if a rank would span two groups.

    Orders that differ only in the order of two equal groups count as one.
    """
    inner, machine = problem.devices // ranks, problem.machine
    if any(g.devices % inner for g in groups):
        return
    between = None
    if isinstance(machine, GroupedMachine):
        between = costmodels.get(problem.model.name, machine.crossing(inner))
    seen = set[tuple[tuple[str, int], ...]]()
    for order in permutations(groups):
        alike = tuple((g.machine.digest, g.devices) for g in order)
        if alike not in seen:
            seen.add(alike)
            yield Arrangement(
                ranks=tuple(g for g in order for _ in range(g.devices // inner)), between=between
            )


_MOST_PRIME_AXES = 4
"""On a mesh of five axes, an op has up to 3,125 configs, and a stage's tables compare 80 million pairs of layouts."""


def rank_meshes(groups: list[RankGroup], options: CompileOptions, devices: int) -> list[Mesh]:
    """Return the meshes of one rank's devices.

    This is the given mesh. Otherwise these are all devices as one axis, two axes of which one lies within a node of
    one of the groups, and the finest mesh, if it has at most four axes. The ranks of a pipeline are the outermost axis,
    so that transfers between them cross the slowest link.
    """
    if options.mesh is not None:
        return [mesh_from(options.mesh, devices)]
    found = dict[tuple[int, ...], Mesh]()
    for g in groups:
        near = g.machine.levels[0].ways or devices
        for m in meshes(devices, g.machine, min(options.max_axes, 2), max_prime_axes=_MOST_PRIME_AXES):
            if len(m.sizes) == 1 or m.sizes[-1] <= near:
                found.setdefault(m.sizes, m)
    return list(found.values())
