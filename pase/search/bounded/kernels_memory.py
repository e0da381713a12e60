"""Compiled kernels for a memory limit: prices on bytes, the Lagrangian dual, neighbourhood search.

The limit is a ``Limit``: the bytes in use at point t are the cumulative sum of the chosen configs' events.
A price per byte at each point turns bytes into node costs, so any method for the problem without a limit also solves
the priced one. Only points that have been the worst get a price, because few points ever bind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase.search.bounded.flat import FlatGraph
from pase.search.bounded.kernels_flat import choose_forest, forest_move, grow_tree, jit, trws_pass
from pase.search.bounded.rows import Limit

__all__ = ["Limited", "dual_ascent", "lns", "polish", "priced_costs", "usage_of"]


class Limited(NamedTuple):
    """A problem with a memory limit. cost: of each config, float64 [slots]."""

    graph: FlatGraph
    limit: Limit
    cost: np.ndarray


@jit()
def sum_from(price, suffix):
    """suffix[t] = sum of price[t:]. suffix: float64 [points + 1]."""
    suffix[price.shape[0]] = 0.0
    for t in range(price.shape[0] - 1, -1, -1):
        suffix[t] = suffix[t + 1] + price[t]


@jit()
def priced_costs(limit, cost, price, suffix, out):
    """out[slot] = cost plus the price of the config's bytes. suffix: float64 [points + 1] scratch."""
    ptr, point, change = limit.ptr, limit.point, limit.change
    sum_from(price, suffix)
    for r in range(ptr.shape[0] - 1):
        s = cost[r]
        for q in range(ptr[r], ptr[r + 1]):
            s += change[q] * suffix[point[q]]
        out[r] = s


@jit()
def usage_of(limit, slot, choice, out):
    """out[t] = bytes in use at point t; float64 [points]."""
    ptr, point, change = limit.ptr, limit.point, limit.change
    points = out.shape[0]
    out[:] = 0.0
    for v in range(choice.shape[0]):
        r = slot[v] + choice[v]
        for q in range(ptr[r], ptr[r + 1]):
            if point[q] < points:
                out[point[q]] += change[q]
    s = 0.0
    for t in range(points):
        s += out[t]
        out[t] = s


@jit()
def total_cost(graph, cost, choice):
    """Node costs plus edge costs of ``choice``."""
    slot, head, tail, matrix, entries = graph.slot, graph.head, graph.tail, graph.matrix, graph.entries
    s = 0.0
    for v in range(choice.shape[0]):
        s += cost[slot[v] + choice[v]]
    for e in range(head.shape[0]):
        u = tail[e]
        s += entries[matrix[e] + choice[head[e]] * (slot[u + 1] - slot[u]) + choice[u]]
    return s


# The state of ``dual_ascent`` between calls, in a float64 array: the best bound; the level (the rise aimed at); how
# many points have a price; sweeps in this window; the direction of the next sweep; the bound at the start of the
# window.
BEST, LEVEL, PRICED, SWEEPS, DOWN, START = range(6)
_WINDOW = 30.0
"""Number of sweeps after which the level is compared with the rise that they achieved."""


@jit()
def adapt_level(state, bound, ceiling):
    """Count one more sweep of the window, which proved ``bound``. At the end of the window, adapt the level to the rise
    that was achieved. Returns True if the level was too high, so that prices return to the best ones."""
    if state[LEVEL] <= 0.0:
        state[LEVEL] = 0.05 * abs(bound) + 1e-9
        state[START] = state[BEST]
    state[SWEEPS] += 1.0
    if state[SWEEPS] < _WINDOW:
        return False
    state[SWEEPS] = 0.0
    risen = state[BEST] - state[START] >= 0.5 * state[LEVEL]
    state[LEVEL] *= 1.5 if risen else 0.6
    # Steps have become too small to matter, so aim at a large part of the gap again.
    if not risen and ceiling < np.inf and state[LEVEL] < 0.03 * (ceiling - state[BEST]):
        state[LEVEL] = 0.3 * (ceiling - state[BEST])
    state[START] = state[BEST]
    return not risen


