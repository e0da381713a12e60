"""Compiled helpers of ``kernels_walk``: the state of a walk from one layout to another, and spans of digits.

The state of a walk is two integer arrays, processed with loops, because this compiles and loads ten times as fast as
code that allocates arrays.

``w``, int64 [rows, axes]: ``NOW`` is the current layout and ``GOAL`` the final one. ``SIZE`` is the size of each axis.
``HELD`` is the set of axes that hold a part of an axis's goal (a bit set, like all sets of axes). ``CHANGE``, ``TRIAL``
and ``LEFT`` are new digits of axes, or ``KEEP`` for an axis that keeps its digit. ``ORDER`` and ``TAKEN`` are lists of
axes. ``TURN`` is the round in which each axis takes its new digit. ``BEFORE`` is the layout before the last step.

``s``, int64 [slots, places, 3]: lists of spans (tensor dim, low, high). The slot ``LENGTH`` has the length of each
list, the number of steps, and the kind of the last step (``LAST``). ``EXTENT`` has the extent of each tensor dim.
"""

from __future__ import annotations

from pase.compiled import jit
from pase.tables.layouts import _DIM

__all__ = [
    "BEFORE",
    "BITS",
    "CHANGE",
    "EVEN",
    "EXTENT",
    "GOAL",
    "HAS",
    "HELD",
    "KEEP",
    "LAST",
    "LEFT",
    "LENGTH",
    "MASK",
    "MOVES",
    "NOW",
    "ROWS",
    "SIZE",
    "SLOTS",
    "TAKEN",
    "TANGLES",
    "TOOK",
    "TRIAL",
    "TURN",
    "WANTS",
    "add_spans",
    "apart",
    "changed",
    "clear",
    "fit_together",
    "hanging",
    "hold",
    "in_order",
    "joined",
    "minus",
    "nested",
    "stays_solid",
    "tile",
]

KEEP = -1 << 60
BITS, MASK = _DIM.bit_length() - 1, _DIM - 1  # a digit is a tensor dim and a stride
NOW, GOAL, SIZE, HELD, CHANGE, TRIAL, LEFT, ORDER, TAKEN, TURN, BEFORE, ROWS = range(12)
HAS, WANTS, CUT, EXTENT, TANGLES, LENGTH, SLOTS = range(7)
MOVES, ORDERED, TOOK, EVEN, LAST = 3, 4, 5, 6, 7  # indices into LENGTH after those of the lists of spans


@jit()
def clear(w, row):
    """Set a row to ``KEEP``."""
    for a in range(w.shape[1]):
        w[row, a] = KEEP


@jit()
def changed(w, row):
    """The axes that a row changes, as a bit set."""
    bits = 0
    for a in range(w.shape[1]):
        if w[row, a] != KEEP:
            bits |= 1 << a
    return bits


@jit()
def put(s, slot, t, low, high):
    """Append a span to a list."""
    k = s[LENGTH, slot, 0]
    s[slot, k, 0], s[slot, k, 1], s[slot, k, 2] = t, low, high
    s[LENGTH, slot, 0] = k + 1


@jit()
def add_spans(w, s, slot, row, axes):
    """Append the spans of the axes' states in a row to a list. An axis that keeps its digit has its state in
    ``NOW``."""
    for a in range(w.shape[1]):
        state = w[row, a] if w[row, a] != KEEP else w[NOW, a]
        if axes >> a & 1 and state >= 0:
            put(s, slot, state >> BITS, (state & MASK), (state & MASK) * w[SIZE, a])


@jit()
def sort(s, slot):
    """Sort a list of spans in place."""
    for i in range(1, s[LENGTH, slot, 0]):
        t, low, high = s[slot, i, 0], s[slot, i, 1], s[slot, i, 2]
        j = i
        while j > 0:
            u, edge = s[slot, j - 1, 0], s[slot, j - 1, 1]
            if not (t < u or (t == u and (low < edge or (low == edge and high < s[slot, j - 1, 2])))):
                break
            for k in range(3):
                s[slot, j, k] = s[slot, j - 1, k]
            j -= 1
        s[slot, j, 0], s[slot, j, 1], s[slot, j, 2] = t, low, high


@jit()
def join(s, slot):
    """Sort a list of spans and merge adjacent ones, as ``reshard_path._joined``."""
    sort(s, slot)
    n, k = s[LENGTH, slot, 0], 0
    for i in range(n):
        if k > 0 and s[slot, k - 1, 0] == s[slot, i, 0] and s[slot, k - 1, 2] == s[slot, i, 1]:
            s[slot, k - 1, 2] = s[slot, i, 2]
        else:
            for c in range(3):
                s[slot, k, c] = s[slot, i, c]
            k += 1
    s[LENGTH, slot, 0] = k


@jit()
def joined(w, s, slot, row, axes):
    """Set a list to the joined spans of the axes' states in a row."""
    s[LENGTH, slot, 0] = 0
    add_spans(w, s, slot, row, axes)
    join(s, slot)


