"""A proof over every mesh of the devices, beyond those that were searched.

On a mesh that was not searched, configs are pruned (``pase.search.prune``). Edges are priced from the smallest on, and
configs that cannot be in a strategy cheaper than the best known one are dropped before larger edges are priced. On most
meshes nothing is left. What is left on the others is searched exactly. So a mesh of many axes, whose tables would not
fit in memory, costs only what its promising configs cost. If collectives overlap with compute, edges are priced at
weights of compute and collectives that bound every strategy, and what is left is searched at its real cost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.compiler.meshes.search import Found
from pase.compiler.problem.problem import Progress, SplitProblem
from pase.errors import Infeasible, PaseError
from pase.files.progress import PieceOfWork
from pase.machine import Mesh
from pase.search import Solution
from pase.search.prune import Pruner
from pase.tables.build import Space, config_space, layout_pairs

__all__ = ["EveryMesh", "Pruned", "close_meshes", "prune_mesh"]

_FIRST_PAIRS, _GROWTH = 1 << 12, 4
"""How many pairs of layouts are priced first, and the factor by which that number grows from pass to pass."""
_MOST_PAIRS = 1 << 22
"""The most pairs of layouts to price on one mesh."""
_PASSES, _LAST_PASSES = 3, 12
_EXACT = 1e-9


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What is known about a mesh.

    bound: no strategy on it costs less than this, or than the cost that was asked for.
    cheaper: a strategy that costs less than was asked for, if one was found; its choices refer to ``space``.
    """

    bound: float
    space: Space
    cheaper: Solution | None = None


@dataclass(frozen=True, kw_only=True)
class EveryMesh:
    """What is proven about all meshes. left: those that may have a cheaper strategy, by their bounds, lowest first."""

    meshes: int
    left: tuple[tuple[Mesh, float], ...]

    def __str__(self) -> str:
        if not self.left:
            return f"all {self.meshes}"
        names = ", ".join("×".join(map(str, m.sizes)) for m, _ in self.left)
        return f"{self.meshes - len(self.left)} of {self.meshes}, not {names}"


def close_meshes(
    problem: SplitProblem,
    found: Found,
    searched: Collection[tuple[int, ...]],
    allowed: Callable[[Found], bool],
    say: Progress = lambda _: None,
) -> tuple[Found, EveryMesh]:
    """Return the answer, or a cheaper one on another mesh, proven over all meshes as far as that is affordable.

    problem: the step as written. By construction, no variant of it takes less. If a search showed otherwise
        (``found.least``), nothing is proven about further meshes.
    searched: the sizes of the meshes that the answer's bound covers.
    allowed: whether a strategy may be the answer, for instance under a memory limit.
    """
    best, bounds = found, {}
    every = problem.meshes(None, problem.devices, distinct=False)
    more = [m for m in every if m.sizes not in searched]
    if not found.least:
        bounds, more = dict.fromkeys(more, 0.0), []
    for i, mesh in enumerate(more):
        say(PieceOfWork(f"proving mesh {'×'.join(map(str, mesh.sizes))}", i, len(more)))
        s = prune_mesh(problem, mesh, best.solution.cost, _MOST_PAIRS)
        bounds[mesh] = s.bound
        if s.cheaper is not None:
            cheaper = replace(found, mesh=mesh, space=s.space, solution=s.cheaper)
            best = cheaper if allowed(cheaper) else best
    cost = best.solution.cost
    left = [(m, b) for m, b in bounds.items() if b < cost - _EXACT * abs(cost)]
    low = min([cost, found.solution.bound, *(b for _, b in left)])
    solution = replace(best.solution, bound=low, optimal=found.least and low >= cost - _EXACT * abs(cost))
    return replace(best, solution=solution), EveryMesh(
        meshes=len(every), left=tuple(sorted(left, key=lambda pair: pair[1]))
    )


def prune_mesh(problem: SplitProblem, mesh: Mesh, below: float, most_pairs: int) -> Pruned:
    """Return what a mesh has that costs less than ``below``. most_pairs: the most pairs of layouts to price."""
    graph, model = problem.graph, problem.model
    try:
        space = config_space(graph, mesh, model, problem.pricing.limit)
    except PaseError:  # there are too many configs to list; all that is known is that costs are not negative
        return Pruned(bound=0.0, space=Space(graph=graph, mesh=mesh, configs=()))
    whole = Space(graph=graph, mesh=mesh, configs=space)
    pricing = problem.pricing
    pruner = Pruner(pricing.node_bounds(mesh, space), below * (1 - _EXACT))
    todo, step, work = list(range(len(graph.edges))), _FIRST_PAIRS, most_pairs
    while todo and not pruner.empty:
        among = _left(space, pruner)
        pairs = layout_pairs(graph, among, mesh, todo)
        matrices = sorted(dict(pairs).values())
        affordable = int((np.cumsum(matrices) <= work).sum())
        if not affordable:
            return Pruned(bound=pruner.bound, space=whole)
        at_most = min(max(step, matrices[0]), matrices[affordable - 1])
        work -= sum(n for n in matrices if n <= at_most)
        now = [e for e, (_, n) in zip(todo, pairs, strict=True) if n <= at_most]
        pruner.add(pricing.edge_bounds(mesh, among, now))
        pruner.run(_PASSES)
        todo = [e for e, (_, n) in zip(todo, pairs, strict=True) if n > at_most]
        step *= _GROWTH
    pruner.run(_LAST_PASSES)
    nothing = Pruned(bound=below, space=whole)
    if pruner.empty:
        return nothing
    try:
        s = pricing.solve_among(mesh, _left(space, pruner), pruner.tables(), pruner.below)
    except Infeasible:
        return nothing
    if s.cost >= pruner.below:
        return replace(nothing, bound=min(s.bound, below))
    choice = np.array([kept[i] for kept, i in zip(pruner.kept, s.choice, strict=True)])
    return Pruned(bound=s.bound, space=whole, cheaper=replace(s, choice=choice))


def _left(space: Sequence[np.ndarray], pruner: Pruner) -> list[np.ndarray]:
    """Return the configs that are left of each node. Equal ones share one array."""
    same: dict[bytes, np.ndarray] = {}
    out = []
    for cfg, kept in zip(space, pruner.kept, strict=True):
        some = cfg if kept.size == len(cfg) else cfg[kept]
        out.append(same.setdefault(some.tobytes(), some))
    return out
