"""Walks from one layout to another, step by step. ``reshard_path`` explains the order of the steps.

One source runs as Python on lists, and compiled by numba on arrays (``walks``). So lists are indexed one place at a
time, and nothing is allocated, which lets this compile and load ten times as fast. It is one file, because numba's
cache of a function notices a change of its own file only.

Digits are a tensor dim and a stride here: (dim << _BITS) + stride. The digit right below one of stride s, with n ways,
has stride s / n. A digit *hangs* if it is neither the topmost of its dim nor right below another; then shards are not
contiguous. A change is *solid* if no digit hangs that did not hang before. Partitioners express only such changes as
one collective. A *span* is the range that digits select from: tensor dim, low, high. A digit of stride s and n ways is
the span from s to s * n. Sets of axes are bit sets.

The state of a walk is two arrays of integers:

``w`` [rows, axes]: ``NOW`` is the current layout and ``GOAL`` the final one. ``SIZE`` is the size of each axis.
``HELD`` is the set of the axes that hold a part of an axis's goal, or a digit that is not compatible with it.
``CHANGE``, ``TRIAL`` and ``LEFT`` are new digits of axes, or ``KEEP`` for an axis that keeps its digit; a function's
``row`` is one of them, or ``NOW`` for no change. ``ORDER`` and ``TAKEN`` are lists of axes. ``TURN`` is the round in
which each axis takes its new digit. ``BEFORE`` is the layout before the last step, and ``AFTER`` the layout after a
change.

``s`` [slots, places, 3]: lists of spans. The slot ``LENGTH`` has the length of each list and further numbers.
``EXTENT`` has per tensor dim an extent that can stand for the real one: it is divisible by the number of blocks of
every digit, so that each digit has a whole stride.
"""

from __future__ import annotations

from math import gcd

from pase.machine import COLLECTIVES
from pase.tables.axis_layout import DIM_BITS, PARTIAL, REPLICATED

__all__ = ["SLICE", "begun", "walk_cases"]

Cells = list[list[int]]
Cubes = list[Cells]

KEEP = -1 << 60
_BITS, _MASK = DIM_BITS, (1 << DIM_BITS) - 1
NOW, GOAL, SIZE, HELD, CHANGE, TRIAL, LEFT, ORDER, TAKEN, TURN, BEFORE, AFTER, _ROWS = range(13)
HAS, WANTS, CUT, EXTENT, TANGLES, LENGTH, _SLOTS = range(7)
MOVES, ORDERED, TOOK, EVEN, LAST, WHOLE = range(3, 9)  # places of LENGTH after those of the lists of spans

_NONE, SLICE = -1, len(COLLECTIVES)
_REDUCE_SCATTER = COLLECTIVES.index("reduce_scatter")
_ALL_TO_ALL = COLLECTIVES.index("all_to_all")
_PERMUTE = COLLECTIVES.index("permute")
_ALL_REDUCE = COLLECTIVES.index("all_reduce")
_ALL_GATHER = COLLECTIVES.index("all_gather")
_KINDS = 11
"""The kinds of step that are tried (``_step``)."""


def begun(axes: int, whole: bool = False) -> tuple[Cells, Cubes]:
    """The two arrays of a walk, as lists. whole: whether slices, which are free, and the layout after each step are
    recorded too."""
    w = [[0] * axes for _ in range(_ROWS)]
    s = [[[0] * 3 for _ in range(8 * axes + 9)] for _ in range(_SLOTS)]
    s[LENGTH][WHOLE][0] = int(whole)
    return w, s


