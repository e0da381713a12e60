"""The compiled local search that `fast.improve` describes. A move changes the state; the search keeps or undoes it.

Importing this module imports numba, so import it inside functions only. Kernels are at module level, because numba's
cache cannot find functions that close over another function. The state is a named tuple of arrays, which numba accepts;
counts that change are in an array.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase.compiled import jit
from pase.schedule.kernels_chain import seconds_of

__all__ = ["cost_of", "move", "search", "start"]

MORE_ATOMS = 96
"""Number of cuts of atoms for which the state has space."""
MORE_MESSAGES = 2048

REORDER, MERGE, SPLIT, GIVE_FRONT, GIVE_BACK, SHIFT_BYTES, CUT, RELINK = range(8)
ATOMS, MESSAGES, IDS, SPARE = range(4)


ATOM = np.dtype([("msg", np.int64), ("at", np.int64), ("nbytes", float)])
MESSAGE = np.dtype(
    [("link", np.int64), ("axes", np.int64), ("ready", float), ("tail", float), ("nbytes", float)]
)


class State(NamedTuple):
    """A plan that the search changes: atoms (pieces of tensors), each in a message, and the order of the messages.

    atoms: ATOM [space], the id of the atom's message, its tensor's place in the line, and its bytes.
    messages: MESSAGE [ids], by id. The link is part of the state; `cost_of` writes the other fields.
    seq: int64 [ids], the ids in the order of sending.
    spare: int64 [ids], a stack of ids that are free again.
    n: int64 [4], the numbers in use of ATOMS, MESSAGES, IDS ever used, and SPARE.

    The arrays are structured because numba counts a reference for each array that a call takes.
    """

    atoms: np.ndarray
    messages: np.ndarray
    seq: np.ndarray
    spare: np.ndarray
    n: np.ndarray


@jit()
def start(msg, at, nbytes, link):
    """The state of a plan. The messages get ids in the order of sending."""
    atoms, messages = msg.size, link.size
    ids = messages + MORE_MESSAGES
    s = State(
        np.empty(atoms + MORE_ATOMS, ATOM),
        np.empty(ids, MESSAGE),
        np.empty(ids, np.int64),
        np.empty(ids, np.int64),
        np.array([atoms, messages, messages, 0]),
    )
    for a in range(atoms):
        atom = s.atoms[a]
        atom["msg"], atom["at"], atom["nbytes"] = msg[a], at[a], nbytes[a]
    for m in range(messages):
        s.seq[m] = m
        s.messages[m]["link"] = link[m]
    return s


@jit()
def copy(source, target):
    """Copy the parts of ``source`` that are in use to ``target``."""
    target.n[:] = source.n
    for a in range(source.n[ATOMS]):
        target.atoms[a] = source.atoms[a]
    for i in range(source.n[MESSAGES]):
        x = source.seq[i]
        target.seq[i] = x
        target.messages[x]["link"] = source.messages[x]["link"]


@jit()
def cost_of(inst, s, free):
    """Returns (makespan, busy time of the links, place of the critical message or -1).

    free: float64 [links], scratch space.
    """
    for i in range(s.n[MESSAGES]):
        m = s.messages[s.seq[i]]
        m["ready"] = 0.0
        m["tail"] = 0.0
        m["nbytes"] = 0.0
    for a in range(s.n[ATOMS]):
        atom = s.atoms[a]
        m, tensor = s.messages[atom["msg"]], inst.tensors[atom["at"]]
        m["ready"] = max(m["ready"], tensor["ready"])
        m["tail"] = max(m["tail"], tensor["tail"])
        m["nbytes"] += atom["nbytes"]
        m["axes"] = tensor["axes"]
    free[:] = 0.0
    worst, where, busy = inst.compute, -1, 0.0
    for i in range(s.n[MESSAGES]):
        m = s.messages[s.seq[i]]
        k = m["link"]
        row = m["axes"] * inst.links + k
        if inst.curves.rows[row]["slope"] < 0.0:
            return np.inf, np.inf, i
        d = seconds_of(inst.curves, row, m["nbytes"])
        end = max(free[k], m["ready"]) + d
        busy += d
        free[k] = end
        if end + m["tail"] > worst:
            worst, where = end + m["tail"], i
    return worst, busy, where


@jit()
def span_of(s, x):
    """The (first place, last place) of a message's atoms in the line."""
    lo, hi = np.int64(1 << 60), np.int64(-1)
    for a in range(s.n[ATOMS]):
        if s.atoms[a]["msg"] == x:
            lo, hi = min(lo, s.atoms[a]["at"]), max(hi, s.atoms[a]["at"])
    return lo, hi


