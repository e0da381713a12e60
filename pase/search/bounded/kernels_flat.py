"""Compiled kernels of the bounded search, over the arrays of ``Flat``.

``trws_pass`` is one sweep of sequential tree-reweighted message passing (Kolmogorov, PAMI 2006). It gives a lower bound
and a rounded choice. ``forest_move`` finds the best choice on an induced forest, with all other nodes held.
Infinite entries are allowed if every config keeps a finite partner along every edge.
"""

from __future__ import annotations

import numpy as np

from pase.compiled import jit

__all__ = ["forest_move", "grow_tree", "node_costs_given", "trws_pass"]


@jit()
def pick_config(graph, cost, msg, choice, v, forward):
    """v's best config, given the choices of the nodes visited before it and the messages of those after it."""
    slot, head, tail, matrix, entries = graph.slot, graph.head, graph.tail, graph.matrix, graph.entries
    to_tail, to_head, ptr, edge = graph.to_tail, graph.to_head, graph.ptr, graph.edge
    s0, k = slot[v], slot[v + 1] - slot[v]
    best, pick = np.inf, 0
    for i in range(k):
        t = cost[s0 + i]
        for q in range(ptr[v], ptr[v + 1]):
            e = edge[q]
            if head[e] == v:
                u = tail[e]
                if forward:
                    t += msg[to_head[e] + i]
                else:
                    t += entries[matrix[e] + i * (slot[u + 1] - slot[u]) + choice[u]]
            elif forward:
                t += entries[matrix[e] + choice[head[e]] * k + i]
            else:
                t += msg[to_tail[e] + i]
        if t < best:
            best, pick = t, i
    return pick


@jit()
def send_to_tail(table, excess, share, back, out):
    """out[j] = min_i share * excess[i] - back[i] + table[i, j]. The table is row-major and flat."""
    ku = out.shape[0]
    out[:] = np.inf
    for i in range(excess.shape[0]):
        h = share * excess[i] - back[i]
        row = table[i * ku : (i + 1) * ku]
        for j in range(ku):
            t = h + row[j]
            out[j] = t if t < out[j] else out[j]


@jit()
def send_to_head(table, excess, share, back, out):
    """out[j] = min_i share * excess[i] - back[i] + table[j, i]. The table is row-major and flat."""
    k = excess.shape[0]
    for j in range(out.shape[0]):
        best = np.inf
        row = table[j * k : (j + 1) * k]
        for i in range(k):
            t = share * excess[i] - back[i] + row[i]
            best = t if t < best else best
        out[j] = best


@jit()
def subtract_least(values):
    """Subtract the minimum from the values and return it."""
    least = np.inf
    for i in range(values.shape[0]):
        least = values[i] if values[i] < least else least
    for i in range(values.shape[0]):
        values[i] -= least
    return least


@jit()
def trws_pass(graph, cost, msg, choice, reduced, forward, decode):
    """Sweep the nodes up (forward) or down. Returns the lower bound that the sweep proves.

    msg: float64 messages, updated. reduced: float64 [slots], set to each config's excess over the best config of
    its node when the node is visited. The bound grows by at least that much if the config is forced.
    choice: int64 [n], set if ``decode``: each node's best config given the nodes visited before it.
    """
    slot, head, tail, matrix, entries = graph.slot, graph.head, graph.tail, graph.matrix, graph.entries
    to_tail, to_head, ptr, edge = graph.to_tail, graph.to_head, graph.ptr, graph.edge
    n = slot.shape[0] - 1
    bound = 0.0
    for step in range(n):
        v = step if forward else n - 1 - step
        s0 = slot[v]
        k = slot[v + 1] - s0
        ahead = 0
        excess = reduced[s0 : s0 + k]
        excess[:] = cost[s0 : s0 + k]
        for q in range(ptr[v], ptr[v + 1]):
            e = edge[q]
            if (head[e] == v) == forward:
                ahead += 1
            at = to_head[e] if head[e] == v else to_tail[e]
            for i in range(k):
                excess[i] += msg[at + i]
        if decode:
            choice[v] = pick_config(graph, cost, msg, choice, v, forward)
        bound += subtract_least(excess)
        share = 1.0 / max(ahead, ptr[v + 1] - ptr[v] - ahead, 1)
        for q in range(ptr[v], ptr[v + 1]):
            e = edge[q]
            if (head[e] == v) != forward:
                continue
            u = tail[e] if head[e] == v else head[e]
            ku = slot[u + 1] - slot[u]
            table = entries[matrix[e] : matrix[e] + k * ku]
            if head[e] == v:
                out = msg[to_tail[e] : to_tail[e] + ku]
                send_to_tail(table, excess, share, msg[to_head[e] : to_head[e] + k], out)
            else:
                out = msg[to_head[e] : to_head[e] + ku]
                send_to_head(table, excess, share, msg[to_tail[e] : to_tail[e] + k], out)
            bound += subtract_least(out)
    return bound


