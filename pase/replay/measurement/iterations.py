"""Measures the length of each iteration on the device, and decides which iterations are valid measurements.

An iteration ends when the device has finished everything that the step launched (found by correlation ids, not by
time), and the thread on which the step is marked has finished the step. It begins where the previous iteration ended.
So it does not matter whether the CPU runs ahead of its device, and consecutive iterations add up to the elapsed time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pase.replay.types import KINDS, Timeline, on_stream

__all__ = ["LONGER", "Iteration", "iterations", "warm_up"]

_ANNOTATION, _RUNTIME = KINDS.index("annotation"), KINDS.index("runtime")
_STEADY, _OTHER = 1.05, 1.25
"""Limits on the length of an iteration, relative to the median of the shorter two thirds. Beyond the first limit (and
their noise), an iteration at the beginning is warm-up. Beyond the second one, a later iteration did something else,
such as a checkpoint or an evaluation."""
LONGER = "longer than the others"
"""The reason why an iteration is left out although its length is a valid measurement."""
_SAME_OPS = 0.02
"""Iterations whose numbers of device ops differ by more than this fraction run different programs."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration of one rank: (begin_ns, end_ns] on the rank's clock."""

    rank: int
    number: int
    begin_ns: int
    end_ns: int
    ops: int
    """The number of device ops that it launched."""
    why_not: str = ""
    """Why its length is not a valid measurement; empty if it is."""
    partial: bool = False
    """Whether the trace has only a part of it, or has it out of order."""

    @property
    def length_ns(self) -> float:
        return float(self.end_ns - self.begin_ns)


def iterations(t: Timeline) -> dict[tuple[int, int], Iteration]:
    """Returns (rank, number) → iteration, for every mark with device ops. If marks share a number, the first counts."""
    gpu = np.flatnonzero(on_stream(t["kind"]) & (t["iteration"] >= 0))
    rank = t.rank_of
    on_thread = set(
        zip(
            rank[t["kind"] == _ANNOTATION].tolist(),
            t["start_ns"][t["kind"] == _ANNOTATION].tolist(),
            strict=True,
        )
    )
    out: dict[tuple[int, int], Iteration] = {}
    for r in t.ranks:
        mine = gpu[rank[gpu] == r]
        number, place = np.unique(t["iteration"][mine], return_inverse=True)
        first = np.full(len(number), np.iinfo(np.int64).max)
        last = np.full(len(number), np.iinfo(np.int64).min)
        np.minimum.at(first, place, t["start_ns"][mine])
        np.maximum.at(last, place, t.end_ns[mine])
        count = np.bincount(place, minlength=len(number))
        spans = {
            int(n): (int(a), int(b), int(c)) for n, a, b, c in zip(number, first, last, count, strict=True)
        }
        lost = _launches_without_op(t, r)
        _of_rank(t, r, spans, on_thread, lost, out)
    return out


def _of_rank(
    t: Timeline,
    rank: int,
    spans: dict[int, tuple[int, int, int]],
    on_thread: set[tuple[int, int]],
    lost: Counter[int],
    out: dict[tuple[int, int], Iteration],
) -> None:
    marks = sorted((m for m in t.marks if m.rank == rank), key=lambda m: m.start_ns)
    usually_lost = float(np.median([lost[m.iteration] for m in marks])) if marks else 0.0
    before: tuple[int, int] | None = None
    backlog = _backlog(t, rank)
    for m in marks:
        if m.iteration not in spans or (rank, m.iteration) in out:
            continue
        start, done, ops = spans[m.iteration]
        threaded = (rank, m.start_ns) in on_thread
        end = max(done, m.end_ns) if threaded else done
        begin, why = (m.start_ns if threaded else start), ""
        allowed = usually_lost + max(1.0, _SAME_OPS * ops)
        if before is not None and before[0] == m.iteration - 1:
            begin = before[1]
        elif threaded and m.start_ns < backlog <= start:
            begin = backlog
        elif threaded and done > m.end_ns + _SAME_OPS * (m.end_ns - m.start_ns):
            why = "the device runs behind its step and nothing shows where the previous iteration ended"
        elif not threaded:
            why = "nothing shows where the previous iteration ended"
        if not m.complete:
            why = "the trace does not contain all of it"
        elif lost[m.iteration] > allowed:
            why = f"{lost[m.iteration]} of its launches have no device op in the trace"
        elif end <= begin:
            why = "it ends before the previous iteration does"
        before = (m.iteration, end)
        partial = not m.complete or end <= begin or lost[m.iteration] > allowed
        out[rank, m.iteration] = Iteration(
            rank=rank,
            number=m.iteration,
            begin_ns=min(begin, end),
            end_ns=end,
            ops=ops,
            why_not=why,
            partial=partial,
        )


