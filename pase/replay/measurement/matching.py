"""Matches the events of different ranks that belong to one collective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pase.replay.types import COLLECTIVE, OPERATIONS, Problem, Timeline

__all__ = ["Match", "match_collectives"]

_ALL_REDUCE = OPERATIONS.index("all_reduce")


@dataclass(frozen=True, kw_only=True)
class Match:
    """One collective: the event of each rank that recorded it."""

    key: tuple[object, ...]
    """Identifies the collective within an iteration; the same in every iteration."""
    group: int
    iteration: int
    members: dict[int, int]
    """rank → event index."""


def match_collectives(t: Timeline) -> tuple[list[Match], list[Problem]]:
    """Returns the collectives of the whole timeline, matched by iteration, group, operation and order, and problems.

    Within an iteration, the k-th collective of a kind on a group is the same one on all ranks; NCCL and XLA require
    this. If ops have names (XLA), the k-th occurrence of a name is the same one. If the ranks of a group have different
    numbers of collectives in an iteration, these stay unmatched and are reported, because a wrong match would be worse.
    If they differ in the bytes of an all-reduce, which all ranks send alike, their traces hold different collectives
    (they are sampled or cut), and only kinds with equal bytes are matched in that group and iteration.
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
    unlike = {
        key
        for key, by_rank in counts.items()
        for some in zip(*by_rank.values(), strict=False)
        if len({int(t["nbytes"][e]) for e in some if t["nbytes"][e] >= 0}) > 1
    }
    different = {key[:2] for key in unlike if key[2] == _ALL_REDUCE}
    for key, by_rank in counts.items():
        if len({len(v) for v in by_rank.values()}) > 1 or (key in unlike and key[:2] in different):
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
        what = (
            f"for {uneven} kinds of collectives, the ranks' numbers or bytes per iteration differ; they are left "
            "unmatched"
        )
        problems.append(Problem(where="collectives", what=what))
    return out, problems
