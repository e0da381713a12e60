"""Finds hand-offs between threads of one rank that start and await each other, such as PyTorch's main and autograd
threads."""

from __future__ import annotations

import numpy as np

from pase.replay.graph import EDGE
from pase.replay.measurement.tasks import RankProgram, Thread
from pase.replay.types import KINDS, Mark, Timeline

__all__ = ["add_handoffs", "main_lane"]

HOST, ANNOTATION = KINDS.index("host"), KINDS.index("annotation")
_IDLE_NS = 200_000
"""A thread that has no event for this long may be waiting for another thread."""
_OVERHANG = 0.1
"""The fraction of the gap by which the other thread may continue to work after the gap."""


def main_lane(t: Timeline, mark: Mark) -> int:
    """Returns the thread on which the step is marked; −1 if the mark is not an annotation."""
    found = (t["start_ns"] == mark.start_ns) & (t["kind"] == ANNOTATION)
    lanes = [int(x) for x in t["lane"][found] if t.lanes[int(x)].rank == mark.rank]
    return lanes[0] if lanes else -1


def add_handoffs(
    t: Timeline,
    p: RankProgram,
    threads: list[Thread],
    call_task: dict[int, int],
    work_task: dict[int, int],
    mark: Mark,
) -> None:
    """Adds the hand-offs between threads to the program.

    A thread that idles while another one works from the start to the end of the gap started and awaited that work.
    """
    s0 = mark.start_ns
    main = main_lane(t, mark)
    if main < 0 and threads:
        main = min(threads, key=lambda x: int(x.busy[0, 0])).lane
    started_by: dict[int, set[int]] = {x.lane: {x.lane} for x in threads}
    for a in threads:
        # A hand-off goes from the thread that starts the work. ``started_by`` excludes the way back (a cycle).
        begins = np.r_[mark.start_ns, t.end_ns[a.calls]] if len(a.calls) else np.zeros(0, np.int64)
        for k, c in enumerate([*a.calls.tolist(), -1]):
            # The gap is before call c, or after the last call.
            low = int(begins[k])
            high = int(t["start_ns"][c]) if c >= 0 else int(max(low, mark.end_ns))
            gap = _longest_gap(a.busy, low, high)
            if gap is None:
                continue
            for b in threads:
                if b.lane in started_by[a.lane] or b.lane == main or (a.lane != main and (k == 0 or c < 0)):
                    continue
                inside = b.calls[(t["start_ns"][b.calls] >= gap[0]) & (t.end_ns[b.calls] <= gap[1])]
                if not len(inside):
                    continue
                spans = b.busy[(b.busy[:, 1] > gap[0]) & (b.busy[:, 0] < gap[1])]
                first, last = int(spans[0, 0]), int(spans[-1, 1])
                # The other thread may continue with other work after it has handed back.
                if last - gap[1] <= _OVERHANG * (gap[1] - gap[0]):
                    last = min(last, int(gap[1]))
                covered = int(np.minimum(spans[:, 1], gap[1]).sum() - np.maximum(spans[:, 0], gap[0]).sum())
                if first < gap[0] or last > gap[1] or covered < 0.5 * (gap[1] - gap[0]):
                    continue
                after = work_task[c] if c >= 0 else _tail(p, a)
                device = (a.label, "thread")
                key = p.keys[after]
                start = p.start[after]
                before = p.task(("before hand-off", *key), device, "hand over", HOST, start, int(gap[0]) - s0)
                for (x, y), kind in list(p.edges.items()):
                    if y == after:
                        del p.edges[(x, y)]
                        p.edges[(x, before)] = kind
                if p.root == after:
                    p.root = before
                p.start[after] = int(gap[1]) - s0
                p.edge(before, after, "program")
                head, final = work_task[int(inside[0])], call_task[int(inside[-1])]
                p.start[head] = first - s0
                # The gap ends when the other thread has finished its work after its last call in the gap.
                ending = p.task(
                    ("hand back", *p.keys[final]),
                    (b.label, "thread"),
                    "finish",
                    HOST,
                    p.end[final],
                    last - s0,
                )
                p.edge(before, head, "handoff")
                _put_behind(p, final, ending)
                p.edge(ending, after, "handoff")
                for lanes in started_by.values():
                    if b.lane in lanes:
                        lanes |= started_by[a.lane]
                break


def _put_behind(p: RankProgram, final: int, ending: int) -> None:
    """Inserts the task that hands back after the thread's last call in the gap. The tasks that followed that call on
    its thread now follow the inserted task."""
    for (x, y), kind in list(p.edges.items()):
        if x == final and kind == EDGE["program"]:
            del p.edges[(x, y)]
            p.edges[(ending, y)] = kind
            p.start[y] = max(p.start[y], p.end[ending])
            p.end[y] = max(p.end[y], p.start[y])
    p.edge(final, ending, "program")


def _tail(p: RankProgram, a: Thread) -> int:
    return p.keys.index(("tail", a.label, p.rank))


def _longest_gap(busy: np.ndarray, low: int, high: int) -> tuple[int, int] | None:
    """Returns the longest idle interval of a thread within [low, high); None if it is shorter than _IDLE_NS."""
    if high - low < _IDLE_NS:
        return None
    inside = busy[(busy[:, 1] > low) & (busy[:, 0] < high)]
    edges = np.r_[low, inside.ravel(), high].reshape(-1, 2)
    length = edges[:, 1] - edges[:, 0]
    i = int(length.argmax())
    return (int(edges[i, 0]), int(edges[i, 1])) if length[i] >= _IDLE_NS else None
