"""Tells what a collective sends from what its ranks wait for, and compares its bandwidth with the link's.

A rank's collective begins when the rank arrives and transfers nothing until the last rank is there. So the member that
takes least time is the transfer, whatever the clocks say, and the starts on the common clock say who was waited for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pase.machine.load import load
from pase.machine.recognize import machine_named
from pase.replay.measurement.model import Measured
from pase.replay.types import COLLECTIVE, OPERATIONS, Timeline

__all__ = ["CollectiveCalls", "bus_factor", "link_bytes_per_s", "transfers"]


@dataclass(frozen=True, kw_only=True)
class CollectiveCalls:
    """The calls of one collective (operation, bytes, group) in the steady iterations. Times are medians over calls.

    nbytes: the larger of a rank's buffers; −1 if unknown. ways: ranks of the group, 0 if unknown; traced: those that
    the traces have. calls: in all iterations. transfer_ns: the time of the member that takes least. If a rank of the
    group is not traced, that includes waiting for it, so it is an upper bound.
    skew_ns: how much later the last rank starts than the first; None with fewer than two traced ranks, or if nothing
    ties their clocks. last: rank → the calls at which it arrived last; empty where skew_ns is None.
    link_bytes_per_s: of the link that the group crosses, in each direction; None if no machine file has the device.
    """

    operation: str
    nbytes: int
    group: str
    ways: int
    traced: int
    calls: int
    transfer_ns: float
    total_ns: float
    skew_ns: float | None
    last: dict[int, int] = field(default_factory=dict)
    link_bytes_per_s: float | None = None

    @property
    def whole(self) -> bool:
        """Whether all ranks of the group are traced, so that ``transfer_ns`` is without waiting."""
        return 1 < self.ways == self.traced

    @property
    def bus_bytes_per_s(self) -> float | None:
        """The bandwidth that each rank's link must carry, in each direction; None if bytes or ranks are unknown."""
        factor = bus_factor(self.operation, self.ways)
        if self.nbytes < 0 or factor is None or self.transfer_ns <= 0:
            return None
        return self.nbytes * factor / self.transfer_ns * 1e9


def bus_factor(operation: str, ways: int) -> float | None:
    """Returns the bytes that pass each rank's link, per byte of the larger buffer; None if that is not known.

    From the performance page of NVIDIA's nccl-tests ("bus bandwidth").

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("barrier", 8)
    (1.75, 0.875, None)
    """
    if ways < 2:
        return None
    if operation == "all_reduce":
        return 2 * (ways - 1) / ways
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ways - 1) / ways
    return 1.0 if operation in ("broadcast", "reduce", "send_recv", "permute") else None


def transfers(m: Measured, iterations: Iterable[int]) -> list[CollectiveCalls]:
    """Returns the collectives of these iterations, the one that transfers longest first."""
    t = m.timeline
    wanted = set(iterations)
    start = t.global_start_ns()
    tied = {r for r in t.ranks if np.isfinite(t.clock(r).uncertainty_ns)}
    calls: dict[tuple[int, int, int], list[dict[int, int]]] = defaultdict(list)
    matched: set[int] = set()
    for match in m.matches:
        if match.iteration in wanted:
            calls[_what(t, next(iter(match.members.values())))].append(match.members)
            matched.update(match.members.values())
    alone = np.flatnonzero((t["kind"] == COLLECTIVE) & np.isin(t["iteration"], list(wanted)))
    for e in alone.tolist():
        if e not in matched:
            calls[_what(t, e)].append({int(t.rank_of[e]): e})
    out = []
    for (operation, nbytes, group), found in calls.items():
        ranks = t.groups[group].ranks if group >= 0 else ()
        least = [min(int(t["duration_ns"][e]) for e in members.values()) for members in found]
        traced = {r for members in found for r in members}
        skews, last = [], Counter[int]()
        for members in found:
            if len(members) > 1 and tied.issuperset(members):
                at = {r: float(start[e]) for r, e in members.items()}
                skews.append(max(at.values()) - min(at.values()))
                last[max(at, key=lambda r: at[r])] += 1
        out.append(
            CollectiveCalls(
                operation=OPERATIONS[operation],
                nbytes=nbytes,
                group=t.groups[group].name if group >= 0 else "",
                ways=len(ranks) or (len(traced) if len(traced) > 1 else 0),
                traced=min(len(members) for members in found),
                calls=len(found),
                transfer_ns=float(np.median(least)),
                total_ns=float(sum(least)),
                skew_ns=float(np.median(skews)) if len(skews) == len(found) else None,
                last=dict(last.most_common()) if len(skews) == len(found) else {},
                link_bytes_per_s=link_bytes_per_s(t, ranks or tuple(sorted(traced))),
            )
        )
    return sorted(out, key=lambda x: -x.total_ns)


def _what(t: Timeline, e: int) -> tuple[int, int, int]:
    return int(t["operation"][e]), int(t["nbytes"][e]), int(t["group"][e])


def link_bytes_per_s(t: Timeline, ranks: tuple[int, ...]) -> float | None:
    """Returns the bandwidth of the slowest link level that a group crosses, by the machine file of its device.

    None if no file has the device. Unless the traces name the hosts, ranks are taken to fill one unit of a level (a
    node) after the other, as launchers number them.
    """
    known = [t.devices[r] for r in t.ranks if r in t.devices]
    found = machine_named(known[0]) if known else None
    if found is None or len(ranks) < 2:
        return None
    machine = load(found)
    hosts = {t.hosts[r] for r in ranks if r in t.hosts}
    units = 1
    for level in machine.levels:
        units *= level.ways or 1 << 30
        together = len({r // units for r in ranks}) == 1
        if level is machine.levels[0] and len(ranks) <= units and all(r in t.hosts for r in ranks):
            together = len(hosts) == 1
        if together:
            return level.bandwidth_at_ways.get(len(ranks), level.bandwidth_bytes_per_s)
    return None