def walk_cases(
    cases: Cubes, first: int, last: int, w: Cells, s: Cubes, done: Cubes, count: list[int]
) -> None:
    """Walk cases[first:last], each [3, axes]: ways, src and dst, with digits in blocks.

    w, s: as from ``begun``. done: [cases, steps, 3], receives the kind (an index of COLLECTIVES, or ``SLICE``), the
    axes and the split of each step, padded with -1; or [cases, steps, 3 + axes], also the layout after it. count:
    receives the number of steps of each case, which may exceed the room in ``done``.
    """
    for c in range(first, last):
        _begin(w, s, cases[c])
        step = 0 if _unfinished(w) else _KINDS
        while step < _KINDS:
            if not _step(w, s, done[c], step):
                step += 1
            else:
                step = 0 if _unfinished(w) else _KINDS
        _end(w, s, done[c])
        count[c] = s[LENGTH][MOVES][0]
        for i in range(count[c], len(done[c])):
            for k in range(3):
                done[c][i][k] = -1


def _step(w: Cells, s: Cubes, done: Cells, step: int) -> bool:
    """Make one kind of step, in the order in which they are tried; return whether there was any. Each function is
    called in one place only, because calls are compiled inline."""
    if step in (0, 1, 7, 8):
        kind, state = (SLICE, REPLICATED) if step in (0, 7) else (_REDUCE_SCATTER, PARTIAL)
        return _enter(w, s, done, kind, state, step < 7)
    if step in (3, 9):
        return _all_to_all(w, s, done, step == 3)
    if step == 5:
        return _sink(w, s, done)
    if step == 10:
        return _unblock(w, s, done)
    some = False
    for i in range(_tangles(w, s)):
        group = s[TANGLES][i][0]
        some |= _relabel(w, s, done, group) if step == 6 else _exchange(w, s, done, group, step == 4)
    return some


def _begin(w: Cells, s: Cubes, case: Cells) -> None:
    """Set the state to the beginning of a case. Blocks become strides."""
    axes, extent = range(len(w[NOW])), s[EXTENT]
    s[LENGTH][MOVES][0], s[LENGTH][LAST][0] = 0, _NONE
    for t in range(2 * len(axes)):
        extent[t][0] = 1
    for k in range(1, 3):
        for a in axes:
            state = case[k][a]
            if state >= 0:
                t, blocks = state >> _BITS, state & _MASK
                extent[t][0] = extent[t][0] // gcd(extent[t][0], blocks) * blocks
    for a in axes:
        w[SIZE][a] = case[0][a]
        w[NOW][a], w[GOAL][a] = _converted(s, case[1][a]), _converted(s, case[2][a])
    # If a layout itself has incompatible digits (such as halves and thirds of the same dim), digits may be held
    # together unless they overlap.
    s[LENGTH][EVEN][0] = 1 if _fit_together(w, NOW, True) and _fit_together(w, GOAL, True) else 0
    _hold(w, s)


def _converted(s: Cubes, state: int) -> int:
    """A state with its blocks as a stride, or its stride as blocks."""
    if state < 0:
        return state
    return state - (state & _MASK) + s[EXTENT][state >> _BITS][0] // (state & _MASK)


def _end(w: Cells, s: Cubes, done: Cells) -> None:
    """Reduce and gather what is left at the end of a walk."""
    gathered = 0
    for a in range(len(w[NOW])):
        if w[NOW][a] >= 0 and w[GOAL][a] < 0:
            gathered |= 1 << a
    _all_reduce(w, s, done, -1)
    _gather(w, s, done, gathered)


def _unfinished(w: Cells) -> bool:
    """Whether some axis does not hold its goal digit yet."""
    now, goal, some = w[NOW], w[GOAL], False
    for a in range(len(now)):
        some |= now[a] != goal[a] and goal[a] >= 0
    return some


def _split(w: Cells) -> int:
    """The axes that split the tensor now."""
    bits = 0
    for a in range(len(w[NOW])):
        if w[NOW][a] >= 0:
            bits |= 1 << a
    return bits


