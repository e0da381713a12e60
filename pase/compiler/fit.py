"""The cheapest strategy within a memory limit, over the variants of a step that need less memory.

Variants are searched as an outer loop, cheapest first. A variant whose unconstrained optimum is no better than what has
been found within the limit cannot help and is not searched further.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pase.compiler.variants import Variant
from pase.errors import Infeasible

if TYPE_CHECKING:
    from pase.compiler.problem import Found, Problem
    from pase.frontends.registry import Traced
    from pase.machine import Mesh
    from pase.search import Solution
    from pase.search.types import MemoryProfile
    from pase.tables import CostTables
    from pase.tables.build import Space

__all__ = ["fit", "fitted"]


def fitted(
    problem: Problem, free: Found, tries: Sequence[Sequence[Variant]], traced: Traced, over: Sequence[Mesh],
    limit: float, time_limit: float, say: Callable[[str], None], seconds: dict[str, float],
) -> tuple[Problem, Found]:  # fmt: skip
    """The cheapest variant of the step that fits, with its strategy. Raises Infeasible, which says what would fit.

    free: the unconstrained answer to the first variant, which is ``problem``. The search ends with the first number
    of micro-batches none of whose variants could be cheaper than what fits by then; the bound is over those tried.
    """
    best: tuple[Problem, Found] | None = None
    least: list[tuple[float, Variant]] = []
    bound = float("inf")
    for group in tries:
        promising = False
        for variant in group:
            first = variant == tries[0][0]
            p = problem if first else problem.varied(traced, variant)
            needs = min(p.least_memory(m) for m in over)
            least.append((needs, variant))
            promising |= needs > limit
            if needs > limit:
                continue
            if not first:
                say(f"trying {variant}")
            unlimited = free if first else p.search(over, say, seconds)
            if best is not None and unlimited.solution.bound >= best[1].solution.cost:
                continue
            promising = True
            found, proven = fit(p, unlimited, over, limit, time_limit, say, seconds)
            bound = min(bound, proven)
            if found is None:
                continue
            if best is None or found.solution.cost < best[1].solution.cost:
                best = (p, found)
            if first and found.solution.cost <= free.solution.cost * (1 + 1e-9):
                return best  # memory does not bind
        if best is not None and not promising:
            break
    if best is None:
        raise _nearest(least, limit, problem.devices, list(_on_more(problem, traced, least, limit)))
    s = replace(best[1].solution, bound=min(bound, best[1].solution.cost))
    return best[0], replace(best[1], solution=replace(s, optimal=s.bound >= s.cost * (1 - 1e-9)))


def fit(
    problem: Problem, free: Found, over: Sequence[Mesh], limit: float, time_limit: float,
    say: Callable[[str], None], seconds: dict[str, float],
) -> tuple[Found | None, float]:  # fmt: skip
    """The best strategy found whose predicted memory is at most ``limit`` bytes a device, and a lower bound on all.

    A mesh's unconstrained optimum bounds what it can give, so meshes are tried from the cheapest on, until that bound
    is no better than what has been found. What is in flight is no sum over nodes but a maximum: with the least that
    any strategy has in flight set aside, the search gives a bound; where its answer has more in flight, that much, and
    parts of it, are set aside in turn, and configs of nodes that alone have more are left out.
    """
    from pase.memory.account import in_flight_at_least

    start = time.perf_counter()
    bound_of = free.bounds
    order = sorted(over, key=lambda m: bound_of[m.sizes])
    best: Found | None = None
    bound = float("inf")
    for i, mesh in enumerate(order):
        if best is not None and bound_of[mesh.sizes] >= best.solution.cost:
            bound = min(bound, bound_of[mesh.sizes])
            break
        say(f"mesh {'×'.join(map(str, mesh.sizes))} within {limit / 2**30:.4g} GiB ({i + 1} of {len(order)})")
        space = problem.tables(mesh)[1] if problem.overlap == "none" else problem.hiding(mesh).space
        fuses = problem.machine.fuses_products  # what is in flight is then no lower bound of one moment
        flight = [
            np.zeros(len(c)) if fuses else in_flight_at_least(problem.graph, n, c, mesh)
            for n, c in _nodes(space)
        ]
        aside = max((float(f.min()) for f in flight), default=0.0)
        steps: list[float] = []
        while True:
            left = max(time_limit - (time.perf_counter() - start), 1.0) / (len(order) - i) / 2
            relaxed = not steps
            try:
                wanted = problem.profile(mesh, space.configs, limit - aside)
                solution = _solved(problem, mesh, wanted, None if relaxed else (flight, aside), left)
            except (Infeasible, ValueError):  # nothing is left of the limit, or of a node's configs
                if relaxed:
                    break
                solution = None
            if relaxed and solution is not None:
                bound = min(bound, solution.bound)
            if solution is not None and solution.feasible:
                found = replace(free, mesh=mesh, space=space, solution=solution)
                needs = problem.memory(found)
                if needs.total <= limit and (best is None or solution.cost < best.solution.cost):
                    best = found
                unseen = needs.total - float(wanted.usage(solution.choice).max()) if fuses else needs.buffers
                if relaxed and needs.total > limit:
                    parts = [unseen * part for part in (1, 0.5, 0.25, 0.125) if unseen * part > aside]
                    steps = [*parts, aside, 1.25 * unseen, 2.0 * unseen]
                    aside = steps[0]
                    continue
                if needs.total > limit and unseen > aside and unseen not in steps:
                    steps.insert(1, unseen)
            if len(steps) < 2 or (best is not None and best.mesh == mesh and len(steps) <= 3):
                break  # more set aside than that only where nothing else has fitted
            steps = steps[1:]
            aside = steps[0]
    seconds["search"] += time.perf_counter() - start
    return best, bound


def _solved(
    problem: Problem, mesh: Mesh, wanted: MemoryProfile, without: tuple[Sequence[np.ndarray], float] | None,
    time_limit: float,
) -> Solution:  # fmt: skip
    """The mesh's tables solved under the limit; without: bytes in flight by config, and how many are too many."""
    from pase.compiler.overlap import solve_hiding
    from pase.search import solve

    def one(tables: CostTables, seconds: float) -> Solution:
        return solve(_without(tables, *without) if without else tables, memory=wanted, time_limit=seconds)

    if problem.overlap == "none":
        return one(problem.tables(mesh)[0], time_limit)
    return solve_hiding(problem.hiding(mesh), one=lambda tables: one(tables, time_limit / 4))