@jit()
def with_worst(used, capacity, active, is_active, count):
    """Give a price to the point that exceeds its capacity most, if there is room. Returns how many points have one."""
    worst = -1
    over = 0.0
    for t in range(capacity.shape[0]):
        if used[t] - capacity[t] > over:
            over = used[t] - capacity[t]
            worst = t
    if worst >= 0 and is_active[worst] == 0 and count < active.shape[0]:
        is_active[worst] = 1
        active[count] = worst
        count += 1
    return count


@jit()
def step_prices(now, used, capacity, active, direction, reach):
    """A deflected subgradient step on the prices of the active points. Updates ``now`` and ``direction``.

    reach: the step size times the squared norm of the direction.
    """
    norm = 0.0
    for i in range(active.shape[0]):
        t = active[i]
        g = used[t] - capacity[t]
        if now[t] <= 0.0 and g < 0.0:
            g = 0.0
        direction[i] = 0.8 * direction[i] + 0.2 * g
        norm += direction[i] * direction[i]
    if norm > 0.0:
        step = reach / norm
        for i in range(active.shape[0]):
            t = active[i]
            now[t] = max(0.0, now[t] + step * direction[i])


@jit()
def dual_ascent(problem, price, msg, choice, active, state, ceiling, passes):
    """Raise the bound by ``passes`` sweeps, each followed by a deflected subgradient step on the prices.

    price: float64 [points], the best prices on entry and exit. active: int64, the points that have a price.
    state: float64 [6], kept between calls (BEST …). ceiling: a known cost, or inf. choice: set to the rounded choice of
    least priced cost. Returns the best bound.
    """
    graph, limit, cost = problem.graph, problem.limit, problem.cost
    slot, capacity = graph.slot, limit.capacity
    points = capacity.shape[0]
    suffix, used = np.zeros(points + 1), np.zeros(points)
    priced, reduced = np.zeros(cost.shape[0]), np.zeros(cost.shape[0])
    rounded, now, least = choice.copy(), price.copy(), np.inf
    direction, is_active = np.zeros(active.shape[0]), np.zeros(points, np.uint8)
    count = int(state[PRICED])
    for i in range(count):
        is_active[active[i]] = 1
    for _ in range(passes):
        priced_costs(limit, cost, now, suffix, priced)
        bound = trws_pass(graph, priced, msg, rounded, reduced, state[DOWN] == 0.0, True)
        state[DOWN] = 1.0 - state[DOWN]
        free = 0.0
        for i in range(count):
            free += now[active[i]] * capacity[active[i]]
        bound -= free
        value = total_cost(graph, priced, rounded) - free
        if points > 0 or value < least:  # with prices: the newest; without prices: the cheapest
            least = value
            choice[:] = rounded
        if bound > state[BEST]:
            state[BEST] = bound
            price[:] = now
        if adapt_level(state, bound, ceiling):
            now[:] = price  # but keep the messages, which have improved since
            direction[:] = 0.0
        if points == 0:
            continue
        usage_of(limit, slot, rounded, used)
        count = with_worst(used, capacity, active, is_active, count)
        reach = min(state[LEVEL], max(ceiling - state[BEST], 0.1 * state[LEVEL]))
        step_prices(now, used, capacity, active[:count], direction, reach)
    state[PRICED] = float(count)
    return state[BEST]


class Scratch(NamedTuple):
    """Scratch arrays of the forest kernels.

    picked, seen: int64 [n], zeros between calls. queue, nodes, order, up: int64 [n]. table, priced: float64 [slots].
    """

    picked: np.ndarray
    seen: np.ndarray
    queue: np.ndarray
    nodes: np.ndarray
    order: np.ndarray
    up: np.ndarray
    table: np.ndarray
    priced: np.ndarray


@jit()
def make_scratch(n, slots):
    return Scratch(
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(slots),
        np.zeros(slots),
    )


@jit()
def polish(graph, cost, choice, rounds, seed):
    """Forest moves over the whole graph, ``rounds`` times, each with a new random forest. Updates ``choice``."""
    np.random.seed(seed)
    n = choice.shape[0]
    w = make_scratch(n, cost.shape[0])
    root, stamp = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for _ in range(rounds):
        candidates = np.random.permutation(n)
        choose_forest(graph, candidates, w.picked, root, stamp)
        count = 0
        for v in range(n):
            if w.picked[v] > 0:
                w.nodes[count] = v
                count += 1
        forest_move(graph, cost, choice, w.nodes[:count], w.picked, w.order, w.up, w.table)


