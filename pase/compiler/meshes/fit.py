"""Finds the cheapest strategy within a memory limit, over variants of a step that need less memory.

Variants are searched in an outer loop, cheapest first, in groups that have the same number of micro-batches. If the
unconstrained optimum of a variant is no better than the best answer found within the limit, the variant cannot help and
is not searched further.

Bytes *in flight* are those that a node needs only while it runs: what it reads and makes, or the buffers of its
collectives. They count once, for the node that has the most.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from pase.compiler.meshes.baselines import memory_of
from pase.compiler.meshes.search import Found, add_seconds, closed, search_meshes
from pase.compiler.problem.problem import Progress, SplitProblem
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Candidate
from pase.errors import Infeasible
from pase.files.progress import PieceOfWork
from pase.frontends.registry import NotInParts
from pase.machine import Mesh
from pase.memory.account import Memory
from pase.search import Known, MemoryProfile, Solution, price_memory, solve
from pase.search.elimination.priced import effort_of
from pase.search.types import Effort
from pase.tables import CostTables

__all__ = ["cheapest_free", "fit_limit", "fit_more", "fit_variants"]


class _Footprint(NamedTuple):
    """The least memory that a variant needs: bytes on a device, on the mesh on which it needs the least."""

    nbytes: float
    mesh: Mesh
    candidate: Candidate


def cheapest_free(
    problem: SplitProblem,
    group: Sequence[Candidate],
    over: Sequence[Mesh],
    say: Progress,
    limit: float | None = None,
) -> tuple[SplitProblem, Found]:
    """Return the variant that takes the least time without a memory limit, and its answer, whose bounds hold for all.

    Without hoisting, gradients are summed over devices in each micro-batch. Hoisted sums run once, but unreduced
    gradients are added whole in each micro-batch, which may take longer. Both variants are searched. If collectives
    overlap with compute, gathers in each micro-batch may also take less time than hoisted gathers, because a hoisted
    gather has only one micro-batch to overlap with. Nothing else can be cheaper.

    problem: that of the first variant of the first group.
    group: the candidates among which to choose.
    limit: in bytes, for the caller's later search. If the first variant's answer does not fit it, the gap between this
        answer and its bound may stay open, because another answer will be searched for.
    """
    first, overlaps = problem.variant, problem.pricing.occupied is not None
    others = [c for c in group if c.variant != first and replace(c.variant, hoisted=first.hoisted) == first]
    others = [c for c in others if overlaps or c.variant.hoisted != "none"]
    found = search_meshes(problem, over, say, close=bool(others) or limit is None)
    if limit is not None and memory_of(problem, found.configs, found.mesh).total <= limit:
        found = closed(problem, over, found)
    for candidate in others:
        other_problem = problem.on(candidate)
        other = search_meshes(other_problem, over, say)
        bounds = {m: min(b, other.bounds[m]) for m, b in found.bounds.items()}
        seconds = add_seconds(found.seconds, other.seconds)
        low = min(found.solution.bound, other.solution.bound)
        if other.solution.cost < found.solution.cost:
            problem, found = other_problem, other
        solution = replace(found.solution, bound=low, optimal=low >= found.solution.cost * (1 - 1e-9))
        found = replace(found, solution=solution, bounds=bounds, seconds=seconds)
    return problem, found


def fit_variants(
    problem: SplitProblem,
    free: Found,
    tries: Sequence[Sequence[Candidate]],
    over: Sequence[Mesh],
    limit: float,
    spent: Spent,
    say: Progress,
) -> tuple[SplitProblem, Found]:
    """Return the cheapest variant of the step that fits, with its strategy. Raises Infeasible if none fits.

    The search ends with the first number of micro-batches for which no variant can be cheaper than the best answer that
    fits. The bound covers the variants that were tried. If the allowed work was spent before the end, it covers all of
    them. The strategy's ``seconds`` are the sum over all searches.

    problem, free: the results of ``cheapest_free``. If ``free`` fits, it is the answer.
    tries: the candidates, in groups by number of micro-batches.
    over: the meshes.
    spent: counts the work, which is limited.
    """
    if memory_of(problem, free.configs, free.mesh).total <= limit:
        return problem, free
    best: tuple[SplitProblem, Found] | None = None
    least: list[_Footprint] = []
    bound, least_first, all_tried, refused = float("inf"), True, True, ""
    seconds = dict(free.seconds)
    numbers = itertools.count()
    for group in tries:
        promising = False
        try:
            for candidate in group:
                if best is not None and spent.over():
                    all_tried = False
                    break
                piece = PieceOfWork(
                    f"trying {candidate.variant}", next(numbers), sum(map(len, tries)), most=True
                )
                first = candidate.variant == problem.variant
                p = problem if first else problem.on(candidate)
                needs = cache(partial(_least_memory, p))
                below = float("inf") if best is None else best[1].solution.cost
                # A variant works at least as much as the step as written, whose bound on a mesh therefore holds for it.
                meshes = [m for m in over if free.bounds[m.sizes] < below and needs(m) <= limit]
                if not meshes:
                    # If it fits on no mesh, it may with more micro-batches, in the next group.
                    promising |= all(needs(m) > limit for m in over)
                else:
                    say(piece)
                    spent.graphs += not first
                    within = piece.inside(say)
                    done = _fit_variant(p, free if first else None, free, meshes, limit, spent, within, below)
                    seconds = add_seconds(seconds, done.seconds)
                    least_first &= done.least
                    promising |= done.promising
                    bound = min(bound, done.bound)
                    if done.found is not None:
                        best = (p, done.found)
                if best is None:
                    smallest = min(over, key=needs)
                    least.append(_Footprint(needs(smallest), smallest, candidate))
        except NotInParts as e:
            say(str(e))
            refused = e.what
            break
        if best is not None and (not all_tried or not promising):
            break
    if best is None:
        more = list(_needs_on_more(problem, least, limit))
        raise _nothing_fits(least, limit, problem.devices, more, refused)
    if not all_tried:  # a variant that was not tried takes no less than the first one without the limit
        bound = min(bound, free.solution.bound)
    s = replace(best[1].solution, bound=min(bound, best[1].solution.cost))
    s = replace(s, optimal=least_first and s.bound >= s.cost * (1 - 1e-9))
    return best[0], replace(best[1], solution=s, seconds=seconds, least=least_first)


@dataclass(kw_only=True, eq=False)
class _VariantAnswer:
    """The result for one variant.

    found: the cheapest strategy that fits and costs less than the best one before, if there is one.
    bound: a lower bound on all such strategies of the variant.
    promising: whether the variant's optimum without the limit leaves room for such a strategy.
    least: whether the variant costs, on every mesh and without the limit, at least as much as the bound proven for the
        first variant.
    """

    found: Found | None = None
    bound: float = np.inf
    promising: bool = False
    least: bool = True
    seconds: dict[str, float] = field(default_factory=dict)


def _fit_variant(
    p: SplitProblem,
    unlimited: Found | None,
    free: Found,
    meshes: Sequence[Mesh],
    limit: float,
    spent: Spent,
    say: Progress,
    below: float,
) -> _VariantAnswer:
    """Return the cheapest strategy of a variant that fits and costs less than ``below``.

    The most promising meshes are searched first. Of the others, only those are searched whose bound is below the cost
    of what fits on the first ones, and none if the allowed work is spent.

    unlimited: the variant's answers without the limit, if they are known.
    free: the answers of the first variant, which bound it on each mesh.
    """
    out, tried = _VariantAnswer(), list[tuple[Mesh, float]]()
    ordered = sorted(meshes, key=lambda m: free.bounds[m.sizes])
    for batch in (meshes,) if unlimited is not None else (ordered[:_FIRST_MESHES], ordered[_FIRST_MESHES:]):
        worthwhile = [m for m in batch if free.bounds[m.sizes] < below]
        if not worthwhile:
            continue
        answers = unlimited
        if answers is None:
            if np.isfinite(below) and spent.over():
                out.bound = min(out.bound, *(free.bounds[m.sizes] for m in worthwhile))
                continue
            answers = search_meshes(p, worthwhile, say, close=False)
            out.seconds = add_seconds(out.seconds, answers.seconds)
            for m in worthwhile:
                tables, cheapest = p.pricing.bounding(m)
                spent.entries += tables.entries
                spent.operations += effort_of(cheapest.work)
        tried += answers.tried
        out.least &= not _takes_less(answers, free)
        if answers.solution.bound >= below:
            continue
        out.promising = True
        start = time.perf_counter()
        found, proven = fit_limit(p, answers, worthwhile, limit, spent, say, below)
        out.seconds = add_seconds(out.seconds, {"search": time.perf_counter() - start})
        out.bound = min(out.bound, proven)
        if found is not None:
            out.found, below = found, found.solution.cost
    if out.found is not None:
        out.found = replace(out.found, tried=tuple(tried))
    return out


_FIRST_MESHES = 4
"""How many meshes of a variant are searched first. They show which others may have a cheaper strategy."""


def _takes_less(variant: Found, free: Found) -> bool:
    """Whether a variant without the limit is cheaper, on some mesh, than the bound that is proven for the first one.

    Meshes are skipped on the assumption that none is. If one were, an answer would not be proven.
    """
    return any(s.cost < free.bounds[m] * (1 - 1e-9) for m, s in variant.answers.items() if m in free.bounds)


def fit_more(
    problem: SplitProblem,
    found: Found,
    more: Sequence[Mesh],
    limit: float | None,
    spent: Spent,
    say: Progress,
) -> Found:
    """Return the answer, or a cheaper one on further meshes that also fits. limit: None if every strategy fits."""
    wider = search_meshes(problem, more, say, found if limit is None else None)
    if limit is None:
        return wider
    best, proven = fit_limit(problem, wider, more, limit, spent, say, found.solution.cost)
    s = found.solution if best is None else best.solution
    low = min(proven, found.solution.bound)
    s = replace(s, bound=min(low, s.cost), optimal=s.optimal and low >= s.cost * (1 - 1e-9))
    return replace(found if best is None else best, solution=s, tried=(*found.tried, *wider.tried))


def fit_limit(
    problem: SplitProblem,
    free: Found,
    over: Sequence[Mesh],
    limit: float,
    spent: Spent,
    say: Progress,
    below: float = np.inf,
) -> tuple[Found | None, float]:
    """Return the best strategy found whose predicted memory is at most ``limit`` bytes per device, and a lower bound on
    all of them.

    Three lower bounds hold for a mesh, each dearer than the one before: its unconstrained optimum; a Lagrangian bound,
    which is one elimination at a price per byte that the first mesh finds; and that of a search which leaves the gap
    between its answer and its bound open. The mesh with the lowest bound is always next. It gets its next bound, and
    its gap is closed once it is the lowest again. This ends when no bound is below the best answer, so that neither
    bounds nor gaps cost anything on meshes that are too expensive anyway. When the allowed work is spent, the search
    returns the best answer so far.

    below: the cost of a known strategy; strategies that cost as much or more need not be found.
    """
    best: Found | None = None
    proven = {m: free.bounds[m.sizes] for m in over}
    searches = {
        m: _LimitedSearch(problem=problem, mesh=m, limit=limit, spent=spent, free=free.answers.get(m.sizes))
        for m in over
    }
    price = 0.0
    todo, priced, tried, searched = list(over), set[Mesh](), set[Mesh](), list[Mesh]()
    while todo:
        mesh = min(todo, key=lambda m: proven[m])
        if proven[mesh] >= below or (spent.over() and np.isfinite(below)):
            break
        name = f"mesh {'×'.join(map(str, mesh.sizes))}"
        if mesh not in priced:
            priced.add(mesh)
            if not spent.over():
                say(f"pricing bytes on {name}")
                least, byte_price = searches[mesh].priced(price)
                proven[mesh] = max(proven[mesh], least)
                price = price or byte_price
                continue
        first = mesh not in tried
        closing = not any(proven[m] < min(below, proven[mesh]) for m in searched)
        if first and searches[mesh].eliminates:
            closing = False
        else:
            todo.remove(mesh)
            searched.append(mesh)
        tried.add(mesh)
        if not (first or closing):  # it would be the same search again
            continue
        say(PieceOfWork(f"{name} within {limit / 2**30:.4g} GiB", len(searched), len(over)))
        answer = searches[mesh].cheapest(below, price, close=closing)
        proven[mesh] = max(proven[mesh], answer.bound)
        if answer.solution is not None:
            best = replace(free, mesh=mesh, space=problem.pricing.space(mesh), solution=answer.solution)
            below = answer.solution.cost
    # Rounding may put a proven answer below its own bound in the last digit.
    least = min(proven.values(), default=np.inf)
    return best, least if best is None else min(least, best.solution.cost)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """The answer for one mesh.

    solution: the cheapest strategy found that fits and is below the requested cost.
    bound: a lower bound on all strategies that fit.
    byte_price: the price of a byte at that strategy, 0 if it is not known.
    """

    solution: Solution | None
    bound: float
    byte_price: float


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """A strategy found with some bytes set aside.

    unseen: the bytes of its memory that the search's limit does not count (mainly those in flight).
    alone: the most that one of its nodes has in flight for its own config alone, whatever configs other nodes have.
    """

    solution: Solution
    memory: Memory
    unseen: float
    alone: float

    @property
    def seen(self) -> float:
        """The bytes of its memory that the search's limit counts."""
        return self.memory.total - self.unseen