def _reshard_step(w: Cells, s: Cubes, done: Cells, kind: int, row: int) -> bool:
    """Apply the change in a row as a step of this kind, merged with the last step if possible. Return whether there was
    a change."""
    if _changed(w, row) == 0:
        return False
    now, before, change = w[NOW], w[BEFORE], w[row]
    at, split, axes = s[LENGTH][MOVES][0], _split(w), 0
    recorded = kind != SLICE or s[LENGTH][WHOLE][0] != 0
    if kind == s[LENGTH][LAST][0] and kind in (SLICE, _REDUCE_SCATTER, _PERMUTE):
        if recorded:
            at -= 1
            split = done[at][2] if at < len(done) else 0
    else:
        for a in range(len(now)):
            before[a] = now[a]
    for a in range(len(now)):
        if change[a] != KEEP:
            now[a] = change[a]
        if now[a] != before[a]:
            axes |= 1 << a
    _hold(w, s)
    s[LENGTH][LAST][0] = kind if axes else _NONE
    if recorded:
        if at < len(done):
            done[at][0] = kind if axes else -1
            done[at][1] = axes if axes else -1
            done[at][2] = (_split(w) if kind == _ALL_GATHER else split) if axes else -1
            for k in range(3, len(done[at])):
                done[at][k] = _converted(s, now[k - 3])
        s[LENGTH][MOVES][0] = at + 1 if axes else at
    return True


def _all_reduce(w: Cells, s: Cubes, done: Cells, group: int) -> None:
    """Reduce the partial axes of a group; -1: those that are whole in the goal."""
    _clear(w, TRIAL)
    for a in range(len(w[NOW])):
        if w[NOW][a] == PARTIAL and (w[GOAL][a] == REPLICATED if group < 0 else group >> a & 1):
            w[TRIAL][a] = REPLICATED
    _reshard_step(w, s, done, _ALL_REDUCE, TRIAL)


def _gather(w: Cells, s: Cubes, done: Cells, axes: int) -> None:
    """Gather these axes, one tensor dim after the other, as XLA does."""
    now, trial = w[NOW], w[TRIAL]
    while axes:
        last = -1
        for a in range(len(now)):
            if axes >> a & 1 and now[a] >> _BITS > last:
                last = now[a] >> _BITS
        _clear(w, TRIAL)
        for a in range(len(now)):
            if axes >> a & 1 and now[a] >> _BITS == last:
                trial[a] = REPLICATED
                axes &= ~(1 << a)
        _reshard_step(w, s, done, _ALL_GATHER, TRIAL)


def _enter(w: Cells, s: Cubes, done: Cells, kind: int, state: int, solid: bool) -> bool:
    """All free axes in this state (REPLICATED: slice, PARTIAL: reduce-scatter) take their digits.

    solid: an axis whose digit would hang takes the topmost free place in its tensor dim instead.
    """
    now, goal, change, free = w[NOW], w[GOAL], w[CHANGE], 0
    for a in range(len(now)):
        if now[a] == state and goal[a] >= 0 and w[HELD][a] == 0:
            free |= 1 << a
    if free == 0:
        return False
    for a in range(len(now)):
        change[a] = goal[a] if free >> a & 1 else KEEP
    while solid:
        hung = _hanging(w, s, CHANGE) & _changed(w, CHANGE)
        if hung == 0:
            break
        for a in range(len(goal)):
            if hung >> a & 1:
                change[a] = KEEP
    left = free & ~_changed(w, CHANGE)
    for a in range(len(goal)):
        if left >> a & 1:
            _place_on_top(w, s, a)
    return _reshard_step(w, s, done, kind, CHANGE)


def _place_on_top(w: Cells, s: Cubes, a: int) -> None:
    """Give axis a the topmost free place in the dim of its goal, if that is solid."""
    goal, change = w[GOAL], w[CHANGE]
    _joined(w, s, HAS, CHANGE, -1)
    s[LENGTH][WANTS][0] = 0
    for b in range(len(goal)):
        if goal[b] >= 0 and goal[b] >> _BITS == goal[a] >> _BITS:
            _add_spans(w, s, WANTS, GOAL, 1 << b)
    _minus(s, WANTS, HAS)
    _in_order(w, s, 1 << a, 0)
    _tile(w, s, WANTS, max(s[LENGTH][WANTS][0] - 1, 0), False, LEFT)
    if w[LEFT][a] != KEEP:
        change[a] = w[LEFT][a]
        if not (_solid(w, s, CHANGE) and _fit_together(w, CHANGE, s[LENGTH][EVEN][0] != 0)):
            change[a] = KEEP


