"""Compiled: the local search described in `improve`.

This file imports numba when it is imported: import it inside functions only. Kernels stand at module level, because
numba's cache does not find a function that closes over another one again.
"""

from __future__ import annotations

import numba
import numpy as np

from pase.schedule.kernels_chain import seconds_of

__all__ = ["search"]


@numba.njit(cache=True)
def cost_of(net, atoms, msg, at, nbytes, seq, count, link, scratch):  # type: ignore[no-untyped-def]
    """(makespan, busy time, place of the critical message) of the state."""
    ready, tail, axes, links, ptr, xs, ys, slope, compute = net
    r, q, s, ax, free = scratch
    for i in range(count):
        m = seq[i]
        r[m] = 0.0
        q[m] = 0.0
        s[m] = 0.0
    for a in range(atoms):
        m, t = msg[a], at[a]
        if ready[t] > r[m]:
            r[m] = ready[t]
        if tail[t] > q[m]:
            q[m] = tail[t]
        s[m] += nbytes[a]
        ax[m] = axes[t]
    free[:] = 0.0
    worst, where, busy = compute, -1, 0.0
    for i in range(count):
        m = seq[i]
        k = link[m]
        row = ax[m] * links + k
        if slope[row] < 0.0:
            return np.inf, np.inf, i
        d = seconds_of(row, s[m], ptr, xs, ys, slope)
        end = max(free[k], r[m]) + d
        busy += d
        free[k] = end
        if end + q[m] > worst:
            worst, where = end + q[m], i
    return worst, busy, where


@numba.njit(cache=True)
def span_of(x, atoms, msg, at):  # type: ignore[no-untyped-def]
    """(first place, last place, atoms) of a message."""
    lo, hi, members = np.int64(1 << 60), np.int64(-1), 0
    for a in range(atoms):
        if msg[a] == x:
            members += 1
            lo, hi = min(lo, at[a]), max(hi, at[a])
    return lo, hi, members


@numba.njit(cache=True)
def group_of(x, atoms, msg, at, group):  # type: ignore[no-untyped-def]
    """The group of a message's tensors; -1 where it has none."""
    for a in range(atoms):
        if msg[a] == x:
            return group[at[a]]
    return -1


@numba.njit(cache=True)
def an_atom_of(x, atoms, msg):  # type: ignore[no-untyped-def]
    """An atom at random, of the message if eight tries find one."""
    a = np.random.randint(atoms)
    for _ in range(8):
        if msg[a] == x:
            break
        a = np.random.randint(atoms)
    return a


@numba.njit(cache=True)
def drop(seq, count, i):  # type: ignore[no-untyped-def]
    for u in range(i, count - 1):
        seq[u] = seq[u + 1]
    return count - 1


@numba.njit(cache=True)
def put(seq, count, j, x):  # type: ignore[no-untyped-def]
    for u in range(count, j, -1):
        seq[u] = seq[u - 1]
    seq[j] = x
    return count + 1


@numba.njit(cache=True)
def an_id(free_ids, next_id):  # type: ignore[no-untyped-def]
    """(an unused message, the next one never used): the caller pops it from free_ids once it is kept."""
    if len(free_ids) > 0:
        return free_ids[-1], next_id
    return next_id, next_id + 1