@dataclass(frozen=True, kw_only=True, order=True)
class _Region:
    """Strategies that have at least ``low`` bytes in flight, and in which no single node has more than ``high``.

    To search them, ``low`` bytes are set aside, and configs that alone have more than ``high`` in flight are excluded.

    bound: no strategy of the region that fits costs less.
    guess: whether ``low`` is only a guess at what a good strategy has in flight. Other regions also contain the
        strategies of such a region, so that it proves nothing.
    """

    guess: bool
    bound: float
    low: float
    high: float


_MOST_ATTEMPTS = 24
_PROVING = Effort(gap=1e-4, rounds=8)
_GUESSING = replace(_PROVING, labels=100_000)
"""A guess proves nothing: its search is for better strategies alone."""


@dataclass(frozen=True, kw_only=True)
class _LimitedSearch:
    """The search of one mesh under a memory limit.

    The bytes in flight are a maximum over nodes, not a sum. The search's limit therefore leaves them out, and bytes are
    set aside for them instead. Setting aside the least that any strategy has in flight gives a bound. If the answer has
    more in flight, the strategies are divided into those with less than that and those with at least as much. If no
    single node determines what is in flight, parts of it are set aside as guesses.

    spent: counts the work.
    free: the mesh's answer without the limit, if it is known.
    """

    problem: SplitProblem
    mesh: Mesh
    limit: float
    spent: Spent
    free: Solution | None
    _memory: dict[bytes, Memory] = field(default_factory=dict)  # by choice
    _beyond: dict[tuple[float, float], _Attempt] = field(default_factory=dict)
    """By region, what a search that left its gap open found in it, if that does not fit. Closing the gap would only
    find more of that kind, so it is not done."""

    @property
    def eliminates(self) -> bool:
        """Whether an elimination order fits, so that a search that leaves its gap open takes little time."""
        return self.problem.pricing.bounding(self.mesh)[1].optimal

    def priced(self, price: float) -> tuple[float, float]:
        """Return (a lower bound on every strategy that fits, the price of a byte at it).

        Returns (-inf, 0) if there is no such bound without a search.

        price: of a byte; 0 searches for it.
        """
        p = self.problem
        if self.free is None:
            return -np.inf, 0.0
        try:
            tables, free = p.pricing.bounding(self.mesh)
            return price_memory(tables, self._profile(self._least), free, price)
        except Infeasible:
            return np.inf, 0.0

    def cheapest(self, below: float, price: float, close: bool = True) -> _Answer:
        """Search for a strategy that fits and costs less than ``below``.

        price: the initial price of a byte.
        close: whether to close the gap between the Lagrangian bound and the best strategy found.
        """
        best: Solution | None = None
        unproven = np.inf  # a lower bound on the strategies that were left without a proof
        guessed = set[float]()  # several guesses lead to the same next one
        queue = [_Region(guess=False, bound=-np.inf, low=self._least, high=np.inf)]
        for _ in range(_MOST_ATTEMPTS):
            done = best is not None or np.isfinite(below)
            if not queue or (best is not None and queue[0].guess) or (done and self.spent.over()):
                break
            region = heapq.heappop(queue)
            if region.bound >= below:
                continue
            attempt = self._beyond.get((region.low, region.high)) if close else None
            if attempt is None or attempt.solution.cost >= below:
                attempt = self._attempt(region, below, price, close)
            if attempt is None:
                continue
            s = attempt.solution
            price = s.byte_price or price
            bound = max(s.bound, region.bound)
            if s.feasible and s.cost >= below:
                unproven = unproven if region.guess else min(unproven, bound)
                continue
            if s.feasible and attempt.memory.total <= self.limit:
                best, below = s, s.cost
            elif s.feasible:
                if not close:
                    self._beyond[region.low, region.high] = attempt
                if s.bound < below and attempt.alone > region.low:
                    just_below = float(np.nextafter(attempt.alone, 0.0))
                    heapq.heappush(queue, replace(region, bound=bound, high=just_below))
                    heapq.heappush(queue, replace(region, bound=bound, low=attempt.alone))
                    continue
                # With less set aside than this, the same strategy would be found again.
                least = max(region.low, self.limit - attempt.seen)
                for part in (1.0, 0.5, 0.25, 0.125, 1.25, 2.0) if not region.guess else (1.0,):
                    low = max(attempt.unseen * part, self._least)
                    if low > least and low not in guessed:
                        guessed.add(low)
                        heapq.heappush(queue, _Region(guess=True, bound=bound, low=low, high=low))
            if not region.guess:
                unproven = min(unproven, bound)
        unproven = min([unproven, *(r.bound for r in queue if not r.guess)])
        return _Answer(solution=best, bound=unproven, byte_price=price)

    @cached_property
    def _in_flight(self) -> list[np.ndarray]:
        """For each node, the least bytes that each of its configs has in flight: bytes [K]."""
        p = self.problem
        return p.account.in_flight_at_least(p.graph, self.mesh, p.pricing.space(self.mesh).configs)

    @property
    def _least(self) -> float:
        """A lower bound on the bytes that any strategy has in flight."""
        return max((float(f.min()) for f in self._in_flight), default=0.0)

    def _profile(self, set_aside: float) -> MemoryProfile:
        """Return the limit minus the bytes set aside. Raises Infeasible if nothing is left."""
        p, space = self.problem, self.problem.pricing.space(self.mesh)
        if set_aside > self.limit:
            raise Infeasible(f"at least {set_aside:,.0f} bytes are in flight, which is more than the limit")
        return p.account.profile(p.graph, self.mesh, space.configs, self.limit - set_aside, p.optimizer)

    def _attempt(self, region: _Region, below: float, price: float, close: bool) -> _Attempt | None:
        """Search a region. Returns None if nothing is left of the limit or of a node's configs, or if nothing fits."""
        p, space = self.problem, self.problem.pricing.space(self.mesh)

        def solve_within(tables: CostTables, known: Known, part: float) -> Solution:
            allowed = _forbid(tables, self._in_flight, region.high)
            known = replace(known, below=below, byte_price=price, close=close and known.close)
            left = self.spent.left_s()
            seconds = None if left is None else left / 2 * part  # the rest is for other attempts
            effort = replace(_GUESSING if region.guess else _PROVING, time_limit=seconds)
            found = solve(allowed, wanted, known=known, effort=effort)
            self.spent.operations += found.work
            return found

        try:
            wanted = self._profile(region.low)
            solution = p.pricing.solve(self.mesh, solve_within, below, close)
        except Infeasible:
            return None
        if not solution.feasible or solution.cost >= below:
            nothing = Memory(parameters=0, gradients=0, optimizer=0, activations=0, buffers=0)
            return _Attempt(solution=solution, memory=nothing, unseen=0.0, alone=0.0)
        chosen = list(zip(space.graph.nodes, space.configs, solution.choice, strict=True))
        key = solution.choice.tobytes()
        if key not in self._memory:
            self._memory[key] = memory_of(p, {n.name: cfg[i] for n, cfg, i in chosen}, self.mesh)
        memory = self._memory[key]
        unseen = p.account.unseen(memory, float(wanted.usage(solution.choice).max()))
        alone = max((float(f[i]) for f, i in zip(self._in_flight, solution.choice, strict=True)), default=0.0)
        return _Attempt(solution=solution, memory=memory, unseen=unseen, alone=alone)


