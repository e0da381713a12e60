"""Attributes each moment of an iteration to one op or one cause of idling, and compares ops with the card's rates.

Of the ops that run at a moment, computing ones count before collectives, and of these the one that began last. So the
ops' parts and the idle time add up to the iteration, to the nanosecond.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from pase.machine.recognize import device_named
from pase.machine.types import Device
from pase.replay.measurement.breakdown import CAUSES, breakdowns
from pase.replay.measurement.model import Measured
from pase.replay.measurement.origins import Origin, origins
from pase.replay.types import COLLECTIVE, on_stream

__all__ = ["Amount", "Spending", "file_dtype", "floor_ns", "peak_flops", "spendings"]

_PEAKS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "16-bit": "bfloat16",
    "tf32": "float32",
    "32-bit": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
    "8-bit": "float8_e4m3fn",
}
"""Precision → the dtype of the machine file that has its rate. float32 products use TF32, unless the kernel's name says
that they do not ("fp32")."""
_IDLE = list(CAUSES)[3:]


@dataclass(frozen=True, kw_only=True)
class Amount:
    """What the ops of one origin or kind take in the steady iterations together.

    calls, kernels: a call may run several kernels. clock_ns: the moments that are attributed to them; busy_ns: the sum
    of their durations. Both count overlapping ops differently. flops, nbytes: of those ops for which they are known;
    timed_ns, moved_ns: the durations of these. floor_ns: the least time by the card's rates; −1 if unknown.
    """

    calls: int
    kernels: int
    clock_ns: int
    busy_ns: int
    flops: int = 0
    nbytes: int = 0
    timed_ns: int = 0
    moved_ns: int = 0
    floor_ns: float = -1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Spending:
    """Where the time of one rank's steady iterations goes. ``kinds`` and ``idle`` add up to ``total_ns``.

    ops: by origin, most time first; events: origin → the device ops. idle: cause → ns. device: its rates, if a machine
    file has the device.
    """

    rank: int
    iterations: tuple[int, ...]
    total_ns: int
    kinds: dict[str, Amount]
    ops: dict[Origin, Amount]
    events: dict[Origin, tuple[int, ...]] = field(repr=False)
    idle: dict[str, int]
    device: Device | None
    device_name: str


def file_dtype(precision: str) -> str:
    """Returns the dtype of the machine file that has the rate of a precision; float32 for an unknown one."""
    return _PEAKS.get(precision, "float32")


def peak_flops(device: Device, precision: str) -> float | None:
    """Returns the card's FLOP/s in a precision; None if the machine file does not have it."""
    if precision == "fp32":
        return device.vector_flops
    return device.peak_flops.get(_PEAKS.get(precision, ""))


def floor_ns(origin: Origin, device: Device | None) -> float:
    """Returns the least time of a call by the card's rates, in ns; −1 if nothing is known of it."""
    if device is None:
        return -1.0
    peak = peak_flops(device, origin.precision)
    compute = origin.flops / peak if peak and origin.flops > 0 else -1.0
    memory = origin.nbytes / device.memory_bandwidth_bytes_per_s if origin.nbytes > 0 else -1.0
    found = max(compute, memory)
    return found * 1e9 if found > 0 else -1.0


