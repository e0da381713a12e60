"""Compiled kernel for the reshard steps of many canonical cases. ``pase.tables.reshard_path`` is the reference and
explains each step.

The state of a walk is defined in ``kernels_spans``.
"""

from __future__ import annotations

import numpy as np

from pase.compiled import jit
from pase.machine import COLLECTIVES
from pase.tables.kernels_spans import (
    BEFORE,
    BITS,
    CHANGE,
    EVEN,
    EXTENT,
    GOAL,
    HAS,
    HELD,
    KEEP,
    LAST,
    LEFT,
    LENGTH,
    MASK,
    MOVES,
    NOW,
    ROWS,
    SIZE,
    SLOTS,
    TAKEN,
    TANGLES,
    TOOK,
    TRIAL,
    TURN,
    WANTS,
    add_spans,
    changed,
    clear,
    fit_together,
    hanging,
    hold,
    in_order,
    joined,
    minus,
    nested,
    stays_solid,
    tile,
)
from pase.tables.layouts import PARTIAL, REPLICATED

__all__ = ["walk_cases"]

_NONE, _SLICE = -2, -1
_REDUCE_SCATTER = COLLECTIVES.index("reduce_scatter")
_ALL_TO_ALL = COLLECTIVES.index("all_to_all")
_PERMUTE = COLLECTIVES.index("permute")
_ALL_REDUCE = COLLECTIVES.index("all_reduce")
_ALL_GATHER = COLLECTIVES.index("all_gather")


@jit()
def walk_cases(cases, first, last, done, count):
    """Walk cases[first:last]: int64 [cases, 3, axes] (ways, src, dst), with digits in blocks.

    done: int32 [cases, steps, 3], receives (kind as in COLLECTIVES, axes, split), padded with -1; free steps are left
    out. count: int64 [cases], receives the number of steps of each case, which may exceed the room in ``done``.
    """
    n = cases.shape[2]
    w, s = np.zeros((ROWS, n), np.int64), np.zeros((SLOTS, 8 * n + 8, 3), np.int64)
    for c in range(first, last):
        _begin(w, s, cases[c])
        for i in range(done.shape[1]):
            for k in range(3):
                done[c, i, k] = -1
        step = 0
        while _unsettled(w) and step < 11:
            step = 0 if _step(w, s, done[c], step) else step + 1
        _end(w, s, done[c])
        count[c] = s[LENGTH, MOVES, 0]


@jit()
def _step(w, s, done, step):
    """Make one kind of step of ``reshard_path._walked``; return whether there was any. Each function is called in one
    place only, because calls are compiled inline."""
    if step in (0, 1, 7, 8):
        kind, state = (_SLICE, REPLICATED) if step in (0, 7) else (_REDUCE_SCATTER, PARTIAL)
        return _enter(w, s, done, kind, state, step < 7)
    if step in (3, 9):
        return _all_to_all(w, s, done, step == 3)
    if step == 5:
        return _sink(w, s, done)
    if step == 10:
        return _unblock(w, s, done)
    some = False
    for i in range(_tangles(w, s)):
        group = s[TANGLES, i, 0]
        some |= _relabel(w, s, done, group) if step == 6 else _exchange(w, s, done, group, step == 4)
    return some


@jit()
def _begin(w, s, case):
    """Initialise the state of a case. Blocks become strides."""
    n = w.shape[1]
    s[LENGTH, MOVES, 0], s[LENGTH, LAST, 0] = 0, _NONE
    for t in range(2 * n):
        s[EXTENT, t, 0] = 1
    for k in range(1, 3):
        for a in range(n):
            if case[k, a] >= 0:
                t, blocks = case[k, a] >> BITS, case[k, a] & MASK
                x, y = s[EXTENT, t, 0], blocks
                while y:
                    x, y = y, x % y
                s[EXTENT, t, 0] = s[EXTENT, t, 0] // x * blocks
    for a in range(n):
        w[SIZE, a] = case[0, a]
        for k in range(1, 3):
            state = case[k, a]
            if state >= 0:
                state += s[EXTENT, state >> BITS, 0] // (state & MASK) - (state & MASK)
            w[NOW if k == 1 else GOAL, a] = state
    s[LENGTH, EVEN, 0] = fit_together(w, NOW, True) and fit_together(w, GOAL, True)
    hold(w, s)