def _forbid(tables: CostTables, flight: Sequence[np.ndarray], most: float) -> CostTables:
    """Return the tables without the configs that alone have more than ``most`` bytes in flight.

    Nodes that shared a cost vector still share one, so that equal layers are recognized.

    flight: per node, the least bytes that each config has in flight.
    """
    if not any((f > most).any() for f in flight):
        return tables
    shared: dict[tuple[int, bytes], np.ndarray] = {}
    costs = []
    for cost, f in zip(tables.node_costs, flight, strict=True):
        over = f > most
        key = (id(cost), over.tobytes())
        costs.append(shared.setdefault(key, np.where(over, np.inf, cost) if over.any() else cost))
    return replace(tables, node_costs=tuple(costs))


def _least_memory(problem: SplitProblem, mesh: Mesh) -> float:
    """Return a lower bound on the bytes per device that any strategy on this mesh needs, without bytes in flight."""
    spaces = problem.pricing.configs(mesh)
    p = problem.account.profile(problem.graph, mesh, spaces, float("inf"), problem.optimizer)
    lowest = {id(b): b.min() for b in p.bytes}
    least = np.array([lowest[id(b)] for b in p.bytes])
    least[p.stop <= p.start] = 0.0
    change = np.zeros(int(p.stop.max()) + 1)
    np.add.at(change, p.start, least)
    np.add.at(change, p.stop, -least)
    return float(np.cumsum(change)[:-1].max())