def _departing(w: Cells, first: int) -> bool:
    """Write to ``CHANGE`` the digits of the free axes that make the same change of tensor dims as axis ``first``.
    Return whether ``first`` is the first of these axes."""
    now, goal = w[NOW], w[GOAL]
    _clear(w, CHANGE)
    for a in range(len(now)):
        leaves = now[a] >= 0 and goal[a] >= 0 and now[a] != goal[a] and w[HELD][a] == 0
        if a == first and not leaves:
            return False
        alike = now[a] >> _BITS == now[first] >> _BITS and goal[a] >> _BITS == goal[first] >> _BITS
        if leaves and alike:
            if a < first:
                return False
            w[CHANGE][a] = goal[a]
    return True


def _all_to_all(w: Cells, s: Cubes, done: Cells, solid: bool) -> bool:
    """All free axes that leave one tensor dim for another one together.

    solid: only if a partitioner can express it: the dims differ, and shards stay contiguous.
    """
    for first in range(len(w[NOW])):
        if _departing(w, first):
            apart = w[NOW][first] >> _BITS != w[GOAL][first] >> _BITS
            if not solid or (apart and _solid(w, s, CHANGE)):
                return _reshard_step(w, s, done, _ALL_TO_ALL, CHANGE)
    return False


def _sink(w: Cells, s: Cubes, done: Cells) -> bool:
    """A permute within a tensor dim that gives the lowest digits to the axes that are free to leave the dim. When they
    then leave, no digit hangs below theirs."""
    now, left = w[NOW], w[LEFT]
    for first in range(len(now)):
        if not _departing(w, first) or now[first] >> _BITS == w[GOAL][first] >> _BITS:
            continue
        inside, leaving = 0, _changed(w, CHANGE)
        for a in range(len(now)):
            if now[a] >= 0 and now[a] >> _BITS == now[first] >> _BITS:
                inside |= 1 << a
        _joined(w, s, HAS, NOW, inside)
        s[LENGTH][WANTS][0] = 0
        _in_order(w, s, inside & ~leaving, inside & leaving)
        if not _tile(w, s, HAS, 0, True, LEFT) or not _nested(s):
            continue
        for a in range(len(now)):
            w[TRIAL][a] = w[CHANGE][a] if w[CHANGE][a] != KEEP else left[a]
            if left[a] == now[a]:
                left[a] = KEEP
        if _solid(w, s, TRIAL):
            return _reshard_step(w, s, done, _PERMUTE, LEFT)
    return False


def _tangles(w: Cells, s: Cubes) -> int:
    """Write the groups of axes that are linked, because one holds what another wants, to ``TANGLES``; return how many
    there are. In each group, at least one axis is blocked."""
    tangles, held, k = s[TANGLES], w[HELD], 0
    blocked = 0
    for a in range(len(held)):
        moves = w[NOW][a] != w[GOAL][a]
        tangles[a][1] = 1 << a if moves else 0
        tangles[a][2] = held[a] if moves else 0
        blocked |= tangles[a][2]
    if blocked == 0:
        return 0
    for a in range(len(held)):
        for b in range(len(held)):
            if held[a] >> b & 1 and tangles[a][1] and tangles[b][1]:
                group, blocks = tangles[a][1] | tangles[b][1], tangles[a][2] | tangles[b][2]
                for c in range(len(held)):
                    if group >> c & 1:
                        tangles[c][1], tangles[c][2] = group, blocks
    for a in range(len(held)):
        if tangles[a][2] and tangles[a][1] & ((1 << a) - 1) == 0:
            tangles[k][0] = tangles[a][1]
            k += 1
    return k


