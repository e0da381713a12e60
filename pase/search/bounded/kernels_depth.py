"""Compiled kernels of the depth-first search: message passing over the remaining configs, and a tree of decisions.

``sweep`` is ``trws_pass`` over the live configs, and also drops those that no choice below a ceiling uses. ``descend``
decides or excludes configs of nodes. The messages of an earlier state are valid in every later state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase.compiled import jit

__all__ = ["BOUND", "DEPTH", "DONE", "TOP", "WORK", "SearchTree", "descend", "new_tree"]

TOP, CEILING, BOUND, BEFORE, DEPTH, WORK, DONE, LAST = range(8)
_PAIRS = 20  # the most pairs of up and down sweeps at one state
_WORTH = 0.1  # sweeps go on while a pair of them gains this fraction of the gap to the ceiling


class SearchTree(NamedTuple):
    """The state of a search, which may be stopped and resumed.

    live: int64 [slots], per node its configs: first the left[v] live ones, then the others. message: float64, as in
    ``Flat``. excess: float64 [slots], of the last sweep. weight: float64 [n], the failures at each node.
    counts [n + 1, n], messages [n + 1, …], before [n + 1]: the state at each decision. node, config: int64 [n + 1],
    what each decision decided. best: int64 [n]. now: float64 [8]: the cost of the best choice; the ceiling, above which
    no choice is searched; the bound of the root; the bound of the last sweep; the depth; the pairs of configs read so
    far; 1 once nothing is left; the node of the last failed decision, or -1.
    """

    live: np.ndarray
    left: np.ndarray
    message: np.ndarray
    excess: np.ndarray
    weight: np.ndarray
    counts: np.ndarray
    messages: np.ndarray
    before: np.ndarray
    node: np.ndarray
    config: np.ndarray
    best: np.ndarray
    now: np.ndarray


def new_tree(slot: np.ndarray, message: np.ndarray) -> SearchTree:
    """The state at the start. slot: int64 [n + 1]. message: the dual's messages, which are copied."""
    sizes = np.diff(slot)
    n, slots = sizes.size, int(slot[-1])
    now = np.array([np.inf, np.inf, -np.inf, -np.inf, 0.0, 0.0, 0.0, -1.0])
    return SearchTree(
        live=np.arange(slots) - np.repeat(slot[:-1], sizes),
        left=sizes.astype(np.int64),
        message=message.copy(),
        excess=np.zeros(slots),
        weight=np.ones(n),
        counts=np.zeros((n + 1, n), np.int64),
        messages=np.zeros((n + 1, message.size)),
        before=np.zeros(n + 1),
        node=np.zeros(n + 1, np.int64),
        config=np.zeros(n + 1, np.int64),
        best=np.zeros(n, np.int64),
        now=now,
    )


@jit()
def drop(live, count, s0, v, at):
    """Move the live config at this position behind the live ones."""
    count[v] -= 1
    last = s0 + count[v]
    k = live[s0 + at]
    live[s0 + at] = live[last]
    live[last] = k


@jit()
def visit(graph, cost, tree, v):
    """Compute v's excess over its best live config, and drop configs above the ceiling. Returns the minimum, or inf if
    no config is left."""
    slot, head, ptr, edge = graph.slot, graph.head, graph.ptr, graph.edge
    live, count, message, excess, now = tree.live, tree.left, tree.message, tree.excess, tree.now
    s0 = slot[v]
    for x in range(count[v]):
        i = live[s0 + x]
        excess[s0 + i] = cost[s0 + i]
    for q in range(ptr[v], ptr[v + 1]):
        e = edge[q]
        at = graph.to_head[e] if head[e] == v else graph.to_tail[e]
        for x in range(count[v]):
            i = live[s0 + x]
            excess[s0 + i] += message[at + i]
    least = np.inf
    for x in range(count[v]):
        t = excess[s0 + live[s0 + x]]
        least = t if t < least else least
    if least == np.inf:
        return least
    for x in range(count[v] - 1, -1, -1):
        i = live[s0 + x]
        excess[s0 + i] -= least
        if excess[s0 + i] == np.inf or now[BEFORE] + excess[s0 + i] > now[CEILING]:
            drop(live, count, s0, v, x)
    return least if count[v] > 0 else np.inf


@jit()
def send(graph, tree, e, v, share):
    """Send v's message along edge e, and drop configs without a partner. Returns the minimum, or inf if no config is
    left at the other end."""
    slot, head, tail, entries = graph.slot, graph.head, graph.tail, graph.entries
    live, count, message, excess = tree.live, tree.left, tree.message, tree.excess
    if head[e] == v:
        u, out, back = tail[e], graph.to_tail[e], graph.to_head[e]
        step_v, step_u = slot[u + 1] - slot[u], 1
    else:
        u, out, back = head[e], graph.to_head[e], graph.to_tail[e]
        step_v, step_u = 1, slot[v + 1] - slot[v]
    s0, t0 = slot[v], slot[u]
    least = np.inf
    for y in range(count[u]):
        j = live[t0 + y]
        at = graph.matrix[e] + j * step_u
        best = np.inf
        for x in range(count[v]):
            i = live[s0 + x]
            t = share * excess[s0 + i] - message[back + i] + entries[at + i * step_v]
            best = t if t < best else best
        message[out + j] = best
        least = best if best < least else least
    tree.now[WORK] += count[u] * count[v]
    if least == np.inf:
        return least
    for y in range(count[u] - 1, -1, -1):
        j = live[t0 + y]
        if message[out + j] == np.inf:
            drop(live, count, t0, u, y)
        else:
            message[out + j] -= least
    return least


