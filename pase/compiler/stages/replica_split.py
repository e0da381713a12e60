"""Replicas of the model on groups of unequal devices, with numbers of micro-batches that suit their speed.

Each group holds one replica, split in the best way for its own devices: over all of them, or in stages. A replica's
step takes no less time with more micro-batches. A division of the micro-batches is therefore optimal if no single one
can move from the slowest replica to another that would then still be faster, because any better division gives the
slowest replica fewer micro-batches and some other one more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from pase import costmodels
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import Progress, SplitProblem
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Variant, check_replicas, variants
from pase.compiler.stages.candidates import PipelineCandidate, TablesMade, menu_of, search_candidate
from pase.compiler.stages.chain_places import divided
from pase.compiler.stages.device_groups import Arrangement, RankGroup, groups_of, rank_meshes
from pase.compiler.stages.menu import StageTables
from pase.compiler.stages.search import Staged, StageMenu
from pase.frontends.blocks import block_ways
from pase.frontends.registry import NotInParts
from pase.ir import Graph
from pase.machine import GroupedMachine, Mesh, mesh_from

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = [
    "Replica",
    "ReplicaSplit",
    "ReplicaSplitSearch",
    "best_split",
    "equal_split",
    "gradient_sum_s",
    "search_replica_split",
]

_MICRO_BATCHES = (2, 4, 8, 16, 32)
"""The total numbers of micro-batches to try."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """A group's replica, and how many of the step's micro-batches it takes."""

    group: RankGroup
    micro_batches: int
    staged: Staged
    menu: StageMenu


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaSplit:
    """A step on replicas.

    sum_s: seconds to sum gradients between the groups, after the slowest replica.
    bound: no division of the micro-batches among any replicas of the groups takes less.
    equal_s: seconds if micro-batches are divided by numbers of devices; infinite if that does not fit.
    """

    replicas: tuple[Replica, ...]
    sum_s: float
    bound: float
    equal_s: float

    @property
    def step_s(self) -> float:
        return max(r.staged.step_s for r in self.replicas) + self.sum_s


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaSplitSearch:
    """What was found for each number of micro-batches.

    bounds: lower bounds in seconds for the numbers for which nothing was found.
    left: how many numbers were not reached, because the allowed work was spent.
    refused: why replicas with the last number that was tried would give other numbers than the model; None if they
        would not.
    """

    found: tuple[ReplicaSplit, ...] = ()
    bounds: tuple[float, ...] = ()
    left: int = 0
    refused: NotInParts | None = None


def best_split(
    total: int, groups: int, seconds: Callable[[int, int], float], start: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return how many of ``total`` micro-batches each group takes, at least one, so that the slowest is fastest.

    seconds: (group, micro-batches) -> seconds, which must not decrease with more micro-batches.

    >>> best_split(16, 2, lambda g, k: k * (1.0, 3.0)[g])
    (12, 4)
    """
    timed = cache(seconds)
    shares = list(start or equal_split(total, [1] * groups))
    while True:
        slow = max(range(groups), key=lambda g: timed(g, shares[g]))
        others = [g for g in range(groups) if g != slow]
        if shares[slow] == 1 or not others:
            return tuple(shares)
        quick = min(others, key=lambda g: timed(g, shares[g] + 1))
        if timed(quick, shares[quick] + 1) >= timed(slow, shares[slow]):
            return tuple(shares)
        shares[slow] -= 1
        shares[quick] += 1


def equal_split(total: int, devices: Sequence[int]) -> tuple[int, ...]:
    """Return micro-batches in proportion to devices, at least one each; the remainder goes to those that lack most.

    >>> equal_split(8, [12, 4]), equal_split(5, [4, 4])
    ((6, 2), (3, 2))
    """
    exact = np.array(devices) * total / sum(devices)
    out = np.maximum(np.floor(exact).astype(int), 1)
    while out.sum() != total:
        lack = exact - out
        out[int(lack.argmax() if out.sum() < total else np.where(out > 1, lack, np.inf).argmin())] += np.sign(
            total - out.sum()
        )
    return tuple(int(k) for k in out)


def gradient_sum_s(machine: GroupedMachine, cost_model: str, graph: Graph) -> float:
    """Return the seconds to sum all gradients between the groups.

    Each device sends its part of what its group has. The sum within the group stops halfway for it, and its second half
    distributes the result.
    """
    nbytes = sum(
        graph.tensors[n.ops[0].writes[0].tensor].nbytes
        for n in graph.nodes
        if n.kind == "parameter" and graph.tensors[n.ops[0].writes[0].tensor].needs_grad
    )
    inner, many = min(g.count for g in machine.groups), len(machine.groups)
    model = costmodels.get(cost_model, machine.crossing(inner))
    mesh = mesh_from(f"groups={many},inner={inner}", many * inner)
    return float(model.collective("all_reduce", mesh, 1, float(nbytes) / inner))


