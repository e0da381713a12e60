"""Finds the best strategy over many meshes. Each mesh is searched exactly, and each gives a lower bound."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pase.compiler.problem.problem import Progress, SplitProblem
from pase.errors import Infeasible
from pase.files.progress import PieceOfWork
from pase.garbage import uncollected
from pase.machine import Mesh
from pase.search import Solution
from pase.tables.build import Space
from pase.tables.walks import expect_alike

__all__ = ["Found", "add_seconds", "closed", "search_meshes"]

_EXACT = 1e-9
"""The relative distance between a bound and the best answer below which no further search is needed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best strategy over the meshes that were searched.

    bounds: the proven lower bound of each mesh, by the sizes of its axes.
    answers: the cheapest strategy of each mesh, by the same key.
    seconds: the time spent on "tables" and on "search".
    open: whether gaps may be closed further.
    least: whether every variant that was searched costs, without a memory limit, at least as much as the bounds that
        are proven for the first variant.
    """

    mesh: Mesh
    space: Space
    solution: Solution
    tried: tuple[tuple[Mesh, float], ...]
    bounds: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    answers: Mapping[tuple[int, ...], Solution] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    open: bool = False
    least: bool = True

    @property
    def configs(self) -> dict[str, np.ndarray]:
        """The strategy: node name -> int8 [axes]."""
        chosen = zip(self.space.graph.nodes, self.space.configs, self.solution.choice, strict=True)
        return {n.name: configs[i] for n, configs, i in chosen}


def add_seconds(*spent: Mapping[str, float]) -> dict[str, float]:
    """
    >>> add_seconds({"tables": 1.0}, {"tables": 0.5, "search": 2.0})
    {'tables': 1.5, 'search': 2.0}
    """
    out: dict[str, float] = {}
    for part in spent:
        for what, seconds in part.items():
            out[what] = out.get(what, 0.0) + seconds
    return out


@uncollected()
def search_meshes(
    problem: SplitProblem,
    over: Sequence[Mesh],
    say: Progress = lambda _: None,
    so_far: Found | None = None,
    close: bool = True,
) -> Found:
    """Return the best strategy over these meshes, and over those that ``so_far`` covers.

    Raises Infeasible if there is no mesh.

    close: whether to close the gap to the bound, if the pricing leaves one. False if only the bounds matter, and
        ``closed`` closes it later.
    """
    pricing = problem.pricing
    best = so_far
    bounds = dict(so_far.bounds) if so_far else {}
    answers = dict(so_far.answers) if so_far else {}
    spent = dict(so_far.seconds) if so_far else {}
    for i, mesh in enumerate(over):
        say(PieceOfWork(f"mesh {'×'.join(map(str, mesh.sizes))}", i, len(over)))
        start = time.perf_counter()
        expect_alike(len(over) - 1 - i)
        pricing.space(mesh)
        built = time.perf_counter()
        bounds[mesh.sizes] = pricing.glance(mesh)
        spent = add_seconds(spent, {"tables": built - start, "search": time.perf_counter() - built})
    expect_alike(0)
    start = time.perf_counter()
    for mesh in sorted(over, key=lambda m: bounds[m.sizes]):  # most promising first, so that others end early
        solution = pricing.solve(mesh, below=np.inf if best is None else best.solution.cost)
        bounds[mesh.sizes], answers[mesh.sizes] = solution.bound, solution
        if best is None or solution.cost < best.solution.cost:
            best = Found(mesh=mesh, space=pricing.space(mesh), solution=solution, tried=())
    spent = add_seconds(spent, {"search": time.perf_counter() - start})
    if best is None:
        raise Infeasible(
            f"no mesh of {problem.devices} devices fits machine {problem.machine.name}",
            fix="use another number of devices, or another machine",
        )
    start = time.perf_counter()
    if close:
        best = _closed(problem, over, best, bounds, answers)
        spent = add_seconds(spent, {"search": time.perf_counter() - start})
    tried = [*(so_far.tried if so_far else ()), *((m, answers[m.sizes].cost) for m in over)]
    low = [] if so_far is None else [so_far.solution.bound]
    return replace(
        best,
        solution=_bounded(best.solution, [*bounds.values(), *low]),
        tried=tuple(tried),
        bounds=bounds,
        answers=answers,
        seconds=spent,
        open=not close,
    )


def _bounded(s: Solution, bounds: Collection[float]) -> Solution:
    """Return the solution with the lowest of these bounds. If a gap is left, that may be another mesh's bound."""
    low = min(bounds)
    return replace(s, bound=min(s.bound, low), optimal=s.optimal and low >= s.cost * (1 - 1e-9))


@uncollected()
def closed(problem: SplitProblem, over: Sequence[Mesh], found: Found) -> Found:
    """Return what ``search_meshes`` found over these meshes, after closing the gaps that it left open."""
    if not found.open:
        return found
    start = time.perf_counter()
    bounds, answers = dict(found.bounds), dict(found.answers)
    best = _closed(problem, over, found, bounds, answers)
    solution = _bounded(best.solution, bounds.values())
    tried = tuple((m, answers[m.sizes].cost) for m in over)
    seconds = add_seconds(found.seconds, {"search": time.perf_counter() - start})
    return replace(
        best, solution=solution, tried=tried, bounds=bounds, answers=answers, seconds=seconds, open=False
    )


def _closed(
    problem: SplitProblem,
    over: Sequence[Mesh],
    best: Found,
    bounds: dict[tuple[int, ...], float],
    answers: dict[tuple[int, ...], Solution],
) -> Found:
    """Return the best answer after a further search of the meshes that may have a cheaper one. Updates their bounds."""
    for mesh in sorted(over, key=lambda m: bounds[m.sizes]):
        if bounds[mesh.sizes] >= best.solution.cost * (1 - _EXACT):
            break
        solution = problem.pricing.close(mesh, best.solution.cost)
        bounds[mesh.sizes], answers[mesh.sizes] = solution.bound, solution
        proven = mesh.sizes == best.mesh.sizes and solution.cost <= best.solution.cost
        if solution.cost < best.solution.cost or proven:
            best = replace(best, mesh=mesh, space=problem.pricing.space(mesh), solution=solution)
    return best