def _needs_on_more(
    problem: SplitProblem, least: Sequence[_Footprint], limit: float
) -> Iterator[tuple[int, float]]:
    """Yield (devices, least bytes) of the smallest variant on 2, 4, … 64 times the devices, until it fits."""
    p = problem.on(min(least, key=lambda n: n.nbytes).candidate)
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(p, devices=factor * p.devices, graph=replace(p.graph, fixed={}))
        try:
            meshes = more.meshes(None, 2)
        except Infeasible:  # the target has no mesh of so many devices
            meshes = []
        needs = min((_least_memory(more, m) for m in meshes), default=float("inf"))
        yield more.devices, needs
        if needs <= limit:
            return


def _nothing_fits(
    least: Sequence[_Footprint],
    limit: float,
    devices: int,
    more: Sequence[tuple[int, float]],
    refused: str,
) -> Infeasible:
    """Return the error that says what would fit.

    more: (devices, least bytes) of the smallest variant on more devices. refused: why more micro-batches were not
    tried; "" if they were.
    """
    nbytes, mesh, candidate = min(least, key=lambda n: n.nbytes)
    enough = next((n for n, b in more if b <= limit), None)
    if enough is not None:
        fix = f"use {enough} devices, on which it may fit, or a smaller batch"
    elif more:
        fix = f"use a smaller batch or model; even {more[-1][0]} devices do not suffice"
    else:
        fix = "use more devices or a smaller batch"
    shape = "×".join(map(str, mesh.sizes))
    return Infeasible(
        f"no strategy found that fits {limit / 2**30:.4g} GiB per device on {devices} devices: each needs at least "
        f"{nbytes / 2**30:.4g} GiB ({candidate.variant}, mesh {shape})"
        f"{refused and f'. More micro-batches were not tried: {refused}'}",
        fix=fix,
    )
