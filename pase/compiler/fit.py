"""The cheapest strategy within a memory limit, over the variants of a step that need less memory.

Variants are searched as an outer loop, cheapest first. A variant whose unconstrained optimum is no better than what has
been found within the limit cannot help and is not searched further.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pase.compiler.mesh_search import Found, add_seconds, search_meshes
from pase.compiler.methods import memory_of
from pase.compiler.problem import Progress, SplitProblem
from pase.compiler.variants import Variant
from pase.errors import Infeasible
from pase.machine import Mesh
from pase.memory.account import Memory
from pase.search import Solution, solve
from pase.tables import CostTables
from pase.tables.facts import facts
from pase.tables.layouts import configs

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["fit_limit", "fit_variants", "least_memory"]


def fit_variants(
    problem: SplitProblem, free: Found, tries: Sequence[Sequence[Variant]], traced: Traced, over: Sequence[Mesh],
    limit: float, time_limit: float, say: Progress,
) -> tuple[SplitProblem, Found]:  # fmt: skip
    """The cheapest variant of the step that fits, with its strategy. Raises Infeasible, which says what would fit.

    free: the unconstrained answer to the first variant, which is ``problem``. The search ends with the first number
    of micro-batches none of whose variants could be cheaper than what fits by then; the bound is over those tried.
    The strategy's ``seconds`` are those of all the searches.
    """
    best: tuple[SplitProblem, Found] | None = None
    least: list[tuple[float, Variant]] = []
    bound = float("inf")
    spent = dict(free.seconds)
    for group in tries:
        promising = False
        for variant in group:
            first = variant == tries[0][0]
            p = problem if first else problem.varied(traced, variant)
            needs = min(least_memory(p, m) for m in over)
            least.append((needs, variant))
            promising |= needs > limit
            if needs > limit:
                continue
            if not first:
                say(f"trying {variant}")
            unlimited = free if first else search_meshes(p, over, say)
            if not first:
                spent = add_seconds(spent, unlimited.seconds)
            if best is not None and unlimited.solution.bound >= best[1].solution.cost:
                continue
            promising = True
            start = time.perf_counter()
            found, proven = fit_limit(p, unlimited, over, limit, time_limit, say)
            spent = add_seconds(spent, {"search": time.perf_counter() - start})
            bound = min(bound, proven)
            if found is None:
                continue
            if best is None or found.solution.cost < best[1].solution.cost:
                best = (p, found)
            if first and found.solution.cost <= free.solution.cost * (1 + 1e-9):
                return p, replace(found, seconds=spent)  # memory does not bind
        if best is not None and not promising:
            break
    if best is None:
        more = list(_needs_on_more(problem, traced, least, limit))
        raise _infeasible(least, limit, problem.devices, more)
    s = replace(best[1].solution, bound=min(bound, best[1].solution.cost))
    s = replace(s, optimal=s.bound >= s.cost * (1 - 1e-9))
    return best[0], replace(best[1], solution=s, seconds=spent)


def fit_limit(
    problem: SplitProblem, free: Found, over: Sequence[Mesh], limit: float, time_limit: float, say: Progress
) -> tuple[Found | None, float]:
    """The best strategy found whose predicted memory is at most ``limit`` bytes a device, and a lower bound on all.

    A mesh's unconstrained optimum bounds what it can give, so meshes are tried from the cheapest on, until that bound
    is no better than what has been found.
    """
    end = time.perf_counter() + time_limit
    order = sorted(over, key=lambda m: free.bounds[m.sizes])
    best: Found | None = None
    bound = float("inf")
    for i, mesh in enumerate(order):
        if best is not None and free.bounds[mesh.sizes] >= best.solution.cost:
            return best, min(bound, free.bounds[mesh.sizes])
        say(f"mesh {'×'.join(map(str, mesh.sizes))} within {limit / 2**30:.4g} GiB ({i + 1} of {len(order)})")

        def patience(meshes: int = len(order) - i) -> float:
            return max(end - time.perf_counter(), 1.0) / meshes / 2

        search = _LimitedSearch(problem=problem, mesh=mesh, limit=limit, patience=patience)
        found, proven = search.cheapest(np.inf if best is None else best.solution.cost)
        bound = min(bound, proven)
        if found is not None:
            best = replace(free, mesh=mesh, space=problem.pricing.space(mesh), solution=found)
    return best, bound


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """A strategy found with some bytes set aside. unseen: what of its memory the search's limit does not count."""

    solution: Solution
    memory: Memory
    unseen: float