@jit()
def minus(s, slot, other):
    """Reduce one list to what lies outside of the other list."""
    for o in range(s[LENGTH, other, 0]):
        t, low, high = s[other, o, 0], s[other, o, 1], s[other, o, 2]
        s[LENGTH, CUT, 0] = 0
        for i in range(s[LENGTH, slot, 0]):
            u, begin, end = s[slot, i, 0], s[slot, i, 1], s[slot, i, 2]
            if u != t or end <= low or high <= begin:
                put(s, CUT, u, begin, end)
                continue
            if begin < low:
                put(s, CUT, u, begin, low)
            if high < end:
                put(s, CUT, u, high, end)
        s[LENGTH, slot, 0] = 0
        for i in range(s[LENGTH, CUT, 0]):
            put(s, slot, s[CUT, i, 0], s[CUT, i, 1], s[CUT, i, 2])
    join(s, slot)


@jit()
def nested(s):
    """Whether all bounds of ``HAS`` and ``WANTS`` within a dim divide one another."""
    s[LENGTH, CUT, 0] = 0
    for slot in (HAS, WANTS):
        for i in range(s[LENGTH, slot, 0]):
            for k in range(1, 3):
                put(s, CUT, s[slot, i, 0], s[slot, i, k], 0)
    sort(s, CUT)
    for i in range(1, s[LENGTH, CUT, 0]):
        if s[CUT, i, 0] == s[CUT, i - 1, 0] and s[CUT, i, 1] % s[CUT, i - 1, 1] != 0:
            return False
    return True


@jit()
def in_order(w, s, first, then):
    """Write the axes of one set to ``ORDER``, followed by the axes of another set."""
    k = 0
    for axes in (first, then):
        for a in range(w.shape[1]):
            if axes >> a & 1:
                w[ORDER, k] = a
                k += 1
    s[LENGTH, ORDERED, 0] = k


@jit()
def tile(w, s, slot, begin, whole, row):
    """Whether axes of ``ORDER`` can take exactly the list's spans from ``begin`` on. Writes these axes to ``TAKEN`` and
    their digits to the row. whole: if False, digits that begin at the tops of the spans are enough."""
    clear(w, row)
    s[LENGTH, TOOK, 0] = 0
    for i in range(begin, s[LENGTH, slot, 0]):
        t, low, high = s[slot, i, 0], s[slot, i, 1], s[slot, i, 2]
        while low < high:
            found = -1
            for k in range(s[LENGTH, ORDERED, 0]):
                a = w[ORDER, k]
                if w[row, a] == KEEP and high % (low * w[SIZE, a]) == 0:
                    found = a
                    break
            if found < 0:
                if whole:
                    return False
                break
            high //= w[SIZE, found]
            w[row, found] = (t << BITS) + high
            w[TAKEN, s[LENGTH, TOOK, 0]] = found
            s[LENGTH, TOOK, 0] += 1
    return True


@jit()
def apart(w, a, x, b, y, even):
    """Whether axes a and b can hold the digits x and y together, as ``reshard_path._compatible`` or ``_disjoint``."""
    if x < 0 or y < 0 or x >> BITS != y >> BITS:
        return True
    low, high = x & MASK, (x & MASK) * w[SIZE, a]
    other, top = y & MASK, (y & MASK) * w[SIZE, b]
    if even:
        return low % top == 0 if low > other else other % high == 0
    return low >= top or other >= high


@jit()
def fit_together(w, row, even):
    """Whether all axes can hold their digits together after the change."""
    n, fits = w.shape[1], True
    for a in range(n):
        x = w[row, a] if w[row, a] != KEEP else w[NOW, a]
        for b in range(a):
            y = w[row, b] if w[row, b] != KEEP else w[NOW, b]
            fits &= apart(w, a, x, b, y, even)
    return fits


@jit()
def hold(w, s):
    """Update ``HELD`` from ``NOW``."""
    n, even = w.shape[1], s[LENGTH, EVEN, 0] != 0
    for a in range(n):
        held = 0
        for b in range(n):
            if w[GOAL, a] >= 0 and b != a and not apart(w, a, w[GOAL, a], b, w[NOW, b], even):
                held |= 1 << b
        w[HELD, a] = held


@jit()
def hanging(w, s, row):
    """A bit set, as ``_LayoutWalk._hanging``. row: the change; ``NOW`` for no change."""
    n, out = w.shape[1], 0
    for a in range(n):
        state = w[row, a] if w[row, a] != KEEP else w[NOW, a]
        if state >= 0:
            high = (state & MASK) * w[SIZE, a]
            fits = high == s[EXTENT, state >> BITS, 0]
            for b in range(n):
                other = w[row, b] if w[row, b] != KEEP else w[NOW, b]
                fits |= other == state - (state & MASK) + high
            if not fits:
                out |= 1 << a
    return out


@jit()
def stays_solid(w, s, row):
    """As ``_LayoutWalk._solid``."""
    hung = hanging(w, s, NOW) & ~changed(w, row)
    return hanging(w, s, row) & ~hung == 0
