"""Results of the stateful kernels on seeded instances; `python -m tests.kernels.cases PART` prints them as JSON.

Without PART, it only compiles what is not in numba's cache: what `pase.search.warm` does, and the rest.

With NUMBA_DISABLE_JIT=1, numba returns the Python source unchanged. It then runs with numpy's index checks, and must
produce the same bits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pase.search.bounded.flat import Flat, flatten
from pase.search.bounded.rows import Limit

__all__ = ["PARTS", "flat_instance", "limit_of", "results"]

SEEDS = range(6)


def flat_instance(rng: np.random.Generator, nodes: int = 12, edges: int = 20) -> Flat:
    """A random pairwise problem. Some entries are forbidden, but each config keeps at least one finite partner."""
    costs = [rng.random(rng.integers(2, 6)) for _ in range(nodes)]
    pairs = sorted({tuple(map(int, sorted(rng.choice(nodes, 2, replace=False)))) for _ in range(edges)})
    matrices = []
    for a, b in pairs:
        m = rng.random((costs[a].size, costs[b].size))
        m[1:, 1:][rng.random((costs[a].size - 1, costs[b].size - 1)) < 0.2] = np.inf
        matrices.append(m)
    return flatten(costs, pairs, matrices)  # type: ignore[arg-type]


def limit_of(rng: np.random.Generator, flat: Flat, points: int) -> Limit:
    """Each config of a node holds some bytes over the node's interval."""
    ptr, point, change = [0], list[int](), list[float]()
    for k in np.diff(flat.slot):
        a, b = sorted(rng.choice(points + 1, 2, replace=False).tolist())
        for _ in range(k):
            nbytes = float(rng.integers(1, 50))
            point += [a, b]
            change += [nbytes, -nbytes]
            ptr.append(len(point))
    capacity = np.full(points, 15.0 * flat.n)
    return Limit(ptr=np.array(ptr), point=np.array(point), change=np.array(change), capacity=capacity)


def _search(seed: int) -> Iterator[Any]:
    from pase.search.bounded import kernels_flat as flat_kernels
    from pase.search.bounded import kernels_memory as memory_kernels

    rng = np.random.default_rng(seed)
    flat = flat_instance(rng)
    limit, n, slots = limit_of(rng, flat, 5), flat.n, flat.cost.size
    message, reduced, choice = np.zeros(flat.messages), np.zeros(slots), np.zeros(n, np.int64)
    for sweep in range(4):
        forward = sweep % 2 == 0
        yield flat_kernels.trws_pass(flat.graph, flat.cost, message, choice, reduced, forward, True)
        yield from (choice.copy(), reduced.copy())
    price, active, state = np.zeros(5), np.zeros(5, np.int64), np.array([-np.inf, 0, 0, 0, 0, 0])
    problem = memory_kernels.Limited(flat.graph, limit, flat.cost)
    yield memory_kernels.dual_ascent(problem, price, message, choice, active, state, np.inf, 40)
    yield from (price, state)
    w = memory_kernels.make_scratch(n, slots)
    taken, _ = flat_kernels.grow_tree(flat.graph, seed, 8, w.picked, w.seen, w.queue, rng.random(16))
    nodes = np.flatnonzero(w.picked)
    yield taken
    usage = memory_kernels.Usage(np.zeros(5), np.zeros(5), np.zeros(6))
    memory_kernels.usage_of(limit, flat.slot, choice, usage.used)
    extra = rng.random(5) * 0.01
    yield from memory_kernels.move_tree(problem, choice, nodes, usage, 1.0, extra, 0.01, w)
    yield from (choice, usage.used, usage.delta, w.picked)


def _depth(seed: int) -> Iterator[Any]:
    from pase.search.bounded import kernels_depth

    flat = flat_instance(np.random.default_rng(seed))
    tree = kernels_depth.new_tree(flat.slot, np.zeros(flat.messages))
    for work in (1.0, 2_000.0):
        yield kernels_depth.descend(flat.graph, flat.cost, tree, np.inf, 0.0, work)
        yield from (tree.now.copy(), tree.left.copy(), tree.message.copy(), tree.best.copy())


def _schedule(seed: int) -> Iterator[Any]:
    from bench.cases.schedules import random_problem
    from pase.schedule import kernels_chain, kernels_greedy, kernels_search
    from pase.schedule.greedy import instance
    from pase.schedule.view import plain_view

    problem = random_problem(10, seed, links=1 + seed % 2)
    inst = instance(problem, plain_view(problem))
    line, rng = inst.tensors, np.random.default_rng(seed)
    target = 1.3 * (inst.compute + float(line["fluid"].sum()))
    pieces = kernels_greedy.greedy(inst, target, 0.1, 1e-6, np.zeros(inst.links))
    yield from pieces
    state = kernels_search.start(*pieces)
    yield from kernels_search.cost_of(inst, state, np.zeros(inst.links))
    link = rng.integers(0, inst.links, line.size)
    times = (line["ready"].copy(), line["fluid"].copy(), line["tail"].copy())
    yield kernels_chain.sequence(*times, link, inst.links, inst.compute)
    yield from kernels_chain.priority(*times, link, inst.links, line["nbytes"].copy(), 1e5, inst.compute)
    yield kernels_chain.jackson(*times, np.argsort(line["ready"], kind="stable"))


def _walks(seed: int) -> Iterator[Any]:
    from pase.tables import walks
    from pase.tables.axis_layout import REPLICATED, digit_state
    from pase.tables.reshard_path import canonical

    rng = np.random.default_rng(seed)
    sizes, rows = np.array([2, 3, 2, 4, 2]), np.full((2, 40, 5), REPLICATED)
    for end in rows:
        for row in end:
            blocks = [1, 1, 1]
            for a in rng.permutation(5):
                t = rng.integers(-2, 3)
                if t >= 0:
                    blocks[t] *= sizes[a]
                row[a] = t if t < 0 else digit_state(int(t), blocks[t])
    yield walks.compiled(canonical(*rows, sizes)[0])


PARTS: dict[str, Callable[[int], Iterator[Any]]] = {
    "search": _search,
    "depth": _depth,
    "schedule": _schedule,
    "walks": _walks,
}


def results(part: str) -> list[list[str]]:
    """Every number that the kernels of a part return or write, as hex bits, by seed."""
    return [[np.asarray(x, float).tobytes().hex() for x in PARTS[part](seed)] for seed in SEEDS]


def compile_all() -> None:
    from pase.replay.simulation import _kernels as replay
    from pase.replay.simulation.simulate import Tasks
    from pase.search.warm import warm

    none, one, first = np.zeros(0), np.zeros(1), np.zeros(1, np.int64)
    replay.simulate(
        Tasks(
            device=first,
            duration=one,
            priority=first,
            release=one,
            gang=first - 1,
            gang_size=first[:0],
            ptr=np.zeros(2, np.int64),
            dst=first[:0],
            lag=none,
            device_free=one,
        )
    )
    warm()
    for part in PARTS.values():
        list(part(SEEDS[0]))


if __name__ == "__main__":
    print(json.dumps(results(sys.argv[1]))) if sys.argv[1:] else compile_all()