@jit()
def _end(w, s, done):
    """Reduce and gather what is left at the end of a walk."""
    summed, gathered = 0, 0
    for a in range(w.shape[1]):
        if w[NOW, a] == PARTIAL and w[GOAL, a] == REPLICATED:
            summed |= 1 << a
        if w[NOW, a] >= 0 and w[GOAL, a] < 0:
            gathered |= 1 << a
    _all_reduce(w, s, done, summed)
    _gather(w, s, done, gathered)


@jit()
def _unsettled(w):
    """As ``_LayoutWalk.unfinished``."""
    some = False
    for a in range(w.shape[1]):
        some |= w[GOAL, a] >= 0 and w[NOW, a] != w[GOAL, a]
    return some


@jit()
def _split(w):
    """As ``_LayoutWalk._split``."""
    bits = 0
    for a in range(w.shape[1]):
        if w[NOW, a] >= 0:
            bits |= 1 << a
    return bits


@jit()
def _reshard_step(w, s, done, kind, row):
    """As ``_LayoutWalk._reshard_step``; row: the change."""
    if changed(w, row) == 0:
        return False
    at, split, axes = s[LENGTH, MOVES, 0], _split(w), 0
    if kind == s[LENGTH, LAST, 0] and kind in (_SLICE, _REDUCE_SCATTER, _PERMUTE):  # two in a row are merged
        if kind != _SLICE:
            at -= 1
            split = done[at, 2] if at < done.shape[0] else 0
    else:
        for a in range(w.shape[1]):
            w[BEFORE, a] = w[NOW, a]
    for a in range(w.shape[1]):
        if w[row, a] != KEEP:
            w[NOW, a] = w[row, a]
        if w[NOW, a] != w[BEFORE, a]:
            axes |= 1 << a
    hold(w, s)
    s[LENGTH, LAST, 0] = kind if axes else _NONE
    if kind != _SLICE:
        if at < done.shape[0]:
            done[at, 0] = kind if axes else -1
            done[at, 1] = axes if axes else -1
            done[at, 2] = (_split(w) if kind == _ALL_GATHER else split) if axes else -1
        s[LENGTH, MOVES, 0] = at + 1 if axes else at
    return True


@jit()
def _all_reduce(w, s, done, axes):
    """As ``_LayoutWalk.all_reduce``; axes: a bit set."""
    clear(w, TRIAL)
    for a in range(w.shape[1]):
        if axes >> a & 1:
            w[TRIAL, a] = REPLICATED
    _reshard_step(w, s, done, _ALL_REDUCE, TRIAL)


@jit()
def _gather(w, s, done, axes):
    """As ``_LayoutWalk.gather``; axes: a bit set."""
    while axes:
        last = -1
        for a in range(w.shape[1]):
            if axes >> a & 1 and w[NOW, a] >> BITS > last:
                last = w[NOW, a] >> BITS
        clear(w, TRIAL)
        for a in range(w.shape[1]):
            if axes >> a & 1 and w[NOW, a] >> BITS == last:
                w[TRIAL, a] = REPLICATED
                axes &= ~(1 << a)
        _reshard_step(w, s, done, _ALL_GATHER, TRIAL)


@jit()
def _enter(w, s, done, kind, state, solid):
    """As ``_LayoutWalk.enter``."""
    n, free = w.shape[1], 0
    clear(w, CHANGE)
    for a in range(n):
        if w[NOW, a] == state and w[GOAL, a] >= 0 and w[HELD, a] == 0:
            w[CHANGE, a] = w[GOAL, a]
            free |= 1 << a
    if free == 0:
        return False
    while solid:
        hung = hanging(w, s, CHANGE) & changed(w, CHANGE)
        if hung == 0:
            break
        for a in range(n):
            if hung >> a & 1:
                w[CHANGE, a] = KEEP
    left = free & ~changed(w, CHANGE)
    for a in range(n):
        if left >> a & 1:
            _place_on_top(w, s, a)
    return _reshard_step(w, s, done, kind, CHANGE)