@jit()
def draw_tree(graph, largest, w):
    """The nodes of a random induced tree of at most ``largest`` nodes. Their w.picked is 1."""
    limit = 1 + int(np.exp(np.random.random() * np.log(largest)))
    noise = np.random.random(16)
    start = np.random.randint(w.picked.shape[0])
    _, touched = grow_tree(graph, start, limit, w.picked, w.seen, w.queue, noise)
    size = 0
    for i in range(touched):
        v = w.queue[i]
        w.seen[v] = 0
        if w.picked[v] > 0:
            w.nodes[size] = v
            size += 1
    return w.nodes[:size]


@jit()
def mark(picked, nodes, value):
    for i in range(nodes.shape[0]):
        picked[nodes[i]] = value


@jit()
def tree_cost(graph, cost, choice, nodes, picked):
    """The cost of the picked nodes and all their edges. An edge between two of them counts once."""
    slot, head, tail, matrix, entries = graph.slot, graph.head, graph.tail, graph.matrix, graph.entries
    ptr, edge = graph.ptr, graph.edge
    total = 0.0
    for i in range(nodes.shape[0]):
        v = nodes[i]
        total += cost[slot[v] + choice[v]]
        for q in range(ptr[v], ptr[v + 1]):
            e = edge[q]
            u = tail[e] if head[e] == v else head[e]
            if picked[u] > 0 and u < v:
                continue
            at = matrix[e] + choice[head[e]] * (slot[tail[e] + 1] - slot[tail[e]]) + choice[tail[e]]
            total += entries[at]
    return total


@jit()
def most_over(used, cap):
    """The point that exceeds its capacity most; -1 if none does."""
    over, worst = 0.0, -1
    for t in range(cap.shape[0]):
        if used[t] - cap[t] > over:
            over, worst = used[t] - cap[t], t
    return worst


@jit()
def price_nodes(graph, limit, cost, nodes, suffix, priced):
    """``priced_costs`` for the configs of some nodes. suffix: sums of the prices from each point on."""
    ptr, point, change = limit.ptr, limit.point, limit.change
    for i in range(nodes.shape[0]):
        v = nodes[i]
        for r in range(graph.slot[v], graph.slot[v + 1]):
            s = cost[r]
            for q in range(ptr[r], ptr[r + 1]):
                s += change[q] * suffix[point[q]]
            priced[r] = s


class Usage(NamedTuple):
    """Bytes in use at each point, before and after the current move: float64 [points].

    delta: float64 [points + 1], the events of the move, zeros between calls.
    """

    used: np.ndarray
    after: np.ndarray
    delta: np.ndarray


@jit()
def add_events(limit, slot, sign, usage, first, last):
    """Add a config's events to usage.delta. Returns the updated range (first, last) of points touched."""
    for q in range(limit.ptr[slot], limit.ptr[slot + 1]):
        t = limit.point[q]
        usage.delta[t] += sign * limit.change[q]
        first, last = min(first, t), max(last, t)
    return first, last


@jit()
def weigh_move(graph, limit, nodes, before, choice, usage):
    """Evaluate the move before -> choice.

    Returns (whether anything moved, the rise of the shortage, the point most over its limit among those that rose,
    first, last). usage.after is set at points first … last - 1, the only ones that change.
    """
    cap, slot = limit.capacity, graph.slot
    points = cap.shape[0]
    first, last, moved = points, 0, False
    for i in range(nodes.shape[0]):
        v = nodes[i]
        if choice[v] == before[i]:
            continue
        moved = True
        first, last = add_events(limit, slot[v] + before[i], -1.0, usage, first, last)
        first, last = add_events(limit, slot[v] + choice[v], 1.0, usage, first, last)
    s, rise, over, worst = 0.0, 0.0, 0.0, -1
    used, after, delta = usage.used, usage.after, usage.delta
    for t in range(first, min(last, points)):
        s += delta[t]
        delta[t] = 0.0
        after[t] = used[t] + s
        excess = after[t] - cap[t]
        rise += max(0.0, excess) - max(0.0, used[t] - cap[t])
        if s > 0.0 and excess > over:
            over, worst = excess, t
    delta[last] = 0.0
    return moved, rise, worst, first, min(last, points)