def search_replica_split(
    problem: SplitProblem, traced: Traced, options: CompileOptions, say: Progress, spent: Spent
) -> ReplicaSplitSearch:
    """Return the best replicas, one on each of the machine's groups, for each number of micro-batches.

    The result is empty if the machine has no groups, or if the ranks, their mesh or their schedule are given.
    """
    machine = problem.machine
    given = options.ranks is not None or options.mesh is not None or options.stage_schedule != "auto"
    if not isinstance(machine, GroupedMachine) or given:
        return ReplicaSplitSearch()
    groups = groups_of(problem, options)
    frontend = block_ways(traced)
    made = TablesMade(traced, frontend.blocks_of(traced), problem.optimizer, keep=True, spent=spent)
    limited = options.limit_bytes(machine) is not None
    examples, out, bounds, skipped = frontend.batch_size(traced), list[ReplicaSplit](), list[float](), 0
    refused: NotInParts | None = None
    for m in _MICRO_BATCHES if options.accumulate is None else (options.accumulate,):
        if examples % m or m < len(groups):
            continue
        if spent.over():
            skipped += 1
            continue
        say(f"dividing {m} micro-batches among replicas on {', '.join(g.name for g in groups)}")
        try:
            check_replicas(traced, m)
        except NotInParts as e:
            refused = e
            continue
        ways = next(
            variants(
                traced, problem.graph, replace(options, accumulate=m, once="none", regather="none"), limited
            )
        )
        group = [_OnOneGroup(group, problem, options, made, ways) for group in groups]
        counts = best_split(m, len(group), lambda g, k, of=group: of[g].least_s(k))  # type: ignore[misc]
        least = max(g.least_s(k) for g, k in zip(group, counts, strict=True))
        counts = best_split(m, len(group), lambda g, k, of=group: of[g].step_s(k), counts)  # type: ignore[misc]
        found = [g.best(k) for g, k in zip(group, counts, strict=True)]
        replicas = [
            Replica(group=g.group, micro_batches=k, staged=f[0], menu=f[1])
            for g, k, f in zip(group, counts, found, strict=True)
            if f is not None
        ]
        sum_s = gradient_sum_s(machine, problem.model.name, problem.graph)
        if len(replicas) == len(groups):
            equal = equal_split(m, [g.devices for g in groups])
            slowest = max(g.step_s(k) for g, k in zip(group, equal, strict=True))
            out.append(
                ReplicaSplit(
                    replicas=tuple(replicas), sum_s=sum_s, bound=least + sum_s, equal_s=slowest + sum_s
                )
            )
        else:
            bounds.append(least + sum_s)
    return ReplicaSplitSearch(found=tuple(out), bounds=tuple(bounds), left=skipped, refused=refused)


class _OnOneGroup:
    """The pipelines and the splits without stages on one group's devices, for any number of micro-batches."""

    def __init__(
        self,
        group: RankGroup,
        problem: SplitProblem,
        options: CompileOptions,
        made: TablesMade,
        ways: Sequence[Variant],
    ) -> None:
        self.group, self.made, self.ways = group, made, ways
        blocks = divided(problem.graph, made.blocks).blocks
        self.shapes = [
            (ranks, mesh)
            for ranks in range(1, min(group.devices, blocks, 64) + 1)
            if group.devices % ranks == 0
            for mesh in rank_meshes([group], options, group.devices // ranks)
        ]
        self._found: dict[int, tuple[Staged, StageMenu] | None] = {}
        self._least: dict[int, list[float]] = {}

    def _leasts(self, micro_batches: int) -> list[float]:
        """Return, for each shape, the seconds that none of its pipelines beats."""
        if micro_batches not in self._least:
            self._least[micro_batches] = [
                menu_of(
                    self._tables(shape, micro_batches, self.ways[:1]), micro_batches, self._place(shape)
                ).least_s()
                for shape in self.shapes
            ]
        return self._least[micro_batches]

    def _place(self, shape: tuple[int, Mesh]) -> Arrangement:
        return Arrangement(ranks=(self.group,) * shape[0])

    def _tables(
        self, shape: tuple[int, Mesh], micro_batches: int, ways: Sequence[Variant]
    ) -> tuple[StageTables, ...]:
        return tuple(t.with_share(micro_batches) for t in self.made.all(ways, shape[1], [self.group]))

    def least_s(self, micro_batches: int) -> float:
        return min(self._leasts(micro_batches))

    def step_s(self, micro_batches: int) -> float:
        found = self.best(micro_batches)
        return np.inf if found is None else found[0].step_s

    def best(self, micro_batches: int) -> tuple[Staged, StageMenu] | None:
        """Return the best pipeline with this many micro-batches; None if none fits."""
        if micro_batches not in self._found:
            self._found[micro_batches] = None
            top, least = math.inf, self._leasts(micro_batches)
            for i in np.argsort(least, kind="stable"):
                if least[i] >= top * (1 - 1e-9):
                    break
                ranks, mesh = shape = self.shapes[i]
                candidate = PipelineCandidate(
                    ranks=ranks,
                    micro_batches=micro_batches,
                    mesh=mesh,
                    least=least[i],
                    place=self._place(shape),
                    tables=partial(self._tables, shape, micro_batches, self.ways),
                )
                staged, menu = search_candidate(candidate, top)
                if staged is not None:
                    self._found[micro_batches], top = (staged, menu), staged.step_s
        return self._found[micro_batches]