def _backlog(t: Timeline, rank: int) -> int:
    """Returns when the ops that were launched before the first iteration have ended: the iteration before ends there.

    They are the ops without an iteration that begin before the first one of an iteration. Far in the past if there are
    none.
    """
    ops = np.flatnonzero(on_stream(t["kind"]) & (t.rank_of == rank))
    ops = ops[np.argsort(t["start_ns"][ops], kind="stable")]
    known = np.flatnonzero(t["iteration"][ops] >= 0)
    earlier = ops[: known[0]] if len(known) else ops[:0]
    return int(t.end_ns[earlier].max(initial=-(1 << 62)))


def _launches_without_op(t: Timeline, rank: int) -> Counter[int]:
    """Returns iteration → number of launching calls without a device op. A call is recognized as launching if a call of
    the same name launches something elsewhere in the trace."""
    gpu = on_stream(t["kind"]) & (t.rank_of == rank)
    calls = np.flatnonzero((t["kind"] == _RUNTIME) & (t.rank_of == rank) & (t["correlation"] >= 0))
    launched = np.isin(t["correlation"][calls], t["correlation"][gpu])
    names = np.zeros(len(t.names), dtype=bool)
    names[t["name"][calls[launched]]] = True
    bare = calls[~launched & names[t["name"][calls]]]
    return Counter(t["iteration"][bare].tolist())


def warm_up(of: dict[tuple[int, int], Iteration]) -> dict[int, str]:
    """Returns iteration → why it does not measure the steady run, for iterations that every rank has.

    An iteration is left out if its beginning or end is not in the trace, if it runs different device ops from most
    others, or if it is longer than most others. At the beginning of the run, longer means by more than noise. Later it
    means by a quarter, because a steady run also has iterations that are somewhat longer. If no iteration would be
    left, only those without a positive length are left out.
    """
    ranks = {r for r, _ in of}
    have = Counter(i for _, i in of)
    every = sorted(i for i, n in have.items() if n == len(ranks))
    out: dict[int, str] = {}
    for r, i in sorted(of):
        if i in every and of[r, i].why_not:
            out.setdefault(i, f"rank {r}: {of[r, i].why_not}" if len(ranks) > 1 else of[r, i].why_not)
    for r in sorted(ranks):
        usual = Counter(of[r, i].ops for i in every).most_common(1)[0][0] if every else 0
        share = sum(abs(of[r, i].ops - usual) <= _SAME_OPS * usual for i in every)
        for i in every:
            ops = of[r, i].ops
            if 2 * share > len(every) and abs(ops - usual) > _SAME_OPS * usual:
                out.setdefault(i, f"{ops} device ops where the others have {usual}")
    left = [i for i in every if i not in out]
    if not left:
        return {i: why for i, why in out.items() if any(of[r, i].length_ns <= 0 for r in ranks)}
    return out | _too_long({i: max(of[r, i].length_ns for r in ranks) for i in left})


def _too_long(length: dict[int, float]) -> dict[int, str]:
    if len(length) < 3:
        return {}
    short = np.sort(list(length.values()))[: max(3, (2 * len(length) + 2) // 3)]
    middle = float(np.median(short))
    noise = 1.4826 * float(np.median(np.abs(short - middle)))
    limit = middle + max((_STEADY - 1) * middle, 3 * noise)
    out: dict[int, str] = {}
    for place, i in enumerate(sorted(length)):
        beginning = len(out) == place
        if length[i] > (limit if beginning else max(limit, _OTHER * middle)):
            out[i] = f"{length[i] / middle - 1:.0%} {LONGER}"
    return out if len(length) - len(out) >= 2 else {}
