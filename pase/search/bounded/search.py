"""Search in bounded memory: for graphs that are too dense to eliminate, and under a memory limit.

Each round has three parts: raise the Lagrangian bound (tree-reweighted messages, prices on the points that bind),
search neighbourhoods of its choices, and remove the configs that the bound proves too expensive and contract again.
Rounds end when the bound meets the cost or time is up. Once the remaining problem is small, an integer program runs in
parallel on another core and may finish the search.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from pase.clock import Deadline
from pase.compiled import is_compiled
from pase.errors import Infeasible
from pase.search.bounded.bundle import next_prices
from pase.search.bounded.contract import contract, restrict
from pase.search.bounded.depth_first import DepthFirst, depth_first_fits
from pase.search.bounded.greedy import greedy_choice
from pase.search.bounded.ilp import IlpJob, ilp_problem, solve_ilp
from pase.search.bounded.residual import ACTIVE_POINTS, Incumbent, Residual, usable_pairs
from pase.search.check import cost_of
from pase.search.elimination.exact import eliminate_pairwise
from pase.search.types import Effort, MemoryProfile, SearchProgress, Solution
from pase.tables.types import CostTables

__all__ = ["bounded_search"]

_ILP_PAIRS = 120_000  # the most allowed pairs over all edges for an integer program
_SMALL_ILP = (
    6_000  # the most pairs and configs for an integer program that is solved at once, in this process
)
_SWEEPS = 100
_WORTH_DROPPING = 0.04  # fraction of the configs; dropping fewer is not worth rebuilding the arrays
_TREE = 100  # approximate number of nodes in the tree of a neighbourhood
_CUTS = 12  # cutting-plane steps per round
_ROUNDS = 60  # rounds, if neither time nor rounds are limited
_ROUND_WORK = 30_000_000  # min-plus operations on small tables that take as long as one round
_COMPILE_S = 20.0  # seconds to compile a round's kernels on an idle core, with a margin of a half
_PAIRS_A_ROUND = 6_000  # the search waits one round longer for an integer program per this many pairs


def bounded_search(
    tables: CostTables,
    memory: MemoryProfile | None,
    effort: Effort,
    seed: int,
    began: float,
    progress: SearchProgress | None = None,
    known: tuple[np.ndarray, float] | None = None,
) -> Solution:
    """The best choice found, and a lower bound.

    effort: how long it goes on; its time limit is counted from ``began``. Without one, the result depends only on the
    seed. known: a choice to start from, and a bound that elimination proved.
    Raises Infeasible if it is proven that nothing fits.
    """
    clock, time_limit, rounds = Deadline.after(began, effort.time_limit), effort.time_limit, effort.rounds
    if rounds is None and time_limit is None:
        rounds = _ROUNDS
    state = Incumbent(tables, memory, began)
    state.enough = effort.gap
    turns: _Rounds | None = None
    if known is not None:
        state.offer(known[0])
        state.prove(min(known[1], state.cost), "elimination at the best price per byte")
    try:
        # Reductions may take most of the remaining time. The problem is valid whenever they stop.
        left = contract(tables, memory, until=time.perf_counter() + 0.75 * max(0.0, clock.left))
        now = clock.run("residual", Residual, left, memory)
        rng = np.random.default_rng(seed)
        if time_limit is not None:  # so that there is at least one choice when time runs out
            _start(state, now, clock)
        turns = _Rounds(state, now, rng, clock, progress, rounds)
        method = turns.run()
    except KeyboardInterrupt:
        method = "interrupted"
    return replace(_solution(state, method), work=_ROUND_WORK * (0 if turns is None else turns.round + 1))


def _solution(state: Incumbent, method: str) -> Solution:
    """The best choice so far as a solution. Without one, the choice of the cheapest configs, marked infeasible."""
    seconds = time.perf_counter() - state.began
    feasible = state.choice is not None
    cheapest = [int(c.argmin()) for c in state.tables.node_costs]
    choice = np.array(cheapest, np.int64) if state.choice is None else state.choice
    cost = cost_of(state.tables, choice)
    optimal = feasible and state.done()
    return Solution(
        choice=choice,
        cost=cost,
        bound=min(state.bound, cost),
        optimal=optimal,
        feasible=feasible,
        seconds=seconds,
        method=method,
        certificate=state.certificate,
    )


@dataclass(eq=False)
class _Rounds:
    """The rounds of the search; each is a fixed amount of work.

    now: the remaining problem. rounds: the most rounds; None: as many as the clock allows. pairs_tried: the number of
    pairs of the last integer program. tree: a depth-first search of the remaining problem, if that is small.
    """

    state: Incumbent
    now: Residual
    rng: np.random.Generator
    clock: Deadline
    progress: SearchProgress | None
    rounds: int | None
    round: int = 0
    job: IlpJob | None = None
    pairs_tried: float = np.inf
    tree: DepthFirst | None = None

    def run(self) -> str:
        """Run rounds until the search ends. Returns how it ended, as the solution's method."""
        pool = ThreadPoolExecutor(1)
        try:
            while True:
                ended = self._finish() or self._uncompiled() or self._take_round(pool) or self._ended()
                if ended:
                    return ended
                # Nothing is removed while an integer program works on the remaining problem.
                if self.job is None and not self._begin_program() and not self._shrink():
                    return "dual bound and neighbourhood search"
        finally:
            self._stop_program()
            pool.shutdown()

    def _finish(self) -> str:
        """Try to solve the rest at once. Returns the method; empty if this is not possible."""
        state, now, clock = self.state, self.now, self.clock
        _refuse_hopeless(state, now)
        if not now.flat.n:
            state.offer(now.left.expand(np.zeros(0, np.int64)))
            state.prove(min(now.left.constant, state.cost), "reductions")
            return "reductions"
        narrow = (self.round == 0 or self.job is None) and clock.allows("elimination")
        if narrow and clock.run("elimination", _eliminate, state, now, clock):
            return "reductions and elimination"
        return "integer program" if self.round == 0 and _finish_small(state, now, clock) else ""

    def _uncompiled(self) -> str:
        """Check whether compiling the first round's kernels, which cannot be interrupted, would take the rest of the
        time. Returns the method in that case, otherwise an empty string."""
        if self.round or self.clock.left > _COMPILE_S:
            return ""
        from pase.search.bounded.kernels_memory import dual_ascent, lns, polish

        if all(is_compiled(k) for k in (dual_ascent, lns if self.now.rows.points else polish)):
            return ""
        left = self.now.left
        self._prove(left.constant + sum(float(a.min()) for a in (*left.costs, *left.matrices)))
        return "a greedy start: no time to compile kernels, which `python -m pase.search.warm` does once"

    def _take_round(self, pool: ThreadPoolExecutor) -> str:
        """Run the dual and the neighbourhood search in parallel.

        The neighbourhoods use the prices of the last round, and the dual uses its cost, so that the result does not
        depend on which is faster. Returns the method if the search ends, otherwise an empty string.
        """
        state, now, clock = self.state, self.now, self.clock
        if self.round == 0:
            self._prove(clock.run("bound", _raise_bound, now, state.cost))
        price, rounded = now.price.copy(), now.choice.copy()
        dual = None
        if clock.allows("bound"):
            dual = pool.submit(clock.run, "bound", _raise_bound, now, state.cost)
        _neighbourhoods(state, now, price, rounded, self.rng, clock)
        if dual is not None:
            self._prove(dual.result())
        self.round += 1
        if self.progress is not None:
            self.progress("searching", state.cost, state.bound, time.perf_counter() - state.began)
        if self._deeper():
            return "depth-first search"
        if self.job is None or not (self._last or self.round >= self.job.due):
            return ""
        # If the clock ends the search anyway, rounds go on until the answer arrives.
        answer = self.job.wait(clock.left if self.rounds is not None else 0.0)
        if answer is None and self.rounds is None:
            return ""
        self._stop_program()
        return "integer program" if answer is not None and _take(state, now, answer) else ""

    def _deeper(self) -> bool:
        """Continue depth first if the remaining problem is small. True once it is proven that nothing cheaper
        exists."""
        if not depth_first_fits(self.now) or self.state.done() or not self.clock.allows("depth"):
            return False
        from pase.search.bounded.kernels_depth import descend

        if self.clock.left < _COMPILE_S and not is_compiled(descend):
            return False
        if self.tree is None or self.tree.of is not self.now:
            self.tree = DepthFirst(self.now, self.state.integers)
        found, lower, ended = self.clock.run("depth", self.tree.run, self.state.cost)
        if found is not None:
            self.state.offer(found)
        if ended and self.state.choice is None:
            raise Infeasible(
                "no choice of configs has a finite cost, as a depth-first search of all choices proves"
            )
        self.state.prove(min(self.state.cost if ended else lower, self.state.cost), "depth-first search")
        return ended

    def _prove(self, lower: float) -> None:
        self.state.prove(min(lower, self.state.cost), "dual bound")

    @property
    def _last(self) -> bool:
        """Whether the last allowed round is over."""
        return self.rounds is not None and self.round >= self.rounds

    def _ended(self) -> str:
        """How the search ends, as the solution's method; empty if it goes on."""
        state = self.state
        if state.done():
            return "dual bound and neighbourhood search"
        if state.cost - state.bound <= state.enough * abs(state.cost):
            return "dual bound and neighbourhood search, to the gap asked for"
        if not self.clock.allows("moves"):
            return "dual bound and neighbourhood search, stopped by time"
        return f"dual bound and neighbourhood search, {self.rounds} rounds" if self._last else ""

    def _begin_program(self) -> bool:
        """Start an integer program on another core if the rest is small. False if it is large or was already tried."""
        if self.round < 2:
            return False
        usable, pairs = usable_pairs(self.state, self.now)
        if pairs > min(_ILP_PAIRS, 0.7 * self.pairs_tried):
            return False
        self.pairs_tried = pairs
        size = self.state.cost if np.isfinite(self.state.cost) else self.state.bound
        problem = ilp_problem(
            self.now.flat, self.now.rows, usable, max(abs(size), 1e-300), max(0.1, self.clock.left)
        )
        self.job = IlpJob(problem, self.round + 1 + pairs // _PAIRS_A_ROUND)
        return True

    def _stop_program(self) -> None:
        if self.job is not None:
            self.job.stop()
            self.job = None

    def _shrink(self) -> bool:
        """Every few rounds, remove what the bound proves too expensive. False if nothing is left."""
        clock = self.clock
        if self.round % 4 or not clock.allows("shrinking") or not clock.allows("residual"):
            return True
        keep = clock.run("shrinking", _affordable, self.state, self.now)
        if keep is None:
            return True
        # All choices cheaper than the best one remain. So a bound on the remaining problem, capped at the best cost, is
        # a bound on all choices.
        until = time.perf_counter() + 0.5 * clock.left
        try:
            rest = clock.run("residual", restrict, self.now.left, keep, until)
            smaller = clock.run("residual", Residual, rest, self.state.memory)
        except Infeasible:  # nothing cheaper is left
            self.state.prove(self.state.cost, "dual bound")
            return False
        smaller.inherit(self.now)
        self.now = smaller
        return True


def _start(state: Incumbent, now: Residual, clock: Deadline) -> None:
    """Offer a first choice, even if the cheapest config of each node uses forbidden pairs."""
    state.offer(now.left.expand(now.choice))
    choice = greedy_choice(now.left.costs, now.left.pairs, now.left.matrices, clock.past(1 / 4))
    if choice is not None:
        state.offer(now.left.expand(choice))


def _refuse_hopeless(state: Incumbent, now: Residual) -> None:
    """Raise Infeasible if even the fixed bytes exceed the limit at some point."""
    if state.choice is None and now.rows.points and now.rows.capacity.min() < 0:
        assert state.memory is not None
        raise Infeasible(
            f"the limit of {state.memory.limit_bytes:,.0f} bytes is too low: at some point, even the smallest possible "
            f"usage exceeds it by {-float(now.rows.capacity.min()):,.0f} bytes",
            where="memory limit",
            fix="raise the limit",
        )


def _eliminate(state: Incumbent, now: Residual, clock: Deadline) -> bool:
    """Finish exactly by elimination if there is no memory limit and an elimination order fits."""
    if now.rows.points:
        return False
    choice = eliminate_pairwise(now.left.costs, now.left.pairs, now.left.matrices, clock.past(1 / 2))
    if choice is None:
        return False
    state.offer(now.left.expand(choice))
    state.prove(state.cost, "elimination")
    return True


def _finish_small(state: Incumbent, now: Residual, clock: Deadline) -> bool:
    """Solve a small residual with an integer program at once, in this process."""
    usable, pairs = usable_pairs(state, now)
    if pairs + now.flat.cost.size > _SMALL_ILP:
        return False
    scale = max(1.0, float(np.abs(now.flat.cost).max(initial=0.0)))
    seconds = max(0.1, clock.left)
    return _take(state, now, solve_ilp(ilp_problem(now.flat, now.rows, usable, scale, seconds)))


def _raise_bound(now: Residual, cost: float) -> float:
    """A lower bound, raised by one round of work. cost: of the best choice when the round began."""
    from pase.search.bounded.kernels_memory import Limited, dual_ascent

    flat = now.flat
    # The work per round is fixed and does not depend on the clock, so the same seed gives the same result.
    sweeps = int(np.clip(2e8 / max(1, flat.entries.size + 10 * flat.cost.size), 4, _SWEEPS))
    before = float(now.dual[0])
    if now.rows.points and now.cutting:
        # Start with cutting planes only: if few points bind, they converge in a few rounds.
        lower = _cut(now, max(2, sweeps // _CUTS // 2 * 2), _CUTS, now.cut_points)
        now.round += 1
        if now.round >= 3 and lower - before < 3e-3 * abs(lower):
            now.cutting = False
    else:
        lower = dual_ascent(
            Limited(flat.graph, now.rows.limit, flat.cost),
            now.price,
            now.message,
            now.choice,
            now.active,
            now.dual,
            cost - now.left.constant,
            sweeps,
        )
        if now.rows.points:
            _remember(now, now.choice)
            lower = _cut(now, max(2, sweeps // 10 // 2 * 2), _CUTS // 3, now.active[: int(now.dual[2])])
    return lower + now.left.constant


def _cut(now: Residual, sweeps: int, steps: int, points: np.ndarray) -> float:
    """Cutting-plane steps on the prices of ``points`` and of the point most over its limit. Returns the best bound."""
    from pase.search.bounded.kernels_flat import trws_pass

    flat, bundle, reduced = now.flat, now.bundle, np.zeros(now.flat.cost.size)
    if not bundle.values:
        _remember(now, now.choice)
    for _ in range(steps if bundle.values else 0):
        over = bundle.slopes[-1]
        if over.max() > 0:
            points = np.union1d(points, [int(over.argmax())]).astype(np.int64)
        if points.size == 0 or points.size > ACTIVE_POINTS // 2:
            break
        if bundle.reach <= 0.0:
            start = abs(now.dual[0]) if np.isfinite(now.dual[0]) else abs(bundle.values[-1])
            bundle.reach = max(float(now.price.max()), 0.3 * start / max(1.0, float(np.abs(over).max())))
        got = next_prices(bundle, now.price, points)
        if got is None:
            break
        price, promised = got
        priced, offset = now.priced(price), float(price @ now.rows.capacity)
        choice, bound, least = now.choice, -np.inf, np.inf
        for sweep in range(sweeps):
            rounded = now.choice.copy()
            lower = trws_pass(flat.graph, priced, now.message, rounded, reduced, sweep % 2 == 0, True)
            bound = max(bound, lower - offset)
            value = flat.cost_of(rounded, priced)
            if value < least:
                least, choice = value, rounded
        _remember(now, choice)
        if bound > now.dual[0]:
            bundle.reach *= 1.5 if bound - now.dual[0] > 0.25 * (promised - now.dual[0]) else 1.0
            now.dual[0], now.price, now.choice = bound, price, choice
            now.dual[2] = points.size
            now.active[: points.size] = points
        else:
            bundle.reach = max(0.7 * bundle.reach, 1e-6 * float(now.price.max()))
    if now.cutting:
        now.cut_points = points
    return float(now.dual[0])


def _remember(now: Residual, choice: np.ndarray) -> None:
    """Add the plane of a choice to the bundle, unless the choice uses forbidden pairs."""
    cost = now.flat.cost_of(choice)
    if np.isfinite(cost):
        now.bundle.add(cost, now.over(choice))


def _neighbourhoods(
    state: Incumbent,
    now: Residual,
    price: np.ndarray,
    rounded: np.ndarray,
    rng: np.random.Generator,
    clock: Deadline,
) -> None:
    """Search around the dual's rounded choice, then around the best choice, while there is time."""
    from pase.search.bounded.kernels_memory import Limited, lns, polish

    flat = now.flat
    # A step reads the pairs of the edges in a tree and the points at which its bytes change.
    a_step = _TREE * flat.entries.size / max(1, flat.n) + 4 * now.rows.points
    steps = int(np.clip(1e8 / max(1.0, a_step), 200, 2_000))
    starts = [rounded]
    polish(flat.graph, now.priced(price), starts[0], 20, int(rng.integers(2**31)))
    if state.choice is None or "moves" not in clock.longest:  # only the first time
        starts.append(_press(now, price, starts[0], rng))
    if state.choice is not None:
        starts.append(now.left.nearest(state.choice))
    for start in starts:
        for largest in (30, 100, 1000):
            best, seed = start.copy(), int(rng.integers(2**31))
            if not clock.allows("moves"):
                return
            # No price leaves an infinite cost, so if the start uses forbidden pairs, they get a finite price.
            graph = flat.graph if np.isfinite(flat.cost_of(start)) else flat.softened
            problem, size = Limited(graph, now.rows.limit, flat.cost), (steps // 3, largest, seed)
            cost = clock.run("moves", lns, problem, price, start, best, *size)
            if cost + now.left.constant < state.cost:
                state.offer(now.left.expand(best))


def _press(now: Residual, price: np.ndarray, choice: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A choice that fits, or nearly fits: raises the price of the worst point until no point is over its limit."""
    from pase.search.bounded.kernels_memory import polish, usage_of

    flat = now.flat
    price, used, choice = price.copy(), np.zeros(now.rows.points), choice.copy()
    least = max(1e-12 * abs(flat.cost_of(choice)), 1e-300) / max(
        1.0, float(now.rows.capacity.max(initial=1.0))
    )
    for _ in range(60):
        usage_of(now.rows.limit, flat.slot, choice, used)
        over = used - now.rows.capacity
        if not over.size or over.max() <= 0:
            break
        worst = int(over.argmax())
        price[worst] = max(4.0 * price[worst], price.max(initial=0.0) / 16, least * 1e9)
        polish(flat.graph, now.priced(price), choice, 5, int(rng.integers(2**31)))
    return choice


def _take(state: Incumbent, now: Residual, answer: tuple[str, np.ndarray | None, float]) -> bool:
    """Use the answer of an integer program. Returns whether it settles the search."""
    status, choice, bound = answer
    if choice is not None:
        state.offer(now.left.expand(choice))
    if status == "infeasible":
        if state.choice is None:
            raise Infeasible(
                "no choice of configs fits, as an integer program proves",
                where="memory limit",
                fix="raise the limit",
            )
        state.prove(state.cost, "integer program (HiGHS)")
        return True
    bound += now.left.constant
    # A bound above a known cost is a solver error and proves nothing.
    if np.isfinite(bound) and bound <= state.cost + 1e-6 * abs(state.cost):
        state.prove(min(bound, state.cost), "integer program (HiGHS)")
    return state.done()


def _affordable(state: Incumbent, now: Residual) -> list[np.ndarray] | None:
    """Per node, the configs that a choice as good as the best may use; None if few could be dropped."""
    from pase.search.bounded.kernels_flat import trws_pass

    if state.choice is None:
        return None
    flat = now.flat
    priced = now.priced(now.price)
    offset = float(now.price @ now.rows.capacity)
    ceiling = state.cost - now.left.constant + offset + 1e-9 * abs(state.cost)
    message = now.message.copy()
    reduced = np.zeros(flat.cost.size)
    forced = np.full(flat.cost.size, -np.inf)
    scratch = now.choice.copy()
    before = -np.inf
    for sweep in range(30):
        bound = trws_pass(flat.graph, priced, message, scratch, reduced, sweep % 2 == 0, False)
        np.maximum(forced, before + reduced, out=forced)
        before = bound
    state.prove(min(before - offset + now.left.constant, state.cost), "dual bound")
    keep = forced <= ceiling
    if (~keep).sum() < _WORTH_DROPPING * keep.size:
        return None
    return [keep[a:b] for a, b in zip(flat.slot[:-1], flat.slot[1:], strict=True)]