def _exchange(w: Cells, s: Cubes, done: Cells, group: int, movers: bool) -> bool:
    """A permute among axes that block each other, after which each axis has its goal.

    Digits that no axis holds yet are first taken by axes that hold nothing (a slice or a reduce-scatter). Digits that
    no axis wants go to axes that are gathered later.

    movers: digits may also be taken by axes whose own digit no axis wants (an all-to-all).
    """
    now, goal, enter, more, rest = w[NOW], w[GOAL], 0, 0, 0
    _joined(w, s, HAS, NOW, group)
    _joined(w, s, WANTS, GOAL, group)
    if not _nested(s):
        return False
    for a in range(len(now)):
        if group >> a & 1:
            if goal[a] >= 0 and now[a] < 0:
                enter |= 1 << a
            elif goal[a] >= 0 and movers and _unwanted(w, s, a):
                more |= 1 << a
            elif goal[a] < 0 and now[a] >= 0:
                rest |= 1 << a
    if movers and more == 0:  # the same as without movers, which was already tried
        return False
    _minus(s, WANTS, HAS)
    _in_order(w, s, enter, more)
    if not _tile(w, s, WANTS, 0, True, CHANGE) or not _rounds(w, s):
        return False
    _joined(w, s, WANTS, GOAL, group)
    _add_spans(w, s, WANTS, NOW, _changed(w, CHANGE))
    _minus(s, HAS, WANTS)
    _in_order(w, s, rest, 0)
    if not _tile(w, s, HAS, 0, True, LEFT):
        return False
    _take(w, s, done)
    _permute(w, s, done, group, group)
    return True


def _rounds(w: Cells, s: Cubes) -> bool:
    """Write the round in which each axis takes its digit to ``TURN``: -1 for axes that take nothing, 0 for those that
    hold nothing; then, round by round, those that change between the same two dims. Return False if shards would
    become less contiguous on the way."""
    change, trial, turn, left, group, round = w[CHANGE], w[TRIAL], w[TURN], 0, 0, 0
    _clear(w, TRIAL)
    for a in range(len(change)):
        turn[a] = -1
        if change[a] != KEEP and w[NOW][a] >= 0:
            left |= 1 << a
        elif change[a] != KEEP:
            group |= 1 << a
    hung, moves, tried = _hanging(w, s, TRIAL), left != 0, 0
    while True:
        for a in range(len(change)):
            if group >> a & 1:
                turn[a], trial[a] = round, change[a]
        now = _hanging(w, s, TRIAL) if moves else 0
        if now & ~(hung & ~group) == 0:
            hung, left, tried, round = now, left & ~group, 0, round + 1
        elif round == 0:
            return False
        else:
            tried |= group
            for a in range(len(change)):
                if group >> a & 1:
                    trial[a] = KEEP
        if left == 0:
            return True
        group = 0
        for i in range(s[LENGTH][TOOK][0]):
            if group == 0 and (left & ~tried) >> w[TAKEN][i] & 1:
                group = _together(w, w[TAKEN][i], left)
        if group == 0:
            return False


def _together(w: Cells, first: int, axes: int) -> int:
    """The axes that change between the same two tensor dims in ``CHANGE`` as ``first``."""
    now, change, group = w[NOW], w[CHANGE], 0
    for a in range(len(now)):
        alike = now[a] >> _BITS == now[first] >> _BITS and change[a] >> _BITS == change[first] >> _BITS
        if axes >> a & 1 and alike:
            group |= 1 << a
    return group


