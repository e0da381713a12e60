"""Inserts collectives into a measured graph, after given tasks on the same stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.replay.graph import EDGE, DataflowGraph, launching_calls
from pase.replay.types import COLLECTIVE

__all__ = ["Inserted", "insert_after"]


@dataclass(frozen=True, kw_only=True)
class Inserted:
    """A collective to insert."""

    name: str
    duration_ns: float
    nbytes: int
    operation: int
    ways: int


def insert_after(g: DataflowGraph, new: Mapping[int, Sequence[Inserted]]) -> DataflowGraph:
    """Returns the graph with collectives after the given device tasks. The successors of such a task wait for them.

    The thread that launched the task launches them, too. Each launch takes the median time of the thread's launches.
    """
    if not new:
        return g
    n = len(g)
    names = dict.fromkeys(g.names)
    rows = [(i, x) for i, many in sorted(new.items()) for x in many]
    names |= dict.fromkeys(x.name for _, x in rows)
    number = {name: k for k, name in enumerate(names)}
    last: dict[int, int] = {}
    chain: list[tuple[int, int]] = []
    for k, (i, _) in enumerate(rows):
        chain.append((last.get(i, i), n + k))
        last[i] = n + k
    src = np.array([last.get(a, a) for a in g.src.tolist()], dtype=np.int64)
    carried = replace(
        g.carried, src=np.array([last.get(a, a) for a in g.carried.src.tolist()], dtype=np.int64)
    )
    duration = g.duration_ns.copy()
    call_of = launching_calls(g)
    costs = _launch_costs(g, call_of)
    for op, many in new.items():
        if op in call_of:
            duration[call_of[op]] += costs[int(g.device[call_of[op]])] * len(many)
    of = np.array([i for i, _ in rows], dtype=np.int64)
    added = [x for _, x in rows]

    def more(column: np.ndarray, values: Sequence[float]) -> np.ndarray:
        return np.concatenate([column, np.array(values, dtype=column.dtype)])

    zeros = [0.0] * len(rows)
    return replace(
        g,
        names=tuple(names),
        name=more(g.name, [number[x.name] for x in added]),
        kind=more(g.kind, [COLLECTIVE] * len(rows)),
        device=np.concatenate([g.device, g.device[of]]),
        duration_ns=np.concatenate([duration, [x.duration_ns for x in added]]),
        src=np.concatenate([src, [a for a, _ in chain]]).astype(np.int64),
        dst=np.concatenate([g.dst, [b for _, b in chain]]).astype(np.int64),
        lag_ns=np.concatenate([g.lag_ns, zeros]),
        edge_kind=more(g.edge_kind, [EDGE["stream"]] * len(rows)),
        gang=more(g.gang, [-1] * len(rows)),
        priority=more(g.priority, zeros),
        release_ns=more(g.release_ns, zeros),
        nbytes=more(g.nbytes, [x.nbytes for x in added]),
        operation=more(g.operation, [x.operation for x in added]),
        ways=more(g.ways, [x.ways for x in added]),
        event=more(g.event, [-1] * len(rows)),
        key=(*g.key, *(("inserted", int(i), k) for k, (i, _) in enumerate(rows))),
        carried=carried,
    )


def _launch_costs(g: DataflowGraph, call_of: Mapping[int, int]) -> dict[int, float]:
    """Returns thread → median ns of a launch, including the work before it."""
    calls = np.array(sorted(set(call_of.values())), dtype=np.int64)
    before = g.before_on_thread
    cost = g.duration_ns[calls] + [g.duration_ns[before[c]] if c in before else 0.0 for c in calls.tolist()]
    return {int(d): float(np.median(cost[g.device[calls] == d])) for d in np.unique(g.device[calls])}