@numba.njit(cache=True)
def search(  # type: ignore[no-untyped-def]
    ready,
    tail,
    group,
    axes,
    links,
    ptr,
    xs,
    ys,
    slope,
    compute,
    msg0,
    at0,
    nbytes0,
    link0,
    evaluations,
    bound,
    seed,
    warmth,
):
    np.random.seed(seed)
    atoms = msg0.size
    room = atoms + 96
    messages = link0.size
    ids = messages + 2048
    msg, at, nbytes = np.zeros(room, np.int64), np.zeros(room, np.int64), np.zeros(room)
    msg[:atoms], at[:atoms], nbytes[:atoms] = msg0, at0, nbytes0
    link = np.zeros(ids, np.int64)
    link[:messages] = link0
    seq = np.zeros(ids, np.int64)
    seq[:messages] = np.arange(messages)
    count = messages
    next_id = messages
    free_ids = [0 for _ in range(0)]
    net = (ready, tail, axes, links, ptr, xs, ys, slope, compute)
    scratch = (np.zeros(ids), np.zeros(ids), np.zeros(ids), np.zeros(ids, np.int64), np.zeros(links))
    cost, busy, critical = cost_of(net, atoms, msg, at, nbytes, seq, count, link, scratch)
    best_cost, best_busy = cost, busy
    b_atoms, b_count = atoms, count
    b_msg, b_at, b_bytes, b_seq, b_link = msg.copy(), at.copy(), nbytes.copy(), seq.copy(), link.copy()
    heat = warmth * max(cost - bound, 0.0)
    # A trial changes msg/nbytes of a few atoms, seq and link: keep the old values of just those.
    o_msg, o_seq, _o_link = msg.copy(), seq.copy(), link.copy()
    o_bytes = nbytes.copy()
    for step in range(evaluations):
        if best_cost <= bound * (1.0 + 1e-9):
            break
        temperature = heat * (1.0 - step / evaluations) ** 2
        o_atoms, o_count, o_next = atoms, count, next_id
        o_msg[:atoms] = msg[:atoms]
        o_bytes[:atoms] = nbytes[:atoms]
        o_seq[:count] = seq[:count]
        changed_link = -1
        took_id = False
        # Aim at the critical message or what goes before it, most of the time.
        if critical >= 0 and np.random.random() < 0.7:
            i = critical - min(critical, int(np.random.exponential(2.0)))
        else:
            i = np.random.randint(count)
        x = seq[i]
        kind = np.random.randint(8 if links > 1 else 7)
        done = False
        if kind == 0 and count > 1:  # reorder
            j = i + int(np.sign(np.random.random() - 0.5)) * (1 + int(np.random.exponential(1.5)))
            j = min(max(j, 0), count - 1)
            if j != i:
                if j < i:
                    for u in range(i, j, -1):
                        seq[u] = seq[u - 1]
                else:
                    for u in range(i, j):
                        seq[u] = seq[u + 1]
                seq[j] = x
                done = True
        elif kind == 1 and count > 1:  # merge x into a neighbour in the order
            j = i + (1 if np.random.random() < 0.5 else -1)
            if 0 <= j < count:
                y = seq[j]
                if group_of(x, atoms, msg, at, group) == group_of(y, atoms, msg, at, group):
                    for a in range(atoms):
                        if msg[a] == x:
                            msg[a] = y
                    count = drop(seq, count, i)
                    done = True
        elif kind == 2 and (next_id < ids or len(free_ids) > 0):  # split x at a place of the line
            lo, hi, members = span_of(x, atoms, msg, at)
            if members > 1 and hi > lo:
                cut = lo + 1 + np.random.randint(hi - lo)
                y, next_id = an_id(free_ids, next_id)
                took_id = True
                link[y] = link[x] if np.random.random() < 0.5 else np.random.randint(links)
                front = np.random.random() < 0.5
                moved = False
                for a in range(atoms):
                    if msg[a] == x and (at[a] < cut) == front:
                        msg[a] = y
                        moved = True
                if moved:
                    j = i + (0 if front else 1)
                    if np.random.random() < 0.3:
                        j = min(max(j + np.random.randint(-3, 4), 0), count)
                    count = put(seq, count, j, y)
                    done = True
        elif kind == 3 or kind == 4:  # move the first or last few atoms of x to another message
            j = i + (1 + int(np.random.exponential(1.0))) * (1 if np.random.random() < 0.5 else -1)
            if 0 <= j < count:
                y = seq[j]
                lo, hi, _ = span_of(x, atoms, msg, at)
                same = x != y and group_of(x, atoms, msg, at, group) == group_of(y, atoms, msg, at, group)
                if same and hi > lo:
                    reach = int(np.random.exponential(0.1 * (hi - lo)))
                    for a in range(atoms):
                        if msg[a] == x and (at[a] <= lo + reach if kind == 3 else at[a] >= hi - reach):
                            msg[a] = y
                    if group_of(x, atoms, msg, at, group) < 0:  # nothing is left of it
                        count = drop(seq, count, i)
                    done = True
        elif kind == 5:  # shift bytes between two atoms of one tensor
            a = an_atom_of(x, atoms, msg)
            t = at[a]
            for b in range(atoms):
                if b != a and at[b] == t and msg[b] != msg[a]:
                    amount = np.floor(nbytes[a] * np.random.random())
                    if np.random.random() < 0.3:
                        amount = np.floor(amount * 0.05)
                    if 0 < amount < nbytes[a]:
                        nbytes[a] -= amount
                        nbytes[b] += amount
                        done = True
                    break
        elif kind == 6 and atoms < room:  # cut an atom in two and give a part to another message
            a = an_atom_of(x, atoms, msg)
            amount = np.floor(nbytes[a] * np.random.random())
            j = min(max(i + np.random.randint(-2, 3), 0), count - 1)
            y = seq[j]
            if amount > 0 and y != msg[a]:
                if group_of(y, atoms, msg, at, group) == group[at[a]]:
                    nbytes[a] -= amount
                    at[atoms], nbytes[atoms], msg[atoms] = at[a], amount, y
                    atoms += 1
                    done = True
            elif amount > 0 and (next_id < ids or len(free_ids) > 0):  # … or to a message of its own
                y, next_id = an_id(free_ids, next_id)
                took_id = True
                link[y] = link[msg[a]] if np.random.random() < 0.5 else np.random.randint(links)
                nbytes[a] -= amount
                at[atoms], nbytes[atoms], msg[atoms] = at[a], amount, y
                atoms += 1
                j = min(max(i + np.random.randint(0, 3), 0), count)
                count = put(seq, count, j, y)
                done = True
        elif kind == 7:  # another link
            changed_link = link[x]
            link[x] = np.random.randint(links)
            done = link[x] != changed_link
        if not done:
            atoms, count, next_id = o_atoms, o_count, o_next
            continue
        c, b2, crit = cost_of(net, atoms, msg, at, nbytes, seq, count, link, scratch)
        # A shorter iteration wins; between equals, less time on the links.
        gain = (c - cost) + 1e-3 * (b2 - busy)
        if gain <= 0.0 or (temperature > 0.0 and np.random.random() < np.exp(-gain / temperature)):
            cost, busy, critical = c, b2, crit
            if took_id and next_id == o_next:
                free_ids.pop()
            if count < o_count:
                # Which id vanished: the one that stood in the old order and no longer does.
                for u in range(o_count):
                    if u >= count or seq[u] != o_seq[u]:
                        gone = o_seq[u]
                        free_ids.append(gone)
                        break
            if c < best_cost - 1e-15 or (c <= best_cost and b2 < best_busy):
                best_cost, best_busy = c, b2
                b_atoms, b_count = atoms, count
                b_msg[:atoms], b_at[:atoms], b_bytes[:atoms] = msg[:atoms], at[:atoms], nbytes[:atoms]
                b_seq[:count] = seq[:count]
                b_link[:] = link
        else:
            atoms, count, next_id = o_atoms, o_count, o_next
            msg[:atoms] = o_msg[:atoms]
            nbytes[:atoms] = o_bytes[:atoms]
            seq[:count] = o_seq[:count]
            if changed_link >= 0:
                link[x] = changed_link
    # Number the messages by their place in the order.
    place = np.zeros(ids, np.int64)
    for i in range(b_count):
        place[b_seq[i]] = i
    out_link = np.zeros(b_count, np.int64)
    for i in range(b_count):
        out_link[i] = b_link[b_seq[i]]
    out_msg = np.zeros(b_atoms, np.int64)
    for a in range(b_atoms):
        out_msg[a] = place[b_msg[a]]
    return best_cost, out_msg, b_at[:b_atoms].copy(), b_bytes[:b_atoms].copy(), out_link