@jit()
def draw_prices(price, scale, short, usage, cap, extra):
    """Fill ``extra`` with prices for a move, near ``price`` or zero. Returns the step by which they are raised."""
    factor = np.random.random() * 1.5
    if np.random.random() < 0.3:
        factor = 0.0
    for t in range(price.shape[0]):
        extra[t] = factor * price[t]
    push = max(scale, 1e-300) * (0.25 + np.random.random())
    if short > 0.0 and np.random.random() < 0.7:
        # The choice does not fit yet, so raise the price of the point that is most over its limit.
        worst = most_over(usage.used, cap)
        if worst >= 0:
            extra[worst] += push * np.exp(6.0 * np.random.random())
    return push


@jit()
def move_tree(problem, choice, nodes, usage, short, extra, push, w):
    """Set a tree to its best configs at prices ``extra``, which are raised until the configs fit.

    A move is taken if it does not increase the shortage, and is cheaper or reduces it.
    Returns (whether the move was taken, the rise in cost, the rise in shortage). nodes: a tree, with w.picked 1.
    Updates choice and usage.used if the move is taken.
    """
    graph, limit, cost = problem.graph, problem.limit, problem.cost
    suffix = np.empty(extra.shape[0] + 1)
    before = choice[nodes]
    old = tree_cost(graph, cost, choice, nodes, w.picked)
    for _ in range(7):
        sum_from(extra, suffix)
        price_nodes(graph, limit, cost, nodes, suffix, w.priced)
        mark(w.picked, nodes, 1)
        forest_move(graph, w.priced, choice, nodes, w.picked, w.order, w.up, w.table)
        moved, rise, worst, first, last = weigh_move(graph, limit, nodes, before, choice, usage)
        if not moved:
            break
        if rise <= 0.0:
            mark(w.picked, nodes, 1)
            climb = tree_cost(graph, cost, choice, nodes, w.picked) - old
            mark(w.picked, nodes, 0)
            if climb <= 0.0 or (short > 0.0 and rise < 0.0):
                usage.used[first:last] = usage.after[first:last]
                return True, climb, rise
        choice[nodes] = before
        if rise <= 0.0 or worst < 0:
            break
        extra[worst] += push
        push *= 2.0
    mark(w.picked, nodes, 0)
    return False, 0.0, 0.0


@jit()
def price_scale(price, cost, capacity, nodes):
    """The highest price; if all are zero, a typical cost per typical byte."""
    scale = 0.0
    for t in range(price.shape[0]):
        scale = max(scale, price[t])
    if scale <= 0.0 and price.shape[0] > 0:
        scale = abs(cost) / max(1.0, capacity.max()) / nodes
    return scale


@jit()
def lns(problem, price, choice, best_choice, steps, largest, seed):
    """Neighbourhood search under the limit: exact moves on random induced trees, priced until they fit.

    price: float64 [points], prices near the dual's best. choice: int64 [n], updated. best_choice: set to the cheapest
    choice that fits. largest: the most nodes in a tree. Returns the cost of ``best_choice``; inf if none fits.
    """
    np.random.seed(seed)
    graph, limit, cost = problem.graph, problem.limit, problem.cost
    n, cap = choice.shape[0], limit.capacity
    points = cap.shape[0]
    w = make_scratch(n, cost.shape[0])
    extra = price.copy()
    usage = Usage(np.zeros(points), np.zeros(points), np.zeros(points + 1))
    usage_of(limit, graph.slot, choice, usage.used)
    now = total_cost(graph, cost, choice)
    short = 0.0
    for t in range(points):
        short += max(0.0, usage.used[t] - cap[t])
    scale = price_scale(price, now, cap, n)
    best = np.inf
    if short <= 0.0:
        best = now
        best_choice[:] = choice
    for _ in range(steps):
        nodes = draw_tree(graph, largest, w)
        push = draw_prices(price, scale, short, usage, cap, extra)
        taken, climb, rise = move_tree(problem, choice, nodes, usage, short, extra, push, w)
        if not taken:
            continue
        now += climb
        short = 0.0 if short + rise < 1e-9 else short + rise
        if short <= 0.0 and now < best:
            best = now
            best_choice[:] = choice
    return best