@jit()
def group_of(inst, s, x):
    """The group of a message's tensors; -1 if it has no tensors."""
    for a in range(s.n[ATOMS]):
        if s.atoms[a]["msg"] == x:
            return inst.tensors[s.atoms[a]["at"]]["group"]
    return -1


@jit()
def draw_atom(s, x):
    """A random atom, which is of the message if one of eight tries finds one."""
    a = np.random.randint(s.n[ATOMS])
    for _ in range(8):
        if s.atoms[a]["msg"] == x:
            break
        a = np.random.randint(s.n[ATOMS])
    return a


@jit()
def draw_side():
    return 1 if np.random.random() < 0.5 else -1


@jit()
def remove_message(s, i):
    """Remove the message at place i from the order. Its id becomes free."""
    s.spare[s.n[SPARE]] = s.seq[i]
    s.n[SPARE] += 1
    s.n[MESSAGES] -= 1
    for u in range(i, s.n[MESSAGES]):
        s.seq[u] = s.seq[u + 1]


@jit()
def insert_message(s, j, x):
    for u in range(s.n[MESSAGES], j, -1):
        s.seq[u] = s.seq[u - 1]
    s.seq[j] = x
    s.n[MESSAGES] += 1


@jit()
def has_id(s):
    return s.n[SPARE] > 0 or s.n[IDS] < s.seq.size


@jit()
def new_id(s, like, links):
    """An id for a new message, on the link of message ``like`` or on a random one."""
    if s.n[SPARE] > 0:
        s.n[SPARE] -= 1
        y = s.spare[s.n[SPARE]]
    else:
        y = s.n[IDS]
        s.n[IDS] += 1
    s.messages[y]["link"] = s.messages[like]["link"] if np.random.random() < 0.5 else np.random.randint(links)
    return y


@jit()
def reorder(s, i):
    """Move the message at place i some places earlier or later."""
    if s.n[MESSAGES] < 2:
        return False
    j = i + int(np.sign(np.random.random() - 0.5)) * (1 + int(np.random.exponential(1.5)))
    j = min(max(j, 0), s.n[MESSAGES] - 1)
    x = s.seq[i]
    for u in range(i, j, -1):
        s.seq[u] = s.seq[u - 1]
    for u in range(i, j):
        s.seq[u] = s.seq[u + 1]
    s.seq[j] = x
    return j != i


@jit()
def merge(inst, s, i):
    """Merge the message at place i into its neighbour in the order."""
    if s.n[MESSAGES] < 2:
        return False
    j = i + draw_side()
    if not 0 <= j < s.n[MESSAGES]:
        return False
    x, y = s.seq[i], s.seq[j]
    if group_of(inst, s, x) != group_of(inst, s, y):
        return False
    for a in range(s.n[ATOMS]):
        if s.atoms[a]["msg"] == x:
            s.atoms[a]["msg"] = y
    remove_message(s, i)
    return True


@jit()
def split(inst, s, i):
    """Split the message at place i in two, at a place of the line."""
    x = s.seq[i]
    lo, hi = span_of(s, x)
    if hi <= lo or not has_id(s):
        return False
    cut = lo + 1 + np.random.randint(hi - lo)
    y = new_id(s, x, inst.links)
    front = np.random.random() < 0.5
    for a in range(s.n[ATOMS]):
        if s.atoms[a]["msg"] == x and (s.atoms[a]["at"] < cut) == front:
            s.atoms[a]["msg"] = y
    j = i + (0 if front else 1)
    if np.random.random() < 0.3:
        j = min(max(j + np.random.randint(-3, 4), 0), s.n[MESSAGES])
    insert_message(s, j, y)
    return True


@jit()
def give(inst, s, i, front):
    """Move the first (or last) few atoms of the message at place i to another message near it."""
    j = i + (1 + int(np.random.exponential(1.0))) * draw_side()
    if not 0 <= j < s.n[MESSAGES]:
        return False
    x, y = s.seq[i], s.seq[j]
    lo, hi = span_of(s, x)
    if hi <= lo or group_of(inst, s, x) != group_of(inst, s, y):
        return False
    reach = int(np.random.exponential(0.1 * (hi - lo)))
    for a in range(s.n[ATOMS]):
        if s.atoms[a]["msg"] == x and (
            s.atoms[a]["at"] <= lo + reach if front else s.atoms[a]["at"] >= hi - reach
        ):
            s.atoms[a]["msg"] = y
    if group_of(inst, s, x) < 0:  # the message is empty now
        remove_message(s, i)
    return True


