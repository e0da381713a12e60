"""Finds the ranks that others wait for in each iteration, and whether their device or their host made them late."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from pase.replay.measurement.model import Measured
from pase.replay.types import COLLECTIVE, KINDS, on_stream

__all__ = ["Straggler", "stragglers"]


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """One late rank in one iteration. Times are in ns; those of host and device are relative to the median rank."""

    rank: int
    iteration: int
    caused_ns: float
    """The total wait for this rank, of the rank that waited longest."""
    last: int
    """The number of collectives at which it arrived last."""
    of: int
    """The number of collectives that traced ranks share."""
    device_ns: float
    """How much longer its device computed."""
    host_ns: float
    """How much longer its launching threads worked."""

    @property
    def where(self) -> str:
        """The cause of its lateness: "device", "host" or "start"."""
        if max(self.device_ns, self.host_ns) < 0.25 * self.caused_ns:
            return "start"
        return "device" if self.device_ns >= self.host_ns else "host"


def stragglers(m: Measured, iterations: list[int]) -> list[Straggler]:
    """Returns every rank and iteration in which others waited for it; empty if the traces share no collective."""
    t = m.timeline
    start = t.global_start_ns()
    caused: defaultdict[tuple[int, int], defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    last: defaultdict[tuple[int, int], int] = defaultdict(int)
    shared: defaultdict[int, int] = defaultdict(int)
    for match in m.matches:
        if match.iteration not in iterations:
            continue
        shared[match.iteration] += 1
        latest = max(match.members, key=lambda r: float(start[match.members[r]]))
        last[latest, match.iteration] += 1
        for r, e in match.members.items():
            if r != latest:
                caused[latest, match.iteration][r] += m.wait_ns[e]
    device, host = _work(m, iterations)
    out = []
    for (rank, i), by_rank in sorted(caused.items()):
        out.append(
            Straggler(
                rank=rank,
                iteration=i,
                caused_ns=max(by_rank.values(), default=0.0),
                last=last[rank, i],
                of=shared[i],
                device_ns=device[rank, i] - float(np.median([v for (_, k), v in device.items() if k == i])),
                host_ns=host[rank, i] - float(np.median([v for (_, k), v in host.items() if k == i])),
            )
        )
    return out


def _work(
    m: Measured, iterations: list[int]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Returns (rank, iteration) → compute time of the device, and the same for the host's work without waits."""
    device: dict[tuple[int, int], float] = {}
    host: dict[tuple[int, int], float] = {}
    for (rank, i), p in m.programs.items():
        if i not in iterations:
            continue
        length = np.array(p.end, dtype=float) - np.array(p.start, dtype=float)
        for call, done in p.blocked.items():
            length[call] = p.end[call] - max(done, p.start[call])
        kind = np.array(p.kind)
        device[rank, i] = float(length[on_stream(kind) & (kind != COLLECTIVE)].sum())
        host[rank, i] = float(length[np.isin(kind, (KINDS.index("host"), KINDS.index("runtime")))].sum())
    return device, host