@jit()
def _place_on_top(w, s, a):
    """The part of ``_LayoutWalk.enter`` that gives axis a the topmost free place in its dim."""
    every = (1 << w.shape[1]) - 1
    joined(w, s, HAS, CHANGE, every)
    s[LENGTH, WANTS, 0] = 0
    for b in range(w.shape[1]):
        if w[GOAL, b] >= 0 and w[GOAL, b] >> BITS == w[GOAL, a] >> BITS:
            add_spans(w, s, WANTS, GOAL, 1 << b)
    minus(s, WANTS, HAS)
    in_order(w, s, 1 << a, 0)
    tile(w, s, WANTS, max(s[LENGTH, WANTS, 0] - 1, 0), False, LEFT)
    if w[LEFT, a] != KEEP:
        w[CHANGE, a] = w[LEFT, a]
        if not (stays_solid(w, s, CHANGE) and fit_together(w, CHANGE, s[LENGTH, EVEN, 0] != 0)):
            w[CHANGE, a] = KEEP


@jit()
def _departing(w, first):
    """Write to ``CHANGE`` the digits of the free axes that make the same change of tensor dims as axis ``first``.
    Return whether ``first`` is the first of these axes."""
    clear(w, CHANGE)
    for a in range(w.shape[1]):
        leaves = w[NOW, a] >= 0 and w[GOAL, a] >= 0 and w[NOW, a] != w[GOAL, a] and w[HELD, a] == 0
        if a == first and not leaves:
            return False
        alike = w[NOW, a] >> BITS == w[NOW, first] >> BITS
        if leaves and alike and w[GOAL, a] >> BITS == w[GOAL, first] >> BITS:
            if a < first:
                return False
            w[CHANGE, a] = w[GOAL, a]
    return True


@jit()
def _all_to_all(w, s, done, solid):
    """As ``_LayoutWalk.all_to_all``."""
    for first in range(w.shape[1]):
        if _departing(w, first):
            apart = w[NOW, first] >> BITS != w[GOAL, first] >> BITS
            if not solid or (apart and stays_solid(w, s, CHANGE)):
                return _reshard_step(w, s, done, _ALL_TO_ALL, CHANGE)
    return False


@jit()
def _sink(w, s, done):
    """As ``_LayoutWalk.sink``."""
    n = w.shape[1]
    for first in range(n):
        if not _departing(w, first) or w[NOW, first] >> BITS == w[GOAL, first] >> BITS:
            continue
        inside, leaving = 0, changed(w, CHANGE)
        for a in range(n):
            if w[NOW, a] >= 0 and w[NOW, a] >> BITS == w[NOW, first] >> BITS:
                inside |= 1 << a
        joined(w, s, HAS, NOW, inside)
        s[LENGTH, WANTS, 0] = 0
        in_order(w, s, inside & ~leaving, inside & leaving)
        if not tile(w, s, HAS, 0, True, LEFT) or not nested(s):
            continue
        for a in range(n):
            w[TRIAL, a] = w[CHANGE, a] if w[CHANGE, a] != KEEP else w[LEFT, a]
            if w[LEFT, a] == w[NOW, a]:
                w[LEFT, a] = KEEP
        if stays_solid(w, s, TRIAL):
            return _reshard_step(w, s, done, _PERMUTE, LEFT)
    return False