def _nodes(space: Space):  # type: ignore[no-untyped-def]
    return zip(space.graph.nodes, space.configs, strict=True)


def _without(tables: CostTables, flight: Sequence[np.ndarray], most: float) -> CostTables:
    """The tables with configs forbidden that alone have more in flight; equal vectors stay one array."""
    same: dict[tuple[int, bytes], np.ndarray] = {}
    costs = []
    for cost, f in zip(tables.node_costs, flight, strict=True):
        over = f > most
        key = (id(cost), over.tobytes())
        costs.append(same.setdefault(key, np.where(over, np.inf, cost) if over.any() else cost))
    return replace(tables, node_costs=tuple(costs))


def _on_more(
    problem: Problem, traced: Traced, least: Sequence[tuple[float, Variant]], limit: float
) -> Iterator[tuple[int, float]]:
    """(devices, bytes at least) of the least variant on 2, 4, … 64 times the devices, until it fits."""
    p = problem.varied(traced, min(least, key=lambda pair: pair[0])[1])
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(p, devices=factor * p.devices)
        needs = min((more.least_memory(m) for m in more.meshes(None, 2)), default=float("inf"))
        yield more.devices, needs
        if needs <= limit:
            return


def _nearest(
    least: Sequence[tuple[float, Variant]], limit: float, devices: int, more: Sequence[tuple[int, float]]
) -> Infeasible:
    """The error that says what would fit. least: (bytes, variant) that each variant needs at least; more: (devices,
    bytes at least) of the least one on more devices."""
    nbytes, variant = min(least, key=lambda p: p[0])
    enough = next((n for n, b in more if b <= limit), None)
    if enough is not None:
        so = f"On {enough} devices it may fit. Or use a smaller batch"
    elif more:
        so = f"Nor do {more[-1][0]} devices suffice. Use a smaller batch or model"
    else:
        so = "Use more devices or a smaller batch"
    with_ = f" ({variant})" if variant != Variant() else ""
    return Infeasible(
        f"no strategy found that fits {limit / 2**30:.4g} GiB a device on {devices} devices: any needs at least "
        f"{nbytes / 2**30:.4g} GiB{with_}. {so}"
    )
