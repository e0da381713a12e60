"""Compiled kernels for a memory limit: prices on bytes, the Lagrangian dual, neighbourhood search.

The limit is ``Rows``: bytes in use at point t are the cumulative sum of the chosen configs' events.
A price per byte at each point turns bytes into node costs, so that everything that solves the unlimited
problem solves the priced one. Only points that were once the worst get a price: few of them ever bind.
"""

# ruff: noqa: RUF059  (every kernel unpacks the same tuple of arrays)

from __future__ import annotations

import numpy as np

from pase.search.kernels_flat import choose_forest, forest_move, grow_tree, jit, trws_pass

__all__ = ["dual_ascent", "lns", "polish", "priced_costs", "usage_of"]


@jit
def priced_costs(rows, cost, price, suffix, out):  # type: ignore[no-untyped-def]
    """out[slot] = cost + price of the config's bytes. suffix: float64 [points + 1] scratch."""
    ptr, point, change, cap = rows
    points = price.shape[0]
    suffix[points] = 0.0
    for t in range(points - 1, -1, -1):
        suffix[t] = suffix[t + 1] + price[t]
    for r in range(ptr.shape[0] - 1):
        s = cost[r]
        for q in range(ptr[r], ptr[r + 1]):
            s += change[q] * suffix[point[q]]
        out[r] = s


@jit
def usage_of(rows, slot, choice, out):  # type: ignore[no-untyped-def]
    """out[t] = bytes in use at point t; float64 [points]."""
    ptr, point, change, cap = rows
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


@jit
def total_cost(graph, cost, choice):  # type: ignore[no-untyped-def]
    """Node costs + edge costs of ``choice``."""
    slot, head, tail, matrix, entries, to_tail, to_head, ptr, edge = graph
    s = 0.0
    for v in range(choice.shape[0]):
        s += cost[slot[v] + choice[v]]
    for e in range(head.shape[0]):
        u = tail[e]
        s += entries[matrix[e] + choice[head[e]] * (slot[u + 1] - slot[u]) + choice[u]]
    return s


@jit
def dual_ascent(graph, rows, cost, price, msg, choice, active, state, ceiling, passes):  # type: ignore[no-untyped-def]
    """Raise the bound by ``passes`` sweeps, each followed by a deflected subgradient step on the prices.

    price: float64 [points], the best prices on entry and exit. active: int64, points that have a price.
    state: float64 [6] = (best bound, level: the rise aimed at, points active, sweeps in this window,
    parity, bound at the window's start), kept between calls; the level adapts to the rises that happen.
    ceiling: a known cost, or inf. choice: set to the rounded choice of least priced cost.
    Returns the best bound.
    """
    slot = graph[0]
    cap = rows[3]
    points = cap.shape[0]
    suffix = np.zeros(points + 1)
    priced = np.zeros(cost.shape[0])
    reduced = np.zeros(cost.shape[0])
    used = np.zeros(points)
    rounded = choice.copy()
    least = np.inf
    now = price.copy()
    count = int(state[2])
    direction = np.zeros(active.shape[0])
    is_active = np.zeros(points, np.uint8)
    for i in range(count):
        is_active[active[i]] = 1
    for _ in range(passes):
        priced_costs(rows, cost, now, suffix, priced)
        bound = trws_pass(graph, priced, msg, rounded, reduced, state[4] == 0.0, True)
        state[4] = 1.0 - state[4]
        free = 0.0
        for i in range(count):
            free += now[active[i]] * cap[active[i]]
        bound -= free
        value = total_cost(graph, priced, rounded) - free
        if points > 0 or value < least:  # prices move on: the newest; without prices: the cheapest
            least = value
            choice[:] = rounded
        if bound > state[0]:
            state[0] = bound
            price[:] = now
        if state[1] <= 0.0:
            state[1] = 0.05 * abs(bound) + 1e-9
            state[5] = state[0]
        state[3] += 1.0
        if state[3] >= 30.0:
            state[3] = 0.0
            if state[0] - state[5] >= 0.5 * state[1]:
                state[1] *= 1.5
            else:
                state[1] *= 0.6
                now[:] = price  # but not to its messages: those since are the better for having moved
                direction[:] = 0.0
                # Stuck with steps too small to matter: aim at a good part of the gap again.
                if ceiling < np.inf and state[1] < 0.03 * (ceiling - state[0]):
                    state[1] = 0.3 * (ceiling - state[0])
            state[5] = state[0]
        if points == 0:
            continue
        usage_of(rows, slot, rounded, used)
        worst = -1
        over = 0.0
        for t in range(points):
            if used[t] - cap[t] > over:
                over = used[t] - cap[t]
                worst = t
        if worst >= 0 and is_active[worst] == 0 and count < active.shape[0]:
            is_active[worst] = 1
            active[count] = worst
            count += 1
        norm = 0.0
        for i in range(count):
            t = active[i]
            g = used[t] - cap[t]
            if now[t] <= 0.0 and g < 0.0:
                g = 0.0
            direction[i] = 0.8 * direction[i] + 0.2 * g
            norm += direction[i] * direction[i]
        if norm > 0.0:
            step = min(state[1], max(ceiling - state[0], 0.1 * state[1])) / norm
            for i in range(count):
                t = active[i]
                now[t] = max(0.0, now[t] + step * direction[i])
    state[2] = float(count)
    return state[0]