def spendings(m: Measured) -> list[Spending]:
    """Returns where the time of each rank's steady iterations goes."""
    t = m.timeline
    rank_of = t.rank_of
    out = []
    for b in breakdowns(m):
        here = np.flatnonzero((rank_of == b.rank) & on_stream(t["kind"]))
        found = origins(t, b.rank)
        of = found.of
        name = t.devices.get(b.rank, "")
        device = device_named(name) if name else None
        clock: dict[int, int] = defaultdict(int)
        for i in b.iterations:
            span = m.iteration_of[b.rank, i]
            _attribute(m, here, span.begin_ns, span.end_ns, clock)
        mine = here[np.isin(t["iteration"][here], b.iterations)]
        events = sorted({*mine.tolist(), *clock})
        members: dict[Origin, list[int]] = defaultdict(list)
        for e in events:
            members[of[e]].append(e)
        counted = set(mine.tolist())
        ops = {
            o: _amount(o, es, {e: found.call[e] for e in es if e in counted}, clock, t["duration_ns"], device)
            for o, es in members.items()
        }
        idle = {c: sum(v for (k, _), v in b.parts.items() if k == c) for c in _IDLE}
        attributed = sum(clock.values()) + sum(idle.values())
        if attributed != b.total_ns:
            # Without a device (gloo), the ops of the threads compute.
            idle["host"] = b.total_ns - attributed
        out.append(
            Spending(
                rank=b.rank,
                iterations=b.iterations,
                total_ns=b.total_ns,
                kinds=_by_kind(ops),
                ops=dict(sorted(ops.items(), key=lambda x: -x[1].clock_ns)),
                events={o: tuple(e for e in es if e in counted) for o, es in members.items()},
                idle={c: ns for c, ns in idle.items() if ns},
                device=device,
                device_name=name,
            )
        )
    return out


def _attribute(m: Measured, ops: np.ndarray, low: int, high: int, clock: dict[int, int]) -> None:
    """Adds the moments of [low, high) to the op that each belongs to."""
    t = m.timeline
    ops = ops[(t["start_ns"][ops] < high) & (t.end_ns[ops] > low)]
    ops = ops[np.argsort(t["start_ns"][ops], kind="stable")]
    start, end = np.maximum(t["start_ns"][ops], low).tolist(), np.minimum(t.end_ns[ops], high).tolist()
    rank = (t["kind"][ops] == COLLECTIVE).tolist()
    running: list[tuple[bool, int, int]] = []
    at = low
    number = 0
    while number < len(ops) or running:
        until = start[number] if number < len(ops) else high
        while running and at < until:
            top = running[0][2]
            if end[top] <= at:
                heapq.heappop(running)
                continue
            to = min(end[top], until)
            clock[int(ops[top])] += to - at
            at = to
        at = max(at, until)
        if number < len(ops):
            # Computing ops first, then by the latest start.
            heapq.heappush(running, (rank[number], -number, number))
            number += 1
        elif at >= high:
            break


def _amount(
    origin: Origin,
    events: list[int],
    call_of: dict[int, int],
    clock: dict[int, int],
    duration: np.ndarray,
    device: Device | None,
) -> Amount:
    busy = int(duration[list(call_of)].sum())
    floor = floor_ns(origin, device)
    calls = len(set(call_of.values()))
    return Amount(
        calls=calls,
        kernels=len(call_of),
        clock_ns=sum(clock.get(e, 0) for e in events),
        busy_ns=busy,
        flops=max(origin.flops, 0) * calls,
        nbytes=max(origin.nbytes, 0) * calls,
        timed_ns=busy if origin.flops > 0 else 0,
        moved_ns=busy if origin.nbytes > 0 else 0,
        floor_ns=floor * calls if floor >= 0 else -1.0,
    )


def _by_kind(ops: dict[Origin, Amount]) -> dict[str, Amount]:
    """Returns the sums over the ops of each kind, most time first."""
    groups: dict[str, list[Amount]] = defaultdict(list)
    for origin, amount in ops.items():
        groups[origin.kind].append(amount)
    sums = {
        kind: Amount(
            **{
                k: sum(getattr(a, k) for a in group)
                for k in (
                    "calls",
                    "kernels",
                    "clock_ns",
                    "busy_ns",
                    "flops",
                    "nbytes",
                    "timed_ns",
                    "moved_ns",
                )
            },
            floor_ns=sum(max(a.floor_ns, 0.0) for a in group)
            if any(a.floor_ns >= 0 for a in group)
            else -1.0,
        )
        for kind, group in groups.items()
    }
    return dict(sorted(sums.items(), key=lambda x: -x[1].clock_ns))