def _take(w: Cells, s: Cubes, done: Cells) -> None:
    """Axes take the digits in ``CHANGE``: those that hold nothing together, the others round by round."""
    now, change, trial = w[NOW], w[CHANGE], w[TRIAL]
    for round in range(-1, len(now) + 1):
        kind = SLICE if round < 0 else _REDUCE_SCATTER if round == 0 else _ALL_TO_ALL
        for a in range(len(now)):
            mine = w[TURN][a] == max(round, 0) and (round > 0 or (now[a] == REPLICATED) == (round < 0))
            trial[a] = change[a] if mine and now[a] != change[a] else KEEP
        _reshard_step(w, s, done, kind, TRIAL)


def _unwanted(w: Cells, s: Cubes, a: int) -> bool:
    """Whether the axis holds only what is not in ``WANTS``."""
    state = w[NOW][a]
    low, high = state & _MASK, (state & _MASK) * w[SIZE][a]
    for i in range(s[LENGTH][WANTS][0]):
        wanted = s[WANTS][i]
        if wanted[0] == state >> _BITS and wanted[1] < high and low < wanted[2]:
            return False
    return state >= 0


def _relabel(w: Cells, s: Cubes, done: Cells, group: int) -> bool:
    """A permute that gives blocked axes their goals. The axes that held these digits take those given up for it; those
    that change again later get the lower digits, so that no digit hangs after they leave."""
    stuck, ends, goes_on = 0, 0, 0
    for a in range(len(w[NOW])):
        if group >> a & 1:
            if w[GOAL][a] >= 0 and w[HELD][a]:
                stuck |= 1 << a
            elif w[NOW][a] >= 0 and w[GOAL][a] < 0:
                ends |= 1 << a
            elif w[NOW][a] >= 0:
                goes_on |= 1 << a
    _joined(w, s, HAS, NOW, group)
    _joined(w, s, WANTS, GOAL, stuck)
    if not _nested(s):
        return False
    _minus(s, WANTS, HAS)
    if s[LENGTH][WANTS][0]:
        return False
    _joined(w, s, WANTS, GOAL, stuck)
    _minus(s, HAS, WANTS)
    _in_order(w, s, ends, goes_on)
    if not _tile(w, s, HAS, 0, True, LEFT):
        return False
    _permute(w, s, done, group, stuck)
    return True


def _permute(w: Cells, s: Cubes, done: Cells, group: int, fixed: int) -> None:
    """Of the group's axes, those in ``fixed`` take their goals, others take the digits in ``LEFT``, and the rest give
    their digits up. Partial axes are reduced first."""
    goal, left = w[GOAL], w[LEFT]
    _all_reduce(w, s, done, group)
    _clear(w, CHANGE)
    for a in range(len(goal)):
        if group >> a & 1:
            after = goal[a] if fixed >> a & 1 and goal[a] >= 0 else REPLICATED
            after = left[a] if left[a] != KEEP else after
            if after != w[NOW][a]:
                w[CHANGE][a] = after
    _reshard_step(w, s, done, _PERMUTE, CHANGE)


def _unblock(w: Cells, s: Cubes, done: Cells) -> bool:
    """Gather one axis that blocks another: one that is unsplit in the goal if possible, otherwise the smallest."""
    now, goal, size, holders, least = w[NOW], w[GOAL], w[SIZE], 0, -1
    for a in range(len(now)):
        if goal[a] >= 0 and now[a] != goal[a]:
            holders |= w[HELD][a]
    if holders == 0:
        return False
    _all_reduce(w, s, done, -1)
    for b in range(len(now)):
        if holders >> b & 1:
            unsplit = least >= 0 and (goal[b] < 0) != (goal[least] < 0)
            if least < 0 or (goal[b] < 0 if unsplit else size[b] < size[least]):
                least = b
    _gather(w, s, done, 1 << least)
    return True


# Changes of digits.


def _clear(w: Cells, row: int) -> None:
    """Set a row to ``KEEP``."""
    change = w[row]
    for a in range(len(change)):
        change[a] = KEEP


def _changed(w: Cells, row: int) -> int:
    """The axes that a row changes."""
    change, bits = w[row], 0
    for a in range(len(change)):
        if change[a] != KEEP:
            bits |= 1 << a
    return bits


