"""Which events of different ranks are one collective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pase.replay.types import COLLECTIVE, Problem, Timeline

__all__ = ["Match", "match_collectives"]


@dataclass(frozen=True, kw_only=True)
class Match:
    """One collective: the event index of each rank that left a trace of it."""

    key: tuple[object, ...]
    """Which collective of an iteration it is, the same in every iteration."""
    group: int
    iteration: int
    members: dict[int, int]
    """rank → event index."""


def match_collectives(t: Timeline) -> tuple[list[Match], list[Problem]]:
    """Collectives of the whole timeline, matched by iteration, group, operation and order.

    Within an iteration the k-th collective of a kind on a group is the same on all ranks (NCCL and XLA
    demand it); where the op has a name (XLA), its k-th occurrence is. An iteration in which the ranks
    disagree on the count is left unmatched for that group, and reported: better no pair than a wrong one.
    """
    events = np.flatnonzero(t["kind"] == COLLECTIVE)
    events = events[np.argsort(t["start_ns"][events], kind="stable")]
    ranks = t.rank_of[events].tolist()
    counts: dict[tuple[object, ...], dict[int, list[int]]] = {}
    named = bool(t.dataflow) or not any("ccl" in t.names[i] for i in np.unique(t["name"][events]).tolist())
    iteration, group = t["iteration"][events].tolist(), t["group"][events].tolist()
    name, operation = t["name"][events].tolist(), t["operation"][events].tolist()
    for i, e in enumerate(events.tolist()):
        members = t.groups[group[i]] if group[i] >= 0 else None
        who = members.ranks if members and members.ranks else (members.name if members else "")
        key: tuple[object, ...] = (iteration[i], who, operation[i], t.names[name[i]] if named else "")
        counts.setdefault(key, {}).setdefault(ranks[i], []).append(e)
    out: list[Match] = []
    uneven = 0
    for key, by_rank in counts.items():
        if len({len(v) for v in by_rank.values()}) > 1:
            uneven += 1
            continue
        for k in range(len(next(iter(by_rank.values())))):
            members = {r: v[k] for r, v in sorted(by_rank.items())}
            first = next(iter(members.values()))
            group_of = int(t["group"][first])
            out.append(Match(key=(*key[1:], k), group=group_of, iteration=int(str(key[0])), members=members))
    out.sort(key=lambda m: int(t["start_ns"][next(iter(m.members.values()))]))
    problems = []
    if uneven:
        what = f"{uneven} kinds of collectives stand unequally often in the ranks' iterations; left unmatched"
        problems.append(Problem(where="collectives", what=what))
    return out, problems
