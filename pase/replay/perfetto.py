"""What Perfetto draws between and beside events: who waited for whom in a collective, and how much is being sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from pase.files.json_values import JsonObject
from pase.replay.types import COLLECTIVE, OPERATIONS, Timeline

__all__ = ["counters", "flows"]


def _collectives(t: Timeline) -> list[int]:
    """Events that are collectives, by their start on the common clock."""
    found = np.flatnonzero(t.columns["kind"] == COLLECTIVE)
    order: list[int] = found[np.argsort(t.global_start_ns()[found], kind="stable")].tolist()
    return order


def flows(t: Timeline, zero_ns: float, first_lane: int) -> Iterator[JsonObject]:
    """An arrow in each collective of several ranks, from the rank that came last to each that waited for it.

    The k-th of an operation in a group is the same collective on every rank. first_lane: the track of lane 0.
    """
    starts, ranks = t.global_start_ns(), t.rank_of
    turn: Counter[tuple[int, int, int, int]] = Counter()
    together: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for i in _collectives(t):
        group, operation, iteration = (int(t.columns[c][i]) for c in ("group", "operation", "iteration"))
        at = (int(ranks[i]), group, operation, iteration)
        together[group, operation, iteration, turn[at]].append(i)
        turn[at] += 1
    number = 0
    for members in together.values():
        if len({int(ranks[i]) for i in members}) < 2:
            continue
        last = max(members, key=lambda i: float(starts[i]))
        for i in members:
            if ranks[i] == ranks[last]:
                continue
            end = float(starts[i]) + float(t.columns["duration_ns"][i])
            arrow: JsonObject = {"name": f"waited for rank {int(ranks[last])}", "cat": "wait", "id": number}
            from_ns, to_ns = float(starts[last]), max(end, float(starts[last]))
            for phase, event, ns in (("s", last, from_ns), ("f", i, to_ns)):
                lane = int(t.columns["lane"][event]) + first_lane
                place: JsonObject = {"pid": int(ranks[event]), "tid": lane, "ts": (ns - zero_ns) / 1e3}
                yield {**arrow, "ph": phase, **place} | ({"bp": "e"} if phase == "f" else {})
            number += 1


def counters(t: Timeline, zero_ns: float) -> Iterator[JsonObject]:
    """For each rank, GB/s of the collectives that are running, by operation: bytes over the time that they took."""
    starts, ranks = t.global_start_ns(), t.rank_of
    steps: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for i in _collectives(t):
        nbytes, length = int(t.columns["nbytes"][i]), float(t.columns["duration_ns"][i])
        if nbytes <= 0 or length <= 0:
            continue
        what = OPERATIONS[int(t.columns["operation"][i])] or "collective"
        start = float(starts[i])
        steps[int(ranks[i]), what] += [(start, nbytes / length), (start + length, -nbytes / length)]
    for (rank, what), changes in steps.items():
        running = 0
        rate = 0.0
        for ns, change in sorted(changes):
            running += 1 if change > 0 else -1
            rate = max(rate + change, 0.0) if running else 0.0
            at: JsonObject = {"ph": "C", "name": f"{what} GB/s", "pid": rank, "ts": (ns - zero_ns) / 1e3}
            yield {**at, "args": {"GB/s": rate}}