@jit()
def _tangles(w, s):
    """Write the groups of ``_LayoutWalk._tangles`` to the slot ``TANGLES``, as bit sets; return how many there are."""
    n, k = w.shape[1], 0
    for a in range(n):
        s[TANGLES, a, 1] = 1 << a if w[NOW, a] != w[GOAL, a] else 0
        s[TANGLES, a, 2] = w[HELD, a] if w[NOW, a] != w[GOAL, a] else 0
    for a in range(n):
        for b in range(n):
            group, held = s[TANGLES, a, 1], s[TANGLES, a, 2]
            if group and s[TANGLES, b, 1] and w[HELD, a] >> b & 1:
                group, held = group | s[TANGLES, b, 1], held | s[TANGLES, b, 2]
                for c in range(n):
                    if group >> c & 1:
                        s[TANGLES, c, 1], s[TANGLES, c, 2] = group, held
    for a in range(n):
        if s[TANGLES, a, 2] and s[TANGLES, a, 1] & ((1 << a) - 1) == 0:
            s[TANGLES, k, 0] = s[TANGLES, a, 1]
            k += 1
    return k


@jit()
def _exchange(w, s, done, group, movers):
    """As ``_LayoutWalk._exchange``."""
    n, enter, more, rest = w.shape[1], 0, 0, 0
    joined(w, s, HAS, NOW, group)
    joined(w, s, WANTS, GOAL, group)
    if not nested(s):
        return False
    for a in range(n):
        if group >> a & 1:
            if w[GOAL, a] >= 0 and w[NOW, a] < 0:
                enter |= 1 << a
            elif w[GOAL, a] >= 0 and movers and _unwanted(w, s, a):
                more |= 1 << a
            elif w[GOAL, a] < 0 and w[NOW, a] >= 0:
                rest |= 1 << a
    if movers and more == 0:
        return False
    minus(s, WANTS, HAS)
    in_order(w, s, enter, more)
    if not tile(w, s, WANTS, 0, True, CHANGE) or not _rounds(w, s):
        return False
    joined(w, s, WANTS, GOAL, group)
    add_spans(w, s, WANTS, NOW, changed(w, CHANGE))
    minus(s, HAS, WANTS)
    in_order(w, s, rest, 0)
    if not tile(w, s, HAS, 0, True, LEFT):
        return False
    _take(w, s, done)
    _permute(w, s, done, group, group)
    return True


@jit()
def _rounds(w, s):
    """As ``_LayoutWalk._rounds``. Writes the round of each axis to ``TURN``: -1 for axes that take nothing, 0 for those
    that hold nothing."""
    left, group, round = 0, 0, 0
    clear(w, TRIAL)
    for a in range(w.shape[1]):
        w[TURN, a] = -1
        if w[CHANGE, a] != KEEP and w[NOW, a] >= 0:
            left |= 1 << a
        elif w[CHANGE, a] != KEEP:
            group |= 1 << a
    hung, moves, tried = hanging(w, s, TRIAL), left != 0, 0
    while True:  # first the axes that hold nothing, then group by group those that change their dim
        for a in range(w.shape[1]):
            if group >> a & 1:
                w[TURN, a], w[TRIAL, a] = round, w[CHANGE, a]
        now = hanging(w, s, TRIAL) if moves else 0
        if now & ~(hung & ~group) == 0:
            hung, left, tried, round = now, left & ~group, 0, round + 1
        elif round == 0:
            return False
        else:
            tried |= group
            for a in range(w.shape[1]):
                if group >> a & 1:
                    w[TRIAL, a] = KEEP
        if left == 0:
            return True
        group = 0
        for i in range(s[LENGTH, TOOK, 0]):
            if group == 0 and (left & ~tried) >> w[TAKEN, i] & 1:
                group = _together(w, w[TAKEN, i], left)
        if group == 0:
            return False


@jit()
def _together(w, first, axes):
    """The axes that change between the same two tensor dims in ``CHANGE`` as ``first``."""
    group = 0
    for a in range(w.shape[1]):
        alike = (
            w[NOW, a] >> BITS == w[NOW, first] >> BITS and w[CHANGE, a] >> BITS == w[CHANGE, first] >> BITS
        )
        if axes >> a & 1 and alike:
            group |= 1 << a
    return group


