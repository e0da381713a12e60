"""Makes Perfetto's flows and counters: arrows between ranks that wait for each other, bandwidth, and memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from pase.files.json_values import JsonObject
from pase.replay.types import COLLECTIVE, KINDS, OPERATIONS, Timeline

__all__ = ["MEMORY", "counters", "flows"]

MEMORY = KINDS.index("memory")


def _collectives(t: Timeline) -> list[int]:
    """Returns the events that are collectives, sorted by start on the common clock."""
    found = np.flatnonzero(t.columns["kind"] == COLLECTIVE)
    order: list[int] = found[np.argsort(t.global_start_ns()[found], kind="stable")].tolist()
    return order


def flows(t: Timeline, zero_ns: float, first_lane: int) -> Iterator[JsonObject]:
    """Yields arrows from the last rank of each shared collective to each rank that waited for it.

    In a predicted timeline, it also yields an arrow from each transfer to the work that needed it. The k-th occurrence
    of an operation in a group is the same collective on every rank.

    zero_ns: the time that is drawn as 0. first_lane: the track of lane 0.
    """

    def arrow(
        name: str, number: int, start: tuple[int, float], end: tuple[int, float]
    ) -> Iterator[JsonObject]:
        for phase, (event, ns) in (("s", start), ("f", end)):
            place: JsonObject = {"pid": int(ranks[event]), "tid": int(t.columns["lane"][event]) + first_lane}
            one: JsonObject = {
                "name": name,
                "cat": "wait",
                "id": number,
                "ph": phase,
                "ts": (ns - zero_ns) / 1e3,
            }
            yield {**one, **place} | ({"bp": "e"} if phase == "f" else {})

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
            from_ns, to_ns = float(starts[last]), max(end, float(starts[last]))
            yield from arrow(f"waited for rank {int(ranks[last])}", number, (last, from_ns), (i, to_ns))
            number += 1
    for sent, needing in _needed(t):
        end = float(starts[sent]) + float(t.columns["duration_ns"][sent])
        waited = float(starts[needing]) - end < _AT_ONCE_NS
        name = f"{'waited for' if waited else 'needed'} {t.names[int(t.columns['name'][sent])]}"
        yield from arrow(name, number, (sent, float(starts[sent])), (needing, float(starts[needing])))
        number += 1


_AT_ONCE_NS = 2.0
"""Differences below this are due to rounding to integer nanoseconds."""


def _needed(t: Timeline) -> Iterator[tuple[int, int]]:
    """Yields (collective, the work that needed its result) of a predicted timeline.

    A predicted timeline has no launches, and the two have the same correlation. In a measured timeline, a correlation
    connects an op with the call that launched it, so nothing is yielded.
    """
    c, kind = t.columns["correlation"], t.columns["kind"]
    if np.isin(kind, (KINDS.index("host"), KINDS.index("runtime"))).any():
        return
    sent = {int(c[i]): i for i in np.flatnonzero((kind == COLLECTIVE) & (c >= 0)).tolist()}
    for i in np.flatnonzero((kind != COLLECTIVE) & (c >= 0)).tolist():
        if int(c[i]) in sent:
            yield sent[int(c[i])], i


def counters(t: Timeline, zero_ns: float) -> Iterator[JsonObject]:
    """Yields counters for each rank.

    They are the GB/s of running collectives by operation (the bytes of each divided by its duration), and the bytes of
    memory events by name.
    """
    starts, ranks = t.global_start_ns(), t.rank_of
    for i in np.flatnonzero((t.columns["kind"] == MEMORY) & (t.columns["nbytes"] >= 0)).tolist():
        name = t.names[int(t.columns["name"][i])].strip("[]")
        what = "memory" if name == "memory" else f"memory: {name}"
        held: JsonObject = {
            "ph": "C",
            "name": what,
            "pid": int(ranks[i]),
            "ts": (float(starts[i]) - zero_ns) / 1e3,
        }
        yield {**held, "args": {"GiB": int(t.columns["nbytes"][i]) / 2**30}}
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