@jit()
def sweep(graph, cost, tree, forward):
    """The bound of one sweep over the live configs; inf if there is no choice below the ceiling."""
    head, ptr, edge = graph.head, graph.ptr, graph.edge
    n = graph.slot.shape[0] - 1
    bound = 0.0
    for step in range(n):
        v = step if forward else n - 1 - step
        least = visit(graph, cost, tree, v)
        if least == np.inf:
            tree.weight[v] += 1.0
            return np.inf
        bound += least
        ahead = 0
        for q in range(ptr[v], ptr[v + 1]):
            if (head[edge[q]] == v) == forward:
                ahead += 1
        share = 1.0 / max(ahead, ptr[v + 1] - ptr[v] - ahead, 1)
        for q in range(ptr[v], ptr[v + 1]):
            if (head[edge[q]] == v) != forward:
                continue
            least = send(graph, tree, edge[q], v, share)
            if least == np.inf:
                tree.weight[v] += 1.0
                return np.inf
            bound += least
    tree.now[BEFORE] = bound
    return bound if bound <= tree.now[CEILING] else np.inf


@jit()
def propagate(graph, cost, tree):
    """Sweep up and down while this gains enough. Returns the bound; inf if no choice below the ceiling is left."""
    bound = tree.now[BEFORE]
    for _ in range(_PAIRS):
        if sweep(graph, cost, tree, True) == np.inf:
            return np.inf
        raised = sweep(graph, cost, tree, False)
        if raised == np.inf:
            return np.inf
        enough = _WORTH * (tree.now[CEILING] - raised)
        if not raised - bound > enough:
            return raised
        bound = raised
    return bound


@jit()
def next_node(tree):
    """The next node to decide: that of the last failure, otherwise one with few configs and many failures; -1 if all
    are decided."""
    last = int(tree.now[LAST])
    if last >= 0 and tree.left[last] > 1:
        return last
    picked, least = -1, np.inf
    for v in range(tree.left.shape[0]):
        if tree.left[v] > 1 and tree.left[v] / tree.weight[v] < least:
            picked, least = v, tree.left[v] / tree.weight[v]
    return picked


@jit()
def decide(graph, tree, v):
    """Save the state, and leave v only its config of least excess."""
    slot, live = graph.slot, tree.live
    s0, depth = slot[v], int(tree.now[DEPTH])
    at = 0
    for x in range(1, tree.left[v]):
        if tree.excess[s0 + live[s0 + x]] < tree.excess[s0 + live[s0 + at]]:
            at = x
    k = live[s0 + at]
    live[s0 + at] = live[s0]
    live[s0] = k
    tree.counts[depth, :] = tree.left
    tree.messages[depth, :] = tree.message
    tree.before[depth] = tree.now[BEFORE]
    tree.node[depth] = v
    tree.config[depth] = k
    tree.left[v] = 1
    tree.now[DEPTH] = depth + 1


@jit()
def back(graph, tree):
    """Return to the last decision and exclude its config. False if there is none."""
    depth = int(tree.now[DEPTH]) - 1
    if depth < 0:
        return False
    tree.now[DEPTH] = depth
    tree.left[:] = tree.counts[depth]
    tree.message[:] = tree.messages[depth]
    tree.now[BEFORE] = tree.before[depth]
    v = tree.node[depth]
    tree.now[LAST] = v
    for x in range(tree.left[v]):
        if tree.live[graph.slot[v] + x] == tree.config[depth]:
            drop(tree.live, tree.left, graph.slot[v], v, x)
            break
    return True


@jit()
def take_best(graph, cost, tree, whole):
    """All nodes are decided: if their choice is cheaper, make it the best and lower the ceiling."""
    slot, head, tail, now = graph.slot, graph.head, graph.tail, tree.now
    total = 0.0
    for v in range(tree.left.shape[0]):
        total += cost[slot[v] + tree.live[slot[v]]]
    for e in range(head.shape[0]):
        h, t = head[e], tail[e]
        at = graph.matrix[e] + tree.live[slot[h]] * (slot[t + 1] - slot[t])
        total += graph.entries[at + tree.live[slot[t]]]
    if total < now[TOP]:
        now[TOP] = total
        for v in range(tree.left.shape[0]):
            tree.best[v] = tree.live[slot[v]]
        lower(now, whole)


@jit()
def lower(now, whole):
    """Lower the ceiling to ``whole`` below the cost of the best choice."""
    if now[TOP] < np.inf:
        now[CEILING] = min(now[CEILING], now[TOP] - max(whole, 1e-9 * abs(now[TOP])))


@jit()
def descend(graph, cost, tree, top, whole, work):
    """Search until about ``work`` more is done or nothing is left. Returns whether nothing is left.

    top: the cost of a known choice, or inf. whole: a choice must be cheaper by at least this much.
    """
    now = tree.now
    now[TOP] = min(now[TOP], top)
    lower(now, whole)
    until = now[WORK] + work
    while now[DONE] == 0.0 and now[WORK] < until:
        # Count the work of a state as well, even if it reads no pairs.
        now[WORK] += tree.message.shape[0]
        bound = propagate(graph, cost, tree)
        if bound < np.inf:
            if now[DEPTH] == 0.0:
                now[BOUND] = max(now[BOUND], bound)
            v = next_node(tree)
            if v >= 0:
                decide(graph, tree, v)
                continue
            take_best(graph, cost, tree, whole)
        if not back(graph, tree):
            now[DONE] = 1.0
    return now[DONE] > 0.0
