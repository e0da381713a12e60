"""Common code for XLA traces: module executions as iterations, container ops, overlapping ops, and HLO facts."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

import numpy as np

from pase.replay.traces.hlo import HloFacts
from pase.replay.types import BESIDE, COLLECTIVE, OPERATIONS, Group, Lane, Mark, Timeline, on_stream

__all__ = ["Executions", "describe", "untangle"]

_CONTAINER = re.compile(r"^(while|call|conditional|async-start)(\.\d+)*$")
_MOST_LANES = 16


class Executions:
    """Collects the executions of modules, by (device, module, run)."""

    def __init__(self) -> None:
        self.spans: dict[tuple[int, str, str], list[int]] = {}

    def add(self, device: int, module: str, run: str, start: int, end: int) -> None:
        span = self.spans.setdefault((device, module, run), [start, end, 0])
        span[0], span[1] = min(span[0], start), max(span[1], end)
        span[2] += end - start

    def main(self) -> str:
        """Returns the module that ran longest, of those that ran more than once if any; "" if nothing ran."""
        total: dict[str, int] = defaultdict(int)
        runs: dict[str, set[str]] = defaultdict(set)
        for (_, module, run), span in self.spans.items():
            total[module] += span[2]
            runs[module].add(run)
        return max(total, key=lambda m: (len(runs[m]) > 1, total[m]), default="")

    def marks(self, rank: int) -> list[tuple[int, Mark]]:
        """Returns (device, mark) for every execution of the main module. The first one is often cut by the profiler."""
        main = self.main()
        by_device: dict[int, list[list[int]]] = defaultdict(list)
        for (device, module, _), span in self.spans.items():
            if module == main:
                by_device[device].append(span)
        out = []
        for device, spans in by_device.items():
            for i, (start, end, _) in enumerate(sorted(spans)):
                out.append((device, Mark(rank=rank, iteration=i, start_ns=start, end_ns=max(end, start + 1))))
        return out


def describe(t: Timeline, facts: HloFacts) -> Timeline:
    """Returns the timeline with kinds, bytes, groups and data flow from the HLO of its main module."""
    nbytes, group = t["nbytes"].copy(), t["group"].copy()
    kind, operation = t["kind"].copy(), t["operation"].copy()
    sends = {k: OPERATIONS.index(facts.kinds[n]) for k, n in enumerate(t.names) if n in facts.kinds}
    sent = np.isin(t["name"], list(sends)) & on_stream(kind)
    kind[sent] = COLLECTIVE
    operation[sent] = [sends[k] for k in t["name"][sent].tolist()]
    groups = list(t.groups)
    if (group[sent] < 0).any():
        whole = Group(name="")
        groups += [] if whole in groups else [whole]
        group[sent & (group < 0)] = groups.index(whole)
    known = {g.ranks: i for i, g in enumerate(groups)}
    for i in np.flatnonzero(kind == COLLECTIVE).tolist():
        name = t.names[int(t["name"][i])]
        if name not in facts.nbytes:
            continue
        nbytes[i] = facts.nbytes[name]
        ranks = next((r for r in facts.groups.get(name, ()) if int(t.rank_of[i]) in r), ())
        if ranks:
            if ranks not in known:
                known[ranks] = len(groups)
                groups.append(Group(name=f"replicas {ranks}", ranks=ranks))
            group[i] = known[ranks]
    columns = {**t.columns, "nbytes": nbytes, "group": group, "kind": kind, "operation": operation}
    return replace(
        t, columns=columns, groups=tuple(groups), dataflow=dict(facts.reads), compiled=dict(facts.ops)
    )


def untangle(t: Timeline) -> Timeline:
    """Removes ops that only contain others (loops, calls), and moves ops that overlap on a device to separate lanes."""
    device = on_stream(t["kind"])
    container = np.array([bool(_CONTAINER.match(n)) for n in t.names], dtype=bool)[t["name"]] & device
    if container.any():
        t = t.select(~container)
        device = device[~container]
    lane = t["lane"].copy()
    lanes = list(t.lanes)
    for number, info in enumerate(t.lanes):
        mine = np.flatnonzero(device & (t["lane"] == number))
        if not info.device or len(mine) < 2:
            continue
        start, end = t["start_ns"][mine].tolist(), t.end_ns[mine].tolist()
        if all(b >= a for a, b in zip(end, start[1:], strict=False)):
            continue
        free = [-(1 << 62)]
        extra: dict[int, int] = {0: number}
        for e, s, f in zip(mine.tolist(), start, end, strict=True):
            slot = next((k for k, x in enumerate(free) if x <= s), len(free))
            if slot == len(free) and slot < _MOST_LANES:
                free.append(f)
                extra[slot] = len(lanes)
                lanes.append(Lane(rank=info.rank, name=f"{info.name}{BESIDE}{slot + 1}", device=True))
            slot = min(slot, len(free) - 1)
            free[slot] = max(free[slot], f)
            lane[e] = extra[slot]
    if len(lanes) == len(t.lanes):
        return t
    order = np.lexsort((-t["duration_ns"], t["start_ns"], lane))
    columns = {**{k: v[order] for k, v in t.columns.items()}, "lane": lane[order]}
    return replace(t, columns=columns, lanes=tuple(lanes))