@jit()
def _take(w, s, done):
    """Axes take the digits in ``CHANGE``: those that hold nothing together, the others round by round."""
    for round in range(-1, w.shape[1] + 1):
        kind = _SLICE if round < 0 else _REDUCE_SCATTER if round == 0 else _ALL_TO_ALL
        for a in range(w.shape[1]):
            mine = w[TURN, a] == max(round, 0) and (round > 0 or (w[NOW, a] == REPLICATED) == (round < 0))
            w[TRIAL, a] = w[CHANGE, a] if mine and w[NOW, a] != w[CHANGE, a] else KEEP
        _reshard_step(w, s, done, kind, TRIAL)


@jit()
def _unwanted(w, s, a):
    """Whether the axis holds only what is not in ``WANTS``."""
    state = w[NOW, a]
    for i in range(s[LENGTH, WANTS, 0]):
        meets = s[WANTS, i, 1] < (state & MASK) * w[SIZE, a] and (state & MASK) < s[WANTS, i, 2]
        if meets and s[WANTS, i, 0] == state >> BITS:
            return False
    return state >= 0


@jit()
def _relabel(w, s, done, group):
    """As ``_LayoutWalk._relabel``."""
    stuck, ends, goes_on = 0, 0, 0
    for a in range(w.shape[1]):
        if group >> a & 1:
            if w[GOAL, a] >= 0 and w[HELD, a]:
                stuck |= 1 << a
            elif w[NOW, a] >= 0 and w[GOAL, a] < 0:
                ends |= 1 << a
            elif w[NOW, a] >= 0:
                goes_on |= 1 << a
    joined(w, s, HAS, NOW, group)
    joined(w, s, WANTS, GOAL, stuck)
    if not nested(s):
        return False
    minus(s, WANTS, HAS)
    if s[LENGTH, WANTS, 0]:
        return False
    joined(w, s, WANTS, GOAL, stuck)
    minus(s, HAS, WANTS)
    in_order(w, s, ends, goes_on)
    if not tile(w, s, HAS, 0, True, LEFT):
        return False
    _permute(w, s, done, group, stuck)
    return True


@jit()
def _permute(w, s, done, group, fixed):
    """Of the group's axes, those in ``fixed`` take their goals, others take the digits in ``LEFT``, and the rest give
    their digits up."""
    summed = 0
    for a in range(w.shape[1]):
        if group >> a & 1 and w[NOW, a] == PARTIAL:
            summed |= 1 << a
    _all_reduce(w, s, done, summed)
    clear(w, CHANGE)
    for a in range(w.shape[1]):
        if group >> a & 1:
            after = w[GOAL, a] if fixed >> a & 1 and w[GOAL, a] >= 0 else REPLICATED
            after = w[LEFT, a] if w[LEFT, a] != KEEP else after
            if after != w[NOW, a]:
                w[CHANGE, a] = after
    _reshard_step(w, s, done, _PERMUTE, CHANGE)


@jit()
def _unblock(w, s, done):
    """As ``_LayoutWalk.unblock``."""
    n, holders, summed = w.shape[1], 0, 0
    for a in range(n):
        if w[GOAL, a] >= 0 and w[NOW, a] != w[GOAL, a]:
            holders |= w[HELD, a]
        if w[NOW, a] == PARTIAL and w[GOAL, a] == REPLICATED:
            summed |= 1 << a
    if holders == 0:
        return False
    _all_reduce(w, s, done, summed)
    least = -1
    for b in range(n):
        if holders >> b & 1 and (least < 0 or _rather(w, b, least)):
            least = b
    _gather(w, s, done, 1 << least)
    return True


@jit()
def _rather(w, a, b):
    """Whether to gather axis a rather than axis b."""
    if (w[GOAL, a] >= 0) != (w[GOAL, b] >= 0):
        return w[GOAL, a] < 0
    return w[SIZE, a] < w[SIZE, b]