@dataclass(frozen=True, kw_only=True)
class _LimitedSearch:
    """The search of one mesh under a memory limit. patience: seconds for the next attempt.

    What is in flight is no sum over nodes but a maximum, so the search's limit leaves it out, and bytes are set aside
    for it instead. With the least set aside that any strategy has in flight, the search gives a bound. Where its
    answer has more in flight, that much, and parts of it, are set aside in turn, and configs of nodes that alone have
    more in flight are forbidden.
    """

    problem: SplitProblem
    mesh: Mesh
    limit: float
    patience: Callable[[], float]

    def cheapest(self, below: float) -> tuple[Solution | None, float]:
        """(the cheapest strategy found that fits and costs less than ``below``, a lower bound on all that fit)."""
        flight = self._in_flight()
        least = max((float(f.min()) for f in flight), default=0.0)
        relaxed = self._attempt(least)
        if relaxed is None:
            return None, np.inf
        bound = relaxed.solution.bound
        if not relaxed.solution.feasible or relaxed.memory.total <= self.limit:
            fits = relaxed.solution.feasible and relaxed.solution.cost < below
            return (relaxed.solution if fits else None), bound
        best: Solution | None = None
        parts = (relaxed.unseen * part for part in (1, 0.5, 0.25, 0.125))
        queue = deque([*(b for b in parts if b > least), least, 1.25 * relaxed.unseen, 2.0 * relaxed.unseen])
        while queue:
            aside = queue.popleft()
            found = self._attempt(aside, flight)
            if found is not None and found.solution.feasible:
                if found.memory.total <= self.limit:
                    if found.solution.cost < below:
                        best, below = found.solution, found.solution.cost
                elif found.unseen > aside and found.unseen not in queue:
                    queue.appendleft(found.unseen)
            if best is not None and len(queue) <= 2:
                break  # more set aside than that only where nothing else has fitted
        return best, bound

    def _in_flight(self) -> list[np.ndarray]:
        """Per node, what each of its configs has in flight at least: bytes [K]."""
        p, space = self.problem, self.problem.pricing.space(self.mesh)
        nodes = zip(space.graph.nodes, space.configs, strict=True)
        return [p.account.in_flight_at_least(p.graph, n, cfg, self.mesh) for n, cfg in nodes]

    def _attempt(self, aside: float, flight: Sequence[np.ndarray] = ()) -> _Attempt | None:
        """Search with ``aside`` bytes of the limit set aside; flight: forbid configs that have more in flight.

        None where nothing is left of the limit, or of a node's configs.
        """
        p, space = self.problem, self.problem.pricing.space(self.mesh)
        seconds = self.patience()

        def solve_within(tables: CostTables, part: float) -> Solution:
            allowed = _forbid(tables, flight, aside) if flight else tables
            return solve(allowed, memory=wanted, time_limit=seconds * part)

        try:
            wanted = p.account.profile(p.graph, self.mesh, space.configs, self.limit - aside, p.optimizer)
            solution = p.pricing.solve(self.mesh, solve_within)
        except (Infeasible, ValueError):
            return None
        if not solution.feasible:
            nothing = Memory(parameters=0, gradients=0, optimizer=0, activations=0, buffers=0)
            return _Attempt(solution=solution, memory=nothing, unseen=0.0)
        chosen = zip(space.graph.nodes, space.configs, solution.choice, strict=True)
        memory = memory_of(p, {n.name: cfg[i] for n, cfg, i in chosen}, self.mesh)
        unseen = p.account.unseen(memory, float(wanted.usage(solution.choice).max()))
        return _Attempt(solution=solution, memory=memory, unseen=unseen)


def _forbid(tables: CostTables, flight: Sequence[np.ndarray], most: float) -> CostTables:
    """The tables with configs forbidden that alone have more in flight; equal vectors stay one array."""
    same: dict[tuple[int, bytes], np.ndarray] = {}
    costs = []
    for cost, f in zip(tables.node_costs, flight, strict=True):
        over = f > most
        key = (id(cost), over.tobytes())
        costs.append(same.setdefault(key, np.where(over, np.inf, cost) if over.any() else cost))
    return replace(tables, node_costs=tuple(costs))


def least_memory(problem: SplitProblem, mesh: Mesh) -> float:
    """A lower bound on what any strategy on this mesh needs, what is in flight left out: bytes on a device."""
    numbers = facts(problem.graph).space  # equal nodes of repeated layers have the same configs
    of_number = {
        number: configs(n, mesh) for number, n in dict(zip(numbers, problem.graph.nodes, strict=True)).items()
    }
    spaces = [of_number[number] for number in numbers]
    p = problem.account.profile(problem.graph, mesh, spaces, float("inf"), problem.optimizer)
    least = np.array([b.min() for b in p.bytes])
    least[p.stop <= p.start] = 0.0
    change = np.zeros(int(p.stop.max()) + 1)
    np.add.at(change, p.start, least)
    np.add.at(change, p.stop, -least)
    return float(np.cumsum(change)[:-1].max())


def _needs_on_more(
    problem: SplitProblem, traced: Traced, least: Sequence[tuple[float, Variant]], limit: float
) -> Iterator[tuple[int, float]]:
    """(devices, bytes at least) of the least variant on 2, 4, … 64 times the devices, until it fits."""
    p = problem.varied(traced, min(least, key=lambda pair: pair[0])[1])
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(p, devices=factor * p.devices)
        needs = min((least_memory(more, m) for m in more.meshes(None, 2)), default=float("inf"))
        yield more.devices, needs
        if needs <= limit:
            return


def _infeasible(
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