def _apply(w: Cells, row: int) -> None:
    """Write the layout after a change to ``AFTER``."""
    now, change, after = w[NOW], w[row], w[AFTER]
    for a in range(len(now)):
        after[a] = change[a] if change[a] != KEEP else now[a]


def _apart(w: Cells, a: int, x: int, b: int, y: int, even: bool) -> bool:
    """Whether axes a and b can hold the digits x and y together: the digits do not overlap.

    even: all devices must have shards of equal size, too: within a dim, the stride of the upper digit is a multiple of
    the whole lower digit.
    """
    if x < 0 or y < 0 or x >> _BITS != y >> _BITS:
        return True
    low, high = x & _MASK, (x & _MASK) * w[SIZE][a]
    other, top = y & _MASK, (y & _MASK) * w[SIZE][b]
    if even:
        return low % top == 0 if low > other else other % high == 0
    return low >= top or other >= high


def _fit_together(w: Cells, row: int, even: bool) -> bool:
    """Whether all axes can hold their digits together after the change."""
    _apply(w, row)
    after = w[AFTER]
    for a in range(len(after)):
        for b in range(a):
            if not _apart(w, a, after[a], b, after[b], even):
                return False
    return True


def _hold(w: Cells, s: Cubes) -> None:
    """Update ``HELD`` from ``NOW``."""
    goal, now, even = w[GOAL], w[NOW], s[LENGTH][EVEN][0] != 0
    for a in range(len(now)):
        held = 0
        if goal[a] >= 0:
            for b in range(len(now)):
                if b != a and not _apart(w, a, goal[a], b, now[b], even):
                    held |= 1 << b
        w[HELD][a] = held


def _hanging(w: Cells, s: Cubes, row: int) -> int:
    """The axes whose digit hangs after the change."""
    _apply(w, row)
    after, size, out = w[AFTER], w[SIZE], 0
    for a in range(len(after)):
        state = after[a]
        if state >= 0:
            stride = state & _MASK
            fits = stride * size[a] == s[EXTENT][state >> _BITS][0]
            for b in range(len(after)):
                fits |= after[b] == state + stride * (size[a] - 1)
            if not fits:
                out |= 1 << a
    return out


def _solid(w: Cells, s: Cubes, row: int) -> bool:
    """Whether shards stay as contiguous as they are."""
    hung = _hanging(w, s, NOW) & ~_changed(w, row)
    return _hanging(w, s, row) & ~hung == 0


# Lists of spans.


def _put(s: Cubes, slot: int, t: int, low: int, high: int) -> None:
    """Append a span to a list."""
    k = s[LENGTH][slot][0]
    s[slot][k][0], s[slot][k][1], s[slot][k][2] = t, low, high
    s[LENGTH][slot][0] = k + 1


def _add_spans(w: Cells, s: Cubes, slot: int, row: int, axes: int) -> None:
    """Append the spans that the axes hold after a change to a list."""
    _apply(w, row)
    after = w[AFTER]
    for a in range(len(after)):
        if axes >> a & 1 and after[a] >= 0:
            stride = after[a] & _MASK
            _put(s, slot, after[a] >> _BITS, stride, stride * w[SIZE][a])


def _sort(s: Cubes, slot: int) -> None:
    """Sort a list of spans in place."""
    spans = s[slot]
    for i in range(1, s[LENGTH][slot][0]):
        t, low, high = spans[i][0], spans[i][1], spans[i][2]
        j = i
        while j > 0:
            u, edge, end = spans[j - 1][0], spans[j - 1][1], spans[j - 1][2]
            if not (t < u or (t == u and (low < edge or (low == edge and high < end)))):
                break
            spans[j][0], spans[j][1], spans[j][2] = u, edge, end
            j -= 1
        if j < i:
            spans[j][0], spans[j][1], spans[j][2] = t, low, high