@jit()
def shift_bytes(s, i):
    """Shift bytes between two atoms of one tensor that are in different messages."""
    a = draw_atom(s, s.seq[i])
    for b in range(s.n[ATOMS]):
        if b != a and s.atoms[b]["at"] == s.atoms[a]["at"] and s.atoms[b]["msg"] != s.atoms[a]["msg"]:
            amount = np.floor(s.atoms[a]["nbytes"] * np.random.random())
            if np.random.random() < 0.3:
                amount = np.floor(amount * 0.05)
            if not 0 < amount < s.atoms[a]["nbytes"]:
                return False
            s.atoms[a]["nbytes"] -= amount
            s.atoms[b]["nbytes"] += amount
            return True
    return False


@jit()
def cut_atom(inst, s, i):
    """Cut an atom in two, and move one part to a message near place i or to a new message."""
    if s.n[ATOMS] == s.atoms.size:
        return False
    a = draw_atom(s, s.seq[i])
    amount = np.floor(s.atoms[a]["nbytes"] * np.random.random())
    j = min(max(i + np.random.randint(-2, 3), 0), s.n[MESSAGES] - 1)
    y = s.seq[j]
    if amount <= 0:
        return False
    if y != s.atoms[a]["msg"]:
        if group_of(inst, s, y) != inst.tensors[s.atoms[a]["at"]]["group"]:
            return False
    elif has_id(s):
        y = new_id(s, s.atoms[a]["msg"], inst.links)
        insert_message(s, min(max(i + np.random.randint(0, 3), 0), s.n[MESSAGES]), y)
    else:
        return False
    b = s.n[ATOMS]
    s.atoms[a]["nbytes"] -= amount
    s.atoms[b]["at"], s.atoms[b]["nbytes"], s.atoms[b]["msg"] = s.atoms[a]["at"], amount, y
    s.n[ATOMS] += 1
    return True


@jit()
def relink(inst, s, i):
    """Send the message at place i on another link."""
    x = s.seq[i]
    before = s.messages[x]["link"]
    s.messages[x]["link"] = np.random.randint(inst.links)
    return s.messages[x]["link"] != before


@jit()
def move(inst, s, kind, i):
    """Try a move on the message at place i. Returns whether the state changed."""
    if kind == REORDER:
        return reorder(s, i)
    if kind == MERGE:
        return merge(inst, s, i)
    if kind == SPLIT:
        return split(inst, s, i)
    if kind in (GIVE_FRONT, GIVE_BACK):
        return give(inst, s, i, kind == GIVE_FRONT)
    if kind == SHIFT_BYTES:
        return shift_bytes(s, i)
    if kind == CUT:
        return cut_atom(inst, s, i)
    return relink(inst, s, i)


@jit()
def aim(s, critical):
    """A place to try, most often that of the critical message or of a message shortly before it."""
    if critical >= 0 and np.random.random() < 0.7:
        return critical - min(critical, int(np.random.exponential(2.0)))
    return np.random.randint(s.n[MESSAGES])


@jit()
def pieces_of(s):
    """Returns (msg, at, nbytes) per atom and (link) per message. Messages are numbered by their place in the order."""
    atoms, messages = s.n[ATOMS], s.n[MESSAGES]
    place = np.zeros(s.seq.size, np.int64)
    place[s.seq[:messages]] = np.arange(messages)
    used = s.atoms[:atoms].copy()
    return place[used["msg"]], used["at"].copy(), used["nbytes"].copy(), s.messages["link"][s.seq[:messages]]


@jit()
def search(inst, pieces, evaluations, bound, seed, warmth):
    """Simulated annealing from the given pieces. Returns (makespan, pieces) of the best state.

    pieces: as from `pieces_of`. evaluations: number of moves to try. bound: the search stops at this makespan. warmth:
    the initial temperature, as a fraction of the gap to the bound.
    """
    np.random.seed(seed)
    s, before, best = start(*pieces), start(*pieces), start(*pieces)
    free = np.zeros(inst.links)
    cost, busy, critical = cost_of(inst, s, free)
    best_cost, best_busy = cost, busy
    heat = warmth * max(cost - bound, 0.0)
    for step in range(evaluations):
        if best_cost <= bound * (1.0 + 1e-9):
            break
        temperature = heat * (1.0 - step / evaluations) ** 2
        copy(s, before)
        i = aim(s, critical)
        if not move(inst, s, np.random.randint(8 if inst.links > 1 else 7), i):
            continue
        c, b, where = cost_of(inst, s, free)
        # A shorter iteration is better. Among equals, less time on the links is better.
        rise = (c - cost) + 1e-3 * (b - busy)
        keep = rise <= 0.0 or (temperature > 0.0 and np.random.random() < np.exp(-rise / temperature))
        if not keep:
            copy(before, s)
            continue
        cost, busy, critical = c, b, where
        if c < best_cost - 1e-15 or (c <= best_cost and b < best_busy):
            best_cost, best_busy = c, b
            copy(s, best)
    return best_cost, pieces_of(best)