@jit
def polish(graph, cost, choice, rounds, seed):  # type: ignore[no-untyped-def]
    """Forest moves over the whole graph, ``rounds`` times, each with a new random forest; writes choice."""
    np.random.seed(seed)
    n = choice.shape[0]
    picked = np.zeros(n, np.int64)
    root = np.zeros(n, np.int64)
    stamp = np.zeros(n, np.int64)
    order = np.zeros(n, np.int64)
    up = np.zeros(n, np.int64)
    table = np.zeros(cost.shape[0])
    nodes = np.zeros(n, np.int64)
    for _ in range(rounds):
        candidates = np.random.permutation(n)
        choose_forest(graph, candidates, picked, root, stamp)
        count = 0
        for v in range(n):
            if picked[v] > 0:
                nodes[count] = v
                count += 1
        forest_move(graph, cost, choice, nodes[:count], picked, order, up, table)


@jit
def lns(graph, rows, cost, price, choice, best_choice, stats, steps, largest, heat, seed):  # type: ignore[no-untyped-def]
    """Neighbourhood search under the limit: exact moves on random induced trees, priced until they fit.

    price: float64 [points], prices near the dual's best. choice: int64 [n], updated; best_choice: the best
    feasible one, updated. stats: float64 [2] = (cost of best_choice or inf, shortage of ``choice`` in bytes).
    largest: nodes in a tree at most. heat: a dearer choice is taken with probability exp(-rise / heat).
    """
    np.random.seed(seed)
    slot, head, tail, matrix, entries, to_tail, to_head, ptr, edge = graph
    rptr, rpoint, rchange, cap = rows
    n = choice.shape[0]
    points = cap.shape[0]
    picked = np.zeros(n, np.int64)
    seen = np.zeros(n, np.int64)
    queue = np.zeros(n, np.int64)
    order = np.zeros(n, np.int64)
    up = np.zeros(n, np.int64)
    none = np.zeros(n, np.int64)
    table = np.zeros(cost.shape[0])
    priced = cost.copy()
    suffix = np.zeros(points + 1)
    extra = price.copy()
    used = np.zeros(points)
    after = np.zeros(points)
    delta = np.zeros(points + 1)
    before = np.zeros(n, np.int64)
    usage_of(rows, slot, choice, used)
    now = total_cost(graph, cost, choice)
    short = 0.0
    for t in range(points):
        short += max(0.0, used[t] - cap[t])
    scale = 0.0
    for t in range(points):
        scale = max(scale, price[t])
    if scale <= 0.0 and points > 0:  # no price yet: a typical cost per typical byte
        scale = abs(now) / max(1.0, cap.max()) / n
    if short <= 0.0 and now < stats[0]:
        stats[0] = now
        best_choice[:] = choice
    for _ in range(steps):
        limit = 1 + int(np.exp(np.random.random() * np.log(largest)))
        noise = np.random.random(16)
        start = np.random.randint(n)
        count, touched = grow_tree(graph, start, limit, picked, seen, queue, noise)
        size = 0
        for i in range(touched):
            v = queue[i]
            seen[v] = 0
            if picked[v] > 0:
                none[size] = v
                size += 1
        nodes = none[:size]
        for i in range(size):
            before[i] = choice[nodes[i]]
        # What the tree's nodes pay now, their inner edges once.
        old = 0.0
        for i in range(size):
            v = nodes[i]
            old += cost[slot[v] + choice[v]]
            for q in range(ptr[v], ptr[v + 1]):
                e = edge[q]
                u = tail[e] if head[e] == v else head[e]
                if picked[u] > 0 and u < v:
                    continue
                at = matrix[e] + choice[head[e]] * (slot[tail[e] + 1] - slot[tail[e]]) + choice[tail[e]]
                old += entries[at]
        factor = np.random.random() * 1.5
        if np.random.random() < 0.3:
            factor = 0.0
        for t in range(points):
            extra[t] = factor * price[t]
        push = max(scale, 1e-300) * (0.25 + np.random.random())
        if short > 0.0 and np.random.random() < 0.7:
            # Not yet allowed: press on the point that is most over.
            over = 0.0
            worst = -1
            for t in range(points):
                if used[t] - cap[t] > over:
                    over = used[t] - cap[t]
                    worst = t
            if worst >= 0:
                extra[worst] += push * np.exp(6.0 * np.random.random())
        taken = False
        for _trial in range(7):
            suffix[points] = 0.0
            for t in range(points - 1, -1, -1):
                suffix[t] = suffix[t + 1] + extra[t]
            for i in range(size):
                v = nodes[i]
                picked[v] = 1
                for r in range(slot[v], slot[v + 1]):
                    s = cost[r]
                    for q in range(rptr[r], rptr[r + 1]):
                        s += rchange[q] * suffix[rpoint[q]]
                    priced[r] = s
            forest_move(graph, priced, choice, nodes, picked, order, up, table)
            first = points
            last = 0
            moved = False
            for i in range(size):
                v = nodes[i]
                if choice[v] == before[i]:
                    continue
                moved = True
                r = slot[v] + before[i]
                for q in range(rptr[r], rptr[r + 1]):
                    delta[rpoint[q]] -= rchange[q]
                    first = min(first, rpoint[q])
                    last = max(last, rpoint[q])
                r = slot[v] + choice[v]
                for q in range(rptr[r], rptr[r + 1]):
                    delta[rpoint[q]] += rchange[q]
                    first = min(first, rpoint[q])
                    last = max(last, rpoint[q])
            if not moved:
                break
            s = 0.0
            rise = 0.0
            worst = -1
            over = 0.0
            for t in range(first, min(last, points)):
                s += delta[t]
                delta[t] = 0.0
                after[t] = used[t] + s
                excess = after[t] - cap[t]
                rise += max(0.0, excess) - max(0.0, used[t] - cap[t])
                if s > 0.0 and excess > over:
                    over = excess
                    worst = t
            delta[min(last, points)] = 0.0
            delta[last] = 0.0
            new = 0.0
            for i in range(size):
                picked[nodes[i]] = 1
            for i in range(size):
                v = nodes[i]
                new += cost[slot[v] + choice[v]]
                for q in range(ptr[v], ptr[v + 1]):
                    e = edge[q]
                    u = tail[e] if head[e] == v else head[e]
                    if picked[u] > 0 and u < v:
                        continue
                    at = matrix[e] + choice[head[e]] * (slot[tail[e] + 1] - slot[tail[e]]) + choice[tail[e]]
                    new += entries[at]
            for i in range(size):
                picked[nodes[i]] = 0
            if rise <= 0.0:
                climb = new - old
                good = climb <= 0.0 or (heat > 0.0 and np.random.random() < np.exp(-climb / heat))
                if short > 0.0 and rise < 0.0:
                    good = True
                if good:
                    now += climb
                    short += rise
                    for t in range(first, min(last, points)):
                        used[t] = after[t]
                    taken = True
                    break
            for i in range(size):
                choice[nodes[i]] = before[i]
            if rise <= 0.0 or worst < 0:
                break
            extra[worst] += push
            push *= 2.0
        for i in range(size):
            picked[nodes[i]] = 0
        if taken:
            if short < 1e-9:
                short = 0.0
            if short <= 0.0 and now < stats[0]:
                stats[0] = now
                best_choice[:] = choice
    stats[1] = short