def _join(s: Cubes, slot: int) -> None:
    """Sort a list of spans and merge adjacent ones."""
    spans, n = s[slot], s[LENGTH][slot][0]
    if n < 2:
        return
    _sort(s, slot)
    s[LENGTH][slot][0] = 0
    for i in range(n):
        t, low, high = spans[i][0], spans[i][1], spans[i][2]
        k = s[LENGTH][slot][0] - 1
        if k >= 0 and spans[k][0] == t and spans[k][2] == low:
            spans[k][2] = high
        else:
            _put(s, slot, t, low, high)


def _joined(w: Cells, s: Cubes, slot: int, row: int, axes: int) -> None:
    """Set a list to the joined spans that the axes hold after a change."""
    s[LENGTH][slot][0] = 0
    _add_spans(w, s, slot, row, axes)
    _join(s, slot)


def _minus(s: Cubes, slot: int, other: int) -> None:
    """Reduce one list to what lies outside of the other list."""
    for o in range(s[LENGTH][other][0]):
        t, low, high = s[other][o][0], s[other][o][1], s[other][o][2]
        s[LENGTH][CUT][0] = 0
        for i in range(s[LENGTH][slot][0]):
            u, begin, end = s[slot][i][0], s[slot][i][1], s[slot][i][2]
            if u != t or end <= low or high <= begin:
                _put(s, CUT, u, begin, end)
                continue
            if begin < low:
                _put(s, CUT, u, begin, low)
            if high < end:
                _put(s, CUT, u, high, end)
        s[LENGTH][slot][0] = 0
        for i in range(s[LENGTH][CUT][0]):
            _put(s, slot, s[CUT][i][0], s[CUT][i][1], s[CUT][i][2])
    _join(s, slot)


def _nested(s: Cubes) -> bool:
    """Whether all bounds of ``HAS`` and ``WANTS`` within a dim divide one another. If not, digits of 2 and 3 ways cut
    across each other."""
    s[LENGTH][CUT][0] = 0
    for slot in (HAS, WANTS):
        for i in range(s[LENGTH][slot][0]):
            for k in range(1, 3):
                _put(s, CUT, s[slot][i][0], s[slot][i][k], 0)
    _sort(s, CUT)
    bounds = s[CUT]
    for i in range(1, s[LENGTH][CUT][0]):
        if bounds[i][0] == bounds[i - 1][0] and bounds[i][1] % bounds[i - 1][1] != 0:
            return False
    return True


def _in_order(w: Cells, s: Cubes, first: int, then: int) -> None:
    """Write the axes of one set to ``ORDER``, followed by the axes of another set."""
    k = 0
    for axes in (first, then):
        for a in range(len(w[ORDER])):
            if axes >> a & 1:
                w[ORDER][k] = a
                k += 1
    s[LENGTH][ORDERED][0] = k


def _tile(w: Cells, s: Cubes, slot: int, begin: int, whole: bool, row: int) -> bool:
    """Whether axes of ``ORDER``, the first ones major, can take exactly the list's spans from ``begin`` on. Writes
    these axes to ``TAKEN`` and their digits to the row.

    whole: if False, digits that begin at the tops of the spans are enough.
    """
    _clear(w, row)
    s[LENGTH][TOOK][0] = 0
    for i in range(begin, s[LENGTH][slot][0]):
        t, low, high = s[slot][i][0], s[slot][i][1], s[slot][i][2]
        while low < high:
            found = -1
            for k in range(s[LENGTH][ORDERED][0]):
                a = w[ORDER][k]
                if w[row][a] == KEEP and high % (low * w[SIZE][a]) == 0:
                    found = a
                    break
            if found < 0:
                if whole:
                    return False
                break
            high //= w[SIZE][found]
            w[row][found] = (t << _BITS) + high
            w[TAKEN][s[LENGTH][TOOK][0]] = found
            s[LENGTH][TOOK][0] += 1
    return True