@jit()
def node_costs_given(graph, cost, choice, v, skip, out):
    """out[i] = the cost of v's config i with its neighbours at ``choice``. Neighbours with skip[u] > 0 are left out."""
    slot, head, tail, matrix, entries = graph.slot, graph.head, graph.tail, graph.matrix, graph.entries
    ptr, edge = graph.ptr, graph.edge
    s0 = slot[v]
    k = slot[v + 1] - s0
    for i in range(k):
        out[s0 + i] = cost[s0 + i]
    for q in range(ptr[v], ptr[v + 1]):
        e = edge[q]
        if head[e] == v:
            u = tail[e]
            if skip[u] > 0:
                continue
            ku = slot[u + 1] - slot[u]
            at = matrix[e] + choice[u]
            for i in range(k):
                out[s0 + i] += entries[at + i * ku]
        else:
            u = head[e]
            if skip[u] > 0:
                continue
            at = matrix[e] + choice[u] * k
            for i in range(k):
                out[s0 + i] += entries[at + i]


@jit()
def _find(root, v):
    """The root of v's set (union-find with path halving)."""
    while root[v] != v:
        root[v] = root[root[v]]
        v = root[v]
    return v


@jit()
def choose_forest(graph, candidates, picked, root, stamp):
    """Greedily take candidates (in order) that keep the taken nodes a forest. Sets picked[v] = 1 for taken nodes.

    picked: int64 [n], zeros on entry. root, stamp: int64 [n] scratch. Returns the number of taken nodes.
    """
    head, tail, ptr, edge = graph.head, graph.tail, graph.ptr, graph.edge
    for i in range(candidates.shape[0]):
        root[candidates[i]] = candidates[i]
        stamp[candidates[i]] = -1
    count = 0
    for i in range(candidates.shape[0]):
        v = candidates[i]
        ok = True
        for q in range(ptr[v], ptr[v + 1]):
            e = edge[q]
            u = tail[e] if head[e] == v else head[e]
            if picked[u] > 0:
                r = _find(root, u)
                if stamp[r] == v:
                    ok = False
                    break
                stamp[r] = v
        if not ok:
            continue
        picked[v] = 1
        count += 1
        for q in range(ptr[v], ptr[v + 1]):
            e = edge[q]
            u = tail[e] if head[e] == v else head[e]
            if picked[u] > 0 and u != v:
                root[_find(root, u)] = v
    return count


@jit()
def grow_tree(graph, start, limit, picked, seen, queue, noise):
    """Grow an induced tree from ``start``: up to ``limit`` nodes, each adjacent to exactly one that was taken before.

    picked, seen: int64 [n], zeros on entry. queue: int64 [n] scratch. noise: floats in [0, 1) that steer the
    growth. Returns (taken, touched). queue[:touched] lists the nodes whose ``seen`` is set; taken nodes have picked 1.
    """
    head, tail, ptr, edge = graph.head, graph.tail, graph.ptr, graph.edge
    queue[0] = start
    seen[start] = 1
    touched = 1
    at = 0
    count = 0
    draws = 0
    while at < touched and count < limit:
        # Pick a random one of the waiting nodes, so that neighbourhoods differ from call to call.
        swap = at + int(noise[draws % noise.shape[0]] * (touched - at))
        draws += 1
        v = queue[swap]
        queue[swap] = queue[at]
        queue[at] = v
        at += 1
        near = 0
        for q in range(ptr[v], ptr[v + 1]):
            e = edge[q]
            u = tail[e] if head[e] == v else head[e]
            if picked[u] > 0:
                near += 1
        if near > 1 or (near == 0 and count > 0):
            continue
        picked[v] = 1
        count += 1
        for q in range(ptr[v], ptr[v + 1]):
            e = edge[q]
            u = tail[e] if head[e] == v else head[e]
            if seen[u] == 0:
                seen[u] = 1
                queue[touched] = u
                touched += 1
    return count, touched


@jit()
def order_forest(graph, nodes, picked, order, up):
    """Order the picked nodes, parents first, in order[:count]. up[v]: the edge to v's parent, -1 at a root. Sets picked
    from 1 to 2. Returns count."""
    head, tail, ptr, edge = graph.head, graph.tail, graph.ptr, graph.edge
    count = 0
    for i in range(nodes.shape[0]):
        if picked[nodes[i]] != 1:
            continue
        picked[nodes[i]] = 2
        up[nodes[i]] = -1
        order[count] = nodes[i]
        at = count
        count += 1
        while at < count:
            v = order[at]
            at += 1
            for q in range(ptr[v], ptr[v + 1]):
                e = edge[q]
                u = tail[e] if head[e] == v else head[e]
                if picked[u] == 1:
                    picked[u] = 2
                    up[u] = e
                    order[count] = u
                    count += 1
    return count


@jit()
def add_to_parent(graph, e, v, table):
    """Add to each config of v's parent along edge e the minimum cost of v's tree given that config."""
    slot, head, tail, matrix, entries = graph.slot, graph.head, graph.tail, graph.matrix, graph.entries
    p = tail[e] if head[e] == v else head[e]
    kv, kp = slot[v + 1] - slot[v], slot[p + 1] - slot[p]
    down, across = (kp, 1) if head[e] == v else (1, kv)  # strides of v's and of p's configs
    for j in range(kp):
        best = np.inf
        at = matrix[e] + j * across
        for k in range(kv):
            t = table[slot[v] + k] + entries[at + k * down]
            best = t if t < best else best
        table[slot[p] + j] += best


@jit()
def forest_move(graph, cost, choice, nodes, picked, order, up, table):
    """Set ``choice`` to the best configs of the picked nodes (an induced forest), with all other nodes held.

    nodes: the picked nodes, int64. picked: int64 [n], 1 for picked nodes and 0 for others; reset to 0 on exit.
    order, up: int64 [n] scratch. table: float64 [slots] scratch. (The pass down recomputes its argmins.)
    """
    slot, head, tail, matrix, entries = graph.slot, graph.head, graph.tail, graph.matrix, graph.entries
    for i in range(nodes.shape[0]):
        node_costs_given(graph, cost, choice, nodes[i], picked, table)
    count = order_forest(graph, nodes, picked, order, up)
    for i in range(count - 1, -1, -1):
        if up[order[i]] >= 0:
            add_to_parent(graph, up[order[i]], order[i], table)
    for i in range(count):
        v = order[i]
        e = up[v]
        at, step = 0, 0
        if e >= 0 and head[e] == v:
            p = tail[e]
            step = slot[p + 1] - slot[p]
            at = matrix[e] + choice[p]
        elif e >= 0:
            step = 1
            at = matrix[e] + choice[head[e]] * (slot[v + 1] - slot[v])
        best, pick = np.inf, choice[v]
        for k in range(slot[v + 1] - slot[v]):
            t = table[slot[v] + k]
            if e >= 0:
                t += entries[at + k * step]
            if t < best:
                best, pick = t, k
        choice[v] = pick
        picked[v] = 0
